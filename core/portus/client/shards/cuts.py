"""torch's metadata of a sharded checkpoint as plain values: how tensors are cut, who holds what.

Nothing of it is pickled on the medium. It is kept in columns: all offsets, all sizes, all ranks and
so on, each as one array of numbers. A job of many ranks has a piece of every tensor on each of
them, and a rank that loads asks for its own tensors only; what it does not ask for stays numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from portus.client.state.pack import pack, unpack
from portus.errors import CorruptionError, UsageError

FORMAT: Final = 3
"""Before 2 the metadata was not packed, before 3 it was not in columns."""
FORMAT_KEY: Final = "format"
METADATA: Final = "metadata"
CHECKPOINT_ID: Final = "checkpoint_id"
ITEMS: Final = "items"
"""What a rank's part is: its format number; in one part of a group, torch's metadata and what the
checkpoint was saved as; and the shards by key. Files of a checkpoint directory have their own names
beside these."""

KEYS: Final = frozenset({FORMAT_KEY, METADATA, CHECKPOINT_ID, ITEMS})

ENTRIES: Final = "entries"
"""Only in what was saved before format 3."""
PLANNER: Final = "planner"

_NUMBER_MAX: Final = (1 << 63) - 1

Entry = TensorStorageMetadata | BytesStorageMetadata
Column = npt.NDArray[np.integer[Any]]

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ItemLocation:
    """Where an item is: the rank whose part holds it, and under which key."""

    rank: int
    key: str


_NOWHERE: Final = ItemLocation(0, "")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: ItemLocation


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
            pieces = [_piece(name, *each, placed) for each in enumerate(entry.chunks)]
        except KeyError as error:
            raise CorruptionError(f"{name}: no rank has its piece at {error}") from error
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = Cut(dtype, tuple(entry.size), pieces)
    return tensors, others


def _piece(
    name: str,
    number: int,
    chunk: ChunkStorageMetadata,
    placed: Mapping[MetadataIndex, ItemLocation],
) -> Piece:
    at = placed[MetadataIndex(name, chunk.offsets, number)]
    return Piece(tuple(chunk.offsets), tuple(chunk.sizes), at)


def encode(metadata: Metadata, placed: Mapping[MetadataIndex, ItemLocation]) -> bytes:
    """What ``decode`` reads. Packed, so that the next save of the same state has it already.

    Raises ``UsageError`` for pieces that do not fit their tensor.
    """
    table = _table(metadata, placed)
    columns = {each.name: getattr(table, each.name) for each in fields(table)}
    return pack({**columns, PLANNER: metadata.planner_data})


def decode(saved: Any) -> tuple[Metadata, Mapping[MetadataIndex, ItemLocation]]:
    """torch's metadata, and where each piece is. What is asked for is made then, a tensor at a
    time; pickled, all is plain dicts. Raises ``CorruptionError``."""
    try:
        if isinstance(saved, bytes):
            saved = unpack(saved)
        if ENTRIES in saved:
            return _decode_entries(saved)
        rows = _Rows(_Table(**{each.name: saved[each.name] for each in fields(_Table)}))
        places = _Lazy(rows.indices, rows.place)
        entries: Any = _Lazy(rows.row_of.__iter__, rows.entry)
        return Metadata(entries, saved[PLANNER], places), places
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"metadata of a sharded checkpoint: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """All of it, in columns.

    For each of ``names``: ``kinds`` (0: no tensor; n: of ``properties[n - 1]``, which are dtype and
    requires_grad), how many ``dims``, and ``counts`` of pieces. For each piece, those of a name
    side by side: ``ranks``, and ``keys`` (0: nobody has it; n: ``key_names[n - 1]``). For each
    dimension: ``shapes`` of tensors, ``offsets`` and ``sizes`` of pieces. ``others``: name, offset,
    rank and key of what is no piece of a tensor.
    """

    names: list[str]
    kinds: Column
    dims: Column
    counts: Column
    properties: list[tuple[torch.dtype, bool]]
    ranks: Column
    keys: Column
    key_names: list[str]
    shapes: Column
    offsets: Column
    sizes: Column
    others: list[tuple[str, list[int] | None, int, str]]


def _table(metadata: Metadata, placed: Mapping[MetadataIndex, ItemLocation]) -> _Table:
    held: dict[str, dict[tuple[int, ...] | None, ItemLocation]] = {}
    for index, place in placed.items():
        held.setdefault(index.fqn, {})[index.offset] = place
    kinds: list[int] = []
    dims: list[int] = []
    counts: list[int] = []
    ranks: list[int] = []
    keys: list[int] = []
    shapes: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    properties: dict[tuple[torch.dtype, bool], int] = {}
    key_names: dict[str, int] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            kinds.append(0)
            dims.append(0)
            counts.append(0)
            continue
        kind = (entry.properties.dtype, entry.properties.requires_grad)
        kinds.append(properties.setdefault(kind, len(properties) + 1))
        dims.append(len(entry.size))
        counts.append(len(entry.chunks))
        shapes += entry.size
        mine = held.get(name, {})
        for chunk in entry.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
                raise UsageError(f"{name}: it has shape {entry.size}, and a piece of it {chunk}")
            at = mine.get(chunk.offsets, _NOWHERE)
            ranks.append(at.rank)
            is_there = at is not _NOWHERE
            keys.append(key_names.setdefault(at.key, len(key_names) + 1) if is_there else 0)
            offsets += chunk.offsets
            sizes += chunk.sizes
        for chunk in entry.chunks:
            mine.pop(chunk.offsets, None)
    return _Table(
        names=list(metadata.state_dict_metadata),
        kinds=_narrow(kinds),
        dims=_narrow(dims),
        counts=_narrow(counts),
        properties=list(properties),
        ranks=_narrow(ranks),
        keys=_narrow(keys),
        key_names=list(key_names),
        shapes=_narrow(shapes),
        offsets=_narrow(offsets),
        sizes=_narrow(sizes),
        others=[
            (name, None if offset is None else list(offset), at.rank, at.key)
            for name, rest in held.items()
            for offset, at in rest.items()
        ],
    )


def _narrow(values: list[int]) -> Column:
    """Return ``values``, none of them negative, as a column of the smallest type that fits."""
    column = np.array(values, np.uint64)  # raises for one that is
    return column.astype(np.min_scalar_type(column.max(initial=0)))


class _Rows:
    """The rows of a table, by name; values are made when they are asked for.

    Raises ``ValueError`` where the columns do not fit together, and what nonsense raises.
    """

    def __init__(self, table: _Table) -> None:
        names, pieces, boxes = len(table.names), len(table.ranks), len(table.offsets)
        self._table: Final = table
        self._counts: Final = _wide(table.counts, names, pieces)
        self._dims: Final = _wide(table.dims, names, len(table.shapes))
        self._kinds: Final = _wide(table.kinds, names, len(table.properties))
        self._ranks: Final = _wide(table.ranks, pieces)
        self._keys: Final = _wide(table.keys, pieces, len(table.key_names))
        self._shapes: Final = _wide(table.shapes, len(table.shapes))
        self._offsets: Final = _wide(table.offsets, boxes)
        self._sizes: Final = _wide(table.sizes, boxes)
        self._piece_at: Final = _starts(self._counts, pieces)
        self._shape_at: Final = _starts(self._dims, len(self._shapes))
        self._box_at: Final = _starts(self._dims * self._counts, boxes)
        self.row_of: Final = {name: row for row, name in enumerate(table.names)}
        if len(self.row_of) < names:
            raise ValueError("a name twice")
        if not all(isinstance(each, str) for each in (*table.names, *table.key_names)):
            raise TypeError("a name that is not text")
        for dtype, requires_grad in table.properties:
            if (type(dtype), type(requires_grad)) != (torch.dtype, bool):
                raise TypeError(f"no properties of tensors: {dtype!r:.80}, {requires_grad!r:.80}")
        self._others: Final = {
            MetadataIndex(name, offset): ItemLocation(rank, key)
            for name, offset, rank, key in table.others
        }

    def entry(self, name: str) -> Entry:
        """What torch knows of ``name``. Raises ``KeyError``."""
        row = self.row_of[name]
        if not self._kinds[row]:
            return BytesStorageMetadata()
        dtype, requires_grad = self._table.properties[self._kinds[row] - 1]
        shape = self._shapes[self._shape_at[row] : self._shape_at[row + 1]].tolist()
        boxes = (self._boxes(each, row).tolist() for each in (self._offsets, self._sizes))
        chunks = list(map(ChunkStorageMetadata, *(map(torch.Size, each) for each in boxes)))
        properties = TensorProperties(dtype=dtype, requires_grad=requires_grad)
        return TensorStorageMetadata(properties, torch.Size(shape), chunks)

    def place(self, index: MetadataIndex) -> ItemLocation:
        """Where it is. Raises ``KeyError``."""
        if index in self._others:
            return self._others[index]
        row = self.row_of[index.fqn]
        if index.offset is None or not self._kinds[row] or len(index.offset) != self._dims[row]:
            raise KeyError(index)
        boxes, offset = self._boxes(self._offsets, row), np.array(index.offset, np.int64)
        number = index.index  # torch's hint: without it all pieces are looked at
        if number is None or not (0 <= number < len(boxes) and np.all(boxes[number] == offset)):
            alike = np.flatnonzero(np.all(boxes == offset, axis=1))
            if not len(alike):
                raise KeyError(index)
            number = int(alike[0])
        piece = self._piece_at[row] + number
        if not self._keys[piece]:
            raise KeyError(index)
        return ItemLocation(int(self._ranks[piece]), self._table.key_names[self._keys[piece] - 1])

    def indices(self) -> Iterator[MetadataIndex]:
        """All that has a place."""
        yield from self._others
        for name, row in self.row_of.items():
            there = self._keys[self._piece_at[row] : self._piece_at[row + 1]]
            offsets = self._boxes(self._offsets, row)[there > 0].tolist()
            yield from dict.fromkeys(MetadataIndex(name, offset) for offset in offsets)

    def _boxes(self, column: Column, row: int) -> Column:
        """The numbers of each piece of a name, a row for each."""
        numbers = column[self._box_at[row] : self._box_at[row + 1]]
        return numbers.reshape(self._counts[row], self._dims[row])


def _wide(column: Column, length: int, limit: int | None = None) -> Column:
    """Numbers to reckon with. Raises ``ValueError`` for any but ``length`` of them to ``limit``."""
    if column.dtype.kind != "u" or column.shape != (length,):
        raise ValueError(f"expected {length} numbers, found {column!r:.80}")
    highest = int(column.max(initial=0))
    if highest > _NUMBER_MAX or (limit is not None and highest > limit):
        raise ValueError(f"expected numbers up to {limit}, found {highest}")
    return column.astype(np.int64)


def _starts(counts: Column, total: int) -> Column:
    """Where the numbers of each row begin, and where the last ones end."""
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    if starts[-1] != total or np.any(starts < 0):
        raise ValueError(f"expected {total} numbers in all, found {starts[-1]}")
    return starts


class _Lazy(Mapping[Key, Value]):
    """A mapping whose values are made when they are asked for, once."""

    def __init__(self, keys: Callable[[], Iterator[Key]], make: Callable[[Key], Value]) -> None:
        self._keys: Final = keys
        self._make: Final = make
        self._made: Final[dict[Key, Value]] = {}

    def __getitem__(self, key: Key) -> Value:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._make(key)
        return found

    def __iter__(self) -> Iterator[Key]:
        return self._keys()

    def __len__(self) -> int:
        return sum(1 for _ in self._keys())

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """A plain dict: stock torch reads what it pickles without Portus."""
        return dict, (dict(self),)


def _decode_entries(
    saved: dict[str, Any],
) -> tuple[Metadata, Mapping[MetadataIndex, ItemLocation]]:
    """Return the metadata, and where each item is, from the form used before format 3."""
    entries: dict[str, Entry] = {
        name: BytesStorageMetadata() if entry is None else _decode_tensor(entry)
        for name, entry in saved[ENTRIES].items()
    }
    placed = {
        MetadataIndex(name, offset): ItemLocation(rank, key)
        for name, offset, rank, key in saved["placed"]
    }
    return Metadata(entries, saved[PLANNER], placed), placed


def _decode_tensor(entry: dict[str, Any]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in entry["chunks"]
    ]
    properties = TensorProperties(dtype=entry["dtype"], requires_grad=entry["requires_grad"])
    return TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
