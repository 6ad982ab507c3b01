"""``portus.dcp``: a Portus pool as the storage of ``torch.distributed.checkpoint``.

torch plans who saves which shard, and reshards at load; here is only where the bytes are. Each
rank has a pool file of its own in one pool directory. A save is a *group*, one part per rank, see
``portus.index.groups``: nothing is told between ranks after the planning, which torch does on the
thread that called. The rank that coordinates makes the group's id, and keeps torch's metadata in
its own part, as typed values. Nothing is pickled on the medium.

``save`` returns while the shards are still being copied; the fence of ``Checkpointer`` holds the
optimizer up meanwhile. Called from another thread, as by ``async_save``, a save returns when this
rank's part is committed, since torch's future promises that.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from portus.client import restore, view
from portus.client.checkpointer import Checkpointer
from portus.client.view import PoolFile
from portus.errors import CorruptionError, PortusError, StaleError, UsageError
from portus.index.directory import default_directory, pool_files
from portus.index.groups import Group, groups_of, new_id, part_model, part_token, surplus
from portus.pipeline.handle import SaveHandle
from portus.spec import VersionInfo

_METADATA: Final = "metadata"
_ITEMS: Final = "items"
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where an item is: the rank whose part holds it, and under which key."""

    rank: int
    key: str


