"""``AfterCommit``: removals and links that wait for a commit, so that a kill loses no file.

A removal waits until the newest save that was requested before it, or a later one, is committed. A
link waits until its target exists. Links go before removals, and a file that is the target of a
link beside it stays until the link refers to another one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
from collections.abc import Iterable
from typing import Final

from portus.engine.files.queue import Errand
from portus.engine.paths.saver import FileSaver
from portus.errors import MediumError, printable
from portus.reach.training.file_mirror import DirectoryMirror
from portus.reach.training.links import replace_link

_log: Final = logging.getLogger("portus")


class AfterCommit:
    """Removals and links that wait for the saves of one training. Paths are absolute, and a link at
    their end is not followed.

    saver: of the training. telling: the names of files that a directory loses first. mirror: gets a
    note of each removal.
    """

    def __init__(
        self, saver: FileSaver, telling: re.Pattern[str], mirror: DirectoryMirror | None
    ) -> None:
        self.mirror = mirror
        self._saver: Final = saver
        self._telling: Final = telling
        # Reentrant: a signal handler that saves may interrupt a thread that holds it.
        self._lock: Final = threading.RLock()
        self._asked = 0
        self._committed = 0
        self._in_flight: Final[dict[str, int]] = {}
        """The newest save to each path, until it has ended."""
        self._made: Final[dict[str, int]] = {}
        """The number of the save that made each file of this training."""
        self._removals: Final[dict[str, int]] = {}
        """The paths to remove, and the save that each waits for; oldest first."""
        self._leaving: Final[set[str]] = set()
        """The paths that are being removed."""
        self._links: list[tuple[int, str, str]] = []
        """Waiting links: the save that each waits for, the link's path, and its target."""

    def delete(self, path: str) -> None:
        """Remove a file, or a directory, durably. Raises ``MediumError``."""
        if self.mirror is not None:
            self.mirror.removing(path)
        if os.path.isdir(path) and not os.path.islink(path):
            self._saver.remove_directory(path, self._telling)
        else:
            self._saver.remove(path)

    def begin_save(self, path: str, inside: Iterable[str] = ()) -> int:
        """Return the number of a save to ``path``, which begins; ``inside``: the files that it
        makes there. Earlier requests to remove them are void: the save will replace them."""
        with self._lock:
            self._asked += 1
            self._in_flight[path] = self._asked
            for each in (path, *inside):
                self._removals.pop(each, None)
            self._leaving.discard(path)
            self._forget_link(path)
            return self._asked

    def over(self, number: int, path: str, *, is_committed: bool, may_remove: bool = True) -> None:
        """Note the end of save ``number``. On the worker; in a signal handler not
        ``may_remove``."""
        with self._lock:
            # A later save to the same path may be in flight by now.
            if self._in_flight.get(path) == number:
                del self._in_flight[path]
            if is_committed:
                # A save in a signal handler overtakes those that it interrupted.
                self._committed = max(self._committed, number)
                self._made[path] = number
            ready = [each for each in self._links if each[0] == number]
            self._links = [each for each in self._links if each[0] != number]
        if is_committed:
            # Links before removals: a link's target stays until the link has another one
            # (decision 0207).
            for _, link, target in ready:
                _lead(link, target)
        if may_remove:
            self.remove_ready()

    def link(self, link: str, target: str) -> None:
        """Have ``link`` refer to ``target``, in one step, once that exists; if its save fails, the
        link keeps its old target. Raises ``OSError`` if no link can be made at once."""
        if os.path.isdir(link) and not os.path.islink(link):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), link)
        with self._lock:
            number = self._in_flight.get(target)
            # The name is wanted again: an earlier request would remove the new link.
            self._removals.pop(link, None)
            if number is not None:
                self._links.append((number, link, target))
                return
            self._forget_link(link)
        if os.path.exists(target):  # else its save failed
            replace_link(link, target)
        self._remove_now_or_later()

    def remove(self, path: str) -> None:
        """Remove the file at ``path`` after the saves so far; at once, if no save is in flight."""
        with self._lock:
            self._forget_link(path)
            self._removals.pop(path, None)  # the new request goes to the end
            # After the newest save that was requested before, whatever its outcome
            # (decision 0065).
            self._removals[path] = self._asked
        self._remove_now_or_later()

    def is_there(self, path: str) -> bool:
        """Return whether a file exists in the view of its user: a file in flight counts, and one
        that is to be removed does not."""
        with self._lock:
            if path in self._removals or path in self._leaving:
                return False  # requested after each save to it, which may still run
            if path in self._in_flight or any(link == path for _, link, _ in self._links):
                return True
        return os.path.exists(path)

    def make_room(self) -> bool:
        """Remove, from a full disk, the oldest file that waits for removal, if a newer one exists.
        Return whether that was done."""
        with self._lock:
            path = next(iter(self._removals), None)
            # Without a newer one it may be the last checkpoint, which no save is worth
            # (decision 0065).
            if path is None or self._committed <= self._made.get(path, 0) or _is_led_to(path):
                return False
            del self._removals[path]
            self._leaving.add(path)
        return self._try_remove(path)

    def _forget_link(self, path: str) -> None:
        self._links = [each for each in self._links if each[1] != path]

    def leftovers(self) -> list[str]:
        """Return the paths that should go, but stay: no commit replaces them."""
        with self._lock:
            return list(self._removals)

    def _remove_now_or_later(self) -> None:
        if not self._removals:
            return
        if self._in_flight:
            # On the worker, after the saves that were requested so far.
            self._saver.shared.queue.put(Errand(self.remove_ready))
        else:
            self.remove_ready()

    def remove_ready(self) -> None:
        """Remove the files that wait for no save any more."""
        with self._lock:
            ready = [
                path
                for path, after in self._removals.items()
                if after <= self._committed and not _is_led_to(path)
            ]
            for path in ready:
                del self._removals[path]
            self._leaving.update(ready)
        for path in ready:
            self._try_remove(path)

    def _try_remove(self, path: str) -> bool:
        self._made.pop(path, None)
        try:
            self.delete(path)
        except MediumError as error:
            # No error of a save: the file costs space, and nothing is lost.
            _log.warning(
                "portus: %s was not removed; remove it yourself: %s",
                printable(path),
                error.strerror or error,
            )
            return False
        finally:
            with self._lock:
                self._leaving.discard(path)
        return True


def _lead(link: str, target: str) -> None:
    try:
        replace_link(link, target)
    except OSError as error:
        _log.warning(
            "portus: %s: cannot make a link to %s: %s",
            printable(link),
            printable(target),
            error.strerror,
        )


def _is_led_to(path: str) -> bool:
    """Return whether a link beside the file refers to it."""
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(path)) as found:
        real = os.path.realpath(path)
        return any(
            each.is_symlink() and each.path != path and os.path.realpath(each.path) == real
            for each in found
        )
    return False
