"""``PortusStorageWriter`` and ``PortusStorageReader``: torch's own checkpoint directories; where
shards go to storage hosts, groups there."""

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

from portus.client.dcp.directory_writer import DirectoryWriter
from portus.client.dcp.group_writer import GroupWriter
from portus.client.dcp.whole_calls import save_with
from portus.client.job.settings import Settings
from portus.client.shards.directory_reader import DirectoryReader
from portus.client.shards.group_reader import GroupReader
from portus.client.shards.layouts import LAYOUTS, TORCH, DirectoryLayout
from portus.directory.links import replace_link
from portus.errors import UsageError
from portus.index.keep import Keep
from portus.index.place import Place, PlaceName
from portus.pipeline.handle import SaveHandle

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from portus.client.job.settings import SettingsDict


class PortusStorageWriter(StorageWriter):
    """Saves a state as ``torch.distributed.checkpoint`` does, in the background.

    Make one on each rank, with the same arguments, before training starts, and keep it for the
    whole training. ``dcp.save(state, checkpoint_id="ckpt/step_100", storage_writer=writer)`` writes
    that directory, as torch's own storage would, and returns when it is complete; ``save`` returns
    before.

    place: the directory to save to where a save has no ``checkpoint_id``. Or the address of a
        storage host (``portus://host:7117``), or a list of several: then ``checkpoint_id`` is a
        name there. None: ``$PORTUS_POOL`` if that is a storage host.
    model: the name of the run, in the journal, in the mirror and on a storage host.
    links: the directory for the journal, and on a storage host for the links, see ``Checkpointer``;
        None: ``.portus`` beside the checkpoints.
    keep: how many complete checkpoints stay, of directories whose names differ in their numbers
        alone; None: all. On a storage host a ``portus.Keep`` too, and 2 if nothing is said.
    layout: of directories; ``"torch"``, or ``"safetensors"``: as torch's
        ``HuggingFaceStorageWriter`` writes them with ``save_distributed``, for tensors alone.
    settings: as of ``portus.Checkpointer``.
    """

    def __init__(
        self,
        place: PlaceName | None = None,
        model: str | None = None,
        *,
        keep: int | Keep | None = None,
        links: str | None = None,
        layout: Literal["torch", "safetensors"] = "torch",
        **settings: Unpack[SettingsDict],
    ) -> None:
        super().__init__()
        host = _host_of(place)
        laid = LAYOUTS.get(layout)
        if laid is None or (host is not None and laid is not TORCH):
            expected = " or ".join(LAYOUTS) if host is None else "torch, for a storage host"
            raise UsageError(f"layout: expected {expected}, found {layout!r:.200}")
        self._writer: Final[DirectoryWriter | GroupWriter] = (
            _directory_writer(place, model, keep, links, laid, Settings(**settings))
            if host is None
            else GroupWriter(
                place, model or "default", keep=2 if keep is None else keep, links=links, **settings
            )
        )

    def save(
        self,
        state: dict[str, Any],
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        files: Mapping[str, object] | None = None,
        blocking: bool = False,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        process_group: dist.ProcessGroup | None = None,
        fenced: Sequence[torch.Tensor] = (),
    ) -> SaveHandle:
        """Begin to save ``state``. Call it on every rank.

        checkpoint_id: the directory. files: further states that are to be torch files in it, by
            their names; those of the rank that coordinates count. blocking: return when the
            checkpoint is complete. step: of training; None: the number at the end of the name of
            the directory. metrics: on a storage host, of the save. process_group: all ranks of the
            job, with a backend for tensors on the CPU; None: the job's own. fenced: tensors that
            nobody writes before ``fence`` was called; for directories.

        Returns the handle of this rank's part; on the rank that coordinates, of the whole
        checkpoint in a directory. Raises as ``portus.dcp.async_save``.
        """
        writer = self._writer
        if isinstance(writer, GroupWriter):
            if step is None:
                raise UsageError("step: expected the training step of this state, found none")
            if files or blocking:
                raise UsageError("files and blocking are for directories, not for storage hosts")
            return writer.save(
                state,
                step=step,
                checkpoint_id=checkpoint_id,
                metrics=metrics,
                process_group=process_group,
            )
        if metrics:
            raise UsageError("metrics: directories have none; leave it out")
        return save_with(
            writer,
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
        if isinstance(self._writer, DirectoryWriter):
            self._writer.fetch(os.fspath(checkpoints))

    def link(self, link: str, target: str) -> None:
        """Have ``link`` lead to the directory ``target``, both absolute, once that is complete.
        Call it on the rank that coordinates. Raises ``OSError`` where no link can be made."""
        if isinstance(self._writer, DirectoryWriter):
            self._writer.link(link, target)
        else:
            replace_link(link, target)

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
        """A save to ``checkpoint_id`` is about to begin."""
        self._writer.reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """What torch keeps beside its plan."""
        return self._writer.storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """A save begins on this rank."""
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

    place: the checkpoint directory, where a load has no ``checkpoint_id``; or the storage host, or
        a list of them. None: ``$PORTUS_POOL`` if that is a storage host. model, step: of the save
        on a storage host; None: the newest. verify: False compares no digests of tensors.
    """

    def __init__(
        self,
        place: PlaceName | None = None,
        model: str | None = None,
        *,
        step: int | None = None,
        verify: bool = True,
    ) -> None:
        super().__init__()
        host = _host_of(place)
        if host is None and (model is not None or step is not None):
            raise UsageError(
                "model and step say what to load from a storage host; a directory is named by "
                "checkpoint_id"
            )
        self._reader: Final[DirectoryReader | GroupReader] = (
            DirectoryReader(_path_of(place), verify=verify)
            if host is None
            else GroupReader(place, model or "default", step=step)
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name will do."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load from ``checkpoint_id`` is about to begin."""
        self._reader.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what torch noted."""
        return self._reader.read_metadata(*args, **kwargs)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """All ranks have the metadata now."""
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
    """The storage hosts that are meant; None for a directory."""
    found = Place.by_variable() if place is None else Place.named(place)
    return found if found is not None and found.is_host else None


def _path_of(place: PlaceName | None) -> str | None:
    return None if place is None else Place.named(place).path


def _directory_writer(
    place: PlaceName | None,
    model: str | None,
    keep: int | Keep | None,
    links: str | None,
    layout: DirectoryLayout,
    settings: Settings,
) -> DirectoryWriter:
    if isinstance(keep, Keep):
        raise UsageError("keep: expected a number for directories, found a portus.Keep")
    if keep is not None and keep < 1:
        raise UsageError(f"keep: expected 1 or more, found {keep}")
    return DirectoryWriter(
        _path_of(place), settings, name=model, keep=keep, links=links, layout=layout
    )
