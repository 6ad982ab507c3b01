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
from types import TracebackType
from typing import Final, Literal

from portus.client import restore, view
from portus.client.fence import Fence, before_write, steps_seen
from portus.client.keeper import Keeper, keeper_of
from portus.client.resolve import POOLS
from portus.client.restore import Patterns, Rename, Restored
from portus.client.snapshot import SnapshotMode, Snapshots, name_of
from portus.client.state import FlatState
from portus.errors import AbandonedError, MediumError, PortusError, UsageError
from portus.format.layout import Kind
from portus.index.directory import (
    WRITERS,
    create_pool,
    has_pool,
    make_directory,
    pool_file,
    remove_pool,
)
from portus.index.pool import PoolWriter
from portus.media.dax import is_device
from portus.media.local import LocalFiles
from portus.media.warm import warm
from portus.pipeline.handle import RefusedSave, SaveHandle, SaveStats
from portus.pipeline.plan import Before, Flags, Snapshot
from portus.pipeline.queue import Place, Queue
from portus.pipeline.run import Policy, Save
from portus.spec import VersionInfo

_log: Final = logging.getLogger("portus")

OnError = Literal["warn", "raise"]

_RECORDS: Final = 1 << 20
"""Bytes of room for the records of a version, roughly."""


class Checkpointer:
    """Saves the state of a training run to a pool, and loads it back.

    ``save`` returns at once; the bytes are copied straight from the tensors while training goes
    on, and an optimizer's step waits until what it is going to write has been copied. One save is
    in flight and one queued; a third call waits. Use it as a context manager, or close it.

    pool: a pool file; a pool directory (one file for each model in it, made at the first save); or
        a DAX device (``/dev/dax0.0``; a blank one becomes a pool at the first save). None:
        ``$PORTUS_POOL``, else ``.portus`` in the current directory.
    model: a name for the run (or for this rank's part of it).
    keep: newest versions kept; older ones are retired by the commit that makes them surplus. A
        version that a reference file leads to is kept besides. None keeps all.
    on_error: what the next call does after a save failed: "warn" logs it, "raise" raises it. A
        pool that cannot be opened at the start raises always.
    snapshot: "auto" copies what the fence guards in the background and the rest at once; "sync"
        copies all at once; "device" clones device memory on the device first, if it fits.
    verify: False loads without comparing checksums, on your own account.
    fence_timeout: the longest, in seconds, that an optimizer's step waits for a copy, or a call
        of ``save`` for its place in the queue; then that save is given up and training goes on.
        Keep it under the process group's time-out.
    max_bytes: the pool file does not grow beyond.

    A pool file has one writer process: an existing one is locked here. Raises ``BusyError`` naming
    the holder, ``MediumError``, ``CorruptionError``, ``UsageError``. Threads may share it; a
    forked child may not use it.
    """

    def __init__(
        self,
        pool: str | os.PathLike[str] | None = None,
        model: str = "default",
        *,
        keep: int | None = 2,
        on_error: OnError = "warn",
        snapshot: Literal["auto", "sync", "device"] = "auto",
        verify: bool = True,
        fence_timeout: float = 60.0,
        max_bytes: int | None = None,
    ) -> None:
        _check_arguments(model, keep, on_error, fence_timeout)
        self.model: Final = model
        self.path: Final = pool_file(pool, model)
        """The pool file, made by the first save."""
        self._keep: Final = keep
        self._on_error: Final = on_error
        self._verify: Final = verify
        self._max_bytes: Final = max_bytes
        self._fence_timeout: Final = fence_timeout
        self._process: Final = os.getpid()
        self._snapshots: Final = Snapshots(model, SnapshotMode(snapshot))
        self._queue: Final = Queue(f"portus-{model}")
        self._opening: Final = threading.RLock()
        self._writer: PoolWriter | None = None
        self._keeper: Keeper | None = None
        self._before: Before | None = None
        self._failed: list[Save | RefusedSave] = []
        self._last: Save | None = None
        self._audited = 0
        self._closed = False
        self._created = False
        self._steps_at_last = -1
        self._fence: Final = Fence(fence_timeout)
        in_directory = pool is None and not is_device(self.path)
        POOLS.allow(os.path.dirname(self.path) if in_directory else os.fspath(pool or self.path))
        try:
            if has_pool(self.path):
                self._open()
        except BaseException:
            self._fence.close()
            raise
        _OPEN.add(self)

    def save(
        self,
        state: object,
        step: int,
        *,
        reference: str | os.PathLike[str] | None = None,
        synchronous: bool = False,
    ) -> SaveHandle:
        """Save ``state`` as it is now: nested dicts and lists of tensors and plain values.

        The tensors are not copied before this returns, unless something other than an optimizer's
        step may write them; do not write them by hand before ``fence()`` or the next step.

        reference: put a small file here that ``torch.load`` follows into the pool. On a new path
            it is there when this returns; what is at an existing path is replaced at the commit.
        synchronous: copy everything, and return when the version is durable (or failed).

        Raises ``UsageError`` naming the key path of what cannot be saved. What fails later is on
        the handle, and reported at the next call (``on_error``).
        """
        start = time.perf_counter()
        self._check_usable()
        self._report()
        step = _checked_step(step)
        place, job = Place(), _Job(self)
        try:
            admitted = self._queue.admit(place, None if synchronous else self._fence_timeout)
            queue_s = time.perf_counter() - start
            if not admitted:
                return SaveHandle(self._refuse(step, queue_s))
            flat = self._snapshots.flatten(state)
            save = self._begin(job, flat, step, _absolute(reference), synchronous)
            save.stats.queue_s = queue_s
            if save.over:
                self._queue.dismiss(place)
                self._note_failed(save)
            else:
                self._queue.put(job, place)
        except BaseException as error:  # Ctrl-C too: what nobody runs, nobody may wait for
            if self._queue.dismiss(place):
                job.give_up(error)
            raise
        self._last = save
        if synchronous:
            self._queue.drain()
        save.stats.call_s = time.perf_counter() - start
        return SaveHandle(save)

    def prepare(self, size: int) -> None:
        """Make the pool, and room in it for states of ``size`` bytes, in the background.

        The first save is then as fast as later ones. If nothing is ever saved, ``close`` takes
        the new pool away again. Raises what opening raises; a lack of room is left to the save.
        """
        self._check_usable()
        self._created = not has_pool(self.path)
        self._open_or_create()
        self._queue.put(_Preparation(self, size))

    def load(self, step: int | None = None, names: Patterns = None) -> object:
        """The verified state of a step, or of the newest version, on the CPU.

        names: shell patterns of key paths (``"model.*"``): only that part of the state. Waits for
        saves in flight. Raises ``UsageError`` if there is no such version, ``CorruptionError`` if
        none verifies. If the newest does not verify, the newest that does is returned, with an
        error in the log.
        """
        pool = self._pool_to_read()
        return view.again(
            lambda: view.file_load(pool, self.model, step, names, verify=self._verify)
        )

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
        missing and unexpected tensors. Nothing is copied before all of it was verified: after an
        error ``state`` is untouched. Raises as ``load``.
        """
        before_write()  # other Checkpointers of this process may be saving these tensors
        pool = self._pool_to_read()
        return view.again(
            lambda: view.file_restore(
                pool, state, self.model, step, strict=strict, names=names, rename=rename,
                verify=self._verify,
            )
        )  # fmt: skip

    def load_version(self, token: bytes) -> object:
        """The verified state of the version that reference files call ``token``."""
        pool = self._pool_to_read()
        return restore.load(pool, view.of_token(pool.catalogue(), token), verify=self._verify)

    def steps(self) -> list[int]:
        """Steps of the committed versions, oldest commit first. A step may come twice."""
        return [info.step for info in self.versions()]

    def versions(self) -> list[VersionInfo]:
        """The committed versions of this model, oldest commit first."""
        self._check_usable()
        found = self._writer.catalogue().models.get(self.model) if self._writer else None
        return [entry.info for entry in found.versions] if found else []

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a reference file, and then the version that it alone leads to.

        Queued behind the saves asked for before; returns at once. A file that is no reference is
        removed too. What goes wrong is reported as for a save.
        """
        self._check_usable()
        self._open_or_create()
        self._queue.put(_Removal(self, _absolute(path) or ""))

    def fence(self) -> None:
        """Return when no save in flight reads the caller's tensors any more."""
        self._fence.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Return when every save so far is over; failures are reported as ``on_error`` says.

        Raises ``TimeoutError`` after ``timeout`` seconds.
        """
        self._check_usable()
        if not self._queue.drain(timeout):
            raise TimeoutError(f"saves to {self.path} are not over after {timeout:g} s")
        self._report()

    def close(self) -> None:
        """Finish what is in flight and let go of the pool. A second call does nothing."""
        if self._process != os.getpid():
            return  # a forked child: everything is the parent's
        with self._opening:
            if self._closed:
                return
            self._closed = True
        _OPEN.discard(self)
        try:
            self._queue.close()
        except BaseException:  # Ctrl-C: the copier still writes to the pool; close again
            self._closed = False
            _OPEN.add(self)
            raise
        self._fence.close()
        if self._writer is not None:
            unused = self._created and self._writer.catalogue().root.sequence == 0
            POOLS.closed(self)
            is_last = WRITERS.close(self._writer)
            if unused and is_last:
                remove_pool(self.path, LocalFiles())
        self._report()

    @property
    def last_stats(self) -> SaveStats | None:
        """What the newest save cost so far."""
        return self._last.stats if self._last else None

    @property
    def uuid(self) -> bytes:
        """The pool's identity, 16 bytes; empty before the first save of a new pool."""
        return self._writer.superblock.uuid if self._writer else b""

    def settle(self, path: str | None, token: bytes) -> bool:
        """Wait for what is in flight, before somebody in this process loads from the pool (V11).
        True if there was anything. Never raises for a save that failed."""
        if self._queue.idle() or self._queue.on_worker():
            return False
        self._queue.drain()
        return True

    def __del__(self) -> None:
        if getattr(self, "_closed", True):  # or it was never made
            return
        with contextlib.suppress(PortusError):
            self.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Saving.

    def _begin(
        self, job: _Job, flat: FlatState, step: int, path: str | None, synchronous: bool
    ) -> Save:
        """Plan the save of ``job``, and copy what may not wait. A medium that refuses is kept in
        the save; after any other error, or Ctrl-C, ``job`` has to be given up."""
        writer, keeper = self._open_or_create()
        snapshot = self._snapshots.take(
            flat, step, synchronous=synchronous, unchanged=self._nothing_stepped()
        )
        placed = path is not None and keeper.is_new(path)
        tensors = flat.tensors  # the policy outlives the copy, so it must not hold the storages
        policy = Policy(
            retire=lambda: self._surplus(writer, keeper, snapshot.token),
            describe=lambda index: name_of(tensors, index),
            audit=self._audited,
            publishing=lambda: keeper.settle(path) if placed and path else None,
            committed=lambda version, steady: self._committed(
                version, steady, None if placed else path
            ),
            guilty=self._snapshots.accuse,
        )
        save = job.save = Save(snapshot, writer, lambda: self._before, policy)
        try:
            self._check_room(writer, snapshot)
            save.copy_now()
            if placed and path is not None:
                keeper.place(path, snapshot.token, step, self.model)
            self._fence.guard(save)
        except MediumError as error:
            save.fail(error)
        return save

    def _check_room(self, writer: PoolWriter, snapshot: Snapshot) -> None:
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

    def _versions_to_come(self) -> int:
        """For how many more versions there has to be room: those kept and the one in flight."""
        kept = len(self.versions()) if self._keep else 0
        return 1 + max(1, (self._keep or 1) - kept)

    def _surplus(self, writer: PoolWriter, keeper: Keeper, coming: bytes) -> list[int]:
        """Versions beyond ``keep`` once ``coming`` is committed, held by no reference file."""
        found = writer.catalogue().models.get(self.model)
        if self._keep is None or found is None:
            return []
        held = keeper.held(writer.catalogue(), coming)
        free = [entry.info.id for entry in found.versions if entry.info.id not in held]
        return free[: max(0, len(free) - (self._keep - 1))]

    def _committed(self, version: Before, steady: Flags, path: str | None) -> None:
        """On the worker, right after a commit. ``path``: a reference file to replace now."""
        self._before = version
        self._snapshots.learn(steady)
        self._audited += 1
        if path is not None and self._keeper is not None:
            self._keeper.replace(path, version.record.info)

    def _after(self, save: Save) -> None:
        """On the worker, when nobody waits any more."""
        if save.error is not None:
            self._note_failed(save)
            return
        assert self._writer is not None
        self._make_room(save.stats.copied_bytes + _RECORDS)

    def _make_room(self, size: int) -> None:
        """On the worker, in the background: space for the next save, touched already."""
        assert self._writer is not None
        if self._queue.has_more():
            return  # the next save has its space by now, and sees to that of the one after it
        try:
            grown = self._writer.ensure(size)
            warm(self._writer.medium, grown, lambda: not self._queue.has_more())
        except MediumError as error:
            _log.warning("%s: the next save may not fit: %s", self.path, error)

    def _nothing_stepped(self) -> bool:
        """True if no optimizer stepped since the last save was called."""
        before, self._steps_at_last = self._steps_at_last, steps_seen()
        return before == self._steps_at_last

    # Errors.

    def _note_failed(self, save: Save | RefusedSave) -> None:
        self._failed.append(save)

    def _refuse(self, step: int, waited_s: float) -> RefusedSave:
        """Give a save up before it began: training waited long enough for a place in the queue."""
        error = AbandonedError(
            f"save of step {step} given up: two saves before it were not over after "
            f"{waited_s:.1f} s (fence_timeout). Save less often, or look at {self.path}"
        )
        refused = RefusedSave(error, SaveStats(call_s=waited_s, queue_s=waited_s))
        self._note_failed(refused)
        return refused

    def _report(self) -> None:
        """Report failed saves that nobody heard of, once."""
        failed, self._failed = self._failed, []
        for save in failed:
            error = save.error
            if error is None or save.reported:
                continue
            if self._on_error == "raise":
                raise error
            _log.warning("portus: a save failed; training goes on: %s", error)

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                f"this Checkpointer was made in process {self._process}; a forked child makes "
                f"its own, with a pool of its own"
            )
        if self._closed:
            raise UsageError("this Checkpointer is closed")

    # The pool.

    def _open_or_create(self) -> tuple[PoolWriter, Keeper]:
        with self._opening:
            if self._writer is None or self._keeper is None:
                if not has_pool(self.path):
                    make_directory(os.path.dirname(self.path))
                    create_pool(self.path, LocalFiles())
                return self._open()
            return self._writer, self._keeper

    def _open(self) -> tuple[PoolWriter, Keeper]:
        writer = WRITERS.open(self.path, max_bytes=self._max_bytes)
        try:
            keeper = keeper_of(self.path, writer)
            self._before = self._newest_of(writer)
        except BaseException:
            WRITERS.close(writer)
            raise
        writer.deleted = keeper.deleted
        self._writer, self._keeper = writer, keeper
        POOLS.opened(self)
        return writer, keeper

    def _newest_of(self, writer: PoolWriter) -> Before | None:
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

    def _pool_to_read(self) -> PoolWriter:
        self._check_usable()
        if self._writer is None:
            raise UsageError(f"{self.path}: there is no pool yet; nothing was saved")
        if not self._queue.on_worker():
            self._queue.drain()
        return self._writer


