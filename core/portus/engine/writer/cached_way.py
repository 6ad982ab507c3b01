"""``CachedWay``: an image is written through the page cache, and reaches the disk later.

For a spare, whose pages are in memory, it costs little more than a copy to memory, and the fence
opens before the bytes reach the disk. The same holds on tmpfs. Every file system can do it: with
writes, from a small buffer that stays warm. ``MappedWay`` copies to the pages themselves.

Bytes that a spare has already are not written again: the frozen part of a model, say. Bytes are
compared with the file, not with a record of it: others may have written to it while it had a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.local import BATCH, FIRST, Engine
from portus.engine.copying.segments import Column, Crcs, Digests, Segments, Stop
from portus.engine.image.image import Image, Literal
from portus.engine.media import linux
from portus.engine.media.addresses import AddressRange
from portus.engine.media.file_calls import fill_holes, write_all
from portus.engine.spec import Extent
from portus.engine.writer.ring import RingTasks, StagingRing
from portus.engine.writer.ways import Way

COMPARED_MIN: Final = 64 << 10
"""Bytes of a unit from which a comparison with the spare pays."""

_SPARSE: Final = 4
"""The most bytes of the file for each copied byte that are worth mapping."""


class CachedWay:
    """The way into the open file ``number``. volatile: it is only in memory. is_spare: it has old
    bytes. ``kept_bytes``: the number of these that equalled the new bytes, and stay."""

    kind: Final = Way.CACHED

    def __init__(
        self, number: int, image: Image, ring: StagingRing, *, volatile: bool, is_spare: bool
    ) -> None:
        self._tasks: Final = RingTasks(ring)
        self._number: Final = number
        self._size: Final = image.size
        self._volatile: Final = volatile
        self._is_spare: Final = is_spare
        self._kept: Final = ctypes.c_int64(0)

    @property
    def kept_bytes(self) -> int:
        return self._kept.value

    def cut(self, offset: Column, length: Column) -> tuple[Column, Column]:
        """Return the runs of the file for bytes at ``offset``: unchanged."""
        return offset, length

    def move(
        self, engine: Engine, segments: Segments, digests: Digests, crcs: Crcs, stop: Stop
    ) -> None:
        """Copy segments, each a unit, to their offsets."""
        seem = self._seem_there(segments)
        for some, move in ((~seem, self._move), (seem, self._keep)):
            for batch in segments.part(some).batches(BATCH):
                move(engine, batch, digests, crcs, stop)
                if not self._volatile:
                    self._tasks.run(partial(self._start_writeback, batch.box()))

    def _move(
        self, engine: Engine, batch: Segments, digests: Digests, crcs: Crcs, stop: Stop
    ) -> None:
        engine.move(batch, batch.offset, digests, stop, crcs, self._number)

    def _keep(
        self, engine: Engine, batch: Segments, digests: Digests, crcs: Crcs, stop: Stop
    ) -> None:
        """Write only bytes that differ from those of the spare."""
        engine.move(batch, batch.offset, digests, stop, crcs, self._number, self._kept)

    def _seem_there(self, segments: Segments) -> NDArray[np.bool_]:
        """Return a mask of the segments that begin with the spare's bytes at their places."""
        seem = np.zeros(len(segments), np.bool_)
        if not self._is_spare:
            return seem
        rows = np.flatnonzero(segments.length >= COMPARED_MIN)
        columns = rows, segments.address[rows], segments.offset[rows]
        for row, address, offset in zip(*(each.tolist() for each in columns), strict=True):
            # Compare with the file: while it had a name, others may have written (decision 0202).
            with contextlib.suppress(OSError):  # unreadable bytes are written
                begin = os.pread(self._number, FIRST, offset)
                seem[row] = begin == ctypes.string_at(address, FIRST)
        return seem

    def _start_writeback(self, extent: Extent) -> None:
        """Start to write ``extent`` back, on a thread of the ring: a wait for the copy is no wait
        for the disk."""
        linux.start_writeback(self._number, extent.offset, extent.length)

    def bytes_at(self, offset: Column, length: Column) -> NDArray[np.uint8] | None:
        """Return bytes that were stored, at offsets of the file."""
        pieces = zip(length.tolist(), offset.tolist(), strict=True)
        found = b"".join([os.pread(self._number, size, place) for size, place in pieces])
        return np.frombuffer(found, np.uint8)

    def put(self, literal: Literal) -> None:
        """Write the bytes of a literal."""
        write_all(self._number, memoryview(literal.data), literal.offset)

    def finish(self) -> None:
        """Return when all of it is on the medium."""
        self._tasks.drain()
        # A spare may be longer than the image.
        os.ftruncate(self._number, self._size)
        # Includes the new length; fsync would write the times as well.
        os.fdatasync(self._number)

    def close(self) -> None:
        """Return when no write is in flight."""
        self._tasks.drain()


class MappedWay(CachedWay):
    """The same through addresses, for spares of file systems that overwrite blocks in place.

    Writes to one file wait for each other, and have the kernel copy the bytes a second time; this
    avoids both. No process may truncate the file meanwhile; no other process knows its name.
    """

    def __init__(self, number: int, path: str, image: Image, ring: StagingRing) -> None:
        """Raise ``OSError`` if a block is missing: a store there would be SIGBUS."""
        super().__init__(number, image, ring, volatile=False, is_spare=True)
        # On a full disk a store to a page without a block is SIGBUS.
        fill_holes(number, image.size, every_block_counts=False)
        self._addresses: Final = AddressRange(path, image.size)
        try:
            self._addresses.map(image.size, number)
        except BaseException:
            self._addresses.close()
            raise

    def _move(
        self, engine: Engine, batch: Segments, digests: Digests, crcs: Crcs, stop: Stop
    ) -> None:
        box = batch.box()
        # To map and populate all of it would cost more than to write the parts.
        if box.length > _SPARSE * int(batch.length.sum()):
            super()._move(engine, batch, digests, crcs, stop)
            return
        self._addresses.populate(box)
        engine.move(batch, self._addresses.start + batch.offset, digests, stop, crcs)

    def _start_writeback(self, extent: Extent) -> None:
        self._addresses.release(extent)
        super()._start_writeback(extent)

    def close(self) -> None:
        super().close()
        self._addresses.close()  # after the drain: write-back releases pages of it
