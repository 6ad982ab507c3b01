"""``FileSaver``: saves to paths, one after another in the order of the calls.

All savers of a process share a ``SharedWriter``: one queue, one ring of buffers, one publisher.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import torch

from portus.engine.directory.publisher import Publication
from portus.engine.directory.system import medium_error
from portus.engine.directory.waiting import bases_of
from portus.engine.extensions import PLACING, extension
from portus.engine.fence.device import CopyChoice, WhereItFits, feeds_of
from portus.engine.fence.fence import Fence, steps_seen
from portus.engine.fence.snapshot import SnapshotMode, Suspects, copy_order
from portus.engine.fence.writers import pointer
from portus.engine.files import order
from portus.engine.files.pending import PENDING, Ticket
from portus.engine.image.image import Image
from portus.engine.job.reports import Reports
from portus.engine.job.settings import Settings
from portus.engine.media import calls
from portus.engine.media.file_calls import OUT_OF_SPACE
from portus.engine.media.process import Descriptor
from portus.engine.paths.at_once import WrittenFile
from portus.engine.paths.destination import Destination, Files
from portus.engine.paths.draft import FileDraft, new_publisher
from portus.engine.paths.new_file import JoinedStorages, NewFile
from portus.engine.pipeline import observers
from portus.engine.pipeline.audit import Auditor
from portus.engine.pipeline.draft import Draft
from portus.engine.pipeline.handle import RefusedSave, SaveHandle, SaveStats
from portus.engine.pipeline.plan import Flags, Snapshot
from portus.engine.pipeline.queue import Chore, Queue, Turn
from portus.engine.pipeline.run import Policy, Save
from portus.engine.state.contents import FileContents
from portus.engine.state.pickling import pickle_state
from portus.engine.writer.image_file import ImageFile
from portus.engine.writer.ring import StagingRing
from portus.engine.writer.ways import Ways
from portus.errors import (
    AbandonedError,
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
    printable,
)

_WRONG_PATH: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
        *(errno.ENAMETOOLONG, errno.ELOOP),
    }
)
"""What a call is told at once, since another path is what helps."""


_STEP: Final = 0
"""A file has a name, and no step."""

_NEWS_S: Final = 10.0

_log: Final = logging.getLogger("portus")


@dataclass(frozen=True, slots=True)
class Extra:
    """What belongs to one save besides its state.

    step: of training; None for a file that has a name alone. note: bytes for a record of the file.
    fenced: tensors that nobody writes before ``FileSaver.fence`` was called: they are copied late.
    begun: called in the call, once the save is sure to end. ready: called on the worker before the
    file becomes visible; raises ``PortusError`` to forbid that. committed: called on the worker
    once the file is there, before anybody is told. then: called there when the save is over.
    follows_links: False replaces a link that is at the path, and leaves alone where it leads. base:
    a directory whose hidden folder has the drafts, if it is above the files and on their file
    system; else their own directory has them. removed_elsewhere: see ``Publisher.begin``.
    metrics: of a version in a pool. retire: the versions there that go with the commit, by id.
    """

    step: int = _STEP
    note: bytes = b""
    fenced: Sequence[torch.Tensor] = ()
    begun: Callable[[Save], None] | None = None
    ready: Callable[[], None] | None = None
    committed: Callable[[], None] | None = None
    then: Callable[[Save], None] | None = None
    follows_links: bool = True
    base: str | None = None
    removed_elsewhere: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    retire: Callable[[], Collection[int]] = tuple


class ToSave(NamedTuple):
    """A file to save: its path, and what gives its contents at the call."""

    path: str | os.PathLike[str]
    contents: Callable[[], FileContents]


class OwnFormat(abc.ABC):
    """What is to be saved as a file in a format of its own."""

    @abc.abstractmethod
    def file_contents(self) -> FileContents:
        """Return the contents of the file. Raises ``UsageError``."""


@dataclass(frozen=True, slots=True)
class Laid(OwnFormat):
    """See ``OwnFormat``: its contents are there."""

    contents: FileContents

    def file_contents(self) -> FileContents:
        return self.contents


def contents_of(state: object) -> Callable[[], FileContents]:
    """Return what gives the contents of a file for ``state``, in the format that it is for."""
    if isinstance(state, OwnFormat):
        return state.file_contents
    return partial(pickle_state, state)


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A path as the caller said it, and where that leads."""

    said: str
    real: str

    @classmethod
    def of(cls, path: str | os.PathLike[str], *, follows_links: bool = True) -> FileTarget:
        """Links to directories are followed, and the last one if ``follows_links``. Raises
        ``UsageError`` for what no file can be put at, ``MediumError`` if that cannot be told."""
        said = os.fspath(path) if isinstance(path, str | os.PathLike) else None
        if not isinstance(said, str) or not said or "\0" in said:
            raise UsageError(
                f"path: expected the path of a file, as text, found {path!r:.200}. torch.save "
                "writes to file objects"
            )
        real = os.path.realpath(said)
        if not follows_links:
            where, name = os.path.split(said)
            real = os.path.join(os.path.realpath(where or "."), name)
        directory = os.path.dirname(real)
        if not _is_directory(directory, is_made=not follows_links):
            raise UsageError(
                f"{printable(said)}: there is no directory {printable(directory)}; create it first"
            )
        try:
            mode = os.stat(real, follow_symlinks=follows_links).st_mode
        except OSError:
            return cls(said, real)  # nothing is there; what else is wrong shows where it is opened
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise UsageError(
                f"{printable(said)}: expected the path of a file to write, found {kind}; name "
                "another path"
            )
        return cls(said, real)


