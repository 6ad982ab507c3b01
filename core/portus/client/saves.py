"""The saves of a run, from the call to what follows a commit, and removals that wait for them."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Final

from portus.client.fence import clock
from portus.client.fence.fence import Fence, steps_seen
from portus.client.fence.snapshot import SnapshotMode, Snapshots, name_of
from portus.client.files import order
from portus.client.files.headroom import Headroom
from portus.client.files.home import Pool
from portus.client.files.keeper import Keeper
from portus.client.files.opened import RunPool
from portus.client.files.removals import Removal, Removals
from portus.client.job import preemption
from portus.client.job.ledger import Ledger
from portus.client.job.settings import Settings
from portus.client.leaving import nested
from portus.client.save_job import SaveJob
from portus.client.shards.rank_part import RankPart
from portus.client.state.state import FlatState
from portus.client.wanted import References, WantedSave
from portus.errors import (
    AbandonedError,
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
)
from portus.format.reference import Reference
from portus.media import calls
from portus.pipeline.audit import Auditor
from portus.pipeline.draft import CommittedVersion
from portus.pipeline.handle import RefusedSave, SaveHandle, SaveStats
from portus.pipeline.plan import Before, Flags
from portus.pipeline.queue import Queue, Turn
from portus.pipeline.run import Policy, Save


class RunSaves:
    """The saves of one run. ``removals``: those that wait for a save. Threads may share it."""

    def __init__(
        self,
        pool: RunPool,
        queue: Queue,
        fence: Fence,
        ledger: Ledger,
        headroom: Headroom,
        part: RankPart,
        settings: Settings,
    ) -> None:
        self.removals: Final = Removals(pool, queue)
        self.last: Save | None = None
        """The newest one that began."""
        self._pool: Final = pool
        self._queue: Final = queue
        self._fence: Final = fence
        self._ledger: Final = ledger
        self._headroom: Final = headroom
        self._part: Final = part
        self._fence_timeout: Final = settings.fence_timeout
        self._snapshots: Final = Snapshots(pool.model, SnapshotMode(settings.snapshot))
        self._auditor: Final = Auditor(settings.guard)
        self._asked: Save | RefusedSave | nested.WrittenSave | None = None
        """The newest one that was asked for."""
        self._newest_is_file = False
        """True if the newest save is a torch file, written in a signal handler."""
        self._steps_at_last = -1

    def _save_nested(self, state: object, wanted: WantedSave) -> SaveHandle:
        step = wanted.step
        if wanted.token is not None:
            raise calls.refused(f"save of step {step} under a token, perhaps as a part of a group")
        save = nested.WrittenSave(self._pool.model, step, state, wanted.references)
        self._newest_is_file, self._asked = True, save
        return SaveHandle(save)

    @calls.entry_or(_save_nested)
    def save(self, state: object, wanted: WantedSave) -> SaveHandle:
        """See ``Checkpointer.save``."""
        start = time.perf_counter()
        self._ledger.tell(is_save=True, is_heard_of=self._part.is_heard_of)
        step, synchronous = wanted.step, wanted.synchronous
        turn, job = Turn(), SaveJob(self._queue, self._ledger, self._after)
        self._newest_is_file = False
        try:
            admitted = self._queue.admit(turn, None if synchronous else self._fence_timeout)
            queue_s = time.perf_counter() - start
            if not admitted:
                return self._refuse(step, self._too_late(step, queue_s), queue_s)
            flat = self._snapshots.flatten(state)
            try:
                writer, keeper = self._pool.open_or_create()
            except PortusError as error:
                if self._pool.writer is None:  # at the start it is raised, always (V8)
                    raise
                self._queue.dismiss(turn)
                return self._refuse(step, error, queue_s)
            save = self._begin(job, flat, wanted, writer, keeper)
            save.asked_at(start)
            save.stats.queue_s = queue_s
            if save.over:
                self._queue.dismiss(turn)
                self._ledger.failed(save, step)
            else:
                self._queue.put(job, turn)
        except BaseException as error:  # Ctrl-C too: what nobody runs, nobody may wait for
            if self._queue.dismiss(turn):
                job.give_up(error)
            raise
        self.last = self._asked = save
        if synchronous:
            self._queue.catch_up()
        save.stats.call_s = time.perf_counter() - start
        return SaveHandle(save)

    def _remove_nested(self, path: str | os.PathLike[str], after: SaveHandle | None) -> None:
        self._pool.check_usable()
        if self._pool.keeper is None:
            raise calls.refused(f"removal of {os.fspath(path)} from a pool that is not open yet")
        self._put_removal(path, after)

    @calls.entry_or(_remove_nested)
    def remove(self, path: str | os.PathLike[str], after: SaveHandle | None) -> None:
        """See ``Checkpointer.remove``."""
        self._pool.check_usable()
        if self._pool.writer is None:
            self._pool.open_or_create()
        self._put_removal(path, after)

    def _put_removal(self, path: str | os.PathLike[str], after: SaveHandle | None) -> None:
        awaited = self._asked if after is None else after.of
        where = os.path.abspath(os.fspath(path))
        self.removals.ask(Removal(where, awaited, strictly=after is not None))

    def _wait_nested(self, timeout: float | None) -> None:
        self._pool.check_usable()
        if not self._newest_is_file:
            raise calls.refused("wait")

    @calls.entry_or(_wait_nested)
    def wait(self, timeout: float | None) -> None:
        """See ``Checkpointer.wait``."""
        self._pool.check_usable()
        if not self._queue.drain(timeout):
            path = self._pool.home.path
            raise TimeoutError(f"saves to {path} are not finished after {timeout:g} s")
        self._ledger.tell()

    def _begin(
        self, job: SaveJob, flat: FlatState, wanted: WantedSave, writer: Pool, keeper: Keeper
    ) -> Save:
        """Plan the save of ``job``, and copy its volatile storages. An error of the place is kept
        in the save; after any other error, or Ctrl-C, give ``job`` up."""
        snapshot = self._snapshots.take(
            flat,
            wanted.step,
            synchronous=wanted.synchronous,
            unchanged=self._nothing_stepped(),
            token=wanted.token,
            metrics=wanted.metrics,
        )
        placed: dict[str, str | None] = {}
        replaced: dict[str, str | None] = {}
        tensors = flat.tensors  # the policy outlives the copy, so it must not hold the storages
        known = weakref.ref(job)  # the save must not hold itself
        made: dict[str, Reference] = {}
        asked, pool = job.asked, self._pool
        name, token = partial(name_of, tensors), snapshot.token
        policy = Policy(
            retire=lambda: pool.surplus.of(writer, keeper, _save_of(known()), self._part.surplus),
            describe=name,
            audit=self._auditor.begin,
            publishing=lambda: self._publishing(keeper, token, placed),
            committed=lambda version, steady: self._committed(
                keeper, version, steady, replaced, made, asked
            ),
            guilty=self._snapshots.suspects.accuse,
            changed=lambda indices: self._ledger.reports.inexact(wanted.step, name, indices),
        )
        job.paths, job.placed, job.keeper = wanted.references.keys(), made, keeper
        draft = pool.home.draft(snapshot)
        save = job.save = Save(snapshot, draft, lambda: pool.before, policy)
        self._ledger.asked(snapshot.token, wanted.step, next(iter(wanted.references), None))
        clock.begins(save, writer.medium.info.kind.value)
        self._snapshots.begins(save)
        try:
            self._headroom.check(writer, snapshot)
            save.copy_now()
            for path, part in wanted.references.items():
                (placed if self._is_free(path, keeper) else replaced)[path] = part
            last = self.last if self.last is not None and not self.last.over else None
            for path, part in placed.items():
                made[path] = keeper.place(
                    path, snapshot.token, wanted.step, pool.model, part, last, asked
                )
            self._fence.guard(save)
        except (CorruptionError, MediumError, StaleError, TransportError) as error:
            save.fail(error)
        return save

    def _is_free(self, path: str, keeper: Keeper) -> bool:
        """True if a file may be put at ``path`` now: the path is new, and no earlier removal would
        take the file with it."""
        return keeper.is_new(path) and not self.removals.takes(path)

    def _nothing_stepped(self) -> bool:
        """True if no optimizer stepped since the last save was called."""
        before, self._steps_at_last = self._steps_at_last, steps_seen()
        return before == self._steps_at_last

    def _too_late(self, step: int, waited_s: float) -> AbandonedError:
        """The error of a save that got no place in the queue in time."""
        return AbandonedError(
            f"save of step {step} given up: two earlier saves were not finished after "
            f"{waited_s:.1f} s (fence_timeout). Save less often, or check {self._pool.home.path}"
        )

    def _refuse(self, step: int, error: PortusError, waited_s: float) -> SaveHandle:
        """Give a save up before it begins."""
        refused = self._asked = RefusedSave(error, SaveStats(call_s=waited_s, queue_s=waited_s))
        self._ledger.failed(refused, step)
        return SaveHandle(refused)

    # On the worker.

    def _publishing(self, keeper: Keeper, token: bytes, placed: Collection[str]) -> None:
        """Right before a commit."""
        keeper.make_durable(placed)
        keeper.commits(token)

    def _committed(
        self,
        keeper: Keeper,
        version: CommittedVersion,
        steady: Flags,
        replaced: References,
        placed: Mapping[str, Reference],
        asked: int,
    ) -> None:
        """Right after a commit. ``replaced``: files to replace now. ``placed``: files that are
        there; what they lead to may be another pool than the host has by now. ``asked``: when the
        save was asked for; what was written since is newer."""
        if keeper is self._pool.keeper:  # else there is a successor of its pool by now
            assert isinstance(version, Before)
            self._pool.before = version
        self._snapshots.learn(steady)
        self._ledger.reports.committed()
        preemption.committed(version.info)
        astray = {p: each.part for p, each in placed.items() if not keeper.is_here(each)}
        retire = self._part.surplus is None  # what others have a say about goes by a commit alone
        for path, part in {**replaced, **astray}.items():
            if not order.is_newer(path, asked):
                keeper.replace(path, version.info, part, retire=retire, asked=asked)
        keeper.settle(version.info.token)
        for old in nested.take_displaced(keeper.is_here):
            keeper.let_go(old, retire=retire)

    def _after(self, job: SaveJob, save: Save) -> None:
        """Record how a save ended, and clean up after it. Called once its waiters run."""
        mirroring = self._pool.mirroring
        if mirroring is not None:
            save.stats.mirror_lag_s = mirroring.lag_s
            mirroring.wake()
        if save.error is not None:
            self._ledger.failed(save, save.step)
            job.withdraw()
            self.removals.failed(save)
            return
        if self._part.on_commit is not None:
            self._part.on_commit(save.result(0))
        self._ledger.committed(save)
        self._pool.drop_older()
        self.removals.committed(job.paths)
        self._headroom.make_next(save.stats.copied_bytes)
        self._auditor.use_huge_pages(lambda: not self._queue.has_more())


def _save_of(job: SaveJob | None) -> Save:
    assert job is not None
    assert job.save is not None
    return job.save
