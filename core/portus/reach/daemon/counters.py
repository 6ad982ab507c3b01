"""The numbers that a host counts."""

from __future__ import annotations

import bisect
import threading
from typing import Final

from portus.reach.protocol.messages import Fault

COUNTED: Final = {
    "connections": "admitted connections",
    "refused": "refused connections",
    "saves": "versions that were committed",
    "abandoned": "saves that ended without a version",
    "pulled_bytes": "bytes received into pools",
    "verbs_bytes": "bytes moved by verbs, into pools and out of them",
    "bounced_bytes": "bytes of these that went through a buffer",
    "shared_bytes": "bytes that versions share with earlier ones",
    "read_bytes": "bytes sent to readers",
    "scrubbed_bytes": "bytes read by completed scrubs",
    "pull_seconds": "time spent receiving, or moving by verbs, and hashing",
    "hash_seconds": "time spent hashing and copying on what came through a socket, of pull_seconds",
    "wire_seconds": "time with requests of verbs under way",
    "commit_seconds": "time spent in commits, the wait for each other included",
}

TIMED: Final = {
    "save": "from the start of a save to its commit",
    "pull": "from an offer of storages until they were received and hashed",
    "commit": "from a confirmation to the commit",
    "read": "from a request to read to its last byte sent",
}

BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets of a histogram, in seconds; above the last there is one more."""


class Counters:
    """Numbers that only grow. ``counts``: by the names in ``COUNTED``. ``failures``: by the name of
    the fault. ``buckets``: for each name in ``TIMED``, how many events fell under each of
    ``BOUNDS_S``, and above the last; ``seconds``: their total. ``rot``: damaged places that the
    last scrub found, by tenant. Thread-safe; ``now`` reads all of them together."""

    def __init__(self) -> None:
        self._guard: Final = threading.Lock()
        self.counts: dict[str, float] = dict.fromkeys(COUNTED, 0)
        self.failures = {fault.name.lower(): 0 for fault in Fault}
        self.buckets = {name: [0] * (len(BOUNDS_S) + 1) for name in TIMED}
        self.seconds = dict.fromkeys(TIMED, 0.0)
        self.rot: dict[str, int] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to the count ``name``."""
        with self._guard:
            self.counts[name] += amount

    def count_failure(self, fault: Fault) -> None:
        """Count a request that was refused."""
        with self._guard:
            self.failures[fault.name.lower()] += 1

    def took(self, name: str, seconds: float) -> None:
        """Record that one event of ``TIMED`` took ``seconds``."""
        with self._guard:
            self.buckets[name][bisect.bisect_left(BOUNDS_S, seconds)] += 1
            self.seconds[name] += seconds

    def rotten(self, tenant: str, count: int) -> None:
        """Record that ``count`` places of a tenant's pool are damaged."""
        with self._guard:
            self.rot[tenant] = count

    def now(self) -> Counters:
        """Return a copy of all counts, taken at one moment."""
        copied = Counters()
        with self._guard:
            copied.counts, copied.failures = dict(self.counts), dict(self.failures)
            copied.buckets = {name: list(each) for name, each in self.buckets.items()}
            copied.seconds, copied.rot = dict(self.seconds), dict(self.rot)
        return copied