def _is_directory(path: str, *, is_made: bool) -> bool:
    """is_made: by us, just now; so if it is not there, the file system is to blame."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not is_made:
            return False
        raise MediumError(error.errno, f"{printable(path)}: {error.strerror}") from error


class SharedWriter:
    """What the savers of one process share. Threads may share it; a forked child makes its own.

    staging: bytes of saves that may be unfinished before a call waits, and of the buffers that
        they share.
    """

    def __init__(self, staging: int) -> None:
        self.queue: Final = Queue("portus-files", staging)
        self.publisher: Final = new_publisher()
        self.ring: Final = StagingRing(staging)
        self.ways: Final = Ways()

    def close(self) -> None:
        """Finish what is in flight, and remove what is hidden."""
        self.queue.close()
        self.publisher.close()
        self.ring.close()


class FileSaver:
    """Saves to paths, with settings of their own. Threads may share it.

    destination: where the storages go; None: into the files at the paths.
    raises_wrong_path: whether a path that no file can be put at is always an error of the call.
        Otherwise it is told as a save that failed, once one was committed: a training does not end
        because its file system was mounted read-only.
    """

    def __init__(
        self,
        shared: SharedWriter,
        settings: Settings,
        *,
        destination: Destination | None = None,
        raises_wrong_path: bool = False,
    ) -> None:
        self._destination: Final = destination or Files()
        self._raises_wrong_path: Final = raises_wrong_path
        self._queue: Final = shared.queue
        self._publisher: Final = shared.publisher
        self._ring: Final = shared.ring
        self._ways: Final = shared.ways
        self._fence: Final = Fence(settings.fence_timeout)
        self._fence_timeout: Final = settings.fence_timeout
        self._suspects: Final = Suspects()
        self._auditor: Final = Auditor(settings.guard)
        self._reports: Final = Reports(settings.on_error)
        self._mode: Final = SnapshotMode(settings.snapshot)
        self._placing: CopyChoice | None = None
        self._steps_at_last = -1
        self._is_closed = False
        self.make_room: Callable[[], bool] = lambda: False
        """Asked where the disk is full: True if space was given back, by removals."""

    def save(
        self, state: object, path: str | os.PathLike[str], extra: Extra | None = None
    ) -> SaveHandle:
        """Begin to save ``state`` to ``path``. See ``portus.save``."""
        return self.save_files([ToSave(path, contents_of(state))], extra)

    def _save_nested(self, files: Sequence[ToSave], extra: Extra | None = None) -> SaveHandle:
        extra = extra or Extra()
        new = _new_files(files, _targets_of(files, extra), extra)
        written = WrittenFile(new, _name_of(new), extra.step, _base_of(new, extra))
        self._reports.committed()
        return SaveHandle(written)

    @calls.entry_or(_save_nested)
    def save_files(self, files: Sequence[ToSave], extra: Extra | None = None) -> SaveHandle:
        """Begin to save files of one directory, which become visible together. Raises as
        ``portus.save``, and ``UsageError`` for files of several directories."""
        start, extra = time.perf_counter(), extra or Extra()
        self._reports.tell(self._first_may_commit, is_save=True, is_heard_of=False)
        try:
            targets = _targets_of(files, extra)
        except MediumError as error:
            if not self.goes_on_after(error):
                raise
            return self.refuse(error, time.perf_counter() - start)
        return self._saved(_new_files(files, targets, extra), extra, start)

    def _refuse_nested(self, name: str, state: object, extra: Extra) -> SaveHandle:
        raise calls.refused(f"save of step {extra.step} to a pool")

    @calls.entry_or(_refuse_nested)
    def save_version(self, name: str, state: object, extra: Extra) -> SaveHandle:
        """Begin to save ``state`` as a version of the pool that is a file called ``name``, without
        a pointer. Raises as ``portus.save``."""
        start = time.perf_counter()
        self._reports.tell(self._first_may_commit, is_save=True, is_heard_of=False)
        new = NewFile(name, "", contents_of(state)(), extra.note)
        return self._saved([new], extra, start)

    def _saved(self, new: Sequence[NewFile], extra: Extra, start: float) -> SaveHandle:
        turn = Turn(sum(each.size for each in new), self, extra.step)
        if not self._queue.admit(turn, self._fence_timeout):
            waited_s = time.perf_counter() - start
            return self.refuse(_too_late(_name_of(new), waited_s), waited_s)
        job = None
        try:
            if self._is_closed:  # by another thread, meanwhile
                raise UsageError("this Checkpointer is closed")
            with PENDING.exempt():
                job = self._begin(new, extra)
                job.save.asked_at(start)
                if job.save.over:
                    self._queue.dismiss(turn)
                    job.end()
                else:
                    self._queue.put(job, turn)
        except BaseException as error:  # Ctrl-C too: what nobody runs, nobody may wait for
            if self._queue.dismiss(turn) and job is not None:
                job.fail(error)
            if isinstance(error, MediumError) and self.goes_on_after(error):
                return self.refuse(error, time.perf_counter() - start)
            raise
        job.save.stats.call_s = time.perf_counter() - start
        return SaveHandle(job.save)

    def open(self) -> None:
        """Open the destination. Raises ``PortusError``."""
        self._destination.open()

    def fence(self) -> None:
        """Block until no save in flight reads the caller's tensors."""
        self._fence.wait()

    @property
    def has_committed(self) -> bool:
        """True once a save was committed."""
        return self._reports.has_committed

    def wait(self, timeout: float | None = None) -> None:
        """Block until all saves so far are over. Raises ``TimeoutError``, and failures that nobody
        heard of, as ``on_error`` says."""
        if not self._queue.on_worker() and not self._queue.catch_up(timeout):
            raise TimeoutError(f"saves were not over after {timeout} s")
        self._tell()

    def catch_up(self) -> None:
        """Block until all saves so far are over. Raises nothing."""
        if not self._queue.on_worker():
            self._queue.catch_up()

    def _tell(self) -> None:
        """Report failures that nobody heard of."""
        self._reports.tell(self._first_may_commit, is_save=False, is_heard_of=False)

    def close(self) -> None:
        """Finish the saves in flight. Failures that nobody heard of are reported. Behind Ctrl-C it
        is still open."""
        self._is_closed = True
        try:
            if not self._queue.on_worker():
                self._finish()
        except BaseException:
            self._is_closed = False
            raise
        self._fence.close()
        self._destination.close()
        self._tell()

    def _finish(self) -> None:
        start = time.monotonic()
        while not (self._queue.put_all(self, _NEWS_S) and self._queue.catch_up(_NEWS_S)):
            _log.warning(
                "portus: still finishing saves after %.0f s. If this goes on, look at the disk "
                "that they go to",
                time.monotonic() - start,
            )

    def later(self, act: Callable[[], None]) -> None:
        """Call ``act`` on the worker, after the saves so far. It raises nothing."""
        self._queue.put(_Errand(act))

    def remove(self, path: str) -> None:
        """Remove a file, durably. On the worker. Raises ``MediumError``."""
        directory, name = os.path.split(path)
        with PENDING.exempt():
            self._removed(os.path.join(os.path.realpath(directory), name))

    def _removed(self, path: str) -> None:
        self._destination.remove(path, self._publisher.remove)

    def remove_directory(self, path: str, telling: re.Pattern[str]) -> None:
        """Remove a directory, durably: its files one by one, those first whose names are
        ``telling``, without which it is no checkpoint. On the worker. Raises ``MediumError``."""
        with PENDING.exempt():
            try:
                for file in files_below(os.path.realpath(path), telling):
                    self._removed(file)
                shutil.rmtree(path)
            except FileNotFoundError:
                return
            except OSError as error:
                raise medium_error(error, path) from error

    def goes_on_after(self, error: MediumError) -> bool:
        """True if a save that could not be begun is told as one that failed later is: a training
        that has saved before does not end because its disk failed once."""
        if self._raises_wrong_path and error.errno in _WRONG_PATH:
            return False
        if not self._reports.has_committed:
            self._first_may_commit()
        return self._reports.has_committed

    def refuse(self, error: PortusError, waited_s: float = 0.0) -> SaveHandle:
        """A save that could not be begun, told as one that failed later is."""
        refused = RefusedSave(error, SaveStats(call_s=waited_s, queue_s=waited_s))
        self._reports.failed(refused)
        return SaveHandle(refused)

    def _unpublished(self, files: Sequence[NewFile], extra: Extra) -> Publication[Descriptor]:
        while True:  # ends: there is nothing left to give back
            try:
                return self._publisher.begin(
                    *(each.real for each in files),
                    base=_base_of(files, extra),
                    removed_elsewhere=extra.removed_elsewhere,
                )
            except MediumError as error:
                if error.errno not in OUT_OF_SPACE or not self._has_made_room():
                    raise

    def _has_made_room(self) -> bool:
        if self._publisher.drop_spare():
            return True
        has_removed = self.make_room()
        self._publisher.drop_spare()  # what was removed is the spare now
        return has_removed

    def _first_may_commit(self) -> None:
        if not self._queue.on_worker():
            self._queue.catch_up(self._fence_timeout)

    def _begin(self, new: Sequence[NewFile], extra: Extra) -> FileJob:
        """Open the draft, and copy what may not wait. Raises what opening raises."""
        asked, images = order.asked(), [each.image() for each in new]
        joined = JoinedStorages(new)
        self._destination.open()
        snapshot = self._snapshot(_name_of(new), joined, extra)
        contents = self._destination.at_paths(new, images, snapshot)
        files = self._files_of(new, asked, extra, contents) if contents else None
        draft = self._destination.draft(new, images, snapshot, files, self.make_room)
        try:
            return self._begun(new, joined, snapshot, draft, extra)
        except BaseException:
            draft.release()
            raise

    def _files_of(
        self, new: Sequence[NewFile], asked: int, extra: Extra, images: Sequence[Image]
    ) -> FileDraft:
        """Begin the files at the paths."""
        unpublished = self._unpublished(new, extra)
        try:
            files = [
                ImageFile(
                    draft.file.number,
                    unpublished.path_of(draft),
                    image,
                    is_spare=draft.is_spare,
                    ring=self._ring,
                    ways=self._ways,
                    make_room=self._has_made_room,
                )
                for draft, image in zip(unpublished.files, images, strict=True)
            ]
            turn = partial(_unless_newer, new, asked)
            return FileDraft(unpublished, files, turn, extra.ready, extra.committed)
        except BaseException:
            self._publisher.abandon(unpublished)
            raise

    def _begun(
        self,
        new: Sequence[NewFile],
        joined: JoinedStorages,
        snapshot: Snapshot,
        draft: Draft,
        extra: Extra,
    ) -> FileJob:
        """The save into ``draft``; what may not wait is copied."""
        name = joined.describer()
        policy = Policy(
            retire=extra.retire,
            describe=name,
            audit=self._auditor.begin,
            guilty=self._suspects.accuse,
            changed=lambda indices: self._reports.inexact(
                extra.step, name(indices[0]), len(indices)
            ),
            committed=partial(self._destination.committed, draft),
        )
        save = Save(snapshot, draft, partial(self._destination.before, len(new)), policy)
        observers.began(save, self._destination.kind)
        if self._placing is not None:
            self._placing.begins(save)
        tickets = [PENDING.add(each.real, save.join) for each in new if each.real]
        job = FileJob(save, tickets, partial(self._after, then=extra.then))
        if extra.begun is not None:
            extra.begun(save)
        try:
            save.copy_now()
            self._fence.guard(save)
        except (MediumError, TransportError, StaleError, CorruptionError) as error:
            save.fail(error)  # it is on the handle
        except BaseException as error:
            job.fail(error)
            raise
        return job

    def _snapshot(self, name: str, joined: JoinedStorages, extra: Extra) -> Snapshot:
        storages = joined.storages
        feeds, copies = feeds_of(storages, self._choice()) if joined.has_devices else ({}, set())
        is_synchronous = self._mode is SnapshotMode.SYNC
        suspects = None if is_synchronous else self._suspects.turn()
        fenced = frozenset(map(pointer, extra.fenced)) - {0}
        planned = copy_order(storages, copies | joined.owned, feeds, suspects, fenced)
        return Snapshot(
            model=name,
            step=extra.step,
            token=os.urandom(16),
            tree=b"",
            layout=b"",
            address=planned.address,
            length=planned.length,
            late=planned.late,
            steady=self._steady(planned.late),
            guarded=planned.guarded,
            feeds=feeds,
            changes=joined.changes,
            alive=(storages, feeds),
            owners=storages,
            exposed=planned.exposed,
            metrics=extra.metrics,
        )

    def _steady(self, late: Flags) -> Flags:
        """Return which storages probably have not changed."""
        before, self._steps_at_last = self._steps_at_last, steps_seen()
        return self._destination.steady(late, unchanged=before == self._steps_at_last)

    def _choice(self) -> CopyChoice | None:
        """Where memory of devices is copied first; None: nowhere."""
        if self._mode is SnapshotMode.SYNC:
            return None
        if self._placing is None:
            is_forced = self._mode is SnapshotMode.DEVICE
            self._placing = WhereItFits() if is_forced else extension(PLACING)()
        return self._placing

    # On the worker.

    def _after(self, save: Save, then: Callable[[Save], None] | None) -> None:
        if save.error is None:
            self._reports.committed()
            observers.committed(save.result(0))
            self._auditor.use_huge_pages(lambda: not self._queue.has_more())
        else:
            self._reports.failed(save)
            self._destination.failed(save)
            if isinstance(save.error, MediumError) and save.error.errno in OUT_OF_SPACE:
                self._publisher.drop_spare()
        if then is not None:
            then(save)


