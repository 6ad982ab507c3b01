"""The thread that makes batches durable while the next one is computed; and the marks of batches.

It commits one moment at a time, in order. Between commits it does the other work of the store: it
folds the log in, and writes slices of the dense part.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from portus.companions.embedding.moment import Moment
from portus.companions.embedding.store import TableStore
from portus.engine.copying.segments import Stop
from portus.engine.copying.thread import InterruptibleCondition, JoinableThread
from portus.engine.state.walk import Elsewhere
from portus.errors import PortusError, UsageError
from portus.reach.pools.elsewhere import marked_state, within

_log: Final = logging.getLogger("portus")

_IMAGES_MAX: Final = 16
"""Images of the tables that marks may keep before a warning says how to keep fewer."""


class Committer:
    """A thread that commits moments, one at a time, in order. Between commits it folds the log in,
    and writes slices."""

    def __init__(self, store: TableStore) -> None:
        self._store: Final = store
        self._changed: Final = InterruptibleCondition()
        self._work: Callable[[], None] | None = None
        self._error: PortusError | None = None
        self._ended = False
        self._stop: Final = Stop(awaited=False)
        self._thread: Final = JoinableThread(self._run, "portus-embedding")
        self._thread.start()

    def put(self, moment: Moment) -> None:
        """Start to commit a moment. No other commit may be in flight."""
        self._begin(lambda: self._store.commit(moment))

    def alone(self, work: Callable[[], None]) -> None:
        """Do other work with the store, after all commits, and wait for it. Raises as ``wait``, and
        what ``work`` raises, which the next commits do not."""
        raised: list[BaseException] = []
        self.wait()
        self._begin(lambda: raised.extend(_catch_error(work)))
        self.wait()
        if raised:
            raise raised[0]

    def settle(self) -> None:
        """Block until no commit is in flight. The next ``wait`` raises the error of the commit."""
        with self._changed:
            self._changed.notify_all()  # Ctrl-C may have cut a ``put`` short
            self._changed.wait_for(lambda: self._work is None)

    def wait(self) -> None:
        """Block until no commit is in flight. Raise the error of a commit, every time."""
        with self._changed:
            self.settle()
            if self._error is not None:
                raise self._error

    def end(self) -> None:
        """Wait, and end the thread. Raises as ``wait``."""
        try:
            self.wait()
        finally:
            with self._changed:
                self._ended = self._stop.is_awaited = True
                self._changed.notify_all()
            self._thread.join()

    def _begin(self, work: Callable[[], None]) -> None:
        with self._changed:
            assert self._work is None
            self._work = work
            self._stop.is_awaited = True
            self._changed.notify_all()

    def _run(self) -> None:
        # After an error nothing more is committed: a batch without the one before it would be a
        # gap.
        while self._error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._ended or self._store.has_more)
                work = self._work
                if work is None and self._ended:
                    return
                # Overdue work comes first: else a batch would have to wait for all of it at once.
                if work is None or self._store.is_behind:
                    work = partial(self._store.go_on, self._stop)
            error = _error_of(work)
            with self._changed:
                if work is self._work or error is not None:
                    self._work = None
                    self._stop.is_awaited = False
                self._error = error
                self._changed.notify_all()


def _catch_error(work: Callable[[], None]) -> list[BaseException]:
    try:
        work()
    except BaseException as error:
        return [error]
    return []


def _error_of(work: Callable[[], None]) -> PortusError | None:
    try:
        work()
    except PortusError as error:
        return error
    except BaseException as raised:  # a fault of ours: the training must not wait for ever
        _log.exception("portus: a batch was not made durable; this is a bug in portus")
        return UsageError(f"a batch was not made durable: {raised!r}")
    return None


class Marks:
    """The marks in the pool of one training. For the training thread alone."""

    def __init__(self, store: TableStore, committer: Committer, keep: int | None) -> None:
        """keep: how many of the newest marks to keep; None: all."""
        self._store: Final = store
        self._committer: Final = committer
        self._keep: Final = keep
        self._newest: tuple[int, str] | None = None
        """The batch of the newest mark, and its token."""
        self._read: tuple[str, object] | None = None
        """The token of the mark that was read last, and its state."""
        self._images: dict[int, int] = {}
        """The place of the image of each mark that was examined, by its id."""
        self._was_said = False
        """True once a warning of many marks was logged."""

    def of(self, batch: int) -> tuple[int, str]:
        """Return the batch and the token of a mark of ``batch``, the last one committed. Block
        until the mark is durable."""
        if self._newest is None or self._newest[0] != batch:
            token = os.urandom(16)

            def work() -> None:
                self._store.mark(batch, token, self._beyond())
                self._say_many()

            self._committer.alone(work)
            self._newest = batch, token.hex()
        return self._newest

    def read(self, place: Elsewhere) -> torch.Tensor:
        """Return the tensor at a place of a mark. Raise as ``fill``."""
        if self._read is None or self._read[0] != place.token:
            self._read = place.token, marked_state(self._store.pool, place)
        return within(self._read[1], place)

    def forget(self) -> None:
        """Forget the newest mark and the last state read: a new moment is about to be taken."""
        self._read = self._newest = None

    def _say_many(self) -> None:
        """Warn, once, that the pool keeps many images for marks, if ``keep`` is None."""
        if self._keep is not None or self._was_said:
            return
        marks = self._store.marks()
        for each in marks:
            if each.info.id not in self._images:
                self._images[each.info.id] = self._store.image_of(each)
        newest = self._store.newest
        shared = None if newest is None or self._store.in_place else self._store.image_of(newest)
        images = {self._images[each.info.id] for each in marks} - {shared}
        if len(images) > _IMAGES_MAX:
            self._was_said = True
            _log.warning(
                "portus: %s: %d marks keep %d images of the tables, and the pool grows with each "
                "further one: pass protect(keep=), two more than the checkpoints that you keep; or "
                "remove what no checkpoint needs: portus rm 'embedding marks' --keep N --force",
                self._store.pool.medium.info.name,
                len(marks),
                len(images),
            )

    def _beyond(self) -> list[int]:
        """Return the ids of the marks to remove once there is another one."""
        if self._keep is None:
            return []
        gone = self._store.marks()[: -self._keep + 1 or None]
        return [each.info.id for each in gone]
