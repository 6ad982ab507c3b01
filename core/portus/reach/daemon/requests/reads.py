"""Reads: bytes of the pool for a client, their digests, and pins of versions meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

import numpy as np

from portus.engine.copying.local import check
from portus.engine.copying.segments import Column, Sources
from portus.errors import UsageError
from portus.reach.daemon.requests.guest import STORAGE_MOVED, Guest, is_reached
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Said, column, handles, ranges
from portus.reach.transport.one_sided import RemoteStorages
from portus.reach.transport.stream import give_from

PINS_MAX: Final = said.IDS_MAX
_PIN: Final = 256
_RANGE_MOVED: Final = 64
"""Bytes of memory that these take at most; measured."""


class ReadRequests:
    """Answers what a client asks of the bytes of the pool."""

    def __init__(self, guest: Guest) -> None:
        self._guest: Final = guest
        self._pins: Final[Counter[int]] = Counter()

    @property
    def pins(self) -> int:
        """How many versions it holds. From any thread."""
        return len(self._pins)

    def unpin_all(self) -> None:
        """Hold nothing any more."""
        for version, count in self._pins.items():
            for _ in range(count):
                self._guest.writer.locks.unpin(version)
        self._pins.clear()

    def _read(self, message: said.Read) -> Said:
        start = time.perf_counter()
        offsets, lengths = ranges(message.ranges, "ranges")
        self._inside(offsets, lengths)
        give_from(self._guest.link, self._guest.writer.medium, offsets, lengths)
        self._guest.counters.add("read_bytes", int(lengths.sum()))
        self._guest.counters.took("read", time.perf_counter() - start)
        return said.Done()

    def _check(self, message: said.Check) -> Said:
        lengths = column(message.lengths, "lengths")
        offsets, sizes = ranges(message.ranges, "ranges")
        self._inside(offsets, sizes)
        size = self._guest.writer.medium.size
        if int(sizes.sum()) > size:
            raise UsageError(f"check: {int(sizes.sum())} bytes, of a pool of {size}")
        self._guest.link.room(STORAGE_MOVED * len(lengths) + _RANGE_MOVED * len(sizes))
        moved = Sources(
            address=np.ones(len(lengths), np.int64),
            length=lengths,
            extent_offset=offsets,
            extent_length=sizes,
        )
        with self._guest.hashing() as stop:
            return said.Checked(check(self._guest.writer.medium, moved, stop).tobytes())

    def _push(self, message: said.Push) -> Said:
        start = time.perf_counter()
        lengths = column(message.lengths, "lengths")
        offsets, sizes = ranges(message.ranges, "ranges")
        self._inside(offsets, sizes)
        self._guest.link.room(STORAGE_MOVED * len(lengths) + _RANGE_MOVED * len(sizes))
        remote = RemoteStorages(*handles(message.handles, len(lengths), "push"))
        lane = self._guest.lane
        if lane is None or lane.closed or not is_reached(remote, lengths):
            raise UsageError("push: not connected by verbs, or storages without a handle")
        moved = Sources(
            address=remote.address,
            length=lengths,
            extent_offset=offsets,
            extent_length=sizes,
        )
        done = self._guest.transfer(lane.push, remote, moved)
        self._guest.counters.add("read_bytes", moved.size)
        self._guest.counters.took("read", time.perf_counter() - start)
        return said.Pushed(done.digests.tobytes(), done.bounced)

    def _pin(self, message: said.Pin) -> Said:
        if len(self._pins) >= PINS_MAX:
            raise UsageError(f"more than {PINS_MAX} versions are pinned")
        with self._guest.keep_memory(_PIN if message.version not in self._pins else 0):
            self._guest.writer.locks.pin(message.version)
            self._pins[message.version] += 1
        return said.Done()

    def _unpin(self, message: said.Unpin) -> Said:
        if not self._pins[message.version]:
            raise UsageError(f"version {message.version} is not pinned")
        self._guest.writer.locks.unpin(message.version)
        self._pins[message.version] -= 1
        if not self._pins[message.version]:
            del self._pins[message.version]
            self._guest.link.keep(-_PIN)
        return said.Done()

    def _inside(self, offsets: Column, lengths: Column) -> None:
        size = self._guest.writer.medium.size
        if len(offsets) and int((offsets + lengths).max()) > size:
            raise UsageError(f"ranges: the pool has {size} bytes")
