"""``RankFiles``: a checkpoint whose files a framework names, each rank its own, in one directory.

Each rank publishes its files in the background; the first one does once those of all others are
there. Then, where it was asked to, it replaces a text file that names the checkpoint (``latest``).
Nothing is told between ranks after the call. In the call they tell each other which saves failed,
and which files to expect.

The names of files are those of the framework, so a directory that has a checkpoint cannot have a
second one beside it. Such a save is done in the call: all ranks write their files under hidden
names first, and rename them when all have. A kill right then can leave files of both; their notes
tell.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from portus.companions.job.exchange import standing
from portus.engine.directory.waiting import in_flight
from portus.engine.files.pending import PENDING
from portus.engine.job.settings import Settings
from portus.engine.loading.checkpoint_file import read_note
from portus.engine.pipeline.handle import SaveHandle
from portus.errors import AbandonedError, CorruptionError, PortusError, printable
from portus.reach.index.place import DEFAULT_DIRECTORY
from portus.reach.shards.arrival import await_files, not_shared, unseen
from portus.reach.training.training_files import TrainingFiles

_ASKED_MAX: Final = 16
"""Committed saves that may turn out to have failed on another rank."""

_log: Final = logging.getLogger("portus")


@dataclass(frozen=True, slots=True)
class FilesOfRank:
    """What a rank saves: files by their names, and the tensors in them that nobody writes before
    ``RankFiles.fence`` was called."""

    files: Mapping[str, object]
    fenced: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, slots=True)
class LatestFile:
    """A text file that is to name the checkpoint once that is complete."""

    path: str
    text: str


class RankFiles:
    """The checkpoints of a job. Make one on each rank, with the same settings. Its methods are
    called on every rank, but for ``fence``."""

    def __init__(self, settings: Settings, name: str | None = None) -> None:
        """name: of the run, in the journal; None: what the directory above the checkpoints is
        called. Raises ``UsageError`` for settings that only pools have."""
        self._settings: Final = settings
        self._name: Final = name
        self._is_first: Final = standing()[0] == 0
        alone = replace(settings, journal=False, mirror="none")
        self._files: Final = TrainingFiles(
            settings if self._is_first else alone,
            of_directories=True,
            removed_elsewhere=not self._is_first,
        )
        self._files.open()
        self._has_begun = False
        self._has_seen = False
        self._asked: Final[list[_RankSave]] = []
        self._given_up: Final[set[str]] = set()

    def save(
        self,
        directory: str,
        collect: Callable[[], FilesOfRank],
        step: int,
        *,
        latest: LatestFile | None = None,
        base: str | None = None,
        now: bool = False,
    ) -> list[SaveHandle]:
        """Begin to save what ``collect`` returns into ``directory``, absolute. Collective.

        collect: called on all ranks between two exchanges; what it raises is raised as it is.
        latest: replaced once the checkpoint is complete; by the first rank. base: of a part of
        another checkpoint, the directory whose hidden folder has the drafts. now: return when the
        checkpoint is complete.

        Returns the handles of what this rank saves: of its files, and of ``latest``. Raises on all
        ranks ``UsageError`` for what cannot be saved, and ``AbandonedError`` for a save that
        failed, as ``on_error`` says.
        """
        where = os.path.realpath(directory)
        said = _exchange(_RankState(uuid.uuid4().hex, _has_files(where), self._failures()))
        self._hear(said)
        # The first rank's, since all need the same one.
        save = said[0].id
        is_in_place = any(each.has_files for each in said)
        found = collect()
        gate = _Gate(where, save, self._given_up)
        with gate.never_shut():
            handle, problem = self._draft(where, base, found, step, save.encode(), gate)
            if handle is not None and is_in_place:
                # In a directory that has a checkpoint all drafts are durable before the first
                # rename.
                gate.await_draft(handle)
            has_failed = handle is not None and handle.done and not handle.committed
            # None became visible by now: the gates open only if no rank was refused.
            words = _exchange(_RankBegin(tuple(found.files), problem, has_failed))
            others = [name for each in words[1:] for name in each.names]
            refused = [each.problem for each in words if each.problem is not None]
            is_given_up = any(each.has_failed for each in words)
            if not refused and not is_given_up:
                refused = self._not_seen(where, others)
            if not refused and not is_given_up:
                gate.open(others if self._is_first else ())
        if refused:
            with contextlib.suppress(PortusError):
                if handle is not None:
                    handle.wait()  # what it fails with is no news
            raise refused[0]  # the same on all ranks
        paths = [os.path.join(where, name) for name in found.files]
        asked = [] if handle is None else [_RankSave(save, handle, paths)]
        if latest is not None and self._is_first and not is_given_up:
            committed = partial(_require_committed, handle, latest)
            last = self._files.save_text(latest.path, latest.text, committed)
            asked.append(_RankSave(save, last, []))
        self._asked.extend(asked)
        if now or is_in_place:
            for each in asked:
                each.handle.join()
            # No rank returns before all have their files: the framework may remove an older one
            # next.
            _exchange(None)
        return [each.handle for each in asked]

    def _draft(
        self,
        directory: str,
        base: str | None,
        found: FilesOfRank,
        step: int,
        note: bytes,
        gate: _Gate,
    ) -> tuple[SaveHandle | None, PortusError | None]:
        """Begin to write this rank's files. The handle, if it has any; and what it is refused
        for."""
        try:
            self._begin(directory, base)
            if not found.files:
                return None, None
            return self._files.save_directory(
                directory, found.files, step, note, gate.ready, fenced=found.fenced
            ), None
        except PortusError as error:
            return None, error

    def _not_seen(self, directory: str, others: Sequence[str]) -> list[PortusError]:
        """Return why the first rank does not see what others write; an empty list once it has seen
        it. Collective."""
        if self._has_seen:
            return []
        problem = None
        if self._is_first:
            with PENDING.exempt():
                missing = unseen(directory, others)
            problem = not_shared(directory, missing) if missing else None
        found = [each for each in _exchange(problem) if each is not None]
        self._has_seen = not found
        return found

    def fence(self) -> None:
        """Block until no save in flight reads a tensor of this rank."""
        self._files.fence()

    def wait_for(self, directory: str) -> None:
        """Block until the saves to ``directory`` that any process has in flight are over."""
        self._files.wait_for(directory)

    def wait(self) -> None:
        """Block until this rank's saves are over. Raises what nobody heard of."""
        self._files.wait()

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
        said = _exchange((notes, problem))
        for _, why in said:
            if why is not None:
                raise problem or why
        if len(set[bytes | None]().union(*(each for each, _ in said))) > 1:
            raise CorruptionError(
                f"{printable(directory)}: its files are of different saves: a save was killed as "
                "it replaced them, or they were copied together. Load another checkpoint"
            )

    def close(self) -> None:
        """Finish the saves in flight. It may be used again."""
        self._has_begun = False
        self._files.close()

    def _begin(self, directory: str, base: str | None) -> None:
        if base is not None:
            # A part of another checkpoint, whose start looks there for what a kill left.
            self._files.keep_drafts_below(base)
        elif not self._has_begun:
            above = os.path.dirname(directory)
            name = self._name or os.path.basename(above) or "checkpoints"
            self._files.begin(name, os.path.join(above, DEFAULT_DIRECTORY), above)
            self._has_begun = True

    def _failures(self) -> list[_Failure]:
        """The saves of this rank that failed since the last call, and why."""
        over = [each for each in self._asked if each.handle.done]
        self._asked[:] = [
            *[each for each in over if each.handle.committed and each.paths][-_ASKED_MAX:],
            *(each for each in self._asked if not each.handle.done),
        ]
        return [
            _Failure(each.save, str(error), isinstance(error, AbandonedError))
            for each in over
            if (error := each.handle.of.error) is not None
        ]

    def _hear(self, said: Sequence[_RankState]) -> None:
        """Give up what waits for saves that failed, and remove this rank's files of them. Raises
        ``AbandonedError`` as ``on_error`` says."""
        every = [(each, rank) for rank, one in enumerate(said) for each in one.failures]
        every.sort(key=lambda pair: pair[0].is_given_up)  # a cause before what followed
        failed: dict[str, str] = {}
        for each, rank in every:
            failed.setdefault(each.save, f"portus: a save was given up: rank {rank}: {each.text}")
        self._given_up.update(failed)
        for lost in [each for each in self._asked if each.save in failed]:
            self._asked.remove(lost)
            for path in lost.paths:
                self._files.remove(path)
        for text in failed.values():
            if self._settings.on_error == "raise":
                raise AbandonedError(text)
            if self._is_first:
                _log.error("%s", text)


