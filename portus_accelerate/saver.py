"""``Saver``: the link between one ``Accelerator`` and its checkpoints.

Each process publishes its own files: the main one all but the random states of the others. Its
files in a directory appear in one step, with its random states; so a directory without the main
process's random states was never complete.

With a pool the files of the main process are pointers to it: files of torch, which ``torch.load``
follows. Weights in safetensors become files of torch for that; or they stay files, which exist
before the pointers.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import portus
from portus_accelerate import data, deepspeed, fsdp, resume
from portus_accelerate.capture import Capture, capturing, torch_name
from portus_accelerate.deepspeed import gather_engine_files
from portus_accelerate.directories import RANDOM, note, roots, step_of, surplus, why_incomplete
from portus_accelerate.files import CheckpointFiles
from portus_accelerate.loading import StateLoader, Stock
from portus_accelerate.settings import ACCELERATE, Settings

_log: Final = logging.getLogger("portus_accelerate")

SAVER: Final = "_portus_saver"
"""The attribute of an ``Accelerator`` with its Saver."""

_CADENCE: Final = "cadence"
"""The key of the cadence beside the positions in data, in the file of random states."""

_BYPASSES: Final = {"MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}

_STATS_MAX: Final = 256
"""The number of saves whose cost is kept for the trackers, if a script seldom logs."""


class Saver:
    """Saves and loads for one ``Accelerator``. Its methods are called on every process."""

    def __init__(self, accelerator: Any, settings: Settings) -> None:
        """Prepare for ``accelerator``: repair what a killed run left, before the script looks."""
        self._accelerator: Final = accelerator
        self.training: Final = data.Training(accelerator)
        self.settings: Final = settings
        self._is_writer: Final = _is_writer(accelerator)
        self._count = 0
        self.has_saved = False
        """Whether this training saved a whole checkpoint."""
        self._handles: Final[deque[portus.SaveHandle]] = deque()
        self.logged: tuple[Any] | None = None
        """The step that the script logged last; None until it logs."""
        self._stats: Final[deque[portus.SaveStats]] = deque(maxlen=_STATS_MAX)
        self._over = False
        self._cadence: portus.Cadence | None = None
        self._preemption: portus.Preemption | None = None
        if settings.pool is not None:
            portus.allow(settings.pool)  # every process loads, and before any save
        self._files: Final = CheckpointFiles(accelerator, settings, is_writer=self._is_writer)
        self.loader: Final = StateLoader(accelerator, self._files, settings)
        if self.is_on():
            self.loader.fetch_named()
            self._files.prepare(roots(accelerator.project_dir))

    def __reduce__(self) -> tuple[Callable[[Settings], Settings], tuple[Settings]]:
        return copy.copy, (self.settings,)  # a copy of the Accelerator needs its own Saver

    def is_on(self) -> bool:
        """Return False if checkpoints are left to Accelerate."""
        if ACCELERATE.saves_itself():
            return False
        kind = getattr(self._accelerator.distributed_type, "value", "")
        what = _BYPASSES.get(kind)
        if kind == "DEEPSPEED" and self.settings.pool_at is not None:
            what = "DeepSpeed, with a pool,"
        kind = fsdp.kind_of(self._accelerator)
        if kind not in (None, fsdp.SHARDED, fsdp.FULL):
            what = f"FSDP with {kind}"
        if what is not None:
            ACCELERATE.say_once(
                f"checkpoints under {what} do NOT go through Portus: Accelerate itself writes "
                "them. They are as safe and as fast as without Portus"
            )
        return what is None

    def cadence(self) -> portus.Cadence:
        """Return the cadence of the script's loop, from the first call on."""
        if self._cadence is None:
            said = self.settings
            every = "auto" if said.every is None else said.every
            self._cadence = portus.Cadence.create(
                ACCELERATE, every, said.max_overhead, said.mtbf, is_seen=self.is_on()
            )
        return self._cadence

    def should_leave(self) -> bool:
        """Return whether the script's loop should save and leave; signals are handled from the
        first call on."""
        if self._preemption is None:
            within = self.settings.preempt_within
            signals = () if within == "none" else portus.Preemption.SIGNALS
            seconds = 60.0 if within == "none" else within
            self._preemption = portus.Preemption(seconds, signals=signals).start()
        return self._preemption.should_leave()

    def save_state(self, stock: Stock, directory: str | None) -> Any:
        """Start to save the files that ``stock`` would write. The directory exists at the return.

        directory: the script's argument, for ``stock``; None if Accelerate chooses the name.
        """
        project, asked = self._accelerator.project_configuration, directory
        if project.automatic_checkpoint_naming:
            above = os.path.join(self._accelerator.project_dir, "checkpoints")
            directory = os.path.join(above, f"checkpoint_{project.iteration}")
        if directory is None:
            return stock(asked)  # Accelerate raises its error
        named = os.path.abspath(directory)
        # Stock removes the oldest before it saves: with a limit of 1 there is none for a while, and
        # none stays if the save fails.
        limit, project.total_limit = project.total_limit, None
        try:
            with self._saving(named, self._add_positions, limit if self._is_writer else None):
                return self._into(stock, asked, named)
        finally:
            project.total_limit = limit

    @contextlib.contextmanager
    def saving_whole(
        self, directory: str, add: Callable[[Capture], object], pooled: re.Pattern[str]
    ) -> Iterator[None]:
        """Save a checkpoint that every process writes inside, as ``save_state`` does. Old ones that
        are removed there go after the commit. add: adds our values to the capture. pooled: the
        files that go to the pool, if there is one."""
        directory = os.path.abspath(directory)
        if not portus.is_nested():
            self._files.wait()  # the times of directories identify old ones
        with contextlib.suppress(OSError):
            os.utime(directory)  # a cut-off one is the newest from now on
        self.has_saved = True
        with self._saving(directory, add, pooled=pooled):
            yield

    @contextlib.contextmanager
    def _saving(
        self,
        directory: str,
        add: Callable[[Capture], object],
        limit: int | None = None,
        pooled: re.Pattern[str] | None = None,
    ) -> Iterator[None]:
        """Save the files that this thread would write into ``directory`` inside of a ``with``. add:
        adds our values to the capture. limit: of the checkpoints beside it; older ones are removed
        then. pooled: the files that go to the pool as they are; None: all, as files of torch."""
        self._count += 1
        run, number = self._files.begin(directory), step_of(directory)
        step = self._count if number is None else number
        handles: list[portus.SaveHandle] = []

        def save(*, now: bool) -> None:
            add(capture)
            parts, removed = dict(capture.parts), list(capture.removed)
            # A push asks for them in the middle (`flush`): these are not saved again at the end.
            capture.parts.clear()
            capture.removed.clear()
            said = note(run.name, step)
            if self._files.pool is not None and self._is_writer:
                parts, files = _for_pool(parts, pooled)
                if files:
                    shards.append(self._files.plain.save_directory(directory, files, step, said))
            if parts:
                # The main process's files make a directory a checkpoint, so they come last
                # (decision 0210).
                ready = partial(_all_committed, directory, shards)
                handles.append(
                    self._files.files.save_directory(directory, parts, step, said, ready)
                )
            # Queued behind the save: they go once it, or a later one, commits (decision 0065).
            for old in (
                *_twins(directory, parts),
                *removed,
                *surplus(directory, limit),
            ):
                self._files.files.remove(old)
            if now and handles:
                handles[-1].wait()

        now = self._over or self.settings.blocking or _is_temporary(directory)
        if fsdp.kind_of(self._accelerator) == fsdp.SHARDED and not portus.is_nested():
            parts_of_ranks = fsdp.saving(self._files.opened_shards(directory), step, now=now)
        else:
            parts_of_ranks = gather_engine_files(os.path.dirname(run.links), now=now)
        with capturing(directory) as capture, parts_of_ranks as shards:
            capture.flush = lambda: save(now=True)
            yield
        save(now=now)
        if handles:  # of saves that have ended keep only their cost
            self._stats.extend(self.take_stats())
            self._handles.append(handles[-1])
        if self._over:
            self._files.close()

    def _into(self, stock: Stock, asked: str | None, directory: str) -> Any:
        """Have ``stock`` save, even if a save to this directory was cut off: Accelerate refuses an
        existing directory of its own naming."""
        project = self._accelerator.project_configuration
        is_cut_off = directory in self.loader.passed_over or why_incomplete(directory)
        if not (project.automatic_checkpoint_naming and is_cut_off):
            return stock(asked)
        project.automatic_checkpoint_naming = False
        try:
            self._accelerator.wait_for_everyone()  # as stock does once it has chosen the name
            return stock(directory)
        finally:
            project.automatic_checkpoint_naming = True

    def keep_out_of(self, directory: str) -> None:
        """Put no pool into ``directory``, all of which is uploaded, unless a pool was named."""
        self._files.uploaded = os.path.abspath(directory)

    def begin(self, output: str) -> None:
        """Begin a training that saves into ``output``: repair the files there."""
        self._over = self.has_saved = False
        self._files.prepare([os.path.abspath(output)])

    def follow_data(self) -> None:
        """Follow the prepared loaders from now on."""
        if self.is_on():
            for each in self._accelerator._dataloaders:
                count, fixed = self._accelerator.num_processes, self.settings.fixed_batch
                data.follow(each, count, fixed, self.training)

    def wait(self) -> None:
        """Return when all saves are committed, or failed; report failures as ``on_error`` says."""
        for files in self._engines():
            files.wait()
        self._files.wait()

    def _engines(self) -> list[deepspeed.EngineFiles]:
        """Return the files of DeepSpeed's engines."""
        found = [deepspeed.files_of(each) for each in self._accelerator._models]
        return [each for each in found if each is not None]

    def take_stats(self, *, wait: bool = False) -> list[portus.SaveStats]:
        """Return the statistics of this process's saves that were committed since the last call.
        wait: for those in flight too, without their errors."""
        with contextlib.suppress(portus.UsageError):  # a save of the parent of this forked child
            while self._handles and (wait or self._handles[0].done):
                handle = self._handles.popleft()
                handle.join()
                if handle.committed:
                    self._stats.append(handle.stats)
        committed = list(self._stats)
        self._stats.clear()
        return committed

    def after_load(self, directory: str) -> None:
        """Resume data and the cadence from ``directory``, after Accelerate restored its generators.
        Raises errors of these states, which Accelerate ignores."""
        saved = self.loader.go_back(directory)
        if saved and saved.get(_CADENCE) is not None:
            self.cadence().load_state_dict(saved[_CADENCE])

    def leave(self) -> None:
        """Finish the saves in flight as training ends with an error, which matters more; report
        their own errors."""
        try:
            self._files.close()
        except portus.PortusError as error:
            _log.warning("Portus: a save failed: %s", error)

    def finish(self) -> None:
        """Finish the saves in flight, or report them, as training ends. Later saves are durable
        when they return."""
        preemption, self._preemption = self._preemption, None
        with preemption or contextlib.nullcontext():  # whatever fails, signals are restored
            self._over = True
            self._cadence = None
            for files in self._engines():
                files.close()
            self._files.close()

    def _add_positions(self, capture: Capture) -> None:
        """Add this process's positions in data, and the cadence, to its generators."""
        states = capture.parts.get(RANDOM.format(self._accelerator.process_index))
        if isinstance(states, dict):
            # Accelerate's file of them has one name for all processes: it has those of one.
            with_states = not self._is_writer
            states[resume.KEY] = resume.positions(self._accelerator, with_states=with_states)
            if self._cadence is not None:
                states[resume.KEY][_CADENCE] = self._cadence.state_dict()


