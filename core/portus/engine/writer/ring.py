"""``StagingRing``: the buffers through which files are written, and the threads that write them.

Few buffers are enough while the disk keeps up. If a thread waits for a copy and none is free, more
are made, up to ``staging``; those are freed once they are unused.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from portus.engine.copying.segments import Stop
from portus.engine.copying.thread import JoinableThread, finish
from portus.engine.format.checksum import UNIT

SLOT: Final = UNIT
"""Bytes of a buffer: a unit fits."""

FEW: Final = 4
"""Buffers that are kept, and writes in flight."""

_LOOK_S: Final = 0.005
_IDLE_S: Final = 10.0


class Slot:
    """One buffer. ``address``: of its first byte, which begins a page."""

    def __init__(self) -> None:
        # Shared, not private: a direct write of private memory may miss what is written after a
        # fork. And aligned to a page, as O_DIRECT needs.
        self.memory: Final = memoryview(mmap.mmap(-1, SLOT))
        self.address: Final = int(np.frombuffer(self.memory, np.uint8).ctypes.data)


class StagingRing:
    """The buffers of a process; threads share them.

    staging: bytes of buffers at most, ``FEW`` of them in any case.
    """

    def __init__(self, staging: int) -> None:
        self._slots_max: Final = max(FEW, staging // SLOT)
        self._changed: Final = threading.Condition()
        self._free: Final[list[Slot]] = []
        self._made = 0
        self._work: Final[queue.SimpleQueue[Callable[[], None] | None]] = queue.SimpleQueue()
        self._threads: set[JoinableThread] = set()

    def take(self, stop: Stop) -> Slot:
        """Return a buffer; waits for one. stop: knows whether a thread waits for the copy, and ends
        the wait. Raises ``StoppedError``."""
        with self._changed:
            while True:
                stop.check()
                if self._free:
                    return self._free.pop()
                # While a fence waits, memory is spent: the copy is faster than the disk.
                if self._made < (self._slots_max if stop.is_awaited else FEW):
                    self._made += 1
                    break
                self._changed.wait(_LOOK_S)  # for a moment: ``stop`` changes without a notification
        try:
            return Slot()
        except BaseException:
            with self._changed:
                self._made -= 1
            raise

    def give(self, slot: Slot) -> None:
        with self._changed:
            if self._made > FEW:
                self._made -= 1
            else:
                self._free.append(slot)
            self._changed.notify()

    def run(self, work: Callable[[], None]) -> None:
        """Do ``work``, which raises nothing, on a thread; at most ``FEW`` at a time."""
        self._work.put(work)
        # After the put: a thread that is about to end checks, under this lock, for more work.
        with self._changed:
            if len(self._threads) == FEW:
                return
            thread = JoinableThread(self._write, "portus-write")
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending: no other thread will do it
            with self._changed:
                self._threads.discard(thread)
            with contextlib.suppress(queue.Empty):
                while (left := self._work.get_nowait()) is not None:
                    left()

    def close(self) -> None:
        """End the threads; wait for their writes. No work may be run any more."""
        with self._changed:
            threads, self._threads = self._threads, set()
        for _ in threads:
            self._work.put(None)
        finish(threads)

    def _write(self) -> None:
        own = threading.current_thread()
        while True:
            try:
                work = self._work.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._changed:
                    if self._work.empty():
                        self._threads = {t for t in self._threads if t is not own}
                        return
                continue
            if work is None:
                return
            work()


class RingTasks:
    """The tasks of one file in flight on the threads of a ring."""

    def __init__(self, ring: StagingRing) -> None:
        self._ring: Final = ring
        self._changed: Final = threading.Condition()
        self._count = 0

    def run(self, work: Callable[[], None]) -> None:
        """Do ``work``, which raises nothing, on a thread."""
        with self._changed:
            self._count += 1
        self._ring.run(partial(self._do, work))

    def drain(self) -> None:
        """Return when all tasks are done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()
