"""``kill -9`` of a Lightning Trainer whose loader workers live on (design: locks and pins; V2)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nursery import nursery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

KILLS = 30
DELAY_S_MAX = 0.05
LINES_MAX = 10
FILES_MAX = 6
"""Checkpoints that one run may leave: the best three, two in flight, the one it resumed from."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_trainer_resumes_at_once_from_the_newest_reported_checkpoint(
    tmp_path: Path, seed: int
) -> None:
    random_ = random.Random(seed)
    step, lived, unreported = 0, 0, 0
    for number in range(KILLS):
        newest, workers = killed(tmp_path, step, random_)
        try:
            unreported += max(whole(tmp_path), default=0) > newest
            lived += any(is_alive(worker) for worker in workers)
        finally:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
        assert newest >= step, f"kill {number}"
        step = newest
        if step:
            assert step in whole(tmp_path)
        tidy(tmp_path, step)
    print(
        f"{KILLS} kills, {step} steps; workers outlived the trainer {lived} times; "
        f"{unreported} times more was committed than reported"
    )
    assert step
    assert lived, "no worker outlived its trainer, so nothing was tried"


def killed(root: Path, step: int, random_: random.Random) -> tuple[int, list[int]]:
    """Train on from ``step`` and kill the trainer; the newest step that was reported, and the
    workers."""
    resume = str(root / "checkpoints" / f"step={step}.ckpt") if step else None
    children = nursery("tests.crash.lightning_saver")
    with children.start("train_for_ever", str(root), resume, step) as child:
        lines = [child.until("started"), child.until("workers")]
        assert lines[0] == f"started {step}"
        lines += [child.line() for _ in range(random_.randint(0 if step else 1, LINES_MAX))]
        time.sleep(random_.uniform(0, DELAY_S_MAX))
        lines += child.kill()
    saved = [int(line.split()[1]) for line in lines if line.startswith("saved")]
    return max([step, *saved]), [
        int(pid) for line in lines if line.startswith("workers") for pid in line.split()[1:]
    ]


def whole(root: Path) -> list[int]:
    """The steps of the checkpoints that are there, each of which is whole and what it says."""
    found = []
    for path in (root / "checkpoints").glob("*.ckpt"):
        assert zipfile.ZipFile(path).testzip() is None
        state = torch.load(path, weights_only=True)
        assert path.name == f"step={state['global_step']}.ckpt"
        assert is_right(state)
        found.append(state["global_step"])
    return found


def is_right(checkpoint: dict[str, Any]) -> bool:
    """True if it holds what its step says, and nothing of any other."""
    step: int = checkpoint["global_step"]
    state = checkpoint["state_dict"]
    momentum = checkpoint["optimizer_states"][0]["state"][0]["momentum_buffer"]
    pattern = 1 + torch.arange(len(momentum), dtype=torch.float64) % 97
    return bool(
        torch.equal(state["weight"], pattern * -(step * (step + 1) // 2))
        and torch.equal(momentum, pattern * step)
        and torch.equal(state["count"], torch.full((300,), float(step)))
    )


def tidy(root: Path, step: int) -> None:
    """Remove what the killed run left, but the checkpoint to resume from."""
    files = list((root / "checkpoints").glob("*.ckpt"))
    assert len(files) <= FILES_MAX, files
    for file in files:
        if file.name != f"step={step}.ckpt":
            file.unlink()


def is_alive(process: int) -> bool:
    """True for one that still runs: not for one that nobody waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
