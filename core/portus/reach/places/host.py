"""``HostPlace``: the pool of a tenant on a storage host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from portus.engine.spec import VersionInfo
from portus.reach.files.home import Pool, host_journals
from portus.reach.files.host import HostPool
from portus.reach.index.check import CheckOptions, Finding, check_medium, scrub
from portus.reach.places.base import Garbage, GarbageOptions
from portus.reach.places.pool import PoolPlace

YOUNG_S: float = 60
"""Seconds after which a version surely has its pointers: a trainer makes them after the commit."""


class HostPlace(PoolPlace):
    """A pool on a storage host. The host itself changes it, even while trainers save."""

    def journals(self, links: str | None) -> Sequence[str]:
        return host_journals(self.place, links)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Pool]:
        with contextlib.closing(HostPool(self.place.path)) as host:
            yield host
            host.give_back()

    def disk_bytes(self) -> int:
        return self._host.standing().taken

    @property
    def _host(self) -> HostPool:
        reader = self.reader
        assert isinstance(reader, HostPool)
        return reader

    def _is_young(self, info: VersionInfo) -> bool:
        return info.time_ns > time.time_ns() - int(YOUNG_S * 1e9)

    def _collect(self, options: GarbageOptions, found: Garbage) -> Garbage:
        with contextlib.closing(HostPool(self.place.path)) as host:
            host.let_go(self._still_gone(host, found.gone, options.missing))
            return Garbage(gone=found.gone, freed=host.give_back())

    @property
    def _durable(self) -> int:
        return len(self.place.address.each)

    def _check(self, look: CheckOptions) -> Sequence[Finding]:
        return check_medium(self.reader.medium, self.reader.locks, look)

    def _scrub(self, bytes_per_s: int, look: CheckOptions) -> Sequence[Finding]:
        return scrub(self.reader, bytes_per_s, look)
