"""``Checkpointer``: the whole of Portus for a training loop."""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from portus.client import clock, nested, order, restore, view
from portus.client.fence import Fence, before_write, steps_seen
from portus.client.held import held_in
from portus.client.home import Home, Pool, home_of
from portus.client.keeper import Keeper
from portus.client.removals import Removal, Removals
from portus.client.resolve import POOLS
from portus.client.restore import Patterns, Rename, Restored
from portus.client.settings import Settings, SettingsDict
from portus.client.snapshot import SnapshotMode, Snapshots, name_of
from portus.client.state import FlatState
from portus.errors import (
    AbandonedError,
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.format.layout import Kind
from portus.format.reference import Reference
from portus.index.place import Place
from portus.index.pool import PoolReader, PoolWriter
from portus.index.records import VersionEntry
from portus.media import calls
from portus.pipeline.audit import Auditor
from portus.pipeline.handle import RefusedSave, SaveHandle, SaveStats
from portus.pipeline.plan import Before, Flags, Snapshot
from portus.pipeline.queue import Queue, Turn
from portus.pipeline.run import Policy, Save
from portus.spec import TensorSpec, VersionInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log: Final = logging.getLogger("portus")

Result = TypeVar("Result")

References = Mapping[str, str | None]
"""Absolute paths of reference files, and the part of the state that each leads to (None: all)."""

_RECORDS: Final = 1 << 20
"""Bytes of room for the records of a version, roughly."""


class Checkpointer:
    """Saves the state of a training run to a pool, and loads it back.

    ``save`` returns at once; the bytes are copied straight from the tensors while training goes
    on, and an optimizer's step waits until what it is going to write has been copied. One save is
    in flight and one queued; a third call waits. Use it as a context manager, or close it.

    pool: a pool file; a pool directory (one file for each model in it, made at the first save); a
        DAX device (``/dev/dax0.0``; a blank one becomes a pool at the first save); or the address
        of a storage host (``portus://host:7117``, ``portus+tls://...``,
        ``portus+unix:///path.sock``). None: ``$PORTUS_POOL``, else ``.portus`` in the current
        directory.
    model: a name for the run (or for this rank's part of it).
    keep: newest versions kept; older ones are retired by the commit that makes them surplus. A
        version that a reference file leads to is kept besides. None keeps all.
    links: with a storage host, the directory of this machine that tells living reference files
        from deleted ones; None: ``.portus`` in the current directory.
    settings: how to save, and what to do about failures: see ``portus.Settings``.

    A pool file has one writer process: an existing one is locked here. Raises ``BusyError`` naming
    the holder, ``MediumError``, ``CorruptionError``, ``UsageError``. Threads may share it; a
    forked child may not use it.

    A signal handler may have interrupted a call of Portus in its own thread. In there ``save``
    writes a real torch file at ``reference``, durable when it returns; loads find what is committed
    by then; a removal is queued; what would have to wait raises ``UsageError``.
    """

    @calls.entry
    def __init__(
        self,
        pool: str | os.PathLike[str] | None = None,
        model: str = "default",
        *,
        keep: int | None = 2,
        links: str | None = None,
        **settings: Unpack[SettingsDict],
    ) -> None:
        _check_model(model)
        check_keep(keep)
        self.settings: Final = Settings(**settings)
        """How it saves and loads."""
        self.model: Final = model
        max_bytes = self.settings.max_bytes
        self._home: Final[Home] = home_of(Place.named(pool), model, max_bytes, links)
        self.surplus: Callable[[Sequence[VersionInfo]], Collection[int]] | None = None
        """In place of ``keep``: which versions, by id, the next commit retires, if no reference
        file holds them. For parts of groups, where others have a say. Runs on the worker."""
        self.is_heard_of = False
        """True where a save that failed is raised by who asked for it, on all ranks, in the next
        save: then ``save`` raises it not, on one of them."""
        self._keep: Final = keep
        self._process: Final = os.getpid()
        self._snapshots: Final = Snapshots(model, SnapshotMode(self.settings.snapshot))
        self._queue: Final = Queue(f"portus-{model}")
        self._opening: Final = threading.RLock()
        self._writer: Pool | None = None
        self._keeper: Keeper | None = None
        self._before: Before | None = None
        self._failed: Final[deque[Save | RefusedSave]] = deque()
        self._given_up: AbandonedError | None = None
        """The first save that was given up, if none was committed before it was logged."""
        self._last: Save | None = None
        self._asked: Save | RefusedSave | nested.WrittenSave | None = None
        self._auditor: Final = Auditor(self.settings.guard)
        self._commits = 0
        self._removals: Final = Removals()
        self._newest_is_file = False
        """True if the newest save is a torch file, written in a signal handler."""
        self._closed = False
        """Nothing is admitted any more; but see ``close``."""
        self._ended = False
        self._created = False
        self._moving = False
        """True from when the pool has a successor until that is open."""
        self._looking: Final = threading.RLock()
        self._lookers = 0
        """Threads that look at all pools now."""
        self._let_go: frozenset[int] = frozenset()
        """Versions that are surplus once the commit is made that is being made."""
        self._steps_at_last = -1
        self._said_inexact = False
        self._fence: Final = Fence(self.settings.fence_timeout)
        POOLS.allow(self._home.allowed)
        try:
            if self._home.exists():
                self._open_if_there()
        except BaseException:
            self._fence.close()
            raise
        _OPEN.add(self)

    def save(
        self,
        state: object,
        step: int,
        *,
        reference: str | os.PathLike[str] | Mapping[str, str] | None = None,
        synchronous: bool = False,
        token: bytes | None = None,
    ) -> SaveHandle:
        """Save ``state`` as it is now: nested dicts and lists of tensors and plain values.

        The tensors are not copied before this returns, unless something other than an optimizer's
        step may write them; do not write them by hand before ``fence()`` or the next step.

        reference: put a small file here that ``torch.load`` follows into the pool. On a new path
            it is there when this returns; what is at an existing path is replaced at the commit.
            A dict of paths puts a file at each, which leads to the value that ``state``, a dict,
            has for the key given.
        token: 16 bytes that name the version for ever, never used before; None makes some.
        synchronous: copy everything, and return when the version is durable (or failed).

        Raises ``UsageError`` naming the key path of what cannot be saved. What fails later is on
        the handle, and reported at the next call (``on_error``).
        """
        self._check_usable()
        files = _references(reference, state)
        wanted = _Wanted(_checked_step(step), files, synchronous, _checked(token))
        return (self._save_nested if calls.is_nested() else self._save)(state, wanted)

    def _save_nested(self, state: object, wanted: _Wanted) -> SaveHandle:
        step = wanted.step
        if wanted.token is not None:
            raise calls.refused(f"save of step {step} under a token, perhaps as a part of a group")
        save = nested.WrittenSave(self.model, step, state, wanted.references)
        self._newest_is_file, self._asked = True, save
        return SaveHandle(save)

    @calls.marked
    def _save(self, state: object, wanted: _Wanted) -> SaveHandle:
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
                writer, keeper = self._open_or_create()
            except PortusError as error:
                if self._writer is None:  # at the start it is raised, always (V8)
                    raise
                self._queue.dismiss(turn)
                return SaveHandle(self._refuse(step, error, queue_s))
            save = self._begin(job, flat, wanted, writer, keeper)
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
        """Make the pool, and room in it for states of ``size`` bytes, in the background.

        The first save is then as fast as later ones. If nothing is ever saved, ``close`` takes
        the new pool away again. Raises what opening raises; a lack of room is left to the save.
        """
        self._check_usable()
        self._created = not self._home.exists()
        self._open_or_create()
        self._queue.put(_Preparation(self, size))

    @contextlib.contextmanager
    def _pools_nested(self) -> Iterator[list[PoolReader]]:
        """All pools of this one, opened anew: nothing that somebody may hold a lock of."""
        self._check_usable()
        paths = [] if self._writer is None else [*self._home.older().values(), self.path]
        with contextlib.ExitStack() as stack:
            opened = (view.PoolFile(Place.named(path)) for path in paths)
            files = [stack.enter_context(contextlib.closing(file)) for file in opened]
            yield [file.reader for file in files]

    def _load_nested(self, step: int | None = None, names: Patterns = None) -> object:
        with self._pools_nested() as pools:
            return view.load_from(pools, self.model, step, names, verify=self.settings.verify)

    @calls.entry_or(_load_nested)
    def load(self, step: int | None = None, names: Patterns = None) -> object:
        """The verified state of a step, or of the newest version, on the CPU.

        names: shell patterns of key paths (``"model.*"``): only that part of the state. Waits for
        saves in flight. Raises ``UsageError`` if there is no such version, or nothing in it matches
        a pattern, ``CorruptionError`` if none verifies. If the newest does not verify, the newest
        that does is returned, with an error in the log.
        """
        self._settle_to_read()
        with self._pools() as pools:
            return view.again(
                lambda: view.load_from(pools, self.model, step, names, verify=self.settings.verify)
            )

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
        """Copy a version over the tensors of ``state``, in place; its other leaves are set.

        names: only key paths that match these shell patterns. rename: from key paths of the
        version to those of the state (a dict or a function). strict: raise ``UsageError`` listing
        missing and unexpected tensors. Values other than tensors that ``state`` lacks are added
        only where all of the version is asked for: ``strict``, no ``names``, no ``rename``.

        Nothing is copied before all of it was verified: after an error ``state`` is untouched.
        Raises as ``load``.
        """
        before_write()  # other Checkpointers of this process may be saving these tensors
        self._settle_to_read()
        with self._pools() as pools:
            return view.again(
                lambda: view.restore_from(
                    pools, state, self.model, step, strict=strict, names=names, rename=rename,
                    verify=self.settings.verify,
                )
            )  # fmt: skip

    def load_version(self, token: bytes, part: str | None = None) -> object:
        """The verified state of the version that reference files call ``token``, or the value of
        its key ``part``. Waits for saves in flight if it is not there: else one of those might
        retire it meanwhile."""
        return self.use_version(
            token,
            lambda pool, entry: restore.load_part(pool, entry, part, verify=self.settings.verify),
        )

    @calls.marked
    def use_version(
        self, token: bytes, use: Callable[[PoolReader, VersionEntry], Result]
    ) -> Result:
        """What ``use`` gives for a version; waits as ``load_version``, and calls it again then."""
        self._check_usable()
        with contextlib.suppress(StaleError):
            return self._use_version(token, use)
        self._settle_to_read()
        return self._use_version(token, use)

    def _use_version(
        self, token: bytes, use: Callable[[PoolReader, VersionEntry], Result]
    ) -> Result:
        with self._pools() as pools:
            for pool in reversed(pools):
                with contextlib.suppress(StaleError):
                    return use(pool, view.of_token(pool.catalogue(), token))
        raise StaleError(f"version {token.hex()} is not in {self.path} (any more)")

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
        if self._keeper is None:
            raise calls.refused(f"removal of {os.fspath(path)} from a pool that is not open yet")
        self._put_removal(path, after)

    @calls.entry_or(_remove_nested)
    def remove(self, path: str | os.PathLike[str], *, after: SaveHandle | None = None) -> None:
        """Remove a reference file, or a directory with all that is in it, and then the versions
        that were led to from there alone. Returns at once.

        It is removed once the newest save that was asked for before is committed, or one after it
        (V5): if no save is, it stays, which ``close`` says. Where saves fail for lack of space, the
        first of those that wait goes all the same, if a newer version with a file remains.
        after: only if this save is committed, which is what the file stands in the way of.
        A file that is no reference is removed too. What goes wrong is logged. A save that is asked
        for after it puts a file there, or below it, at its commit.
        """
        self._check_usable()
        if self._writer is None:
            self._open_or_create()
        self._put_removal(path, after)

    def _put_removal(self, path: str | os.PathLike[str], after: SaveHandle | None) -> None:
        awaited = self._asked if after is None else after.of
        removal = Removal(os.path.abspath(os.fspath(path)), awaited, strictly=after is not None)
        self._removals.ask(removal)
        self._queue.put(_Removing(self, removal))

    def cut_off(self, tokens: Collection[bytes]) -> None:
        """On the worker: put the files aside that lead to these versions. They are parts of saves
        that were never completed, and would be taken for checkpoints."""
        if tokens and self._keeper is not None:
            self._keeper.cut_off(tokens)

    @calls.entry
    def let_go(self, versions: Collection[int]) -> None:
        """Retire those of these versions, by id, that no reference file leads to. Raises
        ``PortusError``."""
        self._check_usable()
        if self._writer is not None and self._keeper is not None:
            self._keeper.deleted()
            held = self._keeper.held(self._writer.catalogue()) | self._held_in_older()
            self._writer.retire(sorted(set(versions) - held))
            self._keeper.deleted()  # forgets the links of what is gone

    @calls.entry
    def fence(self) -> None:
        """Return when no save in flight reads the caller's tensors any more."""
        self._fence.wait()

    def _wait_nested(self, timeout: float | None = None) -> None:
        self._check_usable()
        if not self._newest_is_file:
            raise calls.refused("wait")

    @calls.entry_or(_wait_nested)
    def wait(self, timeout: float | None = None) -> None:
        """Return when every save so far is over; failures are reported as ``on_error`` says.

        Raises ``TimeoutError`` after ``timeout`` seconds. Where ``save`` writes files, in a signal
        handler that interrupted Portus, only the newest save is looked at.
        """
        self._check_usable()
        if not self._queue.drain(timeout):
            raise TimeoutError(f"saves to {self.path} are not over after {timeout:g} s")
        self._report()

    @calls.entry
    def close(self) -> None:
        """Finish what is in flight and let go of the pool. A second call does nothing. Failures
        that nobody heard of are reported as ``on_error`` says."""
        self._close()

    def _close(self) -> None:
        if self._process != os.getpid():
            return  # a forked child: everything is the parent's
        try:
            with self._opening:
                if self._closed:
                    return
                self._closed = True
            _OPEN.discard(self)
            self._queue.close()
            self._fence.close()
            self._removals.say_left()
            if self._writer is not None:
                POOLS.closed(self)
                self._home.close(made=self._created)
            self._closed = self._ended = True
        except BaseException:  # Ctrl-C: the copier may still write to the pool; close again
            self._closed = self._ended
            _OPEN.add(self)
            raise
        self._report()

    @property
    def path(self) -> str:
        """The pool file, made by the first save; or the address of the storage host. Once a pool
        file takes no stores any more, that of its successor."""
        return self._home.path

    @property
    def last_stats(self) -> SaveStats | None:
        """What the newest save cost so far."""
        return self._last.stats if self._last else None

    @property
    def uuid(self) -> bytes:
        """The pool's identity, 16 bytes; empty before the first save of a new pool."""
        return self._writer.superblock.uuid if self._writer else b""

    def announce(self) -> view.Sign:
        """By what others tell this pool, open as it is here, from any copy of it. The pool is made
        if it is not there. Raises what opening raises, and ``MediumError``."""
        if not self.uuid:
            self.prepare(0)
        writer = self._writer
        assert writer is not None
        holder = writer.announce() if isinstance(writer, PoolWriter) else ""
        return view.Sign(writer.superblock.uuid, holder)

    @property
    def has_committed(self) -> bool:
        """True once a save of this object was committed."""
        return self._commits > 0

    @calls.marked
    def settle(self, path: str | None, token: bytes) -> bool:
        """Wait for what is in flight, before somebody in this process loads from the pool (V11).
        True if there was anything. Never raises for a save that failed."""
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
        self, job: _Job, flat: FlatState, wanted: _Wanted, writer: Pool, keeper: Keeper
    ) -> Save:
        """Plan the save of ``job``, and copy what may not wait. A medium that refuses is kept in
        the save; after any other error, or Ctrl-C, ``job`` has to be given up."""
        snapshot = self._snapshots.take(
            flat,
            wanted.step,
            synchronous=wanted.synchronous,
            unchanged=self._nothing_stepped(),
            token=wanted.token,
        )
        placed: dict[str, str | None] = {}
        replaced: dict[str, str | None] = {}
        tensors = flat.tensors  # the policy outlives the copy, so it must not hold the storages
        known = weakref.ref(job)  # the save must not hold itself
        made: dict[str, Reference] = {}
        asked = job.asked
        policy = Policy(
            retire=lambda: self._surplus(writer, keeper, known()),
            describe=lambda index: name_of(tensors, index),
            audit=self._auditor.begin,
            publishing=lambda: keeper.settle(placed),
            committed=lambda version, steady: self._committed(
                keeper, version, steady, replaced, made, asked
            ),
            guilty=self._snapshots.suspects.accuse,
            changed=lambda indices: self._say_inexact(wanted.step, tensors, indices),
        )
        job.paths, job.placed, job.keeper = wanted.references.keys(), made, keeper
        save = job.save = Save(snapshot, self._home.draft(snapshot), lambda: self._before, policy)
        clock.begins(save, writer.medium.info.kind.value)
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
        """True if a file may be put at ``path`` now: nothing is there, and what was asked to be
        removed before is not to be removed with it."""
        return keeper.is_new(path) and not self._removals.takes(path)

    def _check_room(self, writer: Pool, snapshot: Snapshot) -> None:
        """Say before it hurts what a run of such saves needs: room for those kept and one more."""
        if self._before is not None and self._before.layout == snapshot.layout:
            return
        size = int(snapshot.length.sum())
        count = self._versions_to_come()
        try:
            writer.ensure(count * (size + _RECORDS))
        except MediumError as error:
            raise MediumError(
                error.errno,
                f"{self.path}: a checkpoint of this state has {size} bytes, and the pool needs "
                f"room for {count} more (those kept and the one in flight): {error.strerror}",
            ) from error

    def _versions(self) -> list[VersionInfo]:
        with self._pools() as pools:
            return self._versions_in(pools)

    def _versions_in(self, pools: Sequence[PoolReader]) -> list[VersionInfo]:
        models = [pool.catalogue().models.get(self.model) for pool in pools]
        return [entry.info for found in models if found for entry in found.versions]

    def _versions_to_come(self) -> int:
        """For how many more versions there has to be room: those kept and the one in flight."""
        found = self._writer.catalogue().models.get(self.model) if self._writer else None
        kept = len(found.versions) if found and self._keep else 0
        return 1 + max(1, (self._keep or 1) - kept)

    def _surplus(self, writer: Pool, keeper: Keeper, job: _Job | None) -> list[int]:
        """Versions beyond ``keep`` once ``job`` is committed, held by no reference file."""
        assert job is not None
        coming = job.save
        infos = self._versions()
        if not infos or (self.surplus is None and self._keep is None):
            return []
        if self.surplus is not None:
            keeper.deleted()  # other ranks remove reference files too: look at them now
        held = keeper.held(writer.catalogue(), coming) | self._held_in_older()
        if self.surplus is not None:
            surplus = [version for version in self.surplus(infos) if version not in held]
        else:
            assert self._keep is not None
            free = [info.id for info in infos if info.id not in held]
            surplus = free[: max(0, len(free) - (self._keep - 1))]
        self._let_go = frozenset(surplus)
        return surplus

    def _held_in_older(self) -> set[int]:
        """Versions of older pools that reference files lead to. Ids are unique in all pools."""
        held = [held_in(path, pool.catalogue()) for pool, path in self._home.older().items()]
        return set[int]().union(*held)

    def _drop_older(self) -> None:
        """On the worker: take older pools away of which the last commit let go as a whole."""
        with self._looking:
            older = [] if self._lookers else list(self._home.older())
            for pool in older:  # while somebody looks, all stay: the next commit will do
                if pool.catalogue().ids() <= self._let_go:
                    self._home.drop(pool)

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
        if keeper is self._keeper:  # else there is a successor of its pool by now
            self._before = version
        self._snapshots.learn(steady)
        self._commits += 1
        astray = {p: each.part for p, each in placed.items() if not keeper.is_here(each)}
        retire = self.surplus is None  # what others have a say about goes by a commit alone
        for path, part in {**replaced, **astray}.items():
            if not order.is_newer(path, asked):
                keeper.replace(path, version.record.info, part, retire=retire, asked=asked)
        for old in nested.take_displaced(keeper.is_here):
            keeper.let_go(old, retire=retire)

    def _after(self, job: _Job) -> None:
        """On the worker, when nobody waits any more."""
        save, paths = job.save, job.paths
        assert save is not None
        assert self._writer is not None
        assert self._keeper is not None
        if save.error is not None:
            self._note_failed(save, save.step)
            job.withdraw()
            self._removals.failed(save, self._keeper)
            return
        self._drop_older()
        self._removals.committed(paths, self._keeper)
        self._make_room(save.stats.copied_bytes + _RECORDS)
        self._auditor.settle(lambda: not self._queue.has_more())

    def _make_room(self, size: int) -> None:
        """On the worker, in the background: space for the next save, touched already."""
        assert self._writer is not None
        if self._queue.has_more():
            return  # the next save has its space by now, and sees to that of the one after it
        try:
            grown = self._writer.ensure(size)
            self._writer.touch(grown, lambda: not self._queue.has_more())
        except (MediumError, TransportError) as error:
            _log.warning("%s: the next save may not fit: %s", self.path, error)

    def _say_inexact(
        self, step: int, tensors: Sequence[TensorSpec], changed: Sequence[int]
    ) -> None:
        if not self._said_inexact:
            self._said_inexact = True
            _log.warning(
                "portus: step %d: another process wrote to %s%s while it was copied. What was "
                "copied is saved, and the version is marked inexact. This is said once; "
                "SaveStats.inexact_bytes tells of each save",
                step,
                name_of(tensors, changed[0]),
                f" and {len(changed) - 1} more" if len(changed) > 1 else "",
            )

    def _nothing_stepped(self) -> bool:
        """True if no optimizer stepped since the last save was called."""
        before, self._steps_at_last = self._steps_at_last, steps_seen()
        return before == self._steps_at_last

    # Errors.

    def _note_failed(self, save: Save | RefusedSave, step: int) -> None:
        self._failed.append(save)
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._queue.put(_Note(self, f"{self.model}@{step} at {when}: {save.error}"))

    def _too_late(self, step: int, waited_s: float) -> AbandonedError:
        """Training waited long enough for a place in the queue."""
        return AbandonedError(
            f"save of step {step} given up: two saves before it were not over after "
            f"{waited_s:.1f} s (fence_timeout). Save less often, or look at {self.path}"
        )

    def _refuse(self, step: int, error: PortusError, waited_s: float) -> RefusedSave:
        """Give a save up before it began."""
        refused = self._asked = RefusedSave(error, SaveStats(call_s=waited_s, queue_s=waited_s))
        self._note_failed(refused, step)
        return refused

    def _report(self, *, is_save: bool = False) -> None:
        """Report failed saves that nobody heard of, each once: the first of them, if it is raised;
        the next call has the next one."""
        with contextlib.suppress(IndexError):
            while True:  # ends: there are no more; the worker may add one at any time
                save = self._failed.popleft()
                error = save.error
                if error is None or save.reported:
                    continue
                if not self.has_committed and not self._queue.on_worker():
                    self._queue.catch_up(self.settings.fence_timeout)  # the first may be in flight
                goes_on = self.has_committed or (is_save and isinstance(error, AbandonedError))
                if self.settings.on_error == "raise" or not goes_on:
                    if is_save and self.is_heard_of:
                        self._failed.appendleft(save)
                        return
                    raise error
                if isinstance(error, AbandonedError) and not self.has_committed:
                    self._given_up = self._given_up or error
                _log.warning("portus: a save failed; training goes on: %s", error)
        given_up = None if is_save or self.has_committed else self._given_up
        if given_up is not None:
            self._given_up = None
            raise given_up

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                f"this Checkpointer was made in process {self._process}; a forked child makes "
                f"its own, with a pool of its own"
            )
        if self._closed:
            raise UsageError("this Checkpointer is closed")

    # The pool.

    def _open_or_create(self) -> tuple[Pool, Keeper]:
        with self._opening:
            with self._looking:
                self._moving = self._home.succeed() or self._moving
                if self._moving:  # if this fails, the next save tries again
                    self._open()
                    self._moving = False
            while self._writer is None or self._keeper is None:  # ends: others took theirs away
                self._home.create()
                self._open_if_there()
            return self._writer, self._keeper

    def _open_if_there(self) -> None:
        """Nothing if whoever made the pool, and never saved to it, took it away meanwhile."""
        try:
            self._open()
        except (MediumError, UsageError):
            if self._home.exists():
                raise

    def _open(self) -> None:
        writer = self._home.open()
        try:
            keeper = self._home.keeper(writer)
            keeper.begin(None if isinstance(writer, PoolWriter) else self.model)
            self._before = self._newest_of(writer)
        except BaseException:
            self._home.close(made=False)
            raise
        writer.deleted, writer.advice = keeper.deleted, keeper.advice
        self._writer, self._keeper = writer, keeper
        POOLS.closed(self)
        POOLS.opened(self)

    def _newest_of(self, writer: Pool) -> Before | None:
        """The version to share with: what was frozen before a restart still is."""
        found = writer.catalogue().models.get(self.model)
        if not found:
            return None
        try:
            record = writer.record(found.versions[-1])
            layout = bytes(writer.payload(record.layout, Kind.LAYOUT))
            return Before(record, layout, bytes(writer.payload(record.tree, Kind.TREE)))
        except PortusError as error:
            _log.warning("%s: the newest version is damaged: %s", self.path, error)
            return None

    @contextlib.contextmanager
    def _pools(self) -> Iterator[list[PoolReader]]:
        """The open pool, last, and those that it is a successor of; all stay meanwhile."""
        with self._looking:
            self._lookers += 1
            pools: list[PoolReader] = list(self._home.older())
            if self._writer is not None:
                pools.append(self._writer)
        try:
            yield pools
        finally:
            with self._looking:
                self._lookers -= 1

    def _settle_to_read(self) -> None:
        self._check_usable()
        if self._writer is None:
            raise UsageError(f"{self.path}: there is no pool yet; nothing was saved")
        if not self._queue.on_worker():
            self._queue.catch_up()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the caller of save asked for."""

    step: int
    references: References
    synchronous: bool
    token: bytes | None


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
        """On the worker, once it failed: what was placed for it would be taken for checkpoints.
        Not if a storage host did not say what became of its commit."""
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
        """No reservation and no fence is left behind; whoever called hears of it at once."""
        if self.save is not None:
            self.save.fail(error)
            self._owner._queue.put(_Withdrawal(self))


class _Chore:
    """Work that leaves nothing to end, and for which nobody waits."""

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
            self._owner._make_room(self._owner._versions_to_come() * (self._size + _RECORDS))
        except PortusError as error:
            _log.warning("%s: the first save is not prepared for: %s", self._owner.path, error)


class _Note(_Chore):
    """A save failed, and others may ask: on the worker, since a medium that hangs holds this up."""

    def __init__(self, owner: Checkpointer, text: str) -> None:
        self._owner: Final = owner
        self._text: Final = text

    def run(self) -> None:
        self._owner._home.note_failure(self._text)


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
        assert self._owner._keeper is not None
        self._owner._removals.reached(self._removal, self._owner._keeper)


_OPEN: Final[weakref.WeakSet[Checkpointer]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends without closing still gets what it asked to be saved."""
    for checkpointer in list(_OPEN):
        try:
            checkpointer.close()
        except PortusError as error:  # nobody is left to catch it, and others are still to close
            _log.error("portus: %s: a save failed: %s", checkpointer.path, error)


