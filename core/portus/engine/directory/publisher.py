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
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Generic

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
from portus.engine.directory.system import File, FileState, System
from portus.engine.pipeline.request import SaveRequest
from portus.errors import MediumError, printable

_log: Final = logging.getLogger("portus")

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
class _NewestFile(Generic[File]):
    """The newest committed file of a series. ``name``: empty for a directory, with all files."""

    directory: OpenDirectory[File]
    name: str
    identity: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Hold(Generic[File]):
    """A hidden link to a committed file."""

    name: str
    of: _NewestFile[File]


@dataclass(frozen=True, slots=True)
class _WatchedFile(Generic[File]):
    """A hidden link to a committed file that another process is to remove."""

    folder: HiddenFolder[File]
    record: LockedRecord[File]
    hold: _Hold[File]


@dataclass(frozen=True, slots=True)
class _Spare(Generic[File]):
    """A removed file under a hidden name, locked and ready to be overwritten."""

    folder: HiddenFolder[File]
    name: str
    series: str
    file: File
    status: FileState


class Publisher(Generic[File]):
    """The files that this process publishes. Threads may share it.

    spares: whether removed files are reused. Not on file systems that are exported or shared
        with a host, whose readers the kernel does not know.
    """

    def __init__(self, system: System[File], *, spares: bool = True) -> None:
        self._system: Final = system
        self._reuses: Final = spares
        self._lock: Final = threading.RLock()  # reentrant: ``begin`` abandons a draft under it
        self._folders: Final[list[HiddenFolder[File]]] = []
        """Open folders: those of drafts and spares."""
        self._directories: Final[list[OpenDirectory[File]]] = []
        """Open directories: those of drafts, and of the newest files."""
        self._drafts: Final[list[Publication[File]]] = []
        self._newest: Final[dict[str, _NewestFile[File]]] = {}
        self._written: Final[set[tuple[int, int]]] = set()
        """Identities of the files that this process committed and has not removed."""
        self._watched: Final[list[_WatchedFile[File]]] = []
        self._spares: Final[list[_Spare[File]]] = []
        self._spares_max = 1

    def begin(
        self, *paths: str, base: str | None = None, removed_elsewhere: bool = False
    ) -> Publication[File]:
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
            folder = self._folder(base or where)
            series = _series(names[0] if len(names) == 1 else f"{os.path.basename(where)}/")
            directory = self._directory(where, base or where)
            draft = Publication(
                self, folder, directory, folder.claim(), names, series, removed_elsewhere
            )
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

    def recover(self, directory: str) -> None:
        """Restore files that a process that ended had removed too early from ``directory``, and
        remove its remains there. Raises ``MediumError``."""
        with self._lock:
            self._folder(directory)
            self._close_unused()

    def remove(self, path: str) -> bool:
        """Remove a file, durably; return False if there is none. A file that this process wrote
        becomes the spare. Raises ``MediumError``."""
        where, name = os.path.split(path)
        with self._lock:
            directory = self._directory(where, self._base_above(where))
            folder = self._folder(directory.base)
            status = self._system.look(directory.file, name)
            if status is None:
                self._close_unused()
                return False
            self._let_go(status.identity, self._system.status(directory.file).identity)
            kept = self._may_keep(status)
            record = None
            if kept:
                with contextlib.suppress(MediumError):  # a full disk: then it is no spare
                    record = folder.claim()
            hidden = None if record is None else hidden_name(record.token, HOLD)
            if record is not None and hidden is not None:
                try:
                    # Before the unlink: without a second name the blocks would be freed. If the
                    # process is killed here, a start finds a hold without a draft, and removes it.
                    self._system.link((directory.file, name), (folder.make(), hidden))
                except MediumError:
                    hidden = None
            self._system.unlink(directory.file, name)
            if hidden is not None:
                committed = _NewestFile(directory, name, status.identity)
                self._release(folder, _Hold(hidden, committed))
            if record is not None:
                self._drop(folder, record)
            self._system.sync(directory.file)
            if all(spare.status.identity != status.identity for spare in self._spares):
                self._written.discard(status.identity)
            self._close_unused()
            return True

    def _let_go(self, file: tuple[int, int], directory: tuple[int, int]) -> None:
        """Release drafts' holds of a file that is about to be removed, unless it is the newest:
        otherwise its space would not be free before they end, and they may need it."""
        if not {file, directory} & {each.identity for each in self._newest.values()}:
            for draft in self._drafts:
                for hold in [each for each in draft.holds if each.of.identity == file]:
                    draft.holds.remove(hold)
                    self._release(draft.folder, hold)

    def publish(
        self, draft: Publication[File], turn: AbstractContextManager[None] | None = None
    ) -> None:
        """Make drafts, which are durable, the files at their paths. Raises ``MediumError``; then
        nothing has changed, or the message says that it is uncertain. turn: held while the names
        change; an error that it raises forbids that."""
        with self._lock:
            if len(draft.names) == 1:
                self._publish_one(draft, turn or contextlib.nullcontext())
            else:
                self._publish_all(draft, turn or contextlib.nullcontext())
            self._note_committed(draft)
            if self._reuses:
                self._look_for_removed()
                for file in draft.files if draft.removed_elsewhere else ():
                    with contextlib.suppress(MediumError):  # then it is no spare
                        self._watch(draft, file)
            while len(self._newest) > SERIES_MAX:
                del self._newest[next(iter(self._newest))]
            self._end(draft)

    def _publish_one(self, draft: Publication[File], turn: AbstractContextManager[None]) -> None:
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

    def _publish_all(self, draft: Publication[File], turn: AbstractContextManager[None]) -> None:
        folder, directory, system, moves = draft.folder, draft.directory, self._system, []
        with turn:
            for file in draft.files:
                there = system.look(directory.file, file.name)
                # A redo leaves a name alone that has a third file by then (decision 0210).
                replaced = 0 if there is None else there.identity[1]
                inode = system.status(file.file).identity[1]
                moves.append(Move(file.hidden, inode, file.name, replaced))
            # From here on the publication counts: a start completes the missing renames.
            redo.write(folder, draft.record, directory, moves)
            draft.is_published = True  # even if this process dies now
            try:
                redo.apply(folder, directory, moves)
            except MediumError as error:
                path = draft.path
                self._leave(draft)
                raise MediumError(
                    error.errno,
                    f"{path}: the files of this checkpoint are durable, and some may not have "
                    f"their names yet ({error.strerror}). The next start gives them their names. "
                    "Check the disk",
                ) from error

    def _note_committed(self, draft: Publication[File]) -> None:
        system, directory = self._system, draft.directory
        for file in draft.files:
            self._written.add(system.status(file.file).identity)
        if len(draft.files) == 1:
            file = draft.files[0]
            committed = _NewestFile(directory, file.name, system.status(file.file).identity)
        else:
            committed = _NewestFile(directory, "", system.status(directory.file).identity)
        # Popped first, so that the dict is in the order of commits, and the oldest series goes.
        self._newest.pop(draft.series, None)
        self._newest[draft.series] = committed
        # Scripts may remove this file, now the newest, before those drafts are committed.
        for other in self._drafts:
            if other is not draft and other.series == draft.series:
                with contextlib.suppress(MediumError):  # this one is committed anyway
                    for each in self._files_of(committed):
                        self._hold_also(other, each)

    def abandon(self, draft: Publication[File]) -> None:
        """End a draft that is not to be published. A held file that was removed meanwhile is
        restored. Raises nothing. A second call does nothing."""
        with self._lock:
            if draft.is_over:
                return
            for hold in draft.holds:
                with contextlib.suppress(MediumError):
                    where = self._system.path_of(hold.of.directory.file)
                    if where is not None:
                        restore(draft.folder, hold.name, os.path.join(where, hold.of.name))
            self._end(draft)

    def drop_spare(self) -> bool:
        """Remove the spares, whose space is needed, or which are no longer of use; return False if
        there is none."""
        with self._lock:
            self._look_for_removed()
            spares = list(self._spares)
            self._spares.clear()
            for spare in spares:
                self._drop_spare(spare)
            return bool(spares)

    def make_room(self, request: SaveRequest) -> bool:
        """Free space on a full disk. Return whether that was done. request: of the save that needs
        it."""
        # The spare first: it is no checkpoint.
        if self.drop_spare():
            return True
        has_removed = request.make_room()
        self.drop_spare()  # the removed file is the spare now
        return has_removed

    def _drop_spare(self, spare: _Spare[File]) -> None:
        with contextlib.suppress(MediumError):
            self._system.unlink(spare.folder.make(), spare.name)
        self._system.close(spare.file)
        self._written.discard(spare.status.identity)

    def close(self) -> None:
        """Remove the spare and empty hidden folders, and close all directories."""
        with self._lock:
            # Before ``drop_spare``, which would sync each of these that was removed elsewhere.
            while self._watched:
                watched = self._watched.pop()
                with contextlib.suppress(MediumError):
                    self._system.unlink(watched.folder.make(), watched.hold.name)
                self._drop(watched.folder, watched.record)
            self.drop_spare()
            self._newest.clear()
            self._close_unused()

    def _folder(self, where: str) -> HiddenFolder[File]:
        """Return the open folder of the directory at ``where``; at first, recover it."""
        for folder in self._folders:
            # By its path now: a descriptor follows a directory that was renamed; the caller does
            # not.
            if folder.path_of_base() == where:
                if folder.is_left:  # of a publication that was left half renamed, by ``_leave``
                    folder.is_left = False
                    recover(folder)
                return folder
        folder = HiddenFolder(self._system, where)
        self._folders.append(folder)
        recover(folder)
        return folder

    def _directory(self, where: str, base: str | None = None) -> OpenDirectory[File]:
        """Return the open directory at ``where``."""
        for directory in self._directories:
            if self._system.path_of(directory.file) == where and base in (None, directory.base):
                return directory
        directory = OpenDirectory(self._system, where, base or where)
        self._directories.append(directory)
        return directory

    def _base_above(self, where: str) -> str | None:
        """Return the nearest directory above ``where`` whose hidden folder is open: files that were
        in a directory of a checkpoint outlive it there."""
        bases = [folder.path_of_base() for folder in self._folders]
        above = [each for each in bases if each and os.path.commonpath([each, where]) == each]
        return max(above, key=len, default=None)

    def _close_unused(self) -> None:
        directories = [draft.directory for draft in self._drafts]
        directories += [committed.directory for committed in self._newest.values()]
        directories += [watched.hold.of.directory for watched in self._watched]
        directories += [hold.of.directory for draft in self._drafts for hold in draft.holds]
        for directory in [each for each in self._directories if each not in directories]:
            self._directories.remove(directory)
            directory.close()
        used = [draft.folder for draft in self._drafts]
        used += [spare.folder for spare in self._spares]
        used += [watched.folder for watched in self._watched]
        bases = {directory.base for directory in directories}
        for folder in [each for each in self._folders if each not in used]:
            with contextlib.suppress(MediumError):  # a failing disk: it is not needed
                if bases and folder.path_of_base() in bases:
                    continue  # a checkpoint that it may be asked to hold is open
            self._folders.remove(folder)
            with contextlib.suppress(MediumError):
                folder.close()

    # Holds.

    def _hold(self, draft: Publication[File]) -> None:
        """Hold the newest of each series that this process saves, and of the draft's."""
        if draft.series not in self._newest:
            found = self._newest_in(draft) if len(draft.names) == 1 else self._newest_beside(draft)
            if found is not None:
                self._newest[draft.series] = found
        here, there = draft.folder.path_of_base(), self._system.path_of(draft.directory.file)
        below = os.path.relpath(there, here) if here and there else "."
        paths = [os.path.normpath(os.path.join(below, name)) for name in draft.names]
        # Not synced: only living processes read it. A start needs only the symbolic links; on ext4
        # these survived a power cut that emptied this file (decision 0203).
        self._system.write(draft.record.file, b"\0".join(map(os.fsencode, paths)))
        for committed in self._newest.values():
            for file in self._files_of(committed):
                self._hold_also(draft, file)

    def _hold_also(self, draft: Publication[File], committed: _NewestFile[File]) -> None:
        """Have a draft hold one more file, which may have been committed after the draft began."""
        where = self._system.path_of(committed.directory.file)
        here = draft.folder.path_of_base()
        if where is None or here is None:
            return
        hidden = hidden_name(draft.record.token, HOLD, next(draft.numbers))
        path = os.path.relpath(os.path.join(where, committed.name), os.path.join(here, FOLDER))
        hold = _Hold(hidden, committed)
        # Before it is made: if that fails, ``abandon`` removes a half-made one.
        draft.holds.append(hold)
        try:
            # The path first: a start cannot put back a hold without knowing where it belongs.
            self._system.note(draft.folder.make(), path_name(hidden), os.fsencode(path))
            is_held = self._link(draft.folder, hold)
        except MediumError as error:
            if error.errno not in _NO_LINKS:
                raise
            is_held = False
        if not is_held:
            draft.holds.pop()
            self._system.unlink(draft.folder.make(), path_name(hidden))

    def _link(self, folder: HiddenFolder[File], hold: _Hold[File]) -> bool:
        """Make the hidden link of a hold; return False if the file is gone, or cannot be held."""
        there = hold.of.directory.file, hold.of.name
        status = self._system.look(*there)
        # Another program's file may be at the path by now.
        if status is None or status.identity != hold.of.identity:
            return False
        try:
            self._system.link(there, (folder.make(), hold.name))
        except MediumError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def _files_of(self, committed: _NewestFile[File]) -> list[_NewestFile[File]]:
        """Return the files of a directory, the largest ones first; or the file itself."""
        if committed.name:
            return [committed]
        directory, found = committed.directory, []
        for name in self._system.names(directory.file):
            status = self._system.look(directory.file, name)
            if status is not None and status.is_regular:
                found.append((-status.size, name, status.identity))
        return [_NewestFile(directory, name, each) for _, name, each in sorted(found)[:HELD_MAX]]

    def _newest_beside(self, draft: Publication[File]) -> _NewestFile[File] | None:
        """Return the directory of a publication, if it has files; else the newest beside it whose
        name differs only in its numbers."""
        where = self._system.path_of(draft.directory.file)
        own = _NewestFile(draft.directory, "", self._system.status(draft.directory.file).identity)
        if where is None or self._files_of(own):
            return own
        above, newest = self._system.open_directory(os.path.dirname(where)), None
        try:
            names = self._system.names(above)
            beside = [each for each in names if f"{_series(each)}/" == draft.series]
            for name in beside:
                status = self._system.look(above, name)
                if status is not None and status.is_directory and name != os.path.basename(where):
                    newest = max(newest or (-1, ""), (status.changed_ns, name))
        finally:
            self._system.close(above)
        if newest is None:
            return None
        beside_it = os.path.join(os.path.dirname(where), newest[1])
        directory = self._directory(beside_it, draft.directory.base)
        return _NewestFile(directory, "", self._system.status(directory.file).identity)

    def _newest_in(self, draft: Publication[File]) -> _NewestFile[File] | None:
        """Return the newest file beside that of a draft, if only numbers in its name differ."""
        directory, newest = draft.directory, None
        for each in self._system.names(directory.file):
            if _series(each) == draft.series:
                status = self._system.look(directory.file, each)
                if status is not None and status.is_regular:
                    newest = max(newest or (-1, ""), (status.changed_ns, each))
        if newest is None:
            return None
        found = self._system.look(directory.file, newest[1])
        return None if found is None else _NewestFile(directory, newest[1], found.identity)

    def _release(self, folder: HiddenFolder[File], hold: _Hold[File]) -> None:
        """Remove a hidden link, or make it the spare if it is the last name of a file of ours."""
        try:
            spare = self._as_spare(folder, hold)
        except MediumError:
            spare = None
        with contextlib.suppress(MediumError):
            if spare is None:
                self._system.unlink(folder.make(), hold.name)
            self._system.unlink(folder.make(), path_name(hold.name))
        if spare is not None:
            self._spares.append(spare)
        while len(self._spares) > self._spares_max:
            smallest = min(self._spares, key=lambda each: each.status.size)
            self._spares.remove(smallest)
            self._drop_spare(smallest)

    # Spares.

    def _may_keep(self, removed: FileState) -> bool:
        """Return whether a removed file may become a spare: one of ours, if there is room, or a
        smaller one."""
        if not self._reuses or removed.identity not in self._written:
            return False
        has_room = len(self._spares) < self._spares_max
        return has_room or removed.size > min(each.status.size for each in self._spares)

    def _watch(self, draft: Publication[File], file: UnpublishedFile[File]) -> None:
        """Make a hidden link to a committed file, for as long as it has another one."""
        while len(self._watched) >= WATCHED_MAX:
            self._forget(self._watched[0])
        record = draft.folder.claim()
        self._system.write(record.file, b"/")  # it will make no file
        identity = self._system.status(file.file).identity
        # Later its link count shows that the visible name was removed, by any process.
        hold = _Hold(
            hidden_name(record.token, HOLD), _NewestFile(draft.directory, file.name, identity)
        )
        self._watched.append(_WatchedFile(draft.folder, record, hold))
        is_linked = False
        try:
            is_linked = self._link(draft.folder, hold)
        finally:
            if not is_linked:
                self._forget(self._watched[-1])

    def _look_for_removed(self) -> None:
        """Make a file that was removed elsewhere the spare. Syncs."""
        for watched in self._watched[:]:
            with contextlib.suppress(MediumError):
                status = self._system.look(watched.folder.make(), watched.hold.name)
                if status is None or status.links == 1:
                    self._forget(watched)

    def _forget(self, watched: _WatchedFile[File]) -> None:
        self._watched.remove(watched)
        self._release(watched.folder, watched.hold)
        self._drop(watched.folder, watched.record)

    def _as_spare(self, folder: HiddenFolder[File], hold: _Hold[File]) -> _Spare[File] | None:
        system, hidden = self._system, folder.make()
        if hold.of.identity not in self._written:
            return None
        file = system.open(hidden, hold.name, writable=True)
        if file is None:
            return None
        try:
            status = system.status(file)
            # With another name it may still be read; with another identity it is not ours.
            is_it = status.links == 1 and status.identity == hold.of.identity
            # Locked for as long as it is a spare, so that other processes' starts leave it alone.
            if is_it and self._may_keep(status) and system.lock(file):
                # Without these, a crash may show the removed path with the bytes to come.
                system.sync(file)
                system.sync(hold.of.directory.file)
                system.sync(hidden)
                return _Spare(folder, hold.name, _series(hold.of.name), file, status)
        except BaseException:
            system.close(file)
            raise
        system.close(file)
        return None

    def _open(self, draft: Publication[File], name: str) -> None:
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
                self._drop_spare(spare)
                raise
            opened = UnpublishedFile(name, hidden, spare.file, True)
            draft.files.append(opened)
            self._written.discard(spare.status.identity)
        else:
            if spare is not None:
                self._drop_spare(spare)
            opened = UnpublishedFile(name, hidden, system.create(folder.make(), hidden), False)
            draft.files.append(opened)
            system.lock(opened.file)
        # As after ``torch.save``: the mode of the replaced file, else that of the umask.
        if there is not None and there.is_regular:
            system.set_mode(opened.file, there.mode & 0o7777)
        elif opened.is_spare:  # it has the mode of the file that it was
            system.set_mode(opened.file, 0o666 & ~_umask())

    def _spare_for(self, series: str) -> _Spare[File] | None:
        """Take the spare of a series; or, if there is only one, that one."""
        found = [each for each in self._spares if each.series == series]
        if not found and self._spares_max == 1:
            found = self._spares[:]
        if not found:
            return None
        self._spares.remove(found[0])
        return found[0]

    def _is_free(self, spare: _Spare[File], folder: HiddenFolder[File]) -> bool:
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

    def _end(self, draft: Publication[File]) -> None:
        """Release the files of a draft. The record goes last: it names the owner of the others."""
        draft.is_over = True
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
            self._release(folder, hold)
        for file in draft.files:
            self._system.close(file.file)
        self._drop(folder, draft.record)
        self._close_unused()

    def _leave(self, draft: Publication[File]) -> None:
        """End a draft as a process that dies would: the next start continues it."""
        draft.is_over = True
        self._drafts.remove(draft)
        for file in draft.files:
            self._system.close(file.file)
        self._system.close(draft.record.file)
        self._newest.clear()
        self._close_unused()
        draft.folder.is_left = True

    def _drop(self, folder: HiddenFolder[File], record: LockedRecord[File]) -> None:
        with contextlib.suppress(MediumError):
            self._system.unlink(folder.make(), record.name)
        self._system.close(record.file)
        with contextlib.suppress(MediumError):
            folder.remove_if_empty()