def recover(directory: str) -> None:
    """Put back what a process that was killed had removed from ``directory`` before the file that
    was to replace it was there. Raises ``MediumError``."""
    files = new_publisher()
    try:
        for base in bases_of(directory):
            files.recover(base)
    finally:
        files.close()


class _Errand(Chore):
    """Something to do between two saves."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Final = act

    def run(self) -> None:
        with PENDING.exempt():
            self._act()


class FileJob:
    """One save in the queue of its ``FileSaver``. ``tickets``: of its paths among the pending ones.

    after: called on the worker, after the save is over.
    """

    def __init__(
        self, save: Save, tickets: Sequence[Ticket], after: Callable[[Save], None]
    ) -> None:
        self.save: Final = save
        self._tickets: Final = tickets
        self._after: Final = after

    def run(self) -> None:
        with PENDING.exempt():
            self.save.run()
            time.sleep(0)  # whoever waited for it goes on first
            self.end()

    def end(self) -> None:
        """The save is over."""
        for ticket in self._tickets:
            PENDING.remove(ticket)
        self._after(self.save)

    def fail(self, error: BaseException) -> None:
        if not self.save.over:
            self.save.fail(error)
            self.end()

    def hurry(self) -> None:
        self.save.hurry()


def _targets_of(files: Sequence[ToSave], extra: Extra) -> list[FileTarget]:
    """Raises as ``FileTarget.of``, and ``UsageError``."""
    found = [FileTarget.of(each.path, follows_links=extra.follows_links) for each in files]
    directories = {os.path.dirname(each.real) for each in found}
    names = {each.real for each in found}
    if len(directories) > 1 or len(names) < len(found):
        raise UsageError(
            "files that are saved together: expected different files of one directory, found "
            + ", ".join(printable(each.said) for each in found)
        )
    return found


def _new_files(
    files: Sequence[ToSave], targets: Sequence[FileTarget], extra: Extra
) -> list[NewFile]:
    return [
        NewFile(target.said, target.real, file.contents(), extra.note)
        for file, target in zip(files, targets, strict=True)
    ]


def _base_of(files: Sequence[NewFile], extra: Extra) -> str | None:
    """Return the base of ``extra`` if it is above the files, on their file system; else None."""
    if extra.base is None:
        return None
    base, where = os.path.realpath(extra.base), os.path.dirname(files[0].real)
    try:
        is_same = os.stat(base).st_dev == os.stat(where).st_dev
        return base if is_same and os.path.commonpath([base, where]) == base else None
    except (OSError, ValueError):
        return None


def _name_of(files: Sequence[NewFile]) -> str:
    """Return the name of all the files together, for messages."""
    return files[0].said if len(files) == 1 else os.path.dirname(files[0].said)


def files_below(directory: str, telling: re.Pattern[str]) -> list[str]:
    """Return the regular files in and below a directory, in the order in which they are removed:
    those whose names are ``telling``, and then by size."""
    places = {}
    for where, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(path := os.path.join(where, name))
            if stat.S_ISREG(status.st_mode):
                places[path] = (not telling.fullmatch(name), status.st_size)
    return sorted(places, key=places.__getitem__)


@contextlib.contextmanager
def _unless_newer(files: Sequence[NewFile], asked: int) -> Iterator[None]:
    """Held while files get their names. Raises ``AbandonedError`` if a signal handler wrote a newer
    one there."""
    with order.turn:
        for each in files:
            if order.is_newer(each.real, asked):
                raise AbandonedError(
                    f"{printable(each.said)}: save given up: a signal handler wrote this file "
                    "after the save was called, so what is there is newer"
                )
        yield


def _too_late(name: str, waited_s: float) -> AbandonedError:
    return AbandonedError(
        f"{printable(name)}: save given up: earlier saves were not finished after "
        f"{waited_s:.1f} s. Save less often, or check the disk"
    )
