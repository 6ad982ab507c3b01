"""``StagedWay``: an image is copied to the buffers of a ring, and written past the page cache.

For fresh space: fresh pages of the cache cost more than the disk in virtual machines. Whole blocks
of storages are written as soon as a buffer is full. The rest, the ends of storages and the bytes
between them, is kept in memory, and written at the end, through the cache: only then is all of it
known.
"""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.local import Engine
from portus.engine.copying.segments import (
    PROBE,
    PROBE_EACH,
    Column,
    Crcs,
    Digests,
    Segments,
    Stop,
    bytes_at,
    ranges,
    unit_spans,
)
from portus.engine.image.image import Image, Literal
from portus.engine.media.file_calls import write_all
from portus.engine.spec import PAGE
from portus.engine.writer.ring import SLOT, RingTasks, Slot, StagingRing
from portus.engine.writer.ways import Way

_WHOLE_MIN: Final = 64 << 10
"""Bytes of whole blocks of a unit from which they are written separately."""

_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)


def set_direct(number: int, *, on: bool) -> bool:
    """Have writes to an open file bypass the page cache, or not. Return False if its file system
    cannot do that."""
    import fcntl  # Windows has none

    # On the draft's only descriptor: the file's mode may forbid to open a second one.
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    try:
        fcntl.fcntl(number, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:
        return False
    return bool(_O_DIRECT)


class StagedWay:
    """The way into the open file ``number``, for which ``set_direct`` was done, through ``ring``.

    Offset, length and memory of each direct write are multiples of a page.
    """

    kind: Final = Way.DIRECT
    kept_bytes: Final = 0
    """Always 0: no byte is compared with the old ones of the file."""

    def __init__(self, number: int, image: Image, ring: StagingRing) -> None:
        self._number: Final = number
        self._ring: Final = ring
        self._size: Final = image.size
        low, high = _whole_blocks(*unit_spans(image.offset, image.length))
        order = np.flatnonzero(high > low)
        order = order[np.argsort(low[order], kind="stable")]
        self._low: Final = low[order]
        self._high: Final = high[order]
        starts = np.concatenate([[0], self._high])
        ends = np.concatenate([self._low, [image.size]])
        self._rest_offset: Final = starts
        self._rest_length: Final = ends - starts
        self._rest_at: Final = np.cumsum(self._rest_length) - self._rest_length
        self._rest: Final = np.zeros(int(self._rest_length.sum()), np.uint8)
        self._tasks: Final = RingTasks(ring)
        self._failure: OSError | None = None
        self._probes: Final[list[tuple[Column, NDArray[np.uint8]]]] = []
        """Offsets in the file, and the bytes there, that an audit may read."""
        filled = np.flatnonzero(image.length)
        filled = filled[np.argsort(image.offset[filled], kind="stable")]
        self._starts: Final = image.offset[filled]
        self._lengths: Final = image.length[filled]
        self._is_probed: Final = not bool((self._starts % PROBE).any())

    def cut(self, offset: Column, length: Column) -> tuple[Column, Column]:
        """Return the runs of the file for units at ``offset``, cut at the ends of whole blocks."""
        low, high = _whole_blocks(offset, length)
        starts = np.stack([offset, low, high], axis=1)
        sizes = np.stack([low, high, offset + length], axis=1) - starts
        return starts[sizes > 0], sizes[sizes > 0]

    def move(
        self, engine: Engine, segments: Segments, digests: Digests, crcs: Crcs, stop: Stop
    ) -> None:
        """Copy segments, and write the whole blocks."""
        for batch in segments.batches(SLOT):
            self._raise_failure()
            index = np.searchsorted(self._low, batch.offset, "right") - 1
            whole = index >= 0
            whole[whole] = batch.offset[whole] < self._high[index[whole]]
            target = np.empty(len(batch), np.int64)
            target[~whole] = self._rest.ctypes.data + self._place_in_rest(batch.offset[~whole])
            if not whole.any():
                engine.move(batch, target, digests, stop, crcs)
                self._probe(batch, target)
                continue
            # Not straight from the tensors: O_DIRECT needs aligned memory, so the layout of a file
            # would depend on addresses (decision 0202).
            slot = self._ring.take(stop)
            try:
                length = batch.length[whole]
                within = np.cumsum(length) - length
                target[whole] = slot.address + within
                engine.move(batch, target, digests, stop, crcs)
                self._probe(batch, target)
            except BaseException:
                self._ring.give(slot)
                raise
            runs = list(
                zip(batch.offset[whole].tolist(), within.tolist(), length.tolist(), strict=True)
            )
            self._tasks.run(partial(self._write, slot, runs))

    def bytes_at(self, offset: Column, length: Column) -> NDArray[np.uint8] | None:
        """Return bytes that passed, at offsets of the file; None if they were not noted."""
        if not self._probes:
            return None
        noted, data = (np.concatenate(column) for column in zip(*self._probes, strict=True))
        order = np.argsort(noted, kind="stable")
        place = np.minimum(np.searchsorted(noted[order], offset), len(noted) - 1)
        if not np.array_equal(noted[order][place], offset) or int(length.max(initial=0)) > PROBE:
            return None
        rows = data[order[place]]
        return rows[np.arange(PROBE) < length[:, None]]

    def put(self, literal: Literal) -> None:
        """Keep bytes for the end. No literal overlaps whole blocks of a storage."""
        if literal.data:
            at = int(self._place_in_rest(np.array([literal.offset]))[0])
            self._rest[at : at + len(literal.data)] = np.frombuffer(literal.data, np.uint8)

    def finish(self) -> None:
        """Write the rest; return when all of it is on the medium."""
        self._tasks.drain()
        self._raise_failure()
        # The rest is not aligned, so a direct write would fail with EINVAL.
        set_direct(self._number, on=False)
        # These pages were never written directly, not even in part, so the cache need not read them
        # from the disk first.
        for offset, at, length in zip(
            self._rest_offset.tolist(),
            self._rest_at.tolist(),
            self._rest_length.tolist(),
            strict=True,
        ):
            write_all(self._number, self._rest[at : at + length].data, offset)
        os.ftruncate(self._number, self._size)
        os.fdatasync(self._number)

    def close(self) -> None:
        """Return when no write is in flight."""
        self._tasks.drain()

    def _place_in_rest(self, offset: Column) -> Column:
        run = np.searchsorted(self._rest_offset, offset, "right") - 1
        place: Column = self._rest_at[run] + offset - self._rest_offset[run]
        return place

    def _probe(self, batch: Segments, target: Column) -> None:
        """Note the bytes just copied that an audit may read."""
        if not self._is_probed:
            return
        # Noted now: past the page cache, only the disk would have them afterwards.
        owner = np.searchsorted(self._starts, batch.offset, "right") - 1
        begin = batch.offset - self._starts[owner]
        first = -(-begin // PROBE_EACH) * PROBE_EACH
        count = np.maximum(0, -(-(begin + batch.length - first) // PROBE_EACH))
        row = np.repeat(np.arange(len(batch)), count)
        each = first[row] + ranges(np.zeros_like(count), count) * PROBE_EACH
        last = (self._lengths[owner] - 1) // PROBE * PROBE
        has_last = np.flatnonzero((begin <= last) & (last < begin + batch.length))
        row, start = np.concatenate([row, has_last]), np.concatenate([each, last[has_last]])
        length = np.minimum(PROBE, self._lengths[owner[row]] - start)
        order = np.argsort(length, kind="stable")  # as ``bytes_at`` is fast
        rows = np.zeros((len(row), PROBE), np.uint8)  # with zeros after shorter pieces
        rows[np.arange(PROBE) < length[order, None]] = bytes_at(
            (target[row] + start - begin[row])[order], length[order]
        )
        self._probes.append(((self._starts[owner[row]] + start)[order], rows))

    def _write(self, slot: Slot, runs: list[tuple[int, int, int]]) -> None:
        """Write ``runs`` from ``slot``, then give the slot back; on a thread of the ring."""
        try:
            for offset, at, length in runs:
                if self._failure is not None:
                    break
                self._write_run(slot.memory[at : at + length], offset)
        except OSError as error:
            self._failure = self._failure or error
        finally:
            self._ring.give(slot)

    def _write_run(self, data: memoryview, offset: int) -> None:
        try:
            write_all(self._number, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This file system takes the flag and refuses the write, maybe on several threads.
            set_direct(self._number, on=False)
            write_all(self._number, data, offset)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _whole_blocks(start: Column, length: Column) -> tuple[Column, Column]:
    """Return the beginning and the end of the whole blocks of each unit; both are its start if they
    are too few to be written separately."""
    low, high = -(-start // PAGE) * PAGE, (start + length) // PAGE * PAGE
    is_short = high - low < _WHOLE_MIN
    return np.where(is_short, start, low), np.where(is_short, start, high)
