"""Lightning on a machine that has nothing: the same script, and the mirror."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from portus.reach.mirror.address import parse
from portus.reach.mirror.files import MirroredFiles
from portus.reach.mirror.objects import Added
from portus.reach.mirror.opening import open_store
from portus_lightning import PortusIO
from tests.adapters import lost_script
from tests.adapters.launching import TWO
from tests.adapters.tiny import NO_FUSS, Net, every_step, files, loader, same, trainer
from tests.adapters.without_portus import steps_and_sums
from tests.moments import until
from tests.nursery import Child, nursery

pytestmark = NO_FUSS

LOSSES = int(os.environ.get("PORTUS_TEST_LOSSES", "3"))


def trained(root: Path, epochs: int, mirror: str, path: Any = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    keep = every_step(root, save_top_k=2, monitor="loss", save_last=True)
    plugin = PortusIO(mirror=mirror)
    fit = trainer(root, callbacks=[keep], max_epochs=epochs, plugin=plugin)
    model = Net()
    fit.fit(model, loader(), ckpt_path=path)
    return dict(model.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("named", [False, True])
def test_a_run_whose_machine_was_lost_goes_on_from_the_mirror_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    lose_its_machine(tmp_path, monkeypatch, f"file://{tmp_path}/bucket", named=named)


def lose_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str, *, named: bool
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    for each in (whole, run):
        each.mkdir()
    monkeypatch.chdir(run)
    expected = trained(whole, 2, "none")
    trained(run, 1, mirror)
    before = files(run)
    shutil.rmtree(run)
    run.mkdir()
    found = trained(run, 2, mirror, run / "ckpt" / "last.ckpt" if named else "last")
    assert same(found, expected)
    assert set(before) & set(files(run)), "what was best came back"
    for each in (run / "ckpt").iterdir():
        assert torch.load(each)["global_step"]


def counted(mirror: Path) -> dict[str, Added]:
    """The files that count, by their paths."""
    with contextlib.closing(open_store(parse(f"file://{mirror}"))) as store:
        files = MirroredFiles(store, "ckpt", "mirror").read().added
    return {each.path: each for each in files}


def has_any(mirror: Path) -> bool:
    """True once the last checkpoint is there, and what it leads to."""
    return "ckpt/last.ckpt" in counted(mirror)


def mirrored_step(mirror: Path) -> int:
    """That of the last checkpoint in the mirror, as a process without Portus reads it; -1 if there
    is none."""
    files = counted(mirror)
    named = [each for path, each in files.items() if path.startswith("ckpt/last")]  # last-v1, too
    found = [files.get(f"ckpt/{each.link}") if each.link else each for each in named]
    last = max(filter(None, found), key=lambda each: each.time_ns, default=None)
    if last is None:
        return -1
    [path] = [mirror / "ckpt" / each.name for each in last.files.values()]
    return int(steps_and_sums(path.parent)[path.name][0])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kept", ["all", "best", "newest", "link"])
def test_machines_are_lost_one_after_another_and_the_training_ends_bit_for_bit(
    tmp_path: Path, kept: str, seed: int
) -> None:
    """Killed at a random step, and the disk wiped: the next one goes on from what was mirrored."""
    source, run, mirror = random.Random(seed), tmp_path / "run", tmp_path / "bucket"

    def begin(root: Path, where: str) -> Child:
        root.mkdir()
        return nursery(lost_script.__name__).start("run", str(root), where, 9, kept)

    def starts(training: Child) -> int:
        return int(training.until("starts at ").split()[-1])

    def ends(root: Path, where: str, start: int) -> None:
        with begin(root, where) as training:
            assert starts(training) == start
            assert training.wait() == 0

    ends(tmp_path / "whole", "none", 0)
    expected = 0
    for number in range(LOSSES):
        with begin(run, f"file://{mirror}") as training:
            assert starts(training) == expected
            for _ in range(source.randint(1, 8)):
                training.until("step")
            if number == 0:
                until(lambda: has_any(mirror))
            training.kill()
        expected = max(0, mirrored_step(mirror))
        shutil.rmtree(run)
    ends(run, f"file://{mirror}", expected)
    assert same(torch.load(run / "weights.pt"), torch.load(tmp_path / "whole" / "weights.pt"))
    here = {each.name for each in (run / "ckpt").iterdir()}
    # An upload that a kill cut off before its entry stays for a day.
    assert {path.removeprefix("ckpt/") for path in counted(mirror)} <= here
    assert expected > 0


@pytest.mark.long
@pytest.mark.timeout(240)
def test_no_rank_looks_for_the_last_checkpoint_before_it_was_fetched(tmp_path: Path) -> None:
    """torchrun starts all ranks at once: one that found nothing would begin anew."""
    run = tmp_path / "run"

    def trains(epochs: int) -> str:
        run.mkdir()
        script = (*TWO, "-m", "tests.adapters.mirror_script")
        more = (str(run), f"file://{tmp_path}/bucket", str(epochs))
        done = subprocess.run(
            (sys.executable, *script, *more), capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    trains(1)
    shutil.rmtree(run)
    said = trains(2)
    assert {"rank 0 starts at 3", "rank 1 starts at 3"} <= set(said.splitlines()), said


@pytest.mark.long
def test_a_run_whose_pool_is_gone_goes_on_from_the_mirror_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = f"file://{tmp_path}/bucket"
    for name in ("expected", "run"):
        (tmp_path / name).mkdir()
    run = tmp_path / "run"
    monkeypatch.chdir(run)
    expected = trained(tmp_path / "expected", 2, "none")
    trained(run, 1, mirror)
    shutil.rmtree(run / ".portus")
    found = trained(run, 2, mirror, run / "ckpt" / "last.ckpt")
    assert same(found, expected)
