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
import torch

import portus
from portus.engine.paths import process
from portus.reach.index.check import check
from portus.reach.index.findings import Severity
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.crash.saver import KEEP, Training
from tests.depth import deep
from tests.nursery import Child
from tests.same import assert_same
from tests.unit.cli.scene import portus as command
from tests.warm import Warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

KILLS = deep(100)
KILLS_WITH_FILES = deep(30)
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
    children = Warm("tests.crash.saver")
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
                assert_same(checkpointer.load(step, weights_only=False), Training(step).state())
        assert os.path.getsize(path) <= POOL_SIZE_MAX
    print(f"{KILLS} kills, {reported} steps; {unreported} times one more was there than reported")
    assert reported > KILLS // 3, "too few steps were saved"
    assert unreported or KILLS < 30, "no kill came between a commit and its report"


@pytest.mark.long
def test_at_each_path_of_a_killed_process_is_a_pointer_that_loads_or_nothing(
    folder: Path, seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there loads its own step. Versions to which no pointer leads, at most two for each
    kill (one committed, one not retired yet), are all that leaks, and gc finds them."""
    random_ = random.Random(seed)
    children = Warm("tests.crash.saver")
    path, checkpoints = folder / "run.portus", folder / "checkpoints"
    checkpoints.mkdir()
    monkeypatch.setattr("portus.reach.places.pool.YOUNG_S", 0.0)
    saved = told = leaked = 0
    for number in range(KILLS_WITH_FILES):
        child = children.start("save_pointers_for_ever", str(path), str(checkpoints))
        found, newest = killed(child, random_)
        saved, told = max(saved, found, newest), max(told, newest)
        process.recover_left(str(checkpoints))  # as the first save or load of the next program does
        steps = {file.stem: leads_to(file) for file in sorted(checkpoints.glob("*.ckpt"))}
        assert all(stem in ("last", str(step)) for stem, step in steps.items()), f"kill {number}"
        assert saved <= steps.get("last", 0) <= saved + 2, f"kill {number}: {steps}"
        own = max((step for stem, step in steps.items() if stem != "last"), default=0)
        assert told <= own <= saved + 1, f"kill {number}: {steps}, and {told} was told"
        for stem in steps:
            if stem not in ("last", str(own)):  # removed behind its back, by hand
                (checkpoints / f"{stem}.ckpt").unlink()
        if not path.exists():
            continue
        tokens = {_token_at(file) for file in checkpoints.glob("*.ckpt")}
        with opened_at_once(path, 1, caplog) as checkpointer, portus.open(path) as pool:
            lost = {info.token for info in pool.versions("run")} - tokens
            assert not checkpointer.steps()
        leaked += len(lost)
        assert command("gc", path, "--missing", folder, "--yes").code == 0
        with portus.open(path) as pool:
            assert {info.token for info in pool.versions("run")} == tokens, f"kill {number}"
        for file in checkpoints.glob("*.ckpt"):
            leads_to(file)
        assert os.path.getsize(path) <= POOL_SIZE_MAX
    print(f"{KILLS_WITH_FILES} kills, {saved} steps; {leaked} versions had no pointer")
    assert saved > KILLS_WITH_FILES // 3, "too few steps were saved"
    assert leaked or KILLS_WITH_FILES < 10


def leads_to(file: Path) -> int:
    """The step of the state that a pointer leads to, which is whole; plain torch loads it too."""
    assert portus.is_reference(file)
    state = portus.load(file, weights_only=False)
    assert_same(state, Training(state["step"]).state())
    portus.register_reference_loader()
    assert torch.load(file, weights_only=False)["step"] == state["step"]
    return int(state["step"])


def _token_at(file: Path) -> bytes:
    found = portus.read_reference(file)
    assert found is not None
    return bytes.fromhex(found.token)


@pytest.mark.long
def test_a_pool_is_whole_or_not_there_when_its_maker_was_killed(
    folder: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    random_ = random.Random(seed)
    children = Warm("tests.crash.saver")
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
            assert_same(checkpointer.load(weights_only=False), training.state())
        left = [each.name for each in path.parent.iterdir() if each.name.endswith(".new")]
        assert len(left) <= 1, left
    print(f"{made} of 10 pools had been made")
