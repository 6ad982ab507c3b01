"""``Publisher``: a file appears at its path in one step, and the one before it is never missing.

    claim a record -> hold the newest committed file -> write and sync the draft
      -> rename it to the path -> sync both directories = COMMIT -> release holds

At a path there is nothing, the previous file, or the new one, whatever the moment of a crash: a
draft is durable before it is renamed, and the rename is durable before the commit is reported.

Several files of one directory are one *publication*: all drafts are durable before a redo marker
is, and that before the first rename (``redo``). Between a crash in the middle of the renames and
the next start, a reader without Portus can see a mixture; no other reader can.

A *hold* is a hidden hard link to the newest committed file of a series (files whose names differ in
their numbers), from the call of a save to its end; for a publication, to each file of the newest
directory of its series. If a program removes that file too early and is killed, the next start
restores it (``recovery``).

A *spare* is a removed file of this process whose blocks and pages are reused; there are as many as
a publication has files, the largest ones. The rules: no visible name refers to it, the removal is
durable, and no process has it open. All of that holds before the first byte is written, or the old
path could show new bytes after a crash, or a reader could.

For a file that another process will remove (one rank's file of a sharded checkpoint), a second
hidden link is kept from the commit on. Once that is the only link, the file is a spare too.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

from portus.engine.directory import redo
from portus.engine.directory.folder import (
    DRAFT,
    FOLDER,
    HOLD,
    MARK,
    REDO,
    HiddenFolder,
    LockedRecord,
    OpenDirectory,
    hidden_name,
    path_name,
)
from portus.engine.directory.recovery import recover, restore
from portus.engine.directory.redo import Move
from portus.engine.directory.system import FileState, Linux
from portus.engine.media.process import Descriptor
from portus.engine.pipeline.request import SaveRequest
from portus.errors import MediumError, printable

SERIES_MAX: Final = 16
"""Series whose newest file, or directory, is remembered."""

WATCHED_MAX: Final = 32
"""The newest files that other processes remove and that have a hidden link here."""

HELD_MAX: Final = 1000
"""Files of a directory that are held."""

_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
)
"""Why a file cannot be held: another file system, or one without links."""

_DIGITS: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class _CommittedFile:
    """A committed file. ``name``: empty for a directory, with all files."""

    directory: OpenDirectory
    name: str
    state: FileState


@dataclass(frozen=True, slots=True)
class _Hold:
    """A hidden link to a committed file, which the record of a draft protects."""

    folder: HiddenFolder
    name: str
    of: _CommittedFile


@dataclass(frozen=True, slots=True)
class _LockedHold(_Hold):
    """A hidden link whose file is open and locked, so that no start takes it for a leftover: a
    spare, or a link to a file that may become one."""

    file: Descriptor


class Publisher:
    """The files that this process publishes. Threads may share it."""

    def __init__(self, system: Linux) -> None:
        self._system: Final = system
        self._lock: Final = threading.RLock()  # reentrant: ``begin`` abandons a draft under it
        self._folders: Final[list[HiddenFolder]] = []
        """Open folders: those of drafts and spares."""
        self._directories: Final[list[OpenDirectory]] = []
        """Open directories: those of drafts, and of the newest files."""
        self._drafts: Final[list[Publication]] = []
        self._newest: Final[dict[str, _CommittedFile]] = {}
        self._written: Final[set[tuple[int, int]]] = set()
        """Identities of the files that this process committed and has not removed."""
        self._watched: Final[list[_LockedHold]] = []
        self._spares: Final[list[_LockedHold]] = []
        self._spares_max = 1

    def begin(
        self, *paths: str, base: str | None = None, removed_elsewhere: bool = False
    ) -> Publication:
        """Return drafts of the files that are to be at ``paths``, absolute, without links, and in
        one directory. base: a directory above it, on the same file system, whose hidden folder has
        the drafts; None: that directory itself. removed_elsewhere: another process will remove the
        files; their space is reused then too.

        Holds the newest files of their series until the drafts are published or abandoned. Restores
        files that an earlier process lost. Raises ``MediumError``.
        """
        where = os.path.dirname(paths[0])
        names = [os.path.relpath(path, where) for path in paths]
        with self._lock:
            series = _series(names[0] if len(names) == 1 else f"{os.path.basename(where)}/")
            directory = self._directory(where, base or where)
            record = directory.folder.claim()
            draft = Publication(self, directory, record, names, series, removed_elsewhere)
            self._drafts.append(draft)
            self._spares_max = max(len(each.names) for each in self._drafts)
            try:
                self._hold(draft)
                for name in names:
                    self._open(draft, name)
            except BaseException:
                self.abandon(draft)
                raise
            return draft

    def remove(self, path: str) -> bool:
        """Remove a file, durably; return False if there is none. A file that this process wrote
        becomes the spare. Raises ``MediumError``."""
        where, name = os.path.split(path)
        with self._lock:
            directory = self._directory(where)
            state = self._system.look(directory.file, name)
            if state is None:
                self._close_unused()
                return False
            self._let_go(state.identity, self._system.status(directory.file).identity)
            kept = None
            if self._may_keep(state):
                with contextlib.suppress(MediumError):  # a full disk: then it is no spare
                    # Before the unlink: without a second name the blocks would be freed.
                    kept = self._link_locked(_CommittedFile(directory, name, state))
            self._system.unlink(directory.file, name)
            if kept is not None:
                self._release(kept)
            self._system.sync(directory.file)
            if all(spare.of.state.identity != state.identity for spare in self._spares):
                self._written.discard(state.identity)
            self._close_unused()
            return True

    def _let_go(self, file: tuple[int, int], directory: tuple[int, int]) -> None:
        """Release drafts' holds of a file that is about to be removed, unless it is the newest:
        otherwise its space would not be free before they end, and they may need it."""
        if not {file, directory} & {each.state.identity for each in self._newest.values()}:
            for draft in self._drafts:
                for hold in [each for each in draft.holds if each.of.state.identity == file]:
                    draft.holds.remove(hold)
                    self._release(hold)

    def publish(self, draft: Publication, turn: AbstractContextManager[None] | None = None) -> None:
        """Make drafts, which are durable, the files at their paths. Raises ``MediumError``; then
        nothing has changed, or the message says that it is uncertain. turn: held while the names
        change; an error that it raises forbids that."""
        with self._lock:
            if len(draft.names) == 1:
                self._publish_one(draft, turn or contextlib.nullcontext())
            else:
                self._publish_all(draft, turn or contextlib.nullcontext())
            files = self._note_committed(draft)
            self._look_for_removed()
            while len(self._newest) > SERIES_MAX:
                del self._newest[next(iter(self._newest))]
            self._end(draft)
            for file in files if draft.removed_elsewhere else ():
                with contextlib.suppress(MediumError):  # then it is no spare
                    self._watch(file)

    def _publish_one(self, draft: Publication, turn: AbstractContextManager[None]) -> None:
        folder, system, file = draft.folder, self._system, draft.files[0]
        with turn:
            # The commit. If killed before it, the path is as it was, and a start removes the draft.
            system.rename((folder.make(), file.hidden), (draft.directory.file, file.name))
            draft.is_published = True
        try:
            draft.directory.sync()
            system.sync(folder.make())
        except MediumError as error:
            path = draft.path
            self._end(draft)
            raise MediumError(
                error.errno,
                f"{path}: the file is there, and whether it survives a power cut is "
                f"uncertain: its directory could not be synced ({error.strerror}). Check the "
                "disk",
            ) from error

    def _publish_all(self, draft: Publication, turn: AbstractContextManager[None]) -> None:
        directory, system, moves = draft.directory, self._system, []
        with turn:
            for file in draft.files:
                there = system.look(directory.file, file.name)
                # A redo leaves a name alone that has a third file by then (decision 0210).
                replaced = 0 if there is None else there.identity[1]
                inode = system.status(file.file).identity[1]
                moves.append(Move(file.hidden, inode, file.name, replaced))
            # From here on the publication counts: a start completes the missing renames.
            redo.write(directory, draft.record.token, moves)
            draft.is_published = True  # even if this process dies now
            try:
                redo.apply(directory, moves)
            except MediumError as error:
                path = draft.path
                self._leave(draft)
                raise MediumError(
                    error.errno,
                    f"{path}: the files of this checkpoint are durable, and some may not have "
                    f"their names yet ({error.strerror}). The next start gives them their names. "
                    "Check the disk",
                ) from error

    def _note_committed(self, draft: Publication) -> list[_CommittedFile]:
        """Remember the newest of the series, and return the committed files."""
        system, directory = self._system, draft.directory
        files = [
            _CommittedFile(directory, each.name, system.status(each.file)) for each in draft.files
        ]
        self._written.update(each.state.identity for each in files)
        is_one = len(files) == 1
        newest = (
            files[0] if is_one else _CommittedFile(directory, "", system.status(directory.file))
        )
        # Popped first, so that the dict is in the order of commits, and the oldest series goes.
        self._newest.pop(draft.series, None)
        self._newest[draft.series] = newest
        # Scripts may remove this file, now the newest, before those drafts are committed.
        for other in self._drafts:
            if other is not draft and other.series == draft.series:
                with contextlib.suppress(MediumError):  # this one is committed anyway
                    for each in self._files_of(newest):
                        self._hold_also(other, each)
        return files

    def abandon(self, draft: Publication) -> None:
        """End a draft that is not to be published. A held file that was removed meanwhile is
        restored. Raises nothing. A second call does nothing."""
        with self._lock:
            if draft not in self._drafts:
                return
            for hold in draft.holds:
                with contextlib.suppress(MediumError):
                    where = hold.of.directory.path()
                    if where is not None:
                        restore(draft.folder, hold.name, os.path.join(where, hold.of.name))
            self._end(draft)

    def drop_spare(self) -> bool:
        """Remove the spares, whose space is needed, or which are no longer of use; return False if
        there is none."""
        with self._lock:
            self._look_for_removed()
            has_spare = bool(self._spares)
            while self._spares:
                self._drop(self._spares.pop())
            return has_spare

    def make_room(self, request: SaveRequest) -> bool:
        """Free space on a full disk. Return whether that was done. request: of the save that needs
        it."""
        # The spare first: it is no checkpoint.
        if self.drop_spare():
            return True
        has_removed = request.make_room()
        self.drop_spare()  # the removed file is the spare now
        return has_removed

    def _drop(self, kept: _LockedHold) -> None:
        with contextlib.suppress(MediumError):
            self._system.unlink(kept.folder.make(), kept.name)
        self._system.close(kept.file)
        self._written.discard(kept.of.state.identity)

    def close(self) -> None:
        """Remove the spare and empty hidden folders, and close all directories."""
        with self._lock:
            # Before ``drop_spare``, which would sync each of these that was removed elsewhere.
            while self._watched:
                self._drop(self._watched.pop())
            self.drop_spare()
            self._newest.clear()
            self._close_unused()

    def _directory(self, where: str, base: str | None = None) -> OpenDirectory:
        """Return the open directory at ``where``, with the hidden folder of the directory ``base``.
        None: with any, at best one above it, which outlives it. At first, recover that folder."""
        # By their paths now: a descriptor follows a directory that was renamed; the caller does
        # not.
        for directory in self._directories:
            if directory.path() == where and base in (None, directory.folder.path()):
                break
        else:
            directory = OpenDirectory(self._folder(base or self._base_above(where)), where)
            self._directories.append(directory)
        if directory.folder.is_left:
            directory.folder.is_left = False
            recover(directory.folder)
        return directory

    def _folder(self, base: str) -> HiddenFolder:
        for folder in self._folders:
            if folder.path() == base:
                return folder
        folder = HiddenFolder(self._system, base)
        self._folders.append(folder)
        return folder

    def _base_above(self, where: str) -> str:
        """Return the nearest directory above ``where`` whose hidden folder is open, else that."""
        bases = [folder.path() for folder in self._folders]
        above = [each for each in bases if each and os.path.commonpath([each, where]) == each]
        return max(above, key=len, default=where)

    def _close_unused(self) -> None:
        holds = [*self._watched, *(hold for draft in self._drafts for hold in draft.holds)]
        committed = [*self._newest.values(), *(hold.of for hold in holds)]
        directories = [draft.directory for draft in self._drafts]
        directories += [each.directory for each in committed]
        for directory in [each for each in self._directories if each not in directories]:
            self._directories.remove(directory)
            directory.close()
        # With those of directories that are open: their checkpoints may have to be held.
        used = [directory.folder for directory in self._directories]
        used += [hold.folder for hold in (*self._spares, *self._watched)]
        for folder in [each for each in self._folders if each not in used]:
            self._folders.remove(folder)
            with contextlib.suppress(MediumError):
                folder.close()

    # Holds.

    def _hold(self, draft: Publication) -> None:
        """Hold the newest of each series that this process saves, and of the draft's."""
        if draft.series not in self._newest:
            found = self._find_newest(draft)
            if found is not None:
                self._newest[draft.series] = found
        here, there = draft.folder.path(), draft.directory.path()
        below = os.path.relpath(there, here) if here and there else "."
        paths = [os.path.normpath(os.path.join(below, name)) for name in draft.names]
        # Not synced: only living processes read it. A start needs only the symbolic links; on ext4
        # these survived a power cut that emptied this file (decision 0203).
        self._system.write(draft.record.file, b"\0".join(map(os.fsencode, paths)))
        for committed in self._newest.values():
            for file in self._files_of(committed):
                self._hold_also(draft, file)

    def _hold_also(self, draft: Publication, committed: _CommittedFile) -> None:
        """Have a draft hold one more file, which may have been committed after the draft began."""
        where = committed.directory.path()
        here = draft.folder.path()
        if where is None or here is None:
            return
        hidden = hidden_name(draft.record.token, HOLD, next(draft.numbers))
        path = os.path.relpath(os.path.join(where, committed.name), os.path.join(here, FOLDER))
        hold = _Hold(draft.folder, hidden, committed)
        # Before it is made: if that fails, ``abandon`` removes a half-made one.
        draft.holds.append(hold)
        try:
            # The path first: a start cannot put back a hold without knowing where it belongs.
            self._system.note(draft.folder.make(), path_name(hidden), os.fsencode(path))
            is_held = self._link(hold)
        except MediumError as error:
            if error.errno not in _NO_LINKS:
                raise
            is_held = False
        if not is_held:
            draft.holds.pop()
            self._system.unlink(draft.folder.make(), path_name(hidden))

    def _link(self, hold: _Hold) -> bool:
        """Make the hidden link of a hold; return False if the file is gone, or cannot be held."""
        there = hold.of.directory.file, hold.of.name
        state = self._system.look(*there)
        # Another program's file may be at the path by now.
        if state is None or state.identity != hold.of.state.identity:
            return False
        try:
            self._system.link(there, (hold.folder.make(), hold.name))
        except MediumError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def _files_of(self, committed: _CommittedFile) -> list[_CommittedFile]:
        """Return the files of a directory, the largest ones first; or the file itself."""
        if committed.name:
            return [committed]
        directory, found = committed.directory, []
        for name in self._system.names(directory.file):
            state = self._system.look(directory.file, name)
            if state is not None and state.is_regular:
                found.append(_CommittedFile(directory, name, state))
        return sorted(found, key=lambda each: (-each.state.size, each.name))[:HELD_MAX]

    def _find_newest(self, draft: Publication) -> _CommittedFile | None:
        """Return the newest that is there of a draft's series: the file beside the one of the
        draft, or the directory of several; if that has no files, the newest directory beside it."""
        system, directory, is_one = self._system, draft.directory, len(draft.names) == 1
        where = directory.path()
        if where is None:
            return None
        own = _CommittedFile(directory, "", system.status(directory.file))
        if not is_one and self._files_of(own):
            return own
        above = directory.file if is_one else system.open_directory(os.path.dirname(where))
        found = []
        try:
            for name in system.names(above):
                if _series(name if is_one else f"{name}/") != draft.series:
                    continue
                state = system.look(above, name)
                if state is not None and (state.is_regular if is_one else state.is_directory):
                    found.append((state.changed_ns, name, state))
        finally:
            if not is_one:
                system.close(above)
        found = [each for each in found if each[2].identity != own.state.identity]
        if not found:
            return None
        _, name, state = max(found, key=lambda each: each[:2])
        if is_one:
            return _CommittedFile(directory, name, state)
        base = directory.folder.path()
        beside = self._directory(os.path.join(os.path.dirname(where), name), base)
        return _CommittedFile(beside, "", state)

    def _release(self, hold: _Hold) -> None:
        """Remove a hidden link, or make it a spare if it is the last name of a file of ours."""
        spare = None
        with contextlib.suppress(MediumError):
            spare = self._as_spare(hold)
        with contextlib.suppress(MediumError):
            if spare is None:
                self._system.unlink(hold.folder.make(), hold.name)
            self._system.unlink(hold.folder.make(), path_name(hold.name))
        if spare is not None:
            self._spares.append(spare)
        while len(self._spares) > self._spares_max:
            smallest = min(self._spares, key=lambda each: each.of.state.size)
            self._spares.remove(smallest)
            self._drop(smallest)

    # Spares.

    def _may_keep(self, removed: FileState) -> bool:
        """Return whether a removed file may become a spare: one of ours, if there is room, or a
        smaller one."""
        if removed.identity not in self._written:
            return False
        has_room = len(self._spares) < self._spares_max
        return has_room or removed.size > min(each.of.state.size for each in self._spares)

    def _link_locked(self, committed: _CommittedFile) -> _LockedHold | None:
        """Make a hidden link to a committed file, and lock the file; return None if it is gone, or
        cannot be a spare."""
        system, directory = self._system, committed.directory
        file = system.open(directory.file, committed.name, writable=True)
        if file is None:
            return None
        name = hidden_name(secrets.token_hex(6), HOLD)
        made = _LockedHold(directory.folder, name, committed, file)
        is_made = False
        try:
            # Elsewhere an open file hinders who removes its directory (NFS), or reads it (SMB).
            # If this process is killed, a start finds a hold without a draft, and removes it.
            is_made = system.is_local(file) and system.lock(file) and self._link(made)
        finally:
            if not is_made:
                system.close(file)
        return made if is_made else None

    def _watch(self, committed: _CommittedFile) -> None:
        """Keep a hidden link to a committed file for as long as it has another one."""
        while len(self._watched) >= WATCHED_MAX:
            self._release(self._watched.pop(0))
        # Later its link count shows that the visible name was removed, by any process.
        watched = self._link_locked(committed)
        if watched is not None:
            self._watched.append(watched)

    def _look_for_removed(self) -> None:
        """Make a file that was removed elsewhere the spare. Syncs."""
        for watched in self._watched[:]:
            with contextlib.suppress(MediumError):
                state = self._system.look(watched.folder.make(), watched.name)
                if state is None or state.links == 1:
                    self._watched.remove(watched)
                    self._release(watched)

    def _as_spare(self, hold: _Hold) -> _LockedHold | None:
        system, of = self._system, hold.of
        file, is_spare = hold.file if isinstance(hold, _LockedHold) else None, False
        try:
            hidden = hold.folder.make()
            state = system.look(hidden, hold.name)
            # With another name it may still be read; with another identity it is not ours.
            is_it = state is not None and state.identity == of.state.identity
            if state is not None and is_it and state.links == 1 and self._may_keep(state):
                file = file or system.open(hidden, hold.name, writable=True)
                # Locked as long as it is a spare, so that other processes' starts leave it alone.
                if file is not None and system.lock(file):
                    # Without these, a crash may show the removed path with the bytes to come.
                    system.sync(file)
                    system.sync(of.directory.file)
                    system.sync(hidden)
                    is_spare = True
        finally:
            if file is not None and not is_spare:
                system.close(file)
        return _LockedHold(hold.folder, hold.name, of, file) if is_spare and file else None

    def _open(self, draft: Publication, name: str) -> None:
        """Open a file of a draft: the spare, if there is one that is not read, or a new one."""
        system, folder = self._system, draft.folder
        there = system.look(draft.directory.file, name)
        hidden = hidden_name(draft.record.token, DRAFT, len(draft.files))
        # A spare has its blocks, and perhaps its pages; fresh space is slow (decision 0203).
        spare = self._spare_for(_series(name))
        if spare is not None and self._is_free(spare, folder):
            # Its names are all hidden, so either of them may be there after a crash.
            try:
                system.rename((spare.folder.make(), spare.name), (folder.make(), hidden))
            except MediumError:
                self._drop(spare)
                raise
            opened = UnpublishedFile(name, hidden, spare.file, True)
            draft.files.append(opened)
            self._written.discard(spare.of.state.identity)
        else:
            if spare is not None:
                self._drop(spare)
            opened = UnpublishedFile(name, hidden, system.create(folder.make(), hidden), False)
            draft.files.append(opened)
            system.lock(opened.file)
        # As after ``torch.save``: the mode of the replaced file, else that of the umask.
        if there is not None and there.is_regular:
            system.set_mode(opened.file, there.mode & 0o7777)
        elif opened.is_spare:  # it has the mode of the file that it was
            system.set_mode(opened.file, 0o666 & ~_umask())

    def _spare_for(self, series: str) -> _LockedHold | None:
        """Take the spare of a series; or, if there is only one, that one."""
        found = [each for each in self._spares if _series(each.of.name) == series]
        if not found and self._spares_max == 1:
            found = self._spares[:]
        if not found:
            return None
        self._spares.remove(found[0])
        return found[0]

    def _is_free(self, spare: _LockedHold, folder: HiddenFolder) -> bool:
        try:
            status = self._system.status(spare.file)
            here = self._system.status(folder.base).identity[0]
            return (
                status.links == 1
                and status.identity[0] == here  # a rename does not leave its file system
                and self._system.is_unused(spare.file)
            )
        except MediumError:
            return False

    # The end of a draft.

    def _end(self, draft: Publication) -> None:
        """Release the files of a draft. The record goes last: it names the owner of the others."""
        self._drafts.remove(draft)
        folder = draft.folder
        if len(draft.names) > 1:
            for kind in (REDO, MARK):
                with contextlib.suppress(MediumError):
                    self._system.unlink(folder.make(), hidden_name(draft.record.token, kind))
        for file in () if draft.is_published else draft.files:
            with contextlib.suppress(MediumError):
                self._system.unlink(folder.make(), file.hidden)
        for hold in draft.holds:
            self._release(hold)
        for file in draft.files:
            with contextlib.suppress(MediumError):
                self._system.unlock(file.file)
            self._system.close(file.file)
        with contextlib.suppress(MediumError):
            self._system.unlink(folder.make(), draft.record.name)
        self._system.close(draft.record.file)
        with contextlib.suppress(MediumError):
            folder.remove_if_empty()
        self._close_unused()

    def _leave(self, draft: Publication) -> None:
        """End a draft as a process that dies would: the next start continues it."""
        self._drafts.remove(draft)
        for file in draft.files:
            self._system.close(file.file)
        self._system.close(draft.record.file)
        self._newest.clear()
        self._close_unused()
        draft.folder.is_left = True


