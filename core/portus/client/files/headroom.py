"""Space in the pool of a run for the versions to come, so that a lack of it shows early."""

from __future__ import annotations

import logging
from typing import Final

from portus.client.files.home import Pool
from portus.client.files.opened import RunPool
from portus.errors import MediumError, PortusError, TransportError
from portus.media import calls
from portus.pipeline.plan import Snapshot
from portus.pipeline.queue import Chore, Queue

_log: Final = logging.getLogger("portus")

_RECORDS: Final = 1 << 20
"""Bytes of room for the records of a version, roughly."""


class Headroom:
    """The headroom of one run in its pool. ``queue`` is the queue of its worker."""

    def __init__(self, pool: RunPool, queue: Queue) -> None:
        self._pool: Final = pool
        self._queue: Final = queue

    @calls.marked
    def prepare(self, size: int) -> None:
        """Create the pool now, and room in it for states of ``size`` bytes in the background. It
        goes away again if nothing is saved to it. Raises what opening raises."""
        self._pool.check_usable()
        self._pool.created = not self._pool.home.exists()
        self._pool.open_or_create()
        self._queue.put(_Preparation(self, size))

    def check(self, writer: Pool, snapshot: Snapshot) -> None:
        """Make room for the versions kept and one more, if the layout is a new one. Raises
        ``MediumError``, ``TransportError``."""
        if self._pool.before is not None and self._pool.before.layout == snapshot.layout:
            return
        size = int(snapshot.length.sum())
        count = self._pool.surplus.to_come(self._pool.writer)
        try:
            writer.ensure(count * (size + _RECORDS))
        except MediumError as error:
            raise MediumError(
                error.errno,
                f"{self._pool.home.path}: a checkpoint of this state has {size} bytes, and the "
                f"pool needs space for {count} more (those kept and the one in flight): "
                f"{error.strerror}",
            ) from error

    # On the worker.

    def make_first(self, size: int) -> None:
        """Reserve and touch space for the first versions of ``size`` bytes."""
        try:
            count = self._pool.surplus.to_come(self._pool.writer)
            self._make(count * (size + _RECORDS))
        except PortusError as error:
            path = self._pool.home.path
            _log.warning("%s: cannot prepare for the first save: %s", path, error)

    def make_next(self, size: int) -> None:
        """Reserve and touch space for the next version, which copies ``size`` bytes."""
        self._make(size + _RECORDS)

    def _make(self, size: int) -> None:
        assert self._pool.writer is not None
        if self._queue.has_more():
            return  # the next save has its space by now, and sees to that of the one after it
        try:
            grown = self._pool.writer.ensure(size)
            self._pool.writer.touch(grown, lambda: not self._queue.has_more())
        except (MediumError, TransportError) as error:
            _log.warning("%s: the next save may not fit: %s", self._pool.home.path, error)


class _Preparation(Chore):
    """Room for the first saves, made in the background."""

    def __init__(self, headroom: Headroom, size: int) -> None:
        self._headroom: Final = headroom
        self._size: Final = size

    def run(self) -> None:
        self._headroom.make_first(self._size)
