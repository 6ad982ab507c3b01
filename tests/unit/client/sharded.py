"""Sharded jobs of several processes on the CPU, one after another, for test_dcp.

``run`` takes tasks like ``save:4``, ``load:3``, ``train:2:6``; each has processes of its own. All
are forked, so that torch is imported once.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import portus.client.dcp.group_writer
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import portus.dcp
from portus.client.fence.writers import classify
from portus.dcp import GroupReader, GroupWriter
from portus.errors import CorruptionError
from portus.pipeline.handle import SaveHandle
from portus.spec import VersionInfo
from portus.testing.nursery import Say

WIDTH = 24

JOBS_S_MAX = 250

COLLECTIVES = (
    *("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "gather", "scatter"),
    *("broadcast_object_list", "gather_object", "scatter_object_list", "reduce", "send", "recv"),
)


class Job:
    """A model, sharded over all processes, and its optimizer."""

    def __init__(
        self, seed: int, count: int, *, tensor_parallel: bool = False, replicas: int = 1
    ) -> None:
        """replicas: over 1 makes it HSDP, sharded within each half (third...) of the processes."""
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        self.model.register_buffer("noise", torch.rand(7))
        shape = (count,) if replicas == 1 else (replicas, count // replicas)
        names = ("shard",) if replicas == 1 else ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if tensor_parallel:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.model, mesh, plan)
        else:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)

    def step(self, number: int) -> None:
        torch.manual_seed(1000 + number)
        self.model(torch.rand(5, WIDTH)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step, "more": (1, {"a": "b"})}

    def load(self, reader: GroupReader) -> int:
        state = self.state(0)
        dcp.load(state, storage_reader=reader)
        return self.take(state)

    def take(self, state: dict[str, Any]) -> int:
        """Go on from what was loaded, and its step."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        assert state["more"] == (1, {"a": "b"})
        return int(state["step"])

    def whole(self) -> dict[str, torch.Tensor]:
        """Every tensor, gathered. All processes have to call it."""
        found: dict[str, torch.Tensor] = {}
        state = self.state(0)
        for kind in ("model", "optimizer"):
            for name, value in flat(state[kind], kind):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[name] = whole.clone()
        return found


