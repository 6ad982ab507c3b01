"""Sharded jobs of several processes on the CPU, one after another.

``run`` takes tasks like ``save:4``, ``load:3``; each has processes of its own. All are forked, so
that torch is imported once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.nursery import Say

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


TASKS: dict[str, Callable[..., None]] = {}


def start(rank: int, task: str, count: int, root: Path, place: str, more: list[str]) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{place}", rank=rank, world_size=count)
    TASKS[task](rank, count, root, *more)
    if dist.is_initialized():
        dist.destroy_process_group()


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
