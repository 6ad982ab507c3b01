"""Plain loops that save to paths for ever, each in another way, and go on from what is there."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from typing import Final

from portus.engine.paths.checkpointer import Checkpointer
from portus.engine.paths.process import load, save
from tests.crash.saver import Training
from tests.nursery import Say

PARTS: Final = 3
"""Files of a step, of the loop that has several."""


def warm_up() -> None:
    """What a program does before it trains."""
    Training(1).advance()


def steps(directory: str) -> list[int]:
    """Those of which there is a file, or the first of several."""
    names = glob.glob(f"{directory}/step-*.pt")
    return sorted({int(os.path.basename(name)[5:13]) for name in names})


def keep(number: int | None) -> Callable[[Say, str], None]:
    def train(say: Say, directory: str) -> None:
        """A file for each step; older ones are removed as soon as the next save was called."""
        there = steps(directory)
        training = Training(max(there, default=0))
        say(f"resumed {training.step}")
        while True:
            training.advance()
            path = f"{directory}/step-{training.step:08}.pt"
            handle = save(training.state(), path)
            there.append(training.step)
            while number is not None and len(there) > number:
                os.remove(f"{directory}/step-{there.pop(0):08}.pt")
            if training.step % 2:
                handle.wait()
                say(f"saved {training.step}")

    return train


def overwrite(say: Say, directory: str) -> None:
    """One path for all steps."""
    path = f"{directory}/last.pt"
    step = 0
    if os.path.exists(path):
        step = load(path, weights_only=False)["step"]
    training = Training(step)
    say(f"resumed {step}")
    while True:
        training.advance()
        handle = save(training.state(), path)
        if training.step % 2:
            handle.wait()
            say(f"saved {training.step}")


def several(say: Say, directory: str) -> None:
    """Several files for each step; the last of them says that the step is complete."""
    complete = {int(name[-11:-3]) for name in glob.glob(f"{directory}/part-{PARTS - 1}-*.pt")}
    training = Training(max(complete, default=0))
    say(f"resumed {training.step}")
    while True:
        training.advance()
        for part in range(PARTS):
            handle = save(training.state(), f"{directory}/part-{part}-{training.step:08}.pt")
        for old in glob.glob(f"{directory}/part-*-{training.step - 2:08}.pt"):
            os.remove(old)
        if training.step % 2:
            handle.wait()
            say(f"saved {training.step}")


def numbered(keep: int | None) -> Callable[[Say, str], None]:
    def train(say: Say, directory: str) -> None:
        """A ``Checkpointer``, which finds the newest and removes the others by itself."""
        checkpointer = Checkpointer(directory, keep=keep)
        training = Training(0)
        if checkpointer.steps():
            training = Training(checkpointer.load(weights_only=False)["step"])
        say(f"resumed {training.step}")
        while True:
            training.advance()
            handle = checkpointer.save(training.state(), training.step)
            if training.step % 2:
                handle.wait()
                say(f"saved {training.step}")

    return train


WAYS: Final[dict[str, Callable[[Say, str], None]]] = {
    "keep 1": keep(1),
    "keep 2": keep(2),
    "keep all": keep(None),
    "overwrite": overwrite,
    "several": several,
    "Checkpointer, keep=1": numbered(1),
    "Checkpointer, keep=2": numbered(2),
}


def train_for_ever(say: Say, directory: str, way: str) -> None:
    WAYS[way](say, directory)
