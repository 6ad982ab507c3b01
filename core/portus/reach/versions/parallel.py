"""Work on several items in a bounded number of threads, with results in order or without."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from portus.engine.copying.thread import JoinableThread, SharedIterator, finish

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

NAME: Final = "portus-abreast"


def in_turn(call: Callable[[int], object] | None) -> Callable[[int], None]:
    """Return a function that several threads may call, and that calls ``call`` for one of them at a
    time; None: nothing."""
    guard = threading.Lock()

    def call_alone(size: int) -> None:
        if call is not None:
            with guard:
                call(size)

    return call_alone


def abreast(
    work: Callable[[_Item], _Result], items: Iterable[_Item], count: int, ahead: int = 0
) -> Generator[_Result, None, None]:
    """Yield the results of ``work`` on each item, ``count`` at a time, in the order of the items.

    At most ``count`` results are made in advance, or ``ahead`` if that is more. The error of an
    item is raised in its turn. No thread is left when the iterator is exhausted or closed: a caller
    that stops early closes it (``contextlib.closing``).
    """
    asked: queue.SimpleQueue[tuple[_Item, Future[_Result]] | None] = queue.SimpleQueue()
    threads: list[JoinableThread] = []
    under_way: list[Future[_Result]] = []

    def take_part() -> None:
        while (turn := asked.get()) is not None:
            item, result = turn
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work(item))
                except BaseException as error:
                    result.set_exception(error)

    try:
        for item in items:
            under_way.append(Future())
            asked.put((item, under_way[-1]))
            if len(threads) < count:
                # Not a pool of threads: the exit of the process would wait for what they hang in.
                thread = JoinableThread(take_part, f"{NAME}-{len(threads)}")
                thread.start()
                threads.append(thread)
            if len(under_way) >= max(count, ahead):
                yield under_way.pop(0).result()
        while under_way:
            yield under_way.pop(0).result()
    finally:
        for result in under_way:
            result.cancel()  # an item that has not begun is skipped
        for _ in threads:
            asked.put(None)
        finish(threads)


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