def _is_writer(accelerator: Any) -> bool:
    """Return True in the process that saves the common files, once, or once for each node."""
    state = accelerator.state
    if not accelerator.project_configuration.save_on_each_node:
        return bool(state.process_index == 0)
    return bool(state.local_process_index == 0)


def saver_of(accelerator: Any) -> Saver | None:
    """Return the Saver of ``accelerator``; None if Accelerate saves."""
    found = saver_for(accelerator)
    return found if found is not None and found.is_on() else None


def saver_for(accelerator: Any) -> Saver | None:
    """Return the Saver of ``accelerator``, which may leave all saves to Accelerate; None if Portus
    was not turned on."""
    found = accelerator.__dict__.get(SAVER)
    if isinstance(found, Settings):  # the accelerator was copied, or pickled
        found = Saver(accelerator, found)
        setattr(accelerator, SAVER, found)
    return found if isinstance(found, Saver) else None


def save_state(
    stock: Callable[..., Any],
    accelerator: Any,
    output_dir: Any = None,
    safe_serialization: bool = True,
    **named: Any,
) -> Any:
    """Save as ``Accelerator.save_state``, through Portus."""
    saver = saver_of(accelerator)
    if saver is None:
        return stock(accelerator, output_dir, safe_serialization, **named)
    chosen = None if output_dir is None else os.fspath(output_dir)
    as_asked = partial(stock, accelerator, safe_serialization=safe_serialization, **named)
    return saver.save_state(as_asked, chosen)


