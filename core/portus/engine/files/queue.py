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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
        self._unfinished: deque[tuple[Work, Turn | None]] = deque()
        """The work that was put, with its place; the first of it runs if ``_running_by`` is set."""
        self._turns: set[Turn] = set()
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
            if any(own is turn for _, own in self._unfinished):
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
            self._unfinished.append((work, turn))
            self._changed.notify_all()
        self._see_to_it()

    def catch_up(self, timeout_s: float | None = None) -> bool:
        """Wait until all work put so far has ended, and no longer; return False if time ran out."""
        self._see_to_it()
        with self._lock:
            self._hurry()
            return self._changed.wait_for(partial(self._has_done, self._outstanding()), timeout_s)

    def finish(self, saver: object = None) -> None:
        """Wait until no other thread is in a save of ``saver``, or of any, and all work put so far
        has ended. On the worker, which does that work, wait for the other threads alone. Logs every
        ten seconds that it waits."""
        self._await(partial(self._has_put_all, saver))
        if not self.on_worker():
            with self._lock:
                asked = self._outstanding()
            self._await(partial(self._has_done, asked))

    def has_more(self) -> bool:
        """Return True if work waits behind the running one, or a save is about to be put."""
        return len(self._unfinished) > 1 or len(self._turns) > 1

    def idle(self) -> bool:
        with self._lock:
            return not self._unfinished

    def close(self) -> None:
        """Admit no more saves, finish those admitted and put, and end the thread. Logs every ten
        seconds that it waits."""
        self._closing = True
        try:
            with self._lock:
                self._changed.notify_all()
            self.finish()
            if not self.on_worker():
                thread = self._thread
                # Not by join: Ctrl-C in it makes Python take a thread for ended that still runs.
                self._await(self._has_ended)
                if thread is not None:
                    thread.join()
        except BaseException:  # Ctrl-C
            self._closing = False
            raise

    def _await(self, is_over: Callable[[], bool]) -> None:
        start = time.monotonic()
        while True:
            self._see_to_it()
            with self._lock:
                self._hurry()
                if self._changed.wait_for(is_over, _NEWS_S):
                    return
            _log.warning(
                "%s: still finishing saves after %.0f s. If this continues, check the disk, or the "
                "storage host, that they go to",
                self._name,
                time.monotonic() - start,
            )

    def _has_ended(self) -> bool:
        return self._thread is None and not self._unfinished

    def _has_done(self, asked: Sequence[Work]) -> bool:
        return not any(each is work for each in self._outstanding() for work in asked)

    def _has_put_all(self, saver: object) -> bool:
        """Return True if no other thread is in a save: between its admission and its work. saver:
        the owner of these; None: of all."""
        placed = {own for _, own in self._unfinished}
        here = threading.current_thread()
        left = [each for each in self._turns - placed if saver in (None, each.saver)]
        return not any(turn.by is not here and turn.by.is_alive() for turn in left)

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
            if alive or not self._count_waiting() or self.on_worker():
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
        return [work for work, _ in self._unfinished]

    def _count_waiting(self) -> int:
        return len(self._unfinished) - (self._running_by is not None)

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
                    self._unfinished.popleft()
                    self._running_by = None
                    if turn is not None:
                        self._turns.discard(turn)
                    self._changed.notify_all()

    def _give_up(self, error: BaseException) -> None:
        """Fail all work when the thread is dying, so that no waiter waits for ever."""
        with self._lock:
            if self._running_by is threading.current_thread():
                self._running_by = None
            left = [self._unfinished.pop() for _ in range(self._count_waiting())]
            self._turns.difference_update(turn for _, turn in left)
            self._thread = None
            self._changed.notify_all()
        for work, _ in reversed(left):
            work.fail(error)

    def _next(self) -> tuple[Work, Turn | None] | None:
        """Return the next work; None ends the thread. Never while other work runs."""
        with self._lock:
            if threading.current_thread() is self._thread:
                self._changed.wait_for(lambda: bool(self._unfinished) or self._closing, _IDLE_S)
            # Where no thread can be started, callers run the work, still one at a time (V5).
            self._changed.wait_for(lambda: self._running_by is None)
            if not self._unfinished:
                if threading.current_thread() is self._thread:
                    self._thread = None
                    self._changed.notify_all()
                return None
            self._running_by = threading.current_thread()
            return self._unfinished[0]
