"""``PoolCheckpointer``: the ``Checkpointer`` of a pool."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from portus.client.checkpointer import Checkpointer
from portus.client.fence.fence import Fence
from portus.client.files.headroom import Headroom
from portus.client.files.home import FileHome, Home, home_of
from portus.client.files.opened import RunPool
from portus.client.files.run_mirror import Mirroring
from portus.client.job.ledger import Ledger
from portus.client.job.settings import Settings, SettingsDict, mirror_of, say_unmirrored
from portus.client.loading.over import Rename
from portus.client.loading.patterns import Patterns
from portus.client.loading.resolve import POOLS
from portus.client.loading.restored import Restored
from portus.client.loading.run_versions import RunVersions
from portus.client.saves import RunSaves
from portus.client.shards.rank_part import RankPart
from portus.client.wanted import WantedSave, check_model
from portus.errors import PortusError, UsageError
from portus.index.groups import part_of
from portus.index.keep import Keep
from portus.index.place import Place
from portus.media import calls
from portus.pipeline.handle import SaveHandle, SaveStats
from portus.pipeline.queue import Queue
from portus.spec import VersionInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log: Final = logging.getLogger("portus")


class PoolCheckpointer(Checkpointer):
    """See ``Checkpointer``. One save can be in flight and one queued; a third call blocks.

    ``pool`` is a pool file; a pool directory (one file for each model in it, made at the first
    save); a DAX device (a blank one becomes a pool at the first save); or the address of a storage
    host.

    pool: None is ``$PORTUS_POOL``, else ``.portus`` in the current directory.
    model: a name for the run (or for this rank's part of it).
    keep: a version that a reference file leads to is kept besides, until that file is removed, and
        longer if ``every``, ``within`` or ``best`` want it.

    A pool file has one writer process: the constructor locks an existing one, and raises
    ``BusyError``, which names the holder.

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
        keeping = Keep.of(keep)
        self.settings: Final = Settings(**settings)
        """How it saves and loads."""
        self.model: Final = model
        max_bytes, durable = self.settings.max_bytes, self.settings.durable
        home = home_of(Place.named(pool), model, max_bytes, links, durable)
        self._queue: Final = Queue(f"portus-{model}")
        self._pool: Final = RunPool(
            home,
            model,
            keeping,
            _mirroring(self.settings, model, keeping, home),
            _registers(weakref.ref(self)),
        )
        self._headroom: Final = Headroom(self._pool, self._queue)
        self.part: Final = RankPart(self._pool, self._headroom)
        """What other ranks have a say about, where this saves a part of their groups."""
        self._versions: Final = RunVersions(self._pool, self._queue, verify=self.settings.verify)
        self._fence: Final = Fence(self.settings.fence_timeout)
        self._ledger: Final = Ledger(self._pool, self._queue, self.settings)
        self._saves: Final = RunSaves(
            self._pool,
            self._queue,
            self._fence,
            self._ledger,
            self._headroom,
            self.part,
            self.settings,
        )
        self._ended = False
        POOLS.allow(home.allowed)
        if self._pool.mirroring is not None:
            POOLS.allow_mirror(self._pool.mirroring.place)
        try:
            if home.exists():
                self._pool.open_if_there()
            else:
                self._pool.begin_with_mirror()
        except BaseException:
            self._fence.close()
            if self._pool.mirroring is not None:
                self._pool.mirroring.close()
            self._ledger.close()
            raise
        self._ledger.count_steps()
        _OPEN.add(self)

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
        """See ``Checkpointer.save``. A step may come twice.

        At the path ``reference`` it puts a small file that ``torch.load`` follows into the pool. On
        a new path it exists when this returns; a file that exists already is replaced at the
        commit. A dict from paths to keys of ``state`` puts a file at each path, which leads to the
        value of that key.

        token: 16 bytes, never used before, that name the version for ever; None draws them.
        """
        self._pool.check_usable()
        wanted = WantedSave.of(
            state, step,
            reference=reference, synchronous=synchronous, token=token, metrics=metrics,
        )  # fmt: skip
        return self._saves.save(state, wanted)

    @calls.entry
    def prepare(self, size: int) -> None:
        """Create the pool now, and room in it for states of ``size`` bytes in the background.

        The first save is then as fast as later ones. If nothing is ever saved, ``close`` removes
        the new pool. Raises the errors of the constructor; the save reports a lack of space.
        """
        self._headroom.prepare(size)

    def load(self, step: int | None = None, names: Patterns = None, **settings: Any) -> object:
        """See ``Checkpointer.load``. Takes a version that is damaged here, or a ``step`` that no
        longer exists here, from the mirror, and logs an error."""
        if settings:
            raise UsageError(
                f"load: {self.path} is a pool, which loads to the CPU; found {sorted(settings)}, "
                "which are for directories"
            )
        return self._versions.load(step, names)

    @calls.entry
    def restore_into(
        self,
        state: object,
        step: int | None = None,
        *,
        strict: bool = True,
        names: Patterns = None,
        rename: Rename = None,
        weights_only: bool | None = None,
    ) -> Restored:
        return self._versions.restore_into(state, step, strict=strict, names=names, rename=rename)

    def load_version(self, token: bytes, part: str | None = None) -> object:
        """The verified state of the version that reference files name ``token``, or the value of
        its key ``part``. If the version is not there, this waits for the saves in flight and looks
        again."""
        return self._versions.load_version(token, part)

    def versions(self) -> list[VersionInfo]:
        return self._versions.infos()

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
        self._saves.remove(path, after)

    @calls.entry
    def fence(self) -> None:
        self._fence.wait()

    def wait(self, timeout: float | None = None) -> None:
        """See ``Checkpointer.wait``. In a signal handler that interrupted Portus, where ``save``
        writes files, only the newest save counts."""
        self._saves.wait(timeout)

    @calls.entry
    def close(self) -> None:
        """See ``Checkpointer.close``. Waits up to ``mirror_wait`` seconds for the mirror."""
        self._close()

    def _close(self) -> None:
        if self._pool.is_inherited:
            return
        try:
            with self._pool.opening:
                if self._pool.closed:
                    return
                self._pool.closed = True
            _OPEN.discard(self)
            self._queue.close()
            self._fence.close()
            self._saves.removals.say_left()
            self._ledger.close()
            if self._pool.mirroring is not None:
                self._pool.mirroring.close()
            if self._pool.writer is not None:
                self._versions.closed()
                self._pool.home.close(made=self._pool.created)
            self._pool.closed = self._ended = True
        except BaseException:  # Ctrl-C: the copier may still write to the pool; close again
            self._pool.closed = self._ended
            _OPEN.add(self)
            raise
        self._ledger.tell()

    @property
    def path(self) -> str:
        """The path of the pool file, which the first save creates, or the address of the storage
        host. If a pool file accepts no more writes, the path of its successor."""
        return self._pool.home.path

    @property
    def last_stats(self) -> SaveStats | None:
        return self._saves.last.stats if self._saves.last else None

    @property
    def uuid(self) -> bytes:
        """The pool's identity, 16 bytes; empty before the first save of a new pool."""
        return self._versions.uuid

    @property
    def has_committed(self) -> bool:
        return self._ledger.reports.has_committed

    def __del__(self) -> None:
        if not hasattr(self, "_ended") or self._pool.closed:  # or it was never made
            return
        with contextlib.suppress(PortusError):
            self._close()  # it has no pool, or POOLS would hold it


_OPEN: Final[weakref.WeakSet[PoolCheckpointer]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Finish the saves of a program that ends without closing."""
    for checkpointer in list(_OPEN):
        try:
            checkpointer.close()
        except PortusError as error:  # nobody is left to catch it, and others are still to close
            _log.error("portus: %s: a save failed: %s", checkpointer.path, error)


def _registers(known: weakref.ref[PoolCheckpointer]) -> Callable[[], None]:
    """Has loads in this process find the pool that is open now. Holds nobody: a ``Checkpointer``
    that nobody holds is closed."""

    def register() -> None:
        owner = known()
        if owner is not None:
            owner._versions.opened(owner)

    return register


def _mirroring(settings: Settings, model: str, keep: Keep | None, home: Home) -> Mirroring | None:
    """What copies this run to the mirror of its settings, if it has one."""
    address = mirror_of(settings)
    if address is None:
        return None
    part = part_of(model)
    if part is not None:  # of a part alone nothing could be gone on from
        name, rank, _ = part
        if rank == 0:
            say_unmirrored(
                name, "it is a part that was saved on its own; portus.dcp mirrors whole groups"
            )
        return None
    if not isinstance(home, FileHome):
        why = f"it is on a storage host ({home.path}), whose mirror is that of the host"
        if settings.mirror is not None:
            raise UsageError(f"mirror: model {model!r}: {why}")
        say_unmirrored(model, why)  # the variable is for all runs of this machine
        return None
    return Mirroring(address, model, keep, wait_s=settings.mirror_wait)
