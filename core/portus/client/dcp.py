"""``portus.dcp``: a Portus pool as the storage of ``torch.distributed.checkpoint``.

torch plans who saves which shard, and reshards at load; here is only where the bytes are. Each
rank has a pool file of its own in one pool directory. A save is a *group*, one part per rank, see
``portus.index.groups``: nothing is told between ranks after the planning, which torch does on the
thread that called. The rank that coordinates makes the group's id, and keeps torch's metadata in
its own part, as typed values. Nothing is pickled on the medium.

``save`` returns while the shards are still being copied; the fence of ``Checkpointer`` holds the
optimizer up meanwhile. Called from another thread, as by ``async_save``, a save returns when this
rank's part is committed, since torch's future promises that.

A load first checks the bytes that each rank is going to read, and only then copies the first of
them: what was loaded into is whole, or as it was.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
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
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from portus.client.checkpointer import Checkpointer
from portus.client.cuts import Placed, decode, encode
from portus.client.fence import before_write
from portus.client.grouped import (
    Directory,
    census,
    check_part,
    chosen,
    directory_at,
    load_part,
    name_of,
    shard_name,
)
from portus.errors import CorruptionError, PortusError, StaleError, UsageError
from portus.index.directory import default_directory
from portus.index.groups import Group, new_id, part_model, part_token, surplus
from portus.pipeline.handle import SaveHandle
from portus.spec import VersionInfo

_log: Final = logging.getLogger("portus")

_METADATA: Final = "metadata"
_ITEMS: Final = "items"
_FORMAT: Final = "format"
FORMAT: Final = 1

_PEERS_S: Final = 30.0
"""The longest that ``close`` waits for other ranks to commit, before it removes what they replace.
"""

_POLL_S: Final = 0.02

_MADE_MAX: Final = 64
"""Groups that a writer remembers to have begun."""

_STOCK_FILES: Final = re.compile(r"\.metadata|__\d+_\d+\.distcp")
"""What torch's own storage puts into a checkpoint directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A save to a checkpoint directory: what else is to be there, by file name."""

    directory: str
    files: Mapping[str, Any] = field(default_factory=dict)


