"""``CheckpointFiles``: saves checkpoint directories in the background."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import portus
from portus_accelerate.directories import (
    NUMBERED,
    RANDOM,
    TELLING,
    is_inside,
    numbered_directories,
    roots,
    why_incomplete,
)
from portus_accelerate.settings import Settings

if TYPE_CHECKING:
    from portus.dcp import PortusStorageWriter


class CheckpointFiles:
    """The checkpoint files of one ``Accelerator``. Its methods are called on every process."""

    def __init__(self, accelerator: Any, settings: Settings, *, is_writer: bool) -> None:
        """Prepare for one ``Accelerator``. is_writer: False if only random states are saved."""
        self._accelerator: Final = accelerator
        self.uploaded: str | None = None
        """The directory whose files are all uploaded."""
        self._settings: Final = settings if is_writer else _alone(settings)
        self._of_all: Final = settings
        self._is_writer: Final = is_writer
        self._shards: PortusStorageWriter | None = None

    def prepare(self, below: list[str]) -> None:
        """Repair what a killed process left in ``below``, and learn each optimizer's parameters,
        so the first save too is in the background. Raises nothing: the first save does."""
        with contextlib.suppress(portus.PortusError):
            for root in below:
                self.files.recover(root)
                if self._is_writer:
                    self._remove_cut_off(os.path.join(root, "checkpoints"))
            self.files.open()

    def _remove_cut_off(self, above: str) -> None:
        """Remove directories of automatic naming whose save was cut off, and that have no other
        files: scripts continue from the highest number, or start anew without one."""
        for directory in numbered_directories(above, NUMBERED) if os.path.isdir(above) else ():
            if not why_incomplete(directory) or _others_in(directory):
                continue
            self.files.wait_for(directory)  # another process may be saving it
            # Look again: the save may have completed meanwhile.
            if why_incomplete(directory) and not _others_in(directory):
                with contextlib.suppress(OSError):
                    shutil.rmtree(directory)

    def fetch(self, directory: str) -> None:
        """Fetch the mirror's files of the run that saves ``directory``, if this machine has none.
        Only on the process that leads. Raises as ``portus.TrainingFiles.fetch``."""
        if self._is_writer:
            run = self._run_of(directory)
            self.files.fetch(run.name, run.links, os.path.dirname(directory))

    def _run_of(self, directory: str) -> portus.Run:
        """Return the run that saves the checkpoint ``directory``: the same after a restart. Its
        ``.portus`` is on the file system of the checkpoints, not among them nor in uploads. Opens
        no file. Raises ``MediumError``."""
        above = otherwise = os.path.dirname(directory)
        fit = [root for root in roots(self._accelerator.project_dir) if is_inside(above, root)]
        if self.uploaded is not None:
            fit = [root for root in fit if not is_inside(root, self.uploaded)]
            if is_inside(above, self.uploaded):
                otherwise = os.path.dirname(self.uploaded)
        settings = self._of_all
        return portus.Run.beside(
            above, roots=fit, otherwise=otherwise, pool=settings.pool, name=settings.model
        )

    def begin(self, directory: str) -> portus.Run:
        """Return the run that saves ``directory``, which has begun."""
        run = self._run_of(directory)
        if not self.files.has_begun:
            self.files.begin(run.name, run.links, os.path.dirname(directory))
        return run

    def wait(self) -> None:
        """Block until all saves have ended; raises as ``on_error`` says."""
        for each in self._savers():
            each.wait()

    def close(self) -> None:
        """Finish the saves in flight. Later saves open the files again."""
        with contextlib.ExitStack() as closing:
            for each in reversed(self._savers()):
                closing.callback(each.close)
            self._shards = None

    def _savers(self) -> list[Any]:
        """Return the savers, in the order in which their files become visible."""
        found = (self._shards, *(vars(self).get(name) for name in ("plain", "files")))
        return [each for each in found if each is not None]

    @cached_property
    def pool(self) -> portus.Place | None:
        """Return the pool that the user had named at the first use. Raises ``UsageError``."""
        return self._of_all.pool_at

    @cached_property
    def files(self) -> portus.TrainingFiles:
        """Return the files of this process, or the pointers to them. Raises ``UsageError`` for
        settings that only pools have."""
        return portus.TrainingFiles(
            self._settings,
            of_directories=True,
            telling=TELLING,
            pool=self.pool if self._is_writer else None,
            is_named=self._settings.model is not None,
        )

    @cached_property
    def plain(self) -> portus.TrainingFiles:
        """Return the files that stay files, though there is a pool."""
        return portus.TrainingFiles(_alone(self._settings), of_directories=True, telling=TELLING)

    def opened_shards(self, directory: str) -> PortusStorageWriter:
        """Return the writer of a checkpoint's shards."""
        if self._shards is None:
            from portus.dcp import PortusStorageWriter

            run, names = self._run_of(directory), [each.name for each in fields(portus.Settings)]
            own: Any = {name: getattr(self._settings, name) for name in names}
            own |= {"journal": False, "mirror": "none"}  # the files of the checkpoint have these
            self._shards = PortusStorageWriter(
                model=run.name, links=run.links, pool=self.pool, **own
            )
        return self._shards


def _alone(settings: Settings) -> Settings:
    """Return the settings of files in a checkpoint whose other files have the journal and the
    mirror, and the pool."""
    return replace(settings, pool=None, max_bytes=None, durable=1, journal=False, mirror="none")


def _others_in(directory: str) -> list[str]:
    """Return the names in ``directory`` but for random states, and shards that Portus saved."""
    head, tail = RANDOM.split("{}")
    return [
        name
        for name in os.listdir(directory)
        if not (name.startswith(head) and name.endswith(tail))
        and not _is_of_shards(os.path.join(directory, name))
    ]


def _is_of_shards(directory: str) -> bool:
    """Return True for a directory of shards, also of a save that was cut off at its start."""
    from portus.dcp import has_digests

    return os.path.isdir(directory) and (has_digests(directory) or not os.listdir(directory))
