"""``PortusIO``: the checkpoint plugin; ``RunFiles``: the checkpoints of one Trainer's run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal

import portus
from portus_lightning import stock

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from typing_extensions import Unpack

    from portus.dcp import PortusStorageWriter
else:
    CheckpointIO = object  # stock.adopt registers it, with each copy of Lightning that is loaded

_log: Final = logging.getLogger("portus_lightning")

_STEP_KEYS: Final = ("global_step", "step", "iteration", "iter", "num_steps")
"""The keys of the step in a checkpoint: the Trainer's, then those of Fabric loops."""

_LAST_CHANCE: Final = "hpc_ckpt_"
"""The prefix of checkpoints that Lightning saves when SLURM is about to end the job: these
block."""


class PortusIO(CheckpointIO):
    """Saves checkpoints in the background, while training continues.

    Pass it as ``Trainer(plugins=[PortusIO()])``. The checkpoints of ``ModelCheckpoint`` appear at
    their paths when they are complete and durable; all other saves return when the file exists.
    Nothing else in the script changes.

    Args:
        pool: A device for persistent memory (``/dev/dax0.0``), a pool file on it, or the address of
            a storage host (``portus://host:7117``): checkpoints go there, and at their paths are
            pointers, small files that loads follow. For strategies that save in shards, a list of
            hosts is possible too. Default: ``$PORTUS_POOL``, or none.
        model: The name of this run in the pool and for ``portus report``. Default: derived from the
            checkpoint directory.
        preempt_within: Seconds, or a text like "90s", in which a job that receives SIGTERM or
            SIGUSR1 saves and exits; after it, the job is killed. None leaves these signals to
            Lightning.
        fixed_batch: The batch that stays the same when a run resumes in the middle of an epoch with
            another number of ranks: "local", the batch of each rank, or "global", the number of
            samples in a step of all ranks, whatever batch the script names.
        settings: How to save, and how to treat failures: see ``portus.Settings``.
    """

    def __init__(
        self,
        pool: str | os.PathLike[str] | Sequence[str] | None = None,
        *,
        model: str | None = None,
        preempt_within: float | str | None = 60.0,
        fixed_batch: Literal["local", "global"] = "local",
        **settings: Unpack[portus.SettingsDict],
    ) -> None:
        self.preempt_within: Final = preempt_within
        if preempt_within is not None:
            portus.Preemption(preempt_within)  # refuses invalid values now
        if fixed_batch not in ("local", "global"):
            raise portus.UsageError(
                f"fixed_batch: expected 'local' or 'global', found {fixed_batch!r}"
            )
        self.fixed_batch: Literal["local", "global"] = fixed_batch
        # Not opened here: strategies copy the plugin into processes that they start.
        place = None if pool is None else portus.Place.parse(pool)
        self.run: Final = RunFiles(portus.Settings(**settings), place, model)
        """The files of the run, which the companion callback uses."""
        self.__setstate__({})

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        stock.adopt(type(self), load=True)
        portus.register_reference_loader()
        # Also after unpickling: a Trainer in that process needs the companion, too.
        INSTANCES.append(True)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object | None = None,
    ) -> None:
        """Save ``checkpoint`` to ``path``: in the background if a ``ModelCheckpoint`` of Lightning
        asks for it, else until the file exists.

        Lightning's own code saves to a URL. In a signal handler that interrupted Portus, such as
        Lightning's for SLURM, this writes the file at once. Raises ``UsageError`` for a value that
        cannot be pickled, with its place in the checkpoint; ``MediumError`` and others if the save
        cannot begin, or, if it blocks, failed.
        """
        local = stock.local_path(path)
        if local is None or storage_options is not None or not stock.is_on():
            stock.torch_io().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            self.run.save(checkpoint, local)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the checkpoint at ``path``, verified if Portus saved it. Waits for a save to it.

        If Lightning chose the path, and the file there is damaged, returns the newest intact one
        beside it, and logs that. The tensors are new, and on the CPU unless ``map_location`` names
        a device. Raises ``CorruptionError`` and the errors of ``torch.load``.
        """
        local = stock.local_path(path)
        # Lightning before 2.6 does not have this argument.
        more = {} if weights_only is None else {"weights_only": weights_only}
        if local is not None and not os.path.isdir(local):
            place = map_location if map_location is not None else "cpu"
            try:
                return self.run.load(local, map_location=place, **more)
            except FileNotFoundError:  # with Lightning's own message
                pass
        found: dict[str, Any] = stock.torch_io().load_checkpoint(path, map_location, **more)
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at ``path`` once the newest earlier save, or a later one, is
        committed. If none is, the checkpoint stays."""
        local = stock.local_path(path)
        if local is None or not self.run.remove(local):
            stock.torch_io().remove_checkpoint(path)

    def teardown(self) -> None:
        """Finish the saves in flight. Later saves return when they are durable.

        Raises the errors of failed saves, as ``on_error`` says, unless another error is already
        being raised.
        """
        # Lightning also calls this while it handles the error that ended training.
        ends_with_error = sys.exc_info()[0] is not None
        try:
            # Saves may still come, as of the module that ddp_spawn returns; nothing waits for them.
            self.run.end()
        except portus.PortusError as error:
            if not ends_with_error:
                raise
            _log.error("Portus: a save failed: %s", error)

    def wait(self) -> None:
        """Block until all saves are committed or failed; raises as ``Checkpointer.wait`` does."""
        self.run.wait()


