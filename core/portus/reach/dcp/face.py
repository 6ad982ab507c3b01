"""``PortusStorageWriter`` and ``PortusStorageReader``: torch's own checkpoint directories, also
where storage hosts have the bytes of their files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from portus.engine.job.settings import Settings
from portus.engine.pipeline.handle import SaveHandle
from portus.errors import UsageError
from portus.reach.dcp.directory_writer import DirectoryWriter
from portus.reach.dcp.whole_calls import save_with
from portus.reach.index.place import Place, PlaceName
from portus.reach.pools.resolve import allow
from portus.reach.shards.directory_reader import DirectoryReader
from portus.reach.shards.layouts import LAYOUTS, TORCH

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from portus.engine.job.settings import SettingsDict


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
        named = _host_of(place)
        hosts = named or _host_of(pool)
        laid = LAYOUTS.get(layout)
        if laid is None or (hosts is not None and laid is not TORCH):
            expected = " or ".join(LAYOUTS) if hosts is None else "torch, for a storage host"
            raise UsageError(f"layout: expected {expected}, found {layout!r:.200}")
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise UsageError(f"keep: expected 1 or more, found {keep!r:.200}")
        self._writer: Final = DirectoryWriter(
            None if named is not None else _path_of(place),
            Settings(**settings),
            name=model,
            keep=keep,
            links=links,
            layout=laid,
            pool=hosts,
        )

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
        return save_with(
            self._writer,
            state,
            checkpoint_id,
            files=files,
            step=step,
            process_group=process_group,
            is_late=not blocking,
            fenced=fenced,
        )

    def fetch(self, checkpoints: str | os.PathLike[str]) -> None:
        """Fetch what the mirror has of the run that saves to the directory ``checkpoints``, if the
        settings name a mirror and this machine lacks the newest of it. Call it on every rank, and
        have the others wait for the first one. Raises as ``portus.TrainingFiles.fetch``."""
        self._writer.fetch(os.fspath(checkpoints))

    def link(self, link: str, target: str) -> None:
        """Have ``link`` lead to the directory ``target``, both absolute, once that is complete.
        Call it on the rank that coordinates. Raises ``OSError`` where no link can be made."""
        self._writer.link(link, target)

    def remove(self, directory: str | os.PathLike[str]) -> None:
        """Remove a checkpoint directory as soon as the newest save so far, or a later one, is
        complete. Call it on the rank that coordinates. Returns at once."""
        self._writer.remove(os.fspath(directory))

    def fence(self) -> None:
        """Block until no save in flight reads a tensor of this rank. Optimizers that step do so by
        themselves."""
        self._writer.fence()

    def wait(self) -> None:
        """Block until this rank's saves are over. Raises what nobody heard of."""
        self._writer.wait()

    @property
    def last(self) -> SaveHandle | None:
        """The handle of the newest save, see ``save``; None before the first one."""
        return self._writer.last

    def close(self) -> None:
        """Finish the saves in flight."""
        self._writer.close()

    # What torch calls.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name will do."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for a save to ``checkpoint_id``."""
        self._writer.reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return what torch keeps beside its plan."""
        return self._writer.storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare this rank for a save."""
        self._writer.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds what this rank has to say."""
        return self._writer.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds what all ranks have to know."""
        return self._writer.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Begin to save this rank's items."""
        return self._writer.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Save the metadata; on the rank that coordinates."""
        self._writer.finish(metadata, results)


class PortusStorageReader(StorageReader):
    """Loads what ``PortusStorageWriter`` saved, or torch's own storage, verified.

    place: the checkpoint directory, where a load has no ``checkpoint_id``. verify: False compares
        no digests of tensors.

    Storage hosts are asked if they are allowed: see ``portus.allow``.
    """

    def __init__(self, place: PlaceName | None = None, *, verify: bool = True) -> None:
        super().__init__()
        hosts = _host_of(place)
        if hosts is not None:
            allow(hosts)
        self._reader: Final = DirectoryReader(
            None if hosts is not None else _path_of(place), verify=verify
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name will do."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for a load from ``checkpoint_id``."""
        self._reader.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what torch noted."""
        return self._reader.read_metadata(*args, **kwargs)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata, which all ranks have now."""
        self._reader.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds what this rank has to say."""
        return self._reader.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Adds what all ranks have to know."""
        return self._reader.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load what this rank needs."""
        return self._reader.read_data(plan, planner)


def _host_of(place: PlaceName | None) -> Place | None:
    """The storage hosts that are named; None for a directory."""
    found = Place.by_variable() if place is None else Place.parse(place)
    return found if found is not None and found.is_shared else None


def _path_of(place: PlaceName | None) -> str | None:
    return None if place is None else Place.parse(place).path
