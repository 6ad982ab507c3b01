"""Rows about a training that is killed every few seconds: time to a loss, and work that is lost.

After CheckFreq's Figure 8: epochs' checkpoints against saves when ``portus.Cadence`` says. Each
process is a fork of a warm one, so a restart takes no imports; the kills are SIGKILL.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import portus
from tests.bench.measure import Row
from tests.nursery import Child, Say, nursery

STEPS = 900
"""A run's length; the loss that it ends with is the one that others have to come to."""

EPOCHS = 3
GAP_EPOCHS = 1.5
"""From a start to a kill, on average, in the time of epochs: half to one and a half times as long,
drawn, so that no kill keeps step with the epochs. CheckFreq's Figure 8 has one every 5 h, of
ResNet50 on ImageNet."""

SLOWEST = 6
"""Who takes so many times as long as a run that is not killed has lost."""

_SEEN = struct.Struct("<qq")
"""In a mapped file: steps done; the interval then, or the one before if that was longer."""


def warm_up() -> None:
    """For the nursery: one step, so that torch has all that it loads late."""
    Training().step(0)


class Training:
    """Learns what a fixed network says; each batch follows from its step's number."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self._teacher = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 32))
        self._model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024),
                                    nn.ReLU(), nn.Linear(1024, 32))  # fmt: skip
        self._optimizer = torch.optim.AdamW(self._model.parameters(), 1e-3)

    def step(self, number: int) -> None:
        batch = torch.randn(64, 256, generator=torch.Generator().manual_seed(number))
        self._optimizer.zero_grad()
        with torch.no_grad():
            wanted = self._teacher(batch)
        (self._model(batch) - wanted).pow(2).mean().backward()
        self._optimizer.step()

    @torch.no_grad()
    def loss(self) -> float:
        batch = torch.randn(512, 256, generator=torch.Generator().manual_seed(1 << 40))
        return float((self._model(batch) - self._teacher(batch)).pow(2).mean())

    def state(self) -> dict[str, object]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        self._model.load_state_dict(state["model"])  # type: ignore[arg-type]
        self._optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]


def plain(say: Say, place: str) -> None:
    """Saves nothing."""
    training = Training()
    say("from 0")
    with open(Path(place, "seen"), "r+b") as file, mmap.mmap(file.fileno(), 0) as seen:
        for step in range(STEPS):
            training.step(step)
            _SEEN.pack_into(seen, 0, step + 1, 0)
    say(f"loss {training.loss().hex()}")


def by_epoch(say: Say, place: str) -> None:
    """``torch.save`` at the end of each epoch: written aside, synced, renamed."""
    training, path, aside = Training(), Path(place, "epoch.pt"), Path(place, "epoch.new")
    first = 0
    if path.exists():
        state = torch.load(path)
        training.load(state)
        first = state["step"]
    say(f"from {first}")
    with open(Path(place, "seen"), "r+b") as file, mmap.mmap(file.fileno(), 0) as seen:
        for step in range(first, STEPS):
            training.step(step)
            _SEEN.pack_into(seen, 0, step + 1, STEPS // EPOCHS)
            if (step + 1) % (STEPS // EPOCHS) == 0:
                with open(aside, "wb") as file_aside:
                    torch.save({**training.state(), "step": step + 1}, file_aside)
                    file_aside.flush()
                    os.fsync(file_aside.fileno())
                os.rename(aside, path)
    say(f"loss {training.loss().hex()}")


def by_cadence(say: Say, place: str) -> None:
    """When the cadence says."""
    training, cadence = Training(), portus.Cadence(max_overhead=0.035)
    with portus.PoolCheckpointer(Path(place, "pool.portus"), keep=2) as checkpointer:
        first = 0
        if checkpointer.steps():
            state = checkpointer.load()
            assert isinstance(state, dict)
            training.load(state)
            cadence.load_state_dict(state["cadence"])
            first = state["step"]
        say(f"from {first}")
        spans = deque([cadence._next] * 2, maxlen=2)
        with open(Path(place, "seen"), "r+b") as file, mmap.mmap(file.fileno(), 0) as seen:
            for step in range(first, STEPS):
                training.step(step)
                _SEEN.pack_into(seen, 0, step + 1, max(spans))
                if cadence.should_save():
                    more = {"step": step + 1, "cadence": cadence.state_dict()}
                    checkpointer.save({**training.state(), **more}, step + 1)
                    spans.append(cadence._next - cadence._clock.steps)
        say(f"loss {training.loss().hex()}")


@dataclass
class Life:
    """What became of a job. ``lost``: (steps, the interval then) at each kill."""

    wall_s: float = 0.0
    kills: int = 0
    loss: str = ""
    lost: list[tuple[int, int]] = field(default_factory=list)


def lived(way: str, place: Path, gaps_s: Iterator[float], most_s: float) -> Life:
    """A job killed after the next of ``gaps_s`` each time that it runs, until it has come to its
    end."""
    place.mkdir()
    seen = place / "seen"
    seen.write_bytes(bytes(_SEEN.size))
    found, start, done = Life(), time.perf_counter(), (0, 0)
    warm = nursery("tests.bench.killed")
    while not found.loss and time.perf_counter() - start < most_s:
        with warm.start(way, str(place)) as child:
            begun = time.perf_counter()
            first = int(child.until("from").split()[1])
            if found.kills:
                found.lost.append((done[0] - first, done[1]))
            said = _said(child, begun + next(gaps_s))
        if said is None:
            found.kills += 1
            done = _SEEN.unpack(seen.read_bytes())
        else:
            found.loss = said.split()[1]
    found.wall_s = time.perf_counter() - start
    return found


def _said(child: Child, until: float) -> str | None:
    """What the job says at its end; None if it is killed at a moment before."""
    try:
        return child.line(max(0.05, until - time.perf_counter()))
    except AssertionError:
        if time.perf_counter() < until:
            raise
        child.kill()
        return None


def killed_rows(disk: Path, rounds: int) -> Iterator[Row]:
    """Time to a loss, and lost steps."""
    walls: dict[str, list[float]] = {}
    shares: list[float] = []
    lost: dict[str, list[float]] = {"epoch": [], "portus": []}
    kills = {"epoch": 0, "portus": 0}
    gave_up = 0
    for number in range(rounds):
        alone = lived("plain", disk / f"plain-{number}", itertools.repeat(3600.0), 3600)
        gap_s = alone.wall_s / EPOCHS * GAP_EPOCHS
        walls.setdefault("never killed, no saves", []).append(alone.wall_s)
        for way, name in (("by_epoch", "epoch"), ("by_cadence", "portus")):
            drawn = random.Random(number)
            gaps_s = (gap_s * drawn.uniform(0.5, 1.5) for _ in itertools.count())
            life = lived(way, disk / f"{name}-{number}", gaps_s, SLOWEST * alone.wall_s)
            assert life.loss in ("", alone.loss), "another loss than without kills"
            gave_up += not life.loss
            walls.setdefault(name, []).append(life.wall_s)
            kills[name] += life.kills
            lost[name] += [steps for steps, _ in life.lost]
            shares += [s / (2 * k) for s, k in life.lost if name == "portus" and k]
    note = (
        f"{STEPS} steps in {EPOCHS} epochs, a kill about every {GAP_EPOCHS:g} epochs' time; "
        f"{kills['epoch']} and {kills['portus']} kills"
    )
    if gave_up:
        note += f"; {gave_up} gave up after {SLOWEST} times the time"
    yield Row(
        name="time to a loss, killed: epochs' checkpoints over Portus",
        bar=1.0,
        at_most=False,
        this="epoch",
        that="portus",
        figures=walls,
        note=note,
    )
    yield Row(
        name="steps lost at a kill, over 2 k",
        bar=1.0,
        this="share",
        unit="",
        figures={"share": shares or [0.0], **{name: each or [0] for name, each in lost.items()}},
        note=f"the most {max(shares, default=0.0):.2f}",
    )