def check_keep(keep: int | None) -> None:
    """Raise ``UsageError`` for what is no number of versions to keep."""
    if keep is not None and not (isinstance(keep, int) and keep >= 1):
        raise UsageError(f"keep: expected at least 1, or None for all, found {keep!r}")


def _check_model(model: str) -> None:
    if not isinstance(model, str) or not model or len(model.encode()) > 200:
        raise UsageError(f"model: expected a name of 1 to 200 bytes, found {model!r}")


def _checked_step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError as error:
        raise UsageError(f"step: expected an integer, found {step!r:.80}") from error
    if not -(1 << 63) <= number < 1 << 63:
        raise UsageError(f"step: expected 64 bits, found {number}")
    return number


def _checked(token: bytes | None) -> bytes | None:
    if token is not None and len(token) != 16:
        raise UsageError(f"token: expected 16 bytes, found {len(token)}")
    return token


def _references(
    reference: str | os.PathLike[str] | Mapping[str, str] | None, state: object
) -> References:
    """Absolute paths, and which part of ``state`` each is to lead to."""
    if reference is None:
        return {}
    if not isinstance(reference, Mapping):
        return {os.path.abspath(os.fspath(reference)): None}
    for path, part in reference.items():
        if not isinstance(state, dict) or part not in state:
            raise UsageError(f"reference: {path} is to lead to {part!r}, which is no key of state")
    return {os.path.abspath(path): part for path, part in reference.items()}
