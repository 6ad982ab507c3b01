"""``PortusStorageWriter``: checkpoint directories as torch's own storage writes them, in the
background; also where storage hosts have the bytes of their files.

Each rank publishes one file, ``__R_N.distcp``; N is the number of the save, so no file of another
save is in the way. The rank that coordinates publishes its file together with ``.metadata``, once
those of all others are there. Without ``.metadata`` stock torch sees no checkpoint, and with it
there is a whole one. Nothing is told between ranks but for the planning: in that, at the next save,
each rank says which of its saves failed. A late save of a state that looks like the one before it
is planned as that was, after one exchange (``plans``).
"""

from __future__ import annotations

import copy
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from portus.companions.job.exchange import ID_SIZE, RankReport, standing
from portus.engine.files.pending import PENDING
from portus.engine.job.settings import Settings
from portus.engine.paths.request import PreparedFile
from portus.engine.pipeline.handle import SaveHandle
from portus.errors import AbandonedError, PortusError, UsageError, printable
from portus.reach.dcp.claim import SeriesClaim
from portus.reach.dcp.torch_calls import call_torch
from portus.reach.index.place import DEFAULT_DIRECTORY, Place, PlaceName, hosts_of
from portus.reach.shards.arrival import await_files, not_shared, unseen
from portus.reach.shards.directories import (
    complete_in,
    pickle_metadata,
    series_of,
    stale_in,
)
from portus.reach.shards.layouts import LAYOUTS, TORCH, ShardContents
from portus.reach.shards.metadata_file import NAME, metadata_image
from portus.reach.shards.plans import RankPlan, agree, values_of
from portus.reach.shards.rank_contents import in_bytes, resolve_items
from portus.reach.training.literal import LiteralContents
from portus.reach.training.training_files import TrainingFiles

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from portus.engine.job.settings import SettingsDict

_log: Final = logging.getLogger("portus")

_ASKED_MAX: Final = 16
"""Saves of which it is remembered whether they failed."""


@dataclass(frozen=True, slots=True)
class _RankReport:
    """What a rank tells the one that coordinates: where it saves, and which of its saves failed,
    and why."""

    directory: str
    failed: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _Start:
    """What all ranks are told: the number of the save, their own, and the failures of saves."""

    save: int
    rank: int
    failed: Mapping[int, str]


@dataclass(slots=True)
class _PlannedDirectory:
    """How the save before was planned. ``sizes``: of this rank's items. ``metadata``: of all ranks,
    with the places of their items; on the rank that coordinates."""

    planned: RankPlan
    sizes: list[int]
    metadata: Metadata | None


@dataclass(slots=True)
class _RankSave:
    """A save of this rank. ``handle``: None before it is begun."""

    save: int
    path: str
    handle: SaveHandle | None = None


