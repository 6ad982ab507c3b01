"""``kill -9`` of trainings, and what their journal says of it: which steps each restart lost."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.companions.journal.account import Account, account
from portus.reach.index.directory import journal_directory
from portus.reach.index.journals import FoundJournal, journals_in, read
from tests.nursery import nursery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "5"))
DELAY_S_MAX = 0.02


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, if there is such a file system: a kill leaves there what it leaves on a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="portus-kill-") as name:
        yield Path(name)


def journal_of(root: Path) -> tuple[FoundJournal, Account]:
    (path,) = journals_in(journal_directory(str(root / "run.portus")))
    found = read(path)
    seen = account(found.lines)
    assert seen is not None
    return found, seen


def last(lines: list[str], word: str) -> int:
    return max((int(line.split()[1]) for line in lines if line.startswith(word)), default=0)


@pytest.mark.long
def test_what_kills_lose_is_known_to_the_step(folder: Path, seed: int) -> None:
    """A step counts once it is done; who is told of it by the training may be killed before."""
    random_ = random.Random(seed)
    children = nursery("tests.crash.lightning_saver")
    begun: list[int] = []
    ended: list[int] = []
    for _ in range(KILLS):
        with children.start(
            "tests.crash.journalled:train_for_ever", str(folder), random_.choice([3, 7])
        ) as child:
            lines = [child.line() for _ in range(random_.randint(2, 25))]
            assert journal_of(folder)[0].running
            time.sleep(random_.uniform(0, DELAY_S_MAX))
            lines += child.kill()
        begun.append(last(lines, "from"))
        found, seen = journal_of(folder)
        assert not found.running
        steps = seen.sessions[-1].steps
        assert begun[-1] + steps in (last(lines, "did"), last(lines, "did") + 1)
        ended.append(begun[-1] + steps)
        assert seen.steps == ended[-1]
        assert [each.at for each in seen.restarts] == begun[1:]
        lost = [end - went_on for end, went_on in zip(ended, begun[1:], strict=False)]
        assert [each.lost_steps for each in seen.restarts] == lost
        assert all(each.is_exact and each.killed for each in seen.restarts)
        assert found.damaged == 0
    assert len(ended) == KILLS


@pytest.mark.long
def test_what_kills_of_a_lightning_training_lose_is_known_to_the_step(folder: Path) -> None:
    children = nursery("tests.crash.lightning_saver")
    resume = None
    for went_on, stopped in ((0, 12), (10, 17), (15, 23)):
        with children.start(
            "tests.crash.journalled:train_lightning", str(folder), resume, stopped
        ) as child:
            assert child.until("from") == f"from {went_on}"
            child.until("did")
            checkpoint = folder / "checkpoints" / f"step={stopped - stopped % 5}.ckpt"
            while not _is_committed(folder, stopped - stopped % 5):
                time.sleep(0.01)
            child.kill()
        resume = str(checkpoint)
    (path,) = [p for d in (folder / ".portus").glob("*.journal") for p in journals_in(str(d))]
    seen = account(read(path).lines)
    assert seen is not None
    assert [(each.at, each.lost_steps) for each in seen.restarts] == [(10, 2), (15, 2)]
    assert (seen.steps, seen.pending_steps) == (23, 3)
    assert [each.at for each in seen.saves] == [5, 10, 15, 20]


def _is_committed(root: Path, step: int) -> bool:
    paths = [p for d in (root / ".portus").glob("*.journal") for p in journals_in(str(d))]
    for path in paths:
        seen = account(read(path).lines)
        if seen is not None and any(each.line.step == step for each in seen.saves):
            return True
    return False
