"""The cadence keeps its bound and its times whatever the times of steps look like."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import portus
from portus.engine.fence import fence
from portus.engine.pipeline.handle import SaveStats
from tests.unit.job.flight import Flight

COST_S = 0.02
BOUND = 0.035

Shape = Callable[[int, random.Random], float]


def even(step: int, source: random.Random) -> float:
    return 0.05


def noisy(step: int, source: random.Random) -> float:
    return source.gauss(0.05, 0.004)


def loader_bound(step: int, source: random.Random) -> float:
    return 0.365 if step % 8 == 7 else 0.005


def slow_at_random(step: int, source: random.Random) -> float:
    return 0.365 if source.random() < 1 / 8 else 0.005


def two_kinds(step: int, source: random.Random) -> float:
    return 0.08 if step % 2 else 0.02


def heavy_tail(step: int, source: random.Random) -> float:
    return 0.025 * source.paretovariate(2.2)


def lognormal(step: int, source: random.Random) -> float:
    return source.lognormvariate(-3.3, 0.8)


def getting_slower(step: int, source: random.Random) -> float:
    return 0.03 + 0.05 * step / 6000


def getting_faster(step: int, source: random.Random) -> float:
    return 0.08 - 0.05 * step / 6000


def another_level(step: int, source: random.Random) -> float:
    return 0.1 if step > 3000 else 0.04


def compiled(step: int, source: random.Random) -> float:
    return 40.0 if step < 3 else 0.05


SHAPES = (
    even,
    noisy,
    loader_bound,
    slow_at_random,
    two_kinds,
    heavy_tail,
    lognormal,
    getting_slower,
    getting_faster,
    another_level,
    compiled,
)


@dataclass
class Seen:
    """What a training did: the moment of each save, and the length of each step without saves."""

    saved: list[tuple[int, float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    added_s: float = 0.0

    def since(self, step: int) -> tuple[float, float]:
        """The overhead from a step on, and the mean interval in seconds without saves."""
        late = [saved for saved, _ in self.saved if saved >= step]
        took = sum(self.steps[late[0] : late[-1]])
        saves = len(late) - 1
        return COST_S * saves / took, took / saves


def train(shape: Shape, every: str, steps: int = 6000, first_save_s: float = 0.0) -> Seen:
    """A loop on a simulated clock, in which each save makes the step after it longer."""
    now, source, seen = [0.0], random.Random(shape.__name__), Seen()
    cadence = portus.Cadence(every, max_overhead=BOUND, now=lambda: now[0])
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    flight, extra_s = Flight(over=True), 0.0
    for step in range(steps):
        took = shape(step, source)
        seen.steps.append(took)
        now[0] += took + extra_s
        extra_s = 0.0
        optimizer.step()
        flight.over = True
        if cadence.should_save():
            extra_s = COST_S if seen.saved else COST_S + first_save_s
            seen.saved.append((step, now[0]))
            flight = Flight(SaveStats(total_s=0.001))
            fence.began(flight, "memory")
    return seen


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_auto_keeps_the_bound_and_is_near_the_optimum(shape: Shape) -> None:
    overhead, interval_s = train(shape, "auto").since(1500)
    assert overhead <= 1.15 * BOUND
    best_s = COST_S / BOUND
    assert best_s / 1.5 <= interval_s <= 1.5 * best_s


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_time_means_wall_time(shape: Shape) -> None:
    saved = [moment for _, moment in train(shape, "2s").saved][2:]
    gaps = [later - earlier for earlier, later in pairwise(saved)]
    assert 2.0 <= statistics.fmean(gaps) <= 2.0 + 0.4
    assert len(gaps) > 20


def test_a_dear_first_save_does_not_set_the_interval() -> None:
    seen = train(even, "auto", steps=400, first_save_s=30.0)
    steps = [step for step, _ in seen.saved]
    assert steps[2] - steps[1] < 40
    _, interval_s = seen.since(100)
    assert interval_s < 1.5 * COST_S / BOUND


class _Slow(Dataset[torch.Tensor]):
    """A loader that is slow once in eight batches."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.2 if index % 8 == 7 else 0.002)
        return torch.ones(4)


@pytest.mark.long
def test_a_training_that_waits_for_its_loader_saves_by_the_clock(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    cadence, saved = portus.Cadence("1s"), []
    with portus.PoolCheckpointer(tmp_path / "a.portus") as checkpointer:
        for step, batch in enumerate(DataLoader(_Slow(400), batch_size=1)):
            optimizer.zero_grad()
            layer(batch).square().mean().backward()
            optimizer.step()
            if cadence.should_save():
                saved.append(time.perf_counter())
                checkpointer.save({"layer": layer.state_dict()}, step)
    gaps = [later - earlier for earlier, later in pairwise(saved)]
    assert 0.9 < statistics.median(gaps) < 2.0
