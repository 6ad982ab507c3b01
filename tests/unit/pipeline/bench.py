"""A pool in memory, saves into it without threads, and audits of each way."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from portus.engine.copying.segments import Stop
from portus.engine.media import write_watch
from portus.engine.pipeline.audit import (
    WATCHED_MIN,
    Audit,
    AuditMethod,
    DigestAudit,
    LateStorages,
    ProbeAudit,
    WatchAudit,
)
from portus.engine.pipeline.draft import CommittedVersion
from portus.engine.pipeline.plan import Flags, Snapshot
from portus.engine.pipeline.run import Save, SaveOwner
from portus.engine.settings.keep import Keep
from portus.reach.format.layout import DATA_START
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionRecord
from portus.reach.index.roots import format_pool
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.space import Memory
from portus.reach.versions.pool_draft import PoolDraft
from tests.contents import tabled


def places(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([array.ctypes.data for array in arrays]),
        np.array([array.nbytes for array in arrays]),
    )


_probe = np.zeros(1 << 20, np.uint8)
_watch = write_watch.watch(*places([_probe]))
needs_kernel = pytest.mark.skipif(_watch is None, reason="this kernel does not tell of writes")
if _watch is not None:
    _watch.close()


class Gate(Memory):
    """Memory that lets nothing be copied until it is opened; ``reached``: somebody waits.

    Gives no addresses, so every copy is a call of ``store``."""

    address = None  # type: ignore[assignment]

    def __init__(self, size: int) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.reached = threading.Event()
        self.on_store: Callable[[], None] = lambda: None
        super().__init__(size)

    def store(self, offset: int, data: bytes | memoryview) -> None:
        self.reached.set()
        self.opened.wait()
        self.on_store()
        super().store(offset, data)


WAYS = [
    pytest.param(AuditMethod.KERNEL, marks=needs_kernel),
    AuditMethod.HASH,
    AuditMethod.PROBE,
]


def audited(way: AuditMethod | None, late: LateStorages, stop: Stop) -> Audit | None:
    """An audit of that way, whatever it costs."""
    if way is None:
        return None
    if way is AuditMethod.PROBE:
        return ProbeAudit(late)
    if way is AuditMethod.HASH:
        return DigestAudit(late, stop)
    big = np.flatnonzero(late.length >= WATCHED_MIN)
    return WatchAudit(late, stop, _watched(late.address[big], late.length[big]), big)


def _watched(address: np.ndarray, length: np.ndarray) -> write_watch.WriteWatch:
    """A watch of that memory, when nobody else in this process has one: a save of an earlier test
    may be about to end."""
    end = time.monotonic() + 20
    while (watch := write_watch.watch(address, length)) is None:
        assert time.monotonic() < end, "something else is watched, and does not end"
        gc.collect()
        time.sleep(0.01)
    return watch


class Bench:
    """A pool in memory, some arrays to save, and what the saves told."""

    def __init__(self, medium: Memory | None = None) -> None:
        self.medium = medium or Memory(DATA_START)
        format_pool(self.medium)
        self.pool = PoolWriter(self.medium, ProcessLocks())
        self.before: VersionRecord | None = None
        self.guilty: list[int] = []
        self.keep: Keep | None = None
        self.steady: Flags | None = None
        self.ended: list[Save] = []

    def save(
        self,
        arrays: Sequence[np.ndarray],
        step: int = 0,
        *,
        late: bool = True,
        audit: AuditMethod | None = None,
    ) -> Save:
        steady = self.steady if self.steady is not None else np.full(len(arrays), not late)
        snapshot = Snapshot(
            model="m",
            step=step,
            token=step.to_bytes(16, "little"),
            address=np.array([a.ctypes.data if a.size else 0 for a in arrays], np.int64),
            length=np.array([a.nbytes for a in arrays], np.int64),
            late=np.full(len(arrays), late),
            steady=steady,
            owners=arrays,
            keep=self.keep,
        )
        draft = tabled(PoolDraft(self.pool, snapshot.length), snapshot.length.tolist())
        return Save(snapshot, draft, Owner(self, audit))

    def run(self, arrays: Sequence[np.ndarray], step: int = 0, **options: object) -> Save:
        save = self.save(arrays, step, **options)  # type: ignore[arg-type]
        save.copy_now()
        save.run()
        save.result(0)
        return save

    def holds(self, save: Save) -> list[bytes]:
        entry = self.pool.catalogue().find(save.result(0).id)
        assert entry is not None
        record, found = self.pool.record(entry), []
        for index in range(len(record.storages)):
            data = b""
            for extent in record.storage_extents(index):
                part = memoryview(bytearray(extent.length))
                self.medium.load(extent.offset, part)
                data += part
            found.append(data)
        return found


@dataclass(frozen=True)
class Owner(SaveOwner):
    """A bench, as the owner of one save that is audited in that ``way``."""

    bench: Bench
    way: AuditMethod | None

    def before(self) -> VersionRecord | None:
        return self.bench.before

    def audit(self, late: LateStorages, stop: Stop) -> Audit | None:
        return audited(self.way, late, stop)

    def torn(self, addresses: Sequence[int]) -> None:
        self.bench.guilty.extend(addresses)

    def note_commit(self, save: Save, version: CommittedVersion, steady: Flags) -> None:
        assert isinstance(version, VersionRecord)
        self.bench.before, self.bench.steady = version, steady

    def note_end(self, save: Save) -> None:
        self.bench.ended.append(save)
