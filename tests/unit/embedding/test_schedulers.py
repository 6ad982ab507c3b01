"""Schedulers in an unchanged loop: a run that was closed or killed ends with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import portus.embedding
from portus.errors import UsageError

STEPS = 30

KINDS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda it: lr_scheduler.LambdaLR(it, lambda epoch: 1 / (1 + epoch / 10)),
    "step": lambda it: lr_scheduler.StepLR(it, 7, 0.5),
    "cosine": lambda it: lr_scheduler.CosineAnnealingLR(it, 20),
    "restarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 6),
    "plateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=2),
    "one after another": lambda it: lr_scheduler.SequentialLR(
        it,
        [lr_scheduler.ConstantLR(it, 0.1, 5), lr_scheduler.ExponentialLR(it, 0.9)],
        milestones=[9],
    ),
}


class ByHand:
    """A schedule that is no scheduler of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def train(
    path: Path | None, kind: Callable[[torch.optim.Optimizer], Any], end: int, *, killed: bool
) -> tuple[list[torch.Tensor], float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(100, 4, mode="sum", sparse=True), torch.nn.Linear(4, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = kind(optimizer)
    tables, begin = None, 0
    if path is not None:
        tables = portus.embedding.protect(model, optimizer, pool=path, extra=scheduler.state_dict)
        loaded = tables.load()
        if loaded:
            begin = loaded.batch
            scheduler.load_state_dict(loaded.extra)
    for number in range(begin, end):
        ids = torch.randint(100, (8, 3), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    if tables is not None and killed:
        os._exit(0)
    if tables is not None:
        tables.close()
    bits = [each.detach().clone() for each in model.parameters()]
    return bits, float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("name", [*KINDS, "by hand"])
def test_an_unchanged_loop_that_was_closed_goes_on_with_identical_bits(
    name: str, tmp_path: Path
) -> None:
    kind = KINDS.get(name, ByHand)
    wanted = train(None, kind, STEPS, killed=False)
    for end in (5, 13, STEPS):
        found = train(tmp_path / "t.portus", kind, end, killed=False)
    assert all(map(torch.equal, wanted[0], found[0]))
    assert found[1] == wanted[1]


@pytest.mark.parametrize("name", ["step", "plateau", "one after another"])
def test_so_does_one_that_was_killed(name: str, tmp_path: Path) -> None:
    wanted = train(None, KINDS[name], STEPS, killed=False)
    for end in (5, 13):
        program = (
            "from tests.unit.embedding.test_schedulers import *\n"
            f"train(Path({str(tmp_path / 't.portus')!r}), KINDS[{name!r}], {end}, killed=True)"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    found = train(tmp_path / "t.portus", KINDS[name], STEPS, killed=False)
    assert all(map(torch.equal, wanted[0], found[0]))
    assert found[1] == wanted[1]


class Tied(torch.nn.Module):
    """A head that shares the weight of a table, or a view of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 4, sparse=True)
        self.head = torch.nn.Linear(4, 50, bias=False)
        if how == "parameter":
            self.head.weight = self.table.weight
        elif how == "memory":
            self.head.weight = torch.nn.Parameter(self.table.weight.detach())
        else:
            self.register_buffer("seen", self.table.weight.detach())


@pytest.mark.parametrize("how", ["parameter", "memory", "buffer"])
def test_a_table_that_shares_its_weight_with_another_module_is_refused(
    how: str, tmp_path: Path
) -> None:
    model = Tied(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="table: it shares its weight with"):
        portus.embedding.protect(model, optimizer, pool=tmp_path / "t.portus")
    assert not list(tmp_path.iterdir())


def test_two_tables_may_share_one_weight(tmp_path: Path) -> None:
    first = torch.nn.Embedding(50, 4, sparse=True)
    second = torch.nn.Embedding(50, 4, sparse=True)
    second.weight = first.weight
    model = torch.nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with portus.embedding.protect(model, optimizer, pool=tmp_path / "t.portus"):
        (first(torch.tensor([1])) + second(torch.tensor([2]))).sum().backward()
        optimizer.step()
