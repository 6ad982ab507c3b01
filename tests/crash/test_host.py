"""A training and a storage host, in processes of their own, and either is killed (V2, V7, V8)."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest
import torch

import portus
from portus.reach.index.check import check
from portus.reach.index.findings import Severity
from tests.crash import host_trainer
from tests.hosts import Host, connect_again_at_once
from tests.nursery import Child
from tests.same import assert_same
from tests.simulation.lossy import LossyLink
from tests.warm import Warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

KILLS = 6
WORDS = 12


def verified(host: Host, reported: int) -> int:
    """The newest version's step; it is whole, the right one, and not older than was reported."""
    with portus.open(host.url) as pool:
        steps = pool.steps()
        newest = pool.load()
    assert steps, "nothing was committed"
    assert steps[-1] >= reported, f"step {reported} was reported, {steps} are there"
    assert_same(newest, host_trainer.after(steps[-1]))
    return steps[-1]


def told(lines: list[str], word: str) -> int:
    return max((int(line.split()[1]) for line in lines if line.startswith(word)), default=0)


def until(child: Child, word: str, lines: list[str]) -> int:
    lines.append(child.until(word))
    return int(lines[-1].split()[1])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_training_goes_on_while_its_host_is_killed_and_comes_back(
    tmp_path: Path, seed: int
) -> None:
    random_ = random.Random(seed)
    with (
        Host(tmp_path / "pools") as host,
        Warm("tests.crash.host_trainer").start("train_for_ever", host.url) as child,
    ):
        lines: list[str] = []
        for _ in range(KILLS):
            reported = until(child, "saved", lines)
            time.sleep(random_.uniform(0, 0.05))
            host.kill()
            until(child, "lost", lines)  # and it is told
            before = until(child, "trained", lines)
            for _ in range(20):
                assert until(child, "trained", lines) > before  # nobody holds the training up
            host.start()
            assert until(child, "saved", lines) > reported  # by itself
            lines += [child.line()]
        lines += child.kill()
        newest = verified(host, told(lines, "saved"))
        assert newest > KILLS
    findings = check(tmp_path / "pools" / "default.portus")
    assert not [each for each in findings if each.severity is Severity.ERROR]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_host_may_be_killed_at_any_word_of_a_save(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link counts what is said, and is cut where the host is killed: at the same byte."""
    monkeypatch.chdir(tmp_path)
    connect_again_at_once(monkeypatch)
    chance = random.Random(seed)
    with (
        Host(tmp_path / "pools") as host,
        LossyLink("127.0.0.1", host.port) as link,
        portus.PoolCheckpointer(f"portus://127.0.0.1:{link.port}", keep=2) as checkpointer,
    ):
        checkpointer.save(numbered(0), 0).wait()
        before = link.relayed
        checkpointer.save(numbered(1), 1).wait()
        size, reported, lost = link.relayed - before, 1, 0
        places = [chance.randrange(1500), chance.randrange(size), size - chance.randrange(2000)]
        for step, place in enumerate(places * (WORDS // 3), 2):
            place = min(size, place + chance.randrange(300))
            link.cut_after = link.relayed + place
            try:
                reported = checkpointer.save(numbered(step), step).wait(60).step
            except portus.PortusError:
                lost += 1
            host.kill()
            link.cut_after = None
            host.start()
            with portus.open(host.url) as pool:
                newest = pool.versions()[-1].step
                assert_same(pool.load(), numbered(newest))
            assert reported <= newest <= step
        assert lost > WORDS // 3
        host.stop()
    assert check(tmp_path / "pools" / "default.portus") == []


def numbered(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((50_000,), float(step)), "b": torch.full((7,), float(-step))}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_training_goes_on_from_what_the_host_has(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    children = Warm("tests.crash.host_trainer")
    with Host(tmp_path / "pools") as host:
        reported = 0
        for _ in range(KILLS):
            with children.start("train_for_ever", host.url) as child:
                lines: list[str] = []
                assert until(child, "resumed", lines) >= reported
                for _ in range(random_.randint(1, 5)):
                    until(child, "saved", lines)
                time.sleep(random_.uniform(0, 0.05))
                lines += child.kill()
                reported = max(reported, told(lines, "saved"))
            reported = max(reported, verified(host, reported))
        assert host.stop() == 0
        assert '"level": "error"' not in host.log
    findings = check(tmp_path / "pools" / "default.portus")
    assert not [each for each in findings if each.severity is Severity.ERROR]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", ["trainer", "both"])
def test_what_was_killed_before_the_commit_has_no_pointer_and_what_was_told_loads(
    tmp_path: Path, killed: str
) -> None:
    with (
        Host(tmp_path / "pools") as host,
        LossyLink("127.0.0.1", host.port) as link,
        Warm("tests.crash.host_trainer").start(
            "save_directories", f"portus://127.0.0.1:{link.port}", str(tmp_path)
        ) as child,
    ):
        url = f"portus://127.0.0.1:{link.port}"
        lines: list[str] = []
        while until(child, "saved", lines) < 3:
            pass
        link.stalled = True
        (tmp_path / "go").touch()
        while until(child, "asked", lines) < 4:
            pass
        child.kill()
        if killed == "both":
            host.kill()
        link.cut()
        link.stalled = False
        if killed == "both":
            host.start()
        portus.allow(url)
        assert not list((tmp_path / "step_4").iterdir()), "nothing is there before the commit"
        for step in (1, 2, 3):
            found = portus.load(tmp_path / f"step_{step}" / "rest.pt")
            assert found["state"][0]["step"] == step
        with portus.open(host.url) as pool:
            assert pool.steps("run") == [1, 2, 3]
