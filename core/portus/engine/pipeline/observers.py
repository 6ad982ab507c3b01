"""Observers of the saves of this process, whatever these go to, and the newest commit.

Companions observe, such as the clock behind ``Cadence``. What saves knows none of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from portus.engine.pipeline.run import Save
from portus.engine.spec import VersionInfo

SaveObserver = Callable[[Save, str], None]
"""Called in any thread with a save that is about to begin, and the kind of medium that it goes to.
"""

_guard = threading.RLock()
_observers: tuple[SaveObserver, ...] = ()
_newest: VersionInfo | None = None


def observe(observer: SaveObserver) -> None:
    """Tell ``observer`` of the saves from now on."""
    global _observers
    with _guard:
        _observers = (*_observers, observer)


def unobserve(observer: SaveObserver) -> None:
    """Tell ``observer`` of no more saves."""
    global _observers
    with _guard:
        _observers = tuple(each for each in _observers if each != observer)


def began(save: Save, medium: str) -> None:
    """Tell all observers that a save of this process is about to begin."""
    for each in _observers:
        each(save, medium)


def note_commit(version: VersionInfo) -> None:
    """Note that a save of this process was committed."""
    global _newest
    _newest = version


def newest() -> VersionInfo | None:
    """Return what this process committed last; None if it committed nothing."""
    return _newest


def _forget_in_child() -> None:
    """Make a new lock: whoever held it is not in a forked child."""
    global _guard
    _guard = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
