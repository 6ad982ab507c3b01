"""Work on several items in a bounded number of threads, with results in order or without."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Final, Generic, TypeVar

from portus.engine.copying.thread import JoinableThread, SharedIterator, finish

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

NAME: Final = "portus-abreast"


def abreast(
    work: Callable[[_Item], _Result], items: Iterable[_Item], count: int, ahead: int = 0
) -> Generator[_Result, None, None]:
    """Yield the results of ``work`` on each item, ``count`` at a time, in the order of the items.

    At most ``count`` results are made in advance, or ``ahead`` if that is more. The error of an
    item is raised in its turn. No thread is left when the iterator is exhausted or closed: a caller
    that stops early closes it (``contextlib.closing``).
    """
    return _WorkerPool(work, count).over(items, max(count, ahead))


def in_any_order(work: Callable[[_Item], object], items: Sequence[_Item], count: int) -> None:
    """Call ``work`` on each item, ``count`` at a time. A thread that finishes one takes the next,
    so a slow item delays no other. Blocks until all are done.

    After an error, or Ctrl-C, no further item begins. It is raised when those under way have ended.
    No thread is left.
    """
    shared, failed = SharedIterator(items), list[BaseException]()

    def take_part() -> None:
        try:
            for item in shared:
                work(item)
        except BaseException as error:
            failed.append(error)
            shared.end()

    # Not a pool of threads: the exit of the process would wait for what they hang in.
    threads = [
        JoinableThread(take_part, f"{NAME}-{number}") for number in range(min(count, len(items)))
    ]
    begun: list[JoinableThread] = []
    try:
        for thread in threads:
            thread.start()
            begun.append(thread)
        for thread in begun:
            thread.join()
    finally:
        shared.end()
        finish(begun)
    if failed:
        raise failed[0]


class _WorkerPool(Generic[_Item, _Result]):
    def __init__(self, work: Callable[[_Item], _Result], count: int) -> None:
        self._work: Final = work
        self._count: Final = count
        self._asked: Final[queue.SimpleQueue[_Turn[_Item, _Result] | None]] = queue.SimpleQueue()
        self._threads: Final[list[JoinableThread]] = []

    def over(self, items: Iterable[_Item], ahead: int) -> Generator[_Result, None, None]:
        under_way: list[_Turn[_Item, _Result]] = []
        try:
            for item in items:
                turn: _Turn[_Item, _Result] = _Turn(item)
                under_way.append(turn)
                self._begin(turn)
                if len(under_way) >= ahead:
                    yield under_way.pop(0).result()
            while under_way:
                yield under_way.pop(0).result()
        finally:
            for turn in under_way:
                turn.given_up = True  # an item that has not begun is skipped
            for _ in self._threads:
                self._asked.put(None)
            finish(self._threads)

    def _begin(self, turn: _Turn[_Item, _Result]) -> None:
        self._asked.put(turn)
        if len(self._threads) < self._count:
            # Not a pool of threads: the exit of the process would wait for what they hang in.
            thread = JoinableThread(self._run, f"{NAME}-{len(self._threads)}")
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (turn := self._asked.get()) is not None:
            turn.run(self._work)


class _Turn(Generic[_Item, _Result]):
    """One item, and its outcome."""

    def __init__(self, item: _Item) -> None:
        self._item: Final = item
        self._over: Final = threading.Event()
        self._results: Final[list[_Result]] = []
        self._error: BaseException | None = None
        self.given_up = False

    def run(self, work: Callable[[_Item], _Result]) -> None:
        try:
            if not self.given_up:
                self._results.append(work(self._item))
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def result(self) -> _Result:
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]
