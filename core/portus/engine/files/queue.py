"""One queue, one worker (V5): saves and removals happen in the order of their requests.

One save in flight and one queued; more if they are small, but of two steps of one training at most,
which a kill loses. The next call waits. The first work starts the worker thread, which ends when
there has been none for a while, so an idle program has no thread of ours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from portus.engine.copying.thread import InterruptibleCondition
from portus.engine.files.pending import PENDING
from portus.errors import UsageError

SAVES_MAX: Final = 2
"""Unfinished saves: one in flight, one queued."""

_IDLE_S: Final = 10.0
_NEWS_S: Final = 10.0

_log: Final = logging.getLogger("portus")


class Work(Protocol):
    """A save or a removal. ``run`` keeps its own errors; ``fail`` ends it if ``run`` did not;
    ``hurry`` says that a thread waits for it, before or while it runs."""

    def run(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def hurry(self) -> None: ...


class Errand:
    """Work between two saves that raises nothing, and that no thread waits for."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.run: Final = act

    def fail(self, error: BaseException) -> None:
        """Do nothing: there is nothing to end."""

    def hurry(self) -> None:
        """Do nothing: the work takes no longer than necessary."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A place for one save of ``size`` bytes, of the thread that takes it. The worker gives it back
    once its work has ended, or ``dismiss`` does.

    saver, step: of the save: of each saver ``SAVES_MAX`` steps have places.
    """

    size: int = 0
    saver: object = None
    step: int = 0
    by: threading.Thread = field(default_factory=threading.current_thread)


