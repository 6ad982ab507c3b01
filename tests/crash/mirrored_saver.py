"""A training that saves for ever, with a mirror, and begins with what that has."""

from __future__ import annotations

from portus.client.paths.pooled import PoolCheckpointer
from portus.testing.nursery import Say
from tests.crash.saver import Training
from tests.unit.client.same import assert_same

KEEP = 2


def train_for_ever(say: Say, run: str, mirror: str) -> None:
    """Save each step under ``run``, with a reference file, and tell of it."""
    with PoolCheckpointer(
        f"{run}/.portus", "net", mirror=mirror, keep=KEEP, mirror_wait=0
    ) as saver:
        steps = saver.steps()
        training = Training(max(steps, default=0))
        if steps:
            assert_same(saver.load(), training.state())
        say(f"resumed {training.step}")
        while True:
            training.advance()
            path = f"{run}/ckpt/last.ckpt"
            saver.save(training.state(), training.step, reference=path).wait()
            say(f"saved {training.step}")