class PortusStorageWriter(StorageWriter):
    """Saves the shards of this rank into its own pool file. Keep one for the whole training.

    ``dcp.save(state, checkpoint_id="step_100", storage_writer=writer)``: the step is the number at
    the end of ``checkpoint_id``, else a count. Every rank makes one, with the same arguments,
    when the process group is there and before training starts.

    pool: a pool directory on a file system that all ranks see; None: ``$PORTUS_POOL``, else
        ``.portus``. model: the name of the run. keep: complete groups kept; None keeps all.
        What checkpoint directories lead to is kept besides.
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
        snapshot: Literal["auto", "sync", "device"] = "auto",
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
        self.synchronous = synchronous
        self._keep: Final = keep
        self._settings: Final[dict[str, Any]] = {
            "on_error": on_error,
            "snapshot": snapshot,
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
        self._wanted: _Wanted | None = None
        self._made: Final[deque[bytes]] = deque(maxlen=_MADE_MAX)
        self._condemned: list[tuple[str, bytes]] = []
        self._handle: SaveHandle | None = None
        if dist.is_available() and dist.is_initialized():
            # So that steps are seen before the first save, which is then in the background too.
            self._rank, self._count = dist.get_rank(), dist.get_world_size()
            self._open()

    # What a user calls.

    def save_directory(
        self,
        state: dict[str, Any],
        directory: str | os.PathLike[str],
        *,
        step: int,
        files: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """``dcp.save``, and a checkpoint directory that leads to the group. On every rank.

        directory: gets a small reference file for each rank. As long as it is there, the group is
            kept; ``PortusStorageReader.at`` loads from it. files: more values of this rank's, by
            the name of the file in ``directory`` that ``torch.load`` follows to them.

        Returns the handle of this rank's part. Raises ``UsageError`` for what cannot be saved, and
        what opening the pool raises, on all ranks if on one.
        """
        place = os.path.abspath(os.fspath(directory))
        self._wanted = _Wanted(directory=place, files=dict(files or {}))
        self._step, self._parts = step, None
        try:
            torch_save(state, storage_writer=self)
        except CheckpointException as error:
            raise reason_of(error) from error
        finally:
            self._wanted = None
        assert self._handle is not None
        if self._is_coordinator:
            self._condemned += [(path, self._group) for path in _stock_files(place)]
        return self._handle

    def remove(self, directory: str | os.PathLike[str]) -> None:
        """Remove a checkpoint directory, once the newest save, or one after it, is complete: not
        this rank's part alone, as with one process. On one rank. Returns at once."""
        self._condemned.append((os.path.abspath(os.fspath(directory)), self._group))
        if not self._group:
            self._sweep(())

    def prepare(self, size: int) -> None:
        """Make this rank's pool, and room for parts of ``size`` bytes. See ``Checkpointer``."""
        self._open().prepare(size)

    def wait(self, timeout: float | None = None) -> None:
        """Return when this rank's saves are over. Raises as ``Checkpointer.wait``."""
        if self._checkpointer is not None:
            self._checkpointer.wait(timeout)

    @property
    def last(self) -> SaveHandle | None:
        """This rank's part of the newest save."""
        return self._handle

    def close(self) -> None:
        """Finish what is in flight and let go of the pool. A second call does nothing.

        Where directories wait to be removed, other ranks are waited for, for a limited time.
        """
        checkpointer = self._checkpointer
        if checkpointer is None:
            return
        try:
            if self._condemned:
                checkpointer.wait()
                self._sweep_at_end()
        finally:
            self._checkpointer = None
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
        """Say which step this rank saves."""
        return replace(plan, storage_data=self._step)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: tell every rank the id of this group. Raises ``UsageError`` if
        ranks save different steps, or are not all there."""
        if len(plans) != self._count:
            raise UsageError(
                f"{len(plans)} ranks plan this save and {self._count} are in the job: save from "
                "all ranks, or give each process group a model of its own"
            )
        steps = [plan.storage_data for plan in plans]
        if len(set(steps)) > 1:
            other = next(rank for rank, step in enumerate(steps) if step != steps[0])
            raise UsageError(
                f"model {self.model!r}: rank 0 saves step {steps[0]} and rank {other} saves step "
                f"{steps[other]}: give every rank the same checkpoint_id"
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
            results.append(WriteResult(item.index, size, Placed(self._rank, key)))
        self._group = plan.storage_data
        self._made.append(self._group)
        self._parts = parts
        if not self._is_coordinator:
            self._save({_FORMAT: FORMAT, _ITEMS: parts})
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all others have started: its own shards, and the metadata."""
        placed = {result.index: result.storage_data for part in results for result in part}
        self._save({_FORMAT: FORMAT, _METADATA: encode(metadata, placed), _ITEMS: self._parts})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name will do: only a number at its end is looked at."""
        return True

    def _save(self, content: dict[str, Any]) -> None:
        checkpointer = self._open()
        token = part_token(self._group, self._rank)
        aside = threading.current_thread() is not threading.main_thread()
        self._handle = checkpointer.save(
            self._with_files(content),
            self._step,
            token=token,
            reference=self._references(),
            synchronous=self.synchronous or aside,
        )
        self._parts = None
        if aside:
            self._handle.wait()

    def _with_files(self, content: dict[str, Any]) -> dict[str, Any]:
        files = self._wanted.files if self._wanted else {}
        taken = sorted(files.keys() & {_FORMAT, _METADATA, _ITEMS})
        if taken:
            raise UsageError(f"files of a sharded checkpoint cannot be called {taken}")
        return {**content, **files}

    def _references(self) -> dict[str, str] | None:
        """The reference to the part leads to its format number: whoever follows it with
        ``torch.load`` gets no shards, which mean nothing without the others."""
        if self._wanted is None:
            return None
        parts = {shard_name(self._rank, self._count): _FORMAT}
        parts.update({name: name for name in self._wanted.files})
        return {os.path.join(self._wanted.directory, name): part for name, part in parts.items()}

    def _open(self) -> Checkpointer:
        if self._checkpointer is None:
            name = part_model(self.model, self._rank, self._count)
            self._checkpointer = Checkpointer(self.place, name, keep=None, **self._settings)
            self._checkpointer.surplus = self._surplus
        return self._checkpointer

    def _surplus(self, own: Sequence[VersionInfo]) -> list[int]:
        """On the worker, before a commit: what this rank may let go of."""
        if not self._condemned and (self._keep is None or len(own) <= self._keep):
            return []
        try:
            known = groups(self.place, self.model)
        except PortusError:
            return []  # a peer's pool cannot be read now: nothing is known to be complete
        self._sweep(known)
        return [] if self._keep is None else surplus(own, known, self._keep)

    # Directories that wait to be removed.

    def _sweep(self, known: Collection[Group]) -> None:
        """Remove those whose successor, or a group after it, is complete."""
        waiting, self._condemned = self._condemned, []
        complete = {group.id for group in known if group.is_complete}
        made = list(self._made)
        for path, successor in waiting:
            first = made.index(successor) if successor in made else 0
            if successor and complete.isdisjoint(made[first:]):
                self._condemned.append((path, successor))
                continue
            with contextlib.suppress(UsageError):  # it is closing; the directory stays
                self._open().remove(path)

    def _sweep_at_end(self) -> None:
        end = time.monotonic() + _PEERS_S
        while self._condemned:
            with contextlib.suppress(PortusError):
                self._sweep(groups(self.place, self.model))
            if self._condemned and time.monotonic() > end:
                paths = [path for path, _ in self._condemned]
                _log.warning("portus: %s stay: not all ranks committed what replaces them", paths)
                return
            time.sleep(_POLL_S if self._condemned else 0)


class PortusStorageReader(StorageReader):
    """Loads a group, at any number of ranks. ``dcp.load(state, storage_reader=reader)``.

    step: of the group; None: the number at the end of ``checkpoint_id``, else the newest group
    that is complete. pool, model: as for ``PortusStorageWriter``.

    ``portus.dcp.load(state, reader)`` does the same, and goes on with the group before it where
    one turns out to be damaged.
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
        self._directory: Directory | None = None
        self._falls_back = True
        self._passed_over: set[bytes] = set()
        self._tried: Group | None = None
        self._group: Group | None = None
        self._placed: dict[MetadataIndex, Placed] = {}
        self._tells_later = False
        self._problem: PortusError | None = None

    @classmethod
    def at(
        cls, directory: str | os.PathLike[str], *, fall_back: bool = True
    ) -> PortusStorageReader | None:
        """A reader of the group that a checkpoint directory leads to; None if it is no directory
        of ``PortusStorageWriter.save_directory``.

        fall_back: take the newest complete group of the model, with an error in the log, where
        that of the directory was never completed, or is damaged. Waits, for a limited time, for
        ranks that are about to commit. Raises ``UsageError`` if its pool may not be opened.
        """
        found = directory_at(os.path.abspath(os.fspath(directory)))
        if found is None:
            return None
        reader = cls(found.place, found.model)
        reader._directory, reader._falls_back = found, fall_back
        return reader

    @property
    def group(self) -> Group | None:
        """What was loaded last: its step, its ranks."""
        return self._group

    def file(self, name: str, rank: int = 0) -> Any:
        """The value that ``rank`` saved as the file ``name`` of the checkpoint directory, of the
        group that was loaded. Raises ``UsageError`` if there is none, and as loads do."""
        assert self._group is not None, "load first"
        content = load_part(self._group, rank, lambda path: _is_at(path, name))
        if name not in content:
            raise UsageError(f"{name_of(self._group)}: rank {rank} saved no {name}")
        return content[name]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins."""
        number = _step_of(checkpoint_id, None)
        self._asked = self._step if self._step is not None else number
        self._group = None

    def read_metadata(self, *args: Any, **named: Any) -> Metadata:
        """Choose the group. Raises ``UsageError`` naming what is missing if none is complete."""
        # ``named`` is not ``kwargs``: torch looks for that name, and where a rank could not read
        # the metadata it would go on without the others.
        self._group = self._problem = None
        try:
            return self._read_metadata()
        except PortusError as error:
            if not self._tells_later:
                raise
            self._problem = error  # torch would make a text of it
            return Metadata({}, {}, {})

    def _read_metadata(self) -> Metadata:
        found = self._tried = self._chosen()
        for rank in sorted(found.parts):  # the coordinator's has it: nearly always the first
            content = load_part(found, rank, lambda path: _is_at(path, _METADATA, _FORMAT))
            if content.get(_FORMAT) != FORMAT:
                raise UsageError(f"{name_of(found)}: written by a newer Portus; upgrade this one")
            if _METADATA in content:
                metadata, self._placed = decode(content[_METADATA])
                self._group = found
                return metadata
        raise CorruptionError(f"{name_of(found)}: no part of it holds the metadata")

    def _chosen(self) -> Group:
        """The group to load; one that was chosen stays chosen, until it is passed over."""
        found = census(self.place, self.model)
        wanted = self._directory
        if wanted is None:
            return chosen(found, self.model, self._asked, but=self._passed_over)
        try:
            return chosen(found, self.model, None, ids=wanted.ids, but=self._passed_over)
        except UsageError as error:
            if not self._falls_back:
                raise
            older = chosen(found, self.model, None, but=self._passed_over)
            _log.error("%s; FALLING BACK to %s", error, name_of(older))
            return older

    def pass_over(self, error: PortusError) -> None:
        """From now on do without the group that was chosen last. Raises ``error`` if there is
        none to take in its place, or if this reader does not fall back."""
        damaged = self._tried
        if damaged is None or not self._falls_back:
            raise error
        self._passed_over.add(damaged.id)
        try:
            older = self._chosen()
        except UsageError:
            raise error from None
        _log.error("%s: %s; FALLING BACK to %s", self.place, error, name_of(older))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raises what was wrong with the metadata, if that is to be told to all ranks."""
        if self._problem is not None:
            raise self._problem

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check what this rank is going to read, and say which group it chose. Raises
        ``CorruptionError`` with model, step, rank and tensor; then nothing was copied yet."""
        assert self._group is not None
        for rank, items in self._by_rank(plan):
            check_part(self._group, rank, _keep(self._keys(items)))
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
        before_write()  # a writer of this process may be saving these tensors
        for rank, items in self._by_rank(plan):
            content = load_part(self._group, rank, _keep(self._keys(items)))
            for item in items:
                _hand_over(item, content[_ITEMS][self._placed[item.storage_index].key], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name will do: only a number at its end is looked at."""
        return True

    def _by_rank(self, plan: LoadPlan) -> list[tuple[int, list[ReadItem]]]:
        found: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            found.setdefault(self._placed[item.storage_index].rank, []).append(item)
        return sorted(found.items())

    def _keys(self, items: Sequence[ReadItem]) -> set[str]:
        return {self._placed[item.storage_index].key for item in items}


