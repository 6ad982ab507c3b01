"""``PooledCheckpoints``: checkpoints of a Trainer in a pool on a device or a storage host.

At a checkpoint's path is a small file, which ``torch.load`` follows into the pool. Runs with a
mirror are saved like this in directories too, until mirrors hold files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

import portus
from portus_lightning import stock

_log: Final = logging.getLogger("portus_lightning")

_MENDED_S: Final = 10.0
"""The longest wait for other ranks that put the same pool in order."""


_REAL_S: Final = 600.0
"""The longest time that the end of training waits for real files."""


class PooledCheckpoints:
    """The checkpoints of one plugin in a pool.

    pool, model, settings, keep: as of ``PortusIO``. Runs are also asked for by strategies that
    save in shards.
    """

    def __init__(
        self,
        pool: portus.Place | None,
        model: str | None,
        settings: portus.Settings,
        keep: portus.Keep | None,
    ) -> None:
        self._pool: Final = pool
        self._model: Final = model
        self._settings: Final = settings
        self._keep: Final = keep
        self._root: str | None = None
        self._logged: Callable[[], Mapping[str, Any]] | None = None
        self._last: portus.SaveHandle | None = None
        self._saved: dict[str, None] = {}
        self._runs: list[tuple[portus.Run, str]] = []
        """With the directories that they were made for. The last is in use; those before it may
        be, until this is closed, where a signal handler saved while they were being opened."""
        self._guard: Final = threading.RLock()
        portus.register_reference_loader()
        if pool is not None:
            portus.allow(pool)  # every rank loads, and most of them never save

    def begin(self, root: str | None, logged: Callable[[], Mapping[str, Any]] | None) -> None:
        """A Trainer starts; see ``PortusIO.begin``."""
        self._root, self._logged = root, logged
        self._runs[:] = [(run, "") for run, _ in self._runs]
        self._last, self._saved = None, {}

    def save(
        self, checkpoint: dict[str, Any], path: str, step: int, *, wait: bool
    ) -> portus.SaveHandle | None:
        """Start the save; None if the pool cannot store it, and Lightning has saved it."""

        def save(checkpointer: portus.PoolCheckpointer) -> portus.SaveHandle | None:
            try:
                return checkpointer.save(
                    checkpoint, step, reference=path, synchronous=wait, metrics=self.metrics()
                )
            except portus.UsageError as error:
                _save_stock(checkpointer, checkpoint, path, error)
                return None

        handle = self._opened(os.path.dirname(path)).use(save)
        if handle is not None:
            self._last = handle
            self._saved[path] = None
        return handle

    def load(self, path: str, map_location: Any) -> dict[str, Any]:
        """Return what the small file at ``path`` leads to, verified."""
        self._settings.allow_mirror()
        loaded = _moved(portus.load_reference(path), map_location)
        assert isinstance(loaded, dict), f"{path}: a checkpoint is a dict, found {type(loaded)}"
        return loaded

    def remove(self, path: str) -> None:
        """Remove the file at ``path``; see ``PortusIO.remove_checkpoint``."""
        self._saved.pop(path, None)
        if not os.path.isfile(path):
            stock.torch_io().remove_checkpoint(path)
            return
        checkpointer = self._checkpointer
        if checkpointer is not None:
            checkpointer.remove(path)
        elif self._last is not None and not self._last.committed:
            _log.warning("Portus: %s stays: the save that was to replace it failed", path)
        else:
            # Nothing is in flight. The pool sees by its link that the file was deleted.
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning(
                    "Portus: %s was not removed; remove it yourself: %s", path, error.strerror
                )

    def wait(self) -> None:
        """Block until all saves are over; raises as ``Checkpointer.wait`` does."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Finish the saves in flight and release the pool. Raises as ``Checkpointer.close``."""
        with self._guard:
            with contextlib.ExitStack() as closing:
                for run, _ in self._runs:
                    closing.callback(run.close)
            del self._runs[:-1]

    def end(self, paths: Iterable[str], directories: Iterable[str]) -> None:
        """Training ended: put real files at ``paths``, where the pool is in a directory of this
        machine, and let go of what nothing leads to any more."""
        directories = list(directories)
        if self._pool is not None and not self._pool.is_directory:
            return
        found = [*paths, *self._saved_in(directories)]
        portus.materialize_at_end(found, within_s=_REAL_S)
        runs = [run for run, _ in self._runs]
        runs += [self.run_of(each) for each in directories if os.path.isdir(each)]
        for run in {each.name: each for each in runs}.values():
            run.give_back()

    def make_room(self, directory: str, size: int) -> None:
        """Training starts, and checkpoints of about ``size`` bytes will go to ``directory``.

        Raises what opening a pool raises: better now than at the first save, hours later.
        """
        self._opened(directory).use(lambda checkpointer: checkpointer.prepare(size))

    def fetch(self, root: str | None, directory: str) -> None:
        """Fetch what a run without a pool has in its mirror, and put back its files in
        ``directory``. Raises as opening a pool."""
        self._root = root
        run = self.run_of(directory)
        try:
            run.use(lambda checkpointer: None)
        finally:
            run.close()

    def put_aside(self, path: str) -> bool:
        """Put the file at ``path`` aside if its save was cut off before it was committed. True if
        it is not there any more. Leaves alone what another process is saving."""
        reference = portus.read_reference(path) if os.path.isfile(path) else None
        if reference is None:
            return False
        run = self.run_of(os.path.dirname(os.path.realpath(path)))
        gone = portus.mend(
            run.place, uncommitted=True, links=run.links, model=reference.model, wait_s=_MENDED_S
        )
        return os.path.realpath(path) in map(os.path.realpath, gone) or not os.path.exists(path)

    def lead_to_newest(self, path: str) -> bool:
        """Let ``path``, at which there is nothing, lead to the newest checkpoint of this run beside
        it. True if there is one. What fails is logged."""
        try:
            return portus.lead_to_newest(path, self.run_of(os.path.dirname(path)).name)
        except portus.MediumError as error:
            _log.warning("Portus: there is no last checkpoint: %s", error)
            return False

    def lead_back(self, link: str) -> None:
        """Point ``link`` to the newest checkpoint of this run there, if its target is missing
        because the save that Lightning made it for was refused. Errors are logged."""
        directory = os.path.dirname(os.path.realpath(link))
        try:
            portus.lead_back(link, self.run_of(directory).name)
        except portus.PortusError as error:
            _log.warning("Portus: %s leads nowhere: %s", link, error)

    def metrics(self) -> dict[str, float]:
        """What the checkpoint that is about to be saved scored, as far as ``keep`` asks for it."""
        best = None if self._keep is None else self._keep.best
        if best is None or self._logged is None:
            return {}
        value = self._logged().get(best[0])
        return (
            {} if value is None or torch.as_tensor(value).numel() != 1 else {best[0]: float(value)}
        )

    def run_of(self, directory: str) -> portus.Run:
        """The run that saves checkpoints to ``directory``. Its ``.portus`` is in the Trainer's
        ``default_root_dir``, or in the working directory, and never among the checkpoints."""
        roots = [] if self._root is None else [os.path.abspath(self._root)]
        with contextlib.suppress(OSError):  # the working directory may be gone
            here = os.getcwd()
            if os.path.commonpath([here, directory]) == here:
                roots.append(here)
        return portus.Run.beside(
            directory,
            self._settings,
            roots=roots,
            otherwise=os.path.dirname(directory),
            pool=self._pool,
            name=self._model,
            keep=self._keep,
        )

    @property
    def _checkpointer(self) -> portus.PoolCheckpointer | None:
        return self._runs[-1][0].checkpointer if self._runs else None

    def _opened(self, directory: str) -> portus.Run:
        """The run whose pool is open; if none is, that of checkpoints in ``directory``."""
        with self._guard:
            known = len(self._runs)
            if known == 0 or (not self._checkpointer and self._runs[-1][1] != directory):
                run = self.run_of(directory)
                if len(self._runs) == known:  # else a signal handler that saved made one
                    self._runs.append((run, directory))
            return self._runs[-1][0]

    def _saved_in(self, directories: Iterable[str]) -> list[str]:
        """The files that this run saved, newest first, and those in ``directories`` that it saved
        before it was resumed."""
        older = portus.saved_in(directories, self._runs[-1][0].name) if self._runs else []
        return list(dict.fromkeys([*reversed(self._saved), *filter(os.path.isfile, older)]))


def _save_stock(
    checkpointer: portus.PoolCheckpointer,
    checkpoint: dict[str, Any],
    path: str,
    error: portus.UsageError,
) -> None:
    stock.LIGHTNING.say_it_saves(error)
    checkpointer.wait()  # or a save in flight would replace the file
    stock.torch_io().save_checkpoint(checkpoint, path)


def _moved(state: object, map_location: Any) -> object:
    """``state`` on the device that ``map_location`` names; as it is for anything but a device."""
    if not isinstance(map_location, str | torch.device):
        return state
    device = torch.device(map_location)
    moved: dict[int, torch.Tensor] = {}

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return moved.setdefault(id(value), value.to(device))
        if isinstance(value, dict):
            for key in value:
                value[key] = move(value[key])
        elif isinstance(value, list):
            value[:] = map(move, value)
        elif type(value) is tuple:
            return tuple(map(move, value))
        return value

    return move(state)