def _for_pool(
    parts: Mapping[str, Any], pooled: re.Pattern[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the files of a checkpoint that go to the pool, all of them of torch, and those that
    stay files."""
    if pooled is not None:
        there = {name: part for name, part in parts.items() if pooled.fullmatch(name)}
        return there, {name: part for name, part in parts.items() if name not in there}
    return {
        torch_name(name): part.tensors if isinstance(part, portus.Safetensors) else part
        for name, part in parts.items()
    }, {}


def _all_committed(directory: str, shards: Sequence[portus.SaveHandle]) -> None:
    """Raise ``AbandonedError`` if other files of this checkpoint could not be saved: on the worker,
    after these saves."""
    if not all(each.committed for each in shards):
        raise portus.AbandonedError(
            f"{directory}: save given up: other files of it could not be saved"
        )


def _twins(directory: str, names: Iterable[str]) -> list[str]:
    """Return older safetensors weights in ``directory``, which a load would prefer."""
    twins = [
        name.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        for name in names
        if name.startswith("pytorch_model") and name.endswith(".bin")
    ]
    paths = [os.path.join(directory, name) for name in twins]
    return [path for path in paths if os.path.exists(path)]


def _is_temporary(directory: str) -> bool:
    """Return True for a directory made by ``tempfile``: its owner will upload or move it soon."""
    top = os.path.realpath(tempfile.gettempdir())
    below = os.path.relpath(os.path.realpath(directory), top).split(os.sep)
    return below[0].startswith(tempfile.gettempprefix())