@dataclass(frozen=True, slots=True)
class _RankSave:
    """A save of this rank: its id, the same on all ranks; and the files."""

    save: str
    handle: SaveHandle
    paths: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Failure:
    """The failure of a save, by its id. is_given_up: only because another part of it failed."""

    save: str
    text: str
    is_given_up: bool


@dataclass(frozen=True, slots=True)
class _RankState:
    """What a rank says before a save: an id for it, and what it found, and which of its saves
    failed."""

    id: str
    has_files: bool
    failures: Sequence[_Failure]


@dataclass(frozen=True, slots=True)
class _RankBegin:
    """What a rank says when its save has begun: the names of its files. problem: why it was
    refused. has_failed: it is over already, as where a disk is full."""

    names: tuple[str, ...]
    problem: PortusError | None
    has_failed: bool


@dataclass(slots=True)
class _Gate:
    """What the files of a rank wait for before they become visible: that all ranks have begun.
    save: its id. given_up: the ids of saves that failed, from now on too."""

    directory: str
    save: str
    given_up: Collection[str]
    _drafted: threading.Event = field(default_factory=threading.Event)
    _opened: threading.Event = field(default_factory=threading.Event)
    _others: Collection[str] = ()
    _is_open: bool = False

    def ready(self) -> None:
        """Report that the draft is durable, and block until all ranks have begun or one could not.
        On the worker. Raises ``AbandonedError`` if the draft is to be discarded."""
        self._drafted.set()
        self._opened.wait()
        if not self._is_open:
            raise AbandonedError("save given up: another rank could not begin its part")
        if self._others:
            await_files(self.directory, self._others, self.save, self.given_up)

    def await_draft(self, handle: SaveHandle) -> None:
        """Block until the draft is durable, or the save has failed."""
        while not self._drafted.wait(0.05) and not handle.done:
            continue

    def open(self, others: Collection[str]) -> None:
        """Let them become visible once ``others``, the files of other ranks, are there."""
        self._others, self._is_open = others, True

    @contextlib.contextmanager
    def never_shut(self) -> Iterator[None]:
        """The worker goes on at the end, whatever happened."""
        try:
            yield
        finally:
            self._opened.set()


def _has_files(directory: str) -> bool:
    """Whether a directory has files, or will have."""
    with PENDING.exempt():
        return os.path.isdir(directory) and bool(os.listdir(directory) or in_flight(directory))


def _require_committed(handle: SaveHandle | None, latest: LatestFile) -> None:
    """Raise ``AbandonedError`` if the save of ``handle``, which has ended, failed."""
    if handle is not None and not handle.committed:
        raise AbandonedError(
            f"{printable(latest.path)} still names the checkpoint before: {latest.text} could "
            "not be saved"
        )


def _exchange(word: Any) -> list[Any]:
    """What all ranks say, by rank. Collective."""
    said = [word] * standing()[1]
    if len(said) == 1:
        return said
    dist.all_gather_object(said, word)
    return said
