"""Sharded jobs of several processes that save and load directories of torch's."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import set_model_state_dict

import portus.dcp
import portus.reach.shards.arrival
from portus.dcp import PortusStorageReader, PortusStorageWriter
from portus.engine.writer.image_file import ImageFile
from portus.errors import MediumError, PortusError, UsageError
from portus.reach.training.training_files import TrainingFiles
from tests.unit.dcp import sharded
from tests.unit.dcp.sharded import Job, collectives, say

run = sharded.run


def note(job: Job, root: Path, step: int) -> None:
    """What is to be loaded of a step."""
    whole = job.whole()
    if dist.get_rank() == 0:
        torch.save(whole, root / f"expected-{step}.pt")


def is_noted(job: Job, root: Path, step: int) -> None:
    """It was loaded, bit for bit."""
    found, expected = job.whole(), torch.load(root / f"expected-{step}.pt")
    assert found.keys() == expected.keys()
    assert len(found) > 8
    for name, value in expected.items():
        assert torch.equal(found[name], value), (step, name)


def dirs_save(rank: int, count: int, root: Path, how: str, last: str = "2") -> None:
    """Save steps 1 to ``last``; training goes on at once."""
    job = Job(1, count)
    writer = FileSystemWriter("") if how == "stock" else PortusStorageWriter()
    for step in range(1, int(last) + 1):
        job.step(step)
        note(job, root, step)
        place, state = root / f"step_{step}", job.state(step)
        if isinstance(writer, PortusStorageWriter) and how == "late":
            writer.save(state, place)
        elif how == "call":
            portus.dcp.save(state, place)
        elif how == "async_call":
            portus.dcp.async_save(state, place)
        elif how == "async":
            group = dist.new_group(backend="gloo")
            future: Any = dcp.async_save(
                state, checkpoint_id=place, storage_writer=writer, process_group=group
            )
        else:
            dcp.save(state, checkpoint_id=place, storage_writer=writer)
        if how in ("dcp", "call", "stock"):
            assert (place / ".metadata").exists(), "it returns when all is there"
        job.step(100 + step)
        if how == "async":
            future.result()
            assert (place / ".metadata").exists()
    if isinstance(writer, PortusStorageWriter):
        writer.close()


def dirs_keep_one(rank: int, count: int, root: Path) -> None:
    """Save five times, each when the one before is complete; say which of this rank's files went
    into a spare."""
    job, writer = Job(1, count), PortusStorageWriter(keep=1)
    spares: list[bool] = []
    real = ImageFile.__init__

    def made(file: ImageFile, *given: Any, is_spare: bool, **more: Any) -> None:
        spares.append(is_spare)
        real(file, *given, is_spare=is_spare, **more)

    setattr(ImageFile, "__init__", made)  # noqa: B010
    for step in range(1, 6):
        job.step(step)
        note(job, root, step)
        writer.save(job.state(step), root / f"step_{step}")
        writer.wait()
        dist.barrier()
    writer.close()
    say(f"rank {rank} {spares}")


def dirs_load(rank: int, count: int, root: Path, by: str, step: str) -> None:
    job, place = Job(2, count), root / f"step_{step}"
    state = job.state(0)
    if by == "stock":
        dcp.load(state, storage_reader=FileSystemReader(place))
    elif by == "reader":
        dcp.load(state, checkpoint_id=place, storage_reader=PortusStorageReader())
    elif by == "newest":
        assert portus.dcp.load_newest(state, root) == str(place)
    else:
        portus.dcp.load(state, place)
    assert job.take(state) == int(step)
    is_noted(job, root, int(step))
    say(f"rank {rank} has {step}")


def dirs_train(rank: int, count: int, root: Path, until: str, kill: str = "") -> None:
    """Go on from the newest, to ``until``; ``kill``, as "who-ms": who is killed so long after the
    last save was asked for."""
    job = Job(1, count)
    state = job.state(0)
    writer = PortusStorageWriter()
    newest = portus.dcp.load_newest(state, root / "run")
    start = 0
    if newest is not None:
        start = job.take(state)
        if (root / f"expected-{start}.pt").exists():
            is_noted(job, root, start)
        say(f"rank {rank} goes on from {start}")
    for step in range(start + 1, int(until) + 1):
        job.step(step)
        note(job, root, step)
        dist.barrier()
        if step == int(until) and kill:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the others when one dies
        writer.save(job.state(step), root / "run" / f"step_{step}")
    if kill:
        who, after_ms = kill.split("-")
        if who in ("all", str(rank)):
            time.sleep(int(after_ms) / 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    writer.close()


def dirs_full(rank: int, count: int, root: Path) -> None:
    """The disk of rank 1 is full at step 2: all know it within two saves, and the next ones are
    complete."""
    job, writer = Job(1, count), PortusStorageWriter()
    real, is_full = ImageFile.finish, False

    def finish(file: ImageFile) -> None:
        if is_full:
            raise MediumError(errno.ENOSPC, f"{file._path}: No space left on device")
        real(file)

    setattr(ImageFile, "finish", finish)  # noqa: B010
    for step in range(1, 5):
        is_full = rank == 1 and step == 2
        job.step(step)
        note(job, root, step)
        writer.save(job.state(step), root / f"step_{step}")
        if rank != 0 or step != 2:
            writer.wait()  # that of rank 0 waits for rank 1
        dist.barrier()
    writer.close()
    dist.barrier()
    found = sorted(each.name for each in (root / "step_2").iterdir())
    assert found == [], f"what others wrote of it is removed: {found}"
    assert (root / "step_4" / ".metadata").exists()


def dirs_unbegun(rank: int, count: int, root: Path) -> None:
    """On one rank alone a late save that is planned as the one before does not come to begin: the
    next ones are complete, and nobody waits for anybody."""
    real, is_refused = TrainingFiles.save_directory, False

    def save_directory(files: TrainingFiles, *more: Any, **named: Any) -> Any:
        if is_refused:
            raise MediumError(errno.EIO, "no")
        return real(files, *more, **named)

    setattr(TrainingFiles, "save_directory", save_directory)  # noqa: B010
    # Ranks tell each other at the next save: none is to wait until a file is long overdue.
    setattr(portus.reach.shards.arrival, "GONE_HERE_S", 600.0)  # noqa: B010
    job, writer = Job(1, count), PortusStorageWriter()
    for step in range(1, 7):
        is_refused = (rank, step) in ((1, 3), (0, 5))
        job.step(step)
        note(job, root, step)
        with pytest.raises(MediumError) if is_refused else contextlib.nullcontext():
            writer.save(job.state(step), root / f"step_{step}")
        dist.barrier()
    writer.close()
    dist.barrier()
    complete = [step for step in range(1, 7) if (root / f"step_{step}" / ".metadata").exists()]
    assert complete == [1, 2, 4, 6], complete


def dirs_apart(rank: int, count: int, root: Path) -> None:
    """Rank 1 sees another file system at the same path."""
    real = PortusStorageWriter.write_data

    def write_data(self: PortusStorageWriter, *more: Any) -> Any:
        if rank == 1:
            self._directory = str(root / "elsewhere" / "step_1")
        return real(self, *more)

    setattr(PortusStorageWriter, "write_data", write_data)  # noqa: B010
    setattr(portus.reach.shards.arrival, "SEEN_S", 0.3)  # noqa: B010
    job, writer = Job(1, count), PortusStorageWriter()
    (root / "elsewhere").mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="expected a directory that all ranks see"):
        writer.save(job.state(1), root / "step_1")
    writer.close()


def dirs_refused(rank: int, count: int, root: Path) -> None:
    """What one rank cannot save is an error on all of them, and the next save is complete."""
    job, writer = Job(1, count), PortusStorageWriter()
    state = {**job.state(1), "bad": (lambda: 0) if rank == 1 else 0}
    with pytest.raises((PortusError, dcp.api.CheckpointException)):
        writer.save(state, root / "step_1")
    note(job, root, 2)
    writer.save(job.state(2), root / "step_2")
    writer.close()
    dist.barrier()
    assert not list((root / "step_1").glob("*.distcp"))


def dirs_again(rank: int, count: int, root: Path) -> None:
    """Late saves of what looks the same are planned once; whatever changes on any rank is planned
    anew. Stock loads each."""
    planned, global_plan = [], DefaultSavePlanner.create_global_plan

    def counted(planner: Any, plans: list[SavePlan]) -> Any:
        planned.append(len(plans))
        return global_plan(planner, plans)

    setattr(DefaultSavePlanner, "create_global_plan", counted)  # noqa: B010
    writer = PortusStorageWriter()
    state: dict[str, Any] = {"same": torch.zeros(64), f"own{rank}": torch.zeros(8)}
    state |= {f"rate{rank}": 0.5, "negative": -0.0, "n": 0, "text": "a"}

    def saved(step: int, *, plannings: int, above: str = "run", blocking: bool = False) -> None:
        state["same"] += 1
        state[f"own{rank}"] += rank + step
        state["n"], state[f"rate{rank}"] = step, step / 8
        place = root / above / f"step_{step}"
        writer.save(state, place, blocking=blocking)
        writer.wait()
        dist.barrier()
        assert sorted(each.name for each in place.iterdir())[0] == ".metadata"
        for load in (dcp.load, portus.dcp.load):
            target: dict[str, Any] = {
                name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
                for name, value in state.items()
            }
            load(target, checkpoint_id=place)
            for name, value in state.items():
                is_tensor = isinstance(value, torch.Tensor)
                there = target[name]
                assert torch.equal(there, value) if is_tensor else there == value, (step, name)
            assert repr(target["negative"]) == "-0.0"
        if rank == 0:
            assert len(planned) == plannings, (step, planned)
        dist.barrier()

    saved(1, plannings=1)
    saved(2, plannings=1)
    with collectives() as used:
        writer.save(state, root / "run" / "step_20")
    assert used == ["gather", "broadcast"], "ranks tell each other once, by way of the first"
    if rank == 1:
        state["own1"] = torch.zeros(9)  # one rank's plan changes
    saved(3, plannings=2)
    saved(4, plannings=2)
    state["text"] = "a" * 1000  # the plan is the same, and what is behind it is elsewhere
    saved(5, plannings=3)
    saved(6, plannings=3)
    with pytest.raises((PortusError, dcp.api.CheckpointException)):
        writer.save({**state, "own1": lambda: 0} if rank == 1 else state, root / "run" / "step_7")
    before = len(planned)
    saved(8, plannings=before + 1)
    saved(9, plannings=before + 1)
    saved(10, plannings=before + 2, above="other")  # names that the job has not claimed
    saved(11, plannings=before + 2, above="other")
    saved(12, plannings=before + 3, blocking=True)
    saved(13, plannings=before + 3)
    writer.close()
    saved(14, plannings=before + 4)
    writer.close()


def shards_save(rank: int, count: int, root: Path, how: str) -> None:
    """Save the weights of steps 1 to 3 as safetensors files; training goes on at once."""
    job = Job(1, count)
    writer: Any = (
        HuggingFaceStorageWriter("", save_distributed=True)
        if how == "stock"
        else PortusStorageWriter(layout="safetensors")
    )
    for step in range(1, 4):
        job.step(step)
        note(job, root, step)
        state, place = {"model": job.state(step)["model"]}, root / f"step_{step}"
        if how == "late":
            writer.save(state, place)
        else:
            dcp.save(state, checkpoint_id=place, storage_writer=writer)
        job.step(100 + step)
    if isinstance(writer, PortusStorageWriter):
        writer.close()


def shards_load(rank: int, count: int, root: Path, by: str, step: str) -> None:
    """Load the weights of a step; the rest is as ever."""
    job, place = Job(2, count), root / f"step_{step}"
    state = {"model": job.state(0)["model"]}
    reader = HuggingFaceStorageReader(str(place)) if by == "stock" else PortusStorageReader(place)
    dcp.load(state, storage_reader=reader)
    set_model_state_dict(job.model, state["model"])
    expected = torch.load(root / f"expected-{step}.pt")
    found = {name: each for name, each in job.whole().items() if name.startswith("model")}
    assert len(found) == 5
    for name, each in found.items():
        assert torch.equal(each, expected[name]), (step, name)


def shards_refused(rank: int, count: int, root: Path) -> None:
    """What no such file can have is an error on all ranks, as is a directory with a checkpoint; and
    what a killed save left is gone."""
    job, writer = Job(1, count), PortusStorageWriter(layout="safetensors")
    weights = {"model": job.state(1)["model"]}
    place = root / "step_1"
    if rank == 0:
        place.mkdir()
    dist.barrier()
    with pytest.raises(UsageError, match=r"step: expected a tensor.*layout='torch'"):
        writer.save({**weights, "step": 1}, place)
    writer.save(weights, place, blocking=True)
    dist.barrier()
    for blocking in (True, False):
        with pytest.raises(UsageError, match="Save to another directory"):
            writer.save(weights, place, blocking=blocking)
    dist.barrier()
    if rank == 0:
        (root / "step_2").mkdir()
        left = sorted(place.glob("*.safetensors"))[-1]
        left.rename(root / "step_2" / "shard-00007-model-00001-of-00001.safetensors")
    dist.barrier()
    writer.save(weights, root / "step_2")
    writer.save(weights, root / "step_3")  # planned as the one before
    with pytest.raises(UsageError, match="Save to another directory"):
        writer.save(weights, root / "step_3")
    writer.close()
    dist.barrier()
    assert len(list((root / "step_2").iterdir())) == count + 1


def hosts_save(rank: int, count: int, root: Path, parallel: str, last: str = "2") -> None:
    """Save steps 1 to ``last`` to the hosts of $PORTUS_POOL; training goes on at once."""
    job = _parallel(parallel, count)
    writer = PortusStorageWriter(model="net", keep=3)
    for step in range(1, int(last) + 1):
        job.step(step)
        note(job, root, step)
        writer.save(job.state(step), root / f"step_{step}")
        job.step(100 + step)
    writer.close()


def hosts_load(rank: int, count: int, root: Path, parallel: str, step: str) -> None:
    job, place = _parallel(parallel, count, seed=2), root / f"step_{step}"
    state = job.state(0)
    portus.dcp.load(state, place)
    assert job.take(state) == int(step)
    is_noted(job, root, int(step))


def _parallel(kind: str, count: int, seed: int = 1) -> Job:
    return Job(seed, count, tensor_parallel=kind == "tp", replicas=2 if kind == "hsdp" else 1)


def hosts_train(rank: int, count: int, root: Path, first: str, last: str, lost: str = "") -> None:
    """Save steps, each when the one before is over. lost: those that fail on some rank."""
    job, writer = Job(1, count), PortusStorageWriter(model="net", keep=3)
    failed = {int(step) for step in lost.split(",") if step}
    for step in range(int(first), int(last) + 1):
        job.step(step)
        note(job, root, step)
        if step == min(failed, default=0) and rank == 0:
            os.kill(int(os.environ["HOST"]), signal.SIGKILL)
        dist.barrier()
        with contextlib.suppress(PortusError):
            writer.save(job.state(step), root / f"step_{step}").wait()
        dist.barrier()
        complete = (root / f"step_{step}" / ".metadata").exists()
        assert complete == (step not in failed), (step, complete)
        dist.barrier()
    with contextlib.suppress(PortusError):
        writer.close()


def hosts_full(rank: int, count: int, root: Path) -> None:
    """What has no room on a host is heard of on all ranks, and the next one is complete."""
    writer = PortusStorageWriter(model="net")
    small = {"same": torch.ones(1000), f"own{rank}": torch.full((1000,), float(rank))}
    writer.save(small, root / "step_1").wait()
    large = {**small, f"own{rank}": torch.ones((8 << 20) if rank == 1 else 1000)}
    with pytest.raises(PortusError):
        writer.save(large, root / "step_2", blocking=True).wait()
    dist.barrier()
    assert not (root / "step_2" / ".metadata").exists()
    with contextlib.suppress(PortusError):
        writer.save(small, root / "step_3").wait()
    with contextlib.suppress(PortusError):
        writer.save(small, root / "step_4").wait()
    dist.barrier()
    assert (root / "step_4" / ".metadata").exists()
    with contextlib.suppress(PortusError):
        writer.close()


sharded.TASKS.update(
    {
        "hosts_save": hosts_save,
        "hosts_load": hosts_load,
        "hosts_train": hosts_train,
        "hosts_full": hosts_full,
        "dirs_save": dirs_save,
        "dirs_load": dirs_load,
        "dirs_keep_one": dirs_keep_one,
        "dirs_train": dirs_train,
        "dirs_again": dirs_again,
        "dirs_full": dirs_full,
        "dirs_apart": dirs_apart,
        "dirs_unbegun": dirs_unbegun,
        "dirs_refused": dirs_refused,
        "shards_save": shards_save,
        "shards_load": shards_load,
        "shards_refused": shards_refused,
    }
)
