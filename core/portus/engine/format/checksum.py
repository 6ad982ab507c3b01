"""Checksums of saved bytes: xxh3_128 over units of 16 MiB."""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

# A digest costs a millionth of its bytes. Buffers for direct writes and messages to storage hosts
# hold one unit; the formats of pools and files depend on it.
UNIT: Final = 16 << 20
"""Bytes of a storage under one checksum; the last unit of a storage may be shorter."""

DIGEST_SIZE: Final = 16


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the xxh3_128 of ``data`` with seed 0, 16 bytes, most significant first."""
    return xxhash.xxh3_128_digest(data)


def unit_count(length: int) -> int:
    """Return the units of a storage of ``length`` bytes: 1 for an empty storage."""
    return max(1, -(-length // UNIT))


def unit_counts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``unit_count`` of each of these lengths."""
    counts: NDArray[np.int64] = np.maximum(1, -(-lengths // UNIT))
    return counts
