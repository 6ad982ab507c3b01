"""The thread that makes batches durable while the next one is computed.

It commits one moment at a time, in order. Between commits it does the other work of the store: it
folds the log in, and writes slices of the dense part.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from portus.companions.embedding.moment import Moment
from portus.companions.embedding.store import TableStore
from portus.engine.copying.segments import Stop
from portus.engine.copying.thread import JoinableThread
from portus.engine.pipeline.waiting import InterruptibleCondition
from portus.errors import PortusError, UsageError

_log: Final = logging.getLogger("portus")


class Committer:
    """A thread that commits moments, one at a time, in order. Between commits it folds the log in,
    and writes slices."""

    def __init__(self, store: TableStore) -> None:
        self._store: Final = store
        self._changed: Final = InterruptibleCondition()
        self._moment: Moment | None = None
        self._error: PortusError | None = None
        self._ended = False
        self._is_beside = False
        """True while the thread folds in, or writes a slice."""
        self._is_held = False
        """True while the thread must leave the store alone."""
        self._stop: Final = Stop(awaited=False)
        self._thread: Final = JoinableThread(self._run, "portus-embedding")
        self._thread.start()

    def put(self, moment: Moment) -> None:
        """Start to commit a moment. No other commit may be in flight."""
        with self._changed:
            assert self._moment is None
            self._moment = moment
            self._stop.is_awaited = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Block until no commit is in flight. The next ``wait`` raises the error of the commit."""
        with self._changed:
            self._changed.notify_all()  # Ctrl-C may have cut a ``put`` short
            self._changed.wait_for(lambda: self._moment is None)

    def wait(self) -> None:
        """Block until no commit is in flight. Raise the error of a commit, every time."""
        with self._changed:
            self.settle()
            if self._error is not None:
                raise self._error

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait, and keep the thread off the store inside the block. Raises as ``wait``."""
        self.wait()
        with self._changed:
            self._is_held = self._stop.is_awaited = True
            try:
                self._changed.wait_for(lambda: not self._is_beside)
                if self._error is not None:
                    raise self._error
            except BaseException:
                self._is_held = self._stop.is_awaited = False
                raise
        try:
            yield
        finally:
            with self._changed:
                self._is_held = self._stop.is_awaited = False
                self._changed.notify_all()

    def end(self) -> None:
        """Wait, and end the thread. Raises as ``wait``."""
        try:
            self.wait()
        finally:
            with self._changed:
                self._ended = self._stop.is_awaited = True
                self._changed.notify_all()
            self._thread.join()

    def _run(self) -> None:
        # After an error nothing more is committed: a batch without the one before it would be a
        # gap.
        while self._error is None:
            with self._changed:
                self._changed.wait_for(self._is_due)
                moment = self._moment
                if moment is None and self._ended:
                    return
                # Overdue work comes first: else a batch would have to wait for all of it at once.
                self._is_beside = moment is None or self._store.is_behind
            error = self._error_of()
            with self._changed:
                if not self._is_beside or error is not None:
                    self._moment = None
                    self._stop.is_awaited = False
                self._is_beside = False
                self._error = error
                self._changed.notify_all()

    def _is_due(self) -> bool:
        if self._moment is not None or self._ended:
            return True
        return self._store.has_more and not self._is_held

    def _error_of(self) -> PortusError | None:
        try:
            if self._is_beside:
                self._store.go_on(self._stop)
            else:
                assert self._moment is not None
                self._store.commit(self._moment)
        except PortusError as error:
            return error
        except BaseException as raised:  # a fault of ours: the training must not wait for ever
            _log.exception("portus: a batch was not made durable; this is a bug in portus")
            return UsageError(f"a batch was not made durable: {raised!r}")
        return None