class _Job:
    """A save in the queue, from before it is planned."""

    def __init__(self, owner: Checkpointer) -> None:
        self._owner: Final = owner
        self.save: Save | None = None

    def run(self) -> None:
        assert self.save is not None
        self.save.run()
        self._owner._after(self.save)

    def fail(self, error: BaseException) -> None:
        if self.save is not None and not self.save.over:
            self.save.fail(error)
            self._owner._note_failed(self.save)

    def hurry(self) -> None:
        if self.save is not None:
            self.save.hurry()

    def give_up(self, error: BaseException) -> None:
        """No reservation and no fence is left behind; whoever called hears of it at once."""
        if self.save is not None:
            self.save.fail(error)


class _Chore:
    """Work that leaves nothing to end, and for which nobody waits."""

    def __init__(self, owner: Checkpointer) -> None:
        self._owner: Final = owner

    def fail(self, error: BaseException) -> None:
        """Nothing to end."""

    def hurry(self) -> None:
        """It takes no longer than it must."""


class _Preparation(_Chore):
    """Room for the first saves, made in the background."""

    def __init__(self, owner: Checkpointer, size: int) -> None:
        super().__init__(owner)
        self._size: Final = size

    def run(self) -> None:
        self._owner._make_room(self._owner._versions_to_come() * (self._size + _RECORDS))