def load(state: dict[str, Any], reader: PortusStorageReader, **more: Any) -> Group:
    """``dcp.load`` from ``reader``: the newest complete group that verifies. On every rank.

    Where a rank finds its group damaged, all of them go on with the one before it, with an error
    in the log; ``state`` was not touched by then. more: of ``dcp.load``.

    Returns the group that was loaded. Raises ``UsageError`` if none is complete, and
    ``CorruptionError`` naming the first that was tried if none verifies; what torch's planner
    finds wrong is raised as its ``CheckpointException``.
    """
    first: PortusError | None = None
    stale = 0
    reader._tells_later = True
    try:
        while True:
            try:
                torch_load(state, storage_reader=reader, **more)
                assert reader.group is not None
                return reader.group
            except CheckpointException as error:
                found = reason_of(error)  # the same on all ranks, so all do the same
                if isinstance(found, StaleError) and stale < _STALE_MAX:
                    stale += 1
                elif isinstance(found, CorruptionError):
                    first = first or found
                    reader.pass_over(first)
                else:
                    raise (first or found) from error
    finally:
        reader._tells_later = False


_STALE_MAX: Final = 5


def reason_of(error: CheckpointException) -> BaseException:
    """What went wrong on the lowest rank that says so in our words; else ``error`` itself."""
    for _, failure in sorted(error.failures.items()):
        if isinstance(failure[0], PortusError):
            return failure[0]
    return error


def groups(pool: str | os.PathLike[str], model: str | None = None) -> list[Group]:
    """The groups in a pool directory, complete or not, newest last.

    Raises ``UsageError`` if there is no pool. A pool file that cannot be read has no parts.
    """
    return census(os.path.abspath(os.fspath(pool)), model).groups


def _is_at(path: str, *names: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _keep(keys: Collection[str]) -> Callable[[str], bool]:
    """Whether a key path of a part leads into one of its items ``keys``."""

    def keep(path: str) -> bool:
        names = path.split(".", 2)
        return names[0] == _ITEMS and len(names) > 1 and names[1] in keys

    return keep


def _stock_files(directory: str) -> list[str]:
    """What torch's own storage left in a directory, which would be taken for the checkpoint."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(directory) if _STOCK_FILES.fullmatch(name)]
        return [os.path.join(directory, name) for name in names]
    return []


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


def _step_of(checkpoint_id: str | os.PathLike[str] | None, otherwise: Any) -> Any:
    found = re.search(r"(\d{1,15})$", os.fspath(checkpoint_id)) if checkpoint_id else None
    return int(found[1]) if found else otherwise


__all__ = ["PortusStorageReader", "PortusStorageWriter", "groups", "load"]
