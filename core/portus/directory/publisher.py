"""``Publisher``: a file appears at its path in one step, and the one before it is never missing.

    claim a record -> hold the newest committed file -> write and sync the draft
      -> rename it to the path -> sync both directories = COMMIT -> release holds

At a path there is nothing, the previous file, or the new one, whatever the moment of a crash: a
draft is durable before it is renamed, and the rename is durable before the commit is reported.

A *hold* is a hidden hard link to the newest committed file of a series (files whose names differ in
their numbers), from the call of a save to its end. A program that removes that file too early and
is killed finds it again (``recovery``).

A *spare* is a removed file of this process whose blocks and pages are used again. Its rules: no
visible name leads to it, the removal is durable, and nobody has it open. All of that holds before
the first byte is written, or the old path could show new bytes after a crash, or a reader could.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Generic

from portus.directory.folder import (
    DRAFT,
    FOLDER,
    HOLD,
    HiddenFolder,
    LockedRecord,
    hidden_name,
    path_name,
)
from portus.directory.recovery import Verify, recover, restore
from portus.directory.system import File, FileState, System
from portus.errors import MediumError, printable

_log: Final = logging.getLogger("portus")

SERIES_MAX: Final = 16
"""Series whose newest file is remembered."""

_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
)
"""Why a file cannot be held: another file system, or one without links."""

_DIGITS: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class _Committed(Generic[File]):
    """The newest committed file of a series."""

    folder: HiddenFolder[File]
    name: str
    identity: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Hold(Generic[File]):
    """A hidden link to a committed file."""

    name: str
    of: _Committed[File]


@dataclass(frozen=True, slots=True)
class _Spare(Generic[File]):
    """A removed file under a hidden name, locked and ready to be written over."""

    folder: HiddenFolder[File]
    name: str
    file: File
    status: FileState


class Publisher(Generic[File]):
    """The files that this process publishes. Threads may share it.

    verify: whether a held file is a whole checkpoint, before it is put back.
    spares: whether removed files are used again. Not on file systems that are exported or shared
        with a host, whose readers the kernel does not know.
    """

    def __init__(self, system: System[File], verify: Verify[File], *, spares: bool = True) -> None:
        self._system: Final = system
        self._verify: Final = verify
        self._spares: Final = spares
        self._lock: Final = threading.RLock()
        self._folders: Final[list[HiddenFolder[File]]] = []
        """Those that are open: of drafts, of the spare, and of the newest files."""
        self._drafts: Final[list[UnpublishedFile[File]]] = []
        self._newest: Final[dict[str, _Committed[File]]] = {}
        self._written: Final[set[tuple[int, int]]] = set()
        """Identities of the files that this process committed and has not removed."""
        self._spare: _Spare[File] | None = None

    def begin(self, path: str) -> UnpublishedFile[File]:
        """Return a draft of the file that is to be at ``path``, absolute and without links.

        Holds the newest file of its series until the draft is published or abandoned. Puts back
        what an earlier process lost. Raises ``MediumError``.
        """
        where, name = os.path.split(path)
        with self._lock:
            folder = self._folder(where)
            draft = UnpublishedFile(self, folder, folder.claim(), name)
            self._drafts.append(draft)
            try:
                self._hold(draft)
                self._open(draft)
            except BaseException:
                self.abandon(draft)
                raise
            return draft

    def recover(self, directory: str) -> None:
        """Put back what a process that ended had removed too early in ``directory``, and remove
        what it left there. Raises ``MediumError``."""
        with self._lock:
            self._folder(directory)
            self._close_unused()

    def remove(self, path: str) -> bool:
        """Remove a file, durably; False if there is none. One that this process wrote becomes the
        spare. Raises ``MediumError``."""
        where, name = os.path.split(path)
        with self._lock:
            folder = self._folder(where)
            status = self._system.look(folder.directory, name)
            if status is None:
                self._close_unused()
                return False
            kept = self._spare is None and self._spares and status.identity in self._written
            record = None
            if kept:
                with contextlib.suppress(MediumError):  # a full disk: then it is no spare
                    record = folder.claim()
            hidden = None if record is None else hidden_name(record.token, HOLD)
            if record is not None and hidden is not None:
                try:
                    self._system.link((folder.directory, name), (folder.make(), hidden))
                except MediumError:
                    hidden = None
            self._system.unlink(folder.directory, name)
            if hidden is not None:
                committed = _Committed(folder, name, status.identity)
                self._release(folder, _Hold(hidden, committed))
            if record is not None:
                self._drop(folder, record)
            self._system.sync(folder.directory)
            if self._spare is None or self._spare.status.identity != status.identity:
                self._written.discard(status.identity)
            self._close_unused()
            return True

    def publish(
        self, draft: UnpublishedFile[File], turn: AbstractContextManager[None] | None = None
    ) -> None:
        """Make a draft, which is durable, the file at its path. Raises ``MediumError``; then
        nothing has changed, or the message says that it is uncertain. turn: held while the name
        changes; what it raises forbids that."""
        folder, system = draft.folder, self._system
        with self._lock:
            identity = system.status(draft.file).identity
            with turn or contextlib.nullcontext():
                system.rename((folder.make(), draft.hidden), (folder.directory, draft.name))
                draft.is_published = True
            try:
                system.sync(folder.directory)
                system.sync(folder.make())
                folder.sync_parent()
            except MediumError as error:
                path = draft.path
                self._end(draft)
                raise MediumError(
                    error.errno,
                    f"{path}: the file is there, and whether it survives a power cut is "
                    f"uncertain: its directory could not be synced ({error.strerror}). Check the "
                    "disk",
                ) from error
            series = _series(draft.name)
            committed = _Committed(folder, draft.name, identity)
            self._newest.pop(series, None)
            self._newest[series] = committed
            for other in self._drafts:
                if other is not draft and _series(other.name) == series:
                    with contextlib.suppress(MediumError):  # this file is committed all the same
                        self._hold_also(other, committed)
            while len(self._newest) > SERIES_MAX:
                del self._newest[next(iter(self._newest))]
            self._written.add(identity)
            self._end(draft)

    def abandon(self, draft: UnpublishedFile[File]) -> None:
        """End a draft that is not to be published. What it holds is put back if it was removed
        meanwhile. Raises nothing. A second call does nothing."""
        with self._lock:
            if draft.is_over:
                return
            for hold in draft.holds:
                with contextlib.suppress(MediumError):
                    self._put_back(draft.folder, hold)
            self._end(draft)

    def drop_spare(self) -> bool:
        """Remove the spare, whose space is needed, or which has no use any more; False if there is
        none."""
        with self._lock:
            spare, self._spare = self._spare, None
            if spare is None:
                return False
            with contextlib.suppress(MediumError):
                self._system.unlink(spare.folder.make(), spare.name)
            self._system.close(spare.file)
            return True

    def close(self) -> None:
        """Remove the spare and empty hidden folders, and close all directories."""
        with self._lock:
            self.drop_spare()
            self._newest.clear()
            self._close_unused()

    def _folder(self, where: str) -> HiddenFolder[File]:
        """Return the open folder of the directory at ``where``; at first, recover it."""
        for folder in self._folders:
            if self._system.path_of(folder.directory) == where:
                return folder
        folder = HiddenFolder(self._system, where)
        self._folders.append(folder)
        recover(folder, self._verify)
        return folder

    def _close_unused(self) -> None:
        used = [draft.folder for draft in self._drafts]
        used += [committed.folder for committed in self._newest.values()]
        used += [self._spare.folder] if self._spare is not None else []
        for folder in [each for each in self._folders if each not in used]:
            self._folders.remove(folder)
            with contextlib.suppress(MediumError):
                folder.close()

    # Holds.

    def _hold(self, draft: UnpublishedFile[File]) -> None:
        """Hold the newest file of each series that this process saves, and of the new file's."""
        folder, series = draft.folder, _series(draft.name)
        if series not in self._newest:
            found = self._newest_in(folder, draft.name)
            if found is not None:
                self._newest[series] = found
        self._system.write(draft.record.file, os.fsencode(draft.name))
        for committed in self._newest.values():
            self._hold_also(draft, committed)

    def _hold_also(self, draft: UnpublishedFile[File], committed: _Committed[File]) -> None:
        """Have a draft hold a file too. It may be committed after the draft was begun."""
        where = self._system.path_of(committed.folder.directory)
        here = self._system.path_of(draft.folder.directory)
        if where is None or here is None:
            return
        hidden = hidden_name(draft.record.token, HOLD, len(draft.holds))
        path = os.path.relpath(os.path.join(where, committed.name), os.path.join(here, FOLDER))
        hold = _Hold(hidden, committed)
        draft.holds.append(hold)
        try:
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
        """Make the hidden link of a hold; False if the file is not there any more, or cannot be
        held."""
        there = hold.of.folder.directory, hold.of.name
        status = self._system.look(*there)
        if status is None or status.identity != hold.of.identity:
            return False
        try:
            self._system.link(there, (folder.make(), hold.name))
        except MediumError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def _newest_in(self, folder: HiddenFolder[File], name: str) -> _Committed[File] | None:
        """Return the newest file beside ``name`` whose name differs in its numbers alone."""
        series, newest = _series(name), None
        for each in self._system.names(folder.directory):
            if _series(each) == series:
                status = self._system.look(folder.directory, each)
                if status is not None and status.is_regular:
                    newest = max(newest or (-1, ""), (status.changed_ns, each))
        if newest is None:
            return None
        found = self._system.look(folder.directory, newest[1])
        return None if found is None else _Committed(folder, newest[1], found.identity)

    def _put_back(self, folder: HiddenFolder[File], hold: _Hold[File]) -> None:
        where = self._system.path_of(hold.of.folder.directory)
        if where is not None:
            restore(folder, hold.name, os.path.join(where, hold.of.name), self._verify)

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
        self._spare = spare or self._spare

    # Spares.

    def _as_spare(self, folder: HiddenFolder[File], hold: _Hold[File]) -> _Spare[File] | None:
        system, hidden = self._system, folder.make()
        if not self._spares or self._spare is not None or hold.of.identity not in self._written:
            return None
        file = system.open(hidden, hold.name, writable=True)
        if file is None:
            return None
        try:
            status = system.status(file)
            if status.links == 1 and status.identity == hold.of.identity and system.lock(file):
                # Without these, a crash may show the removed path with the bytes to come.
                system.sync(file)
                system.sync(hold.of.folder.directory)
                system.sync(hidden)
                return _Spare(folder, hold.name, file, status)
        except BaseException:
            system.close(file)
            raise
        system.close(file)
        return None

    def _open(self, draft: UnpublishedFile[File]) -> None:
        """Open the file of a draft: the spare, if there is one that nobody reads, or a new one."""
        folder, system = draft.folder, self._system
        there = system.look(folder.directory, draft.name)
        spare = self._spare
        if spare is not None and self._is_free(spare, folder):
            # Its names are all hidden, so either of them may be there after a crash.
            try:
                system.rename((spare.folder.make(), spare.name), (folder.make(), draft.hidden))
            except MediumError:
                self.drop_spare()
                raise
            self._spare = None
            draft.opened(spare.file, is_spare=True)
            self._written.discard(spare.status.identity)
        else:
            self.drop_spare()
            draft.opened(system.create(folder.make(), draft.hidden), is_spare=False)
            system.lock(draft.file)
        if there is not None and there.is_regular:
            system.set_mode(draft.file, there.mode & 0o7777)
        elif draft.is_spare:
            system.set_mode(draft.file, 0o666 & ~_umask())

    def _is_free(self, spare: _Spare[File], folder: HiddenFolder[File]) -> bool:
        try:
            status = self._system.status(spare.file)
            here = self._system.status(folder.directory).identity[0]
            return (
                status.links == 1
                and status.identity[0] == here
                and self._system.is_unused(spare.file)
            )
        except MediumError:
            return False

    # The end of a draft.

    def _end(self, draft: UnpublishedFile[File]) -> None:
        """Release what a draft has. The record is the last to go: it says whose the others are."""
        draft.is_over = True
        self._drafts.remove(draft)
        folder = draft.folder
        if draft.has_file and not draft.is_published:
            with contextlib.suppress(MediumError):
                self._system.unlink(folder.make(), draft.hidden)
        for hold in draft.holds:
            self._release(folder, hold)
        if draft.has_file:
            self._system.close(draft.file)
        self._drop(folder, draft.record)
        self._close_unused()

    def _drop(self, folder: HiddenFolder[File], record: LockedRecord[File]) -> None:
        with contextlib.suppress(MediumError):
            self._system.unlink(folder.make(), record.name)
        self._system.close(record.file)
        with contextlib.suppress(MediumError):
            folder.remove_if_empty()


