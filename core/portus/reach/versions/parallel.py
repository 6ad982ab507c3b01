"""Work on several items in a bounded number of threads, with results in order or without; and
memory that several threads use in turn."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from portus.engine.copying.thread import JoinableThread, finish, share_work

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
    """Call ``work`` on each item, ``count`` at a time. See ``share_work``."""

    def do_some(some: Iterator[_Item]) -> None:
        for item in some:
            work(item)

    share_work(do_some, items, min(count, len(items)), NAME)


Room = npt.NDArray[np.uint8]


class Rooms:
    """Rooms of one size, as many as are lent at the same time. Freed with this object."""

    def __init__(self, size: int) -> None:
        """size: bytes of each. Untouched parts of a room take no memory."""
        self._size: Final = size
        self._free: Final[list[Room]] = []

    def give(self, length: int) -> memoryview:
        """Lend ``length`` bytes, at most ``size``, with arbitrary contents, until nobody has them,
        or a part of them, any more."""
        assert length <= self._size
        try:
            room = self._free.pop()
        except IndexError:
            room = np.empty(self._size, np.uint8)
        # An array of its own: all views of its bytes keep it, and none of them keeps the others.
        part = room[:length]
        weakref.finalize(part, self._free.append, room)
        return part.data
