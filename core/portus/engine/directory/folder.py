"""The hidden folder ``.portus`` of a directory: drafts, holds and spares, and their owners.

Each save has a *record* in it, a small file that its process keeps locked: it names the targets.
Beside each held file a symbolic link has the path at which that is a checkpoint. All files of an
unlocked record were left by a process that ended. Names are short and hidden, end in ``.portus``,
and do not contain the visible name, because tools that look for checkpoints match hidden names too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from portus.engine.directory.system import Linux
from portus.engine.media.process import Descriptor
from portus.errors import MediumError, printable

FOLDER: Final = ".portus"

RECORD: Final = "save"
DRAFT: Final = "draft"
HOLD: Final = "hold"
PATH: Final = "path"
MARK: Final = "mark"
REDO: Final = "redo"
"""A marker of several files (``redo``), being written and complete."""

RECORD_MAX: Final = 1 << 20
"""Bytes of a record that are read: names."""

_SUFFIX: Final = ".portus"
_TRIES: Final = 100


def hidden_name(token: str, kind: str, number: int = 0) -> str:
    """Return the name of a file of the save ``token``."""
    return f".{token}.{kind}{number or ''}{_SUFFIX}"


def token_of(name: str) -> str | None:
    """Return the save that a hidden file belongs to; None if it is not one of ours."""
    parts = name.split(".")
    if len(parts) != 4 or parts[0] or parts[3] != _SUFFIX[1:]:
        return None
    kind = parts[2].rstrip("0123456789")
    return parts[1] if kind in (RECORD, DRAFT, HOLD, PATH, MARK, REDO) else None


def path_name(hold: str) -> str:
    """Return the name of the link that has the path at which a held file is a checkpoint."""
    return hold.replace(f".{HOLD}", f".{PATH}")


@dataclass(frozen=True, slots=True)
class LockedRecord:
    """The locked record of a save of this process."""

    token: str
    name: str
    file: Descriptor


class HiddenFolder:
    """The hidden folder of the directory ``base``, which is held by descriptor. It is made when
    needed, and has the drafts of files in that directory, or in some below it."""

    def __init__(self, system: Linux, path: str) -> None:
        self.system: Final = system
        self.base: Final = system.open_directory(path)
        self._hidden: Descriptor | None = None
        self._is_new = False
        self.is_left = True
        """True if processes may have left something in it to recover."""

    @property
    def folder(self) -> Descriptor | None:
        """The hidden folder, if it exists."""
        if self._hidden is None:
            self._hidden = self.system.open_folder(self.base, FOLDER, create=False)
        return self._hidden

    def make(self) -> Descriptor:
        """Return the hidden folder; create it if it does not exist."""
        hidden = self.folder
        if hidden is None:
            hidden = self.system.open_folder(self.base, FOLDER, create=True)
            assert hidden is not None
            self._hidden, self._is_new = hidden, True
        return hidden

    def claim(self) -> LockedRecord:
        """Create the record of a new save, locked by this process."""
        for _ in range(_TRIES):
            hidden = self.make()
            token = secrets.token_hex(6)
            name = hidden_name(token, RECORD)
            try:
                file = self.system.create(hidden, name)
            except MediumError:
                if self.system.path_of(hidden) is None:  # another process removed it, empty
                    self.forget()
                    continue
                raise
            is_ours = False
            try:
                is_ours = self.system.lock(file) and self._is_at(hidden, name, file)
            finally:
                if not is_ours:  # another process's start took it for a leftover
                    with contextlib.suppress(MediumError):
                        self.system.unlink(hidden, name)
                    self.system.close(file)
            if is_ours:
                return LockedRecord(token, name, file)
        where = printable(self.path() or FOLDER)
        raise MediumError(None, f"{where}: no record of a save could be locked")

    def in_flight(self) -> dict[str, list[bytes]]:
        """Return the saves in flight here, of any process: the files that each is to make, by their
        paths below ``base``, by its token."""
        hidden = self.folder
        found: dict[str, list[bytes]] = {}
        if hidden is None:
            return found
        for each in self.system.names(hidden):
            token = token_of(each) or ""
            if each != hidden_name(token, RECORD):
                continue
            file = self.system.open(hidden, each, writable=False)
            if file is None:
                continue
            try:
                # The kernel releases a lock when its process dies, also by SIGKILL.
                is_held = not self.system.lock(file)
                target = self.system.read(file, RECORD_MAX)
            finally:
                self.system.close(file)
            if is_held:
                found[token] = target.split(b"\0")
        return found

    def abandoned_saves(self) -> Iterator[list[str]]:
        """Yield the names that each process that ended has left of a save. They are locked while
        the caller has them, and the record is the last one."""
        hidden = self.folder
        if hidden is None:
            return
        found: dict[str, list[str]] = {}
        for name in self.system.names(hidden):
            token = token_of(name)
            if token is not None:
                found.setdefault(token, []).append(name)
        for token, names in found.items():
            record = hidden_name(token, RECORD)
            # The record goes last: until then it names the owner of the others.
            names.sort(key=lambda name: (name == record, name))
            # Without a record each file speaks for itself: a living process keeps its spare locked.
            # A path is a symbolic link, which cannot be locked.
            locked = [record] if record in names else [name for name in names if PATH not in name]
            files = self._lock_all(hidden, locked) if locked else []
            if files is None:
                continue
            try:
                yield names
            finally:
                for file in files:
                    self.system.close(file)

    def remove_if_empty(self) -> None:
        """Remove the hidden folder if nothing is in it."""
        if self.folder is not None and self.system.remove_folder(self.base, FOLDER):
            self.forget()

    def sync_hidden(self) -> None:
        """Make the hidden folder and the names in it durable."""
        self.system.sync(self.make())
        if self._is_new:
            self.system.sync(self.base)
            self._is_new = False

    def path(self) -> str | None:
        """Return the present path of the directory; None if it was deleted."""
        return self.system.path_of(self.base)

    def close(self) -> None:
        """Remove the hidden folder if it is empty, and close both directories."""
        try:
            self.remove_if_empty()
        finally:
            self.leave()

    def leave(self) -> None:
        """Close both directories, and change nothing."""
        self.forget()
        self.system.close(self.base)

    def forget(self) -> None:
        """Close the hidden folder: it was deleted, and the next save makes another one."""
        hidden, self._hidden = self._hidden, None
        if hidden is not None:
            self.system.close(hidden)

    def _lock_all(self, hidden: Descriptor, names: list[str]) -> list[Descriptor] | None:
        """Open and lock all of some files; return None if another process has one of them, or this
        one, or all are gone."""
        files: list[Descriptor] = []
        for name in names:
            file = self.system.open(hidden, name, writable=False)
            if file is None:
                continue
            files.append(file)
            # Between the open and the lock another process may have replaced it.
            if not self.system.lock(file) or not self._is_at(hidden, name, file):
                for each in files:
                    self.system.close(each)
                return None
        return files or None

    def _is_at(self, hidden: Descriptor, name: str, file: Descriptor) -> bool:
        there = self.system.look(hidden, name)
        return there is not None and there.identity == self.system.status(file).identity


class OpenDirectory:
    """A directory of checkpoints, held by descriptor. ``folder``: the one that has the drafts for
    it. Raises ``MediumError``."""

    def __init__(self, folder: HiddenFolder, path: str) -> None:
        self.folder: Final = folder
        self.system: Final = folder.system
        self.file: Final = self.system.open_directory(path)
        self._is_anchored = False

    def path(self) -> str | None:
        """Return its present path; None if it was deleted."""
        return self.system.path_of(self.file)

    def sync(self) -> None:
        """Make the names in the directory durable, and its own, once: it may be as new."""
        self.system.sync(self.file)
        where = None if self._is_anchored else self.path()
        self._is_anchored = True
        if where is None:
            return
        try:
            # A sync of a directory makes the names in it durable, not its own name above.
            parent = self.system.open_directory(os.path.dirname(where))
        except MediumError:
            return  # not readable: it is older, and another user's
        try:
            self.system.sync(parent)
        finally:
            self.system.close(parent)

    def close(self) -> None:
        self.system.close(self.file)
