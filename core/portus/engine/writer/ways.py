"""``Ways``: which way files are written, by what was measured on their file system.

Neither way wins everywhere. Where pages are in memory and their blocks are there, the page cache
costs what a copy costs; where space is fresh, its pages do, and more in a virtual machine. So each
way is tried in turn for the first files of a kind, and the faster one is taken from then on: the
usual one, unless the other is faster by far. Now and then the other one gets a file, since disks
and neighbours change.
"""

from __future__ import annotations

import enum
import statistics
import threading
from collections import deque
from typing import Final, NamedTuple

MEASURED_MIN: Final = 16 << 20
"""Bytes from which the time of a file says something."""

TRIES: Final = 2
"""Files that each way gets before one is preferred."""

AGAIN: Final = 32
"""Each so many files, the way that is not preferred gets one."""

_REMEMBERED: Final = 5

_FASTER: Final = 0.75
"""The part of the time of the usual way below which the other one is preferred: less than that is
noise, and a fence opens sooner the usual way."""


class Way(str, enum.Enum):
    """CACHED: through the page cache. DIRECT: past it, from buffers."""

    CACHED = "cached"
    DIRECT = "direct"


class Kind(NamedTuple):
    """Files that are alike: ``device``, their file system (``st_dev``); whether they are spares."""

    device: int
    is_spare: bool

    @property
    def ways(self) -> tuple[Way, Way]:
        """The usual way, before anything was measured, and the other one."""
        return (Way.CACHED, Way.DIRECT) if self.is_spare else (Way.DIRECT, Way.CACHED)


class Ways:
    """What the files of this process took. Threads may share it."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._took: Final[dict[tuple[Kind, Way], deque[float]]] = {}
        self._files: Final[dict[Kind, int]] = {}
        self._had_most: Final[set[tuple[Kind, int]]] = set()
        """Files, by their sizes, that have most of their bytes before they are written."""
        self._refused: Final[set[int]] = set()
        """File systems on which nothing is written directly."""

    def choose(self, kind: Kind, size: int) -> Way:
        """Return the way for a file of ``size`` bytes."""
        with self._lock:
            if kind.device in self._refused or (kind, size) in self._had_most:
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

    def note_refusal(self, device: int) -> None:
        """Note that this file system takes no direct writes."""
        with self._lock:
            self._refused.add(device)

    def took(self, kind: Kind, way: Way, size: int, seconds: float, kept: int = 0) -> None:
        """Note how long ``size`` bytes took, from the first one to all of them on the medium. kept:
        so many of them were there; this is no measure then, and the page cache alone can tell."""
        with self._lock:
            self._had_most.discard((kind, size))
            # Bytes that need not be written say nothing about how fast writing is.
            if kept > size // 2:
                self._had_most.add((kind, size))
            elif size >= MEASURED_MIN and not kept:
                times = self._took.setdefault((kind, way), deque(maxlen=_REMEMBERED))
                times.append(seconds / size)

    def speeds(self, kind: Kind) -> dict[Way, int]:
        """Return what was measured of each way, in bytes per second: medians, the preferred way
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
