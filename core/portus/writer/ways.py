"""``Ways``: which way files are written, by what was measured on their file system.

Neither way wins everywhere. Where pages are in memory and their blocks are there, the page cache
costs what a copy costs; where space is fresh, its pages do, and more in a virtual machine. So each
way is tried in turn for the first files of a kind, and the faster one is taken from then on. Now
and then the other one gets a file, since disks and neighbours change.
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


class Way(str, enum.Enum):
    """CACHED: through the page cache. DIRECT: past it, from buffers."""

    CACHED = "cached"
    DIRECT = "direct"


class Kind(NamedTuple):
    """Files that are alike: ``device``, their file system (``st_dev``); whether they are spares."""

    device: int
    is_spare: bool

    @property
    def default(self) -> Way:
        """The way before anything was measured."""
        return Way.CACHED if self.is_spare else Way.DIRECT


class Ways:
    """What the files of this process took. Threads may share it."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._took: Final[dict[tuple[Kind, Way], deque[float]]] = {}
        self._files: Final[dict[Kind, int]] = {}
        self._refused: Final[set[int]] = set()
        """File systems on which nothing is written directly."""

    def choose(self, kind: Kind, size: int) -> Way:
        """Return the way for a file of ``size`` bytes."""
        with self._lock:
            if kind.device in self._refused:
                return Way.CACHED
            if size < MEASURED_MIN:
                return self._preferred(kind)
            number = self._files[kind] = self._files.get(kind, 0) + 1
            preferred = self._preferred(kind)
            other = Way.DIRECT if preferred is Way.CACHED else Way.CACHED
            tried = {way: len(self._took.get((kind, way), ())) for way in (preferred, other)}
            if min(tried.values()) < TRIES:
                return min(tried, key=lambda way: tried[way])
            return preferred if number % AGAIN else other

    def refused(self, device: int) -> None:
        """Nothing is written directly on this file system."""
        with self._lock:
            self._refused.add(device)

    def took(self, kind: Kind, way: Way, size: int, seconds: float) -> None:
        """Note how long ``size`` bytes took, from the first one to all of them on the medium."""
        if size >= MEASURED_MIN:
            with self._lock:
                times = self._took.setdefault((kind, way), deque(maxlen=_REMEMBERED))
                times.append(seconds / size)

    def preferred(self, kind: Kind) -> Way:
        """Return the faster way so far."""
        with self._lock:
            return Way.CACHED if kind.device in self._refused else self._preferred(kind)

    def _preferred(self, kind: Kind) -> Way:
        if any((kind, way) not in self._took for way in Way):
            return kind.default
        return min(Way, key=lambda way: statistics.median(self._took[kind, way]))
