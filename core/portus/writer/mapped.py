"""``MappedWay``: an image is copied to the pages of its file, by their addresses.

For a spare whose pages are in memory, and for tmpfs: the copy costs what a copy to memory costs,
and the system writes the pages back. Only where a block that is there never needs a new one: a
store to an address cannot run out of space.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.image.image import Image, Literal
from portus.media import linux
from portus.media.addresses import AddressRange
from portus.media.file import fill_holes
from portus.transport.base import Column, Crcs, Digests, Segments, Stop, bytes_at
from portus.transport.local import BATCH, Engine


class MappedWay:
    """The pages of the file ``number``, which gets the size of the image."""

    def __init__(self, number: int, path: str, image: Image, *, volatile: bool) -> None:
        """volatile: the file is in memory alone. Raises ``OSError``, ``MediumError``."""
        self._number: Final = number
        self._size: Final = image.size
        self._volatile: Final = volatile
        os.ftruncate(number, image.size)
        fill_holes(number, image.size, every_block_counts=volatile)
        self._addresses: Final = AddressRange(path, image.size)
        self._addresses.map(image.size, number, huge=volatile)

    def cut(self, offset: Column, length: Column) -> tuple[Column, Column]:
        """Runs of the file for bytes at ``offset``: as they are."""
        return offset, length

    def move(
        self, engine: Engine, segments: Segments, digests: Digests, crcs: Crcs, stop: Stop
    ) -> None:
        """Copy segments to their offsets."""
        for batch in segments.batches(BATCH):
            self._check_size()
            target = batch.offset + self._addresses.start
            runs = batch.runs() if not self._volatile else []
            for run in runs:
                self._addresses.populate(run)
            engine.move(batch, target, digests, stop, crcs)
            for run in runs:
                self._addresses.release(run)
                linux.start_writeback(self._number, run.offset, run.length)

    def bytes_at(
        self, storage: Column, at: Column, offset: Column, length: Column
    ) -> NDArray[np.uint8] | None:
        """Bytes that were stored, at offsets ``at`` of the file."""
        self._check_size()
        return bytes_at(self._addresses.start + at, length)

    def put(self, literal: Literal) -> None:
        """Store bytes."""
        data, done = memoryview(literal.data), 0
        while done < len(data):
            done += os.pwrite(self._number, data[done:], literal.offset + done)

    def finish(self) -> None:
        """Return when all of it is on the medium."""
        os.fdatasync(self._number)

    def close(self) -> None:
        """Give the addresses back."""
        self._addresses.close()

    def _check_size(self) -> None:
        """To store to the pages of a file that somebody cut off would end the process."""
        found = os.fstat(self._number).st_size
        if found < self._size:
            raise OSError(None, f"expected {self._size} bytes, found {found}: somebody cut it off")
