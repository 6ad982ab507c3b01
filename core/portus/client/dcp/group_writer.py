"""``GroupWriter``: storage hosts as the storage of ``torch.distributed.checkpoint``.

torch plans who saves which shard, and reshards at load; here is only where the bytes are. Each
rank has a model of its own on a storage host, over several of which ranks are spread. A save is a
*group*, one part per rank, see ``portus.index.groups``: nothing is told between ranks after the
planning, which torch does on the thread that called. The rank that coordinates makes the group's
id, and keeps torch's metadata in its own part, as typed values. Nothing is pickled on the medium.

``save`` returns while the shards are still being copied; the fence of ``Checkpointer`` holds the
optimizer up meanwhile. Called from another thread, as by ``async_save``, a save returns when this
rank's part is committed, since torch's future promises that. So it does in the process that
``async_save`` may have for it: a writer that was sent there lets go of the host after each save,
for torch sends it again with the next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from portus.client.job.exchange import (
    Heard,
    Outcomes,
    Tally,
    Word,
    beside,
    standing,
)
from portus.client.job.settings import (
    Settings,
    SettingsDict,
    as_arguments,
    mirror_of,
    say_unmirrored,
)
from portus.client.loading.resolve import POOLS
from portus.client.loading.view import PoolFile, Sign
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.client.retention import Retention
from portus.client.run import Run
from portus.client.shards.cuts import (
    CHECKPOINT_ID,
    FORMAT,
    FORMAT_KEY,
    ITEMS,
    KEYS,
    METADATA,
    ItemLocation,
    encode,
)
from portus.client.shards.group_reader import reason_of
from portus.client.shards.grouped import (
    STOCK_METADATA,
    census,
    check_hosts,
    has_stock,
    id_of,
    shard_name,
    step_of,
)
from portus.client.shards.planned import (
    Parts,
    Planned,
    agreed,
    check_kinds,
    collected,
    keyed,
    values_of,
)
from portus.errors import PortusError, UsageError
from portus.index.groups import ID_SIZE, Group, Past, new_id, part_model, part_token
from portus.index.keep import Keep, checked_metrics
from portus.index.place import Place, PlaceName
from portus.pipeline.handle import SaveHandle
from portus.spec import VersionInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log: Final = logging.getLogger("portus")

_PEERS_S: Final = 30.0
"""The longest that ``close`` waits for other ranks to commit, before it removes what they replace.
"""

_POLL_S: Final = 0.02

_SEEN_S: Final = 10.0
"""The longest that a rank looks for the pool that another one made a moment ago."""

_STOCK_FILES: Final = re.compile(r"\.metadata|__\d+_\d+\.distcp")
"""What torch's own storage puts into a checkpoint directory."""


Named = tuple[int, str | None, tuple[tuple[str, float], ...]]
"""What a save is, on all ranks alike: its step, its id, and its metrics, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A save to a checkpoint directory: what else is to be there, by file name."""

    directory: str
    files: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Start:
    """What the coordinator tells all ranks: the id of the group, what follows from their news,
    by what they find its own pool (None: they found it before), the identities of the pools on the
    storage hosts, as it sees them, and what was there before this job (None: they know, or nobody
    does)."""

    group: bytes
    heard: Heard
    rank: int
    sign: Sign | None
    hosts: tuple[bytes, ...]
    past: Past | None


