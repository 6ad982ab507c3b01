"""torch's metadata of a sharded checkpoint as plain values: how tensors are cut, who holds what.

Nothing of it is pickled on the medium.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from portus.client.pack import pack, unpack
from portus.errors import CorruptionError

FORMAT: Final = 2
"""Before 2 the metadata was not packed."""
FORMAT_KEY: Final = "format"
METADATA: Final = "metadata"
CHECKPOINT_ID: Final = "checkpoint_id"
ITEMS: Final = "items"
"""What a rank's part is: its format number; in one part of a group, torch's metadata and what the
checkpoint was saved as; and the shards by key. Files of a checkpoint directory have their own names
beside these."""

KEYS: Final = frozenset({FORMAT_KEY, METADATA, CHECKPOINT_ID, ITEMS})


@dataclass(frozen=True, slots=True)
class Placed:
    """Where an item is: the rank whose part holds it, and under which key."""

    rank: int
    key: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: Placed


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor, as a whole and in pieces. ``dtype``: torch's name without the ``torch.``."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]


def cuts(saved: Any) -> tuple[dict[str, Cut], list[str]]:
    """The tensors of what ``encode`` made, by name, and the names of its other values.

    Raises ``CorruptionError``.
    """
    metadata, placed = decode(saved)
    tensors: dict[str, Cut] = {}
    others = []
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            others.append(name)
            continue
        try:
            pieces = [_piece(name, each, placed) for each in entry.chunks]
        except KeyError as error:
            raise CorruptionError(f"{name}: nobody has its piece at {error}") from error
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = Cut(dtype, tuple(entry.size), pieces)
    return tensors, others


def _piece(name: str, chunk: ChunkStorageMetadata, placed: dict[MetadataIndex, Placed]) -> Piece:
    at = placed[MetadataIndex(name, chunk.offsets)]
    return Piece(tuple(chunk.offsets), tuple(chunk.sizes), at)


def encode(metadata: Metadata, placed: dict[MetadataIndex, Placed]) -> bytes:
    """What ``decode`` reads. Packed, so that the next save of the same state has it already."""
    entries = {}
    for name, entry in metadata.state_dict_metadata.items():
        entries[name] = None if isinstance(entry, BytesStorageMetadata) else _encode_tensor(entry)
    places = [
        (index.fqn, None if index.offset is None else list(index.offset), at.rank, at.key)
        for index, at in placed.items()
    ]
    return pack({"entries": entries, "planner": metadata.planner_data, "placed": places})


def _encode_tensor(entry: TensorStorageMetadata) -> dict[str, Any]:
    return {
        "dtype": entry.properties.dtype,
        "requires_grad": entry.properties.requires_grad,
        "size": list(entry.size),
        "chunks": [(list(chunk.offsets), list(chunk.sizes)) for chunk in entry.chunks],
    }


def decode(saved: Any) -> tuple[Metadata, dict[MetadataIndex, Placed]]:
    """torch's metadata, and where each piece is. Raises ``CorruptionError``."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    if isinstance(saved, bytes):
        saved = unpack(saved)
    try:
        for name, entry in saved["entries"].items():
            entries[name] = BytesStorageMetadata() if entry is None else _decode_tensor(entry)
        placed = {
            MetadataIndex(name, offset): Placed(rank, key)
            for name, offset, rank, key in saved["placed"]
        }
        metadata = Metadata(entries, saved["planner"], placed)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"metadata of a sharded checkpoint: {error!r}") from error
    return metadata, placed


def _decode_tensor(entry: dict[str, Any]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in entry["chunks"]
    ]
    properties = TensorProperties(dtype=entry["dtype"], requires_grad=entry["requires_grad"])
    return TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
