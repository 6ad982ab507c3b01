"""The order of what was asked for at the paths of a user.

A save in flight changes names after its call has returned: at its commit it replaces a file, or a
removal that waits takes one away. A signal handler may have put a real file there meanwhile (see
``nested``), which is newer than what those were asked for. So each has its place in the order, and
changes no name at which something newer was written. That is looked at under ``turn``, a lock under
which nothing but the names of one change is touched, and no lock taken that a handler may be above.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import Final

_places: Final = itertools.count(1)
_written: Final[dict[str, int]] = {}
"""Files and directories that are newer than what was asked for before then. As many as handlers
ever wrote: a few."""

turn = threading.RLock()
"""Held while it is looked at whether a name is newer, and while that name is changed then."""


def next_place() -> int:
    """The place of what is asked for now."""
    return next(_places)


def note(path: str) -> None:
    """What is at ``path`` now, a file or a whole directory, is newer than all asked for so far."""
    _written[_real(path)] = next_place()


def is_newer(path: str, place: int) -> bool:
    """True if what is at ``path``, or below it, was noted after ``place``, or a directory that it
    is in."""
    if not _written:
        return False
    real = _real(path)
    return any(when > place and _touches(real, there) for there, when in list(_written.items()))


def _touches(one: str, other: str) -> bool:
    return one == other or one.startswith(other + os.sep) or other.startswith(one + os.sep)


def _real(path: str) -> str:
    directory, name = os.path.split(os.path.abspath(path))
    # The last link is not followed: a removal takes away the link itself.
    return os.path.join(os.path.realpath(directory), name)


def _forget_in_child() -> None:
    # The thread that held it is not there.
    global turn
    turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
