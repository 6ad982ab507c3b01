"""The pools of a host: one for each tenant, which keeps tenants apart by construction.

A tenant's connections reach the bytes of its own pool and no other. The place that a host serves is
named as on the command line: a pool directory (a pool file for each tenant), one pool file (one
tenant), or ``memory:SIZE`` (plain memory for each tenant, gone when the host ends).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from portus.errors import BusyError, MediumError, TransportError, UsageError
from portus.reach.daemon.leader import OtherHost
from portus.reach.daemon.leads import Leads
from portus.reach.daemon.mirrors import TenantMirror, TenantMirrors
from portus.reach.daemon.replicas import Replica
from portus.reach.daemon.secrets import read_words
from portus.reach.format.layout import DATA_START
from portus.reach.index.directory import (
    create_pool,
    has_pool,
    is_at,
    make_directory,
    on_disk,
    open_writer,
    pools_at,
    writer_of,
)
from portus.reach.index.place import Place
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.roots import format_pool
from portus.reach.media.file import PlainFile
from portus.reach.media.local import LocalFiles
from portus.reach.media.lock import DirectoryLock, ProcessLocks
from portus.reach.media.space import Memory
from portus.reach.protocol.address import TENANT, check_tenant, is_tenant

MEMORY: Final = "memory:"
"""The prefix of a host's place whose pools are in memory."""

TENANTS_MAX: Final = 1024
WAIT_S: Final = 60.0
"""Seconds that the end of a host waits for its mirror or replica, unless it is told otherwise."""

BUSY_S: Final = 10.0
"""Seconds to wait for another writer to release a pool."""

_LOCK: Final = ".host"
"""The lock file in a directory that a host serves."""

HASHERS: Final = max(2, os.cpu_count() or 0)
"""Connections for which a host hashes at the same time; one tenant may have half of them."""

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Quotas:
    """The sizes in bytes that pools may have: ``of`` each tenant, by name, and of all ``others``.
    None: unlimited."""

    others: int | None = None
    of: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.others is not None or bool(self.of)


