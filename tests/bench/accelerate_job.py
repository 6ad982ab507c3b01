"""A training under Accelerate that saves after a step: stock and Portus, taking turns.

python -m tests.bench.accelerate_job DIRECTORY ROUNDS

Prints a JSON object: for each of them, by round, the seconds for which training was blocked, and
those until the checkpoint was durable.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import portus_accelerate
from tests.bench.fenced import Fenced

LAYERS, WIDTH, ROWS = 24, 1024, 256
WARMUPS = 4


class Training:
    """A stack of linear layers with AdamW; it steps, and saves under ``root``."""

    def __init__(self, root: Path) -> None:
        self._checkpoints = root / "checkpoints"
        project = ProjectConfiguration(
            project_dir=str(root), automatic_checkpoint_naming=True, total_limit=2
        )
        self.accelerator = Accelerator(cpu=True, project_config=project)
        layers = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        model = torch.nn.Sequential(*layers)
        prepared = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        self.model, self.optimizer = prepared
        self.input = torch.randn(ROWS, WIDTH)
        self.count = 0
        self.step()

    def step(self) -> None:
        self.accelerator.backward(self.model(self.input).pow(2).mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> Path:
        """To a directory of its own; the two newest ones are kept."""
        self.accelerator.save_state()
        self.count += 1
        return self._checkpoints / f"checkpoint_{self.count - 1}"


def sync(directory: Path) -> None:
    """Make all files of a checkpoint durable, as stock Accelerate does not."""
    for place in (*directory.iterdir(), directory, directory.parent):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def stock(training: Training) -> tuple[float, float]:
    """Seconds blocked, and until it is durable."""
    training.step()
    start = time.perf_counter()
    directory = training.save()
    blocked_s = time.perf_counter() - start
    sync(directory)
    return blocked_s, time.perf_counter() - start


def ours(training: Training, fenced: Fenced) -> tuple[float, float]:
    """The same, of two saves. What blocks one are the call and what the next step waits at the
    fence. The other is waited for, as stock Accelerate's is: no training goes on meanwhile."""
    training.step()
    fenced.taken()
    start = time.perf_counter()
    training.save()
    called_s = time.perf_counter() - start
    training.step()
    portus_accelerate.wait(training.accelerator)
    blocked_s = called_s + fenced.taken()
    start = time.perf_counter()
    training.save()
    portus_accelerate.wait(training.accelerator)
    return blocked_s, time.perf_counter() - start


def main() -> None:
    root, rounds = Path(sys.argv[1]), int(sys.argv[2])
    fenced = Fenced()
    plain, saved = Training(root / "stock"), Training(root / "portus")
    portus_accelerate.enable(saved.accelerator, on_error="raise")
    saved.step()  # seen by Portus, so that what it steps is copied late
    figures: dict[str, list[tuple[float, float]]] = {"stock": [], "portus": []}
    for number in range(WARMUPS + rounds):
        for name, found in (("stock", stock(plain)), ("portus", ours(saved, fenced))):
            if number >= WARMUPS:
                figures[name].append(found)
    saved.accelerator.end_training()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
