"""Lightning on a machine that has nothing: the same script, and the mirror."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from portus.testing.hosting import serving, url
from portus_lightning import PortusIO
from tests.adapters.launching import TWO
from tests.adapters.tiny import NO_FUSS, Net, every_step, files, loader, same, trainer

pytestmark = NO_FUSS


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


@pytest.mark.long
def test_so_does_one_whose_mirror_is_the_memory_of_a_storage_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving("memory:64M") as server:
        lose_its_machine(tmp_path, monkeypatch, url(server), named=False)


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
