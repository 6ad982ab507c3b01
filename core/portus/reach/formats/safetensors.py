"""The safetensors file: its layout, with the order and the names of the package, and its reader.

Source: https://github.com/huggingface/safetensors#format : 8 bytes with the length of the header,
little-endian; the header, JSON; the tensors, contiguous, end to end without gaps. The header may
end in spaces: here they make the tensors begin at a multiple of a page, for direct writes. The
digests are in the header, as a value of its ``__metadata__``, in hex.

The reader trusts no bytes of a file. Damage raises ``CorruptionError``; no number in a file causes
a read beyond its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import xxhash

from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.format.nesting import refuse_deep
from portus.engine.image.digests import MAGIC, pack, record_length, size_noted, unpack
from portus.engine.image.image import (
    Column,
    Crcs,
    Digests,
    Image,
    Literal,
    Read,
    StoredFile,
    exactly,
)
from portus.engine.image.torch_zip import ZIP
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, UsageError, printable

DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "uint64": "U64",
        "int64": "I64",
        "float64": "F64",
        "complex64": "C64",
        "float32": "F32",
        "uint32": "U32",
        "int32": "I32",
        "bfloat16": "BF16",
        "float16": "F16",
        "uint16": "U16",
        "int16": "I16",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int8": "I8",
        "uint8": "U8",
        "bool": "BOOL",
    }
)
"""The names of dtypes in safetensors, by torch's names, in the order of the package."""

HEADER_MAX: Final = 100_000_000
"""Bytes of a header, at most; readers refuse longer ones."""

SUFFIX: Final = ".safetensors"
"""The end of the names of such files."""

LENGTH_SIZE: Final = 8
"""Bytes of the length of the header."""

METADATA: Final = "__metadata__"
DIGESTS: Final = "portus.digests"
NOTE: Final = "portus.note"
SAVE: Final = "portus.save"
"""The keys of our values in the metadata: the digests, the note of the save, and in a file of a
sharded checkpoint the number of the save."""

BEGIN: Final = f'{{"{METADATA}":{{"{DIGESTS}":"'.encode()
"""The beginning of the header of a file with digests; their hex digits follow."""

_ORDER: Final = {name: number for number, name in enumerate(DTYPES.values())}
_SIZES: Final = {code: ITEM_SIZES[name] for name, code in DTYPES.items()}
_MAGIC: Final = MAGIC.hex()


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a file. ``dtype``: its name in safetensors. ``size``: in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int

    @property
    def rank(self) -> tuple[int, str]:
        """The sort key of the package: in this order all tensors are aligned to their elements."""
        return _ORDER[self.dtype], self.name


def safetensors_image(tensors: Sequence[NamedTensor], metadata: Mapping[str, str]) -> Image:
    """Return the image of a safetensors file. tensors: in its order, each one a storage.

    Raises ``UsageError`` if there are too many.
    """
    lengths: Column = np.array([each.size for each in tensors], np.int64)
    hex_length = 2 * record_length(lengths)
    # Zeros of the same length hold the place: the digests are known only after the copy.
    noted = {DIGESTS: "0" * hex_length}
    # Ours comes first, the only valid place (`BEGIN`); one copied from another file is dropped.
    noted |= {key: value for key, value in metadata.items() if key != DIGESTS}
    begin = _header(tensors, noted)
    at = LENGTH_SIZE + len(BEGIN)
    offset: Column = len(begin) + np.cumsum(lengths) - lengths
    size = len(begin) + int(lengths.sum())

    def literals(digests: Digests, crcs: Crcs) -> Sequence[Literal]:
        before, behind = begin[:at], begin[at + hex_length :]
        # The header too, except for the digits themselves, which the record's own digest covers.
        rest = xxhash.xxh3_128(before + behind).digest()
        record = pack(size, lengths, digests, rest)
        return [Literal(0, before + record.hex().encode() + behind)]

    return Image(size=size, offset=offset, length=lengths, literals=literals)


def _header(tensors: Sequence[NamedTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before those of the tensors, with the length of the header. metadata: comes
    first, in its order."""
    fields: dict[str, object] = {METADATA: dict(metadata)}
    offset = 0
    for each in tensors:
        fields[each.name] = {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data_offsets": [offset, offset + each.size],
        }
        offset += each.size
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces: the format allows them only at the end of the header.
    raw += b" " * (-(LENGTH_SIZE + len(raw)) % PAGE)
    if len(raw) > HEADER_MAX:
        raise UsageError(
            f"{len(tensors)} tensors are too many for one safetensors file: its header would have "
            f"{len(raw)} bytes, of at most {HEADER_MAX}"
        )
    return len(raw).to_bytes(LENGTH_SIZE, "little") + raw


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


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """The facts of a tensor in a header."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


def _tensors(fields: Mapping[str, Any], where: str) -> list[tuple[NamedTensor, int]]:
    """Return each tensor, and the offset of its bytes behind the header."""
    found = []
    for name, said in fields.items():
        try:
            entry = msgspec.convert(said, _Entry)
        except msgspec.ValidationError as error:
            raise CorruptionError(
                f"{where}: {printable(name)}: expected the name of a dtype, sizes and two offsets, "
                f"found {said!r:.200}: {error}"
            ) from error
        begin, end = entry.data_offsets
        width = _SIZES.get(entry.dtype)
        expected = max(0, end - begin) if width is None else prod(entry.shape) * width
        if expected != end - begin:
            raise CorruptionError(
                f"{where}: {printable(name)}: expected {expected} bytes for {entry.dtype} of shape "
                f"{list(entry.shape)}, found {end - begin}"
            )
        found.append((NamedTensor(name, entry.dtype, entry.shape, expected), begin))
    return found


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
    digests, noted = unpack(record, size, lengths, where)
    at = LENGTH_SIZE + len(BEGIN)
    rest = xxhash.xxh3_128(head[:at] + head[at + len(text) :]).digest()
    if rest != noted:
        raise CorruptionError(f"{where} does not match its digest")
    return digests
