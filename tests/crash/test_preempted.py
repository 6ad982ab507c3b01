"""Signals at random moments of real trainings: each resumes at the very step."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.adapters.launching import TWO
from tests.crash.told_trainings import BATCHES, STEPS
from tests.nursery import Child, nursery

COUNT = int(os.environ.get("PORTUS_TEST_SIGNALS", "12"))

FRAMEWORKS = ["lightning", "accelerate", "transformers"]

DELAY_S_MAX = 0.02


class Job:
    """The processes of one run of a training."""

    def __init__(self, framework: str, root: Path, ranks: int) -> None:
        self._framework, self._root, self.ranks = framework, root, ranks
        self._number = 0

    def start(
        self, stack: contextlib.ExitStack, told: int | None = None, gate: str = ""
    ) -> list[Child]:
        """Rank ``told``, if any, waits near its end until there is a file called ``gate``."""
        self._number += 1
        store = str(self._root / f"store-{self._number}")
        made = nursery("tests.crash.told_trainings", PORTUS_ACCELERATE="1", **CONFIG)
        given = [self._framework, str(self._root), store]
        return [
            stack.enter_context(made.start(*given, rank, self.ranks, gate if rank == told else ""))
            for rank in range(self.ranks)
        ]

    def told(self, random_: random.Random, left: int) -> tuple[list[list[str]], bool]:
        """One run that is told to go, ``left`` steps before its end at most: the lines of each
        rank, and whether all of them know what a signal's handler was told."""
        number = random_.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1])
        told = random_.randrange(self.ranks)
        gate = self._root / f"gate-{self._number}"
        with contextlib.ExitStack() as stack:
            children = self.start(stack, told, str(gate))
            child = children[told]
            lines = [child.until("begins")]
            lines += [child.line() for _ in range(random_.randrange(max(1, left - 2)))]
            time.sleep(random_.uniform(0, DELAY_S_MAX))
            child.send(number)
            gate.touch()
            codes = [each.wait() for each in children]
            said = [[*lines, *each.rest()] if each is child else each.rest() for each in children]
        assert codes == [0] * self.ranks, said
        return said, number == signal.SIGTERM


CONFIG = {"PORTUS_ACCELERATE_CONFIG": '{"preempt_within": 120}'}


def steps(lines: list[str], kind: str) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith(f"{kind} ")]


@functools.cache
def undisturbed(framework: str, ranks: int, root: Path) -> str:
    """How a training ends that nobody told anything."""
    job = Job(framework, root, ranks)
    with contextlib.ExitStack() as stack:
        children = job.start(stack)
        assert [each.wait() for each in children] == [0] * ranks, [c.rest() for c in children]
        lines = children[0].rest()
    assert steps(lines, "trained") == list(range(1, STEPS + 1))
    return lines[-1]


def search(
    framework: str, ranks: int, root: Path, random_: random.Random, count: int
) -> Counter[str]:
    """Tell trainings to go, ``count`` times, and let each go on until it ends."""
    found: Counter[str] = Counter()
    while found["signals"] < count:
        place = root / f"run-{found['runs']}"
        place.mkdir()
        job, step, last = Job(framework, place, ranks), 0, ""
        while not last:
            if found["signals"] == count or STEPS - step < 4:
                with contextlib.ExitStack() as stack:
                    children = job.start(stack)
                    codes = [each.wait() for each in children]
                    said = [each.rest() for each in children]
                assert codes == [0] * ranks, said
                last = said[0][-1]
                now = STEPS
            else:
                said, knows = job.told(random_, STEPS - step)
                (now,) = {max([step, *steps(lines, "trained")]) for lines in said}
                heard = [each for lines in said for each in steps(lines, "signal")]
                found["signals"] += 1
                assert not knows or heard, said
                assert all(now - each in range(1 + ranks) for each in heard), said
            for lines in said:
                assert steps(lines, "begins") == [step], (lines, "it resumes at the very step")
                assert steps(lines, "trained") == list(range(step + 1, now + 1)), lines
            step = now
        found["runs"] += 1
        assert last == undisturbed(framework, ranks, root / "undisturbed")
    return found


@pytest.mark.long
def test_a_signal_before_lightning_hears_any_ends_nothing(tmp_path: Path) -> None:
    made = nursery("tests.crash.told_trainings", PORTUS_ACCELERATE="1", **CONFIG)
    with made.start("early", str(tmp_path)) as child:
        assert child.wait() == 0


@pytest.mark.parametrize("told_in", ["train", "validation"])
@pytest.mark.long
def test_a_rank_that_has_nothing_to_validate_on_leaves_with_the_others(
    tmp_path: Path, told_in: str
) -> None:
    made = nursery("tests.crash.told_trainings", PORTUS_ACCELERATE="1", **CONFIG)
    with contextlib.ExitStack() as stack:
        given = ["uneven", str(tmp_path), str(tmp_path / "store")]
        children = [stack.enter_context(made.start(*given, rank, told_in)) for rank in (0, 1)]
        codes = [each.wait() for each in children]
        ended = [steps(each.rest(), "trained")[-1] for each in children]
    assert codes == [0, 0]
    assert ended[0] == ended[1]
    assert BATCHES + 2 <= ended[0] <= BATCHES + 4, "and at once"


class Agent:
    """A real ``torchrun`` with two processes, ended at the end of a ``with``."""

    def __init__(self, framework: str, root: Path) -> None:
        self.lines, self.gate = root / "lines", root / "gate"
        given = [framework, str(root), str(self.lines), str(self.gate)]
        environment = {**os.environ, **CONFIG, "PORTUS_ACCELERATE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *TWO, "-m", "tests.crash.agent_job", *given],
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def said(self, rank: int) -> list[str]:
        path = Path(f"{self.lines}-{rank}")
        return path.read_text().splitlines() if path.exists() else []

    def until(self, start: str) -> None:
        """Returns once any rank said a line that starts so."""
        while not any(line.startswith(start) for rank in (0, 1) for line in self.said(rank)):
            assert self._process.poll() is None, (self.said(0), self.said(1))
            time.sleep(0.01)

    def tell(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            launched = psutil.Process(self._process.pid)
            for each in [*launched.children(recursive=True), launched]:
                each.kill()
        self._process.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
@pytest.mark.long
def test_a_torchrun_that_is_told_to_go_lets_all_ranks_save_the_same_step(
    framework: str, tmp_path: Path
) -> None:
    with Agent(framework, tmp_path) as agent:
        agent.until("trained 4")
        agent.tell()
        agent.until("signal")
        agent.gate.touch()
        agent.wait()
        trained = [steps(agent.said(rank), "trained") for rank in (0, 1)]
    assert trained[0] == trained[1] == list(range(1, len(trained[0]) + 1))
    assert 4 <= len(trained[0]) < STEPS
    with contextlib.ExitStack() as stack:
        children = Job(framework, tmp_path, 2).start(stack)
        assert [each.wait() for each in children] == [0, 0]
        for each in children:
            lines = each.rest()
            assert steps(lines, "begins") == [len(trained[0])]
            assert steps(lines, "trained")[-1] == STEPS


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.long
def test_every_signal_is_followed_by_a_resume_at_the_very_step(
    framework: str, ranks: int, tmp_path: Path, seed: int
) -> None:
    (tmp_path / "undisturbed").mkdir()
    count = -(-COUNT // (2 * len(FRAMEWORKS)))
    found = search(framework, ranks, tmp_path, random.Random(seed), count)
    print(f"{framework}, {ranks} ranks: {found['signals']} signals, {found['runs']} runs")
    assert found["signals"] == count
