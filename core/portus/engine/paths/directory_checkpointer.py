"""``DirectoryCheckpointer``: the ``Checkpointer`` of a directory of files."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.extensions import COMPANIONS, PATH_OF, extension
from portus.engine.fence.fence import before_write
from portus.engine.files.pending import PENDING
from portus.engine.job.settings import Settings, SettingsDict
from portus.engine.loading.checkpoint_file import load_file, restore_file
from portus.engine.loading.origin import note_loaded
from portus.engine.loading.over import Rename
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_report import RestoreReport
from portus.engine.media import calls
from portus.engine.paths.checkpointer import Checkpointer
from portus.engine.paths.process import is_blocking, join, recover_left
from portus.engine.paths.request import make_directory
from portus.engine.paths.saver import FileSaver
from portus.engine.paths.step_files import StepFiles
from portus.engine.pipeline.companions import Companion
from portus.engine.pipeline.handle import SaveHandle
from portus.engine.pipeline.request import AccompaniedRequest
from portus.engine.pipeline.run import Save
from portus.engine.settings.keep import Keep, check_metrics
from portus.engine.spec import VersionInfo
from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    UsageError,
    printable,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Result = TypeVar("Result")

_log: Final = logging.getLogger("portus")

_TRIES: Final = 5
"""A load starts again when what it found was removed under it, this often."""


class DirectoryCheckpointer(Checkpointer):
    """A ``Checkpointer`` that saves files. Several in one directory, in one process or more, do not
    disturb each other, but each removes what its own ``keep`` lets go of."""

    @calls.mark
    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        model: str = "default",
        *,
        keep: int | Keep | None = 2,
        **settings: Unpack[SettingsDict],
    ) -> None:
        self._is_closed = True  # until it is made
        path: str = extension(PATH_OF)(directory)
        _refuse_names(path, model)
        self._keep: Final = Keep.of(keep)
        self.settings: Final = Settings(**settings)
        """How it saves and loads."""
        self._files: Final = StepFiles(path)
        made: Sequence[Companion] = extension(COMPANIONS)(path, self.settings)
        self._companions = made
        self._last: SaveHandle | None = None
        self._last_ns = 0
        self._process = os.getpid()
        recover_left(path)
        self._saver = FileSaver(join(self), self.settings)
        self._is_closed = False
        try:
            for each in self._companions:
                each.fetch()
        except BaseException:
            self.close()
            raise

    def save(
        self,
        state: object,
        step: int,
        *,
        synchronous: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        self._check_usable()
        path, scored, number = self._files.path_of(step), check_metrics(metrics), int(step)
        for each in self._companions:
            each.begin()
        is_new = make_directory(self.path)
        # Later than all that is there, whatever the clock says: by this the newest save is found,
        # also after a run went back to an earlier step (decision 0206).
        self._last_ns = max(time.time_ns(), (self._last_ns or self._newest_ns()) + 1)
        note = self._files.note(self._last_ns, scored)
        request = _StepRequest(
            step=number, note=note, path=path, companions=self._companions, checkpointer=self
        )
        try:
            self._last = handle = self._saver.save(state, path, request)
        except BaseException:
            if is_new:  # nothing is left behind
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)
            raise
        if synchronous or is_blocking():
            handle.join()
        return handle

    def load(self, step: int | None = None, names: Patterns = None, **settings: Any) -> Any:
        verify = self.settings.verify
        return self._use(step, lambda path: load_file(path, names, verify=verify, **settings))[1]

    @calls.entry
    def restore_into(
        self,
        state: object,
        step: int | None = None,
        *,
        strict: bool = True,
        names: Patterns = None,
        rename: Rename = None,
        weights_only: bool | None = None,
    ) -> RestoreReport:
        before_write()  # a save of this process may be reading these tensors
        info, (missing, unexpected) = self._use(
            step,
            lambda path: restore_file(
                path,
                state,
                strict=strict,
                names=names,
                rename=rename,
                weights_only=weights_only,
                verify=self.settings.verify,
            ),
        )
        return RestoreReport(info, missing, unexpected)

    def versions(self) -> list[VersionInfo]:
        self._check_usable()
        with PENDING.exempt():
            return self._files.versions()

    @property
    def path(self) -> str:
        return self._files.directory

    def _newest_ns(self) -> int:
        with contextlib.suppress(MediumError), PENDING.exempt():
            return self._files.newest_ns()
        return 0

    def _use(self, step: int | None, use: Callable[[str], Result]) -> tuple[VersionInfo, Result]:
        """What ``use`` gives for the file of a step, or for the newest that verifies."""
        self._check_usable()
        self._await_saves()
        for _ in range(_TRIES):
            # Listed anew each time: what was found may be removed before it is opened.
            with PENDING.exempt(), contextlib.suppress(FileNotFoundError):
                found = self._choose(step)
                return self._newest_of(found, use)
        raise StaleError(f"{printable(self.path)}: checkpoints are removed faster than they load")

    def _newest_of(
        self, found: list[VersionInfo], use: Callable[[str], Result]
    ) -> tuple[VersionInfo, Result]:
        failure: PortusError | None = None
        for info in reversed(found):
            path = self._files.path_of(info.step)
            if failure is not None:
                _log.error("%s; FALLING BACK to %s", failure, printable(path))
            try:
                result = use(path)
            except (CorruptionError, MediumError) as error:
                # Damage is reported rather than an error of the disk, which may pass.
                failure = failure if isinstance(failure, CorruptionError) else error
                continue
            note_loaded(info)
            return info, result
        assert failure is not None, "there was no checkpoint to load"
        raise failure

    def _choose(self, step: int | None) -> list[VersionInfo]:
        found = self._files.versions()
        path = None if step is None else self._files.path_of(step)
        chosen = [info for info in found if step in (None, info.step)]
        if chosen:
            return chosen
        steps = [info.step for info in found]
        raise UsageError(
            f"{printable(path or self.path)}: there is no checkpoint; "
            + (f"there are steps {steps[-20:]}" if steps else "nothing was saved here")
        )

    def _await_saves(self) -> None:
        """Wait for what is in flight, here and in other processes."""
        if calls.is_nested():
            return  # what is committed by now counts
        where = os.path.realpath(self.path)
        PENDING.wait_for(where)
        with PENDING.exempt():
            wait_for_drafts(where)
            recover_left(where)

    # On the worker.

    def _note_commit(self, step: int, note: bytes) -> None:
        self._files.note_commit(step, note)
        if self._keep is None:
            return
        try:
            for path in self._files.surplus(self._keep):
                for each in self._companions:
                    each.removing(path)
                self._saver.remove(path)
        except MediumError as error:
            _log.warning(
                "portus: %s; more checkpoints than keep= says stay until the next commit", error
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepRequest(AccompaniedRequest):
    """The request of one step, to be saved to a directory."""

    checkpointer: DirectoryCheckpointer

    def note_commit(self, save: Save) -> None:
        AccompaniedRequest.note_commit(self, save)
        self.checkpointer._note_commit(self.step, self.note)


def _refuse_names(path: str, model: str) -> None:
    where = printable(path)
    if model != "default":
        raise UsageError(
            f"model: {where} is a directory, which has the checkpoints of one run; found "
            f"{model!r:.200}. Name a directory for each run, without model="
        )
