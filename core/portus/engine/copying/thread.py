"""A thread that works beside another one, which waits for its end; and waits that Ctrl-C ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

_Item = TypeVar("_Item")

DEAF_S_MAX: Final = 0.25
"""The longest wait at a time. If a signal comes just before its thread blocks, Python runs the
handler only when the thread wakes up."""


class JoinableThread(threading.Thread):
    """A thread whose end is waited for reliably, whatever a signal handler raises in the wait.

    Before Python 3.13, Ctrl-C in ``threading.Thread.join`` makes Python treat a thread as ended
    that still runs: ``is_alive`` is false from then on, and the next ``join`` returns at once
    (``_wait_for_tstate_lock``). Code that then closes a pool, or frees memory, takes it from a
    thread that uses it. The exit of the process does not wait for such a thread.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        """work: the function to run; it keeps its own errors."""
        super().__init__(name=name, daemon=True)
        self._work = work
        self._is_over = False
        self._running: Final = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Do the work, on the thread, as ``threading.Thread.run`` does."""
        try:
            self._work()
        finally:
            del self._work  # and with it the objects that it uses
            self._is_over = True  # before: an interrupted join need not take the lock again
            self._running.release()

    def is_alive(self) -> bool:
        """Return True from its start until its work is done."""
        return self.ident is not None and not self._is_over

    def join(self, timeout: float | None = None) -> None:
        """Wait until its work is done, ``timeout`` seconds at most. Ctrl-C ends the wait."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while not self._is_over:
            left_s = DEAF_S_MAX if until_s is None else until_s - time.monotonic()
            if self._running.acquire(timeout=max(0.0, min(left_s, DEAF_S_MAX))):
                self._running.release()
            elif left_s <= DEAF_S_MAX and until_s is not None:
                return


def finish(threads: Iterable[JoinableThread]) -> None:
    """Wait until all threads have ended, and only then raise Ctrl-C: the caller owns memory that
    they use."""
    raised: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                raised = error
    if raised is not None:
        raise raised


def share_work(
    work: Callable[[Iterator[_Item]], object], items: Iterable[_Item], count: int, name: str
) -> None:
    """Do ``work`` on the items in ``count`` threads. One that finishes an item takes the next, so a
    slow item delays no other. Blocks until all are done.

    After an error, or Ctrl-C, no further item begins. It is raised when those under way have ended.
    No thread is left. name: of the threads.
    """
    left, guard = iter(items), threading.Lock()
    failed: list[BaseException] = []
    is_over = False

    def take() -> Iterator[_Item]:
        while True:
            with guard:
                if is_over:
                    return
                try:
                    item = next(left)
                except StopIteration:
                    return
            yield item

    def take_part() -> None:
        nonlocal is_over
        try:
            work(take())
        except BaseException as error:
            is_over = True
            failed.append(error)

    begun: list[JoinableThread] = []
    try:
        for number in range(count):
            # Not a pool of threads: the exit of the process would wait for what they hang in.
            begun.append(JoinableThread(take_part, f"{name}-{number}"))
            try:
                begun[-1].start()  # noted before: Ctrl-C may come out of it when it has begun
            except RuntimeError:  # the interpreter is ending, and starts no thread any more
                begun.pop()
                take_part()
                break
        for thread in begun:
            thread.join()
    finally:
        is_over = True
        finish(begun)
    if failed:
        raise failed[0]


Result = TypeVar("Result")


class InterruptibleCondition(threading.Condition):
    """A condition for which the main thread may wait: Ctrl-C always ends that wait."""

    def wait_for(self, predicate: Callable[[], Result], timeout: float | None = None) -> Result:
        """See ``threading.Condition``."""
        if threading.current_thread() is not threading.main_thread():
            # Python runs signal handlers in the main thread only.
            return super().wait_for(predicate, timeout)
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = DEAF_S_MAX if until is None else until - time.monotonic()
            result = super().wait_for(predicate, min(left, DEAF_S_MAX))
            if result or left < DEAF_S_MAX:
                return result
