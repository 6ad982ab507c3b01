"""``Ways``: the way in which files are written, chosen by measurements on their file system.

Neither way wins everywhere. Where pages are in memory and their blocks exist, the page cache costs
as much as a copy. Where space is fresh, its pages cost as well, and more in a virtual machine. So
each way is tried in turn for the first files of a kind, and the faster one is preferred from then
on: the usual one, unless the other is much faster. Now and then the other one gets a file, since
disks and neighbours change.
"""

from __future__ import annotations

import enum
import statistics
import threading
from collections import deque
from typing import Final, NamedTuple

MEASURED_MIN: Final = 16 << 20
"""Bytes from which the time of a file is a measure."""

TRIES: Final = 2
"""Files that each way gets before one is preferred."""

AGAIN: Final = 32
"""One of this many files goes the way that is not preferred."""

_REMEMBERED: Final = 5

_FASTER: Final = 0.75
"""The part of the usual way's time below which the other one is preferred: a smaller gain is noise,
and a fence opens sooner the usual way."""


class Way(str, enum.Enum):
    """CACHED: through the page cache. DIRECT: past it, from buffers."""

    CACHED = "cached"
    DIRECT = "direct"


class Kind(NamedTuple):
    """A group of similar files: ``device``, their file system (``st_dev``); and if they are
    spares."""

    device: int
    is_spare: bool

    @property
    def ways(self) -> tuple[Way, Way]:
        """The usual way, before any measurement, and the other one."""
        return (Way.CACHED, Way.DIRECT) if self.is_spare else (Way.DIRECT, Way.CACHED)


class Ways:
    """The times of the files of this process. Threads may share it."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._took: Final[dict[tuple[Kind, Way], deque[float]]] = {}
        self._files: Final[dict[Kind, int]] = {}
        self._had_most: Final[set[tuple[Kind, int]]] = set()
        """Files, by their sizes, that have most of their bytes before they are written."""

    def choose(self, kind: Kind, size: int) -> Way:
        """Return the way for a file of ``size`` bytes."""
        with self._lock:
            if (kind, size) in self._had_most:
                return Way.CACHED
            if size < MEASURED_MIN:  # too little to tell, so it does not count as a try
                return self._preferred_way(kind)
            number = self._files[kind] = self._files.get(kind, 0) + 1
            preferred = self._preferred_way(kind)
            tried = [len(self._took.get((kind, way), ())) for way in kind.ways]
            if min(tried) < TRIES:
                return kind.ways[tried[1] < tried[0]]
            # Disks and neighbours change, so the other way is measured again now and then.
            return preferred if number % AGAIN else kind.ways[preferred is kind.ways[0]]

    def took(self, kind: Kind, way: Way, size: int, seconds: float, kept: int = 0) -> None:
        """Note how long ``size`` bytes took, from the first one to all of them on the medium. kept:
        bytes that the file had already. Such a time is no measure; with most, the next goes
        ``CACHED``."""
        with self._lock:
            self._had_most.discard((kind, size))
            # Bytes that need not be written say nothing about how fast writing is.
            if kept > size // 2:
                self._had_most.add((kind, size))
            elif size >= MEASURED_MIN and not kept:
                times = self._took.setdefault((kind, way), deque(maxlen=_REMEMBERED))
                times.append(seconds / size)

    def speeds(self, kind: Kind) -> dict[Way, int]:
        """Return the measured speed of each way, in bytes per second: medians, the preferred way
        first."""
        with self._lock:
            took = {way: self._took[kind, way] for way in Way if (kind, way) in self._took}
            speeds = {way: int(1 / statistics.median(times)) for way, times in took.items()}
            preferred = self._preferred_way(kind)
        return dict(sorted(speeds.items(), key=lambda each: each[0] is not preferred))

    def _preferred_way(self, kind: Kind) -> Way:
        if any((kind, way) not in self._took for way in Way):
            return kind.ways[0]
        usual, other = (statistics.median(self._took[kind, way]) for way in kind.ways)
        return kind.ways[other < _FASTER * usual]
