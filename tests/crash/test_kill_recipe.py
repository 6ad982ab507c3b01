"""``kill -9`` at random moments of ``recipes/dlrm_tiny.py``, started again by the same command line
until it is through: the bits of a run that nobody killed (V14)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import portus
from portus.reach.index.check import check
from portus.reach.index.findings import Severity

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "4"))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.timeout(300 + 60 * KILLS),
    pytest.mark.long,
]

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "dlrm_tiny.py"
BATCHES_MAX = 24
"""So many batches a run may print before it is killed."""
DELAY_S_MAX = 0.02
"""What is left of a batch then, and a part of the next."""
EARLY_SHARE = 0.25
"""So many runs are killed before they printed anything."""


@dataclass
class Run:
    """What one run printed, and how it ended. ``first_s``: until it printed where it began."""

    code: int
    lines: list[str]
    first_s: float

    @property
    def begun(self) -> int | None:
        """The batch that it went on from; None if it was killed before it said so."""
        return int(self.lines[0].removeprefix("from batch ")) if self.lines else None

    def losses(self) -> Iterator[tuple[int, str]]:
        for line in self.lines[1:]:
            batch, _, loss = line.removeprefix("batch ").partition(": loss ")
            yield int(batch), loss.partition(",")[0]


def run(pool: Path, batches: int, kill_after: tuple[int, float] | None = None) -> Run:
    """Train. kill_after: so many lines, and then so many seconds."""
    command = [sys.executable, str(RECIPE), str(pool), "--batches", str(batches)]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            count, delay_s = kill_after or (1, 0.0)
            lines = [child.stdout.readline() for _ in range(count)]
            first_s = time.monotonic() - began
            if kill_after is not None:
                time.sleep(delay_s)
                child.kill()
            lines += child.stdout.readlines()
        finally:
            child.kill()
    # A line that was cut is nothing that it said.
    return Run(child.returncode, [line for line in lines if line.endswith("\n")], first_s)


def bits(value: object) -> object:
    """A state in which only what has the same bits is equal: -0.0 is not 0.0, and NaN is NaN."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return value.dtype, tuple(value.shape), data
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return repr(value)


def state(pool: Path) -> object:
    with portus.open(pool) as view:
        return bits(view.load("embedding"))


def test_the_recipe_that_is_killed_anywhere_ends_with_the_bits_of_one_that_is_not(
    tmp_path: Path, seed: int
) -> None:
    rng, batches = random.Random(seed), BATCHES_MAX * (KILLS + 1)
    whole, killed = tmp_path / "whole.portus", tmp_path / "killed.portus"
    undisturbed = run(whole, batches)
    assert (undisturbed.code, undisturbed.begun) == (0, 0)
    losses = dict(undisturbed.losses())
    assert list(losses) == list(range(1, batches + 1))
    wanted = state(whole)

    kills, early, told, begun = 0, 0, 0, list[int]()
    while True:
        if kills == KILLS:
            kill_after = None
        elif rng.random() < EARLY_SHARE:
            kill_after = 0, rng.uniform(0, undisturbed.first_s)
        else:
            kill_after = rng.randint(1, BATCHES_MAX), rng.uniform(0, DELAY_S_MAX)
        found = run(killed, batches, kill_after)
        if found.begun is not None:
            assert told - 1 <= found.begun <= told + 1, "the last batch, or the one before it"
            begun.append(found.begun)
            printed = dict(found.losses())
            assert list(printed) == list(range(found.begun + 1, found.begun + len(printed) + 1))
            assert printed.items() <= losses.items()
            told = max(printed, default=found.begun)
        if found.code == 0:  # it was through before anybody killed it, or after all kills
            assert state(killed) == wanted
            if kills == KILLS:
                break
            killed.unlink()
            told = 0
        else:
            assert found.code == -signal.SIGKILL
            kills, early = kills + 1, early + (found.begun is None)
    print(f"{kills} kills, {early} of them early; resumed from {begun}")
    assert kills == KILLS
    assert len(begun) >= KILLS - early + 1
    assert begun[-1] > 0 or early == KILLS
    assert [each for each in check(killed) if each.severity is Severity.ERROR] == []
