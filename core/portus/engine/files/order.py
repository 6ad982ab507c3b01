"""The order of requests for the paths of a user.

A save in flight changes names after its call has returned: at its commit it replaces a file, or a
removal that waits takes one away. A signal handler may have written a real file there meanwhile
(see ``nested``), which is newer than those requests. So each request has its place in the order,
and changes no name at which something newer was written. It checks that under ``turn``, a lock
under which only the names of one change are touched, and no lock taken that the code below a
handler may hold.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import Final

_places: Final = itertools.count(1)
_written: Final[dict[str, int]] = {}
"""Files and directories that are newer than the requests before then. As many as handlers ever
wrote: a few."""

turn = threading.RLock()
"""Held while a request checks whether a name is newer, and while it then changes that name."""


def next_place() -> int:
    """Return the place of a request that is made now."""
    return next(_places)


def note(path: str) -> None:
    """Note that the file or directory at ``path`` is now newer than all requests so far."""
    _written[_real(path)] = next_place()


def is_newer(path: str, place: int) -> bool:
    """Return True if ``path``, or a path below or above it, was noted after ``place``."""
    if not _written:
        return False
    real = _real(path)
    return any(when > place and _touches(real, there) for there, when in list(_written.items()))


def _touches(one: str, other: str) -> bool:
    return one == other or one.startswith(other + os.sep) or other.startswith(one + os.sep)


def _real(path: str) -> str:
    directory, name = os.path.split(os.path.abspath(path))
    # The last link is not followed: a removal removes the link itself.
    return os.path.join(os.path.realpath(directory), name)


def _forget_in_child() -> None:
    # The thread that held it does not exist in the child.
    global turn
    turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
