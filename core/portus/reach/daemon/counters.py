"""What a host counts."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from portus.reach.protocol.messages import Fault

COUNTED: Final = {
    "connections": "connections that were let in",
    "refused": "connections that were not",
    "saves": "versions that were committed",
    "abandoned": "saves that ended without a version",
    "pulled_bytes": "bytes received into pools",
    "verbs_bytes": "bytes moved by verbs, into pools and out of them",
    "bounced_bytes": "bytes of these that went through a buffer",
    "shared_bytes": "bytes that versions share with earlier ones",
    "read_bytes": "bytes sent to readers",
    "object_bytes": "bytes of objects that others mirror here, as they came",
    "scrubbed_bytes": "bytes read again by scrubs that were over",
    "pull_seconds": "time spent receiving, or moving by verbs, and hashing",
    "hash_seconds": "time spent hashing what came through a socket, a part of pull_seconds",
    "wire_seconds": "time with requests of verbs under way",
    "commit_seconds": "time spent in commits, the wait for each other included",
}

TIMED: Final = {
    "save": "from the begin of a save to its commit",
    "pull": "from an offer of storages until they were received and hashed",
    "commit": "from a confirmation to the commit",
    "read": "from a request to read to its last byte sent",
}

BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets of a histogram, in seconds; above the last there is one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """``counts`` of what is in ``COUNTED``; ``failures`` by the name of the fault. Of each thing in
    ``TIMED``: how many took up to each of ``BOUNDS_S`` and no less (and more than all of them), in
    ``buckets``, and ``seconds`` in all. ``rot``: damaged places that the last scrub found, by
    tenant."""

    counts: Mapping[str, float]
    failures: Mapping[str, int]
    buckets: Mapping[str, Sequence[int]]
    seconds: Mapping[str, float]
    rot: Mapping[str, int]


class Counters:
    """Numbers that only grow, failures by fault, and histograms of how long things took."""

    def __init__(self) -> None:
        self._guard: Final = threading.Lock()
        self._counts: Final[dict[str, float]] = dict.fromkeys(COUNTED, 0)
        self._failures: Final = {fault.name.lower(): 0 for fault in Fault}
        self._buckets: Final = {name: [0] * (len(BOUNDS_S) + 1) for name in TIMED}
        self._seconds: Final = dict.fromkeys(TIMED, 0.0)
        self._rot: Final[dict[str, int]] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count."""
        with self._guard:
            self._counts[name] += amount

    def count_failure(self, fault: Fault) -> None:
        """Count a request that was refused."""
        with self._guard:
            self._failures[fault.name.lower()] += 1

    def took(self, name: str, seconds: float) -> None:
        """Count one more of what is in ``TIMED``."""
        with self._guard:
            self._buckets[name][bisect.bisect_left(BOUNDS_S, seconds)] += 1
            self._seconds[name] += seconds

    def rotten(self, tenant: str, count: int) -> None:
        """Record that ``count`` places of a tenant's pool are damaged."""
        with self._guard:
            self._rot[tenant] = count

    def rot(self, tenant: str) -> int:
        """How many were, when it was looked last."""
        return self._rot.get(tenant, 0)

    def __getitem__(self, name: str) -> float:
        return self._counts[name]

    def now(self) -> Counts:
        """Return all counters as they are at one moment."""
        with self._guard:
            return Counts(
                counts=dict(self._counts),
                failures=dict(self._failures),
                buckets={name: list(each) for name, each in self._buckets.items()},
                seconds=dict(self._seconds),
                rot=dict(self._rot),
            )
