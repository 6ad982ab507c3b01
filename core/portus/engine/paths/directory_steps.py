"""``DirectorySteps``: the checkpoints of a run in a directory of files."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from portus.engine.directory.system import medium_error
from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.extensions import COMPANIONS, extension
from portus.engine.files.pending import PENDING
from portus.engine.job.settings import Settings
from portus.engine.loading.checkpoint_file import load_file, note_loaded, read_note, restore_file
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_over import RestoreOptions, RestoreReport
from portus.engine.media import calls
from portus.engine.paths.checkpointer import StepRequest
from portus.engine.paths.process import Closable, join, recover_left
from portus.engine.paths.request import make_directory, refuse_hidden
from portus.engine.paths.saver import FileSaver
from portus.engine.pipeline.handle import SaveHandle
from portus.engine.pipeline.request import Companion
from portus.engine.settings.keep import Keep
from portus.engine.spec import VersionInfo, check_step
from portus.errors import (
    CorruptionError,
    MediumError,
    NoCheckpointError,
    StaleError,
    UsageError,
    printable,
)

_NAME: Final = re.compile(r"step-(\d{8,19})\.pt")


class _Note(msgspec.Struct, frozen=True):
    """The note of a save in its file."""

    time_ns: int
    metrics: Mapping[str, float]


class StepFiles:
    """The files of the steps in one directory, which may not exist yet: a real torch file for each,
    ``step-00000100.pt``. Threads may share it.

    Each has a note with the time of its save and its metrics. The time says which is the newest,
    also after a run went back to an earlier step, and in a copy of the directory, where files have
    other times. A file without a note, such as one by stock ``torch.save``, has the time of its
    file.
    """

    def __init__(self, directory: str) -> None:
        self.directory: Final = directory
        self._known: dict[tuple[int, ...], tuple[VersionInfo, bool]] = {}
        """The facts of whole files, by the mark of each."""

    def path_of(self, step: int) -> str:
        """Return the path of the file of a step. Raise ``UsageError`` if it is not a step."""
        number = check_step(step)
        return os.path.join(self.directory, f"step-{number:08d}.pt")

    def note(self, time_ns: int, metrics: Mapping[str, float]) -> bytes:
        """Return the note of a save for its file."""
        return msgspec.json.encode(_Note(time_ns, metrics))

    def describe(self, step: int, note: bytes, size: int = 0) -> VersionInfo:
        """Return the facts in the ``note`` of a step's file."""
        return self._info(step, msgspec.json.decode(note, type=_Note), size)

    def versions(self) -> list[VersionInfo]:
        """Return the checkpoints, oldest save first; files that are cut off too, by the times of
        the files. Raises ``MediumError``."""
        return [info for info, _ in self._list_files()]

    def surplus(self, keep: Keep, *coming: VersionInfo) -> list[str]:
        """Return the files that ``keep`` drops, oldest first, once ``coming`` is there too; never
        the newest file. Files that are cut off do not count, and stay. Raises ``MediumError``."""
        # A file that is cut off must not push a good one out, and it is evidence (decision 0206).
        sound = [info for info, is_sound in self._list_files() if is_sound]
        known = [info for info in sound if all(info.step != each.step for each in coming)]
        staying = {info.step for info in keep.staying([*known, *coming])}
        return [self.path_of(info.step) for info in sound[:-1] if info.step not in staying]

    def _list_files(self) -> list[tuple[VersionInfo, bool]]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise medium_error(error, self.directory) from error
        known: dict[tuple[int, ...], tuple[VersionInfo, bool]] = {}
        for name in names:
            match = _NAME.fullmatch(name)
            # With another number of zeros, one step could have two files.
            if match is None or name != os.path.basename(self.path_of(int(match[1]))):
                continue
            path = os.path.join(self.directory, name)
            try:
                step, status = int(match[1]), os.stat(path)
                # Another file has another mark.
                mark = step, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
                known[mark] = self._known.get(mark) or self._read(path, step, status)
            except FileNotFoundError:
                continue  # it was removed meanwhile
            except OSError as error:
                raise medium_error(error, path) from error
        # An error of the disk may pass: such a file is read again.
        self._known = {mark: each for mark, each in known.items() if each[1]}
        return sorted(known.values(), key=lambda each: (each[0].time_ns, each[0].step))

    def _read(self, path: str, step: int, status: os.stat_result) -> tuple[VersionInfo, bool]:
        # A file that is cut off is listed, so that a load reports it before it falls back.
        outside = self._info(step, _Note(status.st_mtime_ns, {}), status.st_size)
        try:
            note = read_note(path)
            found = outside if note is None else self.describe(step, note, status.st_size)
            return found, True
        except (CorruptionError, MediumError, PermissionError, msgspec.DecodeError):
            return outside, False

    def _info(self, step: int, note: _Note, size: int) -> VersionInfo:
        return VersionInfo(
            model=os.path.basename(self.directory),
            id=0,
            commit=0,
            step=step,
            token=b"",
            time_ns=note.time_ns,
            size=size,
            metrics=note.metrics,
        )


