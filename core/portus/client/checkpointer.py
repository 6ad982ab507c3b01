"""``Checkpointer``: the whole of Portus for a training loop."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from portus.client.fence import clock
from portus.client.fence.fence import Fence, before_write, steps_seen
from portus.client.fence.snapshot import SnapshotMode, Snapshots, name_of
from portus.client.files import order
from portus.client.files.home import FileHome, Home, Pool, home_of
from portus.client.files.keeper import Keeper
from portus.client.files.opened import RunPool
from portus.client.files.removals import Removal, Removals
from portus.client.files.run_mirror import Mirroring
from portus.client.files.surplus import Surplus, versions_of
from portus.client.job import preemption
from portus.client.job.journal import Journal
from portus.client.job.reports import Reports
from portus.client.job.settings import Settings, SettingsDict, mirror_of, say_unmirrored
from portus.client.leaving import nested
from portus.client.loading import restore, view
from portus.client.loading.resolve import POOLS
from portus.client.loading.restore import Patterns, Rename, Restored
from portus.client.state.state import FlatState
from portus.client.wanted import References, WantedSave, check_model
from portus.errors import (
    AbandonedError,
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.format.reference import Reference
from portus.index.groups import part_of
from portus.index.keep import Keep
from portus.index.place import Place
from portus.index.pool import PoolReader, PoolWriter
from portus.index.records import VersionEntry
from portus.media import calls
from portus.mirror.address import StoreAddress
from portus.pipeline.audit import Auditor
from portus.pipeline.handle import RefusedSave, SaveHandle, SaveStats
from portus.pipeline.plan import Before, Flags, Snapshot
from portus.pipeline.queue import Queue, Turn
from portus.pipeline.run import Policy, Save
from portus.spec import VersionInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log: Final = logging.getLogger("portus")

Result = TypeVar("Result")

_RECORDS: Final = 1 << 20
"""Bytes of room for the records of a version, roughly."""


class Checkpointer:
    """Saves the state of a training run to a pool, and loads it back.

    ``save`` returns at once. A thread then copies the bytes straight from the tensors while
    training continues, and an optimizer's step waits until the tensors that it writes have been
    copied. One save can be in flight and one queued; a third call blocks. Use it as a context
    manager, or close it.

    pool: a pool file; a pool directory (one file for each model in it, made at the first save); a
        DAX device (``/dev/dax0.0``; a blank one becomes a pool at the first save); or the address
        of a storage host (``portus://host:7117``, ``portus+tls://...``,
        ``portus+unix:///path.sock``). None: ``$PORTUS_POOL``, else ``.portus`` in the current
        directory.
    model: a name for the run (or for this rank's part of it).
    keep: which versions to keep: a number (the newest ones), or a ``portus.Keep``; None keeps all.
        A commit retires the others. A version that a reference file leads to is also kept, until
        that file is removed, and longer if ``every``, ``within`` or ``best`` want it.
    links: with a storage host, a local directory with a hard link to each reference file, which
        shows whether the file was deleted; None: ``.portus`` in the current directory.
    settings: how to save, and what to do about failures: see ``portus.Settings``.

    A pool file has one writer process: the constructor locks an existing one. It raises
    ``BusyError``, which names the holder, ``MediumError``, ``CorruptionError``, ``UsageError``.
    Threads may share a ``Checkpointer``; a forked child may not use it.

    In a signal handler that interrupted a call of Portus, ``save`` writes a real torch file at
    ``reference``, which is durable when it returns. Loads see what is committed by then, removals
    are queued, and calls that would have to wait raise ``UsageError``.
    """

    @calls.entry
    def __init__(
        self,
        pool: str | os.PathLike[str] | None = None,
        model: str = "default",
        *,
        keep: int | Keep | None = 2,
        links: str | None = None,
        **settings: Unpack[SettingsDict],
    ) -> None:
        check_model(model)
        self._keep: Final = Keep.of(keep)
        self.settings: Final = Settings(**settings)
        """How it saves and loads."""
        self.model: Final = model
        max_bytes = self.settings.max_bytes
        self._home: Final[Home] = home_of(
            Place.named(pool), model, max_bytes, links, self.settings.durable
        )
        self.surplus: Callable[[Sequence[VersionInfo]], Collection[int]] | None = None
        """Replaces ``keep``: returns the ids of the versions that the next commit retires, unless
        a reference file holds them. For parts of groups, which other ranks decide on too. Runs on
        the worker."""
        self.is_heard_of = False
        """True if the caller raises a failed save in the next save, on all ranks. Then ``save``
        does not raise it on one rank alone."""
        self.on_commit: Callable[[VersionInfo], None] | None = None
        """Called with each committed version, on the worker. Must not raise."""
        self._process: Final = os.getpid()
        self._snapshots: Final = Snapshots(model, SnapshotMode(self.settings.snapshot))
        self._queue: Final = Queue(f"portus-{model}")
        self._surplus: Final = Surplus(model, self._keep, self._home)
        self._pool: Final = RunPool(
            self._home, model, self._keep, self._mirrored(), _registers(weakref.ref(self))
        )
        self._reports: Final = Reports(self.settings.on_error)
        self._last: Save | None = None
        self._asked: Save | RefusedSave | nested.WrittenSave | None = None
        self._auditor: Final = Auditor(self.settings.guard)
        self._removals: Final = Removals()
        self._newest_is_file = False
        """True if the newest save is a torch file, written in a signal handler."""
        self._closed = False
        """Nothing is admitted any more; but see ``close``."""
        self._ended = False
        self._steps_at_last = -1
        self._fence: Final = Fence(self.settings.fence_timeout)
        self._journal: Final = Journal(model) if self.settings.journal else None
        POOLS.allow(self._home.allowed)
        if self._pool.mirroring is not None:
            POOLS.allow_mirror(self._pool.mirroring.place)
        try:
            if self._home.exists():
                self._pool.open_if_there()
            else:
                self._pool.begin_with_mirror()
        except BaseException:
            self._fence.close()
            if self._pool.mirroring is not None:
                self._pool.mirroring.close()
            if self._journal is not None:
                self._journal.close()
            raise
        if self._journal is not None:
            self._journal.on_first_step(_asks(weakref.ref(self._pool)))
        _OPEN.add(self)

    @calls.entry
    def mirror_by(self, mirroring: Mirroring) -> None:
        """Let ``mirroring`` copy what is committed. Call it before the first save; ``close`` closes
        it. If it cannot start, this is closed and the error raised."""
        try:
            self._pool.mirror_by(mirroring)
        except BaseException:
            self._close()
            raise

    def _mirrored(self) -> Mirroring | None:
        address = mirror_of(self.settings)
        if address is None:
            return None
        part = part_of(self.model)
        if part is not None:  # of a part alone nothing could be gone on from
            name, rank, _ = part
            if rank == 0:
                say_unmirrored(
                    name, "it is a part that was saved on its own; portus.dcp mirrors whole groups"
                )
            return None
        if not isinstance(self._home, FileHome):
            why = f"it is on a storage host ({self.path}), whose mirror is that of the host"
            if self.settings.mirror is not None:
                raise UsageError(f"mirror: model {self.model!r}: {why}")
            say_unmirrored(self.model, why)  # the variable is for all runs of this machine
            return None
        return Mirroring(address, self.model, self._keep, wait_s=self.settings.mirror_wait)

    def save(
        self,
        state: object,
        step: int,
        *,
        reference: str | os.PathLike[str] | Mapping[str, str] | None = None,
        synchronous: bool = False,
        token: bytes | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Save ``state`` as it is now: nested dicts and lists of tensors and plain values.

        Tensors of any shape and any dtype that torch stores densely, on CPU or CUDA. They stay the
        caller's: Portus holds references to them until the copy has ended. Tensors that only an
        optimizer's step writes are copied after this returns; do not write them by hand before
        ``fence()`` or the next step. All others are copied before it returns.

        step: the training step of this state, an integer of 64 bits.
        reference: a path, at which to put a small file that ``torch.load`` follows into the pool.
            On a new path it exists when this returns; a file that exists already is replaced at
            the commit. A dict from paths to keys of ``state`` puts a file at each path, which
            leads to the value of that key.
        token: 16 bytes, never used before, that name the version for ever; None draws them.
        synchronous: copy everything, and return when the version is durable, or has failed.
        metrics: named numbers of this version, stored with it, for ``Keep(best=)``.

        Blocks while two earlier saves are unfinished, for at most ``fence_timeout`` seconds. Raises
        ``UsageError`` for a value that cannot be saved, with its key path. Later failures are on
        the handle, and reported at the next call (see ``on_error``).
        """
        self._check_usable()
        wanted = WantedSave.of(
            state, step,
            reference=reference, synchronous=synchronous, token=token, metrics=metrics,
        )  # fmt: skip
        return (self._save_nested if calls.is_nested() else self._save)(state, wanted)

    def _save_nested(self, state: object, wanted: WantedSave) -> SaveHandle:
        step = wanted.step
        if wanted.token is not None:
            raise calls.refused(f"save of step {step} under a token, perhaps as a part of a group")
        save = nested.WrittenSave(self.model, step, state, wanted.references)
        self._newest_is_file, self._asked = True, save
        return SaveHandle(save)

    @calls.marked
    def _save(self, state: object, wanted: WantedSave) -> SaveHandle:
        start = time.perf_counter()
        self._report(is_save=True)
        step, synchronous = wanted.step, wanted.synchronous
        turn, job = Turn(), _Job(self)
        self._newest_is_file = False
        try:
            admitted = self._queue.admit(turn, None if synchronous else self.settings.fence_timeout)
            queue_s = time.perf_counter() - start
            if not admitted:
                return SaveHandle(self._refuse(step, self._too_late(step, queue_s), queue_s))
            flat = self._snapshots.flatten(state)
            try:
                writer, keeper = self._pool.open_or_create()
            except PortusError as error:
                if self._pool.writer is None:  # at the start it is raised, always (V8)
                    raise
                self._queue.dismiss(turn)
                return SaveHandle(self._refuse(step, error, queue_s))
            save = self._begin(job, flat, wanted, writer, keeper)
            save.asked_at(start)
            save.stats.queue_s = queue_s
            if save.over:
                self._queue.dismiss(turn)
                self._note_failed(save, step)
            else:
                self._queue.put(job, turn)
        except BaseException as error:  # Ctrl-C too: what nobody runs, nobody may wait for
            if self._queue.dismiss(turn):
                job.give_up(error)
            raise
        self._last = self._asked = save
        if synchronous:
            self._queue.catch_up()
        save.stats.call_s = time.perf_counter() - start
        return SaveHandle(save)

    @calls.entry
    def prepare(self, size: int) -> None:
        """Create the pool now, and room in it for states of ``size`` bytes in the background.

        The first save is then as fast as later ones. If nothing is ever saved, ``close`` removes
        the new pool. Raises the errors of the constructor; the save reports a lack of space.
        """
        self._check_usable()
        self._pool.created = not self._home.exists()
        self._pool.open_or_create()
        self._queue.put(_Preparation(self, size))

    @contextlib.contextmanager
    def _pools_nested(self) -> Iterator[list[PoolReader]]:
        """All pool files of this run, opened anew, so that no lock held elsewhere is needed."""
        self._check_usable()
        paths = [] if self._pool.writer is None else [*self._home.older().values(), self.path]
        with contextlib.ExitStack() as stack:
            opened = (view.PoolFile(Place.named(path)) for path in paths)
            files = [stack.enter_context(contextlib.closing(file)) for file in opened]
            yield [file.reader for file in files]

    def _load_nested(self, step: int | None = None, names: Patterns = None) -> object:
        with self._pools_nested() as pools:
            return view.load_from(pools, self.model, step, names, verify=self.settings.verify)

    @calls.entry_or(_load_nested)
    def load(self, step: int | None = None, names: Patterns = None) -> object:
        """Load a step, or the newest version, and return its verified state, on the CPU.

        The tensors are new, with the saved shapes, dtypes and strides, and belong to the caller.

        step: which one; None loads the newest.
        names: shell patterns of key paths (``"model.*"``): load only that part of the state.

        Blocks until the saves in flight are over. If the newest version does not verify, it returns
        the newest one that does, and logs an error. It takes a version that is damaged here, or a
        ``step`` that no longer exists here, from the mirror, and logs an error. Raises
        ``UsageError`` if there is no such version or nothing in it matches a pattern,
        ``CorruptionError`` if none verifies, ``MediumError``.
        """
        self._await_saves_to_read()
        with self._pool.looked_at() as pools:
            return view.again(
                lambda: view.load_from(
                    pools, self.model, step, names,
                    verify=self.settings.verify, mirrors=self._mirrors(),
                )
            )  # fmt: skip

    @calls.entry
    def restore_into(
        self,
        state: object,
        step: int | None = None,
        *,
        strict: bool = True,
        names: Patterns = None,
        rename: Rename = None,
    ) -> Restored:
        """Copy a version into the tensors of ``state``, in place, and set its other leaves.

        Shapes must match the saved ones. Values of another dtype are converted, and rounded at
        most: no fraction, imaginary part or high byte is dropped. The tensors stay the caller's, on
        their device.

        step: which one; None restores the newest.
        strict: raise ``UsageError``, which lists them, if tensors are missing or unexpected.
        names: restore only key paths that match these shell patterns.
        rename: a dict or function from key paths of the version to those of ``state``.

        Values other than tensors that ``state`` lacks are added only if the whole version is
        requested: ``strict``, no ``names``, no ``rename``. Everything is verified before anything
        is copied, so after an error ``state`` is untouched. Blocks and raises as ``load`` does.
        """
        before_write()  # other Checkpointers of this process may be saving these tensors
        self._await_saves_to_read()
        with self._pool.looked_at() as pools:
            return view.again(
                lambda: view.restore_from(
                    pools, state, self.model, step, strict=strict, names=names, rename=rename,
                    verify=self.settings.verify, mirrors=self._mirrors(),
                )
            )  # fmt: skip

    def load_version(self, token: bytes, part: str | None = None) -> object:
        """The verified state of the version that reference files name ``token``, or the value of
        its key ``part``. If the version is not there, this waits for the saves in flight and looks
        again."""
        return self.use_version(
            token,
            lambda pool, entry: restore.load_part(pool, entry, part, verify=self.settings.verify),
        )

    @calls.marked
    def use_version(
        self, token: bytes, use: Callable[[PoolReader, VersionEntry], Result]
    ) -> Result:
        """The result of ``use`` for a version; waits and tries again as ``load_version`` does."""
        self._check_usable()
        with contextlib.suppress(StaleError):
            return self._use_version(token, use)
        self._await_saves_to_read()
        return self._use_version(token, use)

    def _use_version(
        self, token: bytes, use: Callable[[PoolReader, VersionEntry], Result]
    ) -> Result:
        with self._pool.looked_at() as pools:
            for pool in reversed(pools):
                with contextlib.suppress(StaleError):
                    return use(pool, view.of_token(pool.catalogue(), token))
        raise StaleError(f"version {token.hex()} is not in {self.path} (any more)")

    def _mirrors(self) -> list[StoreAddress]:
        return [] if self._pool.mirroring is None else [self._pool.mirroring.place]

    def steps(self) -> list[int]:
        """Steps of the committed versions, oldest commit first. A step may come twice."""
        return [info.step for info in self.versions()]

    def _versions_nested(self) -> list[VersionInfo]:
        with self._pools_nested() as pools:
            return self._versions_in(pools)

    @calls.entry_or(_versions_nested)
    def versions(self) -> list[VersionInfo]:
        """The committed versions of this model, oldest commit first."""
        self._check_usable()
        return self._versions()

    def _remove_nested(
        self, path: str | os.PathLike[str], *, after: SaveHandle | None = None
    ) -> None:
        self._check_usable()
        if self._pool.keeper is None:
            raise calls.refused(f"removal of {os.fspath(path)} from a pool that is not open yet")
        self._put_removal(path, after)

    @calls.entry_or(_remove_nested)
    def remove(self, path: str | os.PathLike[str], *, after: SaveHandle | None = None) -> None:
        """Remove a reference file, or a directory with its contents, and then the versions that
        only those files led to. Returns at once.

        The removal waits until the newest save requested before it, or a later one, is committed
        (V5). If none is, the file stays, and ``close`` says so. If saves fail for lack of space,
        the removal that has waited longest happens anyway, provided that a newer version with a
        file remains. A file that is no reference is removed too. Errors are logged. A save that is
        requested later and goes to the same path, or below it, puts its file there at its commit.

        after: remove it only if this save is committed.
        """
        self._check_usable()
        if self._pool.writer is None:
            self._pool.open_or_create()
        self._put_removal(path, after)

    def _put_removal(self, path: str | os.PathLike[str], after: SaveHandle | None) -> None:
        awaited = self._asked if after is None else after.of
        removal = Removal(os.path.abspath(os.fspath(path)), awaited, strictly=after is not None)
        self._removals.ask(removal)
        self._queue.put(_Removing(self, removal))

    def cut_off(self, tokens: Collection[bytes]) -> None:
        """On the worker: put aside the files that lead to these versions. They are parts of saves
        that were never completed, but look like checkpoints."""
        if tokens and self._pool.keeper is not None:
            self._pool.keeper.cut_off(tokens)

    @calls.entry
    def let_go(self, versions: Collection[int]) -> None:
        """Retire the versions with these ids, except those that a reference file leads to. Raises
        ``PortusError``."""
        self._check_usable()
        writer, keeper = self._pool.writer, self._pool.keeper
        if writer is not None and keeper is not None:
            keeper.deleted()
            held = keeper.held(writer.catalogue()) | self._surplus.held_in_older()
            writer.retire(sorted(set(versions) - held))
            keeper.deleted()  # forgets the links of what is gone

    @calls.entry
    def fence(self) -> None:
        """Block until no save in flight reads the caller's tensors, for at most ``fence_timeout``
        seconds: then those saves are given up. Raises nothing."""
        self._fence.wait()

    def _wait_nested(self, timeout: float | None = None) -> None:
        self._check_usable()
        if not self._newest_is_file:
            raise calls.refused("wait")

    @calls.entry_or(_wait_nested)
    def wait(self, timeout: float | None = None) -> None:
        """Block until every save so far is over; failures are reported as ``on_error`` says.

        timeout: seconds; None waits for ever. Raises ``TimeoutError`` when it runs out. In a signal
        handler that interrupted Portus, where ``save`` writes files, only the newest save counts.
        """
        self._check_usable()
        if not self._queue.drain(timeout):
            raise TimeoutError(f"saves to {self.path} are not finished after {timeout:g} s")
        self._report()

    @calls.entry
    def close(self) -> None:
        """Finish the saves in flight, wait up to ``mirror_wait`` seconds for the mirror, and
        release the pool. A second call does nothing. Failures that were not reported yet are
        reported as ``on_error`` says."""
        self._close()

    def _close(self) -> None:
        if self._process != os.getpid():
            return  # a forked child: everything is the parent's
        try:
            with self._pool.opening:
                if self._closed:
                    return
                self._closed = True
            _OPEN.discard(self)
            self._queue.close()
            self._fence.close()
            self._removals.say_left()
            if self._journal is not None:
                self._journal.close()
            if self._pool.mirroring is not None:
                self._pool.mirroring.close()
            if self._pool.writer is not None:
                POOLS.closed(self)
                self._home.close(made=self._pool.created)
            self._closed = self._ended = True
        except BaseException:  # Ctrl-C: the copier may still write to the pool; close again
            self._closed = self._ended
            _OPEN.add(self)
            raise
        self._report()

    @property
    def path(self) -> str:
        """The path of the pool file, which the first save creates, or the address of the storage
        host. If a pool file accepts no more writes, the path of its successor."""
        return self._home.path

    @property
    def last_stats(self) -> SaveStats | None:
        """The cost of the newest save so far; None before the first one."""
        return self._last.stats if self._last else None

    @property
    def uuid(self) -> bytes:
        """The pool's identity, 16 bytes; empty before the first save of a new pool."""
        return self._pool.writer.superblock.uuid if self._pool.writer else b""

    def announce(self) -> view.Sign:
        """A sign by which others tell this open pool from any copy of it. Creates the pool if it
        does not exist. Raises the errors of the constructor, and ``MediumError``."""
        if not self.uuid:
            self.prepare(0)
        writer = self._pool.writer
        assert writer is not None
        holder = writer.announce() if isinstance(writer, PoolWriter) else ""
        return view.Sign(writer.superblock.uuid, holder)

    @property
    def has_committed(self) -> bool:
        """True once a save of this object was committed."""
        return self._reports.has_committed

    @calls.marked
    def await_saves(self, path: str | None, token: bytes) -> bool:
        """Wait for the saves in flight, before this process loads from the pool (V11). True if
        there were any. A failed save raises nothing here."""
        if self._queue.idle() or self._queue.on_worker():
            return False
        self._queue.catch_up()
        return True

    def __del__(self) -> None:
        if getattr(self, "_closed", True):  # or it was never made
            return
        with contextlib.suppress(PortusError):
            self._close()  # it has no pool, or POOLS would hold it

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except PortusError as late:
            if error is None:
                raise
            _log.error("portus: a save failed: %s", late)  # what ended the block matters more

    # Saving.

    def _begin(
        self, job: _Job, flat: FlatState, wanted: WantedSave, writer: Pool, keeper: Keeper
    ) -> Save:
        """Plan the save of ``job``, and copy its volatile storages. An error of the medium is kept
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
        asked = job.asked
        policy = Policy(
            retire=lambda: self._surplus.of(writer, keeper, _save_of(known()), self.surplus),
            describe=lambda index: name_of(tensors, index),
            audit=self._auditor.begin,
            publishing=lambda: keeper.make_durable(placed),
            committed=lambda version, steady: self._committed(
                keeper, version, steady, replaced, made, asked
            ),
            guilty=self._snapshots.suspects.accuse,
            changed=lambda indices: self._reports.inexact(wanted.step, tensors, indices),
        )
        job.paths, job.placed, job.keeper = wanted.references.keys(), made, keeper
        draft, pool = self._home.draft(snapshot), self._pool
        save = job.save = Save(snapshot, draft, lambda: pool.before, policy)
        if self._journal is not None:
            self._journal.asked(snapshot.token, wanted.step)
        clock.begins(save, writer.medium.info.kind.value)
        self._snapshots.begins(save)
        try:
            self._check_room(writer, snapshot)
            save.copy_now()
            for path, part in wanted.references.items():
                (placed if self._is_free(path, keeper) else replaced)[path] = part
            last = self._last if self._last is not None and not self._last.over else None
            for path, part in placed.items():
                made[path] = keeper.place(
                    path, snapshot.token, wanted.step, self.model, part, last, asked
                )
            self._fence.guard(save)
        except (CorruptionError, MediumError, TransportError) as error:
            save.fail(error)
        return save

    def _is_free(self, path: str, keeper: Keeper) -> bool:
        """True if a file may be put at ``path`` now: the path is new, and no earlier removal would
        take the file with it."""
        return keeper.is_new(path) and not self._removals.takes(path)

    def _check_room(self, writer: Pool, snapshot: Snapshot) -> None:
        """Make room for the versions kept and one more, so that a lack of space shows early."""
        if self._pool.before is not None and self._pool.before.layout == snapshot.layout:
            return
        size = int(snapshot.length.sum())
        count = self._surplus.to_come(self._pool.writer)
        try:
            writer.ensure(count * (size + _RECORDS))
        except MediumError as error:
            raise MediumError(
                error.errno,
                f"{self.path}: a checkpoint of this state has {size} bytes, and the pool needs "
                f"space for {count} more (those kept and the one in flight): {error.strerror}",
            ) from error

    def _versions(self) -> list[VersionInfo]:
        with self._pool.looked_at() as pools:
            return self._versions_in(pools)

    def _versions_in(self, pools: Sequence[PoolReader]) -> list[VersionInfo]:
        return versions_of(self.model, [pool.catalogue() for pool in pools])

    def _committed(
        self,
        keeper: Keeper,
        version: Before,
        steady: Flags,
        replaced: References,
        placed: Mapping[str, Reference],
        asked: int,
    ) -> None:
        """On the worker, right after a commit. ``replaced``: files to replace now. ``placed``:
        files that are there; what they lead to may be another pool than the host has by now.
        ``asked``: when the save was asked for; what was written since is newer."""
        if keeper is self._pool.keeper:  # else there is a successor of its pool by now
            self._pool.before = version
        self._snapshots.learn(steady)
        self._reports.committed()
        preemption.committed(version.record.info)
        astray = {p: each.part for p, each in placed.items() if not keeper.is_here(each)}
        retire = self.surplus is None  # what others have a say about goes by a commit alone
        for path, part in {**replaced, **astray}.items():
            if not order.is_newer(path, asked):
                keeper.replace(path, version.record.info, part, retire=retire, asked=asked)
        for old in nested.take_displaced(keeper.is_here):
            keeper.let_go(old, retire=retire)

    def _after(self, job: _Job) -> None:
        """On the worker, after the save is over and its waiters run."""
        save, paths = job.save, job.paths
        assert save is not None
        if self._pool.mirroring is not None:
            save.stats.mirror_lag_s = self._pool.mirroring.lag_s
            self._pool.mirroring.wake()
        assert self._pool.writer is not None
        assert self._pool.keeper is not None
        if save.error is not None:
            self._note_failed(save, save.step)
            job.withdraw()
            self._removals.failed(save, self._pool.keeper)
            return
        if self.on_commit is not None:
            self.on_commit(save.result(0))
        journal = self._begun_journal()
        if journal is not None:
            journal.committed(save.token, save.stats)
        self._pool.drop_older(self._surplus.let_go)
        self._removals.committed(paths, self._pool.keeper)
        self._make_room(save.stats.copied_bytes + _RECORDS)
        self._auditor.use_huge_pages(lambda: not self._queue.has_more())

    def _begun_journal(self) -> Journal | None:
        """On the worker: the journal, once the session has begun."""
        journal = self._journal
        if journal is not None and not journal.has_begun:
            place = self._pool.place_of_journal()
            if place is not None:
                journal.begin(*place)
        return journal

    def _make_room(self, size: int) -> None:
        """On the worker: reserve and touch space for the next save."""
        assert self._pool.writer is not None
        if self._queue.has_more():
            return  # the next save has its space by now, and sees to that of the one after it
        try:
            grown = self._pool.writer.ensure(size)
            self._pool.writer.touch(grown, lambda: not self._queue.has_more())
        except (MediumError, TransportError) as error:
            _log.warning("%s: the next save may not fit: %s", self.path, error)

    def _nothing_stepped(self) -> bool:
        """True if no optimizer stepped since the last save was called."""
        before, self._steps_at_last = self._steps_at_last, steps_seen()
        return before == self._steps_at_last

    # Errors.

    def _note_failed(self, save: Save | RefusedSave, step: int) -> None:
        self._reports.failed(save)
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        text = f"{self.model}@{step} at {when}: {save.error}"
        self._queue.put(_Note(self, text, save, step))

    def _too_late(self, step: int, waited_s: float) -> AbandonedError:
        """The error of a save that got no place in the queue in time."""
        return AbandonedError(
            f"save of step {step} given up: two earlier saves were not finished after "
            f"{waited_s:.1f} s (fence_timeout). Save less often, or check {self.path}"
        )

    def _refuse(self, step: int, error: PortusError, waited_s: float) -> RefusedSave:
        """Give a save up before it begins."""
        refused = self._asked = RefusedSave(error, SaveStats(call_s=waited_s, queue_s=waited_s))
        self._note_failed(refused, step)
        return refused

    def _report(self, *, is_save: bool = False) -> None:
        self._reports.tell(self._first_may_commit, is_save=is_save, is_heard_of=self.is_heard_of)

    def _first_may_commit(self) -> None:
        """Wait for a first save in flight, for at most ``fence_timeout``."""
        if not self._queue.on_worker():
            self._queue.catch_up(self.settings.fence_timeout)

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                f"this Checkpointer was made in process {self._process}; a forked child must "
                "make its own, with its own pool"
            )
        if self._closed:
            raise UsageError("this Checkpointer is closed")

    def _await_saves_to_read(self) -> None:
        self._check_usable()
        if self._pool.writer is None:
            raise UsageError(f"{self.path}: there is no pool yet; nothing was saved")
        if not self._queue.on_worker():
            self._queue.catch_up()


class _Job:
    """A save in the queue, from before it is planned."""

    def __init__(self, owner: Checkpointer) -> None:
        self._owner: Final = owner
        self.asked: Final = order.asked()
        self.save: Save | None = None
        self.keeper: Keeper | None = None
        self.paths: Collection[str] = ()
        """Those of its reference files."""
        self.placed: Mapping[str, Reference] = {}
        """Those that are there before the commit."""

    def run(self) -> None:
        assert self.save is not None
        self.save.run()
        time.sleep(0)  # whoever waited for it goes on first
        self._owner._after(self)

    def fail(self, error: BaseException) -> None:
        if self.save is not None and not self.save.over:
            self.save.fail(error)
            self._owner._note_failed(self.save, self.save.step)
            self._owner._queue.put(_Withdrawal(self))

    def withdraw(self) -> None:
        """On the worker, after a failure: withdraw the placed files, which look like checkpoints.
        Not if a storage host never answered whether it committed."""
        save, keeper = self.save, self.keeper
        if save is None or keeper is None:
            return
        if save.is_in_doubt and isinstance(save.error, TransportError):
            return
        for path, reference in self.placed.items():
            keeper.withdraw(path, reference, self.asked, is_in_doubt=save.is_in_doubt)

    def hurry(self) -> None:
        if self.save is not None:
            self.save.hurry()

    def give_up(self, error: BaseException) -> None:
        """Leave no reservation and no fence behind; the caller gets the error at once."""
        if self.save is not None:
            self.save.fail(error)
            self._owner._queue.put(_Withdrawal(self))


class _Chore:
    """Work that nobody waits for, and that needs no cleaning up."""

    def fail(self, error: BaseException) -> None:
        """Nothing to end."""

    def hurry(self) -> None:
        """It takes no longer than it must."""


class _Preparation(_Chore):
    """Room for the first saves, made in the background."""

    def __init__(self, owner: Checkpointer, size: int) -> None:
        self._owner: Final = owner
        self._size: Final = size

    def run(self) -> None:
        try:
            count = self._owner._surplus.to_come(self._owner._pool.writer)
            self._owner._make_room(count * (self._size + _RECORDS))
        except PortusError as error:
            _log.warning("%s: cannot prepare for the first save: %s", self._owner.path, error)


class _Note(_Chore):
    """Records a failed save for other processes; on the worker, since a medium may hang."""

    def __init__(self, owner: Checkpointer, text: str, save: Save | RefusedSave, step: int) -> None:
        self._owner: Final = owner
        self._text: Final = text
        self._save: Final = save
        self._step: Final = step

    def run(self) -> None:
        self._owner._home.note_failure(self._text)
        journal = self._owner._begun_journal()
        if journal is not None:
            token = self._save.token if isinstance(self._save, Save) else None
            journal.failed(self._step, str(self._save.error), token)


class _Withdrawal(_Chore):
    """The files of a save that failed outside of the worker."""

    def __init__(self, job: _Job) -> None:
        self._job: Final = job

    def run(self) -> None:
        self._job.withdraw()


class _Removing(_Chore):
    """A removal in the queue."""

    def __init__(self, owner: Checkpointer, removal: Removal) -> None:
        self._owner: Final = owner
        self._removal: Final = removal

    def run(self) -> None:
        assert self._owner._pool.keeper is not None
        self._owner._removals.reached(self._removal, self._owner._pool.keeper)


_OPEN: Final[weakref.WeakSet[Checkpointer]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Finish the saves of a program that ends without closing."""
    for checkpointer in list(_OPEN):
        try:
            checkpointer.close()
        except PortusError as error:  # nobody is left to catch it, and others are still to close
            _log.error("portus: %s: a save failed: %s", checkpointer.path, error)


def _asks(known: weakref.ref[RunPool]) -> Callable[[], tuple[str, str] | None]:
    """Asks for the place of a journal, and holds nobody: a ``Checkpointer`` that nobody holds is
    closed."""

    def place() -> tuple[str, str] | None:
        pool = known()
        return None if pool is None else pool.place_of_journal()

    return place


def _registers(known: weakref.ref[Checkpointer]) -> Callable[[], None]:
    """Has loads in this process find the pool that is open now; holds nobody, as above."""

    def register() -> None:
        owner = known()
        if owner is not None:
            POOLS.closed(owner)
            POOLS.opened(owner)

    return register


def _save_of(job: _Job | None) -> Save:
    assert job is not None
    assert job.save is not None
    return job.save
