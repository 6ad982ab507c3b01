"""Trains and saves while signals come at random lines of the core, whose handler saves too and
waits: way, seed, number of signals, directory. What the handler saved is as it was then."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import portus
from tests.moments import Lines

Saved = list[tuple[Path, dict[str, torch.Tensor]]]


class Training:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.net: Any = torch.nn.Linear(8, 8)
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters())
        self.saved: Saved = []
        self.step = 0

    def state(self) -> dict[str, Any]:
        self.net(torch.ones(8)).sum().backward()
        self.optimizer.step()
        self.step += 1
        return {"net": self.net.state_dict()}

    def note(self, path: Path) -> Path:
        self.saved.append((path, {k: v.clone() for k, v in self.net.state_dict().items()}))
        return path

    def save_in_handler(self) -> None:
        path = self.note(self.root / f"handler-{len(self.saved)}.pt")
        portus.save({"net": self.net.state_dict()}, path).wait()


def storm(seed: int, left: int, handle: Callable[[], None], train: Callable[[], object]) -> None:
    """Train until so many signals came."""
    numbers = random.Random(seed)

    def handler(*_: object) -> None:
        sys.settrace(None)
        handle()
        lines.number = lines.count + numbers.randrange(1, 3000)
        sys.settrace(lines._called)

    def send() -> None:
        nonlocal left
        left -= 1
        signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, handler)
    lines = Lines(numbers.randrange(500), send)
    with lines:
        while left > 0:
            train()


def files(training: Training, seed: int, left: int) -> None:
    portus.save({}, training.root / "first.pt").wait()  # all is imported then

    def train() -> None:
        portus.save(training.state(), training.root / f"{training.step % 3}.pt")

    storm(seed, left, training.save_in_handler, train)


def checkpointer(training: Training, seed: int, left: int) -> None:
    with portus.Checkpointer(training.root / "run", keep=2) as saver:

        def train() -> None:
            saver.save(training.state(), training.step)
            if training.step % 7 == 0:
                saver.load()
                saver.versions()

        storm(seed, left, training.save_in_handler, train)


def sharded(training: Training, seed: int, left: int) -> None:
    from portus import dcp

    def train() -> None:
        path = training.root / f"sharded-{training.step}"
        dcp.async_save(training.state(), checkpoint_id=str(path))

    storm(seed, left, training.save_in_handler, train)


def accelerated(training: Training, seed: int, left: int) -> None:
    from accelerate import Accelerator

    import portus_accelerate

    accelerator = Accelerator(cpu=True, project_dir=str(training.root))
    portus_accelerate.enable(accelerator)
    training.net, training.optimizer = accelerator.prepare(training.net, training.optimizer)

    def save() -> None:
        path = training.note(training.root / f"handler-{len(training.saved)}")
        accelerator.save_state(str(path))

    def train() -> None:
        training.state()
        accelerator.save_state(str(training.root / "newest"))

    storm(seed, left, save, train)
    portus_accelerate.wait(accelerator)


WAYS = [files, checkpointer, sharded, accelerated]


def main(way: str, seed: str, signals: str, root: str) -> None:
    training = Training(Path(root))
    {each.__name__: each for each in WAYS}[way](training, int(seed), int(signals))
    for path, expected in training.saved:
        found = load_file(path / "model.safetensors") if path.is_dir() else torch.load(path)["net"]
        assert all(torch.equal(found[name], value) for name, value in expected.items()), path
    print(len(training.saved))


if __name__ == "__main__":
    main(*sys.argv[1:])
