"""``kill -9`` at random moments of a process that saves, over and over on one pool (V2, V8)."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import portus
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.index.check import check
from portus.index.findings import Severity
from portus.testing.nursery import Child, nursery
from tests.crash.saver import KEEP, Training
from tests.unit.client.same import assert_same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

KILLS = 100
KILLS_WITH_FILES = 30
DELAY_S_MAX = 0.03
LINES_MAX = 6
POOL_SIZE_MAX = 8 << 20
"""Bytes: room for the versions kept and in flight. 100 leaked ones would take 25 MiB."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, if there is such a file system: a process that never waits for a disk is killed
    in the middle of something. What is lost with the power is for the explorer to try."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="portus-kill-") as name:
        yield Path(name)


def killed(child: Child, random_: random.Random) -> tuple[int, int]:
    """Kill ``child`` a moment after one of its lines; the step that it found, and the newest that
    it told to be saved."""
    with child:
        lines = [child.line() for _ in range(random_.randint(1, LINES_MAX))]
        time.sleep(random_.uniform(0, DELAY_S_MAX))
        lines += child.kill()
    told = [line.partition(" ") for line in lines]
    found, saved = (
        max((int(step) for word, _, step in told if word == each), default=0)
        for each in ("resumed", "saved")
    )
    return found, saved


@contextlib.contextmanager
def opened_at_once(
    path: Path, keep: int, caplog: pytest.LogCaptureFixture
) -> Iterator[PoolCheckpointer]:
    """The pool, for writing; nobody holds it, and nothing in it is damaged."""
    caplog.clear()
    with (
        caplog.at_level(logging.WARNING, "portus"),
        PoolCheckpointer(path, keep=keep) as checkpointer,
    ):
        assert not caplog.messages, "no lock is left, and no root is damaged"
        yield checkpointer
    errors = [each for each in check(path) if each.severity is Severity.ERROR]
    assert not errors, f"{len(errors)} broken rules, first {errors[0]}"


@pytest.mark.long
def test_a_saving_process_may_be_killed_at_any_moment(
    folder: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    random_ = random.Random(seed)
    children = nursery("tests.crash.saver")
    path = folder / "run.portus"
    reported = unreported = 0
    for number in range(KILLS):
        child = children.start("save_for_ever", str(path), random_.randrange(2))
        # What was found once may not go by itself any more either.
        reported = max(reported, *killed(child, random_))
        if not path.exists():
            assert not reported
            continue
        with opened_at_once(path, KEEP, caplog) as checkpointer:
            steps = checkpointer.steps()
            newest = max(steps, default=0)
            unreported += newest > reported
            assert reported <= newest <= reported + 2, f"kill {number}: {steps}"
            assert len(steps) <= KEEP
            for step in {reported, newest} - {0}:
                assert_same(checkpointer.load(step), Training(step).state())
        assert os.path.getsize(path) <= POOL_SIZE_MAX
    print(f"{KILLS} kills, {reported} steps; {unreported} times one more was there than reported")
    assert reported > KILLS
    assert unreported, "no kill came between a commit and its report"


@pytest.mark.long
def test_reference_files_of_a_killed_process_lead_to_what_they_name(
    folder: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    random_ = random.Random(seed)
    children = nursery("tests.crash.saver")
    path, checkpoints = folder / ".portus" / "run.portus", folder / "checkpoints"
    checkpoints.mkdir()
    saved = there = pending = 0
    for number in range(KILLS_WITH_FILES):
        child = children.start("save_with_files_for_ever", str(path), str(checkpoints))
        found, newest = killed(child, random_)
        saved = max(saved, newest)
        there = max(there, found, newest)  # a kill may leave a version that nobody told of
        if newest:
            names = [f"{newest}.ckpt", f"{newest + 1}.ckpt"]
            assert any((checkpoints / name).exists() for name in names), f"kill {number}: {names}"
        for file in checkpoints.iterdir():
            pending += _leads_right(file, saved, there)
            if file.stem not in ("last", str(saved)):
                file.unlink()  # what the killed run no longer needs, removed behind its back
        if not path.exists():
            continue
        with opened_at_once(path, 1, caplog) as checkpointer:
            assert max(checkpointer.steps(), default=0) >= there, f"kill {number}"
        assert os.path.getsize(path) <= POOL_SIZE_MAX
    print(f"{KILLS_WITH_FILES} kills, {saved} steps; {pending} files named what never came")
    assert saved
    assert (checkpoints / "last.ckpt").exists()


def _leads_right(file: Path, saved: int, there: int) -> bool:
    """The file leads to its step, or, if that was never told to be saved, to one before it, not
    older than what was. ``there``: the newest step that was found in the pool so far, or told to
    be saved. True if the file did not lead to its own."""
    try:
        state = portus.load_reference(file)
    except portus.UsageError:
        if there:
            raise  # it has no version, and neither has the one before it
        return True
    assert isinstance(state, dict)
    step = state["step"]
    assert_same(state, Training(step).state())
    if file.stem == str(step):
        return False
    assert saved <= step <= there + 1
    if file.stem == "last":
        return False
    assert saved < int(file.stem) <= there + 1
    return True


@pytest.mark.long
def test_a_pool_is_whole_or_not_there_when_its_maker_was_killed(
    folder: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    random_ = random.Random(seed)
    children = nursery("tests.crash.saver")
    made = 0
    for number in range(10):
        path = folder / f"{number}" / "run.portus"
        with children.start("save_for_ever", str(path), 0) as child:
            child.line()
            time.sleep(random_.uniform(0, DELAY_S_MAX))
            child.kill()
        made += path.exists()
        with opened_at_once(path, KEEP, caplog) as checkpointer:
            training = Training(1000)
            checkpointer.save(training.state(), 1000).wait()
            assert_same(checkpointer.load(), training.state())
        left = [each.name for each in path.parent.iterdir() if each.name.endswith(".new")]
        assert len(left) <= 1, left
    print(f"{made} of 10 pools had been made")
