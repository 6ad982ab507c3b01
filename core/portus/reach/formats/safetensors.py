"""The layout of a safetensors file: order and names of the tensors are those of the package.

Source: https://github.com/huggingface/safetensors#format : 8 bytes with the length of the header,
little-endian; the header, JSON; the tensors, contiguous, end to end without gaps. The header may
end in spaces: here they make the tensors begin at a multiple of a page, for direct writes. The
digests are in the header, as a value of its ``__metadata__``, in hex.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import xxhash

from portus.engine.image.digests import pack, record_length
from portus.engine.image.image import Column, Crcs, Digests, Image, Literal
from portus.engine.spec import PAGE
from portus.errors import UsageError

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
