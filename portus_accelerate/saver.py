"""``Saver``: what stands between one ``Accelerator`` and its checkpoints.

Checkpoints are directories of files (``CheckpointFiles``), also where a pool has the bytes of the
files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from accelerate.utils import broadcast_object_list, gather_object, other

import portus
from portus_accelerate import data, deepspeed, pacing, place, resume, sharded
from portus_accelerate.capture import Capture, verifying
from portus_accelerate.engine_files import EngineFiles
from portus_accelerate.files import CheckpointFiles
from portus_accelerate.newest import RANDOM, why_incomplete
from portus_accelerate.origin import of_others, origin_of, saying_of_what
from portus_accelerate.settings import ACCELERATE, Settings

if TYPE_CHECKING:
    pass

_log: Final = logging.getLogger("portus_accelerate")

_CADENCE: Final = "cadence"
"""Where it is beside the positions in data, in the file of random states."""

_BYPASSES: Final = {
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "XLA",
}


_STATS_MAX: Final = 256
"""Saves whose cost is kept for the trackers, where a script logs seldom or never."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """What becomes of a ``Saver`` in a copy or a pickle of its ``Accelerator``: who uses that one
    needs a Saver of its own, and pools go into no pickle."""

    settings: Settings


class Saver:
    """Saves and loads for one ``Accelerator``. Its methods are called on every process."""

    def __init__(self, accelerator: Any, settings: Settings) -> None:
        """Puts in order what a killed run left, before the script looks for checkpoints."""
        self._accelerator: Final = accelerator
        its = weakref.ref(accelerator)  # who follows a loader may outlive it
        self.training: Final = data.Training(lambda: getattr(its(), "_models", ()))
        self._settings: Final = settings
        self._is_writer: Final = _is_writer(accelerator)
        self._count = 0
        self._has_saved = False
        self._goes_on_from: str | None = None
        """The own checkpoint that this training goes on from, on the same process."""
        self._uploaded: str | None = None
        self._handles: Final[deque[portus.SaveHandle]] = deque()
        self.logged: tuple[Any] | None = None
        """The step that the script logged last; None until it logs."""
        self._stats: Final[deque[portus.SaveStats]] = deque(maxlen=_STATS_MAX)
        self._over = False
        self._cadence: portus.Cadence | None = None
        self._preemption: portus.Preemption | None = None
        if settings.pool is not None:
            portus.allow(settings.pool)  # every process loads, and before anything was saved
        self._made_files: CheckpointFiles | None = None
        self._passed_over: Final[set[str]] = set()
        """Checkpoints that not all processes had saved, or that are damaged."""
        if self.is_on():
            self._fetch_named()
            self._files.prepare(place.roots(accelerator.project_dir))

    def __reduce__(self) -> tuple[type[Pickled], tuple[Settings]]:
        return Pickled, (self._settings,)

    @property
    def settings(self) -> Settings:
        """What the user said."""
        return self._settings

    def is_on(self) -> bool:
        """False where checkpoints are left to Accelerate."""
        if ACCELERATE.saves_itself():
            return False
        kind = getattr(self._accelerator.distributed_type, "value", "")
        what = _BYPASSES.get(kind)
        if kind == "DEEPSPEED" and self._pool_at is not None:
            what = "DeepSpeed, with a pool,"
        kind = sharded.kind_of(self._accelerator)
        if kind not in (None, sharded.SHARDED, sharded.FULL):
            what = f"FSDP with {kind}"
        if what is not None:
            ACCELERATE.say_once(
                f"checkpoints under {what} do NOT go through Portus: Accelerate writes them by "
                "itself. They are as safe and as fast as without Portus"
            )
        return what is None

    @property
    def _files(self) -> CheckpointFiles:
        if self._made_files is None:
            self._made_files = CheckpointFiles(
                self._settings, self._run_of, is_writer=self._is_writer
            )
        return self._made_files

    @property
    def _pool_at(self) -> portus.Place | None:
        """The pool, on a device or on storage hosts, that the user named; None: there is none."""
        return self._settings.pool_at

    def cadence(self) -> portus.Cadence:
        """When the loop of the script saves, from the first call on."""
        if self._cadence is None:
            said = self._settings
            every = "auto" if said.every is None else said.every
            self._cadence = pacing.made(every, said.max_overhead, said.mtbf, is_seen=self.is_on())
        return self._cadence

    def should_leave(self) -> bool:
        """Whether the loop of the script is to save and leave; signals are heard from the first
        call on."""
        if self._preemption is None:
            within = self._settings.preempt_within
            signals = () if within == "none" else portus.Preemption.SIGNALS
            seconds = 60.0 if within == "none" else within
            self._preemption = portus.Preemption(seconds, signals=signals).start()
        return self._preemption.should_leave()

    def save_state(self, stock: Callable[[str | None], Any], directory: str | None) -> Any:
        """Start to save what ``stock`` would write; the directory is there when this returns.

        directory: what the script asked for, and ``stock`` is given; None where Accelerate makes
        the name.
        """
        project, asked = self._accelerator.project_configuration, directory
        if project.automatic_checkpoint_naming:
            above = os.path.join(self._accelerator.project_dir, "checkpoints")
            directory = os.path.join(above, f"checkpoint_{project.iteration}")
        if directory is None:
            return stock(asked)  # Accelerate says what is wrong
        directory = os.path.abspath(directory)
        limit, project.total_limit = project.total_limit, None
        try:
            return self._save_as_files(stock, asked, directory, limit)
        finally:
            project.total_limit = limit

    def _save_as_files(
        self,
        stock: Callable[[str | None], Any],
        asked: str | None,
        directory: str,
        limit: int | None,
    ) -> Any:
        is_main = self._is_writer
        location, handle = self._files.save(
            lambda: self._into(stock, asked, directory),
            directory,
            self._step_of(directory),
            self._random_states,
            lambda: place.surplus(directory, limit) if is_main else [],
            now=self._over,
            is_sharded=self._is_sharded() and not portus.is_nested(),
        )
        self._note(handle)
        if self._over:
            self._files.close()
        return location

    def save_whole(
        self,
        stock: Callable[[], Any],
        directory: str,
        add: Callable[[Capture], object],
        is_pooled: Callable[[str], bool],
    ) -> None:
        """Save a checkpoint that every process writes by ``stock``, as ``save_state`` does. Old
        ones that ``stock`` removes go after the commit. add, is_pooled: as of
        ``CheckpointFiles.save``."""
        directory = os.path.abspath(directory)
        if not portus.is_nested():
            self._files.wait()  # old ones are told by the times of directories
        with contextlib.suppress(OSError):
            os.utime(directory)  # one that was cut off is the newest from now on
        self._goes_on_from = None
        _, handle = self._files.save(
            stock,
            directory,
            self._step_of(directory),
            add,
            list,
            now=self._over,
            is_sharded=self._is_sharded() and not portus.is_nested(),
            is_pooled=is_pooled,
        )
        self._note(handle)

    def agreed(self, paths: list[str], is_good: Callable[[str], bool]) -> str | None:
        """The first of ``paths``, as the main process says them, that all processes find good."""
        said = self._as_main_says(paths)
        return next((path for path in said if all(gather_object([is_good(path)]))), None)

    def _as_main_says(self, paths: list[str]) -> list[str]:
        """Return the paths of the main process on all processes, which may see names come and go at
        other moments."""
        said = [paths]
        if self._accelerator.num_processes > 1:
            broadcast_object_list(said)
        return said[0]

    def _into(self, stock: Callable[[str | None], Any], asked: str | None, directory: str) -> Any:
        """Have ``stock`` save, even if a save to this directory was cut off: Accelerate refuses a
        name of its own that is taken."""
        project = self._accelerator.project_configuration
        is_cut_off = directory in self._passed_over or why_incomplete(directory)
        if not (project.automatic_checkpoint_naming and is_cut_off):
            return stock(asked)
        project.automatic_checkpoint_naming = False
        try:
            self._accelerator.wait_for_everyone()  # as it does once it has chosen the name
            return stock(directory)
        finally:
            project.automatic_checkpoint_naming = True

    def keep_out_of(self, directory: str) -> None:
        """All that is in ``directory`` is uploaded: no pool in it, unless one was named."""
        self._uploaded = os.path.abspath(directory)

    def begin(self, directory: str) -> None:
        """A training starts that saves beside ``directory``: put in order what is there."""
        self._over = False
        self._files.prepare([os.path.dirname(os.path.abspath(directory))])

    def goes_on_from(self, directory: str) -> None:
        """The training that begins goes on from its own checkpoint ``directory``."""
        if self._is_writer:
            self._goes_on_from = os.path.abspath(directory)

    @property
    def saved_nothing_since(self) -> bool:
        """True if this training went on from a checkpoint, and saved none since; on the process
        that saves them."""
        return self._goes_on_from is not None and not self._has_saved

    def follow_data(self) -> None:
        """Know where the prepared loaders are from now on."""
        if self.is_on():
            for each in self._accelerator._dataloaders:
                count, fixed = self._accelerator.num_processes, self._settings.fixed_batch
                data.follow(each, count, fixed, self.training)

    def wait(self) -> None:
        """Return when all saves are committed, or failed; a failure is reported as ``on_error``
        says."""
        for files in self._engines():
            files.wait()
        if self._made_files is not None:
            self._made_files.wait()

    def _engines(self) -> list[EngineFiles]:
        """What saves the engines of DeepSpeed."""
        found = [deepspeed.files_of(each) for each in self._accelerator._models]
        return [each for each in found if each is not None]

    def take_stats(self, *, wait: bool = False) -> list[portus.SaveStats]:
        """What the saves of this process cost that were committed since the last call. wait: for
        those in flight too; raises nothing of theirs."""
        while self._handles and (wait or self._handles[0].done):
            handle = self._handles.popleft()
            handle.join()
            if handle.committed:
                self._stats.append(handle.stats)
        committed = list(self._stats)
        self._stats.clear()
        return committed

    def _note(self, handle: portus.SaveHandle | None) -> None:
        """Keep the handle of a save; of saves that have ended keep only their cost."""
        if handle is None:
            return
        self._has_saved = True
        self._stats.extend(self.take_stats())
        self._handles.append(handle)

    def _drain(self) -> None:
        if self._made_files is not None:
            self._made_files.wait()

    def load_state(self, stock: Callable[[str | None], Any], directory: str | None) -> Any:
        """Let ``stock`` load a directory. If none is named, the newest that can be loaded."""
        stock = saying_of_what(stock, self._accelerator.process_index)
        self._drain()
        project = self._accelerator.project_configuration
        if directory is not None or not project.automatic_checkpoint_naming:
            return self._load(stock, directory)
        above = os.path.join(self._accelerator.project_dir, "checkpoints")
        self._fetch_named()
        if os.path.isdir(above):
            self._files.prepare([above])
        candidates = self._as_main_says(place.numbered(above)[::-1] if os.path.isdir(above) else [])
        failed: tuple[str, portus.PortusError] | None = None
        for candidate in self._most_complete_first(candidates):
            if failed is not None:
                _log.error("Portus: %s; FALLING BACK to %s", failed[1], candidate)
                self._passed_over.add(failed[0])  # training will save there again
            try:
                found = self._load(stock, candidate)
            except (portus.CorruptionError, portus.UsageError) as error:
                failed = candidate, error
            else:
                self._passed_over.discard(candidate)
                return found
        if failed is not None:
            raise failed[1]
        return self._load(stock, None)

    def _most_complete_first(self, candidates: Sequence[str]) -> Iterator[str]:
        """Yield the directories that all processes saved, and then the others. The same on all."""
        lacking = []
        for candidate in candidates:
            if self._has_all_processes(candidate):
                yield candidate
                continue
            _log.error("Portus: %s: not all processes saved it before they were killed", candidate)
            self._passed_over.add(candidate)
            lacking.append(candidate)
        yield from lacking

    def _has_all_processes(self, directory: str) -> bool:
        """Return whether every process finds its random states, if there were as many as now. The
        same on all."""
        if why_incomplete(directory):
            return True  # whoever loads it says what it is
        count, index = self._accelerator.num_processes, self._accelerator.process_index
        try:
            saved = (_positions_in(directory, 0) or {}).get("processes")
        except portus.PortusError:
            saved = None
        own = os.path.join(directory, RANDOM.format(index))
        return all(gather_object([saved != count or os.path.exists(own)]))

    def after_load(self, directory: str) -> None:
        """Accelerate has restored the generators from ``directory``: let data go on from there.

        Raises what is wrong with them, which Accelerate passes over.
        """
        count = self._accelerator.num_processes
        own = _positions_in(directory, self._accelerator.process_index)
        of_main = _positions_in(directory, 0)
        self._say_of_others(directory, own, of_main)
        if of_main and (own is None or of_main.get("processes", count) != count):
            own = of_main  # where the data is, all processes say alike
        resume.go_back(self._accelerator, own, of_main or own)
        if own and own.get(_CADENCE) is not None:
            self.cadence().load_state_dict(own[_CADENCE])

    def leave(self) -> None:
        """Training ends with an error, which matters more: finish what is in flight, and say what
        is wrong with that."""
        with _saying("a save failed"):
            if self._made_files is not None:
                self._made_files.close()

    def finish(self) -> None:
        """Training ends: what is in flight ends too, or is reported. Later saves are durable when
        they return."""
        preemption, self._preemption = self._preemption, None
        with preemption or contextlib.nullcontext():  # whatever fails, signals are given back
            self._over = True
            self._cadence = None
            for files in self._engines():
                files.close()
            if self._made_files is not None:
                self._made_files.close()
            self._goes_on_from = None

    # Saving.

    def _step_of(self, directory: str) -> int:
        """The number in its name, else how many were saved."""
        self._count += 1
        number = place.step_of(directory)
        return self._count if number is None else number

    def _random_states(self, capture: Capture) -> dict[str, Any]:
        """Return this process's generators and positions in data, by file name. The capture has
        them too."""
        own = capture.parts
        name = f"random_states_{self._accelerator.process_index}.pkl"
        if isinstance(own.get(name), dict):
            states = not self._is_writer
            own[name][resume.KEY] = resume.positions(self._accelerator, with_states=states)
            if self._cadence is not None:
                own[name][resume.KEY][_CADENCE] = self._cadence.state_dict()
        return {name: own[name]} if name in own else {}

    def _is_sharded(self) -> bool:
        return sharded.kind_of(self._accelerator) == sharded.SHARDED

    def _run_of(self, directory: str) -> portus.Run:
        """The run that saves the checkpoint ``directory``; nothing of it is opened."""
        project = self._accelerator.project_dir
        return place.run_of(directory, self._settings, project, self._uploaded)

    # Loading.

    def _load(self, stock: Callable[[str | None], Any], directory: str | None) -> Any:
        if directory is None:
            return stock(directory)
        directory = os.path.abspath(directory)
        self._fetch_if_lost(directory, is_here=os.path.exists(directory))
        return self._files.load(stock, directory, is_sharded=self._is_sharded())

    def fetch_checkpoints(self, output: str) -> None:
        """Fetch what the mirror has of a run that this machine lost, before ``Trainer`` looks for a
        checkpoint in ``output``. On every process. Raises as ``portus.TrainingFiles.fetch``."""
        if not self._settings.has_mirror:
            return
        directory = os.path.join(os.path.abspath(output), "checkpoint-0")
        try:
            self._files.fetch(directory)
        finally:
            self._accelerator.wait_for_everyone()

    def _fetch_named(self) -> None:
        """Fetch checkpoints of automatic naming, if none is here, before anybody looks for them."""
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming and self._accelerator.project_dir is not None:
            above = os.path.join(os.path.abspath(self._accelerator.project_dir), "checkpoints")
            self._fetch_if_lost(os.path.join(above, "checkpoint_0"), is_here=os.path.isdir(above))

    def _fetch_if_lost(self, directory: str, *, is_here: bool) -> None:
        """``_fetch``, if it is not here for every process. All have looked before anybody fetches;
        without a mirror they do not wait for each other."""
        if self._settings.has_mirror and not all(gather_object([is_here])):
            self._fetch(directory)

    def _fetch(self, directory: str) -> None:
        """The checkpoint ``directory`` is not here: fetch what the mirror has of the run. On every
        process. Raises as ``portus.TrainingFiles.fetch``."""
        if not self._settings.has_mirror:
            return
        try:
            self._files.fetch(directory)
        finally:
            self._accelerator.wait_for_everyone()

    def _say_of_others(self, directory: str, own: Any, of_main: Any) -> None:
        """Warn if this process does not go on where it was."""
        origin, state = origin_of(directory), self._accelerator
        saved = own or of_main
        if origin is None or (saved and "processes" not in saved):  # saved by an older Portus
            return
        count = saved["processes"] if saved else None
        if own is None and count == state.num_processes:
            count = None
        said = of_others(origin, state.process_index, count, state.num_processes)
        if said is not None:
            _log.warning("Portus: %s", said)


def _positions_in(directory: str, process: int) -> Any:
    """What a process saved beside its generators; None if there is none, or nobody can tell."""
    path = os.path.join(directory, f"random_states_{process}.pkl")
    states: Any = None
    if os.path.isfile(path):
        try:
            with verifying():
                states = (other.load if hasattr(other, "load") else portus.load)(path)
        except portus.PortusError:
            raise
        except Exception:  # stock Accelerate goes on without it, too
            _log.debug("Portus: %s cannot be loaded", path, exc_info=True)
    return states.get(resume.KEY) if states else None


def _is_writer(accelerator: Any) -> bool:
    """True in the process that saves what is saved once, or once for each node."""
    state = accelerator.state
    if not accelerator.project_configuration.save_on_each_node:
        return bool(state.process_index == 0)
    return bool(state.local_process_index == 0)


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    """What goes wrong inside does no harm that matters to a training: it is said, with ``what``
    comes of it, and training goes on."""
    try:
        yield
    except portus.PortusError as error:
        _log.warning("Portus: %s: %s", what, error)
