"""``CachedWay``: an image is written through the page cache, from a small buffer that stays warm.

For a spare, whose pages are in memory, it costs what a copy to memory costs, and the fence opens
before the disk has anything. So it does on tmpfs. And it is what every file system can do.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.image.image import Image, Literal
from portus.media import linux
from portus.media.file import write_all
from portus.transport.base import Column, Crcs, Digests, Segments, Stop
from portus.transport.local import BATCH, Engine


class CachedWay:
    """The way into the open file ``number``. volatile: it is in memory alone."""

    def __init__(self, number: int, image: Image, *, volatile: bool) -> None:
        self._number: Final = number
        self._size: Final = image.size
        self._volatile: Final = volatile

    def cut(self, offset: Column, length: Column) -> tuple[Column, Column]:
        """Runs of the file for bytes at ``offset``: as they are."""
        return offset, length

    def move(
        self, engine: Engine, segments: Segments, digests: Digests, crcs: Crcs, stop: Stop
    ) -> None:
        """Copy segments to their offsets."""
        for batch in segments.batches(BATCH):
            engine.move(batch, batch.offset, digests, stop, crcs, self._number)
            if not self._volatile:
                box = batch.box()
                linux.start_writeback(self._number, box.offset, box.length)

    def bytes_at(self, offset: Column, length: Column) -> NDArray[np.uint8] | None:
        """Bytes that were stored, at offsets of the file."""
        pieces = zip(length.tolist(), offset.tolist(), strict=True)
        found = b"".join([os.pread(self._number, size, place) for size, place in pieces])
        return np.frombuffer(found, np.uint8)

    def put(self, literal: Literal) -> None:
        """Write bytes."""
        write_all(self._number, memoryview(literal.data), literal.offset)

    def finish(self) -> None:
        """Return when all of it is on the medium."""
        os.ftruncate(self._number, self._size)
        os.fdatasync(self._number)

    def close(self) -> None:
        """Nothing is in flight."""
