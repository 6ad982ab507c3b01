"""Removals of checkpoint files, none of them before what replaces it is committed (V5).

Frameworks ask for a new checkpoint, and then for the removal of an old one, whatever becomes of
the new one. So a removal waits for the newest save that was asked for before it. If that one is
committed, it runs. If that one failed, it runs

- at once, if nothing is lost by it: the file's own save was never committed, say;
- after the next save that is committed;
- if there was no space, and a newer version with a file of its own remains: the one asked for first
  runs, once for each save that failed so. Else a full disk would stay full for ever;
- not at all, if no save is committed any more. What stays is said at the end.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from typing import Final, Protocol

from portus.client.files import order
from portus.client.files.keeper import Keeper
from portus.client.files.opened import RunPool
from portus.errors import PortusError
from portus.pipeline.queue import Chore, Queue

_log: Final = logging.getLogger("portus")

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_NAMED_MAX: Final = 5
"""Files that a line names."""


class AwaitedSave(Protocol):
    """What a removal needs of a save that was asked for."""

    @property
    def over(self) -> bool:
        """True when it is committed, or will never be."""

    @property
    def error(self) -> PortusError | None:
        """Why it failed, if it did."""


class Removal:
    """One removal that was asked for. ``after``: the save that it waits for, None if there is
    none; ``strictly``: for that one alone, and else it is not made."""

    def __init__(self, path: str, after: AwaitedSave | None, *, strictly: bool) -> None:
        self.path: Final = path
        self.after: Final = after
        self.strictly: Final = strictly
        self.asked: Final = order.asked()

    def takes(self, path: str) -> bool:
        """True if it removes ``path``."""
        return path == self.path or path.startswith(self.path + os.sep)


class Removals:
    """The removals of one ``Checkpointer``. Any thread asks for them; its worker makes them."""

    def __init__(self, pool: RunPool, queue: Queue) -> None:
        self._pool: Final = pool
        self._queue: Final = queue
        self._asked: Final[list[Removal]] = []
        """In this order; those that wait are in the other list too."""
        self._waiting: Final[list[Removal]] = []
        self._freed_for: AwaitedSave | None = None

    def ask(self, removal: Removal) -> None:
        """Make it when its turn comes; the pool is open. What is saved from now on is not removed
        with it."""
        self._asked.append(removal)
        self._queue.put(_Removing(self, removal))

    def takes(self, path: str) -> bool:
        """True if ``path`` is going to be removed, perhaps."""
        return any(each.takes(path) for each in list(self._asked))

    @property
    def left(self) -> list[str]:
        """Paths that wait to be removed."""
        return [each.path for each in list(self._waiting)]

    # On the worker.

    def reached(self, removal: Removal) -> None:
        """Make a removal whose turn has come, or let it wait, or drop it."""
        keeper, after = self._keeper, removal.after
        if after is None or (after.over and after.error is None):
            self._make(removal, keeper)
        elif removal.strictly:
            _log.warning("portus: %s stays: the save that was to replace it failed", removal.path)
            self._asked.remove(removal)
        elif self._loses_nothing(removal, keeper):
            self._make(removal, keeper)
        else:
            if removal.path in self.left:
                self._asked.remove(removal)
            else:
                self._waiting.append(removal)
            self.failed(after)

    def committed(self, replaced: Collection[str]) -> None:
        """A save was committed after those that wait. ``replaced``: paths that it put files at;
        what was to be removed there is gone, and they are not."""
        keeper = self._keeper
        waiting, self._waiting[:] = list(self._waiting), []
        for each in waiting:
            if any(each.takes(path) for path in replaced):
                self._asked.remove(each)
            else:
                self._make(each, keeper)

    def failed(self, save: AwaitedSave) -> None:
        """A save failed: for lack of space, perhaps, and then there is to be some for the next."""
        if save is self._freed_for or getattr(save.error, "errno", None) not in _NO_SPACE:
            return
        keeper = self._keeper
        for each in self._waiting:
            if self._is_outlived(each, keeper):
                _log.warning(
                    "portus: %s is removed before its replacement is saved, to free space. "
                    "Give the pool more room",
                    each.path,
                )
                self._freed_for = save
                self._waiting.remove(each)
                self._make(each, keeper)
                return

    def say_left(self) -> None:
        """Log, at the end, which files stay."""
        if not self._waiting:
            return
        paths = [each.path for each in self._waiting]
        more = f" and {len(paths) - _NAMED_MAX} more" if len(paths) > _NAMED_MAX else ""
        _log.warning(
            "portus: not removed, since no later save was committed: %s%s. If they are not "
            "needed, remove them",
            ", ".join(paths[:_NAMED_MAX]),
            more,
        )

    @property
    def _keeper(self) -> Keeper:
        keeper = self._pool.keeper
        assert keeper is not None
        return keeper

    def _loses_nothing(self, removal: Removal, keeper: Keeper) -> bool:
        try:
            return keeper.is_spare(removal.path)
        except PortusError:
            return False

    def _is_outlived(self, removal: Removal, keeper: Keeper) -> bool:
        try:
            return keeper.is_outlived(removal.path)
        except PortusError:
            return False

    def _make(self, removal: Removal, keeper: Keeper) -> None:
        try:
            if os.path.isdir(removal.path) and not os.path.islink(removal.path):
                if not order.is_newer(removal.path, removal.asked):
                    keeper.remove_directory(removal.path)
            else:
                keeper.remove(removal.path, asked=removal.asked)
        except PortusError as error:
            _log.warning("portus: %s was not removed; remove it yourself: %s", removal.path, error)
        finally:
            self._asked.remove(removal)


class _Removing(Chore):
    """A removal in the queue."""

    def __init__(self, removals: Removals, removal: Removal) -> None:
        self._removals: Final = removals
        self._removal: Final = removal

    def run(self) -> None:
        self._removals.reached(self._removal)
