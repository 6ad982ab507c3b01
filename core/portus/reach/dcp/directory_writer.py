"""``PortusStorageWriter``: writes torch's checkpoint directories in the background, also with the
bytes of their files on storage hosts.

Each rank publishes one file, ``__R_N.distcp``; N is the number of the save, so files of different
saves do not conflict. The rank that coordinates publishes its file together with ``.metadata``,
once those of all others are there. Without ``.metadata`` stock torch sees no checkpoint, and with
it a complete one. Ranks exchange messages only in the planning: there, at the next save, each rank
reports which of its saves failed. A late save of a state with the same outline as the last one
reuses its plan, after one exchange (``plans``).
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from portus.companions.job.exchange import ID_SIZE, Failures, RankReport, standing
from portus.engine.files.pending import PENDING
from portus.engine.job.settings import Settings
from portus.engine.pipeline.handle import SaveHandle
from portus.errors import PortusError, UsageError, printable
from portus.reach.dcp.claim import SeriesClaim
from portus.reach.dcp.rank_files import RankSave, RankSaves
from portus.reach.index.place import Place, PlaceName, hosts_of
from portus.reach.shards.arrival import await_files, require_seen
from portus.reach.shards.directories import complete_beside, pickle_metadata, series_of, stale_in
from portus.reach.shards.plans import RankPlan, agree, values_of
from portus.reach.shards.rank_contents import (
    LAYOUTS,
    RankContents,
    ShardContents,
    in_bytes,
    resolve_items,
)
from portus.reach.shards.rank_file import METADATA, rank_image
from portus.reach.training.training_files import LiteralContents, TrainingFiles

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from portus.engine.job.settings import SettingsDict


@dataclass(frozen=True, slots=True)
class _Start:
    """The message to each rank: the number of the save, the rank's own number, and the failures of
    saves, by rank."""

    save: int
    rank: int
    failed: Sequence[Failures]


@dataclass(frozen=True, slots=True)
class _SaveOptions:
    """The options of the next save; a save by torch's own call has none of them."""

    files: Mapping[str, object] = field(default_factory=dict)
    step: int | None = None
    is_late: bool = False
    fenced: Sequence[torch.Tensor] = ()