class PortusStorageWriter(StorageWriter):
    """Saves a state as ``torch.distributed.checkpoint`` does, in the background.

    Make one on each rank, with the same arguments, before training starts, and keep it for the
    whole training. ``dcp.save(state, checkpoint_id="ckpt/step_100", storage_writer=writer)`` writes
    that directory, as torch's own storage would, and returns when it is complete; ``save`` returns
    before.

    place: the directory to save to where a save has no ``checkpoint_id``; or ``pool``.
    model: the name of the run, in the journal, in the mirror and on a storage host.
    links: the directory for the journal; None: ``.portus`` beside the checkpoints.
    keep: how many complete checkpoints stay, of directories whose names differ in their numbers
        alone; None: all.
    pool: the address of a storage host (``portus://host:7117``), or a list of several: the files of
        ranks go there, spread over them, and in the directories are pointers to them. None:
        ``$PORTUS_POOL`` if that is a storage host.
    layout: of directories; ``"torch"``, or ``"safetensors"``: as torch's
        ``HuggingFaceStorageWriter`` writes them with ``save_distributed``, for tensors alone.
    settings: as of ``portus.Checkpointer``.
    """

    def __init__(
        self,
        place: PlaceName | None = None,
        model: str | None = None,
        *,
        keep: int | None = None,
        links: str | None = None,
        layout: Literal["torch", "safetensors"] = "torch",
        pool: PlaceName | None = None,
        **settings: Unpack[SettingsDict],
    ) -> None:
        super().__init__()
        named = hosts_of(place)
        hosts = named or hosts_of(pool)
        if pool is not None and hosts is None:
            raise UsageError(
                f"pool: {Place.parse(pool)} is one pool, with one writer; shards go to directories "
                "of files, or to storage hosts"
            )
        laid = LAYOUTS.get(layout)
        if laid is None or (hosts is not None and laid is not TORCH):
            expected = " or ".join(LAYOUTS) if hosts is None else "torch, for a storage host"
            raise UsageError(f"layout: expected {expected}, found {layout!r:.200}")
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise UsageError(f"keep: expected 1 or more, found {keep!r:.200}")
        self._pool: Final = hosts
        self._default: Final = None if place is None or named else Place.parse(place).path
        self._arguments: Final[dict[str, Any]] = dict(
            place=self._default,
            model=model,
            keep=keep,
            links=links,
            layout=layout,
            pool=hosts,
            **settings,
        )
        self._layout: Final = laid
        self._settings: Final = Settings(**settings)
        self._name: Final = model
        self._keep: Final = keep
        self._links: Final = links
        self._files: TrainingFiles | None = None
        self._is_first = False
        self._claims: Final[dict[tuple[str, str], SeriesClaim]] = {}
        self._directory = ""
        self._is_coordinator = False
        self._is_late = False
        self._more: Mapping[str, object] = {}
        self._said: int | None = None
        self._fenced: Sequence[torch.Tensor] = ()
        self._has_begun = False
        self._asked: Final[list[_RankSave]] = []
        self._given_up: Final[set[int]] = set()
        self._count = 0
        self._start: _Start | None = None
        self._contents: ShardContents | None = None
        self._local = SavePlan([])
        self._sizes: list[int] = []
        self._metadata: Metadata | None = None
        self._planned: _PlannedDirectory | None = None
        # Now, not at the first save: until an optimizer has stepped nobody knows what it steps.
        self._open_files(is_first=standing()[0] == 0).open()

    # What a user calls.

    @property
    def last(self) -> SaveHandle | None:
        """The handle of the newest save, see ``save``; None before the first one."""
        return self._asked[-1].handle if self._asked else None

    def save(
        self,
        state: dict[str, Any],
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        files: Mapping[str, object] | None = None,
        blocking: bool = False,
        step: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        fenced: Sequence[torch.Tensor] = (),
    ) -> SaveHandle:
        """Begin to save ``state``. Call it on every rank.

        checkpoint_id: the directory. files: further states that are to be torch files in it, by
            their names; those of the rank that coordinates count. blocking: return when the
            checkpoint is complete. step: of training; None: the number at the end of the name of
            the directory. process_group: all ranks of the job, with a backend for tensors on the
            CPU; None: the job's own. fenced: tensors that nobody writes before ``fence`` was
            called.

        Returns the handle of this rank's part; on the rank that coordinates, of the whole
        checkpoint. Raises as ``portus.dcp.async_save``.
        """
        self._expect(files or {}, step, is_late=not blocking, fenced=fenced)
        with call_torch():
            self._save(state, checkpoint_id, process_group)
        assert self.last is not None
        return self.last

    def _expect(
        self,
        files: Mapping[str, object],
        step: int | None,
        *,
        is_late: bool,
        fenced: Sequence[torch.Tensor] = (),
    ) -> None:
        """Set what applies to the next save; a save of torch's own has none of it."""
        self._more, self._said, self._is_late, self._fenced = files, step, is_late, fenced

    def _save(self, state: dict[str, Any], directory: Any, ranks: dist.ProcessGroup | None) -> None:
        self.reset(directory)
        state, planner = values_of(state), DefaultSavePlanner()
        # None while it is under way: what raises leaves no plan that other ranks may not have.
        before, self._planned = self._planned, None
        # Always, for nobody knows whether the others have a planning of before.
        number = self._next().to_bytes(ID_SIZE, "big")
        word = RankReport(named=self._directory, id=number, failed=self._take_failures())
        planned = None if before is None else before.planned
        found, said = agree(
            planned, state, planner, partial(self._reuse_contents, before), word, ranks
        )
        self._hear(_failures(said))
        if before is not None and found is not None:
            self._save_as_before(before, *found)
            self._planned = before
            return
        torch_save(
            state,
            checkpoint_id=directory,
            storage_writer=self,
            planner=planner,
            process_group=ranks,
        )
        assert self._start is not None
        number = self._start.save.to_bytes(ID_SIZE, "big")
        self._planned = _PlannedDirectory(
            RankPlan.of(number, self._local, planner, state, ranks), self._sizes, self._metadata
        )

    def fetch(self, checkpoints: str | os.PathLike[str]) -> None:
        """Fetch what the mirror has of the run that saves to the directory ``checkpoints``, if the
        settings name a mirror and this machine lacks the newest of it. Call it on every rank, and
        have the others wait for the first one. Raises as ``portus.TrainingFiles.fetch``."""
        if standing()[0] == 0:
            above = os.path.realpath(checkpoints)
            self._open_files(is_first=True).fetch(*self._run(above), above)

    def link(self, link: str, target: str) -> None:
        """Have ``link`` lead to the directory ``target``, both absolute, once that is complete.
        Call it on the rank that coordinates. Raises ``OSError`` where no link can be made."""
        self._open_files().link(link, target)

    def remove(self, directory: str | os.PathLike[str]) -> None:
        """Remove a checkpoint directory as soon as the newest save so far, or a later one, is
        complete. Call it on the rank that coordinates. Returns at once."""
        self._open_files().remove(os.path.realpath(directory))

    def fence(self) -> None:
        """Block until no save in flight reads a tensor of this rank. Optimizers that step do so by
        themselves."""
        if self._files is not None:
            self._files.fence()

    def wait(self) -> None:
        """Block until this rank's saves are over. Raises what nobody heard of."""
        if self._files is not None:
            self._files.wait()

    def close(self) -> None:
        """Finish the saves in flight. It may be used again."""
        files, self._files = self._files, None
        self._has_begun, self._planned = False, None
        try:
            if files is not None:
                self._close(files)
        finally:
            while self._claims:
                self._claims.popitem()[1].release()

    def _close(self, files: TrainingFiles) -> None:
        try:
            if self._keep is not None and self._is_coordinator:
                files.wait()  # what was in flight counts now
                for path in self._surplus():
                    files.remove(path)
        finally:
            files.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs to make this writer in another process: its arguments."""
        return partial(PortusStorageWriter, **self._arguments), ()

    # What torch calls.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any path is valid."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save to ``checkpoint_id``, a directory, is about to begin."""
        named = os.fspath(checkpoint_id) if checkpoint_id else self._default
        if not named:
            raise UsageError("checkpoint_id: expected the directory to save to, found none")
        self._directory = os.path.realpath(os.fsdecode(named))

    def storage_meta(self) -> StorageMeta | None:
        """What torch keeps beside its plan."""
        return StorageMeta(checkpoint_id=self._directory)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ``UsageError`` for what makes no whole checkpoint."""
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False: ranks that plan alone make no checkpoint that all of them "
                "have; leave it out"
            )
        if not self._directory:
            self.reset()
        self._is_coordinator = is_coordinator
        self._contents = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds what this rank has to say."""
        self._local = plan
        return replace(plan, storage_data=_RankReport(self._directory, self._take_failures()))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds the number of the save, and what ranks said."""
        words = [plan.storage_data for plan in plans]
        directories = {word.directory for word in words}
        if len(directories) > 1:
            found = ", ".join(printable(each) for each in sorted(directories)[:2])
            raise UsageError(f"checkpoint_id: expected the same on all ranks, found {found}")
        # Before any rank writes: they do once they have the plans that this returns.
        self._take()
        self._clear()
        failed = _failures([word.failed for word in words])
        save = self._next()
        return [
            replace(plan, storage_data=_Start(save, rank, failed))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Begin to save this rank's items; on the rank that coordinates, ``finish`` does."""
        start = plan.storage_data
        # With cached plans torch hands out those of the save before, whose number is taken.
        if not isinstance(start, _Start) or start.save in {each.save for each in self._asked}:
            raise UsageError(
                "planner: its plans are those of an earlier save (enable_plan_caching); use one "
                "that plans each save"
            )
        self._start = start
        self._hear(start.failed)
        contents = self._layout.contents(plan.items, resolve_items(plan.items, planner))
        self._sizes = contents.sizes
        asked = self._ask(start, contents)
        if self._is_coordinator:
            self._contents = contents
        else:
            self._begin(asked, contents)
        future: Future[list[WriteResult]] = Future()
        future.set_result(contents.results(os.path.basename(asked.path)))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Save the metadata; on the rank that coordinates. Returns when the checkpoint is complete,
        or at once if it is late."""
        metadata.version = getattr(metadata, "version", None) or _version()
        metadata.storage_data = {each.index: each.storage_data for one in results for each in one}
        self._metadata = metadata
        contents, self._contents = self._contents, None  # it has copies of parts of storages
        assert contents is not None
        self._begin_whole(contents, metadata, len(results))

    def _next(self) -> int:
        """The number of the next save; on the rank that coordinates."""
        # A time, so that no name is used again after a restart; and rising, whatever the clock
        # does.
        return max(time.time_ns(), max((each.save for each in self._asked), default=0) + 1)

    def _ask(self, start: _Start, contents: ShardContents) -> _RankSave:
        """A save that all ranks take part in."""
        self._start, contents.save = start, start.save
        name = self._layout.file_name(start.rank, start.save)
        asked = _RankSave(start.save, os.path.join(self._directory, name))
        self._asked.append(asked)
        return asked

    def _begin(self, asked: _RankSave, contents: ShardContents) -> None:
        """Begin to save this rank's file, on a rank that does not coordinate."""
        asked.handle = self._begin_files().save_directory(
            self._directory,
            {os.path.basename(asked.path): PreparedFile(contents)},
            self._step(),
            fenced=self._fenced,
        )
        self._expect({}, None, is_late=False)

    def _begin_whole(self, contents: ShardContents, metadata: Metadata, count: int) -> None:
        """The file of the rank that coordinates, and the metadata of ``count`` ranks. Returns when
        the checkpoint is complete, or at once if it is late."""
        start, asked = self._start, self._asked[-1]
        assert start is not None
        more, is_late, step, fenced = self._more, self._is_late, self._step(), self._fenced
        self._expect({}, None, is_late=False)
        metadata.storage_meta = StorageMeta(checkpoint_id=self._directory, save_id=str(start.save))
        own = os.path.basename(asked.path)
        others = [self._layout.file_name(rank, start.save) for rank in range(count)]
        others.remove(own)
        # Before anything of this rank is written: the others have begun by now (decision 0213).
        self._refuse_node_local(others)
        older = self._older(start.save)
        pickled = metadata_image(pickle_metadata(metadata))
        handle = self._begin_files().save_directory(
            self._directory,
            {own: PreparedFile(contents), NAME: PreparedFile(LiteralContents(pickled)), **more},
            step,
            ready=partial(await_files, self._directory, others, start.save, self._given_up),
            fenced=fenced,
        )
        asked.handle = handle
        # After the commit, by the queue: `.metadata` of before leads to them until then.
        for path in (*older, *self._surplus()):
            self._begin_files().remove(path)
        if not is_late:
            handle.wait()

    # Planned as before.

    def _reuse_contents(
        self, before: _PlannedDirectory | None, values: list[Any]
    ) -> ShardContents | None:
        """What this rank saves, if it may be as ``before``. Raises ``UsageError`` for what cannot
        be saved."""
        is_new = self._is_coordinator and not self._has_claim()
        if before is None or is_new or not self._is_late:
            return None
        if self._is_coordinator:
            self._clear()
        items = before.planned.final.items
        contents = self._layout.contents(items, in_bytes(items, values))
        return contents if contents.sizes == before.sizes else None

    def _save_as_before(
        self, before: _PlannedDirectory, number: bytes, contents: ShardContents
    ) -> None:
        save, rank = int.from_bytes(number, "big"), before.planned.rank
        asked = self._ask(_Start(save, rank, {}), contents)
        if not self._is_coordinator:
            self._begin(asked, contents)
            return
        assert before.metadata is not None
        metadata = before.metadata = copy.copy(before.metadata)
        metadata.storage_data = {
            index: replace(place, relative_path=self._layout.renumbered(place.relative_path, save))
            for index, place in metadata.storage_data.items()
        }
        self._begin_whole(contents, metadata, before.planned.count)

    # Between saves.

    def _open_files(self, *, is_first: bool | None = None) -> TrainingFiles:
        if self._files is None:
            self._is_first = self._is_coordinator if is_first is None else is_first
            # One rank sees to the files of all, which are in one directory.
            alone = replace(self._settings, journal=False, mirror="none")
            settings = self._settings if self._is_first else alone
            self._files = TrainingFiles(
                settings,
                of_directories=True,
                telling=re.escape(NAME),
                # The rank that coordinates removes files of all; this one keeps links to its own,
                # to write over what was removed.
                removed_elsewhere=not self._is_first and self._pool is None,
                pool=self._pool,
                is_named=self._name is not None,
                rank=standing()[0],
            )
        return self._files

    def _run(self, above: str) -> tuple[str, str]:
        """What the run that saves to ``above`` is called, and where its journal is."""
        name = self._name or os.path.basename(above) or "checkpoints"
        return name, self._links or os.path.join(above, DEFAULT_DIRECTORY)

    def _begin_files(self) -> TrainingFiles:
        if self._files is not None and self._is_first != self._is_coordinator:
            self._files.close()  # it was made before the ranks were known
            self._files = None
        files = self._open_files()
        if not self._has_begun:
            above = os.path.dirname(self._directory)
            files.begin(*self._run(above), above)
            self._has_begun = True
        return files

    def _take(self) -> None:
        """Raises ``BusyError`` if another job has checkpoints of such names."""
        wanted = self._series()
        if wanted not in self._claims:
            with PENDING.exempt():
                os.makedirs(wanted[0], exist_ok=True)
                self._claims[wanted] = SeriesClaim(*wanted)

    def _clear(self) -> None:
        """Clear the directory before ranks write. Raises ``UsageError`` if no save may go there."""
        with PENDING.exempt():
            self._layout.clear(self._directory)

    def _has_claim(self) -> bool:
        return self._has_begun and self._series() in self._claims

    def _series(self) -> tuple[str, str]:
        """The names of checkpoints that this one has one of, and where they are."""
        above = os.path.dirname(self._directory)
        root = os.path.realpath(os.path.dirname(self._links)) if self._links else above
        if os.path.commonpath([root, above]) == root:
            above = root
        return above, series_of(os.path.relpath(self._directory, above))

    def _step(self) -> int:
        """What was said, or the number at the end of the directory's name; else saves are
        counted."""
        self._count += 1
        if self._said is not None:
            return self._said
        digits = os.path.basename(self._directory)
        tail = digits[len(digits.rstrip("0123456789")) :]
        return int(tail) if tail and len(tail) < 16 else self._count

    def _take_failures(self) -> dict[int, str]:
        """The saves of this rank that failed since the last call."""
        failed, left = {}, []
        for each in self._asked:
            # Planned, and not begun: a rank raised in between, so its file will never be there.
            if each.handle is None:
                failed[each.save] = "the save was not begun on all ranks"
            elif each.handle.done and not each.handle.committed:
                failed[each.save] = _reason(each.handle)
            else:
                left.append(each)
        # A save that failed is told within two saves, so older ones need no memory (decision 0213).
        self._asked[:] = left[-_ASKED_MAX:]
        return failed

    def _hear(self, failed: Mapping[int, str]) -> None:
        """Give up what waits for saves that will never be complete, and remove this rank's files.
        Raises ``AbandonedError`` as ``on_error`` says."""
        self._given_up.update(failed)
        for each in [each for each in self._asked if each.save in failed]:
            self._asked.remove(each)
            # The file of the rank that coordinates never became visible: it comes with `.metadata`.
            if each.handle is not None and not self._is_coordinator:
                self._begin_files().remove(each.path)
        for why in failed.values():
            text = f"portus: a sharded save was given up: {why}"
            if self._settings.on_error == "raise":
                raise AbandonedError(text)
            if self._is_coordinator:
                _log.error("%s", text)

    def _refuse_node_local(self, others: Sequence[str]) -> None:
        """Raise ``UsageError``, at the first save, if the files of others cannot be seen here."""
        if self._has_begun or not others:
            return
        with PENDING.exempt():
            missing = unseen(self._directory, others)
        if missing:
            raise not_shared(self._directory, missing)

    def _older(self, save: int) -> list[str]:
        """The files of earlier saves to the same directory."""
        with PENDING.exempt():
            stale = stale_in(self._directory, save)
        stale |= {
            each.path
            for each in self._asked
            if each.save < save and os.path.dirname(each.path) == self._directory
        }
        return sorted(stale)

    def _surplus(self) -> list[str]:
        if self._keep is None:
            return []
        above, name = os.path.split(self._directory)
        with PENDING.exempt():
            before = [each for each in complete_in(above, name) if each != self._directory]
        return before[max(0, self._keep - 1) :]


def _failures(said: Sequence[Mapping[int, str]]) -> dict[int, str]:
    """The saves that failed on some rank, and why."""
    failed: dict[int, str] = {}
    for rank, one in enumerate(said):
        for save, why in one.items():
            failed.setdefault(save, f"rank {rank}: {why}")
    return failed


def _version() -> str:
    from torch.distributed.checkpoint import filesystem

    return str(getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0"))


def _reason(handle: SaveHandle) -> str:
    try:
        handle.wait(0)
    except PortusError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
