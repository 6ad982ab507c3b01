"""``PortusIO``: the checkpoint plugin."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    "preempt_within",
    "prepare",
    "fixed_batch",
    "_pool",
    "_model",
    "_copy_to",
    "_copy_every_s",
    "_settings",
    "_keep",
    "_root",
    "_over",
)
"""Attributes that go into a copy of a plugin."""


class PortusIO(CheckpointIO):
    """Saves checkpoints to a Portus pool in the background, while training continues.

    Pass it as ``Trainer(plugins=[PortusIO()])``. At each checkpoint's path it puts a small file,
    which ``torch.load`` follows into the pool. Nothing else in the script changes.

    Args:
        pool: A pool file, a directory for pool files, one for each run, or the address of a
            storage host (``portus://host:7117``). For strategies that save in shards, a list of
            hosts is possible too. Default: ``$PORTUS_POOL``, or ``.portus`` under the Trainer's
            ``default_root_dir``.
        model: The name of this run in the pool. Default: derived from the checkpoint directory.
        materialize: When real torch files replace the small ones. "end": at the normal end of
            training, the best checkpoint first, then the last, then the others. "all": each one
            right after its save. "none": never. Unless it is "none", checkpoints saved after the
            end of training, normal or not, are real files from the start.
        materialize_within: The longest time, in seconds, that the end of training waits for that.
            Checkpoints for which time or space runs out stay as they are, and are listed.
        preempt_within: Seconds, or a text like "90s", in which a job that receives SIGTERM or
            SIGUSR1 saves and exits; then it is ended. None leaves these signals to Lightning.
        copy_to: A path for a real torch file, on a file system that outlives this machine, which is
            renewed from the newest checkpoint regularly and at the end. Default: none.
        copy_every_minutes: How often to renew it.
        prepare: Whether the start of training makes room in the pool in the background, so that
            the first save is as fast as later ones. Unused room is returned.
        fixed_batch: What stays the same when a run resumes in the middle of an epoch with another
            number of ranks: "local", the batch of each rank, or "global", the number of samples in
            a step of all ranks, whatever batch the script names.
        keep: Which versions stay in the pool without a file: a number (the newest ones), or a
            ``portus.Keep``, whose ``best`` uses the metrics that Lightning logged. Versions that
            Lightning's ``ModelCheckpoint`` keeps stay in addition.
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
        preempt_within: float | str | None = 60.0,
        copy_to: str | os.PathLike[str] | None = None,
        copy_every_minutes: float = 30.0,
        prepare: bool = True,
        fixed_batch: Literal["local", "global"] = "local",
        keep: int | portus.Keep | None = 1,
        **settings: Unpack[portus.SettingsDict],
    ) -> None:
        if materialize not in ("end", "all", "none"):
            raise portus.UsageError(
                f"materialize: expected 'end', 'all' or 'none', found {materialize!r}"
            )
        self.materialize: Literal["end", "all", "none"] = materialize
        self.materialize_within: Final = portus.checked_within(materialize_within)
        self.preempt_within: Final = preempt_within
        if preempt_within is not None:
            portus.Preemption(preempt_within)  # says what makes no sense, now
        if fixed_batch not in ("local", "global"):
            raise portus.UsageError(
                f"fixed_batch: expected 'local' or 'global', found {fixed_batch!r}"
            )
        self.prepare: bool = prepare
        self.fixed_batch: Literal["local", "global"] = fixed_batch
        self._pool: Final = None if pool is None else portus.Place.named(pool)
        self._model: Final = model
        self._copy_to: Final = None if copy_to is None else portus.local_path(copy_to, "copy_to")
        self._copy_every_s: Final = copy_every_minutes * 60
        self._settings: Final = portus.Settings(**settings)
        self._keep: Final = portus.Keep.of(keep)
        self._start()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object | None = None,
    ) -> None:
        """Start saving ``checkpoint``; its file is at ``path`` when this returns.

        Lightning's own code saves what a pool cannot store (a URL, an object of an unknown class).
        In a signal handler that interrupted Portus, such as Lightning's for SLURM, this writes a
        real torch file to ``path``, durably. Raises ``BusyError``, ``MediumError`` and others if
        the pool cannot be opened.
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
        """Return the verified checkpoint at ``path``. Blocks while this process is saving it.

        Lightning's own code loads files that Portus did not write. The tensors are new, and on the
        CPU unless ``map_location`` names a device. Raises ``CorruptionError`` and others.
        """
        local = stock.local_path(path)
        if local is None or not portus.is_reference(local):
            # Lightning before 2.6 does not know the word.
            more = {} if weights_only is None else {"weights_only": weights_only}
            found = stock.torch_io().load_checkpoint(path, map_location, **more)
            portus.decode_stand_ins(found)  # in place; a file that was materialised may have some
            return found
        self._settings.allow_mirror()
        loaded = _moved(portus.load_reference(local), map_location)
        assert isinstance(loaded, dict), f"{local}: a checkpoint is a dict, found {type(loaded)}"
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at ``path`` once the newest save requested before, or a later one,
        is committed. If none is, the checkpoint stays. Returns at once."""
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
                _log.warning(
                    "Portus: %s was not removed; remove it yourself: %s", local, error.strerror
                )

    def teardown(self) -> None:
        """Finish the saves in flight and release the pool. Later saves return when they are
        durable.

        Raises the errors of failed saves, as ``on_error`` says, unless another error is being
        raised already.
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

    def wait(self) -> None:
        """Block until all saves are committed or failed; raises as ``Checkpointer.wait`` does."""
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if self._shards is not None:
            self._shards.wait()

    # For strategies that save in shards.

    def why_no_shards(self) -> str:
        """Why shards cannot go to the configured pool; empty if they can."""
        place = self._shared()
        if place is not None and not place.is_for_many:
            return f"every rank needs a pool file of its own, and {place} is no directory"
        return ""

    def open_shards(self, directory: str) -> PortusStorageWriter:
        """The writer of this rank's shards, for checkpoints in ``directory``. Call it on every
        rank, with the same directory. Raises the errors of opening a pool."""
        if self._shards is None:
            from portus.dcp import PortusStorageWriter

            self._shards = PortusStorageWriter.of(self._run_of(directory))
        return self._shards

    def save_shards(
        self,
        shards: dict[str, Any],
        path: str,
        rest: dict[str, Any],
        metrics: dict[str, float],
        *,
        is_first: bool,
    ) -> None:
        """Start saving this rank's shards; the directory is at ``path`` when this returns. Call it
        on every rank. rest: the part that is not sharded, which the first rank saves for all.
        metrics: the result of ``metrics`` on the first rank.

        Raises ``UsageError`` for a value that cannot be stored, on all ranks.
        """
        writer = self.open_shards(os.path.dirname(path))
        writer.synchronous = self._over or _is_last_chance(path)
        files = {"meta.pt": rest} if is_first else {}
        try:
            handle = writer.save_directory(
                shards, path, step=self._step_of(rest), files=files, metrics=metrics
            )
        except portus.UsageError:
            writer.wait()  # or a save in flight would replace files of whoever saves it instead
            raise
        self._handles.append(handle)
        if self._over:
            self._close()

    # For the companion callback.

    def begin(
        self, root: str | None, logged: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        """A Trainer starts: saves are in the background. ``root``: its directory, if local.
        ``logged``: gives what it has logged by then, by name."""
        self._root = root
        self._logged = logged
        self._runs[:] = [(run, "") for run, _ in self._runs]
        self._over = False
        self._newest = self._last = None
        self._saved = {}
        self._copies = Copies(self._copy_to, self._copy_every_s) if self._copy_to else None

    @property
    def mirror(self) -> str | None:
        """Where what is saved here is mirrored, if that was said here."""
        return self._settings.mirror

    def has_mirror(self) -> bool:
        """True if what is saved here is mirrored, also by $PORTUS_MIRROR."""
        return self._settings.has_mirror

    def fetch(self, root: str | None, directory: str) -> None:
        """Before Lightning looks in ``directory`` for a checkpoint to go on from: what a run
        without a pool has in its mirror is fetched, and its files are put back. Raises as opening
        a pool."""
        self._root = root
        run = self._run_of(directory)
        try:
            run.use(lambda checkpointer: None)
        finally:
            run.close()

    def fetch_shards(self, root: str | None, directory: str) -> None:
        """The same for a strategy that saves in shards. On every rank."""
        self._root = root
        self.open_shards(directory).prepare(0)

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

    def lead_to_newest(self, path: str) -> bool:
        """Let ``path``, at which there is nothing, lead to the newest checkpoint of this run beside
        it. True if there is one. What fails is logged."""
        try:
            return portus.lead_to_newest(path, self._run_of(os.path.dirname(path)).name)
        except portus.MediumError as error:
            _log.warning("Portus: there is no last checkpoint: %s", error)
            return False

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

    def metrics(self) -> dict[str, float]:
        """What the checkpoint that is about to be saved scored, as far as ``keep`` asks for it."""
        best = None if self._keep is None else self._keep.best
        if best is None or self._logged is None:
            return {}
        value = self._logged().get(best[0])
        return (
            {} if value is None or torch.as_tensor(value).numel() != 1 else {best[0]: float(value)}
        )

    def is_on(self) -> bool:
        """False where saves are left to Lightning: ``$PORTUS_DISABLE``, or not on Linux."""
        return not stock.LIGHTNING.saves_itself()

    def take_stats(self) -> list[portus.SaveStats]:
        """What the saves cost that were committed since the last call."""
        committed = []
        while self._handles and self._handles[0].done:
            handle = self._handles.popleft()
            if handle.committed:
                committed.append(handle.stats)
        return committed

    def put_real_files(self, paths: Iterable[str]) -> None:
        """Materialise these files, in this order; what stays a reference is said, with what to do
        about it."""
        portus.materialize_at_end(paths, within_s=self.materialize_within)

    def give_back(self, directories: Iterable[str]) -> None:
        """Training ended: pool files of this run to which nothing leads any more go, also where a
        process before made the last real file and then died. directories: of checkpoints."""
        runs = [run for run, _ in self._runs]
        runs += [self._run_of(each) for each in directories if os.path.isdir(each)]
        for run in {each.name: each for each in runs}.values():
            run.give_back()

    def say_what_stays(self, paths: Iterable[str]) -> None:
        """Say which of these files stay references, since training did not come to its end."""
        portus.say_remaining(portus.remaining_references(paths, "training did not finish"))

    def saved_in(self, directories: Iterable[str]) -> list[str]:
        """The files that this run saved, newest first, and those in ``directories`` that it saved
        before it was resumed."""
        older = portus.saved_in(directories, self._runs[-1][0].name) if self._runs else []
        return list(dict.fromkeys([*reversed(self._saved), *filter(os.path.isfile, older)]))

    # One instance goes through deepcopy, pickle and fork; its pool does not.

    def __getstate__(self) -> dict[str, object]:
        return {name: self.__dict__[name] for name in _KEPT}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._start()
        self.__dict__.update(state)

    def _start(self) -> None:
        self._runs: list[tuple[portus.Run, str]] = []
        """With the directories that they were made for. The last is in use; those before it may
        be, until this is closed, where a signal handler saved while they were being opened."""
        self.begin(None)
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

        def save(checkpointer: portus.PoolCheckpointer) -> portus.SaveHandle | None:
            try:
                return checkpointer.save(
                    checkpoint, step, reference=path, synchronous=now, metrics=self.metrics()
                )
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
        checkpointer: portus.PoolCheckpointer,
        checkpoint: dict[str, Any],
        path: str,
        error: portus.UsageError,
    ) -> None:
        stock.LIGHTNING.say_it_saves(error)
        checkpointer.wait()  # or a save in flight would replace the file
        stock.torch_io().save_checkpoint(checkpoint, path)

    @property
    def _checkpointer(self) -> portus.PoolCheckpointer | None:
        return self._runs[-1][0].checkpointer if self._runs else None

    def _opened(self, directory: str) -> portus.Run:
        """The run whose pool is open; if none is, that of checkpoints in ``directory``."""
        with self._guard:
            known = len(self._runs)
            if known == 0 or (not self._checkpointer and self._runs[-1][1] != directory):
                run = self._run_of(directory)
                if len(self._runs) == known:  # else a signal handler that saved made one
                    self._runs.append((run, directory))
            return self._runs[-1][0]

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
            keep=self._keep,
        )

    def _shared(self) -> portus.Place | None:
        """What the user named, which other runs may share; None: the run has a place of its own."""
        return self._pool or portus.Place.by_variable()

    def _close(self) -> None:
        with self._guard:
            shards, self._shards = self._shards, None
            with contextlib.ExitStack() as closing:
                if shards is not None:
                    closing.callback(shards.close)
                for run, _ in self._runs:
                    closing.callback(run.close)
            del self._runs[:-1]


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
