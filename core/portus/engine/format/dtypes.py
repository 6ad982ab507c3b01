"""The bytes of an element of each dtype, by torch's name for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_NAMES: Final = {
    1: (
        "bool uint8 int8 bits8 bits1x8 bits2x4 bits4x2 "
        "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 "
        "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
    ),
    2: "uint16 int16 float16 bfloat16 bits16",
    4: "uint32 int32 float32 complex32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}

ITEM_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {name: size for size, names in _NAMES.items() for name in names.split()}
)
"""Bytes of an element, by torch's name without the ``torch.``."""
