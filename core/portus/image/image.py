"""``Image``: where every byte of a file will be, before any storage is copied.

An image is literal bytes and storages, each at a known offset. A format is a function from a state
to an image; whoever writes images knows no format. What depends on the stored bytes (checksums, a
directory that has them) is asked for by ``tail`` once all storages were copied. Its places are
known from the start, so the size of the file is too.
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
empty storage has one row, the digest of nothing."""

Crcs = NDArray[np.uint32]
"""(n,) uint32: the CRC32 of each storage."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes at an offset of a file."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """The offset right after them."""
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The layout of one file of ``size`` bytes.

    ``literals``: bytes that are known now, in order of their offsets. ``offset`` and ``length``: of
    each storage, in bytes; storages do not overlap, nor do literals. ``tail``: given the digests
    and the CRCs of what was stored of each storage, returns the bytes that depend on them, in order
    of their offsets. Bytes that neither literals, storages nor the tail cover are zero.
    """

    size: int
    literals: Sequence[Literal]
    offset: Column
    length: Column
    tail: Callable[[Digests, Crcs], Sequence[Literal]]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.length):
            raise UsageError(
                f"storages of an image: {len(self.offset)} offsets, {len(self.length)} lengths"
            )
