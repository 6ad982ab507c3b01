"""A sharded job of several processes that saves to storage hosts until it is killed, and jobs that
load what it left; for the nursery."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import portus.dcp
from portus.engine.pipeline.handle import SaveHandle
from tests.nursery import Say

WIDTH: Final = 24
KEEP: Final = 3
"""Complete checkpoints that stay."""

JOBS_S_MAX: Final = 250


class Job:
    """A model, sharded over all processes, and its optimizer."""

    def __init__(self, seed: int, count: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        fully_shard(self.model, mesh=init_device_mesh("cpu", (count,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)

    def step(self, number: int) -> None:
        torch.manual_seed(1000 + number)
        self.model(torch.rand(5, WIDTH)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}

    def load(self, root: Path) -> int:
        """The newest checkpoint; its step, or 0 if there is none."""
        state = self.state(0)
        if portus.dcp.load_newest(state, root / "ckpt") is None:
            return 0
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(state["step"])

    def digest(self) -> str:
        """Of every tensor, gathered. All processes have to call it."""
        found, state = hashlib.sha256(), self.state(0)
        values = [*state["model"].values()]
        for each in state["optimizer"]["state"].values():
            values += each.values()
        for value in values:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(whole.numpy().tobytes())
        return found.hexdigest()


def train_for_ever(rank: int, count: int, root: Path, first: str) -> None:
    """Resume, if ``first`` is not 1, then train and save until somebody ends it, from that step on,
    so that no two saves are of the same step. Each rank tells its process and what it committed;
    the first one also what is saved, and what was loaded."""
    say(f"process {rank} {os.getpid()}")
    job = Job(1, count)
    if int(first) > 1:
        tell(rank, "loaded", job.load(root), job)
    pool = os.environ["PORTUS_POOL"]
    durable: Literal[1, 2] = 2 if "+" in pool else 1  # two hosts
    writer = portus.dcp.PortusStorageWriter(
        pool=pool.split(","), model="run", keep=KEEP, links=str(root / ".portus"), durable=durable
    )
    under_way: dict[int, SaveHandle] = {}
    for step in itertools.count(int(first)):
        job.step(step)
        tell(rank, "saved", step, job)
        under_way[step] = writer.save(job.state(step), root / "ckpt" / f"step_{step}")
        for each in [each for each, handle in under_way.items() if handle.done]:
            if under_way.pop(each).committed:
                say(f"committed {each} {rank}")


def look(rank: int, count: int, root: Path) -> None:
    """Load what there is, and tell it."""
    job = Job(2, count)
    tell(rank, "loaded", job.load(root), job)


def tell(rank: int, what: str, step: int, job: Job) -> None:
    """What the job is now, of all ranks together."""
    digest = job.digest()
    if rank == 0:
        say(f"{what} {step} {digest}")


def say(line: str) -> None:
    """In one piece: the other ranks write too."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def start(rank: int, task: str, count: int, root: Path, place: str, more: list[str]) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=count)
    if task == "look":
        look(rank, count, root)
    else:
        train_for_ever(rank, count, root, *more)
    dist.destroy_process_group()


def run(_: Say, root: str, tasks: Sequence[str], pool: str, errors: str) -> None:
    """Run tasks like ``look:3``, each in so many processes of its own. errors: the file that takes
    what goes to stderr."""
    signal.alarm(JOBS_S_MAX)
    os.environ["PORTUS_POOL"] = pool
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    for text in tasks:
        task, count, *more = text.split(":")
        with tempfile.TemporaryDirectory() as place:
            arguments = (task, int(count), Path(root), f"{place}/store", more)
            mp.start_processes(start, arguments, int(count), start_method="fork")
