"""What belongs to one process: descriptors and address ranges that a forked child must not keep.

A child that inherits a descriptor keeps the locks of its parent alive after the parent was
killed (a loader worker: up to 19 s measured), so each one is closed in the child, before the
child's first line runs. Opening and closing hold a lock that fork waits for: no fork falls
between a descriptor's birth and its registration. Programs started by exec inherit nothing:
Python opens every descriptor non-inheritable.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Final, Protocol

from portus.errors import UsageError


class Inherited(Protocol):
    """Something to let go of in a forked child."""

    def leave(self) -> None:
        """Close it, in a forked child."""
        """Called in the child, which then has only one thread."""


_log: Final = logging.getLogger("portus")

still: Final = threading.RLock()
"""No fork happens while it is held. Reentrant: a signal handler may fork in the thread that
holds it."""

_held: Final[weakref.WeakSet[Inherited]] = weakref.WeakSet()


def leave_in_child(thing: Inherited) -> None:
    """From now on call ``thing.leave()`` in every forked child, as long as ``thing`` lives."""
    _held.add(thing)


class Descriptor:
    """An open file, in this process only."""

    def __init__(self, path: str, flags: int, mode: int = 0o666) -> None:
        """Open ``path`` as ``os.open`` does; raises its ``OSError``."""
        self.path: Final = path
        self._process: Final = os.getpid()
        self._number = -1
        with still:
            self._number = os.open(path, flags | getattr(os, "O_BINARY", 0), mode)
            leave_in_child(self)

    @property
    def number(self) -> int:
        """The number of the descriptor. ``UsageError`` if it is closed, or in a forked child."""
        if self._number < 0:
            raise not_here(self.path, self._process)
        return self._number

    def close(self) -> None:
        """A second call does nothing.

        Raises nothing: the system lets go of a descriptor also where close(2) fails. What such an
        error tells, of bytes that were not persisted, was promised to nobody.
        """
        with still:
            number, self._number = self._number, -1
            if number < 0:
                return
            try:
                os.close(number)
            except OSError as error:
                _log.warning("%s: closed, with an error: %s", self.path, error.strerror)

    def leave(self) -> None:
        self.close()


def not_here(name: str, process: int) -> UsageError:
    """Why ``name``, opened in ``process``, cannot be used in this one."""
    if process == os.getpid():
        return UsageError(f"{name}: used after it was closed")
    return UsageError(
        f"{name}: opened in process {process}, used in process {os.getpid()}: "
        "a forked child must open it itself"
    )


def _leave_all() -> None:
    for thing in list(_held):
        thing.leave()
    still.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=still.acquire, after_in_parent=still.release, after_in_child=_leave_all
    )
