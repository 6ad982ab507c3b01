"""Resources of one process: descriptors and address ranges that a forked child must not keep.

A child that inherits a descriptor keeps the locks of its parent alive after the parent was killed
(a loader worker: up to 19 s measured). So each one is closed in the child, before the child's first
line runs. A fork waits for threads that are opening or closing one (``no_fork``): none falls
between a descriptor's birth and its registration. Programs started by exec inherit none: Python
opens every descriptor non-inheritable.

The ``fork()`` of C runs no hook of Python. So the numbers of descriptors are also in a table that C
can read: the helper (``portus_close_in_children``) closes them in every child, and clears the
table. A cleared entry means closed, whatever a ``Descriptor`` that the child inherited believes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Final, Protocol

from portus.errors import UsageError


class ProcessResource(Protocol):
    """A resource to release in a forked child."""

    def leave(self) -> None:
        """Close the resource. Called in the child, which then has only one thread."""


_log: Final = logging.getLogger("portus")

_fork: Final = threading.RLock()
"""Held by the thread that forks. Reentrant: a signal handler may fork in it."""
_forking = 0
"""The thread that forks, or 0."""
_busy: Final[dict[int, int]] = {}
"""The threads inside ``no_fork``, and how many times each is."""
_FORK_WAIT_S: Final = 10.0
"""The longest that a fork waits. A thread inside may be in a signal handler, which waits for
something else."""


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Keep this process from forking inside a ``with``, except by a signal handler in this thread.

    Blocks only while another thread forks: threads inside do not exclude each other. Otherwise a
    thread could wait for one that a signal handler interrupted there, and that handler for the
    thread.
    """
    thread = threading.get_ident()
    times = _busy.get(thread, 0)
    _busy[thread] = times + 1
    try:
        while _forking not in (0, thread) and not times:
            del _busy[thread]
            with _fork:  # the fork has ended then
                _busy[thread] = 1
        yield
    finally:
        if times:
            _busy[thread] = times
        else:
            _busy.pop(thread, None)


def _before_fork() -> None:
    global _forking
    _fork.acquire()
    _forking, thread = threading.get_ident(), threading.get_ident()
    until_s = time.monotonic() + _FORK_WAIT_S
    while any(each != thread for each in list(_busy)) and time.monotonic() < until_s:
        time.sleep(0.0002)


def _after_fork() -> None:
    global _forking
    _forking = 0
    _fork.release()


_held: Final[weakref.WeakSet[ProcessResource]] = weakref.WeakSet()


def leave_in_child(thing: ProcessResource) -> None:
    """Have each child forked from now on call ``thing.leave()``, as long as ``thing`` lives."""
    _held.add(thing)


_SLOTS: Final = 4096
"""Descriptors that the table holds; children of C's fork keep copies of any more."""

NUMBERS: Final = (ctypes.c_int32 * _SLOTS)()
"""For each open descriptor its number plus one, in a slot of its own; 0: none, or closed in a
forked child."""

_free: Final = list(range(_SLOTS))


_STANDARD: Final = 3
"""The first number that is not of standard input, output or error, whether they are open or not."""


def _open(path: str, flags: int, mode: int, directory: int | None) -> int:
    """Open as ``os.open`` does, but never with the number of a standard stream.

    Where such a stream is closed (``python train.py >&-``), the system gives its number next, and
    text that a C library prints would go into the file.
    """
    within = {} if directory is None else {"dir_fd": directory}
    number, low = os.open(path, flags, mode, **within), list[int]()
    try:
        # Low ones are held meanwhile, or the system would hand out the same number again.
        while number < _STANDARD:
            low.append(number)
            number = os.dup(number)
        return number
    finally:
        for each in low:
            os.close(each)


_thread: Final = threading.local()


def is_opening() -> bool:
    """Return whether this thread is opening a ``Descriptor``, whose audit hooks have run."""
    return getattr(_thread, "is_opening", False)


@contextlib.contextmanager
def _opening() -> Iterator[None]:
    before, _thread.is_opening = is_opening(), True
    try:
        yield
    finally:
        _thread.is_opening = before


class Descriptor:
    """An open file, in this process only."""

    def __init__(
        self, path: str, flags: int, mode: int = 0o666, *, directory: Descriptor | None = None
    ) -> None:
        """Open ``path``, relative to ``directory``, as ``os.open`` does; raises its ``OSError``."""
        self.path: Final[str] = path if directory is None else os.path.join(directory.path, path)
        self._process: Final = os.getpid()
        self._numbers: Final[list[int]] = []
        """The number, while it is open. The thread that takes it out of the list closes it."""
        self._slot: int | None = None
        # Audit hooks may wait for other threads: here, where a fork need not wait for those too.
        sys.audit("open", path, None, flags)
        with no_fork(), _opening():
            within = None if directory is None else directory.number
            number = _open(path, flags | getattr(os, "O_BINARY", 0), mode, within)
            with contextlib.suppress(IndexError):  # a full table: only children of C's fork keep it
                self._slot = _free.pop()
                NUMBERS[self._slot] = number + 1
            self._numbers.append(number)
            leave_in_child(self)

    @property
    def number(self) -> int:
        """The number of the descriptor. ``UsageError`` if it is closed, or in a forked child."""
        try:
            number = self._numbers[0]
        except IndexError:
            number = -1
        if number < 0 or not self._is_here():
            raise not_here(self.path, self._process)
        return number

    def close(self) -> None:
        """Close the file. A second call does nothing.

        Raises nothing: the system releases a descriptor also where close(2) fails. Such an error is
        about bytes that were not persisted, and so never promised.
        """
        with no_fork():
            try:
                number = self._numbers.pop()
            except IndexError:
                return
            is_here, slot = self._is_here(), self._slot
            if slot is not None:
                # Before it is closed: afterwards the number may be another file's, and a child of
                # C's fork would close that.
                NUMBERS[slot] = 0
                _free.append(slot)
            if not is_here:
                return  # by now the number may be another file's
            try:
                os.close(number)
            except OSError as error:
                _log.warning("%s: closed, with an error: %s", self.path, error.strerror)

    leave = close

    def _is_here(self) -> bool:
        """Return False in a forked child in which C closed the descriptor."""
        return self._slot is None or NUMBERS[self._slot] != 0


def not_here(name: str, process: int) -> UsageError:
    """Return the error for ``name``, opened in ``process``, which this process cannot use."""
    if process == os.getpid():
        return UsageError(f"{name}: used after it was closed")
    return UsageError(
        f"{name}: opened in process {process}, used in process {os.getpid()}: "
        "a forked child must open it itself"
    )


def _leave_all() -> None:
    _after_fork()  # first: whatever fails below, the child can go on
    for thread in list(_busy):  # the others are not in a child
        if thread != threading.get_ident():
            del _busy[thread]
    for thing in list(_held):
        thing.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_leave_all)