def say(line: str) -> None:
    """In one piece: the other ranks write too."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def flat(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if isinstance(value, dict):
        return [pair for key, each in value.items() for pair in flat(each, f"{name}.{key}")]
    return []


def pools(root: Path) -> str:
    """The storage hosts that tasks save to."""
    return os.environ["SHARDED_POOL"]


def writer_at(root: Path, model: str = "run", **more: Any) -> GroupWriter:
    """Where ``pools`` says, with links beside the checkpoints."""
    return GroupWriter(pools(root), model, links=str(root / ".links"), **more)


def save(rank: int, count: int, root: Path, parallel: str = "fsdp") -> None:
    replicas = 2 if parallel == "hsdp" else 1
    job = Job(1, count, tensor_parallel=parallel == "tp", replicas=replicas)
    writer = writer_at(root, parallel)
    for step in (1, 2):
        job.step(step)
        expected = job.whole()
        dcp.save(job.state(step), checkpoint_id=f"step_{step}", storage_writer=writer)
        assert all(classify(shards(job), set(), set())), "copied late"
    job.step(3)  # at once: it has to wait for the copy
    writer.close()
    if rank == 0:
        torch.save(expected, root / f"{parallel}.pt")


def shards(job: Job) -> list[torch.UntypedStorage]:
    """The memory of the parameters of this process."""
    return [each._local_tensor.untyped_storage() for each in map(sharded, job.model.parameters())]


def sharded(parameter: torch.Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    return parameter


def load(rank: int, count: int, root: Path, parallel: str = "fsdp") -> None:
    job = Job(2, count, tensor_parallel=parallel == "tp")
    job.step(0)
    reader = GroupReader(pools(root), parallel)
    assert job.load(reader) == 2
    assert reader.group is not None
    assert (reader.group.step, reader.group.count) == (2, 4)
    expected = torch.load(root / f"{parallel}.pt")
    found = job.whole()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def hold(writer: GroupWriter) -> None:
    """Let this rank, which has saved before, commit no more."""

    def never(own: Sequence[VersionInfo]) -> list[int]:
        threading.Event().wait()
        return []

    writer.wait()  # or the save before this one would be held too
    writer._open().part.surplus = never


def train(rank: int, count: int, root: Path, until: str, killed: str = "-1") -> None:
    """Train, save after each step, resume by itself; rank 1 may die in the save of a step."""
    job = Job(1, count)
    found = portus.dcp.groups(pools(root), "run")
    dist.barrier()
    writer = writer_at(root)
    done = job.load(GroupReader(pools(root), "run")) if found else 0
    for step in range(done + 1, int(until) + 1):
        job.step(step)
        if step == int(killed):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the others when one dies
            if rank == 1:
                hold(writer)
        dcp.save(job.state(step), checkpoint_id=f"step_{step}", storage_writer=writer)
        if step == int(killed):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            writer.wait()
            os._exit(0)
    writer.close()
    digest = digest_of(job)
    if rank == 0:
        print("resumed", done, "end", digest, flush=True)


def train_for_ever(rank: int, count: int, root: Path, first: str) -> None:
    """Resume, if ``first`` is not 1, then train and save until somebody ends it, from that step on,
    so that no two saves are of the same step. Each rank tells its process and what it committed;
    the first one also what is saved, and what was loaded."""
    say(f"process {rank} {os.getpid()}")
    job = Job(1, count)
    if int(first) > 1:
        loaded = job.load(GroupReader(pools(root), "run"))
        tell(rank, "loaded", loaded, job)
    durable: Literal[1, 2] = 2 if "+" in pools(root) else 1  # two hosts
    writer = writer_at(root, durable=durable)
    under_way: dict[int, SaveHandle] = {}
    for step in itertools.count(int(first)):
        job.step(step)
        tell(rank, "saved", step, job)
        under_way[step] = writer.save(job.state(step), step=step)
        for each in [each for each, handle in under_way.items() if handle.done]:
            if under_way.pop(each).committed:
                say(f"committed {each} {rank}")


def tell(rank: int, what: str, step: int, job: Job) -> None:
    """What the job is now, of all ranks together."""
    digest = digest_of(job)
    if rank == 0:
        say(f"{what} {step} {digest}")


def digest_of(job: Job) -> str:
    """Of every tensor, gathered. All processes have to call it."""
    digest = hashlib.sha256()
    for name, value in sorted(job.whole().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def look(rank: int, count: int, root: Path) -> None:
    """Load what there is, and tell it."""
    job = Job(2, count)
    tell(rank, "loaded", job.load(GroupReader(pools(root), "run")), job)


def damaged(rank: int, count: int, root: Path) -> None:
    """One rank alone finds its shard of the newest group damaged; all load the one before it."""
    torch.manual_seed(5)
    job = Job(2, count)
    job.step(0)
    before = job.whole()
    reader = GroupReader(pools(root), "fsdp", step=2)
    with pytest.raises(CorruptionError, match=f"step 2 of {count} ranks, the part of rank 1"):
        portus.dcp.load(job.state(0), reader)
    after = job.whole()
    assert all(torch.equal(after[name], before[name]) for name in before), "half loaded"
    state = job.state(0)
    reader = GroupReader(pools(root), "fsdp")
    group = portus.dcp.load(state, reader)
    assert (group.step, state["step"]) == (1, 1)
    say(f"rank {rank} loaded {group.step}")


def mixed(rank: int, count: int, root: Path) -> None:
    """Ranks that do not name the same step, or are not all there, are told so."""
    writer = writer_at(root, "mixed")
    with pytest.raises(CheckpointException, match="rank 0 saves step 3 and rank 1 saves step 4"):
        dcp.save({"t": torch.zeros(3)}, checkpoint_id=f"step_{3 + rank}", storage_writer=writer)
    alone = dist.new_group([0])
    if rank == 0:
        with pytest.raises(CheckpointException, match="1 ranks plan this save and 2 are in the"):
            dcp.save({"t": torch.zeros(3)}, storage_writer=writer, process_group=alone)
    writer.close()
    assert not portus.dcp.groups(pools(root), "mixed")


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """Which of them are called inside."""
    used: list[str] = []
    whole = {name: getattr(dist, name) for name in COLLECTIVES}

    def noted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            used.append(name)
            return whole[name](*args, **named)

        return call

    for name in whole:
        setattr(dist, name, noted(name))
    yield used
    for name, call in whole.items():
        setattr(dist, name, call)


def again(rank: int, count: int, root: Path) -> None:
    """Saves of the same state are planned once; whatever changes on any rank is planned anew."""
    planned, global_plan = [], DefaultSavePlanner.create_global_plan

    def counted(planner: Any, plans: list[SavePlan]) -> Any:
        planned.append(len(plans))
        return global_plan(planner, plans)

    setattr(DefaultSavePlanner, "create_global_plan", counted)  # noqa: B010
    writer = writer_at(root, keep=None, on_error="raise")
    state: dict[str, Any] = {"same": torch.zeros(64), f"own{rank}": torch.zeros(8), "n": 0}

    def saved(step: int, *, plannings: int) -> None:
        """Save what no earlier step had, load it, and compare."""
        state["same"] += 1
        state[f"own{rank}"] += rank + step
        state["n"] = (step, "text")
        writer.save(state, step=step)
        writer.wait()
        dist.barrier()
        target: dict[str, Any] = {
            name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
            for name, value in state.items()
        }
        found = portus.dcp.load(target, GroupReader(pools(root), "run"))
        assert (found.step, found.count) == (step, count)
        assert target["n"] == (step, "text")
        for name, value in state.items():
            assert name == "n" or torch.equal(value, target[name]), name
        if rank == 0:
            assert len(planned) == plannings, (step, planned)

    saved(1, plannings=1)
    saved(2, plannings=1)
    with collectives() as used:
        writer.save(state, step=2)
    assert used == ["gather", "broadcast"], "ranks tell each other once, by way of the first"
    writer.wait()
    if rank == 1:
        state["own1"] = torch.zeros(9)  # one rank's plan changes
    saved(3, plannings=2)
    saved(4, plannings=2)
    state["same"] = state["same"].double()
    saved(5, plannings=3)
    if rank == 1:
        state["own1"] = UnstorableTensor(torch.zeros(9))  # nothing to plan anew, and no save
    with pytest.raises(portus.UsageError, match="UnstorableTensor"):
        writer.save(state, step=6)
    if rank == 1:
        state["own1"] = torch.zeros(9)
    saved(7, plannings=4)
    dcp.save({"other": torch.zeros(3)}, checkpoint_id="8", storage_writer=writer)
    saved(9, plannings=6)
    with pytest.raises(CheckpointException, match="rank 0 saves step 10 and rank 1 saves step 11"):
        writer.save(state, step=10 + rank)
    saved(12, plannings=8)
    by = {"process_group": dist.new_group(backend="gloo")}
    for step in (121, 122):
        writer.save({"same": state["same"]}, step=step, **by)
    assert writer.last is not None
    assert writer.last.wait().step == 122
    caching = DefaultSavePlanner(enable_plan_caching=True)
    with pytest.raises(CheckpointException, match=r"GroupWriter\.save caches plans"):
        dcp.save(state, checkpoint_id="13", storage_writer=writer, planner=caching)
    saved(13, plannings=11)
    mesh = init_device_mesh("cpu", (count,))
    for step, cut in ((131, 0), (132, 1)):  # another cut, of the same bytes on each rank
        whole = torch.arange(16.0).reshape(4, 4) + step
        state["same"] = distribute_tensor(whole, mesh, [Shard(cut)])
        for _ in range(2):
            writer.save(state, step=step)
        writer.wait()
        dist.barrier()
        target: dict[str, Any] = {"same": torch.zeros(4, 4)}
        portus.dcp.load(target, GroupReader(pools(root), "run"))
        assert torch.equal(target["same"], whole), step
        assert rank or len(planned) == 12 + cut, planned
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:  # alone now
        writer.save(state, step=14)
    writer.close()


class Told(logging.Handler):
    """Keeps what Portus says as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        logging.getLogger("portus").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


