"""Rows about a training that saves when ``portus.Cadence`` says, after CheckFreq's Figures 4 and 7.

What saves cost is the time of a stretch of steps with them, over that of as many steps without, one
right after the other: so what else the machine does is in both.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import portus
from portus.engine.fence import fence
from tests.bench.measure import Row, hog

BOUND = 0.035
"""The overhead that CheckFreq reports for its own intervals (its Figure 7)."""

SHAPE_S = 30.0
"""For each shape, about."""

PHASE_S = 25.0
SETTLING = 8
"""Saves until the interval is about that of this machine."""

TORCH_SAVE = "torch.save, same k"


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.relu(value + self.inner(value))


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 32, 3, padding=1), *(Residual(32) for _ in range(6))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 144, 100)), torch.randn(8, 3, 12, 12)


def _vgg() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(4), nn.Flatten(), nn.Linear(64 * 16, 2048), nn.ReLU(), nn.Linear(2048, 1024),
    ]  # fmt: skip
    return nn.Sequential(*layers), torch.randn(16, 3, 16, 16)


def _bert() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.TransformerEncoderLayer(192, 4, 768, 0.1, batch_first=True) for _ in range(3)]
    words = nn.Embedding(8000, 192)
    return nn.Sequential(words, *layers), torch.randint(0, 8000, (4, 64))


SHAPES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "ResNet": _resnet, "VGG": _vgg, "BERT": _bert,
}  # fmt: skip
"""Small networks of these shapes: parameters shared over an image, mostly in fully connected
layers, and in embeddings and attention."""


class Training:
    """A network of a shape, in one thread, and what says when it saves."""

    def __init__(self, shape: str, place: Path, **settings: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model, self._input = SHAPES[shape]()
        parameters = self._model.parameters()
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters)
            if shape == "BERT"
            else torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        )
        self._away_s = 0.0
        self.cadence = portus.Cadence(
            max_overhead=BOUND, now=lambda: time.perf_counter() - self._away_s
        )
        self.checkpointer = portus.PoolCheckpointer(place / f"{shape}.portus", keep=2, **settings)  # type: ignore[arg-type]
        self._file = place / f"{shape}.pt"
        self._count = 0

    def close(self) -> None:
        self.checkpointer.close()
        self.cadence._clock.close()

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._input).pow(2).mean().backward()
        self._optimizer.step()

    def state(self) -> dict[str, object]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    @property
    def size(self) -> int:
        return sum(
            3 * each.nbytes if isinstance(self._optimizer, torch.optim.AdamW) else 2 * each.nbytes
            for each in self._model.parameters()
        )

    @property
    def interval(self) -> int:
        """Steps until the next save is due."""
        return self.cadence._next - self.cadence._clock.steps

    def saving(self) -> float:
        """Seconds from a save until the next one is due: that save, and its steps."""
        start = time.perf_counter()
        self._count += 1
        handle = self.checkpointer.save(self.state(), self._count)
        self.step()
        while not self.cadence.should_save():
            self.step()
        handle.wait()
        return time.perf_counter() - start

    def to_first_save(self) -> None:
        """Steps until one is due."""
        self.step()
        while not self.cadence.should_save():
            self.step()

    def without(self, steps: int) -> float:
        """Seconds of so many steps that save nothing and that the cadence does not see."""
        with self._unseen():
            return self._timed(steps)

    def stock(self, steps: int) -> float:
        """The same with ``torch.save`` and a sync before them."""
        with self._unseen():
            start = time.perf_counter()
            with open(self._file, "wb") as file:
                torch.save(self.state(), file)
                file.flush()
                os.fsync(file.fileno())
            return time.perf_counter() - start + self._timed(steps)

    def _timed(self, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - start

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        start, listener = time.perf_counter(), self.cadence._clock
        fence.unlisten(listener)
        try:
            yield
        finally:
            fence.listen(listener)
            self._away_s += time.perf_counter() - start


def paced_rows(disk: Path, rounds: int) -> Iterator[Row]:
    """Overhead at the interval that was chosen; what a save costs, and where that goes."""
    for shape in SHAPES:
        yield from shape_rows(shape, disk, rounds)
    yield from _ways_rows(disk, rounds)


def shape_rows(shape: str, disk: Path, rounds: int, *, seconds: float = SHAPE_S) -> Iterator[Row]:
    """Overhead at the interval that was chosen."""
    training = Training(shape, disk)
    for _ in range(30):
        training.step()
    training.to_first_save()
    training.saving()
    training.saving()
    sums = [{"portus": 0.0, "none": 0.0, TORCH_SAVE: 0.0} for _ in range(rounds)]
    intervals: list[int] = []
    for chosen in sums:
        until, turns = time.perf_counter() + seconds / rounds, 0
        while time.perf_counter() < until or turns % 2:
            steps = training.interval
            acts: dict[str, Callable[[], float]] = {
                "portus": training.saving,
                "none": lambda steps=steps: training.without(steps),  # type: ignore[misc]
                TORCH_SAVE: lambda steps=steps: training.stock(steps),  # type: ignore[misc]
            }
            for name in list(acts)[:: -1 if turns % 2 else 1]:
                chosen[name] += acts[name]()
            intervals.append(steps)
            turns += 1
    costs = training.cadence.decision.costs if training.cadence.decision is not None else None
    assert costs is not None
    note = (
        f"k {min(intervals)} to {max(intervals)}, median {statistics.median(intervals):g}, "
        f"{len(intervals)} saves; a step takes {1e3 * costs.step_s:.3g} ms, the state has "
        f"{training.size / 2**20:.3g} MiB"
    )
    figures = {
        name: [100 * (each[name] / each["none"] - 1) for each in sums]
        for name in ("portus", TORCH_SAVE)
    }
    training.close()
    yield Row(
        name=f"overhead at the chosen interval, {shape}-shaped",
        bar=100 * BOUND,
        unit="%",
        figures=figures,
        note=note,
    )


def _ways_rows(disk: Path, rounds: int) -> Iterator[Row]:
    """What a save adds to training, VGG-shaped, saved in three ways after CheckFreq's Figure 4."""
    steps, shape = 40, "VGG"
    trainings = {"copied in the call": "sync", "portus": "auto"}
    made = {}
    for name, mode in trainings.items():
        (disk / mode).mkdir()
        made[name] = Training(shape, disk / mode, snapshot=mode)
    costs: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {"call": [], "fence": [], "copy": [], "commit": []}
    for number in range(2 * rounds + 1):
        for name, training in made.items():
            start = time.perf_counter()
            with training._unseen():
                handle = training.checkpointer.save(training.state(), number)
                training._timed(steps)
                handle.wait()
            took = time.perf_counter() - start - training.without(steps)
            if number:
                costs.setdefault(name, []).append(1e3 * took)
            if number and name == "portus":
                stats = handle.stats
                for part, seconds in zip(
                    parts, (stats.call_s, stats.fence_s, stats.copy_s, stats.commit_s), strict=True
                ):
                    parts[part].append(1e3 * seconds)
        plain = made["portus"]
        took = plain.stock(steps) - plain.without(steps)
        if number:
            costs.setdefault("torch.save + fsync", []).append(1e3 * took)
    for training in made.values():
        training.close()
    yield Row(
        name=f"a save adds to training, {shape}-shaped",
        bar=None,
        this="portus",
        unit="ms",
        figures=costs,
    )
    yield Row(
        name=f"of a save of Portus, {shape}-shaped",
        bar=None,
        this="call",
        unit="ms",
        figures=parts,
        note="blocked in the call and at the fence; copy and commit are in the background",
    )