class HostedPool:
    """A pool, its tenant, and the clients and saves in it. Thread-safe."""

    def __init__(self, pools: Pools, tenant: str, writer: PoolWriter, path: str | None) -> None:
        """pools: those of the host. path: of the pool; None: it is in memory."""
        self._pools: Final = pools
        self.tenant: Final = tenant
        self.writer: Final = writer
        self.path: Final = path
        self.leads: Final = Leads(writer, path)
        """The leads of its models, where two hosts have them."""
        self.mirror: TenantMirror | None = None
        """The mirror of the pool; None if it has none."""
        self.replica: Replica
        """The leader of its models; set before any client is let in."""
        self.hashing: Final = threading.Semaphore(max(1, HASHERS // 2))
        """Held while the host hashes the pool for a client."""
        self._changed: Final = threading.Condition()
        self._claims: Final[dict[str, tuple[bytes, int]]] = {}
        self.saves = 0
        """Saves under way."""
        self._parting = False
        """True once a client with claims said goodbye, and no client has claimed anything since."""

    @property
    def copier(self) -> TenantMirror | Replica | None:
        """The mirror or replica to which the pool is copied; None if there is none."""
        return self.mirror or (self.replica if self.replica.name else None)

    def close(self, wait_s: float) -> None:
        """Close the pool once it is copied to its mirror and its replica, or after ``wait_s``
        seconds."""
        until_s = time.monotonic() + wait_s
        if self.mirror is not None:
            self.mirror.close(wait_s)
        self.replica.close(max(0.0, until_s - time.monotonic()))
        self.writer.close()

    def look(self) -> None:
        """Raise ``MediumError`` if the path of the pool is another file now: the next process to
        open it would not find what is committed here."""
        if is_at(self.writer, self.path):
            return
        medium = self.writer.medium
        assert isinstance(medium, PlainFile)
        raise MediumError(
            errno.ESTALE,
            f"{self.path} was replaced or moved while this host has it open; its pool is at "
            f"{medium.path_now()!r} now: nothing is committed there. Put it back, or restart the "
            "host to serve what is at that path",
        )

    @property
    def standstill(self) -> str:
        """The reason why the operator has stopped changes; empty if that is not so."""
        return self._pools.standstill(self.tenant)

    def refuse(self) -> None:
        """Raise ``BusyError`` if the operator has stopped changes."""
        if why := self.standstill:
            raise BusyError(errno.EAGAIN, why)

    def began(self) -> None:
        """Count one more save. Raise ``BusyError`` if none may begin."""
        with self._changed:
            self.refuse()
            self.saves += 1

    def end_save(self) -> None:
        """Count one save less."""
        with self._changed:
            self.saves -= 1
            self._changed.notify_all()

    def quiet(self, timeout_s: float) -> int:
        """Wait until no save is under way, ``timeout_s`` at most; return how many are left."""
        with self._changed:
            self._changed.wait_for(lambda: not self.saves, max(0.0, timeout_s))
            return self.saves

    def claim(self, model: str, client: bytes, timeout_s: float) -> None:
        """Count one more connection of ``client``, which alone saves ``model``. Wait for another
        client, whose process may be ending. Raise ``BusyError`` if it stays."""

        def is_free() -> bool:
            return self._claims.get(model, (client, 0))[0] == client

        with self._changed:
            if not self._changed.wait_for(is_free, timeout_s):
                raise BusyError(
                    errno.EAGAIN,
                    f"another client has saved model {model!r} for {timeout_s:g} s at least; "
                    "stop it, or give this one another model name",
                )
            # Counted, since a client claims it on each of its connections.
            self._claims[model] = client, self._claims.get(model, (client, 0))[1] + 1
            self._parting = False

    def disclaim(self, model: str, *, goodbye: bool) -> bool:
        """Count one connection less. Return True if no client saves here any more, and the last one
        said ``goodbye`` on one of its connections: a client that was cut off comes back."""
        with self._changed:
            client, count = self._claims.pop(model)
            if count > 1:
                self._claims[model] = client, count - 1
            self._parting = self._parting or goodbye
            self._changed.notify_all()
            return self._parting and not self._claims


class Pools:
    """The pools of a host. Each is opened at its first use, and stays open until the end."""

    def __init__(
        self,
        place: str,
        quotas: Quotas | None = None,
        mirrors: TenantMirrors | None = None,
        other: OtherHost | None = None,
        mirror_wait_s: float = WAIT_S,
    ) -> None:
        """Open the place that is served.

        place: see the module. quotas: None: none. mirrors: where each pool is mirrored. other: the
        host to which saves here are copied. mirror_wait_s: the longest wait of ``close`` for
        either.
        Raises ``UsageError``, ``BusyError`` if another host serves the directory, and what opening
        one pool, or making a directory for many, raises: better at the start than at the first
        save.
        """
        in_memory = place.startswith(MEMORY) and not place.startswith(f"{MEMORY}//")
        where = None if in_memory or not place else Place.parse(place, "POOL")
        if not place or (where is not None and where.local_path is None):
            raise UsageError(
                f"{place!r} cannot be served: expected a directory, a pool file, a DAX device or "
                f"{MEMORY}SIZE"
            )
        self.place: Final = place
        self._where: Final = where
        self._memory: Final = 0 if where else parse_size(place.removeprefix(MEMORY))
        self._quotas = quotas or Quotas()
        self._mirrors: Final = mirrors
        self._other: Final = other
        self._mirror_wait_s: Final = mirror_wait_s
        self._read_only: Final[set[str]] = set()
        self.draining = False
        """True while no save of any tenant may begin; set by the operator."""
        self._guard: Final = threading.Lock()
        self._open: dict[str, HostedPool] = {}
        self._opening: Final[dict[str, threading.Lock]] = {}
        self._lock: DirectoryLock | None = None
        if self._where is None:
            if self._memory < 2 * DATA_START:
                raise UsageError(f"{place}: expected {2 * DATA_START} bytes or more")
        elif self._where.is_directory:
            make_directory(self._where.path)
            self._lock = DirectoryLock(os.path.join(self._where.path, _LOCK))
        else:
            self.of(TENANT)

    def of(self, tenant: str) -> HostedPool:
        """Return the tenant's pool, created if there is none. Raise what opening raises."""
        with self._guard:
            if tenant not in self._opening and len(self._opening) >= TENANTS_MAX:
                raise BusyError(errno.EAGAIN, f"{self.place}: the limit is {TENANTS_MAX} tenants")
            opening = self._opening.setdefault(tenant, threading.Lock())
        with opening:  # one at a time for each tenant; the others do not wait for it
            hosted = self._open.get(tenant)
            if hosted is None:
                where = self._where
                pool = None if where is None else self._pool_of(where, tenant).path
                writer = self._writer(tenant)
                try:
                    hosted = HostedPool(self, tenant, writer, pool)
                    self._attach(hosted)
                except BaseException:
                    writer.close()
                    raise
                with self._guard:
                    self._open[tenant] = hosted
                    hosted.writer.max_bytes = self._size_max(tenant)  # may be another by now
            return hosted

    def _attach(self, hosted: HostedPool) -> None:
        try:
            if self._mirrors is not None:
                hosted.mirror = self._mirrors.attach(hosted.tenant, hosted.writer)
            hosted.replica = Replica(hosted.tenant, hosted.writer, hosted.leads, self._other)
        except BaseException:
            if hosted.mirror is not None:
                hosted.mirror.close(0)
            raise

    def open_all(self) -> None:
        """Open the existing pools, and those that the mirror has. Raise what opening one raises."""
        found = {tenant for tenant, _ in self.everywhere() if is_tenant(tenant)}
        if self._mirrors is not None:
            try:
                found.update(self._mirrors.tenants())
            except (TransportError, MediumError):
                if not found:
                    raise
        for tenant in sorted(found):
            if self._where is None or self._where.is_directory or tenant == TENANT:
                self.of(tenant)

    def all(self) -> list[HostedPool]:
        """Return the pools that are open."""
        with self._guard:
            return list(self._open.values())

    def poisoned_pools(self) -> dict[str, bool]:
        """Return whether an open pool accepts no more writes, by tenant."""
        return {hosted.tenant: hosted.writer.medium.is_poisoned for hosted in self.all()}

    def everywhere(self) -> list[tuple[str, Place | PoolReader]]:
        """Return all pools with their tenants, unused ones included: the place of each, or its
        reader if it is in memory. Raise ``MediumError`` if the directory cannot be read."""
        if self._where is None:
            return [(hosted.tenant, hosted.writer) for hosted in self.all()]
        if not self._where.is_directory:
            return [(TENANT, self._where)]
        return [(writer_of(each), each) for each in pools_at(self._where)]

    def limit(self, quotas: Quotas) -> None:
        """Set other quotas. A pool that is larger keeps its bytes, and grows no further. Raise
        ``UsageError`` for a device, which has no quota; then nothing changes."""
        with self._guard:
            opened = list(self._open.values())
            if quotas and any(each.writer.medium.info.kind.is_device for each in opened):
                raise UsageError(
                    f"{self.place}: a pool on a device uses all of it, without a quota"
                )
            self._quotas = quotas
            for hosted in opened:
                hosted.writer.max_bytes = self._size_max(hosted.tenant)

    def hold(self, tenant: str, *, on: bool) -> None:
        """Stop or allow again the saves of a tenant, and the retiring of its versions. Raise
        ``UsageError`` if ``tenant`` is not a valid name."""
        check_tenant(tenant)
        (self._read_only.add if on else self._read_only.discard)(tenant)

    def quiet(self, timeout_s: float) -> int:
        """Wait until no save is under way, ``timeout_s`` at most; return how many are left."""
        until_s = time.monotonic() + timeout_s
        return sum(hosted.quiet(until_s - time.monotonic()) for hosted in self.all())

    def standstill(self, tenant: str) -> str:
        """Return the reason why the operator has stopped changes of a tenant, or ""."""
        if self.draining:
            return "the operator is draining this storage host: no new saves; try again later"
        if tenant in self._read_only:
            return f"the operator made tenant {tenant!r} read-only: it accepts no saves"
        return ""

    def _size_max(self, tenant: str) -> int | None:
        quota = self._quotas.of.get(tenant, self._quotas.others)
        if self._where is not None:
            return quota
        return self._memory if quota is None else min(self._memory, quota)

    def close(self) -> None:
        """Close all pools, after waiting for mirror and replica. No pool may be used any more."""
        with self._guard:
            opened, self._open = self._open, {}
        until_s = time.monotonic() + self._mirror_wait_s
        for hosted in opened.values():
            hosted.close(max(0.0, until_s - time.monotonic()))
        if self._lock is not None:
            self._lock.close()

    def _writer(self, tenant: str) -> PoolWriter:
        if self._where is None:
            medium = Memory(DATA_START, name=f"{self.place} of {tenant}")
            format_pool(medium)
            return PoolWriter(medium, ProcessLocks(), max_bytes=self._size_max(tenant))
        path, files = self._pool_of(self._where, tenant).path, LocalFiles()
        if not has_pool(path, files):
            make_directory(os.path.dirname(path))
            create_pool(path, files)
        return open_writer(path, files, timeout_s=BUSY_S, max_bytes=self._size_max(tenant))

    def _pool_of(self, where: Place, tenant: str) -> Place:
        if not where.is_directory and tenant != TENANT:
            raise UsageError(
                f"{self.place} is one pool, of tenant {TENANT!r}; serve a directory for more"
            )
        return where.pool_of(tenant)


def read_quotas(others: str | None, path: str | None) -> Quotas:
    """Return the quotas. others: a size, for each tenant without a line in the file at ``path``,
    which has lines ``TENANT SIZE``; None: none. Raise ``UsageError`` if the file is wrong."""
    found: dict[str, int] = {}
    if path is not None:
        for words in read_words(path, "quotas")[0]:
            if len(words) != 2:
                raise UsageError(f"{path}: expected lines TENANT SIZE, found {len(words)} words")
            tenant = check_tenant(words[0])
            if tenant in found:
                raise UsageError(f"{path}: tenant {tenant!r} has two quotas")
            found[tenant] = parse_size(words[1])
    return Quotas(parse_size(others) if others else None, found)


def parse_size(text: str) -> int:
    """Return a size in bytes: of ``64G``, ``512M``, ``4096``. Raise ``UsageError``."""
    number, unit = text.strip().upper().removesuffix("B").removesuffix("I"), ""
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], number[-1]
    if not number.isdecimal() or not int(number):
        raise UsageError(f"{text!r}: expected a size, such as 64G or 512M")
    return int(number) * _UNITS[unit]


def parse_rate(text: str) -> int:
    """Return bytes a second: of ``50M/s``, ``50MB/s``, ``50M``. Raise ``UsageError``."""
    return parse_size(text.strip().removesuffix("/s"))


def room_bytes(hosted: HostedPool) -> int:
    """Return the bytes that a tenant can still save, growth of its pool included, as far as the
    quota and the file system allow."""
    writer = hosted.writer
    growth = []
    if writer.max_bytes is not None:
        growth.append(max(0, writer.max_bytes - writer.medium.size) + hole_bytes(hosted))
    if os.path.isfile(writer.medium.info.name):
        status = os.statvfs(writer.medium.info.name)
        growth.append(status.f_bavail * status.f_frsize)
    return free_bytes(hosted) + min(growth, default=0)


def used_bytes(hosted: HostedPool) -> int:
    """Return the bytes that the pool takes of its file system; 0 if it is in memory."""
    return on_disk(hosted.writer.medium.info.name)


def free_bytes(hosted: HostedPool) -> int:
    """Return the bytes that a tenant can still save without growth of its pool."""
    try:
        return hosted.writer.free_bytes()
    except MediumError:
        return 0


def hole_bytes(hosted: HostedPool) -> int:
    """Return the free bytes of the pool that were returned to the file system."""
    try:
        return hosted.writer.hole_bytes()
    except MediumError:
        return 0