PART = 1 << 20


def full(rank: int, count: int, root: Path, on_error: str, way: str) -> None:
    """The host of rank 1 has room for a few parts, which are kept; all ranks hear of it within two
    saves."""
    said = Told()
    keep = 1 if way == "directory" else None
    writer = writer_at(root, keep=keep, on_error=on_error)
    state = {f"own{rank}": torch.zeros(PART // 4)}
    first_failed, first_told = 0, 0
    for step in range(1, 16):
        state[f"own{rank}"].fill_(step)
        try:
            if way == "directory":
                writer.save_directory(state, root / f"{step}", step=step)
            elif way == "save":
                writer.save(state, step=step)
            else:
                dcp.save(state, checkpoint_id=f"{step}", storage_writer=writer)
        except (portus.MediumError, CheckpointException) as error:
            said.texts.append(str(error))
            first_told = first_told or step
            continue
        assert writer.last is not None
        writer.last.join()
        dist.barrier()
        outcome: list[Any] = [None] * count
        dist.all_gather_object(outcome, writer.last.committed)
        assert outcome[0], "rank 0 has room"
        first_failed = first_failed or (0 if all(outcome) else step)
        first_told = first_told or (step if said.texts else 0)
    assert first_failed > 2, "some groups are complete"
    if on_error == "raise" or rank == 0:
        assert first_failed < first_told <= first_failed + 2, (first_failed, first_told)
        assert "of 2 ranks, 1 failed. rank 1 did not commit step" in said.texts[0]
    with contextlib.suppress(portus.PortusError):
        writer.close()
    dist.barrier()
    found = portus.dcp.groups(pools(root), "run")
    newest = [group for group in found if group.is_complete][-1]
    assert newest.step == first_failed - 1, "the last complete group was given up"
    if rank == 0:
        parts = [group.step for group in found if 0 in group.parts]
        assert len(parts) <= newest.step + 2, "parts of saves that rank 1 has no part of"
    target = {f"own{rank}": torch.zeros(PART // 4)}
    portus.dcp.load(target, GroupReader(pools(root), "run"))
    assert target[f"own{rank}"].eq(newest.step).all()
    if way == "directory":
        kept = sorted(int(each.parent.name) for each in root.glob(f"[0-9]*/rank-{rank}-*.shard"))
        assert kept[: newest.step] == list(range(1, newest.step + 1))
        assert len(kept) <= newest.step + 2, kept


def spread(rank: int, count: int, root: Path, first: str, last: str, killed: str = "-1") -> None:
    """Save to several storage hosts; one is killed before the save of a step. What each rank was
    told is printed."""
    said = Told()
    writer = writer_at(root)
    own = torch.zeros(1000)
    for step in range(int(first), int(last) + 1):
        if step == int(killed):
            dist.barrier()
            if rank == 0:
                os.kill(int(os.environ["SHARDED_HOST"]), signal.SIGKILL)
            dist.barrier()
        own.fill_(step)
        writer.save({f"own{rank}": own}, step=step)
        assert writer.last is not None
        writer.last.join()
        dist.barrier()  # so that it is known which groups are complete at the next commit
        say(f"{step} rank {rank} {'committed' if writer.last.committed else 'failed'}")
    with contextlib.suppress(portus.TransportError):
        writer.close()
    say(f"rank {rank} heard {said.texts}")


def elastic(rank: int, count: int, root: Path, first: str) -> None:
    """Save three times, as a job that goes on with another number of ranks than the one before."""
    writer = writer_at(root, keep=1)
    own = torch.zeros(2 * PART // count)
    for step in range(int(first), int(first) + 3):
        own.fill_(step)
        writer.save({f"own{rank}": own}, step=step)
        writer.wait()
        dist.barrier()
    writer.close()


def big(rank: int, count: int, root: Path, step: str) -> None:
    """Load what a job of another number of ranks saved, and save it: shards of more than a load
    keeps, cut where nobody else cuts them."""
    mesh = init_device_mesh("cpu", (count,))
    whole = torch.arange(3_000_005.0).reshape(5, -1)
    cut = {f"by {axis}": distribute_tensor(whole, mesh, [Shard(axis)]) for axis in range(2)}
    state: dict[str, Any] = {**cut, "all": whole.clone(), f"own{rank}": torch.ones(9)}
    if step != "1":
        target = {name: torch.zeros_like(value) for name, value in state.items() if name[0] != "o"}
        assert portus.dcp.load(target, GroupReader(pools(root), "run")).step == int(step) - 1
        assert all(torch.equal(unwrapped(target[n]), unwrapped(state[n])) for n in target)
    writer = writer_at(root)
    writer.save(state, step=int(step))
    writer.close()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def elsewhere(rank: int, count: int, root: Path) -> None:
    """Rank 1 has another second host than rank 0, where nobody would look for its part."""
    hosts = os.environ["SHARDED_POOL"].split(",")
    writer = GroupWriter([hosts[0], hosts[1 + rank]], "run", links=str(root / "l"))
    with pytest.raises(CheckpointException, match=r"rank 1 saves to .* has another storage host"):
        writer.save({f"own{rank}": torch.zeros(9)}, step=1)
    writer.close()


def fsdp1(rank: int, count: int, root: Path, kind: str, action: str) -> None:
    """FullyShardedDataParallel: ``DTensor`` with a mesh, ``ShardedTensor`` without."""
    torch.manual_seed(1)
    more: dict[str, Any] = (
        {"device_mesh": init_device_mesh("cpu", (count,))} if kind == "mesh" else {}
    )
    inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    device = torch.device("cpu")
    model = FullyShardedDataParallel(inner, device_id=device, use_orig_params=True, **more)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step() -> None:
        model(torch.rand(3, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def whole() -> dict[str, torch.Tensor]:
        options = StateDictOptions(full_state_dict=True)
        states = get_state_dict(model, optimizer, options=options)
        return {name: value.clone() for name, value in flat(dict(enumerate(states)), "")}

    step()
    if action == "save":
        writer = writer_at(root, kind)
        of_model, of_optimizer = get_state_dict(model, optimizer)
        writer.save({"model": of_model, "optimizer": of_optimizer}, step=1)
        found = whole()
        writer.close()
        if rank == 0:
            torch.save(found, root / f"{kind}.pt")
        return
    step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer}
    portus.dcp.load(state, GroupReader(pools(root), kind))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    found = whole()
    if rank == 0:
        expected = torch.load(root / f"{kind}.pt")
        assert found.keys() == expected.keys()
        assert len(found) > 8
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


class UnstorableTensor(torch.Tensor):
    """Of a class that Portus does not know."""


def late(rank: int, count: int, root: Path) -> None:
    """Rank 1 finds no group: nobody waits for anybody."""
    model = "other" if rank == 1 else "fsdp"
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"model": {}}, storage_reader=GroupReader(pools(root), model))
    assert list(caught.value.failures) == [1]
    say(f"rank {rank} heard")


def directories(rank: int, count: int, root: Path, killed: str = "-1") -> None:
    """Save to a new directory at each step, and remove the one before; rank 1 may die in a save.

    At every moment, some directory leads to a complete group.
    """
    job = Job(1, count)
    writer = writer_at(root, keep=1)
    for step in range(1, 5):
        job.step(step)
        if step == int(killed):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the others when one dies
            if rank == 1:
                hold(writer)
        files = {"meta.pt": {"step": step}} if rank == 0 else {}
        writer.save_directory(job.state(step), root / f"{step}", step=step, files=files)
        if rank == 0 and step > 1:
            writer.remove(root / f"{step - 1}")
        if step == int(killed):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            writer.wait()
            os._exit(0)
        writer.wait()
        dist.barrier()  # so that it is known which groups are complete at the next commit
    writer.close()


def read_directory(rank: int, count: int, root: Path, name: str, step: str) -> None:
    """Load what a directory leads to."""
    job = Job(2, count)
    state = job.state(0)
    if name != step:  # the save was cut off: nothing else is loaded unasked
        cut_off = GroupReader.at(root / name)
        assert cut_off is not None
        with pytest.raises(portus.UsageError, match=f"step {name} of {2} ranks is not complete"):
            portus.dcp.load(state, cut_off)
    reader = GroupReader.at(root / name, fall_back=name != step)
    assert reader is not None
    assert portus.dcp.load(state, reader).step == int(step) == state["step"]
    assert reader.file("meta.pt") == {"step": int(step)}
    say(f"rank {rank} has {state['step']}")


def asynchronous(rank: int, count: int, root: Path) -> None:
    job = Job(1, count)
    job.step(1)
    writer = writer_at(root, "async")
    group = dist.new_group(backend="gloo")
    future: Any = dcp.async_save(
        job.state(1), checkpoint_id="1", storage_writer=writer, process_group=group
    )
    expected = job.whole()
    job.step(2)  # at once
    future.result()
    assert writer.last is not None
    assert writer.last.committed
    writer.close()
    dist.barrier()
    job.load(GroupReader(pools(root), "async"))
    found = job.whole()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def in_a_process(rank: int, count: int, root: Path) -> None:
    """``async_save`` in a process of its own, twice; the weights change as soon as it returns."""
    job = Job(1, count)
    writer = writer_at(root, on_error="raise")
    group = dist.new_group(backend="gloo")
    for step in (1, 2):
        job.step(step)
        expected = job.whole()
        future: Any = dcp.async_save(
            job.state(step),
            checkpoint_id=str(step),
            storage_writer=writer,
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        job.step(10 + step)
        future.result()
    writer.close()
    assert job.load(GroupReader(pools(root), "run")) == 2
    found = job.whole()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


TASKS: dict[str, Callable[..., None]] = {
    "save": save,
    "load": load,
    "train": train,
    "train_for_ever": train_for_ever,
    "look": look,
    "async": asynchronous,
    "process": in_a_process,
    "damaged": damaged,
    "mixed": mixed,
    "late": late,
    "again": again,
    "fsdp1": fsdp1,
    "full": full,
    "big": big,
    "elsewhere": elsewhere,
    "elastic": elastic,
    "spread": spread,
    "directories": directories,
    "read": read_directory,
}


def start(rank: int, task: str, count: int, root: Path, place: str, more: list[str]) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=count)
    TASKS[task](rank, count, root, *more)
    if dist.is_initialized():
        dist.destroy_process_group()


def warm_up() -> None:
    """For the nursery: all imports are done."""


def run(_: Say, root: str, tasks: Sequence[str], environment: dict[str, str], errors: str) -> None:
    """errors: the file that takes what goes to stderr."""
    signal.alarm(JOBS_S_MAX)
    os.environ.update(environment)
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    for text in tasks:
        task, count, *more = text.split(":")
        with tempfile.TemporaryDirectory() as place:
            arguments = (task, int(count), Path(root), f"{place}/store", more)
            try:
                mp.start_processes(start, arguments, int(count), start_method="fork")
            except mp.ProcessExitedException as error:
                if error.signal_name is None:  # also what pytest.raises says is no ``Exception``
                    raise
                print(f"{text}: {error}", flush=True)