class Queue:
    """Runs work one after another on a thread of its own.

    Ctrl-C may come out of any call. Then work is either put, and will run, or it is not; places are
    objects, not a count, so that giving one back twice or too early does no harm. The code enters
    the lock explicitly: ``with`` on a ``Condition`` may be left holding it.
    """

    def __init__(self, name: str, bytes_max: int = 0) -> None:
        """bytes_max: more than ``SAVES_MAX`` saves have places if they have no more bytes."""
        self._name: Final = name
        self._bytes_max: Final = bytes_max
        self._lock: Final = threading.RLock()
        self._changed: Final = InterruptibleCondition(self._lock)
        self._waiting: deque[tuple[Work, Turn | None]] = deque()
        self._turns: set[Turn] = set()
        self._running: Work | None = None
        self._running_on: Turn | None = None
        self._running_by: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def admit(self, turn: Turn, timeout_s: float | None = None) -> bool:
        """Take one of the places for saves, after a wait if needed. Return False if time ran out.
        Raises ``UsageError`` once the queue is closed."""
        with self._lock:
            self._check_open()
            if not self._has_place(turn):
                self._hurry(1)  # the first one's end gives a place
            if not self._changed.wait_for(
                lambda: self._closing or self._has_place(turn), timeout_s
            ):
                return False
            self._check_open()
            self._turns.add(turn)
            return True

    def _has_place(self, turn: Turn) -> bool:
        # Many small files may wait, but few steps: a kill loses what is queued.
        if len(self._turns) < SAVES_MAX:
            return True
        steps = {each.step for each in self._turns if each.saver is turn.saver}
        if len(steps | {turn.step}) > SAVES_MAX:
            return False
        total = sum(each.size for each in self._turns) + turn.size
        return self._bytes_max > 0 and total <= self._bytes_max

    def dismiss(self, turn: Turn) -> bool:
        """Give the place back, if it was taken. Return False if its work was put, and will run."""
        with self._lock:
            if any(own is turn for _, own in self._waiting) or turn is self._running_on:
                return False
            self._turns.discard(turn)
            self._changed.notify_all()
            return True

    def put(self, work: Work, turn: Turn | None = None) -> None:
        """Run ``work`` after all that was put before. ``turn``: the admitted place of a save.

        Returns at once; but where no thread can be started any more (the interpreter is ending) it
        runs everything here.
        """
        with self._lock:
            self._waiting.append((work, turn))
            self._changed.notify_all()
        self._see_to_it()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all work has ended; return False if time ran out."""
        self._see_to_it()
        with self._lock:
            self._hurry()
            return self._changed.wait_for(self.idle, timeout_s)

    def catch_up(self, timeout_s: float | None = None) -> bool:
        """Wait until all work put so far has ended, and no longer; return False if time ran out."""
        self._see_to_it()
        with self._lock:
            self._hurry()
            asked = self._outstanding()
            return self._changed.wait_for(
                lambda: not any(each is work for each in self._outstanding() for work in asked),
                timeout_s,
            )

    def put_all(self, saver: object, timeout_s: float) -> bool:
        """Wait until no other thread is in a save of ``saver``; return False if time ran out."""
        with self._lock:
            return self._changed.wait_for(lambda: self._has_put_all(saver), timeout_s)

    def has_more(self) -> bool:
        """Return True if work waits behind the running one, or a save is about to be put."""
        return bool(self._waiting) or len(self._turns) > 1

    def idle(self) -> bool:
        with self._lock:
            return not self._waiting and self._running is None

    def close(self) -> None:
        """Admit no more saves, finish those admitted and put, and end the thread. Logs every ten
        seconds that it waits."""
        self._closing = True
        try:
            self._finish()
        except BaseException:  # Ctrl-C
            self._closing = False
            raise

    def _finish(self) -> None:
        start = time.monotonic()
        with self._lock:
            self._hurry()
            self._changed.notify_all()
            while not self._changed.wait_for(self._has_put_all, _NEWS_S):
                self._say_since(start)
        self._see_to_it()
        if self.on_worker():
            return
        with self._lock:
            thread = self._thread
            # Not by join: Ctrl-C in it makes Python take a thread for ended that still runs.
            while not self._changed.wait_for(self._has_ended, _NEWS_S):
                self._say_since(start)
        if thread is not None:
            thread.join()

    def _has_ended(self) -> bool:
        return self._thread is None and self._running is None and not self._waiting

    def _has_put_all(self, saver: object = None) -> bool:
        """Return True if no other thread is in a save: between its admission and its work. saver:
        the owner of these; None: of all."""
        placed = {own for _, own in self._waiting} | {self._running_on}
        here = threading.current_thread()
        left = [each for each in self._turns - placed if saver in (None, each.saver)]
        return not any(turn.by is not here and turn.by.is_alive() for turn in left)

    def _say_since(self, start: float) -> None:
        waited = time.monotonic() - start
        _log.warning(
            "%s: still finishing saves after %.0f s. If this continues, check the disk, or the "
            "storage host, that they go to",
            self._name,
            waited,
        )

    def _check_open(self) -> None:
        if self._closing:
            raise UsageError("this Checkpointer is closed")

    def on_worker(self) -> bool:
        """Return True in the thread that works now."""
        return threading.current_thread() in (self._thread, self._running_by)

    def _see_to_it(self) -> None:
        """Start a thread if there is work for it. Ctrl-C may have come before one was started."""
        with self._lock:
            alive = self._thread is not None and self._thread.is_alive()
            if alive or not self._waiting or self.on_worker():
                return
            # A daemon: Python joins other threads before ``atexit`` runs, and only that closes this
            # queue, so each exit would last until the thread had been idle for ``_IDLE_S``.
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread = thread
            try:
                thread.start()
                return
            except RuntimeError:
                self._thread = None
        self._work()

    def _hurry(self, first: int | None = None) -> None:
        """Tell work that a thread waits for it: the first ``first`` of it, all by default."""
        for work in self._outstanding()[:first]:
            work.hurry()

    def _outstanding(self) -> list[Work]:
        """Return the unfinished work: the first of it may be running."""
        running = [] if self._running is None else [self._running]
        return [*running, *(work for work, _ in self._waiting)]

    def _work(self) -> None:
        try:
            while (next_work := self._next()) is not None:
                self._run(*next_work)
        except BaseException as error:
            self._give_up(error)
            raise

    def _run(self, work: Work, turn: Turn | None) -> None:
        error: BaseException = RuntimeError("the worker thread ended")
        try:
            # The worker itself touches the paths that others wait for.
            with PENDING.exempt():
                work.run()
        except BaseException as unexpected:  # a thread's top: kept in the work, never lost
            error = unexpected
            if not isinstance(unexpected, Exception):
                raise
        finally:
            try:
                work.fail(error)  # changes nothing if it has ended already
            finally:
                with self._lock:
                    self._end(turn)

    def _end(self, turn: Turn | None) -> None:
        self._running = self._running_on = self._running_by = None
        if turn is not None:
            self._turns.discard(turn)
        self._changed.notify_all()

    def _give_up(self, error: BaseException) -> None:
        """Fail all work when the thread is dying, so that no waiter waits for ever."""
        with self._lock:
            left, self._waiting = self._waiting, deque()
            self._thread = None
            self._changed.notify_all()
            for _, turn in left:
                self._end(turn)
        for work, _ in left:
            work.fail(error)

    def _next(self) -> tuple[Work, Turn | None] | None:
        """Return the next work; None ends the thread. Never while other work runs."""
        with self._lock:
            if threading.current_thread() is self._thread:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing, _IDLE_S)
            # Where no thread can be started, callers run the work, still one at a time (V5).
            self._changed.wait_for(lambda: self._running is None)
            if not self._waiting:
                if threading.current_thread() is self._thread:
                    self._thread = None
                    self._changed.notify_all()
                return None
            self._running, self._running_on = self._waiting.popleft()
            self._running_by = threading.current_thread()
            return self._running, self._running_on
