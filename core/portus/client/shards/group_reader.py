"""``GroupReader``: the newest complete group that verifies, at any number of ranks.

A load first checks the bytes that each rank is going to read, and only then copies the first of
them, and hashes them again where they arrive: what was loaded into is whole, or as it was (or an
error, if bytes rot between the two). So all ranks can go on with an older group.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import os
import pickle
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from portus.client.fence.fence import before_write
from portus.client.job.exchange import standing, told_by_first
from portus.client.loading.loaded import note_loaded
from portus.client.shards.cuts import FORMAT, FORMAT_KEY, ITEMS, METADATA, ItemLocation, decode
from portus.client.shards.grouped import (
    Census,
    Directory,
    census,
    check_hosts,
    check_part,
    chosen,
    directory_at,
    id_of,
    load_part,
    name_of,
    saved_as,
)
from portus.client.state.codecs import codec_of
from portus.errors import (
    CorruptionError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.index.groups import Group
from portus.index.place import Place, PlaceName

_log: Final = logging.getLogger("portus")

_NAMED_MAX: Final = 8
"""Ranks that a message tells about."""

_STALE_MAX: Final = 5
"""Loads that begin again since ranks chose different groups."""


_KEPT_MAX: Final = 1 << 20
_KEPT_PARTS_MAX: Final = 64
"""Bytes of a part, and parts, that are kept from the check of a load until they are handed over:
of many a part a rank needs a few numbers only, and opening it takes longer than reading them."""

_Chosen = tuple[Group, PortusError | None]
"""The group to load, and why not that of the directory, if it is another."""

_Items = Mapping[str, list[ReadItem]]
"""What is to be read of a rank's part, by the key there."""


