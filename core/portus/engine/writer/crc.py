"""The CRC32 of bytes from those of their parts.

A CRC32 is a polynomial over GF(2) modulo ``_POLYNOMIAL``, bits reversed. Appending n bytes to a
part multiplies its CRC by x^(8 n). Source: the manual of zlib, ``crc32_combine``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31
_X: Final = 1 << 30


def join(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC32 of all bytes, given that of each part and its length in bytes."""
    total = 0
    for crc, length in parts:
        total = _product(_power(8 * length), total) ^ crc if total else crc
    return total


def _product(one: int, other: int) -> int:
    result, bit = 0, _ONE
    while bit and other:
        if one & bit:
            result ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return result


@lru_cache(maxsize=64)
def _power(exponent: int) -> int:
    """Return x to the power of ``exponent``."""
    result, square = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _product(square, result)
        square = _product(square, square)
        exponent >>= 1
    return result
