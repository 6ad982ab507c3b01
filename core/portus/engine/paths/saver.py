"""``FileSaver``: saves to paths, one after another in the order of the calls.

All savers of a process share a ``SharedWriter``: one queue, one ring of buffers, one publisher.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from portus.engine.copying.segments import Stop
from portus.engine.directory.system import medium_error
from portus.engine.fence import fence
from portus.engine.fence.fence import Fence
from portus.engine.fence.snapshot import CopyPlanner, SnapshotMode
from portus.engine.files import order
from portus.engine.files.pending import PENDING
from portus.engine.files.queue import Queue, Turn
from portus.engine.job.reports import Reports
from portus.engine.job.settings import Settings
from portus.engine.media import calls
from portus.engine.media.file_calls import OUT_OF_SPACE
from portus.engine.paths.request import (
    Destination,
    FileToSave,
    NewFile,
    OwnFormat,
    name_of,
    targets_of,
)
from portus.engine.paths.written_file import write_now
from portus.engine.pipeline.audit import Audit, Auditor, LateStorages
from portus.engine.pipeline.draft import CommittedVersion, Draft
from portus.engine.pipeline.handle import EndedSave, SaveHandle, SaveStats, note_newest
from portus.engine.pipeline.plan import Flags, Previous
from portus.engine.pipeline.request import SaveRequest
from portus.engine.pipeline.run import Save, SaveOwner
from portus.engine.state.contents import FileContents, JoinedStorages
from portus.engine.state.pickling import pickle_state
from portus.engine.writer.image_file import FileDraft, FileWriter
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


class SharedWriter(FileWriter):
    """The objects that the savers of a process share. Threads share it; a forked child makes its
    own.

    staging: bytes of saves that may be unfinished before a call waits, and of the buffers that
        they share.
    """

    def __init__(self, staging: int) -> None:
        super().__init__(staging)
        self.queue: Final = Queue("portus-files", staging)

    def close(self) -> None:
        """Finish the saves in flight, and remove hidden files."""
        self.queue.close()  # first: its work uses the others
        super().close()


_WRONG_PATH: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
        *(errno.ENAMETOOLONG, errno.ELOOP),
    }
)
"""Errors that the call raises at once, since only another path helps."""

_PLAIN: Final = SaveRequest()
"""The request of a file that only has a name, without reports."""


class FileSaver:
    """Saves to paths, with settings of their own. Threads may share it.

    destination: the place of the storages; None: the files at the paths.
    raises_wrong_path: whether a path where no file can be is always an error of the call.
        Otherwise it is reported as a failed save, once one was committed: a training does not
        end because its file system was mounted read-only.
    """

    def __init__(
        self,
        shared: SharedWriter,
        settings: Settings,
        *,
        destination: Destination | None = None,
        raises_wrong_path: bool = False,
    ) -> None:
        self.destination: Final = destination or Destination()
        self.planner: Final = CopyPlanner(SnapshotMode(settings.snapshot))
        self.auditor: Final = Auditor(settings.guard)
        self.reports: Final = Reports(settings.on_error, shared.queue, settings.fence_timeout)
        self.shared: Final = shared
        self._raises_wrong_path: Final = raises_wrong_path
        self._fence: Final = Fence(settings.fence_timeout)
        self._fence_timeout: Final = settings.fence_timeout
        self._is_closed = False

    def save(
        self, state: object, path: str | os.PathLike[str], request: SaveRequest = _PLAIN
    ) -> SaveHandle:
        """Begin to save ``state`` to ``path``. See ``portus.save``."""
        return self.save_files([FileToSave(path, state)], request)

    def _save_nested(
        self,
        files: Sequence[FileToSave],
        request: SaveRequest = _PLAIN,
        fenced: Sequence[torch.Tensor] = (),
    ) -> SaveHandle:
        written = write_now(_new_files(files, request), request)
        self.reports.note_commit()
        return SaveHandle(written)

    @calls.entry_or(_save_nested)
    def save_files(
        self,
        files: Sequence[FileToSave],
        request: SaveRequest = _PLAIN,
        fenced: Sequence[torch.Tensor] = (),
    ) -> SaveHandle:
        """Begin to save files of one directory, which become visible together. fenced: tensors that
        are not written before a call of ``fence``: they are copied late. Raises as ``portus.save``,
        and ``UsageError`` for files of several directories."""
        start = time.perf_counter()
        self.reports.tell(is_save=True)
        try:
            new = _new_files(files, request)
        except MediumError as error:
            return self.refuse(error, time.perf_counter() - start)
        return self._save(new, request, fenced, start)

    def _refuse_nested(self, name: str, state: object, request: SaveRequest) -> SaveHandle:
        raise calls.refusal(f"save of step {request.step} to a pool")

    @calls.entry_or(_refuse_nested)
    def save_version(self, name: str, state: object, request: SaveRequest) -> SaveHandle:
        """Begin to save ``state`` as a version of the pool, with a file called ``name``, without a
        pointer. Raises as ``portus.save``."""
        start = time.perf_counter()
        self.reports.tell(is_save=True)
        return self._save([NewFile(name, "", _contents_of(state))], request, (), start)

    def _save(
        self,
        new: Sequence[NewFile],
        request: SaveRequest,
        fenced: Sequence[torch.Tensor],
        start: float,
    ) -> SaveHandle:
        queue = self.shared.queue
        # A place first: a call that gets none has opened nothing.
        turn = Turn(sum(int(each.contents.lengths.sum()) for each in new), self, request.step)
        if not queue.admit(turn, self._fence_timeout):
            waited_s = time.perf_counter() - start
            late = AbandonedError(
                f"{printable(name_of(new))}: save given up: earlier saves were not finished after "
                f"{waited_s:.1f} s. Save less often, or check the disk"
            )
            return self.refuse(late, waited_s)
        save = None
        try:
            if self._is_closed:  # another thread closed it meanwhile
                raise UsageError("this Checkpointer is closed")
            with PENDING.exempt():
                save = self._begin_save(new, request, fenced, start)
                if not save.over:
                    queue.put(save, turn)
        except BaseException as error:  # Ctrl-C too: a save that will not run must end
            if queue.dismiss(turn) and save is not None:
                save.fail(error)
            if isinstance(error, MediumError):
                return self.refuse(error, time.perf_counter() - start)
            raise
        if save.over and queue.dismiss(turn):
            save.fail(AbandonedError("save given up"))  # an earlier error is kept
        save.stats.call_s = time.perf_counter() - start
        return SaveHandle(save)

    def fence(self) -> None:
        """Block until no save in flight reads the caller's tensors."""
        self._fence.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Block until all saves so far have ended. Raises ``TimeoutError``, and failures not
        reported yet, as ``on_error`` says."""
        if not self.catch_up(timeout):
            raise TimeoutError(f"saves had not ended after {timeout} s")
        self.reports.tell()

    def catch_up(self, timeout: float | None = None) -> bool:
        """Block until all saves so far have ended. Return False after ``timeout`` seconds."""
        queue = self.shared.queue
        return queue.on_worker() or queue.catch_up(timeout)

    def await_space(self) -> bool:
        """Block until the saves in flight have ended, which may free space. Return False if there
        are none, or only that of the worker itself."""
        queue = self.shared.queue
        return not (queue.on_worker() or queue.idle()) and queue.catch_up(self._fence_timeout)

    def close(self) -> None:
        """Finish the saves in flight, and report their failures. After Ctrl-C it is still open."""
        self._is_closed = True
        try:
            if not self.shared.queue.on_worker():  # it cannot wait for its own work to end
                self.shared.queue.finish(self)
        except BaseException:
            self._is_closed = False
            raise
        self._fence.close()
        self.destination.close()
        self.reports.tell()

    def remove(self, path: str) -> None:
        """Remove a file, durably. On the worker. Raises ``MediumError``."""
        directory, name = os.path.split(path)
        with PENDING.exempt():
            # The last link is not followed: it is removed itself.
            real = os.path.join(os.path.realpath(directory), name)
            self.destination.remove(real, self.shared.publisher)

    def remove_directory(self, path: str, telling: re.Pattern[str]) -> None:
        """Remove a directory, durably: its files one by one, those first whose names match
        ``telling``, without which it is no checkpoint. On the worker. Raises ``MediumError``."""
        with PENDING.exempt():
            try:
                for file in _files_below(os.path.realpath(path), telling):
                    self.destination.remove(file, self.shared.publisher)
                shutil.rmtree(path)
            except FileNotFoundError:
                return
            except OSError as error:
                raise medium_error(error, path) from error

    def refuse(self, error: PortusError, waited_s: float = 0.0) -> SaveHandle:
        """Return the handle of a save that could not begin, to be reported as one that failed
        later: a training that has saved before does not end because its disk failed once. Before
        the first commit, raise a ``MediumError``."""
        if isinstance(error, MediumError):
            is_final = self._raises_wrong_path and error.errno in _WRONG_PATH
            if is_final or not self.reports.await_commit():
                raise error
        refused = EndedSave(error, SaveStats(call_s=waited_s, queue_s=waited_s))
        self.reports.note_failure(refused)
        return SaveHandle(refused)

    def _begin_save(
        self,
        new: Sequence[NewFile],
        request: SaveRequest,
        fenced: Sequence[torch.Tensor],
        start: float,
    ) -> Save:
        """Open the draft, and copy storages that may not wait. Raises as opening does."""
        # Its place is that of the call: files that a handler writes from now on are newer.
        asked = order.next_place()
        images = [each.contents.image(each.said, request.note) for each in new]
        joined = JoinedStorages([each.contents for each in new])
        self.destination.open()
        planned = self.planner.plan(joined, fenced)
        has_stepped = self.planner.has_stepped()
        snapshot = replace(
            planned,
            model=name_of(new),
            step=request.step,
            token=os.urandom(16),
            steady=self.destination.steady(planned.late, unchanged=not has_stepped),
            changes=joined.changes,
            metrics=request.metrics,
            keep=request.keep,
        )
        paths = {each.real: each.said for each in new if each.real}
        owner = _Owner(self, request, len(new), joined.describer())
        contents = self.destination.at_paths(new, images, snapshot)
        files = None
        if contents:
            turn = _unless_newer(paths, asked)
            files = FileDraft(self.shared, list(paths), contents, turn, request)
        draft: Draft | None = files
        try:
            draft = self.destination.draft(new, images, snapshot, files, request)
            save = Save(snapshot, draft, owner, start)
        except BaseException:  # Ctrl-C too
            if draft is not None:
                draft.release()
            raise
        try:
            fence.began(save, self.destination.kind)
            self.planner.begins(save)
            for path in paths:
                # From here on the save is sure to end, so others may wait for it.
                PENDING.add(path, save)
            request.note_start(save)
            save.copy_now()
            self._fence.guard(save)
        except (MediumError, TransportError, StaleError, CorruptionError) as error:
            save.fail(error)  # it is on the handle
        except BaseException as error:
            save.reported = True
            save.fail(error)
            raise
        return save


@dataclass(frozen=True, slots=True)
class _Owner(SaveOwner):
    """A ``FileSaver``, as the owner of one save. name: returns the name of a storage."""

    saver: FileSaver
    request: SaveRequest
    files: int
    name: Callable[[int], str]

    def before(self) -> Previous | None:
        return self.saver.destination.before(self.files)

    def describe(self, index: int) -> str:
        return self.name(index)

    def audit(self, late: LateStorages, stop: Stop) -> Audit:
        return self.saver.auditor.begin(late, stop)

    def torn(self, addresses: Sequence[int]) -> None:
        self.saver.planner.accuse(addresses)

    def note_commit(self, save: Save, version: CommittedVersion, steady: Flags) -> None:
        if save.inexact:
            self.saver.reports.inexact(save.step, self.name(save.inexact[0]), len(save.inexact))
        self.saver.destination.note_commit(save.draft, version, steady)
        self.request.note_commit(save)

    def note_end(self, save: Save) -> None:
        PENDING.remove(save)
        saver, shared = self.saver, self.saver.shared
        if save.error is None:
            saver.reports.note_commit()
            note_newest(save.result(0))
            # Between two saves, not in one: with huge pages the next audit is nearly free
            # (decision 0051).
            for _ in saver.auditor.use_huge_pages():
                if shared.queue.has_more():
                    break
        else:
            saver.reports.note_failure(save)
            saver.destination.note_failure(save)
            # The disk is full, and a spare is as large as a checkpoint.
            if isinstance(save.error, MediumError) and save.error.errno in OUT_OF_SPACE:
                shared.publisher.drop_spare()
        self.request.over(save)


def _contents_of(state: object) -> FileContents:
    """Return the contents of a file for ``state``, in its format, as ``state`` is now. Raises
    ``UsageError``."""
    if isinstance(state, FileContents):
        return state
    return state.file_contents() if isinstance(state, OwnFormat) else pickle_state(state)


def _new_files(files: Sequence[FileToSave], request: SaveRequest) -> list[NewFile]:
    targets = targets_of(files, follows_links=request.follows_links)
    return [
        NewFile(said, real, _contents_of(file.state))
        for file, (said, real) in zip(files, targets, strict=True)
    ]


def _files_below(directory: str, telling: re.Pattern[str]) -> list[str]:
    """Return the regular files in and below a directory, in the order in which they are removed:
    first those whose names match ``telling``, then by size."""
    places = {}
    for where, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(path := os.path.join(where, name))
            if stat.S_ISREG(status.st_mode):
                places[path] = (not telling.fullmatch(name), status.st_size)
    return sorted(places, key=places.__getitem__)


@contextlib.contextmanager
def _unless_newer(paths: Mapping[str, str], asked: int) -> Iterator[None]:
    """Hold the turn while files get their names. paths: those, and the caller's names for them.
    Raise ``AbandonedError`` if a signal handler wrote a newer one there."""
    with order.turn:
        for real, said in paths.items():
            if order.is_newer(real, asked):
                raise AbandonedError(
                    f"{printable(said)}: save given up: a signal handler wrote this file "
                    "after the save was called, so what is there is newer"
                )
        yield
