"""Loads by others while one process saves and retires: whole, or told to be gone (V9)."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from portus.client.loading.resolve import AWAITED_S_MAX
from portus.client.loading.view import PoolView
from portus.errors import StaleError, UsageError
from portus.testing.nursery import Child, Say, nursery
from tests.crash.saver import KEEP, Training
from tests.crash.saver import warm_up as warm_up  # the nursery of this module calls it
from tests.unit.client.same import assert_same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

READERS = 3
SECONDS = 6.0
LOADS_MIN = 100
"""Of all readers together; each is a whole verified state."""
FOLLOWED = 20
"""Loads of a file that is replaced all the time."""


def load_for_a_while(say: Say, pool: str, seconds: float, seed: int) -> None:
    """Load the newest version, or one of those that are there, over and over. Says how many loads
    were right, and how many found that their version had just been retired."""
    random_ = random.Random(seed)
    until = time.monotonic() + seconds
    right = gone = 0
    with PoolView(pool) as view:
        while time.monotonic() < until:
            step = random_.choice([None, *view.steps()])
            try:
                state = view.load(step=step)
            except (StaleError, UsageError):
                assert step is not None, "there is a newest version at any time"
                gone += 1
                continue
            assert isinstance(state, dict)
            assert step in (None, state["step"])
            assert_same(state, Training(state["step"]).state())
            right += 1
    say(f"{right} {gone}")


@pytest.mark.long
def test_no_reader_sees_a_wrong_byte_while_another_process_saves_and_retires(seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="portus-readers-") as folder:
        path = Path(folder) / "run.portus"
        with nursery("tests.crash.saver").start("save_for_ever", str(path), 1) as saver:
            first = _saved(saver, KEEP)
            readers = [
                nursery("tests.crash.test_readers").start(
                    "load_for_a_while", str(path), SECONDS, seed + number
                )
                for number in range(READERS)
            ]
            told = [reader.until("") for reader in readers]
            codes = [reader.wait() for reader in readers]
            last = _saved(saver, 0, *saver.kill())
    right, gone = (sum(int(line.split()[place]) for line in told) for place in (0, 1))
    print(f"{last - first} versions saved, {right} loads right, {gone} retired just before")
    assert codes == [0] * READERS
    assert right >= LOADS_MIN
    assert last - first > 10 * KEEP, "nothing was retired under the readers"


def _saved(saver: Child, wanted: int, *rest: str) -> int:
    """The newest step that was reported, once it is ``wanted``."""
    newest = 0
    for line in rest:
        newest = max(newest, int(line.split()[1]))
    while newest < wanted:
        newest = int(saver.until("saved").split()[1])
    return newest


def test_a_file_that_another_process_replaces_all_the_time_loads_at_once() -> None:
    with tempfile.TemporaryDirectory(prefix="portus-readers-") as folder:
        last = f"{folder}/last.ckpt"
        with nursery("tests.crash.saver").start(
            "save_with_files_for_ever", f"{folder}/.portus/run.portus", folder
        ) as saver:
            saver.until("saved 3")
            steps: list[int] = []
            took_s: list[float] = []
            while len(steps) < FOLLOWED or steps[-1] - steps[0] < FOLLOWED // 2:  # it goes on
                start = time.monotonic()
                state = torch.load(last)
                took_s.append(time.monotonic() - start)
                assert_same(state, Training(state["step"]).state())
                steps.append(state["step"])
            saver.kill()
    assert steps == sorted(steps)
    assert max(took_s) < AWAITED_S_MAX / 2