class GroupReader(StorageReader):
    """Loads a group, at any number of ranks: ``dcp.load(state, storage_reader=reader)``.

    It loads the newest complete group. ``dcp.load(checkpoint_id=...)`` loads the newest complete
    group that was saved under that id, and no other. As with torch's own reader, an id stays in
    effect until another one is given. ``portus.dcp.load(state, reader)`` also falls back to the
    group before if one is damaged.

    pool, model: as in ``GroupWriter``. A part may be on any of several hosts. The log names
        a host that does not answer.
    step: the step of the group; None: any.
    """

    def __init__(
        self,
        pool: PlaceName | None = None,
        model: str = "default",
        *,
        step: int | None = None,
    ) -> None:
        super().__init__()
        self.place: Final = Place.named(pool)
        check_hosts(self.place)
        self.model: Final = model
        self._step: Final = step
        self._asked: str | None = None
        self._directory: Directory | None = None
        self._falls_back = True
        self._passed_over: set[bytes] = set()
        self._told: set[bytes] = set()
        self._silent: set[str] = set()
        self._tried: Group | None = None
        self._why_not: PortusError | None = None
        self._given: _Chosen | PortusError | None = None
        self._saved: Any = None
        self._group: Group | None = None
        self._placed: Mapping[MetadataIndex, ItemLocation] = {}
        self._kept: dict[int, dict[str, Any]] = {}
        self._tells_later = False
        self._problem: PortusError | None = None

    @classmethod
    def at(
        cls, directory: str | os.PathLike[str], *, fall_back: bool = False
    ) -> GroupReader | None:
        """A reader of the group that a checkpoint directory leads to; None if
        ``GroupWriter.save_directory`` did not write the directory.

        directory: the checkpoint directory.
        fall_back: if the group of the directory was never completed, is gone or is damaged, load
            the newest complete group of the model, and log an error. Without it, such a load
            raises.

        Waits, for a limited time, for ranks that are about to commit. Raises ``UsageError`` if the
        host of the directory may not be opened.
        """
        found = directory_at(os.path.abspath(os.fspath(directory)))
        if found is None:
            return None
        reader = cls(found.place, found.model)
        reader._directory, reader._falls_back = found, fall_back
        return reader

    @property
    def group(self) -> Group | None:
        """The group that was loaded last; None before the first load."""
        return self._group

    def file(self, name: str, rank: int = 0) -> Any:
        """The value that ``rank`` saved as the file ``name``, in the group that was loaded last.

        Raises ``UsageError`` if there is none, and the same errors as a load.
        """
        assert self._group is not None, "load first"
        content = load_part(self._group, rank, functools.partial(_is_at, names=(name,)))
        if name not in content:
            raise UsageError(f"{name_of(self._group)}: rank {rank} saved no {name}")
        return content[name]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins. Raises ``UsageError`` for another directory than that of ``at``."""
        self._asked = id_of(checkpoint_id)
        self._group = None
        own = None if self._directory is None else self._directory.path
        if None not in (own, self._asked) and os.path.abspath(str(self._asked)) != own:
            raise UsageError(f"checkpoint_id {self._asked!r}: this reader loads {own}")

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
        saved = self._metadata_in(found) if self._saved is None else self._saved
        if isinstance(saved, PortusError):
            raise saved
        metadata, self._placed = decode(saved)
        self._group = found
        return metadata

    def _chosen(self) -> Group:
        """The group to load; one that was chosen stays chosen, until it is passed over."""
        found = self._find() if self._given is None else self._given
        if isinstance(found, PortusError):
            raise found
        group, reason = found
        text = f"{self.place}: {self._why_not}" if self._why_not else reason
        if text is not None and group.id not in self._told:
            self._told.add(group.id)
            _log.error("%s; FALLING BACK to %s", text, name_of(group))
        return group

    def _choose(self, ranks: dist.ProcessGroup | None) -> None:
        """Have one rank look for the group to load, and read its metadata, and tell the others,
        also what it met. Collective."""
        rank, count = standing(ranks)
        if count == 1:
            return
        found: _Chosen | PortusError | None = None
        saved: Any = None
        if rank == 0:
            try:
                found = self._find()
                saved = self._metadata_in(found[0])
            except PortusError as error:
                found, saved = found or error, error
        self._given, self._saved = told_by_first((found, saved), ranks)

    def _find(self) -> _Chosen:
        """The group to load, and why not that of the directory, if it is another."""
        found = census(self.place, self.model)
        for host in found.silent.keys() - self._silent:
            self._silent.add(host)
            _log.error("%s: groups with a part there are not loaded", found.silent[host])
        try:
            return self._pick(found), None
        except (UsageError, TransportError) as error:
            if self._directory is None or not self._falls_back:
                raise
            return chosen(found, self.model, None, but=self._passed_over), error

    def _metadata_in(self, group: Group) -> Any:
        """torch's metadata of a group, as it is kept. Raises as loads do."""
        for rank in sorted(group.parts):  # the coordinator's has it: nearly always the first
            keep = functools.partial(_is_at, names=(METADATA, FORMAT_KEY))
            content = load_part(group, rank, keep)
            if content.get(FORMAT_KEY) not in range(1, FORMAT + 1):
                raise UsageError(f"{name_of(group)}: written by a newer Portus; upgrade this one")
            if METADATA in content:
                return content[METADATA]
        raise CorruptionError(f"{name_of(group)}: no part of it holds the metadata")

    def _pick(self, found: Census) -> Group:
        """What was asked for, of that."""
        if self._directory is not None:
            ids: Collection[bytes] = self._directory.ids
            return chosen(found, self.model, None, ids=ids, but=self._passed_over)
        if self._asked is None:
            return chosen(found, self.model, self._step, but=self._passed_over)
        named = saved_as(found, self.model, self._asked, self._step, self._passed_over)
        return chosen(found, self.model, self._step, ids=(named.id,), but=self._passed_over)

    def pass_over(self, error: PortusError) -> None:
        """Exclude the group that was chosen last from now on. Raises ``error`` if there is none, or
        if this reader does not fall back."""
        damaged = self._tried
        if damaged is None or not self._falls_back:
            raise error
        self._passed_over.add(damaged.id)
        self._why_not = error

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
        self._kept.clear()
        for rank, items in self._by_rank(plan):
            kept_max = _KEPT_MAX if len(self._kept) < _KEPT_PARTS_MAX else 0
            with _naming(items):
                content = check_part(self._group, rank, _keep(items), kept_max)
            if content is not None:
                self._kept[rank] = content[ITEMS]
        return replace(plan, storage_data=self._group.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are. Called on the coordinator. Raises ``StaleError`` if ranks
        chose different groups."""
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
            content = self._kept.pop(rank, {})
            if not items.keys() <= content.keys():
                with _naming(items):
                    content = load_part(self._group, rank, _keep(items))[ITEMS]
            note_loaded(self._group.parts[rank][1])
            for key, each in items.items():
                for item in each:
                    _hand_over(item, content[key], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name will do."""
        return True

    def _by_rank(self, plan: LoadPlan) -> list[tuple[int, _Items]]:
        """What is to be read of the part of each rank."""
        found: dict[int, dict[str, list[ReadItem]]] = {}
        for item in plan.items:
            at = self._placed[item.storage_index]
            found.setdefault(at.rank, {}).setdefault(at.key, []).append(item)
        return sorted(found.items())


def load(state: dict[str, Any], reader: GroupReader, **more: Any) -> Group:
    """Load the newest complete group that verifies into ``state``. Call it on every rank.

    If any rank finds its part damaged, all ranks fall back to the group before, and the log has an
    error. Nothing has been copied into ``state`` by then.

    One rank looks for the group, reads its metadata, and sends both to the others. With
    ``no_dist``, each rank looks for itself.

    state: the state to load into, as for ``dcp.load``.
    reader: where to load from.
    more: further arguments of ``dcp.load``.

    Returns the group that was loaded. Raises ``UsageError``, with model, step and ranks, if no
    group is complete or if ``state`` does not fit. Raises ``CorruptionError``, which names the
    first group that was tried, if none verifies.
    """
    first: PortusError | None = None
    stale = 0
    if more.get("checkpoint_id") is not None:
        reader.reset(more["checkpoint_id"])
    reader._tells_later = True
    try:
        while True:
            if not more.get("no_dist"):
                reader._choose(more.get("process_group"))
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
                elif found is error:
                    raise _misfit(reader, error) from error
                else:
                    raise (first or found) from error
    finally:
        reader._tells_later, reader._given, reader._why_not = False, None, None
        reader._saved = None


def _misfit(reader: GroupReader, error: CheckpointException) -> UsageError:
    """What torch's planner found wrong, and in which group."""
    tried = reader._tried
    what = f"{reader.place}: model {reader.model!r}" if tried is None else name_of(tried)
    told = [f"rank {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items())]
    more = [f"and {len(told) - _NAMED_MAX} more"] if len(told) > _NAMED_MAX else []
    return UsageError(f"{what} was not loaded: {'; '.join(told[:_NAMED_MAX] + more)}")


def reason_of(error: CheckpointException) -> BaseException:
    """What went wrong on the lowest rank that says so in our words; else ``error`` itself."""
    for _, failure in sorted(error.failures.items()):
        if isinstance(failure[0], PortusError):
            return failure[0]
    return error


def _is_at(path: str, *, names: Collection[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _keep(keys: Collection[str]) -> Callable[[str], bool]:
    """Whether a key path of a part leads into one of its items ``keys``."""

    def keep(path: str) -> bool:
        names = path.split(".", 2)
        return names[0] == ITEMS and len(names) > 1 and names[1] in keys

    return keep


@contextlib.contextmanager
def _naming(items: _Items) -> Iterator[None]:
    """What is wrong is told by the names that torch knows."""
    try:
        yield
    except (CorruptionError, UsageError) as error:
        names = {key: each[0].storage_index.fqn for key, each in items.items()}
        found = re.sub(rf"\b{ITEMS}\.(\w+)", lambda key: names.get(key[1], key[0]), str(error))
        raise type(error)(found) from error


class _Handing(pickle.Pickler):
    """Objects of codecs go as they are, past the pickle: they may be none that pickle can write."""

    def reducer_override(self, value: Any) -> Any:
        """Return a reduction that hands over ``value`` itself; NotImplemented if its class has no
        codec. Called by ``pickle``."""
        if codec_of(type(value)) is None:
            return NotImplemented
        number = next(_numbers)
        _handed[number] = value
        return _taken, (number,)


_numbers: Final = itertools.count()
_handed: Final[dict[int, Any]] = {}
"""Objects on their way to torch's planner, in this process, by what the pickle calls them."""

_HANDING: Final = types.ModuleType("handing")
_HANDING.Pickler = _Handing  # type: ignore[attr-defined]


def _taken(number: int) -> Any:
    return _handed.pop(number)


def _hand_over(item: ReadItem, value: Any, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        buffer = io.BytesIO()
        # torch's planner reads nothing else; it never leaves memory.
        torch.save(value, buffer, pickle_module=_HANDING)
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
