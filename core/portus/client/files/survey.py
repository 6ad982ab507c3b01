"""What reference files lie below the root of a run: found where nobody said that they are.

A checkpoint may have been copied (``cp last.ckpt keep.ckpt``), or the run with all that is in it.
So before a version counts as led to by nobody, what lies below the directory that holds
``.portus`` is looked through. A directory whose time of change is the one of last time is not read
again: then the look costs one status for each directory. Left out are names that start with a dot,
links directories, symbolic links, and directories that are runs of their own with a pool file of
the same name: copies of this one, whose files they hold themselves.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from portus.errors import CorruptionError, UsageError
from portus.format.reference import HEAD_SIZE, SIZE_MAX, Reference, decode, may_begin
from portus.index.place import DEFAULT_DIRECTORY
from portus.media import linux
from portus.media.base import Birth

PATIENCE_S: Final = 2.0
"""The longest look while a training runs; what was not seen by then is not known."""

_RACY_NS: Final = 2 * 10**9
"""A directory that was changed so shortly before it was read may change again unseen."""


_Mark = tuple[int, int, int]
"""Inode, size and time of change: while they are the same, so is what a file says."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """One directory: when it was changed last, what is in it."""

    changed_ns: int
    is_stable: bool
    directories: tuple[str, ...]
    small: Mapping[str, tuple[_Mark, Reference | None]]
    """Files that may be references by their size."""

    @property
    def references(self) -> list[tuple[str, Reference]]:
        return [(path, there) for path, (_, there) in self.small.items() if there is not None]


class Survey:
    """Looks below ``root``; None: nowhere. Thread-safe: one looks, and the others wait for that.
    Whoever copies to a mirror asks while saves place files and let go of them."""

    def __init__(
        self, root: str | None, pool_name: str, patience_s: float | None = PATIENCE_S
    ) -> None:
        """pool_name: of the pool's file. patience_s: None waits for all of it."""
        self.root: Final = root
        self._pool_name: Final = pool_name
        self._patience_s: Final = patience_s
        self._known: dict[str, _Listing] = {}
        self._found: dict[str, list[tuple[str, Reference]]] | None = None
        self._complete = True
        self._looking: Final = threading.RLock()
        self.files_read = 0
        """How many were opened, to see whether they are reference files."""

    def renew(self) -> None:
        """What is asked from now on is answered by a new look, not by one that is under way."""
        with self._looking:
            self._found = None

    @property
    def is_complete(self) -> bool:
        """True if all was seen that is there."""
        with self._looking:
            self._look()
            return self._complete

    def copies(self, reference: Reference) -> list[str]:
        """Where files are that say the same as ``reference``."""
        found = self._look().get(reference.id, [])
        return [path for path, there in found if there == reference]

    def references(self) -> list[tuple[str, Reference]]:
        """All that were found: path and content."""
        return [each for found in self._look().values() for each in found]

    def directory(self, birth: Birth) -> str | None:
        """The path of the directory of that birth."""
        with self._looking:
            self._look()
            paths = list(self._known)
        for path in paths:
            try:
                if os.stat(path).st_ino == birth[0] and linux.birth(path) == birth:
                    return path
            except OSError:
                continue
        return None

    def _look(self) -> dict[str, list[tuple[str, Reference]]]:
        with self._looking:
            if self._found is None:
                self._found = self._looked()
            return self._found

    def _looked(self) -> dict[str, list[tuple[str, Reference]]]:
        found: dict[str, list[tuple[str, Reference]]] = {}
        end_s = None if self._patience_s is None else time.monotonic() + self._patience_s
        before, self._known, self._complete = self._known, {}, True
        waiting = deque([self.root] if self.root is not None else [])
        while waiting:
            if end_s is not None and time.monotonic() > end_s:
                self._known = {**before, **self._known}  # the next look goes on from here
                self._complete = False
                break
            path = waiting.popleft()
            try:
                listing = self._known[path] = self._listing(path, before.get(path))
            except FileNotFoundError:
                continue
            except OSError:
                self._complete = False
                continue
            waiting += listing.directories
            for name, reference in listing.references:
                found.setdefault(reference.id, []).append((name, reference))
        return found

    def _listing(self, path: str, before: _Listing | None) -> _Listing:
        changed_ns = os.stat(path).st_mtime_ns
        is_known = before is not None and before.is_stable and before.changed_ns == changed_ns
        if before is not None and is_known and not before.references:
            return before  # a file among references may be overwritten without a change here
        is_stable = time.time_ns() - changed_ns > _RACY_NS
        known = {} if before is None else before.small
        directories, small = [], {}
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.is_symlink():
                    continue
                if entry.is_dir():
                    if not self._is_apart(entry.path):
                        directories.append(entry.path)
                elif entry.is_file() and HEAD_SIZE < entry.stat().st_size <= SIZE_MAX:
                    status = entry.stat()
                    mark = (status.st_ino, status.st_size, status.st_mtime_ns)
                    is_same = entry.path in known and known[entry.path][0] == mark
                    there = known[entry.path][1] if is_same else self._read(entry.path)
                    small[entry.path] = mark, there
        return _Listing(changed_ns, is_stable, tuple(directories), small)

    def _read(self, path: str) -> Reference | None:
        self.files_read += 1
        return _read(path)

    def _is_apart(self, path: str) -> bool:
        own = os.path.join(path, DEFAULT_DIRECTORY, self._pool_name)
        return path.endswith(".references") or os.path.exists(own)


def survey_of(directory: str, patience_s: float | None = PATIENCE_S) -> Survey:
    """Return a survey of the run whose links are in ``directory``. It looks below the directory
    that holds ``.portus``, if the links are in one; else nowhere."""
    inside = os.path.dirname(directory)
    is_own = os.path.basename(inside) == DEFAULT_DIRECTORY
    pool_name = os.path.splitext(os.path.basename(directory))[0] + DEFAULT_DIRECTORY
    return Survey(os.path.dirname(inside) if is_own else None, pool_name, patience_s)


def _read(path: str) -> Reference | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        data = os.read(descriptor, HEAD_SIZE)
        if not may_begin(data):
            return None
        data += os.read(descriptor, SIZE_MAX)
    finally:
        os.close(descriptor)
    try:
        return decode(data)
    except (CorruptionError, UsageError):
        return None
