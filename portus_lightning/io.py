"""``PortusIO``: the checkpoint plugin."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

import portus
from portus_lightning import stock
from portus_lightning.copies import Copies

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from typing_extensions import Unpack

    from portus.dcp import PortusStorageWriter
else:
    CheckpointIO = object  # stock.adopt makes it one, in whichever copy of Lightning is loaded

_log: Final = logging.getLogger("portus_lightning")

_STEP_KEYS: Final = ("global_step", "step", "iteration", "iter", "num_steps")
"""Where a checkpoint says its step: the Trainer's key, then what Fabric loops call it."""

_MENDED_S: Final = 10.0
"""The longest wait for other ranks that put the same pool in order."""


_KEPT: Final = (
    "materialize",
    "materialize_within",
    "prepare",
    "_pool",
    "_model",
    "_copy_to",
    "_copy_every_s",
    "_settings",
    "_root",
    "_over",
)
"""Attributes that go into a copy of a plugin."""


class PortusIO(CheckpointIO):
    """Saves checkpoints to a Portus pool in the background, while training goes on.

    ``Trainer(plugins=[PortusIO()])``, and everything else stays as it was: at each checkpoint's
    path a small file appears that ``torch.load`` follows into the pool.

    Args:
        pool: A pool file, a directory for pool files, one for each run, or the address of a
            storage host (``portus://host:7117``); for strategies that save in shards, a list of
            several hosts too. By default ``$PORTUS_POOL``, or ``.portus`` under the Trainer's
            ``default_root_dir``.
        model: The name of this run in the pool. By default from the checkpoint directory.
        materialize: When real torch files are put in place of the small ones: "end" does it at
            the normal end of training, for the best, the last, and then the other checkpoints;
            "all" for each at once, "none" never. Unless "none", what is saved after the end of
            training, normal or not, is a real file at once.
        materialize_within: The longest, in seconds, that the end of training waits for that. What
            there is no time or no room for stays as it is, and is listed.
        copy_to: A real torch file that is renewed from the newest checkpoint now and then and at
            the end, on a file system that outlives this machine. By default there is none.
        copy_every_minutes: How often.
        prepare: Whether the start of training makes room in the pool, in the background, so that
            the first save is as fast as later ones. Room that no save used is given back.
        settings: How to save, and what to do about failures: see ``portus.Settings``.
    """

    _newest: str | None
    _last: portus.SaveHandle | None
    _saved: dict[str, None]
    _shards: PortusStorageWriter | None

    def __init__(
        self,
        pool: str | os.PathLike[str] | Sequence[str] | None = None,
        *,
        model: str | None = None,
        materialize: Literal["end", "all", "none"] = "end",
        materialize_within: float = 600.0,
        copy_to: str | os.PathLike[str] | None = None,
        copy_every_minutes: float = 30.0,
        prepare: bool = True,
        **settings: Unpack[portus.SettingsDict],
    ) -> None:
        if materialize not in ("end", "all", "none"):
            raise portus.UsageError(
                f"materialize: expected 'end', 'all' or 'none', found {materialize!r}"
            )
        self.materialize: Literal["end", "all", "none"] = materialize
        self.materialize_within: Final = portus.checked_within(materialize_within)
        self.prepare: bool = prepare
        self._pool: Final = None if pool is None else portus.Place.named(pool)
        self._model: Final = model
        self._copy_to: Final = None if copy_to is None else portus.local_path(copy_to, "copy_to")
        self._copy_every_s: Final = copy_every_minutes * 60
        self._settings: Final = portus.Settings(**settings)
        self._start()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object | None = None,
    ) -> None:
        """Start to save ``checkpoint``; its file is at ``path`` when this returns.

        What cannot be stored in a pool (a URL, an object of an unknown class) is saved by
        Lightning's own code. In a signal handler that interrupted Portus, as Lightning's for SLURM
        does, a real torch file is put at ``path``, durably. Raises ``BusyError``, ``MediumError``
        and the like if the pool cannot be opened.
        """
        local = stock.local_path(path)
        if local is None or storage_options is not None or not self.is_on():
            stock.torch_io().save_checkpoint(checkpoint, path, storage_options)
            return
        if portus.is_nested() or (self._over and self.materialize != "none"):
            portus.write_file(checkpoint, local)  # nobody would make a real file of it later
            return
        handle = self._save(checkpoint, local)
        if handle is not None:
            self._handles.append(handle)
            self._newest, self._last = local, handle
            self._saved[local] = None
            if self.materialize == "all":
                self.put_real_files([local])
            elif self._copies is not None:
                self._copies.offer(local)
        if self._over:
            self._close()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The verified checkpoint at ``path``; waits for it if it is being saved by this process.

        A file that Portus did not write is loaded by Lightning's own code. Tensors are on the CPU
        unless ``map_location`` names a device.
        """
        local = stock.local_path(path)
        if local is None or not portus.is_reference(local):
            # Lightning before 2.6 does not know the word.
            more = {} if weights_only is None else {"weights_only": weights_only}
            return stock.torch_io().load_checkpoint(path, map_location, **more)
        loaded = _moved(portus.load_reference(local), map_location)
        assert isinstance(loaded, dict), f"{local}: a checkpoint is a dict, found {type(loaded)}"
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at ``path``, once the newest save that was asked for before is
        committed, or a later one. It stays if none is."""
        local = stock.local_path(path)
        self._saved.pop(local or "", None)
        if local is not None and self._shards is not None and os.path.isdir(local):
            self._shards.remove(local)
            return
        if local is None or not os.path.isfile(local):
            stock.torch_io().remove_checkpoint(path)
            return
        checkpointer = self._checkpointer
        if checkpointer is not None:
            checkpointer.remove(local)
        elif self._last is not None and not self._last.committed:
            _log.warning("Portus: %s stays: the save that was to replace it failed", local)
        else:
            # Nothing is in flight. The pool sees by its link that the file was deleted.
            try:
                os.unlink(local)
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning("Portus: %s was not removed: %s", local, error.strerror)

    def teardown(self) -> None:
        """Finish what is in flight and let go of the pool. Later saves return when durable.

        Raises, as ``on_error`` says, what made saves fail; not while another error is on its way,
        which matters more.
        """
        self._over = True
        if self._copies is not None:
            self._copies.finish(self._newest)
            self._newest = None
        ends_with_error = sys.exc_info()[0] is not None
        try:
            self._close()
        except portus.PortusError as error:
            if not ends_with_error:
                raise
            _log.error("Portus: a save failed: %s", error)

    # For strategies that save in shards.

    def why_no_shards(self) -> str:
        """Why shards cannot go to the pool that was configured; nothing if they can."""
        place = self._shared()
        if place is not None and not place.is_for_many:
            return f"every rank needs a pool file of its own, and {place} is no directory"
        return ""

    def open_shards(self, directory: str) -> PortusStorageWriter:
        """What saves the shards of this rank, for checkpoints in ``directory``. On every rank, with
        the same directory. Raises what opening a pool raises."""
        if self._shards is None:
            from portus.dcp import PortusStorageWriter

            self._shards = PortusStorageWriter.of(self._run_of(directory))
        return self._shards

    def save_shards(
        self, shards: dict[str, Any], path: str, rest: dict[str, Any], *, is_first: bool
    ) -> None:
        """Start to save this rank's shards; the directory is at ``path`` when this returns. On
        every rank. rest: what is not sharded, which the first rank saves for all.

        Raises ``UsageError`` for what cannot be stored, on all ranks.
        """
        writer = self.open_shards(os.path.dirname(path))
        writer.synchronous = self._over or _is_last_chance(path)
        files = {"meta.pt": rest} if is_first else {}
        try:
            handle = writer.save_directory(shards, path, step=self._step_of(rest), files=files)
        except portus.UsageError:
            writer.wait()  # or a save in flight would replace files of whoever saves it instead
            raise
        self._handles.append(handle)
        if self._over:
            self._close()

    # For the companion callback.

    def begin(self, root: str | None) -> None:
        """A Trainer starts: saves are in the background. ``root``: its directory, if local."""
        self._root = root
        self._directory = ""
        self._over = False
        self._newest = self._last = None
        self._saved = {}
        self._copies = Copies(self._copy_to, self._copy_every_s) if self._copy_to else None

    def put_aside(self, path: str) -> bool:
        """If the save of the file at ``path`` was cut off before it was committed, put it aside;
        True if it is not there any more. Leaves alone what another process is saving."""
        reference = portus.read_reference(path) if os.path.isfile(path) else None
        if reference is None:
            return False
        run = self._run_of(os.path.dirname(os.path.realpath(path)))
        gone = portus.mend(
            run.place, uncommitted=True, links=run.links, model=reference.model, wait_s=_MENDED_S
        )
        return os.path.realpath(path) in map(os.path.realpath, gone) or not os.path.exists(path)

    def lead_back(self, link: str) -> None:
        """If the link at ``link`` leads nowhere, since the save was refused that Lightning made it
        for, let it lead to the newest checkpoint of this run there. What fails is logged."""
        directory = os.path.dirname(os.path.realpath(link))
        try:
            portus.lead_back(link, self._run_of(directory).name)
        except portus.PortusError as error:
            _log.warning("Portus: %s leads nowhere: %s", link, error)

    def make_room(self, directory: str, size: int) -> None:
        """Training starts, and checkpoints of about ``size`` bytes will go to ``directory``.

        Raises what opening a pool raises: better now than at the first save, hours later.
        """
        self._opened(directory).use(lambda checkpointer: checkpointer.prepare(size))

    def is_on(self) -> bool:
        """False where saves are left to Lightning: ``$PORTUS_DISABLE``, or not on Linux."""
        return not stock.LIGHTNING.saves_itself()

    def take_stats(self) -> list[portus.SaveStats]:
        """What the saves cost that ended since the last call."""
        ended = []
        while self._handles and self._handles[0].done:
            ended.append(self._handles.popleft().stats)
        return ended

    def put_real_files(self, paths: Iterable[str]) -> None:
        """Materialise these files, in this order; what stays a reference is said, with what to do
        about it."""
        portus.materialize_at_end(paths, within_s=self.materialize_within)

    def say_what_stays(self, paths: Iterable[str]) -> None:
        """Say which of these files stay references, since training did not come to its end."""
        portus.say_remaining(portus.remaining_references(paths, "training did not come to its end"))

    def saved_in(self, directories: Iterable[str]) -> list[str]:
        """The files that this run saved, newest first, and those in ``directories`` that it saved
        before it was resumed."""
        older = [] if self._run is None else portus.saved_in(directories, self._run.name)
        return list(dict.fromkeys([*reversed(self._saved), *filter(os.path.isfile, older)]))

    # One instance goes through deepcopy, pickle and fork; its pool does not.

    def __getstate__(self) -> dict[str, object]:
        return {name: self.__dict__[name] for name in _KEPT}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._start()
        self.__dict__.update(state)

    def _start(self) -> None:
        self.begin(None)
        self._run: portus.Run | None = None
        self._shards = None
        self._guard = threading.RLock()
        self._handles: deque[portus.SaveHandle] = deque(maxlen=16)
        self._count = 0
        stock.adopt(type(self), load=True)
        portus.register_reference_loader()
        if self._pool is not None:
            portus.allow(self._pool)  # every rank loads, and most of them never save
        INSTANCES.append(True)

    def _save(self, checkpoint: dict[str, Any], path: str) -> portus.SaveHandle | None:
        """Start the save; None if the pool cannot store it, and Lightning has saved it."""
        step = self._step_of(checkpoint)
        now = self._over or self.materialize == "all" or _is_last_chance(path)

        def save(checkpointer: portus.Checkpointer) -> portus.SaveHandle | None:
            try:
                return checkpointer.save(checkpoint, step, reference=path, synchronous=now)
            except portus.UsageError as error:
                self._save_stock(checkpointer, checkpoint, path, error)
                return None

        return self._opened(os.path.dirname(path)).use(save)

    def _step_of(self, checkpoint: dict[str, Any]) -> int:
        for key in _STEP_KEYS:
            step = checkpoint.get(key)
            if isinstance(step, int):
                return step
        self._count += 1
        return self._count

    def _save_stock(
        self,
        checkpointer: portus.Checkpointer,
        checkpoint: dict[str, Any],
        path: str,
        error: portus.UsageError,
    ) -> None:
        stock.LIGHTNING.say_it_saves(error)
        checkpointer.wait()  # or a save in flight would replace the file
        stock.torch_io().save_checkpoint(checkpoint, path)

    @property
    def _checkpointer(self) -> portus.Checkpointer | None:
        return None if self._run is None else self._run.checkpointer

    def _opened(self, directory: str) -> portus.Run:
        """The run whose pool is open; if none is, that of checkpoints in ``directory``."""
        with self._guard:
            if self._run is None or (not self._checkpointer and self._directory != directory):
                self._run, self._directory = self._run_of(directory), directory
            return self._run

    def _run_of(self, directory: str) -> portus.Run:
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
        )

    def _shared(self) -> portus.Place | None:
        """What the user named, which other runs may share; None: the run has a place of its own."""
        return self._pool or portus.Place.by_variable()

    def _close(self) -> None:
        with self._guard:
            shards, self._shards = self._shards, None
            if self._run is not None:
                self._run.close()
            if shards is not None:
                shards.close()


# For LightningCLI, which asks about the class before it makes one.
stock.adopt(PortusIO, load=False)

INSTANCES: Final[deque[bool]] = deque(maxlen=1)
"""Not empty once a ``PortusIO`` was made in this process."""


def _is_last_chance(path: str) -> bool:
    """True for what Lightning saves when SLURM is about to end the job: it must be durable now."""
    return os.path.basename(path).startswith("hpc_ckpt_")


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
