"""``Saver``: what stands between one ``Accelerator`` and its checkpoints.

A checkpoint directory is one version in the pool: a dict from file name to content. At each file's
name in the directory is a reference to its part, which ``torch.load`` follows, Accelerate's own
``load_state`` too. So a checkpoint is there as a whole or not at all, whichever process dies when.
"""

from __future__ import annotations

import contextlib
import logging
import numbers
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate.utils import broadcast_object_list, gather_object, other

import portus
from portus_accelerate import data, deepspeed, intent, pacing, place, resume, sharded
from portus_accelerate.beside import KEY, gathered, put_back
from portus_accelerate.capture import Capture, capturing, torch_name, verifying
from portus_accelerate.cut_off import CutOff
from portus_accelerate.ending import Ending
from portus_accelerate.engine_files import EngineFiles
from portus_accelerate.files import CheckpointFiles
from portus_accelerate.newest import RANDOM, why_incomplete
from portus_accelerate.origin import has_references, of_others, origin_of, saying_of_what
from portus_accelerate.peers import Peers
from portus_accelerate.settings import ACCELERATE, Settings

if TYPE_CHECKING:
    from portus.dcp import GroupWriter

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
        self._peers: Final = _peers_of(accelerator)
        self._run: portus.Run | None = None
        self._count = 0
        self._ending: Final = Ending(settings)
        self._loaded: str | None = None
        """Of a training that saves whole directories, on the process that does."""
        self._goes_on_from: str | None = None
        """The own checkpoint that this training goes on from, on the same process."""
        self._uploaded: str | None = None
        self._deferred: list[tuple[portus.SaveHandle | None, list[Callable[[], Any]]]] = []
        self._cut_off: Final = CutOff(
            accelerator, self._run_of, settings.pool, is_writer=self._peers.is_writer
        )
        self._handle: portus.SaveHandle | None = None
        self._handles: Final[deque[portus.SaveHandle]] = deque()
        self.logged: tuple[Any] | None = None
        """The step that the script logged last; None until it logs."""
        self._stats: Final[deque[portus.SaveStats]] = deque(maxlen=_STATS_MAX)
        self._metrics: dict[str, float] = {}
        self._over = False
        self._watch: portus.PoolCheckpointer | None = None
        self._shards: GroupWriter | None = None
        self._cadence: portus.Cadence | None = None
        self._preemption: portus.Preemption | None = None
        if settings.pool is not None:
            portus.allow(settings.pool)  # every process loads, and before anything was saved
        self._made_files: CheckpointFiles | None = None
        self._passed_over: Final[set[str]] = set()
        """Checkpoints that not all processes had saved, or that are damaged."""
        if self.is_on():
            if self.writes_files:
                if settings.keep != portus.Keep(last=1):
                    raise portus.UsageError(
                        "keep: checkpoints are files, and total_limit (save_total_limit) says "
                        "which of them stay; leave keep out"
                    )
                self._fetch_named()
                self._files.prepare(place.roots(accelerator.project_dir))
            self._cut_off.mend_all()  # of pools; whether this run is sharded may be known later
            if not self.writes_files and (self._peers.is_writer or self._is_sharded()):
                # Never saves, so it makes no file: while one is open, Portus learns which
                # optimizer steps what, and the first save too is copied in the background.
                nowhere = os.path.join(tempfile.gettempdir(), ".portus")
                self._watch = portus.PoolCheckpointer(
                    nowhere, f"watch-{os.urandom(8).hex()}", mirror="none"
                )

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
        if kind == "DEEPSPEED" and not self.writes_files:
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
                self._settings, self._run_of, is_writer=self._peers.is_writer
            )
        return self._made_files

    @property
    def writes_files(self) -> bool:
        """False if checkpoints go to a pool: on a device or a storage host, or mirrored to such a
        host."""
        named = self._settings.pool or portus.Place.by_variable()
        is_pool = named is not None and not named.is_directory
        return not is_pool and self._settings.can_mirror_files

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
        if self.writes_files:
            try:
                return self._save_as_files(stock, asked, directory, limit)
            finally:
                project.total_limit = limit
        if portus.is_nested():
            try:
                return self._save_nested(
                    lambda: stock(asked),
                    directory,
                    lambda capture: self._exchange(capture, directory),
                )
            finally:
                project.total_limit = limit
        self._ready(directory)
        with self._cut_off.noted(directory, fills=False):
            try:
                with capturing() as capture, self._collecting() as shards:
                    location = stock(asked)
            finally:
                project.total_limit = limit
            if shards:
                self._save_shards(shards, capture, directory, limit)
            else:
                self._save(capture, directory, limit)
        return location

    def _save_as_files(
        self,
        stock: Callable[[str | None], Any],
        asked: str | None,
        directory: str,
        limit: int | None,
    ) -> Any:
        is_main = self._peers.is_writer
        location, handle = self._files.save(
            lambda: self._into(stock, asked, directory),
            directory,
            self._step_of(directory),
            self._random_states,
            lambda: place.surplus(directory, limit) if is_main else [],
            now=self._over,
            is_sharded=self._is_sharded() and not portus.is_nested(),
        )
        if handle is not None:
            self._note(handle)
        if self._over:
            self._files.close()
        return location

    def save_whole(
        self, stock: Callable[[], Any], directory: str, add: Callable[[Capture], object]
    ) -> None:
        """Save a checkpoint that every process writes by ``stock``, as ``save_state`` does. Old
        ones that ``stock`` removes go after the commit. add: as of ``CheckpointFiles.save``."""
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
        )
        if handle is not None:
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

    def save_files(
        self, stock: Callable[[], Any], directory: str, accepts: Callable[[str], bool]
    ) -> None:
        """Save a checkpoint that every process writes by ``stock``, some of its files into the
        pool, as ``save_state`` does. What is to be done after the commit waits for
        ``run_deferred``."""
        directory = os.path.abspath(directory)

        def exchange(capture: Capture) -> dict[str, Any]:
            return self._peers.exchange(directory, dict(capture.parts), all_come=True)

        if portus.is_nested():
            self._save_nested(stock, directory, exchange, accepts)
            return
        self._ready(directory)
        with self._cut_off.noted(directory, fills=True) as after_commit:
            with capturing(accepts) as capture:
                stock()
            received = exchange(capture)
            if self._peers.is_writer:
                handle = None
                if capture.parts or received:
                    names = [torch_name(name) for name in (*capture.parts, *received)]
                    mirrored = self._settings.has_mirror
                    beside = gathered(directory, names) if mirrored else {}
                    handle = self._store(capture, received, directory, beside)
                else:
                    _sync(directory)  # older checkpoints may go once this is there
                self._deferred += [(handle, [*capture.deferred, *after_commit])]

    def run_deferred(self) -> None:
        """Do what waited for commits, of the saves that were committed."""
        if portus.is_nested():
            return  # the next save does it
        waiting, self._deferred = self._deferred, []
        for handle, actions in waiting:
            if handle is not None:
                self._await(handle)
            for action in actions if handle is None or handle.committed else ():
                action()

    def keep_out_of(self, directory: str) -> None:
        """All that is in ``directory`` is uploaded: no pool in it, unless one was named."""
        self._uploaded = os.path.abspath(directory)

    def begin(self, directory: str) -> None:
        """A training starts that saves beside ``directory``: put in order what is there."""
        self._over = False
        self._ending.begin()
        if self.writes_files:
            self._files.prepare([os.path.dirname(os.path.abspath(directory))])
        self._cut_off.mend(os.path.abspath(directory), uncommitted=True)

    def goes_on_from(self, directory: str) -> None:
        """The training that begins goes on from its own checkpoint ``directory``."""
        if self._peers.is_writer:
            self._goes_on_from = os.path.abspath(directory)

    @property
    def saved_nothing_since(self) -> bool:
        """True if this training went on from a checkpoint, and saved none since; on the process
        that saves them."""
        return self._goes_on_from is not None and self._ending.is_empty

    def make_room(self, directory: str, size: int) -> None:
        """Training is about to start, and checkpoints of about ``size`` bytes in the pool will be
        like ``directory``: make room in the background, so that the first is as fast as others."""
        is_done = self._checkpointer is not None or self._is_sharded() or self.writes_files
        if is_done or not self._peers.is_writer:
            return
        try:
            self._open(os.path.abspath(directory), size)
        except portus.BusyError:
            raise
        except portus.PortusError as error:
            _log.warning("Portus: cannot prepare for the first save: %s", error)

    def make_room_for_what_was_prepared(self) -> None:
        """Make room as ``make_room`` does, where Accelerate itself names the checkpoints."""
        accelerator = self._accelerator
        project = accelerator.project_configuration
        if project.automatic_checkpoint_naming and accelerator._models and accelerator._optimizers:
            first = os.path.join(accelerator.project_dir, "checkpoints", "checkpoint_0")
            size = portus.expected_bytes(accelerator._models, accelerator._optimizers)
            self.make_room(first, size)

    def follow_data(self) -> None:
        """Know where the prepared loaders are from now on."""
        if self.is_on():
            for each in self._accelerator._dataloaders:
                count, fixed = self._accelerator.num_processes, self._settings.fixed_batch
                data.follow(each, count, fixed, self.training)

    def was_cut_off(self, directory: str) -> bool:
        """True if ``directory`` was a checkpoint that was put aside, since it is not whole."""
        return self._cut_off.was_cut_off(os.path.abspath(directory))

    def has_saved(self, directory: str) -> bool:
        """True if Portus has begun to save checkpoints beside ``directory``, in any process."""
        return self._cut_off.has_saved(os.path.abspath(directory))

    def wait(self) -> None:
        """Return when all saves are committed, or failed: see ``_await``. Unlike ``_drain``, not
        for the room that is then made for the next save."""
        for files in self._engines():
            files.wait()
        if self._made_files is not None:
            self._made_files.wait()
        if self._handle is not None:
            self._await(self._handle)
        if self._shards is not None:
            self._shards.wait()

    def _engines(self) -> list[EngineFiles]:
        """What saves the engines of DeepSpeed."""
        found = [deepspeed.files_of(each) for each in self._accelerator._models]
        return [each for each in found if each is not None]

    def _await(self, handle: portus.SaveHandle) -> None:
        """Return when it is over; a failure is reported as ``on_error`` says. As long as nothing
        was committed, the next save raises it, or the end."""
        handle.join()
        if self._settings.on_error == "raise":
            handle.wait()
        elif self._checkpointer is not None and self._checkpointer.has_committed:
            try:
                handle.wait()
            except portus.PortusError as error:
                _log.warning("Portus: a save failed; training continues: %s", error)

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

    def note_metrics(self, logged: Mapping[str, Any]) -> None:
        """Keep, of what was logged, the metric that ``keep`` goes by, for the next checkpoints."""
        best = self._settings.keep.best
        value = None if best is None else logged.get(best[0])
        is_number = isinstance(value, numbers.Real | torch.Tensor)
        if best is not None and is_number and torch.as_tensor(value).numel() == 1:
            self._metrics = {best[0]: float(value)}  # type: ignore[arg-type]

    def _note(self, handle: portus.SaveHandle) -> None:
        """Keep the handle of a save; of saves that have ended keep only their cost."""
        self._stats.extend(self.take_stats())
        self._handles.append(handle)

    def _drain(self) -> None:
        if self._made_files is not None:
            self._made_files.wait()
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if self._shards is not None:
            self._shards.wait()

    def load_state(self, stock: Callable[[str | None], Any], directory: str | None) -> Any:
        """Let ``stock`` load a directory. If none is named, the newest that can be loaded."""
        stock = saying_of_what(stock, self._accelerator.process_index)
        self._drain()
        project = self._accelerator.project_configuration
        if directory is not None or not project.automatic_checkpoint_naming:
            return self._load(stock, directory)
        above = os.path.join(self._accelerator.project_dir, "checkpoints")
        self._fetch_named()
        if os.path.isdir(above) and self.writes_files:
            self._files.prepare([above])
        candidates = place.numbered(above)[::-1] if os.path.isdir(above) else []
        if self.writes_files:
            candidates = self._as_main_says(candidates)
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
        if not self.writes_files or has_references(directory) or why_incomplete(directory):
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
            self._stop_watching()
            self.run_deferred()
            for files in self._engines():
                files.close()
            if self._made_files is not None:
                self._made_files.close()
            self._cut_off.drop_note()
            if self._run is not None:
                self._run.close()
            if self._shards is not None:
                shards, self._shards = self._shards, None
                shards.close()
            loaded, self._loaded = self._loaded, None
            own, self._goes_on_from = self._goes_on_from, None
            if loaded is not None and self._trains_in(loaded):
                own = loaded
            if own is not None and has_references(own):
                self._ending.loaded(self._run_of(own), own)
            self._ending.materialize()

    # Saving.

    def _save_nested(
        self,
        stock: Callable[[], Any],
        directory: str,
        exchange: Callable[[Capture], dict[str, Any]],
        accepts: Callable[[str], bool] = lambda name: True,
    ) -> Any:
        """A signal handler interrupted Portus: real files, durable when this returns. Shards are
        written by ``stock``."""
        with capturing(accepts) as capture:
            result = stock()
        if self._is_sharded():
            own = self._random_states(capture)
            parts = capture.parts if self._peers.is_writer else own
        else:
            received = exchange(capture)
            parts = {**received, **capture.parts} if self._peers.is_writer else {}
        for name, part in parts.items():
            portus.write_file(part, os.path.join(directory, torch_name(name)))
        for name in os.listdir(directory):
            if name.endswith(".safetensors") and name in parts:
                os.unlink(os.path.join(directory, name))
        portus.note_written(directory)
        _sync(directory)
        intent.take_back(directory)
        for action in capture.deferred:
            action()
        self._handle = None
        return result

    def _stop_watching(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _trains_in(self, directory: str) -> bool:
        """True for a checkpoint of the training that this is; not of one that it only looks at, or
        starts from."""
        project = self._accelerator.project_dir
        below = project is not None and directory.startswith(
            os.path.join(os.path.abspath(project), "")
        )
        return below and bool(self._accelerator._optimizers)

    def _save(self, capture: Capture, directory: str, limit: int | None) -> None:
        received = self._exchange(capture, directory)
        if self._peers.is_writer:
            self._store(capture, received, directory)
            self._rotate(directory, limit)
            if self._over:
                self.finish()

    def _store(
        self,
        capture: Capture,
        received: dict[str, Any],
        directory: str,
        beside: Mapping[str, torch.Tensor] | None = None,
    ) -> portus.SaveHandle | None:
        """Start to save; None if Portus cannot store it, and Accelerate has written it. beside:
        what else is in the directory, for a mirror."""
        parts = {**received, **capture.parts}
        state = {**parts, KEY: beside} if beside else parts
        step = self._step_of(directory)
        references = {os.path.join(directory, torch_name(name)): name for name in parts}
        try:
            run = self._open(directory)
            handle = run.use(
                lambda checkpointer: checkpointer.save(
                    state,
                    step,
                    reference=references,
                    synchronous=self._over,
                    metrics=self._metrics,
                )
            )
        except portus.UsageError as error:
            self._save_stock(capture, parts, directory, error)
            return None
        self._handle = handle
        self._note(handle)
        self._ending.saved(run, directory)
        with _saying(f"what {directory} held before stays"):
            for name in place.names_in(directory):
                if name.endswith(".safetensors") and name in parts:
                    self._remove(os.path.join(directory, name), after=handle)
        return handle

    def _step_of(self, directory: str) -> int:
        """The number in its name, else how many were saved."""
        self._count += 1
        number = place.step_of(directory)
        return self._count if number is None else number

    def _exchange(self, capture: Capture, directory: str) -> dict[str, Any]:
        """The files of other processes, on the one that saves."""
        naming = self._accelerator.project_configuration.automatic_checkpoint_naming
        return self._peers.exchange(directory, self._random_states(capture), all_come=naming)

    def _random_states(self, capture: Capture) -> dict[str, Any]:
        """Return this process's generators and positions in data, by file name. The capture has
        them too."""
        own = capture.parts
        name = f"random_states_{self._accelerator.process_index}.pkl"
        if isinstance(own.get(name), dict):
            states = not self._peers.is_writer
            own[name][resume.KEY] = resume.positions(self._accelerator, with_states=states)
            if self._cadence is not None:
                own[name][resume.KEY][_CADENCE] = self._cadence.state_dict()
        return {name: own[name]} if name in own else {}

    # Shards: FSDP.

    def _is_sharded(self) -> bool:
        return sharded.kind_of(self._accelerator) == sharded.SHARDED

    def _collecting(self) -> contextlib.AbstractContextManager[dict[str, Any]]:
        return sharded.collecting() if self._is_sharded() else contextlib.nullcontext({})

    def _save_shards(
        self, shards: dict[str, Any], capture: Capture, directory: str, limit: int | None
    ) -> None:
        """Start to save this rank's shards, and its files. On every rank."""
        own = self._random_states(capture)
        files = capture.parts if self._peers.is_writer else own
        step = self._step_of(directory)
        writer = self._open_shards(directory)
        writer.synchronous = self._over
        scored: list[Any] = [self._metrics]
        if self._settings.keep.best is not None:
            broadcast_object_list(scored)  # what each process logged may be its own
        try:
            handle = writer.save_directory(
                shards,
                directory,
                step=step,
                metrics=scored[0],
                files={torch_name(name): part for name, part in files.items()},
            )
        except portus.UsageError as error:
            ACCELERATE.say_it_saves(error)
            writer.wait()  # or a save in flight would replace the files
            sharded.write_stock(shards, directory)
            for write in capture.writes:
                write()
            return
        self._note(handle)
        if self._peers.is_writer:
            for name in shards:  # Accelerate made it for what torch would have written
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(directory, name))
            with _saying("older checkpoints stay"):
                for old in place.surplus(directory, limit):
                    writer.remove(old)
        if self._over:
            self.finish()

    def _open_shards(self, directory: str) -> GroupWriter:
        if self._shards is None:
            if self._settings.materialize == "end" and self._peers.is_writer:
                ACCELERATE.say_once(
                    "Portus: sharded checkpoints stay in the pool, materialize='end' does not "
                    "reach them. Before you copy or upload one: portus export"
                )
            from portus.dcp import GroupWriter

            run = self._run_of(directory)
            if not run.place.is_host:
                self._settings.require_mirror_of_files(
                    "shards are saved to directories of files", "save to the storage host itself"
                )
            self._shards = GroupWriter.of(run)
            self._shards.prepare(0)  # so that what this rank did not commit can be told from lost
            self._stop_watching()
        return self._shards

    # The pool.

    @property
    def _checkpointer(self) -> portus.PoolCheckpointer | None:
        return None if self._run is None else self._run.checkpointer

    def _ready(self, directory: str) -> None:
        """A save to ``directory`` begins. Raises what opening a pool raises, before anything is in
        that directory."""
        self._cut_off.drop_note()
        if self._is_sharded():
            if self._peers.is_writer:
                self._open_shards(directory)
        elif self._peers.is_writer:
            self._open(directory)

    def _open(self, directory: str, size: int = 0) -> portus.Run:
        """The run, with its pool; that is made now if there is none, and given room for states of
        ``size`` bytes. Raises ``MediumError`` and the like."""
        if self._run is None or self._run.checkpointer is None:
            run = self._run_of(directory)
            run.use(lambda checkpointer: checkpointer.prepare(size))
            self._run = run
            self._stop_watching()
        return self._run

    def _run_of(self, directory: str) -> portus.Run:
        """The run that saves the checkpoint ``directory``; nothing of it is opened."""
        project = self._accelerator.project_dir
        return place.run_of(directory, self._settings, project, self._uploaded)

    def _remove(self, path: str, after: portus.SaveHandle | None = None) -> None:
        assert self._checkpointer is not None
        self._checkpointer.remove(path, after=after)

    def _save_stock(
        self, capture: Capture, parts: dict[str, Any], directory: str, error: portus.UsageError
    ) -> None:
        ACCELERATE.say_it_saves(error)
        if self._checkpointer is not None:
            self._checkpointer.wait()  # or a save in flight would replace the files
        for name in parts:
            path = os.path.join(directory, torch_name(name))
            if os.path.isfile(path) and portus.is_reference(path):
                os.unlink(path)
        for write in capture.writes:
            write()
        for name in parts.keys() - capture.parts.keys():
            torch.save(parts[name], os.path.join(directory, name))
        _sync(directory)  # older checkpoints may go once this is there

    def _rotate(self, directory: str, limit: int | None) -> None:
        """``total_limit``: older checkpoints go once the new one is committed."""
        with _saying("older checkpoints stay"):
            for old in place.surplus(directory, limit):
                self._remove(old)

    # Loading.

    def _load(self, stock: Callable[[str | None], Any], directory: str | None) -> Any:
        if directory is None:
            return stock(directory)
        directory = os.path.abspath(directory)
        is_files = self.writes_files and not has_references(directory)
        if not is_files:
            self._settings.allow_mirror()
        self._fetch_if_lost(directory, is_here=os.path.exists(directory))
        if is_files:
            return self._files.load(stock, directory, is_sharded=self._is_sharded())
        self._cut_off.mend(directory, uncommitted=False)
        if not self._is_sharded():
            found = stock(directory)
            self._loaded = directory if self._peers.is_writer else None
            return found
        with sharded.reading(directory):
            return stock(directory)

    def fetch_checkpoints(self, output: str) -> None:
        """Fetch what a run without a pool has in its mirror, before ``Trainer`` looks for a
        checkpoint in ``output``, and make its checkpoints whole. On every process. Raises as
        opening a pool."""
        if not self._settings.has_mirror:
            return
        directory = os.path.join(os.path.abspath(output), "checkpoint-0")
        try:
            if self.writes_files:
                self._files.fetch(directory)
            elif self._peers.is_writer and self._checkpointer is None:
                run = self._run_of(directory)
                try:
                    run.use(lambda checkpointer: put_back(checkpointer, output))
                finally:
                    run.close()
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
        """The checkpoint ``directory`` is not here: fetch what a run without a pool has in its
        mirror, and put its files back. On every process. Raises as opening a pool."""
        if not self._settings.has_mirror:
            return
        try:
            if self.writes_files:
                self._files.fetch(directory)
            elif self._peers.is_writer and self._checkpointer is None and not self._is_sharded():
                run = self._run_of(directory)
                try:
                    run.use(lambda checkpointer: None)
                finally:
                    run.close()
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
    if os.path.isfile(path) and portus.is_reference(path):
        states = portus.load_reference(path)
    elif os.path.isfile(path):
        try:
            with verifying():
                states = (other.load if hasattr(other, "load") else portus.load)(path)
        except portus.PortusError:
            raise
        except Exception:  # stock Accelerate goes on without it, too
            _log.debug("Portus: %s cannot be loaded", path, exc_info=True)
    return states.get(resume.KEY) if states else None


def _peers_of(accelerator: Any) -> Peers:
    state = accelerator.state
    everyone = range(state.num_processes)
    if not accelerator.project_configuration.save_on_each_node:
        return Peers(state.process_index, 0, [rank for rank in everyone if rank != 0])
    first = state.process_index - state.local_process_index
    size = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes - first))
    here = range(first, first + size)
    return Peers(state.process_index, first, [rank for rank in here if rank != first])


def _sync(directory: str) -> None:
    """Return when the files in a directory, their names and its own survive power loss."""
    for entry in (*os.scandir(directory), directory, os.path.dirname(directory)):
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    """What goes wrong inside does no harm that matters to a training: it is said, with ``what``
    comes of it, and training goes on."""
    try:
        yield
    except portus.PortusError as error:
        _log.warning("Portus: %s: %s", what, error)