@dataclass(frozen=True, slots=True)
class UnpublishedFile(Generic[File]):
    """A file in the making, under a hidden name, open for reading and writing. ``is_spare``: it has
    old bytes and blocks."""

    name: str
    hidden: str
    file: File
    is_spare: bool


@dataclass(slots=True, eq=False)
class Publication(Generic[File]):
    """Files in the making that become visible together. Its methods are those of ``Publisher``."""

    publisher: Publisher[File]
    folder: HiddenFolder[File]
    directory: OpenDirectory[File]
    record: LockedRecord[File]
    names: Sequence[str]
    series: str
    removed_elsewhere: bool
    files: list[UnpublishedFile[File]] = field(default_factory=list)
    """The files that are open by now, in the order of the names."""
    holds: list[_Hold[File]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of its holds, also of released ones."""
    is_published: bool = False
    is_over: bool = False

    @property
    def path(self) -> str:
        """The future path of the first file, for messages; the directory of several."""
        if len(self.names) == 1:
            return self.path_of(self.names[0])
        return printable(self.directory.describe())

    def path_of(self, name: str) -> str:
        """Return the future path of a file, for messages."""
        return printable(os.path.join(self.directory.describe(), name))

    def make_room(self, request: SaveRequest) -> bool:
        return self.publisher.make_room(request)

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
