"""``PoolSteps``: the checkpoints of a run in a pool on a device or a storage host; and the place
that a user of ``Checkpointer`` names."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from portus.companions.job.journal import Journal
from portus.engine.job.settings import Settings
from portus.engine.media import calls
from portus.engine.paths.checkpointer import Checkpointer, StepRequest
from portus.engine.paths.process import Closable, join
from portus.engine.paths.saver import FileSaver
from portus.engine.pipeline.handle import SaveHandle
from portus.engine.pipeline.request import Companion
from portus.engine.settings.fits import is_text
from portus.engine.settings.keep import Keep
from portus.engine.spec import VersionInfo
from portus.errors import NoCheckpointError, UsageError, printable
from portus.reach.format.layout import MAGIC
from portus.reach.index.directory import has_pool
from portus.reach.index.place import SUFFIX, Place, load_class
from portus.reach.pools.training_pool import TrainingPool
from portus.reach.pools.view import PoolStep, choose

DEFAULT: Final = "checkpoints"
"""The directory for a user who names none."""


def place_of(directory: str | os.PathLike[str] | None) -> Place:
    """Return the place that a user names. Raises ``UsageError``."""
    if directory is None:
        return Place.by_variable() or Place.parse(os.path.abspath(DEFAULT))
    place = Place.parse(directory, "directory")
    if os.path.isfile(place.path) and not place.path.endswith(SUFFIX):  # no device or host
        with contextlib.suppress(OSError), open(place.path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UsageError(
                    f"{printable(place.path)}: expected a directory for checkpoints, found a file; "
                    "name a directory"
                )
    return place


def steps_of(directory: str | os.PathLike[str] | None, *others: Any) -> Any:
    """Return the ``Steps`` of a ``Checkpointer`` at the place that a user names. others: further
    arguments of their constructor. Raises ``UsageError``."""
    place = place_of(directory)
    return load_class(place.classes.steps)(place, *others)


_log: Final = logging.getLogger("portus")

_NAME_MAX: Final = 200

# Not None: a step that is saved again replaces its older version.
_KEEP_ALL: Final = Keep(last=1 << 60)


class PoolSteps:
    """The ``Steps`` of a pool; see ``PoolCheckpointer``."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        model: str,
        keep: Keep | None,
        settings: Settings,
        owner: Closable,
    ) -> None:
        is_name = isinstance(model, str) and model and is_text(model)
        if not is_name or len(model.encode()) > _NAME_MAX:
            raise UsageError(f"model: expected a name of 1 to {_NAME_MAX} bytes, found {model!r}")
        place = place_of(directory)
        if place.is_directory:
            raise UsageError(
                f"{place}: expected a pool file (*.portus), a DAX device or a storage host, found "
                "the name of a directory; Checkpointer saves to directories"
            )
        if len(place.hosts) > 1:
            raise UsageError(
                f"{place}: model {model!r} is saved to one pool; expected one storage host, found "
                f"{len(place.hosts)}. The shards of several ranks are spread over them: portus.dcp"
            )
        if settings.has_mirror:
            why = (
                f"{place} is a pool, which this does not mirror; save to a directory, or give a "
                "storage host the mirror (portus serve --mirror)"
            )
            if settings.mirror is not None:
                raise UsageError(f"mirror: {why}")
            _log.warning("portus: model %r is NOT mirrored: %s", model, why)
        self.model: Final = model
        self._keep: Final = keep or _KEEP_ALL
        self.pool: Final = TrainingPool(place, lambda: model, settings, is_named=True)
        self.companions: Final[Sequence[Companion]] = (
            [Journal(model, self.pool.journal)] if settings.journal else []
        )
        self.saver: Final = FileSaver(join(owner), settings, destination=self.pool)

    @property
    def path(self) -> str:
        return str(self.pool.place)

    def open(self) -> None:
        if self._is_there():
            self.pool.open()

    def save(self, state: object, request: StepRequest) -> SaveHandle:
        request = replace(request, keep=self._keep)
        return self.saver.save_version(f"step-{request.step:08d}.pt", state, request)

    def note_commit(self, request: StepRequest) -> None:
        """Do nothing: the commit itself retired the versions beyond ``keep``."""

    def make_room(self, request: StepRequest) -> bool:
        return False

    def versions(self) -> list[VersionInfo]:
        if not self._is_there():
            return []
        found = self.pool.open().catalogue().models.get(self.model)
        return [entry.info for entry in found] if found else []

    @calls.mark
    def choose(self, step: int | None) -> list[PoolStep]:
        if not calls.is_nested():
            self.saver.catch_up()
        if not self._is_there():
            raise NoCheckpointError(f"{self.path}: there is no pool yet; nothing was saved")
        return choose([self.pool.open()], self.model, step)

    def _is_there(self) -> bool:
        path = self.pool.place.local_path
        return path is None or has_pool(path)


class PoolCheckpointer(Checkpointer):
    """A ``Checkpointer`` that saves to a pool. A pool has one writer process: an existing one is
    locked by the constructor, which raises ``BusyError``, naming the holder. In a signal handler
    that interrupted a call of Portus nothing can be saved: ``save`` raises ``UsageError``."""

    _STEPS: ClassVar[str] = f"{__name__}:{PoolSteps.__name__}"
    _steps: PoolSteps

    @property
    def model(self) -> str:
        """The name of the run in the pool."""
        return self._steps.model
