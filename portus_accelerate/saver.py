"""``Saver``: what stands between one ``Accelerator`` and its checkpoints.

A checkpoint directory is one version in the pool: a dict from file name to content. At each file's
name in the directory is a reference to its part, which ``torch.load`` follows, Accelerate's own
``load_state`` too. So a checkpoint is there as a whole or not at all, whichever process dies when.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate.utils import other

import portus
from portus_accelerate import intent, place, resume, sharded
from portus_accelerate.capture import Capture, capturing, torch_name
from portus_accelerate.cut_off import CutOff
from portus_accelerate.ending import Ending
from portus_accelerate.origin import of_others, origin_of, saying_of_what
from portus_accelerate.peers import Peers
from portus_accelerate.settings import ACCELERATE, Settings

if TYPE_CHECKING:
    from portus.dcp import PortusStorageWriter

_log: Final = logging.getLogger("portus_accelerate")

_BYPASSES: Final = {
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "XLA",
}


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
        self._settings: Final = settings
        self._peers: Final = _peers_of(accelerator)
        self._run: portus.Run | None = None
        self._count = 0
        self._ending: Final = Ending(settings)
        self._uploaded: str | None = None
        self._deferred: list[tuple[portus.SaveHandle | None, list[Callable[[], Any]]]] = []
        self._cut_off: Final = CutOff(
            accelerator, self._run_of, settings.pool, is_writer=self._peers.is_writer
        )
        self._handle: portus.SaveHandle | None = None
        self._over = False
        self._watch: portus.Checkpointer | None = None
        self._shards: PortusStorageWriter | None = None
        if settings.pool is not None:
            portus.allow(settings.pool)  # every process loads, and before anything was saved
        if self.is_on():
            self._cut_off.mend_all()
            if self._peers.is_writer or self._is_sharded():
                # Never saves, so it makes no file: while one is open, Portus learns which
                # optimizer steps what, and the first save too is copied in the background.
                nowhere = os.path.join(tempfile.gettempdir(), ".portus")
                self._watch = portus.Checkpointer(nowhere, f"watch-{os.urandom(8).hex()}")

    def __reduce__(self) -> tuple[type[Pickled], tuple[Settings]]:
        return Pickled, (self._settings,)

    def is_on(self) -> bool:
        """False where checkpoints are left to Accelerate."""
        if ACCELERATE.saves_itself():
            return False
        what = _BYPASSES.get(getattr(self._accelerator.distributed_type, "value", ""))
        kind = sharded.kind_of(self._accelerator)
        if kind not in (None, sharded.SHARDED, sharded.FULL):
            what = f"FSDP with {kind}"
        if what is not None:
            ACCELERATE.say_once(
                f"checkpoints under {what} do NOT go through Portus: Accelerate writes them by "
                "itself. They are as safe and as fast as without Portus"
            )
        return what is None

    def save_state(self, stock: Callable[[], Any], directory: str | None) -> Any:
        """Start to save what ``stock`` would write; the directory is there when this returns.

        directory: what the script asked for; None where Accelerate makes the name.
        """
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            above = os.path.join(self._accelerator.project_dir, "checkpoints")
            directory = os.path.join(above, f"checkpoint_{project.iteration}")
        if directory is None:
            return stock()  # Accelerate says what is wrong
        directory = os.path.abspath(directory)
        limit, project.total_limit = project.total_limit, None
        if portus.is_nested():
            try:
                return self._save_nested(
                    stock, directory, lambda capture: self._exchange(capture, directory)
                )
            finally:
                project.total_limit = limit
        self._ready(directory)
        with self._cut_off.noted(directory, fills=False):
            try:
                with capturing() as capture, self._collecting() as shards:
                    location = stock()
            finally:
                project.total_limit = limit
            if shards:
                self._save_shards(shards, capture, directory, limit)
            else:
                self._save(capture, directory, limit)
        return location

    def save_files(
        self, stock: Callable[[], Any], directory: str, accepts: Callable[[str], bool]
    ) -> None:
        """As ``save_state``, for a checkpoint that every process writes by ``stock``, some files of
        it into the pool. What it asks to be done after the commit waits for ``run_deferred``."""
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
                    handle = self._store(capture, received, directory)
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
        self._cut_off.mend(os.path.abspath(directory), uncommitted=True)

    def make_room(self, directory: str, size: int) -> None:
        """Training is about to start, and checkpoints of about ``size`` bytes in the pool will be
        like ``directory``: make room in the background, so that the first is as fast as others."""
        if self._checkpointer is not None or self._is_sharded() or not self._peers.is_writer:
            return
        try:
            self._open(os.path.abspath(directory), size)
        except portus.BusyError:
            raise
        except portus.PortusError as error:
            _log.warning("Portus: cannot prepare for the first save: %s", error)

    def make_room_for_what_was_prepared(self) -> None:
        """As ``make_room``, where Accelerate itself names the checkpoints."""
        accelerator = self._accelerator
        project = accelerator.project_configuration
        if project.automatic_checkpoint_naming and accelerator._models and accelerator._optimizers:
            first = os.path.join(accelerator.project_dir, "checkpoints", "checkpoint_0")
            size = portus.expected_bytes(accelerator._models, accelerator._optimizers)
            self.make_room(first, size)

    def was_cut_off(self, directory: str) -> bool:
        """True if ``directory`` was a checkpoint that was put aside, since it is not whole."""
        return self._cut_off.was_cut_off(os.path.abspath(directory))

    def has_saved(self, directory: str) -> bool:
        """True if Portus has begun to save checkpoints beside ``directory``, in any process."""
        return self._cut_off.has_saved(os.path.abspath(directory))

    def wait(self) -> None:
        """Return when all saves are committed, or failed: see ``_await``. Unlike ``_drain``, not
        for the room that is then made for the next save."""
        if self._handle is not None:
            self._await(self._handle)
        if self._shards is not None:
            self._shards.wait()

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
                _log.warning("Portus: a save failed; training goes on: %s", error)

    def _drain(self) -> None:
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
        candidates = place.numbered(above)[::-1] if os.path.isdir(above) else []
        for candidate in candidates[:-1]:
            try:
                return self._load(stock, candidate)
            except (portus.CorruptionError, portus.UsageError) as error:
                _log.error("Portus: %s; FALLING BACK to the checkpoint before it", error)
        return self._load(stock, candidates[-1] if candidates else None)

    def after_load(self, directory: str) -> None:
        """Accelerate has restored the generators from ``directory``: let data go on from there.

        Raises what is wrong with them, which Accelerate passes over.
        """
        name = f"random_states_{self._accelerator.process_index}.pkl"
        path = os.path.join(directory, name)
        states: Any = None
        if os.path.isfile(path) and portus.is_reference(path):
            states = portus.load_reference(path)
        elif os.path.isfile(path):
            with contextlib.suppress(Exception):  # stock Accelerate goes on without it, too
                states = getattr(other, "load", torch.load)(path)
        saved = states.get(resume.KEY) if states else None
        self._say_of_others(directory, saved)
        resume.go_back(self._accelerator, saved)

    def finish(self) -> None:
        """Training ends: what is in flight ends too, or is reported. Later saves are durable when
        they return."""
        self._over = True
        self._stop_watching()
        self.run_deferred()
        self._cut_off.drop_note()
        if self._run is not None:
            self._run.close()
        if self._shards is not None:
            shards, self._shards = self._shards, None
            shards.close()
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

    def _save(self, capture: Capture, directory: str, limit: int | None) -> None:
        received = self._exchange(capture, directory)
        if self._peers.is_writer:
            self._store(capture, received, directory)
            self._rotate(directory, limit)
            if self._over:
                self.finish()

    def _store(
        self, capture: Capture, received: dict[str, Any], directory: str
    ) -> portus.SaveHandle | None:
        """Start to save; None if Portus cannot store it, and Accelerate has written it."""
        parts = {**received, **capture.parts}
        step = self._step_of(directory)
        references = {os.path.join(directory, torch_name(name)): name for name in parts}
        try:
            run = self._open(directory)
            handle = run.use(
                lambda checkpointer: checkpointer.save(
                    parts, step, reference=references, synchronous=self._over
                )
            )
        except portus.UsageError as error:
            self._save_stock(capture, parts, directory, error)
            return None
        self._handle = handle
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
        """This process's generators and positions in data, by file name; put into the capture."""
        own = capture.parts
        name = f"random_states_{self._accelerator.process_index}.pkl"
        if isinstance(own.get(name), dict):
            states = not self._peers.is_writer
            own[name][resume.KEY] = resume.positions(self._accelerator, with_states=states)
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
        try:
            writer.save_directory(
                shards,
                directory,
                step=step,
                files={torch_name(name): part for name, part in files.items()},
            )
        except portus.UsageError as error:
            ACCELERATE.say_it_saves(error)
            writer.wait()  # or a save in flight would replace the files
            sharded.write_stock(shards, directory)
            for write in capture.writes:
                write()
            return
        if self._peers.is_writer:
            for name in shards:  # Accelerate made it for what torch would have written
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(directory, name))
            with _saying("older checkpoints stay"):
                for old in place.surplus(directory, limit):
                    writer.remove(old)
        if self._over:
            self.finish()

    def _open_shards(self, directory: str) -> PortusStorageWriter:
        if self._shards is None:
            if self._settings.materialize == "end" and self._peers.is_writer:
                ACCELERATE.say_once(
                    "Portus: sharded checkpoints stay in the pool, materialize='end' does not "
                    "reach them. Before you copy or upload one: portus export"
                )
            from portus.dcp import PortusStorageWriter

            self._shards = PortusStorageWriter.of(self._run_of(directory))
            self._shards.prepare(0)  # so that what this rank did not commit can be told from lost
            self._stop_watching()
        return self._shards

    # The pool.

    @property
    def _checkpointer(self) -> portus.Checkpointer | None:
        return None if self._run is None else self._run.checkpointer

    def _ready(self, directory: str) -> None:
        """A save to ``directory`` begins. Raises what opening a pool raises, before anything is in
        that directory."""
        self._cut_off.drop_note()
        if self._peers.is_writer and self._is_sharded():
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
        self._cut_off.mend(directory, uncommitted=False)
        if not self._is_sharded():
            return stock(directory)
        with sharded.reading(directory):
            return stock(directory)

    def _say_of_others(self, directory: str, saved: Any) -> None:
        """Warn if this process does not go on where it was."""
        origin = origin_of(directory)
        if origin is None or (saved and "processes" not in saved):  # saved by an older Portus
            return
        count = saved["processes"] if saved else None
        state = self._accelerator
        said = of_others(origin, state.process_index, count, state.num_processes)
        if said is not None:
            _log.warning("Portus: %s", said)


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
