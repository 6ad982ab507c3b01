"""Reads a safetensors file: the places of its tensors, and the digests that verify them.

The reader trusts no bytes of a file. Damage raises ``CorruptionError``; no number in a file causes
a read beyond its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import xxhash

from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.format.nesting import refuse_deep
from portus.engine.image.digests import MAGIC, size_noted, unpack
from portus.engine.image.image import Column, Digests, Read, StoredFile, exactly
from portus.engine.image.torch_zip import ZIP
from portus.errors import CorruptionError, printable
from portus.reach.formats.safetensors import (
    BEGIN,
    DIGESTS,
    DTYPES,
    HEADER_MAX,
    LENGTH_SIZE,
    METADATA,
    NOTE,
    NamedTensor,
)

_SIZES: Final = {code: ITEM_SIZES[name] for name, code in DTYPES.items()}
_MAGIC: Final = MAGIC.hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile(StoredFile):
    """The contents of a safetensors file. ``keys``: names of tensors, in the order of the file.
    ``metadata``: values of other tools."""

    tensors: tuple[NamedTensor, ...]
    metadata: Mapping[str, str]
    note: str | None


def is_safetensors(begin: bytes) -> bool:
    """Return whether a file that begins with these 9 bytes may be one."""
    length = int.from_bytes(begin[:LENGTH_SIZE], "little")
    if begin.startswith(ZIP):  # as a length it would be 64 MiB
        return False
    return 2 <= length <= HEADER_MAX and begin[LENGTH_SIZE : LENGTH_SIZE + 1] == b"{"


def read_safetensors(read: Read, size: int, name: str) -> SafetensorsFile:
    """Return the contents of the file ``name`` of ``size`` bytes.

    Verifies the header if the file has digests. Raises ``CorruptionError`` if the file is damaged
    or no safetensors file.
    """
    where = f"{name}: the header"
    begin = exactly(read, 0, LENGTH_SIZE, name)
    length = int.from_bytes(begin, "little")
    if not 2 <= length <= min(HEADER_MAX, size - LENGTH_SIZE):
        raise CorruptionError(f"{where}: expected 2 to {size - LENGTH_SIZE} bytes, found {length}")
    raw = exactly(read, LENGTH_SIZE, length, name)
    fields = _parse(raw, where)
    metadata = fields.pop(METADATA, {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise CorruptionError(f"{where}: expected texts in {METADATA}, found {metadata!r:.200}")
    found = sorted(_tensors(fields, where), key=lambda each: (each[1], each[0].size))
    tensors = tuple(tensor for tensor, _ in found)
    reached = 0
    for tensor, at in found:
        # No gaps and no overlaps, as the package demands: no digest would cover bytes there.
        if at != reached:
            raise CorruptionError(
                f"{where}: {printable(tensor.name)}: expected its bytes at {reached}, found {at}"
            )
        reached += tensor.size
    data_at = LENGTH_SIZE + length
    if data_at + reached != size:
        raise CorruptionError(f"{name}: expected {data_at + reached} bytes, found {size}")
    lengths: Column = np.array([each.size for each in tensors], np.int64)
    return SafetensorsFile(
        name=name,
        size=size,
        keys=tuple(each.name for each in tensors),
        offset=data_at + np.cumsum(lengths) - lengths,
        length=lengths,
        digests=_digests(begin + raw, metadata, size, lengths, where),
        tensors=tensors,
        metadata={key: value for key, value in metadata.items() if key not in (DIGESTS, NOTE)},
        note=metadata.get(NOTE),
    )


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        # Here the last of two would win, in another reader perhaps the first.
        if len(found) != len(pairs):
            raise CorruptionError(f"{where}: two entries have one name")
        return found

    try:
        # Before json reads it: deep nesting would exhaust the stack.
        refuse_deep(raw)
        fields = json.loads(raw.decode(), object_pairs_hook=unique)
    except ValueError as error:
        raise CorruptionError(f"{where}: expected JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptionError(f"{where}: expected an object, found {fields!r:.200}")
    return fields


def _tensors(fields: Mapping[str, Any], where: str) -> list[tuple[NamedTensor, int]]:
    """Return each tensor, and the offset of its bytes behind the header."""
    found = []
    for name, said in fields.items():
        if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
            raise CorruptionError(
                f"{where}: {printable(name)}: expected dtype, shape and data_offsets, found "
                f"{said!r:.200}"
            )
        dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
        if not (
            isinstance(dtype, str)
            and _are_counts(shape)
            and _are_counts(offsets)
            and len(offsets) == 2
            and offsets[0] <= offsets[1]
        ):
            raise CorruptionError(
                f"{where}: {printable(name)}: expected the name of a dtype, sizes and two offsets, "
                f"found {said!r:.200}"
            )
        size = offsets[1] - offsets[0]
        if dtype in _SIZES and prod(shape) * _SIZES[dtype] != size:
            raise CorruptionError(
                f"{where}: {printable(name)}: expected {prod(shape) * _SIZES[dtype]} bytes for "
                f"{dtype} of shape {shape}, found {size}"
            )
        found.append((NamedTensor(name, dtype, tuple(shape), size), offsets[0]))
    return found


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _digests(
    head: bytes, metadata: Mapping[str, str], size: int, lengths: Column, where: str
) -> Digests | None:
    """Return the digests in the header, and verify that; None if Portus did not write the file.

    Other tools copy values of the metadata, ours too, into files of their own: then the digests are
    at another place, or of a file of another size.
    """
    text = metadata.get(DIGESTS)
    if text is None or not text.startswith(_MAGIC):
        if text is None and not any(each.startswith(_MAGIC) for each in metadata.values()):
            return None
        raise CorruptionError(f"{where}: the digests are damaged, or their name is")
    if not head.startswith(BEGIN, LENGTH_SIZE):
        return None
    try:
        record = bytes.fromhex(text)
    except ValueError as error:
        raise CorruptionError(f"{where}: the digests: {error}") from error
    # One spelling: the digest does not cover these digits, so they must not vary.
    if record.hex() != text:
        raise CorruptionError(f"{where}: the digests: expected lower case, without spaces")
    if size_noted(record) not in (None, size):
        return None
    noted = unpack(record, size, lengths, where)
    at = LENGTH_SIZE + len(BEGIN)
    rest = xxhash.xxh3_128(head[:at] + head[at + len(text) :]).digest()
    if rest != noted.rest:
        raise CorruptionError(f"{where} does not match its digest")
    return noted.digests