class PortusStorageWriter(StorageWriter):
    """Saves the shards of this rank into its own pool file. Keep one for the whole training.

    ``dcp.save(state, checkpoint_id="step_100", storage_writer=writer)``: the step is the number at
    the end of ``checkpoint_id``, else a count. Every rank makes one, with the same arguments,
    when the process group is there and before training starts.

    pool: a pool directory on a file system that all ranks see; None: ``$PORTUS_POOL``, else
        ``.portus``. model: the name of the run. keep: complete groups kept; None keeps all.
    synchronous: ``dcp.save`` returns when this rank's part is committed.
    The others are those of ``Checkpointer``.
    """

    def __init__(
        self,
        pool: str | os.PathLike[str] | None = None,
        model: str = "default",
        *,
        keep: int | None = 2,
        synchronous: bool = False,
        on_error: Literal["warn", "raise"] = "warn",
        fence_timeout: float = 60.0,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.place: Final = os.path.abspath(os.fspath(pool or default_directory()))
        if os.path.isfile(self.place):
            raise UsageError(f"{self.place}: every rank has a file of its own; give a directory")
        if keep is not None and keep < 1:
            raise UsageError(f"keep: expected at least 1, or None for all, found {keep}")
        self.model: Final = model
        self._keep: Final = keep
        self._synchronous: Final = synchronous
        self._settings: Final[dict[str, Any]] = {
            "on_error": on_error,
            "fence_timeout": fence_timeout,
            "max_bytes": max_bytes,
        }
        self._checkpointer: Checkpointer | None = None
        self._step = 0
        self._rank = 0
        self._count = 1
        self._parts: dict[str, Any] | None = None
        self._group = b""
        self._is_coordinator = False
        self._handle: SaveHandle | None = None
        if dist.is_available() and dist.is_initialized():
            # So that steps are seen before the first save, which is then in the background too.
            self._rank, self._count = dist.get_rank(), dist.get_world_size()
            self._open()

    # What a user calls.

    def wait(self, timeout: float | None = None) -> None:
        """Return when this rank's saves are over. Raises as ``Checkpointer.wait``."""
        if self._checkpointer is not None:
            self._checkpointer.wait(timeout)

    @property
    def last(self) -> SaveHandle | None:
        """This rank's part of the newest save."""
        return self._handle

    def close(self) -> None:
        """Finish what is in flight and let go of the pool. A second call does nothing."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    # What torch calls, in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save begins."""
        self._step = _step_of(checkpoint_id, self._step + 1)
        self._parts = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ``UsageError`` where ranks do not plan together."""
        self._is_coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise UsageError("ranks that plan apart make no group: save with use_collectives=True")
        together = dist.is_available() and dist.is_initialized()
        rank, count = kwargs.get("rank", 0), dist.get_world_size() if together else 1
        if self._checkpointer is not None and (rank, count) != (self._rank, self._count):
            self.close()
        self._rank, self._count = rank, count

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: tell every rank the id of this group."""
        if len(plans) != self._count:
            raise UsageError(
                f"{len(plans)} ranks plan this save and {self._count} are in the job: save from "
                "all ranks, or give each process group a model of its own"
            )
        group = new_id()
        return [replace(plan, storage_data=group) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Start to save this rank's shards, and say where they are going to be."""
        parts: dict[str, Any] = {}
        results = []
        for item in plan.items:
            key = f"i{len(parts)}"
            parts[key] = _value_of(item, planner)
            size = parts[key].nbytes if isinstance(parts[key], torch.Tensor) else 0
            results.append(WriteResult(item.index, size, _Placed(self._rank, key)))
        self._group = plan.storage_data
        self._parts = parts
        if not self._is_coordinator:
            self._save({"format": FORMAT, _ITEMS: parts})
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all others have started: its own shards, and the metadata."""
        placed = {result.index: result.storage_data for part in results for result in part}
        content = {"format": FORMAT, _METADATA: _encode(metadata, placed), _ITEMS: self._parts}
        self._save(content)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name will do: only a number at its end is looked at."""
        return True

    def _save(self, content: dict[str, Any]) -> None:
        checkpointer = self._open()
        token = part_token(self._group, self._rank)
        aside = threading.current_thread() is not threading.main_thread()
        self._handle = checkpointer.save(
            content, self._step, token=token, synchronous=self._synchronous or aside
        )
        self._parts = None
        if aside:
            self._handle.wait()

    def _open(self) -> Checkpointer:
        if self._checkpointer is None:
            name = part_model(self.model, self._rank, self._count)
            self._checkpointer = Checkpointer(self.place, name, keep=None, **self._settings)
            self._checkpointer.surplus = self._surplus
        return self._checkpointer

    def _surplus(self, own: Sequence[VersionInfo]) -> list[int]:
        """On the worker, before a commit: what this rank may let go of."""
        if self._keep is None or len(own) <= self._keep:
            return []
        try:
            known = groups(self.place, self.model)
        except PortusError:
            return []  # a peer's pool cannot be read now: nothing is known to be complete
        return surplus(own, known, self._keep)


class PortusStorageReader(StorageReader):
    """Loads a group, at any number of ranks. ``dcp.load(state, storage_reader=reader)``.

    step: of the group; None: the number at the end of ``checkpoint_id``, else the newest group
    that is complete. pool, model: as for ``PortusStorageWriter``.
    """

    def __init__(
        self,
        pool: str | os.PathLike[str] | None = None,
        model: str = "default",
        *,
        step: int | None = None,
    ) -> None:
        super().__init__()
        self.place: Final = os.path.abspath(os.fspath(pool or default_directory()))
        self.model: Final = model
        self._step: Final = step
        self._asked = step
        self._group: Group | None = None
        self._placed: dict[MetadataIndex, _Placed] = {}

    @property
    def group(self) -> Group | None:
        """What was loaded last: its step, its ranks."""
        return self._group

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins."""
        number = _step_of(checkpoint_id, None)
        self._asked = self._step if self._step is not None else number
        self._group = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Choose the group. Raises ``UsageError`` naming what is missing if none is complete."""
        found = chosen(groups(self.place, self.model), self.place, self.model, self._asked)
        for rank in sorted(found.parts):  # the coordinator's has it: nearly always the first
            content = _load_part(found, rank, [_METADATA, "format"])
            if content.get("format") != FORMAT:
                raise UsageError(f"{_name(found)}: written by a newer Portus; upgrade this one")
            if _METADATA in content:
                metadata, self._placed = _decode(content[_METADATA])
                self._group = found
                return metadata
        raise CorruptionError(f"{_name(found)}: no part of it holds the metadata")

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which group this rank chose."""
        assert self._group is not None
        return replace(plan, storage_data=self._group.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator. Raises ``StaleError`` if ranks chose different groups."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise StaleError(
                f"{self.place}: a group of {self.model!r} was committed while its ranks looked for "
                "the newest one: load again, or name the step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load what this rank needs, one rank's part after another. Raises as loads do."""
        assert self._group is not None
        by_rank: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            by_rank.setdefault(self._placed[item.storage_index].rank, []).append(item)
        for rank, items in sorted(by_rank.items()):
            keys = {self._placed[item.storage_index].key for item in items}
            content = _load_part(self._group, rank, [f"{_ITEMS}.{key}" for key in sorted(keys)])
            for item in items:
                _hand_over(item, content[_ITEMS][self._placed[item.storage_index].key], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name will do: only a number at its end is looked at."""
        return True


def groups(pool: str | os.PathLike[str], model: str | None = None) -> list[Group]:
    """The groups in a pool directory, complete or not, newest last.

    Raises ``UsageError`` if there is no pool, and what opening one of its files raises.
    """
    found = []
    for path in pool_files(pool):
        with contextlib.closing(PoolFile(path)) as file:
            found += [(path, info) for info in file.versions()]
    return groups_of(found, model)


def chosen(found: Sequence[Group], place: str, model: str, step: int | None) -> Group:
    """The newest complete group, of a step or of any. Raises ``UsageError`` that says which ranks
    are missing if there is none."""
    fitting = [group for group in found if step is None or group.step == step]
    complete = [group for group in fitting if group.is_complete]
    if complete:
        return complete[-1]
    if fitting:
        raise UsageError(
            f"{_name(fitting[-1])} is not complete: of {fitting[-1].count} ranks, those of "
            f"{_few(fitting[-1].missing)} are not in {place}. They never committed, or their pool "
            "files were lost; no older group is complete"
        )
    steps = sorted({group.step for group in found if group.is_complete})
    raise UsageError(
        f"{place}: no group of model {model!r}"
        + (f" has step {step}; there are steps {steps}" if steps else "; nothing sharded is there")
    )


def _load_part(group: Group, rank: int, names: list[str]) -> dict[str, Any]:
    path, info = group.parts[rank]
    try:
        with contextlib.closing(PoolFile(path)) as file:
            entry = view.of_token(file.reader.catalogue(), info.token)
            content = restore.load(file.reader, entry, names)
    except CorruptionError as error:
        raise CorruptionError(f"{_name(group)}, the part of rank {rank}: {error}") from error
    if not isinstance(content, dict):
        raise CorruptionError(f"{_name(group)}, the part of rank {rank}: its state is no dict")
    return content


def _value_of(item: WriteItem, planner: SavePlanner) -> Any:
    """The live shard, or the object itself: not the pickle that torch would make of it."""
    if item.type == WriteItemType.BYTE_IO:
        lookup = getattr(planner, "lookup_object", None)
        if lookup is None:
            raise UsageError(f"{type(planner).__name__} does not hand out objects (lookup_object)")
        return lookup(item.index)
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach()


def _hand_over(item: ReadItem, value: Any, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        buffer = io.BytesIO()
        torch.save(value, buffer)  # torch's planner reads nothing else; it never leaves memory
        buffer.seek(0)
        planner.load_bytes(item, buffer)
        return
    target = planner.resolve_tensor(item).detach()
    for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        value = value.narrow(axis, start, length)
    if target.size() != value.size():
        raise UsageError(
            f"{item.storage_index.fqn}: the state has shape {tuple(target.size())} where the "
            f"checkpoint has {tuple(value.size())}"
        )
    target.copy_(value)
    planner.commit_tensor(item, target)


# torch's metadata as plain values.


def _encode(metadata: Metadata, placed: dict[MetadataIndex, _Placed]) -> dict[str, Any]:
    entries = {}
    for name, entry in metadata.state_dict_metadata.items():
        entries[name] = None if isinstance(entry, BytesStorageMetadata) else _encode_tensor(entry)
    return {
        "entries": entries,
        "planner": metadata.planner_data,
        "placed": [
            (index.fqn, None if index.offset is None else list(index.offset), at.rank, at.key)
            for index, at in placed.items()
        ],
    }


def _encode_tensor(entry: TensorStorageMetadata) -> dict[str, Any]:
    return {
        "dtype": entry.properties.dtype,
        "requires_grad": entry.properties.requires_grad,
        "size": list(entry.size),
        "chunks": [(list(chunk.offsets), list(chunk.sizes)) for chunk in entry.chunks],
    }


def _decode(saved: Any) -> tuple[Metadata, dict[MetadataIndex, _Placed]]:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    try:
        for name, entry in saved["entries"].items():
            entries[name] = BytesStorageMetadata() if entry is None else _decode_tensor(entry)
        placed = {
            MetadataIndex(name, offset): _Placed(rank, key)
            for name, offset, rank, key in saved["placed"]
        }
        metadata = Metadata(entries, saved["planner"], placed)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"metadata of a sharded checkpoint: {error!r}") from error
    return metadata, placed


def _decode_tensor(entry: dict[str, Any]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in entry["chunks"]
    ]
    properties = TensorProperties(dtype=entry["dtype"], requires_grad=entry["requires_grad"])
    return TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)


def _step_of(checkpoint_id: str | os.PathLike[str] | None, otherwise: Any) -> Any:
    found = re.search(r"(\d{1,15})$", os.fspath(checkpoint_id)) if checkpoint_id else None
    return int(found[1]) if found else otherwise


def _name(group: Group) -> str:
    return f"model {group.model!r}, step {group.step} of {group.count} ranks"


def _few(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


__all__ = ["PortusStorageReader", "PortusStorageWriter", "groups"]
