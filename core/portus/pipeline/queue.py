"""One queue, one worker (V5): saves and removals happen in the order in which they were asked for.

One save in flight and one queued; a third call waits. The worker thread is started by the first
work and ends when there has been none for a while, so an idle program has no thread of ours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Final, Protocol

SAVES_MAX: Final = 2
"""Saves that are not over yet: one in flight, one queued."""

_IDLE_S: Final = 10.0
_NEWS_S: Final = 10.0

_log: Final = logging.getLogger("portus")


class Work(Protocol):
    """A save, a removal. ``run`` keeps its own errors; ``fail`` ends it when ``run`` did not."""

    def run(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Queue:
    """Runs work one after another on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._changed: Final = threading.Condition()
        self._waiting: deque[tuple[Work, bool]] = deque()
        self._saves = 0
        self._busy = False
        self._thread: threading.Thread | None = None
        self._closing = False

    def admit(self, timeout_s: float | None = None) -> bool:
        """Take one of the places for saves; waits for one. False if time ran out."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._saves < SAVES_MAX, timeout_s):
                return False
            self._saves += 1
            return True

    def dismiss(self) -> None:
        """Give the place back: the save was not put after all."""
        with self._changed:
            self._saves -= 1
            self._changed.notify_all()

    def put(self, work: Work, *, is_save: bool = False) -> None:
        """Run ``work`` after all that was put before. A save must have been admitted.

        Returns at once; but where no thread can be started any more (the interpreter is ending)
        it runs everything here.
        """
        with self._changed:
            self._waiting.append((work, is_save))
            self._changed.notify_all()
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread = self._thread
        try:
            thread.start()
        except RuntimeError:
            self._thread = None
            self._work()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do; False if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def has_more(self) -> bool:
        """True if something waits behind what runs now, or a save is about to."""
        return bool(self._waiting) or self._saves > 1

    def idle(self) -> bool:
        """True if nothing is left to do."""
        with self._changed:
            return not self._waiting and not self._busy

    def close(self) -> None:
        """Finish what was put, and end the thread. Says every ten seconds that it waits."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        start = time.monotonic()
        while thread.is_alive():
            thread.join(_NEWS_S)
            if thread.is_alive():
                waited = time.monotonic() - start
                _log.warning("%s: still finishing saves after %.0f s", self._name, waited)

    def on_worker(self) -> bool:
        """True in the worker's own thread."""
        return threading.current_thread() is self._thread

    def _work(self) -> None:
        try:
            while (next_work := self._next()) is not None:
                self._run(*next_work)
        except BaseException as error:
            self._give_up(error)
            raise

    def _run(self, work: Work, is_save: bool) -> None:
        error: BaseException = RuntimeError("the worker thread ended")
        try:
            work.run()
        except BaseException as unexpected:  # a thread's top: kept in the work, never lost
            error = unexpected
            if not isinstance(unexpected, Exception):
                raise
        finally:
            work.fail(error)  # changes nothing if it is over already
            with self._changed:
                self._busy = False
                self._saves -= is_save
                self._changed.notify_all()

    def _give_up(self, error: BaseException) -> None:
        """The thread is dying: nothing that waits for it may wait for ever."""
        with self._changed:
            left, self._waiting = self._waiting, deque()
            self._saves -= sum(is_save for _, is_save in left)
            self._thread = None
            self._busy = False
            self._changed.notify_all()
        for work, _ in left:
            work.fail(error)

    def _next(self) -> tuple[Work, bool] | None:
        with self._changed:
            if threading.current_thread() is self._thread:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing, _IDLE_S)
            if not self._waiting:
                if threading.current_thread() is self._thread:
                    self._thread = None
                return None
            self._busy = True
            return self._waiting.popleft()