_log: Final = logging.getLogger("portus")


@dataclass(frozen=True, slots=True)
class FileStep:
    """The file of a step, as a ``StepSource``."""

    path: str
    info: VersionInfo

    def __str__(self) -> str:
        return printable(self.path)

    def load(self, names: Patterns, *, verify: bool, **settings: Any) -> Any:
        with self._reading():
            return load_file(self.path, names, verify=verify, **settings)

    def restore_into(self, state: object, options: RestoreOptions) -> RestoreReport:
        with self._reading():
            return RestoreReport(self.info, *restore_file(self.path, state, options))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with PENDING.exempt():
                yield
        except FileNotFoundError as error:
            # A training may remove it meanwhile; a load of the newest one then chooses again.
            raise StaleError(f"{self}: it was removed while it was loaded; load again") from error
        note_loaded(self.info)


class DirectorySteps:
    """The ``Steps`` of a directory of files. Several in one directory, in one process or more, do
    not disturb each other, but each removes the files that its own ``keep`` drops."""

    def __init__(
        self,
        directory: os.PathLike[str],
        model: str,
        keep: Keep | None,
        settings: Settings,
        owner: Closable,
    ) -> None:
        self.path: Final = os.fspath(directory)
        refuse_hidden(self.path)
        if model != "default":
            raise UsageError(
                f"model: {printable(self.path)} is a directory, which has the checkpoints of one "
                f"run; found {model!r:.200}. Name a directory for each run, without model="
            )
        self._keep: Final = keep
        self._files: Final = StepFiles(self.path)
        self.companions: Final[Sequence[Companion]] = extension(COMPANIONS)(self.path, settings)
        self._last_ns = 0
        recover_left(self.path)
        self.saver: Final = FileSaver(join(owner), settings)

    def open(self) -> None:
        for each in self.companions:
            each.fetch()

    def save(self, state: object, request: StepRequest) -> SaveHandle:
        path, is_new = self._files.path_of(request.step), make_directory(self.path)
        # Later than all others, whatever the clock says: it marks the newest save, also after a run
        # went back to an earlier step (decision 0206).
        self._last_ns = max(time.time_ns(), (self._last_ns or self._newest_ns()) + 1)
        request = replace(request, note=self._files.note(self._last_ns, request.metrics), path=path)
        try:
            return self.saver.save(state, path, request)
        except BaseException:
            if is_new:  # a failed save leaves no directory
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)
            raise

    def versions(self) -> list[VersionInfo]:
        with PENDING.exempt():
            return self._files.versions()

    def choose(self, step: int | None) -> list[FileStep]:
        if not calls.is_nested():  # there only committed saves count
            where = os.path.realpath(self.path)
            PENDING.wait_for(where)
            with PENDING.exempt():  # and those of other processes
                wait_for_drafts(where)
                recover_left(where)
        path = self.path if step is None else self._files.path_of(step)
        found = self.versions()
        chosen = [
            FileStep(self._files.path_of(info.step), info)
            for info in found
            if step in (None, info.step)
        ]
        if chosen:
            return chosen
        steps = [info.step for info in found]
        raise NoCheckpointError(
            f"{printable(path)}: there is no checkpoint; "
            + (f"there are steps {steps[-20:]}" if steps else "nothing was saved here")
        )

    def _newest_ns(self) -> int:
        with contextlib.suppress(MediumError):
            return max((info.time_ns for info in self.versions()), default=0)
        return 0

    def note_commit(self, request: StepRequest) -> None:
        self._remove_surplus()

    def make_room(self, request: StepRequest) -> bool:
        coming = self._files.describe(request.step, request.note)
        return self._remove_surplus(coming, most=1) or self.saver.await_space()

    def _remove_surplus(self, *coming: VersionInfo, most: int | None = None) -> bool:
        """Remove the oldest ``most`` of the files that ``keep`` drops. Return whether any was."""
        try:
            found = [] if self._keep is None else self._files.surplus(self._keep, *coming)
            for path in found[:most]:
                for each in self.companions:
                    each.removing(path)
                self.saver.remove(path)
            return bool(found)
        except MediumError as error:
            _log.warning(
                "portus: %s; more checkpoints than keep= says stay until the next commit", error
            )
            return False
