"""``PoolCheckpointer``: the ``Checkpointer`` of a pool on a device or a storage host."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from portus.companions.job.journal import Journal
from portus.companions.job.mirroring import mirror_of
from portus.engine.fence.fence import before_write
from portus.engine.job.settings import Settings, SettingsDict
from portus.engine.loading.over import Rename
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_report import RestoreReport
from portus.engine.media import calls
from portus.engine.paths.checkpointer import Checkpointer
from portus.engine.paths.process import is_blocking, join
from portus.engine.paths.saver import FileSaver
from portus.engine.pipeline.handle import SaveHandle
from portus.engine.pipeline.request import AccompaniedRequest
from portus.engine.settings.keep import Keep, check_metrics
from portus.engine.settings.text import is_text
from portus.engine.spec import VersionInfo, check_step
from portus.errors import UsageError
from portus.reach.index.directory import has_pool
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.pools import restore, view
from portus.reach.pools.place import place_of
from portus.reach.pools.training_pool import TrainingPool

if TYPE_CHECKING:
    from typing_extensions import Unpack

Result = TypeVar("Result")

_log: Final = logging.getLogger("portus")

_NAME_MAX: Final = 200

# Not None: a step that is saved again replaces its older version.
_KEEP_ALL: Final = Keep(last=1 << 60)


class PoolCheckpointer(Checkpointer):
    """A ``Checkpointer`` that saves to a pool. A pool has one writer process: an existing one is
    locked by the constructor, which raises ``BusyError``, naming the holder. In a signal handler
    that interrupted a call of Portus nothing can be saved: ``save`` raises ``UsageError``."""

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
        _check_model(model)
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
        self.settings: Final = Settings(**settings)
        """How it saves and loads."""
        self.model: Final = model
        if mirror_of(self.settings) is not None:
            why = (
                f"{place} is a pool, which this does not mirror; save to a directory, or give a "
                "storage host the mirror (portus serve --mirror)"
            )
            if self.settings.mirror is not None:
                raise UsageError(f"mirror: {why}")
            _log.warning("portus: model %r is NOT mirrored: %s", model, why)
        self._keep: Final = Keep.of(keep) or _KEEP_ALL
        self._pool: Final = TrainingPool(place, lambda: model, self.settings, is_named=True)
        self._companions = []
        if self.settings.journal:
            self._companions = [Journal(model, self._pool.journal, place.title)]
        self._last: SaveHandle | None = None
        self._process = os.getpid()
        self._saver = FileSaver(join(self), self.settings, destination=self._pool)
        self._is_closed = False
        try:
            if self._is_there():
                self._pool.open()
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
        number, scored = check_step(step), check_metrics(metrics)
        request = AccompaniedRequest(
            step=number, metrics=scored, keep=self._keep, companions=self._companions
        )
        self._last = handle = self._saver.save_version(f"step-{number:08d}.pt", state, request)
        if synchronous or is_blocking():
            handle.join()
        return handle

    def load(self, step: int | None = None, names: Patterns = None, **settings: Any) -> Any:
        if settings.keys() - {"map_location", "weights_only"}:
            raise UsageError(
                f"load: a pool takes map_location and weights_only, found {sorted(settings)}"
            )
        use = partial(restore.load, names=names, verify=self.settings.verify, **settings)
        return self._use(step, use)

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
        use = partial(
            restore.restore_into,
            state=state,
            strict=strict,
            names=names,
            rename=rename,
            weights_only=weights_only,
            verify=self.settings.verify,
        )
        return self._use(step, use)

    def versions(self) -> list[VersionInfo]:
        self._check_usable()
        return [] if not self._is_there() else self._infos()

    @property
    def path(self) -> str:
        return str(self._pool.place)

    def _is_there(self) -> bool:
        path = self._pool.place.local_path
        return path is None or has_pool(path)

    def _infos(self) -> list[VersionInfo]:
        found = self._pool.open().catalogue().models.get(self.model)
        return [entry.info for entry in found.versions] if found else []

    @calls.mark
    def _use(self, step: int | None, use: Callable[[PoolReader, VersionEntry], Result]) -> Result:
        """What ``use`` gives for a step, or for the newest version that verifies."""
        self._check_usable()
        if not calls.is_nested():
            self._saver.catch_up()
        if not self._is_there():
            raise UsageError(f"{self.path}: there is no pool yet; nothing was saved")
        return view.use_version([self._pool.open()], self.model, step, use)


def _check_model(model: object) -> None:
    """Raise ``UsageError`` for what is no name of a model."""
    is_name = isinstance(model, str) and model and is_text(model)
    if not is_name or len(str(model).encode()) > _NAME_MAX:
        raise UsageError(f"model: expected a name of 1 to {_NAME_MAX} bytes, found {model!r}")
