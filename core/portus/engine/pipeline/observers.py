"""Observers of the saves of this process, whatever these go to, and the newest commit.

Companions observe, such as the clock behind ``Cadence``. What saves knows none of them.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

from portus.engine.pipeline.handle import SaveStats
from portus.engine.spec import VersionInfo


class Saving(Protocol):
    """The part of a save that observers see."""

    @property
    def over(self) -> bool:
        """True when it is committed, failed or given up."""

    @property
    def stats(self) -> SaveStats:
        """What it cost so far."""


class SaveObserver(Protocol):
    """Observes from ``observe`` until ``unobserve``, in any thread that saves."""

    def began(self, save: Saving, medium: str) -> None:
        """Note that a save is about to begin. medium: the kind that it goes to."""


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
        _observers = tuple(each for each in _observers if each is not observer)


def began(save: Saving, medium: str) -> None:
    """Tell all observers that a save of this process is about to begin."""
    for each in _observers:
        each.began(save, medium)


def committed(version: VersionInfo) -> None:
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