class _Removal(_Chore):
    """A removal in the queue."""

    def __init__(self, owner: Checkpointer, path: str) -> None:
        super().__init__(owner)
        self._path: Final = path

    def run(self) -> None:
        keeper = self._owner._keeper
        assert keeper is not None
        try:
            keeper.remove(self._path)
        except PortusError as error:
            _log.warning("portus: %s was not removed: %s", self._path, error)


_OPEN: Final[weakref.WeakSet[Checkpointer]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends without closing still gets what it asked to be saved."""
    for checkpointer in list(_OPEN):
        checkpointer.close()


def _check_arguments(model: str, keep: int | None, on_error: str, fence_timeout: float) -> None:
    if not model or len(model.encode()) > 200:
        raise UsageError(f"model: expected a name of 1 to 200 bytes, found {model!r}")
    if keep is not None and keep < 1:
        raise UsageError(f"keep: expected at least 1, or None for all, found {keep}")
    if on_error not in ("warn", "raise"):
        raise UsageError(f"on_error: expected 'warn' or 'raise', found {on_error!r}")
    if not fence_timeout > 0:
        raise UsageError(f"fence_timeout: expected seconds over 0, found {fence_timeout}")


def _checked_step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError as error:
        raise UsageError(f"step: expected an integer, found {step!r:.80}") from error
    if not -(1 << 63) <= number < 1 << 63:
        raise UsageError(f"step: expected 64 bits, found {number}")
    return number


def _absolute(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.path.abspath(os.fspath(path))