class GroupWriter(StorageWriter):
    """Saves the shards of this rank to a storage host.

    Create one on every rank, with the same arguments, after the process group was created and
    before training starts. Keep it for the whole training. Pass it as
    ``dcp.save(state, checkpoint_id="step_100", storage_writer=writer)``, or call ``save``. A load
    that names a ``checkpoint_id`` gets only a group that was saved under it. The step of a group is
    the number at the end of the id; without an id, saves are counted.

    pool: the address of a storage host (``portus://host:7117``), or a list of several, the same on
        all ranks: rank r saves to the host at index r modulo their number. None: ``$PORTUS_POOL``.
        A directory gets files instead: ``PortusStorageWriter``.
    model: the name of the run.
    keep: how many complete groups are kept, or a ``portus.Keep``; None keeps all. Groups that a
        checkpoint directory leads to are kept in addition.
    synchronous: if True, ``dcp.save`` returns only when this rank's part is committed.
    links, settings: as in ``Checkpointer``.
    """

    def __init__(
        self,
        pool: PlaceName | None = None,
        model: str = "default",
        *,
        keep: int | Keep | None = 2,
        synchronous: bool = False,
        links: str | None = None,
        **settings: Unpack[SettingsDict],
    ) -> None:
        super().__init__()
        self._run: Final = Run(Place.named(pool), model, Settings(**settings), links=links)
        check_hosts(self.place)
        POOLS.allow(self.place)  # the parts of others are on any of them
        mirror = mirror_of(self._run.settings)
        if mirror is not None:
            why = f"it is on storage hosts ({self.place}), and what is there is not mirrored"
            if self._run.settings.mirror is not None:
                raise UsageError(f"mirror: model {model!r}: {why}")
            say_unmirrored(model, why)
        self.synchronous = synchronous
        self._keep: Final = Keep.of(keep)
        self._checkpointer: PoolCheckpointer | None = None
        self._step = 0
        self._checkpoint_id: str | None = None
        self._metrics: dict[str, float] = {}
        self._is_named = False
        self._since = time.perf_counter()
        self._ranks: dist.ProcessGroup | None = None
        self._rank = 0
        self._count = 1
        self._parts: dict[str, Any] | None = None
        self._group = b""
        self._outcomes: Final = Outcomes(self._run.settings.on_error)
        self._retention: Final = Retention(self._run, self._keep)
        self._tally: Final = Tally()
        self._is_shared = False
        self._is_coordinator = False
        self._wanted: _Wanted | None = None
        self._condemned: Final[deque[tuple[str, bytes]]] = deque()
        self._handle: SaveHandle | None = None
        self._is_sent = False
        self._planned: Planned | None = None
        self._local = SavePlan([])
        self._metadata = b""
        if dist.is_available() and dist.is_initialized():
            # So that steps are seen before the first save, which is then in the background too.
            self._rank, self._count = standing()
            self._retention.stand(self._rank, self._count)
            self._ranks = beside()
            self._open()

    @classmethod
    def of(cls, run: Run) -> GroupWriter:
        """Return a writer for the shards of ``run``. It keeps what the run keeps, and what
        directories refer to."""
        return cls(
            run.place, run.name, keep=run.keep, links=run.links, **as_arguments(run.settings)
        )

    @property
    def place(self) -> Place:
        """Where it saves."""
        return self._run.place

    @property
    def model(self) -> str:
        """The name of the run."""
        return self._run.name

    # What a user calls.

    def save_directory(
        self,
        state: dict[str, Any],
        directory: str | os.PathLike[str],
        *,
        step: int,
        files: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> SaveHandle:
        """Save as ``save`` does, and write a checkpoint directory that leads to the group. Call it
        on every rank.

        directory: gets a small reference file for each rank. The group is kept as long as the
            directory exists. ``GroupReader.at`` loads from it.
        step: as in ``save``.
        files: further values of this rank, by file name: ``torch.load`` of that file in
            ``directory`` returns the value.
        metrics, process_group: as in ``save``.

        Returns the handle of this rank's part. If a value cannot be saved on one rank, all ranks
        raise ``UsageError``. If the pool cannot be opened on one rank, all ranks raise that error.
        """
        place = os.path.abspath(os.fspath(directory))
        self._wanted = _Wanted(directory=place, files=dict(files or {}))
        try:
            handle = self.save(
                state,
                step=step,
                checkpoint_id=directory,
                metrics=metrics,
                process_group=process_group,
            )
        except CheckpointException as error:
            raise reason_of(error) from error
        finally:
            self._wanted = None
        if self._is_coordinator:
            self._condemn(_stock_files(place))
        return handle

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        checkpoint_id: str | os.PathLike[str] | None = None,
        metrics: Mapping[str, float] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> SaveHandle:
        """Save as ``dcp.save`` does, but skip torch's planning if every rank saves the same names,
        shapes and shards as in the previous call. Call it on every rank.

        step: the training step of this state.
        checkpoint_id: the id under which ``dcp.load`` finds the group; None: only its step.
        metrics: named numbers of this group, for ``Keep(best=)``; the same on all ranks.
        process_group: all ranks of the job, with a backend for CPU tensors. None: the job's own
            group, or a gloo group beside it if that one is for devices only.

        Returns the handle of this rank's part. If one rank fails before the copy starts, all ranks
        raise: ``UsageError`` for a value that cannot be saved, or ``CheckpointException`` from
        torch's planning. An error after that is raised on the rank where it happened; the other
        ranks learn of it at the next save.
        """
        self._begin(step, id_of(checkpoint_id), checked_metrics(metrics))
        start, ranks = self._since, process_group or self._ranks
        state, planner = values_of(state), DefaultSavePlanner()
        planned, self._planned = self._planned, None
        word = Word(named=self._named, id=new_id(), news=self._outcomes.news())
        found, said = agreed(planned, state, planner, self._parts_of, word, ranks)
        self._hear(Heard.of(said, self.model))
        if found is None:
            torch_save(state, storage_writer=self, planner=planner, process_group=ranks)
            planned = Planned.of(self._group, self._local, planner, state, ranks)
        else:
            self._save_planned(*found)
        self._planned = planned
        assert self._handle is not None
        self._handle.stats.call_s = time.perf_counter() - start
        return self._handle

    def remove(self, directory: str | os.PathLike[str]) -> None:
        """Remove a checkpoint directory as soon as the newest group so far, or a later one, is
        complete on all ranks. Call it on one rank. Returns at once."""
        self._condemn([os.path.abspath(os.fspath(directory))])
        if not self._group:
            self._sweep(self._open())

    def prepare(self, size: int) -> None:
        """Make room for parts of ``size`` bytes. See ``Checkpointer``."""
        self._open().prepare(size)

    def fence(self) -> None:
        """Block until no save in flight reads a tensor of this rank."""
        if self._checkpointer is not None:
            self._checkpointer.fence()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until this rank's saves are over. Raises the same as ``Checkpointer.wait``."""
        if self._checkpointer is not None:
            self._checkpointer.wait(timeout)

    @property
    def last(self) -> SaveHandle | None:
        """The handle of this rank's part of the newest save; None before the first one."""
        return self._handle

    def close(self) -> None:
        """Finish the saves in flight and let go of the host. A second call does nothing.

        If directories wait to be removed, this waits for other ranks, for a limited time.
        """
        checkpointer = self._checkpointer
        if checkpointer is None:
            return
        try:
            if self._condemned:
                checkpointer.wait()
                self._sweep_at_end(checkpointer)
        finally:
            self._checkpointer = None
            try:
                checkpointer.close()
            except Exception:
                raise
            except BaseException:  # Ctrl-C: it is not closed yet
                self._checkpointer = checkpointer
                raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs to make this writer in another process, which saves from then
        on. Closes this one: it releases the host, which has one writer of a part."""
        self.close()
        more = {"keep": self._keep, "links": self._run.links, **as_arguments(self._run.settings)}
        return _sent, (type(self), self.place, self.model, more)

    # What torch calls, in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save begins. torch calls this only if it has an id."""
        name = id_of(checkpoint_id)
        self._begin(step_of(name, self._step + 1), name)

    def _begin(
        self, step: int, checkpoint_id: str | None, metrics: Mapping[str, float] | None = None
    ) -> None:
        self._step, self._checkpoint_id, self._is_named = step, checkpoint_id, True
        self._metrics = dict(metrics or {})
        self._parts = None
        self._since = time.perf_counter()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ``UsageError`` where ranks do not plan together."""
        if not self._is_named:
            self._begin(self._step + 1, None)
        self._is_named = False
        self._is_coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "ranks that plan separately make no group: save with use_collectives=True"
            )
        together = dist.is_available() and dist.is_initialized()
        rank, count = kwargs.get("rank", 0), dist.get_world_size() if together else 1
        if (rank, count) != (self._rank, self._count):
            self._is_shared = False
            self._retention.stand(rank, count)
            self.close()
        self._rank, self._count = rank, count

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Say which step this rank saves, and as what; and how its saves before this one ended."""
        self._local, self._planned = plan, None
        return replace(plan, storage_data=(self._named, self._outcomes.news()))

    @property
    def _named(self) -> Named:
        return self._step, self._checkpoint_id, tuple(sorted(self._metrics.items()))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell every rank the id of this group, what the others reported, and which pool all ranks
        must see. On the coordinator. Raises ``UsageError`` if ranks save different steps, ids or
        metrics, or are not all there, and what opening the pool raises."""
        if len(plans) != self._count:
            raise UsageError(
                f"{len(plans)} ranks plan this save and {self._count} are in the job: save from "
                "all ranks, or give each process group a model of its own"
            )
        said = [plan.storage_data[0] for plan in plans]
        if len(set(said)) > 1:
            other = next(rank for rank, each in enumerate(said) if each != said[0])
            first, second = _apart(said[0], said[other])
            raise UsageError(
                f"model {self.model!r}: rank 0 saves {first} and rank {other} saves {second}: give "
                "every rank the same checkpoint_id, step and metrics"
            )
        heard = Heard.of([plan.storage_data[1] for plan in plans], self.model)
        sign = self._made_pool()
        hosts = () if sign is None else tuple(map(_uuid_at, self.place.hosts))
        past = None if self._retention.is_told else self._retention.look()
        start = _Start(new_id(), heard, self._rank, sign, hosts, past)
        return [replace(plan, storage_data=start) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Start to save this rank's shards, and say where they are going to be. Raises what the
        other ranks met in saves before, as ``on_error`` says, and ``UsageError`` where this rank
        does not see the others' pools."""
        start: _Start = plan.storage_data
        self._hear(start.heard)
        self._check_shared(start)
        if start.past is not None:
            self._retention.tell(start.past)
        if getattr(planner, "_enable_plan_caching", False):  # it would bring an old group's id
            raise UsageError(
                "planners with enable_plan_caching are not supported: "
                "GroupWriter.save caches plans itself"
            )
        parts = collected(plan, planner)
        self._begin_group(start.group, parts)
        results = []
        for item, (key, value) in zip(plan.items, parts.items(), strict=True):
            size = value.nbytes if isinstance(value, torch.Tensor) else 0
            results.append(WriteResult(item.index, size, ItemLocation(self._rank, key)))
        if not self._is_coordinator:
            self._save({FORMAT_KEY: FORMAT, ITEMS: parts})
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Save the coordinator's own shards and the metadata, once all other ranks have started."""
        placed = {result.index: result.storage_data for part in results for result in part}
        self._metadata = encode(metadata, placed)
        self._save({FORMAT_KEY: FORMAT, **self._described(), ITEMS: self._parts})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name will do."""
        return True

    def _begin_group(self, group: bytes, parts: Parts) -> None:
        """``parts`` are what this rank saves of it, by key."""
        self._group = group
        self._retention.begin(group)
        self._tally.begin()
        self._outcomes.begin(group, self._step)
        self._parts = parts

    def _parts_of(self, values: list[Any]) -> Parts:
        """Raises ``UsageError`` for what cannot be saved."""
        parts = keyed(values)
        check_kinds({**parts, **self._with_files({})})
        return parts

    def _save_planned(self, group: bytes, parts: Parts) -> None:
        self._begin_group(group, parts)
        content = {FORMAT_KEY: FORMAT, ITEMS: parts}
        if self._is_coordinator:
            content.update(self._described())
        try:
            self._save(content)
        except BaseException as error:
            self._outcomes.refused(error)
            raise

    def _described(self) -> dict[str, Any]:
        """What the coordinator's part has besides."""
        return {METADATA: self._metadata, CHECKPOINT_ID: self._checkpoint_id}

    def _save(self, content: dict[str, Any]) -> SaveHandle:
        checkpointer = self._open()
        token = part_token(self._group, self._rank)
        aside = threading.current_thread() is not threading.main_thread()
        self._handle = checkpointer.save(
            self._with_files(content),
            self._step,
            token=token,
            metrics=self._metrics,
            reference=self._references(),
            synchronous=self.synchronous or aside,
        )
        self._outcomes.began(self._handle)
        if not aside:  # the planning is a part of what the call took
            self._handle.stats.call_s = time.perf_counter() - self._since
        self._parts = None
        if aside or self._is_sent:
            self._handle.wait()
        if self._is_sent:
            self.close()
        return self._handle

    def _with_files(self, content: dict[str, Any]) -> dict[str, Any]:
        files = self._wanted.files if self._wanted else {}
        taken = sorted(files.keys() & KEYS)
        if taken:
            raise UsageError(f"files of a sharded checkpoint cannot be called {taken}")
        return {**content, **files}

    def _references(self) -> dict[str, str] | None:
        """The reference to the part leads to its format number: whoever follows it with
        ``torch.load`` gets no shards, which mean nothing without the others."""
        if self._wanted is None:
            return None
        parts = {shard_name(self._rank, self._count): FORMAT_KEY}
        if self._is_coordinator and not has_stock(self._wanted.directory):
            parts[STOCK_METADATA] = FORMAT_KEY
        parts.update({name: name for name in self._wanted.files})
        return {os.path.join(self._wanted.directory, name): part for name, part in parts.items()}

    def _open(self) -> PoolCheckpointer:
        if self._checkpointer is None:
            name = part_model(self.model, self._rank, self._count)
            spared = None if self._keep is None or self._keep.is_last_alone else self._keep
            checkpointer = self._run.part(name, self.place.of_rank(self._rank), spared)
            self._checkpointer = checkpointer
            checkpointer.part.surplus = lambda own: self._surplus(checkpointer, own)
            checkpointer.part.is_heard_of = True
            if self._count > 1:  # a group of one is seen at once
                checkpointer.part.on_commit = self._committed
        return self._checkpointer

    def _committed(self, info: VersionInfo) -> None:
        """Count a commit of this rank's part. On the worker, after the commit."""
        group = info.token[:ID_SIZE]
        self._retention.committed(group, is_last=self._tally.is_last(group, self._count))

    def _surplus(self, checkpointer: PoolCheckpointer, own: Sequence[VersionInfo]) -> list[int]:
        """Return ids of the versions that this rank may retire. On the worker, before a commit."""
        never, going = self._retention.going(own)
        self._sweep(checkpointer)
        self._retention.succeed(checkpointer.uuid)
        checkpointer.part.cut_off({info.token for info in own if info.id in never})
        return going

    # What the other ranks say.

    def _hear(self, heard: Heard) -> None:
        """Note what that says of groups. Raises why a rank failed, on all, or says it on one."""
        self._retention.hear(heard)
        self._outcomes.heard(raised=heard.raised)
        if heard.error is None:
            return
        if heard.raised:
            raise heard.error
        if self._rank == 0:
            _log.error("portus: %s. Training continues", heard.error)

    def _made_pool(self) -> Sign | None:
        """Return the sign by which others find this rank's pool, which is made if there is none;
        None if it is known that all ranks see it."""
        return None if self._is_shared or self._count == 1 else self._open().part.announce()

    def _check_shared(self, start: _Start) -> None:
        """Raise ``UsageError`` if the coordinator's pool is not where this rank looks for it, or a
        copy of it: then no rank would ever see what the others committed."""
        if start.sign is None or start.rank == self._rank:
            self._is_shared = True
            return
        self._check_hosts(start)
        end = time.monotonic() + _SEEN_S
        while not any(_is_at(pool, start.sign) for pool in self.place.hosts):
            if time.monotonic() > end:
                raise UsageError(
                    f"rank {self._rank} does not find the pool of rank {start.rank} at "
                    f"{self.place}: it was given another place. Give all ranks the same storage "
                    "hosts"
                )
            time.sleep(_POLL_S)
        self._is_shared = True

    def _check_hosts(self, start: _Start) -> None:
        """Raise ``UsageError`` if the coordinator looks for this rank's part on other hosts."""
        hosts = self.place.hosts
        if len(hosts) != len(start.hosts):
            raise UsageError(
                f"rank {self._rank} saves to {self.place} and rank {start.rank} to "
                f"{len(start.hosts)} storage hosts: give all ranks the same pool"
            )
        if len(hosts) > 1 and start.hosts[self._rank % len(hosts)] not in (
            b"",
            self._open().part.announce().uuid,
        ):
            raise UsageError(
                f"rank {self._rank} saves to {self.place.of_rank(self._rank)}, where rank "
                f"{start.rank} has another storage host: give all ranks the same pool, the hosts "
                "in the same order"
            )

    # Directories that wait to be removed.

    def _condemn(self, paths: Sequence[str]) -> None:
        self._condemned.extend((path, self._group) for path in paths)

    def _sweep(self, checkpointer: PoolCheckpointer) -> None:
        """Remove those whose successor, or a group after it, is complete. Without a lock: the
        worker does it too, and the thread that saves may stand still in a signal handler."""
        for _ in range(len(self._condemned)):
            try:
                path, successor = self._condemned.popleft()
            except IndexError:
                return  # another thread has them
            if successor and not self._retention.is_replaced(successor):
                self._condemned.append((path, successor))
                continue
            with contextlib.suppress(UsageError):  # it is closing; the directory stays
                checkpointer.remove(path)

    def _sweep_at_end(self, checkpointer: PoolCheckpointer) -> None:
        end = time.monotonic() + _PEERS_S
        while self._condemned:
            self._retention.look_again()
            self._sweep(checkpointer)
            if self._condemned and time.monotonic() > end:
                paths = [path for path, _ in self._condemned]
                _log.warning("portus: %s stay: not all ranks committed their replacement", paths)
                return
            time.sleep(_POLL_S if self._condemned else 0)


def _sent(kind: type[GroupWriter], place: Place, model: str, more: dict[str, Any]) -> GroupWriter:
    writer = kind(place, model, **more)
    writer._is_sent = True
    return writer


def groups(pool: PlaceName, model: str | None = None) -> list[Group]:
    """The groups on storage hosts, complete or not, newest last.

    Raises ``UsageError`` for a place that is none, ``TransportError`` if no host answers. The log
    names those of several that do not, or cannot be read; what is there is missing.
    """
    place = Place.named(pool)
    check_hosts(place)
    found = census(place, model)
    for error in found.silent.values():
        _log.warning("portus: %s", error)
    return found.groups


def _is_at(pool: Place, sign: Sign) -> bool:
    try:
        with contextlib.closing(PoolFile(pool)) as file:
            return file.sign == sign
    except PortusError:
        return False


def _uuid_at(host: Place) -> bytes:
    """The identity of the pool on a storage host; nothing if it does not answer."""
    try:
        with contextlib.closing(PoolFile(host)) as file:
            return file.uuid
    except PortusError:
        return b""


def _stock_files(directory: str) -> list[str]:
    """What torch's own storage left in a directory, which would be taken for the checkpoint."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(directory) if _STOCK_FILES.fullmatch(name)]
        names = [name for name in names if name != STOCK_METADATA or has_stock(directory)]
        return [os.path.join(directory, name) for name in names]
    return []


def _apart(*said: Named) -> Iterator[str]:
    """What ranks save, where that differs."""
    if len({step for step, _, _ in said}) > 1:
        return (f"step {step}" for step, _, _ in said)
    if len({name for _, name, _ in said}) > 1:
        return (repr(name) for _, name, _ in said)
    return (f"metrics {dict(metrics)}" for _, _, metrics in said)


__all__ = ["GroupWriter", "groups"]