class UnpublishedFile(Generic[File]):
    """A file in the making, under a hidden name. ``is_spare``: it has old bytes and blocks."""

    def __init__(
        self,
        publisher: Publisher[File],
        folder: HiddenFolder[File],
        record: LockedRecord[File],
        name: str,
    ) -> None:
        self.folder: Final = folder
        self.record: Final = record
        self.name: Final = name
        self.hidden: Final = hidden_name(record.token, DRAFT)
        self.holds: list[_Hold[File]] = []
        self.is_spare = False
        self.is_published = False
        self.is_over = False
        self._publisher: Final = publisher
        self._file: File | None = None

    @property
    def file(self) -> File:
        """The open file, for reading and writing."""
        assert self._file is not None, "a draft without its file"
        return self._file

    @property
    def has_file(self) -> bool:
        """True once its file is open."""
        return self._file is not None

    @property
    def path(self) -> str:
        """Where the file is to be, for messages."""
        return printable(os.path.join(self.folder.describe(), self.name))

    def opened(self, file: File, *, is_spare: bool) -> None:
        """Note the file."""
        self._file, self.is_spare = file, is_spare

    def publish(self, turn: AbstractContextManager[None] | None = None) -> None:
        """See ``Publisher.publish``."""
        self._publisher.publish(self, turn)

    def abandon(self) -> None:
        """See ``Publisher.abandon``."""
        self._publisher.abandon(self)


def _series(name: str) -> str:
    return _DIGITS.sub("#", name)


def _umask() -> int:
    """Return the umask of this process, without setting it, which other threads would see."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
