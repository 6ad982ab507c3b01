"""``RankFiles``: checkpoints of files that a framework names, each rank its own, in one directory.

Each rank publishes its files in the background; the first one does once those of all others are
there. Then, on request, it replaces a text file that names the checkpoint (``latest``). Ranks
exchange messages only in the call: which saves failed, and which files to expect.

The framework names the files, so a directory cannot have two checkpoints. A save to a directory
that has one is done in the call: all ranks write their files under hidden names first, and rename
them when all have. A kill right then can leave files of both; their notes reveal it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from portus.companions.job.exchange import Failures, gather, standing
from portus.engine.directory.waiting import in_flight
from portus.engine.files.pending import PENDING
from portus.engine.job.settings import Settings
from portus.engine.loading.checkpoint_file import read_note
from portus.engine.pipeline.handle import SaveHandle
from portus.errors import AbandonedError, CorruptionError, PortusError, UsageError, printable
from portus.reach.shards.arrival import await_files, require_seen
from portus.reach.training.training_files import TrainingFiles

_ASKED_MAX: Final = 16
"""The most saves that are remembered, to look later whether they failed."""

_log: Final = logging.getLogger("portus")


@dataclass(slots=True)
class RankSave:
    """A save of this rank: its number, the same on all ranks, and its files. ``handle``: None
    before it begins."""

    save: int
    paths: Sequence[str]
    handle: SaveHandle | None = None


class RankSaves:
    """The saves of this rank that may turn out to have failed on another one. The others learn of
    failed ones at their next save."""

    def __init__(self, settings: Settings) -> None:
        self._raises: Final = settings.on_error == "raise"
        self.asked: Final[list[RankSave]] = []
        """Saves that have not failed, as far as is known; the newest last."""
        self.given_up: Final[set[int]] = set()
        """The numbers of saves that will never be complete."""
        self._own: Failures = {}

    def take_failures(self) -> Failures:
        """Return the saves of this rank that failed since the last call."""
        failed: dict[int, tuple[bool, str]] = {}
        left = []
        for each in self.asked:
            # Planned, but not begun: a rank raised in between, so its file will never be there.
            if each.handle is None:
                failed[each.save] = False, "the save was not begun on all ranks"
            elif each.handle.committed or not each.handle.done:
                left.append(each)
            else:
                try:
                    each.handle.wait(0)
                except PortusError as error:
                    is_given_up = isinstance(error, AbandonedError)
                    failed.setdefault(each.save, (is_given_up, str(error)))
        # A failed save is reported within two saves: older ones are forgotten (decision 0213).
        self.asked[:] = left[-_ASKED_MAX:]
        self._own = failed
        return failed

    def hear(
        self, said: Sequence[Failures], remove: Callable[[str], None], *, is_first: bool
    ) -> None:
        """Give up saves that failed on some rank, and remove this rank's files of them. Raises
        ``AbandonedError`` as ``on_error`` says. said: the failures by rank. is_first: this rank
        logs those of all, and not only its own."""
        every = [(rank, *each) for rank, one in enumerate(said) for each in one.items()]
        failed: dict[int, str] = {}
        for rank, save, (_, why) in sorted(every, key=lambda each: each[2][0]):  # causes first
            failed.setdefault(save, f"portus: a save was given up: rank {rank}: {why}")
        self.given_up.update(failed)
        for lost in [each for each in self.asked if each.save in failed]:
            self.asked.remove(lost)
            for path in lost.paths:
                remove(path)
        for save, text in failed.items():
            if self._raises:
                raise AbandonedError(text)
            if is_first or save in self._own:
                _log.error("%s", text)


class RankFiles(TrainingFiles):
    """The checkpoints of a job. Make one on each rank, with the same settings. Its methods are
    called on every rank, but for ``fence``."""

    def __init__(self, settings: Settings, run: str | None = None) -> None:
        """Prepare for a job. run: its name, in the journal; None: the name of the directory above
        the checkpoints. Raises ``UsageError`` for settings that only pools have."""
        self._run: Final = run
        super().__init__(settings, of_directories=True)
        self.leads = standing()[0] == 0
        self.open()
        self._has_seen = False
        self._saves: Final = RankSaves(settings)

    def save_ranks(
        self,
        directory: str,
        collect: Callable[[], tuple[Mapping[str, object], Sequence[torch.Tensor]]],
        step: int,
        *,
        latest: tuple[str, str] | None = None,
        base: str | None = None,
        now: bool = False,
    ) -> list[SaveHandle]:
        """Begin to save what ``collect`` returns into ``directory``, absolute. Collective.

        collect: called on all ranks between two exchanges; its errors are raised unchanged. It
        returns this rank's files by their names, and the tensors in them that no code writes before
        ``fence`` was called. latest: the path and the text of a file that names the checkpoint, to
        be replaced once that is complete; by the first rank. base: of a part of another checkpoint,
        the directory whose hidden folder has the drafts. now: return when the checkpoint is
        complete.

        Returns the handles of this rank's saves: of its files, and of ``latest``. Raises on all
        ranks ``UsageError`` for a value that cannot be saved, and ``AbandonedError`` for a save
        that failed, as ``on_error`` says.
        """
        where = os.path.realpath(directory)
        numbers, have_files, failed = _exchange(
            uuid.uuid4().int, _has_files(where), self._saves.take_failures()
        )
        self._saves.hear(failed, self.remove, is_first=self.leads)
        # The first rank's, since all need the same one.
        save, is_in_place = numbers[0], any(have_files)
        files, fenced = collect()
        drafted, others = threading.Event(), Future[Collection[str]]()

        def ready() -> None:
            drafted.set()
            if names := others.result():
                await_files(where, names, save, self._saves.given_up)

        handle, problem = None, None
        try:
            try:
                handle = self._draft(where, base, files, fenced, step, save, ready)
            except PortusError as error:
                problem = error
            if handle is not None and is_in_place:
                # In a directory that has a checkpoint all drafts are durable before the first
                # rename.
                while not drafted.wait(0.05) and not handle.done:
                    continue
            # For example on a full disk.
            has_failed = handle is not None and handle.done and not handle.committed
            # None is visible yet: they become so only if no rank was refused.
            every, problems, failures = _exchange(tuple(files), problem, has_failed)
            expected = [name for each in every[1:] for name in each]
            refused = [each for each in problems if each is not None]
            is_given_up = any(failures)
            if not refused and not is_given_up:
                refused = self._not_seen(where, expected)
            if not refused and not is_given_up:
                others.set_result(expected if self.leads else ())
        finally:
            if not others.done():  # the worker continues, whatever happened here
                others.set_exception(
                    AbandonedError("save given up: another rank could not begin its part")
                )
        if refused:
            with contextlib.suppress(PortusError):
                if handle is not None:
                    handle.wait()  # its error is known
            raise refused[0]  # the same on all ranks
        paths = [os.path.join(where, name) for name in files]
        handles = [] if handle is None else [handle]
        asked = [RankSave(save, paths, each) for each in handles]
        if latest is not None and self.leads and not is_given_up:
            last = self.save_text(*latest, partial(_require_committed, handle, *latest))
            handles.append(last)
            asked.append(RankSave(save, (), last))
        self._saves.asked.extend(asked)
        if now or is_in_place:
            for each in handles:
                each.join()
            # No rank returns before all have their files: the framework may remove an older one
            # next.
            gather(None)
        return handles

    def _draft(
        self,
        directory: str,
        base: str | None,
        files: Mapping[str, object],
        fenced: Sequence[torch.Tensor],
        step: int,
        save: int,
        ready: Callable[[], None],
    ) -> SaveHandle | None:
        """Begin to write this rank's files. Return the handle, if there are any."""
        if base is not None:
            # A part of another checkpoint, whose start looks there for a killed process's files.
            self._forget_parent()
            self._base = base
        elif not self.has_begun:
            self.begin(self._run, None, os.path.dirname(directory))
        if not files:
            return None
        return self.save_directory(directory, files, step, b"%032x" % save, ready, fenced=fenced)

    def _not_seen(self, directory: str, others: Sequence[str]) -> list[PortusError]:
        """Return the error if the first rank does not see others' files, else []. Collective."""
        if self._has_seen:
            return []
        problem = None
        if self.leads:
            try:
                require_seen(directory, others)
            except UsageError as error:
                problem = error
        found = [each for each in gather(problem) if each is not None]
        self._has_seen = not found
        return found

    def check_loaded(
        self, directory: str, names: Collection[str], problem: PortusError | None = None
    ) -> None:
        """Check the files ``names`` of ``directory``, which this rank loaded. Collective. Raises on
        all ranks the ``problem`` of any rank, and ``CorruptionError`` if the files are of different
        saves."""
        notes: set[bytes | None] = set()
        try:
            notes = {read_note(os.path.join(directory, name)) for name in names}
        except PortusError as error:
            problem = problem or error
        every, problems = _exchange(notes, problem)
        for why in filter(None, problems):
            raise problem or why
        if len(set[bytes | None]().union(*every)) > 1:
            raise CorruptionError(
                f"{printable(directory)}: its files are of different saves: a save was killed as "
                "it replaced them, or they were copied together. Load another checkpoint"
            )


def _has_files(directory: str) -> bool:
    """Return whether a directory has files, or will have."""
    with PENDING.exempt():
        return os.path.isdir(directory) and bool(os.listdir(directory) or in_flight(directory))


def _require_committed(handle: SaveHandle | None, path: str, name: str) -> None:
    """Raise ``AbandonedError`` if the save of ``handle``, which has ended, failed."""
    if handle is not None and not handle.committed:
        raise AbandonedError(
            f"{printable(path)} still names the checkpoint before: {name} could not be saved"
        )


def _exchange(*words: Any) -> Any:
    """Return each of ``words`` of all ranks, by rank. Collective."""
    return zip(*gather(words), strict=True)
