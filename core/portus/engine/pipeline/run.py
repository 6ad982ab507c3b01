"""One save, from the call to the commit.

    PLANNED -> COPYING -> COPIED -> COMMITTED
        \\________\\__________\\_____-> FAILED (also: given up)

The caller's thread plans, and copies what may not wait (``copy_now``); the worker copies the rest,
audits, persists and commits (``run``). A fence waits for COPIED (``release``), and gives the save
up when its time runs out: from then on the save never commits. One lock protects each change of
stage, so that a save is either copied before the fence opens or given up, never both.

Once the copy has ended and before the fence opens, the audit (V7) finds storages that were not
stored as they were at the call. One such storage voids the save.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from portus.engine.copying.local import hash_sources
from portus.engine.copying.segments import Digests, Sources, Stop, equal_storages, ranges
from portus.engine.copying.thread import InterruptibleCondition
from portus.engine.format.checksum import DIGEST_SIZE, unit_counts
from portus.engine.media import calls
from portus.engine.pipeline.audit import Audit, LateStorages, StoredStorages, no_changes
from portus.engine.pipeline.draft import CommittedVersion, Draft, Labels
from portus.engine.pipeline.handle import SaveStats
from portus.engine.pipeline.plan import Column, Flags, Previous, Snapshot
from portus.engine.spec import VersionInfo
from portus.errors import AbandonedError, PortusError

_LEAVE_S: Final = 1.0
"""The longest that a writer waits, after a save was given up, for the copier to stop reading."""


class Stage(enum.IntEnum):
    """The progress of a save. Order matters: from COPIED on the source is not read any more."""

    PLANNED = 0
    COPYING = 1
    COPIED = 2
    COMMITTED = 3
    FAILED = 4


class SaveOwner:
    """The owner of a save, which begins it, answers its questions, and receives its result. Each
    method does nothing unless it is overridden, and none may hold on to the state."""

    def before(self) -> Previous | None:
        """Return the newest version of the model, if there is one to share storages with."""
        return None

    def describe(self, index: int) -> str:
        """Return the name of a storage, for messages."""
        return str(index)

    def audit(self, late: LateStorages, stop: Stop) -> Audit | None:
        """Note the present state of the late storages. Return None for no audit."""
        return None

    def torn(self, addresses: Sequence[int]) -> None:
        """Note the addresses of storages that an audit found torn. On the worker."""

    def note_commit(self, save: Save, version: CommittedVersion, steady: Flags) -> None:
        """Note a commit, before any waiter learns of it. steady: which storages equalled those of
        the version before, or the hint that was given, if there was none. On the worker."""

    def note_end(self, save: Save) -> None:
        """Note that a save has ended, and its result, after those who waited for it were woken."""


class Save:
    """One save in flight, into ``draft``, and the work of the queue that carries it out.

    asked_s: the moment of the call, by ``time.perf_counter``: ``total_s`` counts from there.
    """

    def __init__(
        self, snapshot: Snapshot, draft: Draft, owner: SaveOwner, asked_s: float | None = None
    ) -> None:
        self.stats = SaveStats(state_bytes=int(snapshot.length.sum()))
        """The cost of this save so far."""
        self.reported = False
        """True once its failure was reported."""
        self.is_in_doubt = False
        """True if the commit had begun before the save failed: the version may exist."""
        self.inexact: Final[list[int]] = []
        """The storages, by index, that another process wrote while they were copied."""
        self.token: Final = snapshot.token
        self.step: Final = snapshot.step
        self.model: Final = snapshot.model
        self.metrics: Final = snapshot.metrics
        self.draft: Final = draft
        self._snapshot = snapshot
        self._steady = snapshot.steady
        self._owner: Final = owner
        self._lock: Final = threading.RLock()
        # Two, so that a thread that waits for the end is woken once: each time takes Python's lock
        # from the worker.
        self._copied: Final = InterruptibleCondition(self._lock)
        self._ended: Final = InterruptibleCondition(self._lock)
        self._stop: Final = Stop(awaited=False)
        self._stage = Stage.PLANNED
        self._reading = False
        self._has_told = False
        self.error: PortusError | None = None
        """The error that ended it, if it failed."""
        self._info: VersionInfo | None = None
        self._units: Final = unit_counts(snapshot.length)
        self._digests: Final = np.zeros((int(self._units.sum()), DIGEST_SIZE), np.uint8)
        """The digests of the stored units, of all storages."""
        self._audit: Audit | None = None
        self._asked_s: Final = time.perf_counter() if asked_s is None else asked_s
        self.storages = snapshot.guarded
        """Data pointers of the storages that are read late."""

    # The caller's thread.

    def copy_now(self) -> None:
        """Copy storages that may change as soon as this returns. Raises ``MediumError`` (no space),
        and then the save has ended."""
        late = self._snapshot.late
        if self._comparable() is not None:
            self._steady = np.zeros(len(late), np.bool_)
        # The caller waits for this, so the copier may take a second processor.
        self._stop.is_awaited = True
        try:
            # First: it notes the state at the call, and copying the early storages takes time.
            if len(here := self._late_here()):
                self._audit = self._owner.audit(self._late(here), self._stop)
            self.stats.guard = self._audit.way.value if self._audit is not None else ""
            self._copy(np.flatnonzero(~late))
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._stop.is_awaited = False

    # The worker's thread.

    def run(self) -> None:
        """Copy the rest, audit, commit. An error is kept for ``result``."""
        try:
            self._advance(Stage.COPYING)
            try:
                self._copy(np.flatnonzero(self._snapshot.late))
                # Before the fence opens: afterwards the optimizer writes, and all would look torn.
                self._end_audit()
            finally:
                self._stop_reading()
            # Raises if a fence has given the save up meanwhile; then it is never committed.
            self._advance(Stage.COPIED)
            self._commit()
        except PortusError as error:
            self.fail(error)
            return
        time.sleep(0)  # a thread that waited for it continues first
        self._tell()

    def fail(self, error: BaseException) -> None:
        """End the save, without a version. Changes nothing if it has ended."""
        if self._has_told:
            return
        with self._lock:
            if self._stage < Stage.COMMITTED:
                self.error = error if isinstance(error, PortusError) else _as_ours(error)
                self._stage = Stage.FAILED
            self._copied.notify_all()
            self._ended.notify_all()
        try:
            self._let_go()
        finally:
            self._tell()

    def _tell(self) -> None:
        """Report the end to the owner, once, when no thread works on the save any more."""
        with self._lock:
            if self._has_told:
                return
            self._has_told = True
        self._owner.note_end(self)

    # Any thread.

    def hurry(self) -> None:
        """Note that a thread waits: the save may take a second processor from the training."""
        self._stop.is_awaited = True

    def release(self, timeout_s: float) -> bool:
        """Wait until the sources may change. Return False if time ran out and the save was given
        up: it never reads them again, nor commits."""
        start = time.perf_counter()
        try:
            return self._wait_for_copy(timeout_s)
        finally:
            self.stats.fence_s += time.perf_counter() - start

    def _wait_for_copy(self, timeout_s: float) -> bool:
        with self._lock:
            self.hurry()
            if self._copied.wait_for(lambda: self._stage >= Stage.COPIED, timeout_s):
                return True
            self._stage = Stage.FAILED
            self.error = AbandonedError(
                f"save of step {self._snapshot.step} given up: its copy did not finish within "
                f"the fence_timeout of {timeout_s:g} s ({self._stop.bytes_done} of "
                f"{self.stats.state_bytes} bytes done). Older versions are untouched; check "
                f"the medium {self.draft.name}"
            )
            self._stop.set()
            self._copied.notify_all()
            self._ended.notify_all()
            # The copier sees the stop within milliseconds. Until then it reads memory that the
            # caller may be about to free (a resize); but a stuck medium may hold it for ever.
            self._copied.wait_for(lambda: not self._reading, _LEAVE_S)
            return False

    @property
    def over(self) -> bool:
        """True when it is committed, failed or given up."""
        return self._stage >= Stage.COMMITTED

    @calls.mark
    def join(self) -> None:
        """See ``SaveHandle.join``."""
        self._await_end(None)

    @calls.mark
    def result(self, timeout_s: float | None) -> VersionInfo:
        """See ``SaveHandle.wait``."""
        if not self._await_end(timeout_s):
            raise TimeoutError(f"save of step {self.step}: not durable within {timeout_s:g} s")
        if self.error is not None:
            self.reported = True
            raise self.error
        assert self._info is not None
        return self._info

    def _await_end(self, timeout_s: float | None) -> bool:
        if self.over:  # in a forked child a thread of the parent may hold the lock
            return True
        with self._lock:
            if timeout_s != 0:  # a poll does not wait
                self.hurry()
            return self._ended.wait_for(lambda: self.over, timeout_s)

    # Copying.

    def _copy(self, indices: Column) -> None:
        if not len(indices):
            return
        start = time.perf_counter()
        rest = self._share(indices)
        ways = np.zeros(len(self._snapshot.length), np.int8)
        ways[self._snapshot.exposed] = 1
        ways[list(self._snapshot.feeds)] = 2
        moves = (self._copy_from_here, self._copy_exposed, self._copy_from_feeds)
        for way, move in enumerate(moves):
            some = rest[ways[rest] == way]
            if len(some):
                move(some)
        self.stats.copied_bytes += int(self._snapshot.length[rest].sum())
        self.stats.bounced_bytes = self.draft.bounced_bytes
        self.stats.copy_s += time.perf_counter() - start

    def _copy_from_here(self, indices: Column) -> None:
        address = self._snapshot.address[indices]
        self._note(indices, self.draft.copy(indices, address, self._stop))

    def _copy_exposed(self, indices: Column) -> None:
        """Copy storages that no fence protects from another process. The copied bytes count; if the
        source has changed, they may be of several moments."""
        self._copy_from_here(indices)
        address, lengths = self._snapshot.address[indices], self._snapshot.length[indices]
        found = hash_sources(Sources.in_memory(address, lengths), self._stop)
        # Equal readings: at a moment between them the memory was exactly what is stored.
        equal = equal_storages(found, self._digests[self._rows(indices)], lengths)
        changed = np.delete(indices, equal)
        if len(changed):
            self.stats.inexact_bytes += int(self._snapshot.length[changed].sum())
            self.inexact.extend(changed.tolist())

    def _copy_from_feeds(self, indices: Column) -> None:
        feeds = [self._snapshot.feeds[index] for index in indices.tolist()]
        self._note(indices, self.draft.copy_fed(indices, feeds, self._stop))

    def _note(self, indices: Column, digests: Digests) -> None:
        self._digests[self._rows(indices)] = digests
        self._note_steady(indices, digests)

    # Sharing.

    def _comparable(self) -> Previous | None:
        """Return the version before, if it has as many storages."""
        before = self._owner.before()
        fits = before is not None and len(before.length) == len(self._snapshot.length)
        return before if fits else None

    def _share(self, indices: Column) -> Column:
        """Share storages that equal those of the version before, and return the rest."""
        before, snapshot = self._comparable(), self._snapshot
        if before is None:
            return indices
        fits = (
            snapshot.steady[indices]
            & (before.length[indices] == snapshot.length[indices])
            & before.may_share[indices]
            & (snapshot.address[indices] != 0)
        )
        candidates = indices[fits]
        if not len(candidates):
            return indices
        equal = candidates[self._find_equal(before, candidates)]
        if not len(equal):
            return indices
        self._steady[equal] = True
        self._digests[self._rows(equal)] = before.digests(equal)
        self.stats.shared_bytes += int(snapshot.length[equal].sum())
        return np.setdiff1d(indices, equal)

    def _find_equal(self, before: Previous, candidates: Column) -> Column:
        """Share candidates with the same digests, and return their positions."""
        lengths = self._snapshot.length[candidates]
        address = self._snapshot.address[candidates]
        self.stats.hashed_bytes += int(lengths.sum())
        found = hash_sources(Sources.in_memory(address, lengths), self._stop)
        equal = equal_storages(found, before.digests(candidates), lengths)
        if not len(equal):
            return equal
        # Equal digests are not enough: rot in the stored bytes would be shared, and reported late.
        same = self.draft.share(before, candidates[equal], address[equal], self._stop)
        return equal if same else equal[:0]

    def _note_steady(self, indices: Column, digests: Digests) -> None:
        """Remember storages that were copied unchanged: next time they are hashed first."""
        before = self._comparable()
        if before is None:
            return
        lengths = self._snapshot.length[indices]
        if not np.array_equal(lengths, before.length[indices]):
            return
        equal = equal_storages(digests, before.digests(indices), lengths)
        self._steady[indices[equal]] = True

    # The audit.

    def _end_audit(self) -> None:
        """Raise ``AbandonedError`` if a late storage was not stored as it was at the call."""
        if self._audit is None:
            return
        late = self._late_here()
        stored = StoredStorages(late, self._digests[self._rows(late)], self.draft)
        torn = late[self._audit.torn(stored)]
        if len(torn):
            self._owner.torn(self._snapshot.address[torn].tolist())
            raise AbandonedError(self._verdict(torn.tolist()))

    def _late(self, rows: Column) -> LateStorages:
        snapshot = self._snapshot
        changes = snapshot.changes
        changed = (lambda: changes()[rows]) if changes is not None else no_changes
        return LateStorages(snapshot.address[rows], snapshot.length[rows], changed)

    def _rows(self, indices: Column) -> Column:
        """Return the rows of some storages' digests."""
        return ranges((np.cumsum(self._units) - self._units)[indices], self._units[indices])

    def _late_here(self) -> Column:
        """Return the late storages with an address in this process."""
        return np.flatnonzero(self._snapshot.late & (self._snapshot.address != 0))

    def _verdict(self, guilty: list[int]) -> str:
        names = [self._owner.describe(index) for index in guilty[:3]]
        more = f" and {len(guilty) - 3} more" if len(guilty) > 3 else ""
        return (
            f"save of step {self._snapshot.step} given up: {', '.join(names)}{more} changed "
            "while being saved, by a writer that no fence guards. The next save copies them, "
            "and the rest of the same optimizer, before it returns; later saves copy them in "
            "the background again. Older versions are untouched"
        )

    # The end.

    def _commit(self) -> None:
        start = time.perf_counter()
        snapshot = self._snapshot
        labels = Labels(
            model=snapshot.model,
            step=snapshot.step,
            token=snapshot.token,
            inexact=self.stats.inexact_bytes > 0,
            metrics=self.metrics,
            keep=snapshot.keep,
        )
        # Only now is the number of bytes known that the spare had already.
        self.stats.copied_bytes -= self.draft.kept_bytes
        self.stats.shared_bytes += self.draft.kept_bytes
        # From here on a failure may leave a commit: a sync may fail after the rename, or after the
        # root was stored.
        self.is_in_doubt = True
        committed = self.draft.commit(labels)
        self.stats.commit_s = time.perf_counter() - start
        self.stats.total_s = time.perf_counter() - self._asked_s
        self._let_go()
        # Before waiters wake: they find everything that follows from the commit in order.
        self._owner.note_commit(self, committed, self._steady)
        with self._lock:
            self._info = committed.info
            self._stage = Stage.COMMITTED
            self._ended.notify_all()

    def _advance(self, stage: Stage) -> None:
        with self._lock:
            # A fence may have given up meanwhile; the lock decides which of the two was first.
            if self._stage is Stage.FAILED:
                raise self.error or AbandonedError("given up")
            self._stage = stage
            self._reading = stage is Stage.COPYING
            if stage is Stage.COPIED:
                self._forget_sources()
            self._copied.notify_all()

    def _stop_reading(self) -> None:
        if self._audit is not None:
            self._audit.close()
        with self._lock:
            self._reading = False
            self._copied.notify_all()

    def _forget_sources(self) -> None:
        """Release the caller's memory, which is not read any more."""
        self._snapshot = replace(self._snapshot, owners=(), feeds={}, changes=None)

    def _let_go(self) -> None:
        """Release everything at the end of ``run``, however it ended."""
        self._stop_reading()
        self._forget_sources()
        self.draft.release()


def _as_ours(error: BaseException) -> PortusError:
    wrapped = AbandonedError(f"save given up: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
