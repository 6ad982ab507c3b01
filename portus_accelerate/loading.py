"""``StateLoader``: loads the checkpoint directories of one ``Accelerator``."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from accelerate.utils import broadcast_object_list, gather_object, other

import portus
from portus_accelerate import fsdp, resume
from portus_accelerate.capture import verifying
from portus_accelerate.directories import (
    RANDOM,
    naming,
    numbered_directories,
    origin_of,
    why_incomplete,
)
from portus_accelerate.files import CheckpointFiles
from portus_accelerate.settings import Settings

_log: Final = logging.getLogger("portus_accelerate")

Stock = Callable[[str | None], Any]


class StateLoader:
    """Chooses and loads the directory. Call the methods on every process. files: the savers."""

    def __init__(self, accelerator: Any, files: CheckpointFiles, settings: Settings) -> None:
        self._accelerator: Final = accelerator
        self._files: Final = files
        self._settings: Final = settings
        self.passed_over: Final[set[str]] = set()
        """Checkpoints that not all processes had saved, or that are damaged."""

    def load_state(self, stock: Stock, directory: str | None) -> Any:
        """Let ``stock`` load ``directory``, or if it is None, the newest one that can be loaded."""
        # A save in flight may be the newest checkpoint, or the named one.
        self._files.wait()
        above = self._above()
        if directory is not None or above is None:
            return self._load(stock, directory)
        self.fetch_named()
        if os.path.isdir(above):
            self._files.prepare([above])
        found: list[str] = []
        with contextlib.suppress(portus.MediumError):  # stock reports that it cannot be listed
            found = numbered_directories(above)[::-1]
        candidates = self.as_main_says(above, found)
        failed: tuple[str, portus.PortusError] | None = None
        for candidate in self.most_complete_first(candidates, self._has_own):
            if failed is not None:
                _log.error("Portus: %s; FALLING BACK to %s", failed[1], candidate)
                self.passed_over.add(failed[0])  # training will save there again
            try:
                loaded = self._load(stock, candidate, by_all=True)
            except (portus.CorruptionError, portus.UsageError) as error:
                failed = candidate, error
            else:
                self.passed_over.discard(candidate)
                return loaded
        if failed is not None:
            raise failed[1]
        return self._load(stock, None)

    def go_back(self, directory: str) -> Any:
        """Resume the data from ``directory``, after Accelerate restored its generators. Return the
        state of this process, or of the main one; None without one.

        Raises errors of these states, which Accelerate ignores.
        """
        count = self._accelerator.num_processes
        own = _positions_in(directory, self._accelerator.process_index)
        of_main = _positions_in(directory, 0)
        self._say_of_others(directory, own, of_main)
        if of_main and (own is None or of_main.get("processes", count) != count):
            own = of_main  # the position is the same on all processes
        resume.go_back(self._accelerator, own, of_main or own)
        return own

    def fetch_named(self) -> None:
        """Fetch checkpoints of automatic naming, if none is here, before any process looks."""
        above = self._above()
        if above is not None:
            self.fetch(os.path.join(above, "checkpoint_0"), is_here=os.path.isdir(above))

    def fetch(self, directory: str, *, is_here: bool = False) -> None:
        """Fetch the mirror's files of the run that saves ``directory``, if this machine lost it,
        before any process looks for a checkpoint. is_here: for this process; if so for every one,
        nothing is fetched. Raises as ``portus.TrainingFiles.fetch``."""
        # Without a mirror processes do not wait for each other.
        if not self._settings.has_mirror or all(gather_object([is_here])):
            return
        try:
            self._files.fetch(directory)
        finally:
            # Also if it failed: the others are waiting.
            self._accelerator.wait_for_everyone()

    def _above(self) -> str | None:
        """Return the absolute directory of checkpoints that Accelerate names, or None."""
        project = self._accelerator.project_dir
        names = self._accelerator.project_configuration.automatic_checkpoint_naming
        return os.path.join(os.path.abspath(project), "checkpoints") if names and project else None

    def _load(self, stock: Stock, directory: str | None, *, by_all: bool = False) -> Any:
        """Have ``stock`` load a directory; verify every byte that has a digest. Raise
        ``UsageError`` for one that was never complete. by_all: if one process raises, all do, also
        if each machine has a directory of its own and theirs differ."""
        if directory is None:
            return stock(directory)
        directory = os.path.abspath(directory)
        self.fetch(directory, is_here=os.path.exists(directory))
        self._files.files.wait_for(directory)
        why = why_incomplete(directory)
        if by_all:
            # Before stock loads: its collectives would wait for a process that raised here.
            self.raise_if_any(why if os.path.isdir(directory) else f"{directory}: not there")
        elif why:
            raise portus.UsageError(why)
        is_sharded = fsdp.kind_of(self._accelerator) == fsdp.SHARDED
        shards = fsdp.verifying() if is_sharded else contextlib.nullcontext()
        try:
            with verifying(), shards, naming(directory, self._accelerator.process_index):
                found = stock(directory)
        except (portus.CorruptionError, portus.UsageError) as error:
            if by_all:
                with contextlib.suppress(portus.UsageError):
                    self.raise_if_any(str(error))
            raise
        if by_all:
            self.raise_if_any("")
        return found

    def raise_if_any(self, why: str) -> None:
        """Raise ``UsageError`` on all processes, if any process has a reason."""
        said = gather_object([why])
        if any(said):
            raise portus.UsageError(why or next(filter(None, said)))

    def as_main_says(self, above: str, paths: list[str]) -> list[str]:
        """Return the main process's names in ``above``, on all processes, each in its own:
        processes may see names come and go at other moments."""
        said = [[os.path.basename(path) for path in paths]]
        if self._accelerator.num_processes > 1:
            broadcast_object_list(said)
        return [os.path.join(above, name) for name in said[0]]

    def _has_own(self, directory: str) -> bool:
        """Return whether this process finds its random states in a directory, or saved none there:
        there were more or fewer processes than now."""
        if os.path.exists(os.path.join(directory, RANDOM.format(self._accelerator.process_index))):
            return True
        if why_incomplete(directory):
            return True  # the load reports the reason
        try:
            saved = (_positions_in(directory, 0) or {}).get("processes")
        except portus.PortusError:
            saved = None
        return bool(saved != self._accelerator.num_processes)

    def most_complete_first(
        self, candidates: Sequence[str], has_own: Callable[[str], bool]
    ) -> Iterator[str]:
        """Yield the directories that all processes saved, and then the others. The same on all.
        has_own: whether this process saved its part of one; called on every process."""
        lacking = []
        for candidate in candidates:
            if all(gather_object([has_own(candidate)])):
                yield candidate
                continue
            _log.error("Portus: %s: not all processes saved it before they were killed", candidate)
            self.passed_over.add(candidate)
            lacking.append(candidate)
        yield from lacking

    def _say_of_others(self, directory: str, own: Any, of_main: Any) -> None:
        """Warn if this process found no states of its own, or another number of processes saved."""
        origin, saved = origin_of(directory), own or of_main
        rank, now = self._accelerator.process_index, self._accelerator.num_processes
        if not origin:
            return
        count = saved["processes"] if saved else None
        if count is None or (own is None and count == now):
            _log.warning(
                "Portus: rank %d: %s holds no random states of this rank: its data and random "
                "numbers do not resume where they were",
                rank,
                origin,
            )
        elif count != now and rank == 0:
            _log.warning(
                "Portus: rank %d: %s was saved by %d processes and is loaded by %d: the weights "
                "are whole, and a plain loader delivers each remaining sample once; other loaders "
                "and random numbers do not resume where they were",
                rank,
                origin,
                count,
                now,
            )


def _positions_in(directory: str, process: int) -> Any:
    """Return the states that a process saved beside its generators; None if there are none, or they
    cannot be read."""
    path = os.path.join(directory, RANDOM.format(process))
    states: Any = None
    if os.path.isfile(path):
        try:
            with verifying():
                states = (other.load if hasattr(other, "load") else portus.load)(path)
        except portus.PortusError:
            raise
        except Exception:  # stock Accelerate continues without it, too
            _log.debug("Portus: %s cannot be loaded", path, exc_info=True)
    return states.get(resume.KEY) if states else None