class PortusStorageWriter(StorageWriter):
    """Saves a state as ``torch.distributed.checkpoint`` does, in the background.

    Make one on each rank, with the same arguments, before training starts, and keep it for the
    whole training. ``dcp.save(state, checkpoint_id="ckpt/step_100", storage_writer=writer)`` writes
    that directory, as torch's own storage would, and returns when it is complete; ``save`` returns
    before.

    place: the directory to save to if a save has no ``checkpoint_id``; or ``pool``.
    model: the name of the run, in the journal, in the mirror and on a storage host.
    links: the directory for the journal; None: ``.portus`` beside the checkpoints.
    keep: how many complete checkpoints stay, of directories whose names differ in their numbers
        alone; None: all.
    pool: the address of a storage host (``portus://host:7117``), or a list of several: the files of
        ranks go there, spread over the hosts, and the directories have pointers to them. None:
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
        if laid is None or (hosts is not None and laid is not RankContents):
            expected = " or ".join(LAYOUTS) if hosts is None else "torch, for a storage host"
            raise UsageError(f"layout: expected {expected}, found {layout!r:.200}")
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise UsageError(f"keep: expected 1 or more, found {keep!r:.200}")
        self._pool: Final = hosts
        self._default: Final = None if place is None or named else Place.parse(place).path
        named_values: Any = dict(keep=keep, links=links, layout=layout, pool=hosts, **settings)
        self._make: Final = partial(PortusStorageWriter, self._default, model, **named_values)
        self._layout: Final = laid
        self._settings: Final = Settings(**settings)
        self._name: Final = model
        self._keep: Final = keep
        self._links: Final = links
        self._files: TrainingFiles | None = None
        self._claims: Final[dict[tuple[str, str], SeriesClaim]] = {}
        self._directory = ""
        self._is_coordinator = False
        self._options = _SaveOptions()
        self._saves: Final = RankSaves(self._settings)
        self._count = 0
        self._start = _Start(0, 0, ())
        self._contents: ShardContents | None = None
        self._sizes: list[int] = []
        self._metadata: Metadata | None = None
        self._planned: RankPlan | None = None
        # Now, not at the first save: an optimizer's tensors are unknown until it has stepped.
        self._open_files().open()

    # The user's calls.

    @property
    def last(self) -> SaveHandle | None:
        """Return the handle of the newest save, see ``save``; None before the first one."""
        return self._saves.asked[-1].handle if self._saves.asked else None

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

        checkpoint_id: the directory. files: further states to save as torch files in it, by their
            names; those of the rank that coordinates count. blocking: return when the checkpoint is
            complete. step: of training; None: the number at the end of the name of the directory.
            process_group: all ranks of the job, with a backend for tensors on the CPU; None: the
            job's own. fenced: tensors that no code writes before ``fence`` was called.

        Returns the handle of this rank's part; on the rank that coordinates, of the whole
        checkpoint. Raises as ``portus.dcp.async_save``.
        """
        self._options = _SaveOptions(files or {}, step, not blocking, fenced)
        try:
            with call_torch():
                self._save(state, checkpoint_id, process_group)
        finally:  # those of a save that failed are not the next one's
            self._options = _SaveOptions()
        assert self.last is not None
        return self.last

    def _save(self, state: dict[str, Any], directory: Any, ranks: dist.ProcessGroup | None) -> None:
        self.reset(directory)
        state = values_of(state)
        # None while it is under way: an error leaves no plan that other ranks may not have.
        before, self._planned = self._planned, None
        # Always, since other ranks may have a planning of before.
        number = self._next().to_bytes(ID_SIZE, "big")
        word = RankReport(named=self._directory, id=number, failed=self._saves.take_failures())
        found, said = agree(before, state, partial(self._reuse_contents, before), word, ranks)
        self._saves.hear(said, self.remove, is_first=self._is_coordinator)
        if before is not None and found is not None:
            self._save_as_before(before, *found)
            self._planned = before
            return
        planner = DefaultSavePlanner()
        torch_save(
            state,
            checkpoint_id=directory,
            storage_writer=self,
            planner=planner,
            process_group=ranks,
        )
        number = self._start.save.to_bytes(ID_SIZE, "big")
        self._planned = RankPlan.of(number, planner, state, ranks, self._sizes, self._metadata)

    def link(self, link: str, target: str) -> None:
        """Make ``link`` refer to the directory ``target``, both absolute, once that is complete.
        Call it on the rank that coordinates. Raises ``OSError`` if links cannot be made."""
        self._open_files().link(link, target)

    def remove(self, directory: str | os.PathLike[str]) -> None:
        """Remove a checkpoint directory as soon as the newest save so far, or a later one, is
        complete. Call it on the rank that coordinates. Returns at once."""
        self._open_files().remove(os.path.realpath(directory))

    def fence(self) -> None:
        """Block until no save in flight reads a tensor of this rank. Optimizers that step do so
        automatically."""
        if self._files is not None:
            self._files.fence()

    def wait(self) -> None:
        """Block until this rank's saves have ended. Raises errors that were not reported yet."""
        if self._files is not None:
            self._files.wait()

    def close(self) -> None:
        """Finish the saves in flight. The writer may be used again."""
        files, self._files = self._files, None
        self._planned = None
        with contextlib.ExitStack() as closing:
            for claim in self._claims.values():
                closing.callback(claim.release)
            self._claims.clear()
            if files is None:
                return
            closing.callback(files.close)
            if self._keep is not None and self._is_coordinator:
                files.wait()  # saves in flight count now
                for path in self._surplus():
                    files.remove(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments with which pickle makes this writer in another process."""
        return self._make, ()

    # torch's calls.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any path is valid."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for a save to the directory ``checkpoint_id``."""
        named = os.fspath(checkpoint_id) if checkpoint_id else self._default
        if not named:
            raise UsageError("checkpoint_id: expected the directory to save to, found none")
        self._directory = os.path.realpath(os.fsdecode(named))

    def storage_meta(self) -> StorageMeta | None:
        """Return the metadata of the storage that torch keeps beside its plan."""
        return StorageMeta(checkpoint_id=self._directory)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare the save. Raises ``UsageError`` if it makes no whole checkpoint."""
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False: ranks that plan alone make no checkpoint that all of them "
                "have; leave it out"
            )
        if not self._directory:
            self.reset()
        self._is_coordinator = is_coordinator
        self._contents = self._metadata = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add this rank's report to the plan."""
        word = RankReport(named=self._directory, id=b"", failed=self._saves.take_failures())
        return replace(plan, storage_data=word)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add the number of the save, and the reports of all ranks."""
        words = [plan.storage_data for plan in plans]
        directories = {word.named for word in words}
        if len(directories) > 1:
            found = ", ".join(printable(each) for each in sorted(directories)[:2])
            raise UsageError(f"checkpoint_id: expected the same on all ranks, found {found}")
        # Before any rank writes: ranks do so once they have the plans that this returns.
        self._take()
        self._clear()
        failed = [word.failed for word in words]
        save = self._next()
        return [
            replace(plan, storage_data=_Start(save, rank, failed))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Begin to save this rank's items; on the rank that coordinates, ``finish`` does."""
        start = plan.storage_data
        # With cached plans torch returns those of the save before, whose number is taken.
        if not isinstance(start, _Start) or start.save in {each.save for each in self._saves.asked}:
            raise UsageError(
                "planner: its plans are those of an earlier save (enable_plan_caching); use one "
                "that plans each save"
            )
        self._start = start
        self._saves.hear(start.failed, self.remove, is_first=self._is_coordinator)
        contents = self._layout(plan.items, resolve_items(plan.items, planner))
        self._sizes = contents.sizes
        name = self._ask(start, contents)
        if self._is_coordinator:
            self._contents = contents
        else:
            self._begin(name, contents)
        future: Future[list[WriteResult]] = Future()
        future.set_result(contents.results(name))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Save the metadata, on the rank that coordinates. Return when the checkpoint is complete,
        or at once for a late save."""
        metadata.version = getattr(metadata, "version", None) or getattr(
            filesystem, "CURRENT_DCP_VERSION", "1.0.0"
        )
        metadata.storage_data = {each.index: each.storage_data for one in results for each in one}
        self._metadata = metadata
        contents, self._contents = self._contents, None  # it has copies of parts of storages
        assert contents is not None
        self._begin_whole(contents, metadata, len(results))

    def _next(self) -> int:
        """Return the number of the next save, on the rank that coordinates."""
        # A time, so no name returns after a restart; and rising, whatever the clock does.
        return max(time.time_ns(), max((each.save for each in self._saves.asked), default=0) + 1)

    def _ask(self, start: _Start, contents: ShardContents) -> str:
        """Begin a save that all ranks take part in. Return the name of this rank's file."""
        self._start, contents.save = start, start.save
        name = self._layout.file_name(start.rank, start.save)
        self._saves.asked.append(RankSave(start.save, [os.path.join(self._directory, name)]))
        return name

    def _begin(self, own: str, contents: ShardContents, **more: Any) -> SaveHandle:
        """Begin to save this rank's file, named ``own``. more: see ``save_directory``."""
        options, step, self._options = self._options, self._step(), _SaveOptions()
        files = {own: contents, **more.pop("files", {})}
        handle = self._begin_files().save_directory(
            self._directory, files, step, fenced=options.fenced, **more
        )
        self._saves.asked[-1].handle = handle
        return handle

    def _begin_whole(self, contents: ShardContents, metadata: Metadata, count: int) -> None:
        """Begin to save the file of the rank that coordinates, and the metadata of ``count`` ranks.
        Return when the checkpoint is complete, or at once for a late save."""
        start, options = self._start, self._options
        metadata.storage_meta = StorageMeta(checkpoint_id=self._directory, save_id=str(start.save))
        names = [self._layout.file_name(rank, start.save) for rank in range(count)]
        own = names.pop(start.rank)
        # Before this rank writes anything: the others have begun by now (decision 0213).
        if names and not self._open_files().has_begun:
            require_seen(self._directory, names)
        older = self._older(start.save)
        last = LiteralContents(rank_image([pickle_metadata(metadata)], start.save))
        handle = self._begin(
            own,
            contents,
            files={METADATA: last, **options.files},
            ready=partial(await_files, self._directory, names, start.save, self._saves.given_up),
        )
        # After the commit, by the queue: the earlier `.metadata` refers to them until then.
        for path in (*older, *self._surplus()):
            self._begin_files().remove(path)
        if not options.is_late:
            handle.wait()

    # Reused plans.

    def _reuse_contents(self, before: RankPlan | None, values: list[Any]) -> ShardContents | None:
        """Return this rank's contents, if the plan ``before`` still fits. Raise ``UsageError`` for
        a value that cannot be saved."""
        has_claim = self._open_files().has_begun and self._series() in self._claims
        is_new = self._is_coordinator and not has_claim
        if before is None or is_new or not self._options.is_late:
            return None
        if self._is_coordinator:
            self._clear()
        contents = self._layout(before.items, in_bytes(before.items, values))
        return contents if contents.sizes == before.sizes else None

    def _save_as_before(self, before: RankPlan, number: bytes, contents: ShardContents) -> None:
        save, rank = int.from_bytes(number, "big"), before.rank
        own = self._ask(_Start(save, rank, ()), contents)
        if before.metadata is None:  # another rank coordinates
            self._begin(own, contents)
            return
        metadata = before.metadata = copy.copy(before.metadata)
        assert metadata.storage_meta is not None
        name, old = self._layout.file_name, int(metadata.storage_meta.save_id or 0)
        names = {name(each, old): name(each, save) for each in range(before.count)}
        metadata.storage_data = {
            index: replace(place, relative_path=names[place.relative_path])
            for index, place in metadata.storage_data.items()
        }
        self._begin_whole(contents, metadata, before.count)

    # Between saves.

    def _open_files(self) -> TrainingFiles:
        if self._files is None:
            self._files = TrainingFiles(
                self._settings,
                of_directories=True,
                telling=re.escape(METADATA),
                pool=self._pool,
                is_named=self._name is not None,
                rank=standing()[0],
            )
        return self._files

    def _begin_files(self) -> TrainingFiles:
        files = self._open_files()
        if not files.has_begun:
            files.leads = self._is_coordinator  # unknown until now
            files.begin(self._name, self._links, os.path.dirname(self._directory))
        return files

    def _take(self) -> None:
        """Claim the series. Raises ``BusyError`` if another job has checkpoints of such names."""
        wanted = self._series()
        if wanted not in self._claims:
            with PENDING.exempt():
                os.makedirs(wanted[0], exist_ok=True)
                self._claims[wanted] = SeriesClaim(*wanted)

    def _clear(self) -> None:
        """Clear the directory before ranks write. Raises ``UsageError`` if no save may go there."""
        with PENDING.exempt():
            self._layout.clear(self._directory)

    def _series(self) -> tuple[str, str]:
        """Return the directory of this series, and the common part of its names."""
        above = os.path.dirname(self._directory)
        root = os.path.realpath(os.path.dirname(self._links)) if self._links else above
        if os.path.commonpath([root, above]) == root:
            above = root
        return above, series_of(os.path.relpath(self._directory, above))

    def _step(self) -> int:
        """Return the user's step, the number at the end of the directory's name, or a count."""
        self._count += 1
        if self._options.step is not None:
            return self._options.step
        digits = os.path.basename(self._directory)
        tail = digits[len(digits.rstrip("0123456789")) :]
        return int(tail) if tail and len(tail) < 16 else self._count

    def _older(self, save: int) -> list[str]:
        """Return the files of earlier saves to the same directory."""
        with PENDING.exempt():
            stale = stale_in(self._directory, save)
        before = [path for each in self._saves.asked if each.save < save for path in each.paths]
        stale.update(path for path in before if os.path.dirname(path) == self._directory)
        return sorted(stale)

    def _surplus(self) -> list[str]:
        if self._keep is None:
            return []
        with PENDING.exempt():
            return complete_beside(self._directory)[max(0, self._keep - 1) :]


@contextlib.contextmanager
def call_torch() -> Iterator[None]:
    """Raise the error of the lowest rank that has one of ours, in place of torch's exception."""
    with warnings.catch_warnings():
        # One process without a process group is a valid use.
        warnings.filterwarnings("ignore", "torch.distributed is")
        try:
            yield
        except CheckpointException as error:
            for _, failure in sorted(error.failures.items()):
                if isinstance(failure[0], PortusError):
                    raise failure[0] from error
            raise
