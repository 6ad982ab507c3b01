"""The safetensors format: which tensors of a version fit, and its header.

Source: https://github.com/huggingface/safetensors#format : 8 bytes with the length of the header,
little-endian; the header, JSON; the tensors, contiguous, end to end without gaps. The package of
that name writes what is in memory as a whole; an export has no more than a piece of it there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

from portus.errors import UsageError
from portus.format.dtypes import ITEM_SIZES
from portus.spec import TensorSpec

DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "uint32": "U32",
        "int32": "I32",
        "uint64": "U64",
        "int64": "I64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2": "F8_E5M2",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
    }
)
"""By torch's name, what safetensors calls a dtype."""

HEADER_MAX: Final = 100_000_000
"""Bytes; readers refuse more."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor, its name in the file, and its size in bytes."""

    name: str
    spec: TensorSpec
    size: int


def place(tensors: Mapping[str, TensorSpec]) -> list[PlacedTensor]:
    """Every tensor, in the order of the file: wide elements first, so that all are aligned; and
    neighbours in a storage side by side.

    Raises ``UsageError`` naming what safetensors cannot hold.
    """
    odd = {name: spec.dtype for name, spec in tensors.items() if spec.dtype not in DTYPES}
    if odd:
        name, dtype = next(iter(odd.items()))
        raise UsageError(
            f"{name} is {dtype}, which safetensors does not support ({len(odd)} such tensors); "
            "leave it out with --names, or export to a .pt file"
        )
    if "__metadata__" in tensors:
        raise UsageError("a tensor is called __metadata__; leave it out with --names")
    placed = [
        PlacedTensor(name, spec, prod(spec.shape) * ITEM_SIZES[spec.dtype])
        for name, spec in tensors.items()
    ]
    return sorted(
        placed, key=lambda p: (-ITEM_SIZES[p.spec.dtype], p.spec.storage, p.spec.offset, p.name)
    )


def header(placed: Sequence[PlacedTensor], metadata: Mapping[str, str]) -> bytes:
    """What stands before the bytes of the tensors, its own length included.

    Raises ``UsageError`` if it would be too long.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for each in placed:
        fields[each.name] = {
            "dtype": DTYPES[each.spec.dtype],
            "shape": list(each.spec.shape),
            "data_offsets": [offset, offset + each.size],
        }
        offset += each.size
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > HEADER_MAX:
        raise UsageError(
            f"{len(placed)} tensors are too many for one safetensors file; use --names"
        )
    return len(raw).to_bytes(8, "little") + raw


def shared(tensors: Mapping[str, TensorSpec]) -> list[list[str]]:
    """Names of tensors that share memory, which a safetensors file cannot express."""
    users: dict[int, list[str]] = {}
    for name, spec in tensors.items():
        users.setdefault(spec.storage, []).append(name)
    return [names for names in users.values() if len(names) > 1]