# For LightningCLI, which asks about the class before it makes an instance.
stock.adopt(PortusIO, load=False)

INSTANCES: Final[deque[bool]] = deque(maxlen=1)
"""Not empty once this process has made a ``PortusIO``."""


_is_late: Final[ContextVar[bool | None]] = ContextVar("portus_is_late", default=None)
"""Whether training continues during a save, while a callback of the Trainer saves."""


class RunFiles:
    """The checkpoints of one run: it saves, loads and removes them. Copies and pickles have none of
    its open files.

    root: the Trainer's directory, if it is a local one. has_ended: saves block until they are
    durable.
    """

    def __init__(
        self,
        settings: portus.Settings,
        pool: portus.Place | None,
        model: str | None,
        root: str | None = None,
        *,
        has_ended: bool = False,
    ) -> None:
        self.settings: Final = settings
        self._pool: Final = pool
        self._model: Final = model
        self._guard: Final = threading.RLock()
        # Bounded: without a companion, as in Fabric, no code takes the statistics.
        self._handles: Final[deque[portus.SaveHandle]] = deque(maxlen=16)
        self._new_files()  # refuses invalid values now
        self._shards: PortusStorageWriter | None = None
        self.chosen: str | None = None
        """The checkpoint that Lightning chose to continue from: if it is damaged, another one of
        its directory will do."""
        self._directory: str | None = None
        self._counted: Final = itertools.count(1)
        self.begin(root)
        self._has_ended = has_ended
        if self._pool_at is not None:
            portus.allow(self._pool_at)  # every rank loads, and most never save

    def __reduce__(self) -> tuple[Callable[..., RunFiles], tuple[object, ...]]:
        made = partial(RunFiles, has_ended=self._has_ended)
        return made, (self.settings, self._pool, self._model, self._root)

    def begin(self, root: str | None) -> None:
        """Begin a Trainer's run: saves may be in the background. root: see the class."""
        self._root = root
        self._has_ended = False
        self._resumed_step: int | None = None
        self._saved: dict[str, None] = {}  # not removed since, oldest first

    def expect(self, directory: str, *, in_shards: bool) -> None:
        """Prepare for saves to ``directory`` at the start of training. in_shards: on every rank, so
        each sees its optimizers' steps before the first save. Raise the errors of opening a pool
        now, not at the first save, hours later."""
        if in_shards:
            self._opened_shards(directory)
            return
        self._directory = directory
        self._begin_files(directory)

    def fetch(self, root: str | None, directory: str, *, in_shards: bool) -> None:
        """Fetch the run of ``directory`` from its mirror if this machine lost it, before Lightning
        looks for a checkpoint there. Raises as ``portus.TrainingFiles.fetch``."""
        self._root, self._directory = root, directory
        run = self.run_of(directory)
        with contextlib.closing(self._new_files(of_directories=in_shards)) as files:
            files.fetch(run.name, run.links, directory)

    @contextlib.contextmanager
    def saving(self, *, is_late: bool) -> Iterator[None]:
        """Mark the saves of a callback of the Trainer: in the background, if ``is_late``."""
        token = _is_late.set(is_late)
        try:
            yield
        finally:
            _is_late.reset(token)

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Save ``checkpoint`` to ``path``. Blocks until it exists, unless within ``saving``."""
        step = _step_in(checkpoint)
        step = next(self._counted) if step is None else step
        try:
            with self._guard:  # AsyncCheckpointIO saves on its own thread, also while this closes
                needs_name = self.settings.has_mirror or self._pool_at is not None
                if needs_name and not self.files.has_begun:  # no callback gave the directory
                    self._begin_files(self._directory or os.path.dirname(path))
                handle = self.files.save(checkpoint, path, step)
                self._saved.pop(path, None)
                self._saved[path] = None
                self._handles.append(handle)
            is_late = _is_late.get()
            if self._has_ended or is_late is None:
                handle.wait()
            elif not is_late:
                handle.join()  # a failure is reported as on_error says
        finally:
            if self._has_ended:
                self._close()

    def why_no_shards(self) -> str:
        """Return why shards cannot go to the configured pool; "" if they can."""
        place = self._pool_at
        if place is None or place.is_shared:
            return ""
        return f"{place} is one pool; shards go to a directory, or to a storage host"

    def save_shards(
        self, shards: dict[str, Any], path: str, rest: dict[str, Any], *, is_first: bool
    ) -> None:
        """Start saving this rank's shards; the directory exists when this returns. Call it on every
        rank. rest: the part that is not sharded, which the first rank saves for all.

        Raises ``UsageError`` for a value that cannot be stored, on all ranks.
        """
        writer, step = self._opened_shards(os.path.dirname(path)), _step_in(rest)
        step = next(self._counted) if step is None else step
        files = {"meta.pt": rest} if is_first else {}
        is_last_chance = os.path.basename(path).startswith(_LAST_CHANCE)
        now = self._has_ended or is_last_chance or not _is_late.get()
        try:
            handle = writer.save(shards, path, files=files, blocking=now, step=step)
        except portus.UsageError:
            writer.wait()  # or a save in flight would replace the files of another writer
            raise
        self._handles.append(handle)
        if self._has_ended:
            self._close()

    def load(self, path: str, **options: Any) -> dict[str, Any]:
        """Return the checkpoint at ``path``, or if Lightning chose it, the newest intact one."""
        others = iter(_others(path) if self.is_chosen(path) else ())
        found = path
        while True:
            try:
                state: dict[str, Any] = portus.load(found, verify=self.settings.verify, **options)
            except portus.CorruptionError as error:  # all ranks find the same
                other = next(others, None)
                if other is None:
                    raise
                _log.error("Portus: %s; FALLING BACK to %s", error, other)
                found = other
            else:
                self._resumed_step = _step_in(state)
                return state

    def is_chosen(self, path: str) -> bool:
        """Return True if Lightning chose ``path``; only once."""
        # Once: a second load of the same path is the user's choice.
        chosen, self.chosen = self.chosen, None
        return path == chosen

    def is_there(self, path: str) -> bool:
        """Return whether a file exists, or will exist, at ``path``."""
        return self.files.is_there(path)

    def link(self, link: str, target: str) -> None:
        """Make ``link`` refer to ``target`` as soon as that exists. Raise ``OSError`` if links
        cannot be made."""
        (self._shards or self.files).link(link, target)

    def remove(self, path: str) -> bool:
        """Remove a checkpoint after the saves so far; return False if Lightning has to do it."""
        if os.path.isdir(path):
            if self._shards is not None:
                # By the writer that saves there: after a save that is complete (decision 0065).
                self._shards.remove(path)
            return self._shards is not None
        if not stock.is_on():
            return False
        with self._guard:
            self._saved.pop(path, None)
            if self.is_there(path) or os.path.islink(path):
                self.files.remove(path)
            if self._has_ended:
                self._close()
        return True

    def put_tables(self) -> None:
        """Put protected tables into this run's files after training, in place of references to the
        tables' pool. Errors are logged."""
        # A user's code may have removed some.
        for path in filter(os.path.isfile, list(self._saved)):
            try:
                self.files.fill_tables(path)
            except portus.PortusError as error:
                _log.error("Portus: %s has no tables: %s", path, error)
        self._close()

    def take_stats(self) -> list[portus.SaveStats]:
        """Return the statistics of the saves that were committed since the last call."""
        committed = []
        with contextlib.suppress(portus.UsageError):  # a save of the parent of this forked child
            while self._handles and self._handles[0].done:
                handle = self._handles.popleft()
                if handle.committed:
                    committed.append(handle.stats)
        return committed

    def wait(self) -> None:
        """Block until all saves are committed or failed; raises as ``Checkpointer.wait`` does."""
        self.files.wait()
        if self._shards is not None:
            self._shards.wait()

    def end(self) -> None:
        """Finish the saves in flight. Later saves return when they are durable. Raises the errors
        of failed saves, as ``on_error`` says."""
        self._has_ended = True
        self._close()

    def run_of(self, directory: str) -> portus.Run:
        """Return the run that saves checkpoints to ``directory``. Its ``.portus`` is in the
        Trainer's ``default_root_dir``, or in the working directory, and never among the
        checkpoints."""
        roots = [] if self._root is None else [os.path.abspath(self._root)]
        with contextlib.suppress(OSError):  # the working directory may be gone
            here = os.getcwd()
            if os.path.commonpath([here, directory]) == here:
                roots.append(here)
        return portus.Run.beside(
            directory,
            roots=roots,
            otherwise=os.path.dirname(directory),
            pool=self._pool,
            name=self._model,
        )

    @property
    def _pool_at(self) -> portus.Place | None:
        """Return the pool that a user named, now or by ``$PORTUS_POOL``."""
        return portus.Place.of_pool(self._pool)

    @cached_property
    def files(self) -> portus.TrainingFiles:
        """Return the files. Made at the first use: ``$PORTUS_POOL`` may be set by then."""
        return self._new_files()

    def _new_files(self, *, of_directories: bool = False) -> portus.TrainingFiles:
        return portus.TrainingFiles(
            self.settings,
            of_directories=of_directories,
            pool=self._pool_at,
            is_named=self._model is not None,
        )

    def _begin_files(self, directory: str) -> None:
        run = self.run_of(directory)
        self.files.begin(run.name, run.links, directory, self._resumed_step)

    def _opened_shards(self, directory: str) -> PortusStorageWriter:
        """Return the writer of this rank's shards, for checkpoints in ``directory``. Call it on
        every rank, with the same directory. Raises the errors of opening a pool."""
        if self._shards is None:
            from portus.dcp import PortusStorageWriter

            run = self.run_of(directory)
            settings: Any = dataclasses.asdict(self.settings)
            self._shards = PortusStorageWriter(
                model=run.name, links=run.links, pool=self._pool_at, **settings
            )
        return self._shards

    def _close(self) -> None:
        # A stack: if one fails to close, the other is still closed.
        with self._guard, contextlib.ExitStack() as closing:
            closing.callback(self.files.close)
            if self._shards is not None:
                closing.callback(self._shards.close)
            self._shards = None


def _step_in(checkpoint: object) -> int | None:
    found = checkpoint if isinstance(checkpoint, dict) else {}
    steps = (found.get(key) for key in _STEP_KEYS)
    return next((step for step in steps if isinstance(step, int)), None)


def _others(path: str) -> Iterable[str]:
    """Return the other checkpoints of the directory, newest first."""
    directory, suffix = os.path.dirname(path), os.path.splitext(path)[1]
    real, found = os.path.realpath(path), {}
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for each in entries:
            # `last` may be a link to the damaged one, which would be tried twice.
            is_other = each.name.endswith(suffix) and os.path.realpath(each.path) != real
            with contextlib.suppress(OSError):
                if is_other and each.is_file(follow_symlinks=False):
                    found[each.path] = each.stat().st_mtime_ns
    return sorted(found, key=found.__getitem__, reverse=True)