@dataclass(frozen=True, slots=True)
class UnpublishedFile:
    """A file in the making, under a hidden name, open for reading and writing. ``is_spare``: it has
    old bytes and blocks."""

    name: str
    hidden: str
    file: Descriptor
    is_spare: bool


@dataclass(slots=True, eq=False)
class Publication:
    """Files in the making that become visible together. Its methods are those of ``Publisher``."""

    publisher: Publisher
    directory: OpenDirectory
    record: LockedRecord
    names: Sequence[str]
    series: str
    removed_elsewhere: bool
    files: list[UnpublishedFile] = field(default_factory=list)
    """The files that are open by now, in the order of the names."""
    holds: list[_Hold] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of its holds, also of released ones."""
    is_published: bool = False

    @property
    def folder(self) -> HiddenFolder:
        """The hidden folder that has the drafts."""
        return self.directory.folder

    @property
    def path(self) -> str:
        """The future path of the first file, for messages; the directory of several."""
        return self.path_of(self.names[0] if len(self.names) == 1 else "")

    def path_of(self, name: str) -> str:
        """Return the future path of a file, for messages."""
        return printable(os.path.join(self.directory.path() or "a deleted directory", name))

    def publish(self, turn: AbstractContextManager[None] | None = None) -> None:
        self.publisher.publish(self, turn)

    def abandon(self) -> None:
        self.publisher.abandon(self)


def _series(name: str) -> str:
    return _DIGITS.sub("#", name)


def _umask() -> int:
    """Return the umask of this process, without setting it, which other threads would see."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
