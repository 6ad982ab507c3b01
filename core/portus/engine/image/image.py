"""``Image``: the place of every byte of a file, before any storage is copied.

An image is literal bytes and storages, each at a known offset. A format is a function from a state
to an image; a writer of images knows no format. Some literal bytes depend on the stored ones
(checksums, a directory that has them), so ``literals`` is called once all storages were copied. All
places are known from the start, and so is the size of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portus.errors import UsageError

Column = NDArray[np.int64]
"""(n,) int64."""

Digests = NDArray[np.uint8]
"""(units, 16) uint8: xxh3_128 of each unit (16 MiB) of each storage, one storage after another. An
empty storage has one row, the digest of no bytes."""

Crcs = NDArray[np.uint32]
"""(n,) uint32: the CRC32 of each storage."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes at an offset of a file."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The layout of one file of ``size`` bytes.

    ``offset`` and ``length``: of each storage, in bytes; storages do not overlap, nor do literals.
    ``literals``: takes the digests and CRCs of the stored storages, and returns all bytes around
    them, in order of their offsets. Bytes that neither literals nor storages cover are zero.
    """

    size: int
    offset: Column
    length: Column
    literals: Callable[[Digests, Crcs], Sequence[Literal]]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.length):
            raise UsageError(
                f"storages of an image: {len(self.offset)} offsets, {len(self.length)} lengths"
            )


def bytes_image(data: bytes) -> Image:
    """Return the image of a file of these bytes, without storages."""
    none = np.zeros(0, np.int64)

    def literals(digests: Digests, crcs: Crcs) -> Sequence[Literal]:
        return [Literal(0, data)]

    return Image(size=len(data), offset=none, length=none, literals=literals)
