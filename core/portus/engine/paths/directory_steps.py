"""``DirectorySteps``: the checkpoints of a run in a directory of files."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.extensions import COMPANIONS, extension
from portus.engine.files.pending import PENDING
from portus.engine.job.settings import Settings
from portus.engine.loading.checkpoint_file import load_file, restore_file
from portus.engine.loading.newest import note_loaded
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_over import RestoreOptions, RestoreReport
from portus.engine.media import calls
from portus.engine.paths.checkpointer import StepRequest
from portus.engine.paths.process import Closable, join, recover_left
from portus.engine.paths.request import make_directory, refuse_hidden
from portus.engine.paths.saver import FileSaver
from portus.engine.paths.step_files import StepFiles
from portus.engine.pipeline.companions import Companion
from portus.engine.pipeline.handle import SaveHandle
from portus.engine.settings.keep import Keep
from portus.engine.spec import VersionInfo
from portus.errors import MediumError, NoCheckpointError, StaleError, UsageError, printable

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
        self._files.note_commit(request.step, request.note)
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
