"""A training that saves files for ever, with a mirror, and begins with what that has."""

from __future__ import annotations

from portus.engine.paths.checkpointer import Checkpointer
from tests.crash.saver import Training
from tests.nursery import Say
from tests.same import assert_same

KEEP = 2


def train_for_ever(say: Say, run: str, mirror: str) -> None:
    """Save each step to the directory ``run``, and tell of it."""
    with Checkpointer(run, mirror=mirror, keep=KEEP, mirror_wait=0) as saver:
        steps = saver.steps()
        training = Training(max(steps, default=0))
        if steps:
            assert_same(saver.load(weights_only=False), training.state())
        say(f"resumed {training.step}")
        while True:
            training.advance()
            saver.save(training.state(), training.step).wait()
            say(f"saved {training.step}")