def hog_rows(disk: Path) -> Iterator[Row]:
    """The interval while something else uses the machine, and after it."""
    training = Training("BERT", disk)  # whose intervals are the shortest: the most of them
    for _ in range(30):
        training.step()
    training.to_first_save()
    for _ in range(SETTLING):
        training.saving()
    figures: dict[str, list[float]] = {"k": [], "at": [], "phase": [], "overhead": []}
    start = time.perf_counter()
    for phase in range(3):
        with hog() if phase == 1 else contextlib.nullcontext():
            until, sums = time.perf_counter() + PHASE_S, [0.0, 0.0]
            while time.perf_counter() < until:
                steps = training.interval
                sums[0] += training.saving()
                sums[1] += training.without(steps)
                figures["k"].append(training.interval)
                figures["at"].append(time.perf_counter() - start)
                figures["phase"].append(phase)
            figures["overhead"].append(100 * (sums[0] / sums[1] - 1))
    training.close()
    before, under, after = (_settled(figures, phase) for phase in range(3))
    chosen = {"before": [before], "under": [under], "after": [after]}
    said = ", ".join(f"{each:.1f} %" for each in figures["overhead"])
    yield Row(
        name="interval while a hog is on a core, over the one before it",
        bar=1.0,
        at_most=False,
        this="under",
        that="before",
        unit="",
        figures={**chosen, **figures},
        note=f"overhead before, under and after it {said}",
    )
    yield Row(
        name="interval after the hog, over the one under it",
        bar=1.0,
        this="after",
        that="under",
        unit="",
        figures=chosen,
    )


def _settled(figures: dict[str, list[float]], phase: int) -> float:
    """The interval in the second half of a phase."""
    mine = [k for k, each in zip(figures["k"], figures["phase"], strict=True) if each == phase]
    return statistics.median(mine[len(mine) // 2 :])
