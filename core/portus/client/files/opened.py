"""The pool of a run while it is open: made, gone on from in a successor, looked at."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final

from portus.client.files.home import Home, Pool
from portus.client.files.keeper import Keeper
from portus.client.files.run_mirror import Mirroring
from portus.client.files.surplus import Surplus
from portus.errors import MediumError, PortusError, UsageError
from portus.format.layout import RecordKind
from portus.index.keep import Keep
from portus.index.pool import PoolWriter
from portus.index.reader import PoolReader
from portus.pipeline.plan import Before

_log: Final = logging.getLogger("portus")


class RunPool:
    """What is open of a home. ``writer``, ``keeper``: None before the pool is open. ``before``: the
    version to share with. ``surplus``: what the next commit retires. ``created``: it was made to
    make room in it, and takes itself away if nothing is saved to it. ``opening``: held while it is
    opened, and by who ends that; ``closed``: that was done, or is being done. Threads may share it.

    on_open: called after each opening, with ``opening`` held; the pool may be another one then.
    """

    def __init__(
        self,
        home: Home,
        model: str,
        keep: Keep | None,
        mirroring: Mirroring | None,
        on_open: Callable[[], None],
    ) -> None:
        self.home: Final = home
        self.model: Final = model
        self.surplus: Final = Surplus(model, keep, home)
        self.writer: Pool | None = None
        self.keeper: Keeper | None = None
        self.before: Before | None = None
        self.mirroring = mirroring
        self._promised: bytes | None = None
        """The identity of the pool that is to be made."""
        self.created = False
        self.opening: Final = threading.RLock()
        self.closed = False
        self._process: Final = os.getpid()
        self._keep: Final = keep
        self._on_open: Final = on_open
        self._moving = False
        """True from when the pool has a successor until that is open."""
        self._looking: Final = threading.RLock()
        self._lookers = 0
        """Threads that look at all pools now."""

    @property
    def is_inherited(self) -> bool:
        """True in a forked child: everything is the parent's."""
        return self._process != os.getpid()

    def check_usable(self) -> None:
        """Raise ``UsageError`` once it is closed, and in a forked child."""
        if self.is_inherited:
            raise UsageError(
                f"this Checkpointer was made in process {self._process}; a forked child must "
                "make its own, with its own pool"
            )
        if self.closed:
            raise UsageError("this Checkpointer is closed")

    def open_or_create(self) -> tuple[Pool, Keeper]:
        """The pool to save to: the successor, once a pool file takes no more writes. Raises what
        opening raises."""
        with self.opening:
            with self._looking:
                self._moving = self.home.succeed() or self._moving
                if self._moving:  # if this fails, the next save tries again
                    self._open()
                    self._moving = False
            while self.writer is None or self.keeper is None:  # ends: others took theirs away
                promised, self._promised = self._promised, None
                self.home.create(promised)
                self.open_if_there()
            return self.writer, self.keeper

    def open_if_made(self) -> None:
        """Open the pool, if another process made it meanwhile. Raises what opening raises."""
        with self.opening:
            if self.writer is None and self.home.exists():
                self.open_if_there()

    def open_if_there(self) -> None:
        """Nothing if whoever made the pool, and never saved to it, took it away meanwhile."""
        try:
            self._open()
        except (MediumError, UsageError):
            if self.home.exists():
                raise

    def begin_with_mirror(self) -> None:
        """Make the pool, which does not exist yet, and fill it, if the mirror has versions. Raises
        what opening raises."""
        if self.mirroring is None:
            return
        if self.mirroring.has_versions():
            self.open_or_create()
        else:
            self._promised = self.mirroring.promise()

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[list[PoolReader]]:
        """The open pool, last, and those that it is a successor of; all stay meanwhile."""
        with self._looking:
            self._lookers += 1
            pools: list[PoolReader] = list(self.home.older())
            if self.writer is not None:
                pools.append(self.writer)
        try:
            yield pools
        finally:
            with self._looking:
                self._lookers -= 1

    def drop_older(self) -> None:
        """Remove older pools all of whose versions the last commit released. On the worker."""
        with self._looking:
            older = [] if self._lookers else list(self.home.older())
            for pool in older:  # while somebody looks, all stay: the next commit will do
                if pool.catalogue().ids() <= self.surplus.let_go:
                    self.home.drop(pool)

    def place_of_journal(self) -> tuple[str, str] | None:
        """The arguments of ``Journal.begin``; None if there is no pool yet, or none can be."""
        writer = self.writer
        if writer is None:
            return None
        try:
            return self.home.journal(), writer.medium.info.kind.value
        except PortusError as error:
            _log.debug("%s: cannot tell where the journal belongs: %s", self.home.path, error)
            return None

    def _open(self) -> None:
        writer = self.home.open()
        try:
            keeper = self.home.keeper(writer)
            keeper.begin(None if isinstance(writer, PoolWriter) else self.model)
            keeper.keep(self.model, self._keep)
            if self.mirroring is not None:
                assert isinstance(writer, PoolWriter)
                self.mirroring.join(writer, keeper, self.home.older)
            self.before = self._newest_of(writer)
        except BaseException:
            self.home.close(made=False)
            raise
        writer.deleted, writer.advice = keeper.deleted, keeper.advice
        self.writer, self.keeper = writer, keeper
        self._on_open()

    def _newest_of(self, writer: Pool) -> Before | None:
        """The version to share with: what was frozen before a restart still is."""
        found = writer.catalogue().models.get(self.model)
        if not found:
            return None
        try:
            record = writer.record(found.versions[-1])
            layout = bytes(writer.payload(record.layout, RecordKind.LAYOUT))
            tree = bytes(writer.payload(record.tree, RecordKind.TREE))
        except PortusError as error:
            _log.warning(
                "%s: the newest version is damaged; portus verify tells the extent: %s",
                self.home.path,
                error,
            )
            return None
        if record.log is not None:
            raise UsageError(
                f"{self.home.path}: {self.model!r} changes in place, and a checkpoint of that "
                "name would replace it: expected checkpoints, found a shelf (open it with "
                "portus.Shelf) or embedding tables (portus.embedding.protect); give the run "
                "another name, or a pool of its own"
            )
        return Before(record, layout, tree)
