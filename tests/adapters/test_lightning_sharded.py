"""``ModelParallelStrategy``: sharded checkpoints of two processes are stock's directories.

FSDP2 over gloo on CPUs. ``FSDPStrategy`` wants a GPU, and is tested where there is one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from portus.engine.loading.checkpoint_file import verify_file
from tests.adapters import forked
from tests.adapters.tiny import same

SCRIPT = Path(__file__).with_name("sharded_lightning.py")
pytestmark = pytest.mark.timeout(300)


def run(root: Path, *arguments: str, dies: str = "", **variables: str) -> str:
    """The program in ``root``; what it said."""
    how: Any = {"processes": 2, "ends": dies or "well", "variables": variables}
    return forked.script(SCRIPT, root, *arguments, **how)


def results(root: Path, name: str) -> list[dict[str, Any]]:
    """By rank, what was drawn and the parameters at the end."""
    return [torch.load(root / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]


def assert_goes_on(resumed: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """The same draws from there on, and the same bits at the end."""
    for found, expected in zip(resumed, whole, strict=True):
        first = found["drawn"][0][0]
        assert 0 < first < 6
        assert found["drawn"] == [each for each in expected["drawn"] if each[0] >= first]
        assert same(found["model"], expected["model"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupts, with every checkpoint kept."""
    root = tmp_path_factory.mktemp("whole")
    said = run(root, "whole")
    assert "do NOT go through Portus" not in said
    return root


def assert_is_stock_s(directory: Path) -> None:
    """It has what stock Lightning writes, and no more."""
    names = sorted(os.listdir(directory))
    assert names[0] == ".metadata"
    assert names[-1] == "meta.pt"
    assert [name[:4] for name in names[1:-1]] == ["__0_", "__1_"]
    for name in names:
        verify_file(directory / name)


@pytest.mark.long
def test_a_rank_killed_right_after_a_save_resumes_by_last_bit_for_bit(
    whole: Path, tmp_path: Path
) -> None:
    assert_is_stock_s(whole / "ckpt/last.ckpt")
    found = torch.load(whole / "ckpt/last.ckpt/meta.pt", weights_only=False)
    assert found["global_step"] == 6
    assert sorted(each.name for each in (whole / "ckpt").glob("step=*")) == [
        f"step={step}.ckpt" for step in range(1, 7)
    ]
    run(tmp_path, "killed", "--kill-at", "3", dies="killed")
    run(tmp_path, "resumed", "--resume", "last", "--top-k", "2")
    assert_goes_on(results(tmp_path, "resumed"), results(whole, "whole"))
    kept = sorted(each.name for each in (tmp_path / "ckpt").glob("step=[4-6].ckpt"))
    assert kept == ["step=5.ckpt", "step=6.ckpt"], "what save_top_k removed is gone"


@pytest.mark.long
def test_it_resumes_from_a_path_and_stock_lightning_trains_the_same(
    whole: Path, tmp_path: Path
) -> None:
    run(tmp_path, "resumed", "--resume", str(whole / "ckpt/step=3.ckpt"))
    assert_goes_on(results(tmp_path, "resumed"), results(whole, "whole"))
    run(tmp_path, "stock", "--stock")
    stock, ours = results(tmp_path, "stock"), results(whole, "whole")
    assert all(same(a["model"], b["model"]) for a, b in zip(stock, ours, strict=True))


@pytest.mark.long
def test_switched_off_it_saves_as_stock_does_and_loads_what_both_saved(
    whole: Path, tmp_path: Path
) -> None:
    path = str(whole / "ckpt/step=3.ckpt")
    run(tmp_path, "off", "--resume", path, PORTUS_DISABLE="1")
    assert_goes_on(results(tmp_path, "off"), results(whole, "whole"))
    assert (tmp_path / "ckpt/step=4.ckpt/.metadata").exists()
    assert not (tmp_path / ".portus").exists()
    run(tmp_path, "on", "--resume", str(tmp_path / "ckpt/step=4.ckpt"))
    # Stock Lightning saved no generators: the draws differ, the steps go on.
    assert results(tmp_path, "on")[0]["drawn"][0][0] == 4
    assert_is_stock_s(tmp_path / "ckpt/last.ckpt")


@pytest.mark.long
def test_a_run_whose_machine_was_lost_comes_back_from_the_mirror(
    whole: Path, tmp_path: Path
) -> None:
    root, mirror = tmp_path / "run", f"file://{tmp_path}/bucket"
    run(root, "first", "--top-k", "2", PORTUS_MIRROR=mirror)
    before = sorted(os.listdir(root / "ckpt"))
    shutil.rmtree(root)
    run(root, "second", "--resume", "last", "--top-k", "2", PORTUS_MIRROR=mirror)
    assert sorted(os.listdir(root / "ckpt")) == before
    for found, expected in zip(results(root, "second"), results(whole, "whole"), strict=True):
        assert found["drawn"] == [], "all steps were done"
        assert same(found["model"], expected["model"])


@pytest.mark.long
@pytest.mark.parametrize("damage", ["flipped", "cut off"])
def test_the_last_one_that_is_damaged_is_passed_over_and_one_by_name_is_an_error(
    whole: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(whole / "ckpt", tmp_path / "ckpt")
    last = tmp_path / "ckpt/last.ckpt"
    shutil.rmtree(tmp_path / "ckpt/step=6.ckpt")  # the same state as the last one
    if damage == "flipped":
        [file] = last.glob("__1_*.distcp")
        data = bytearray(file.read_bytes())
        data[(data.index(b"data/0") // 64 + 1) * 64] ^= 1  # of a weight
        file.write_bytes(data)
    else:
        (last / ".metadata").unlink()
    said = run(tmp_path, "named", "--resume", str(last), dies="failed")
    assert ("CorruptionError" if damage == "flipped" else "was cut off") in said
    said = run(tmp_path, "chosen", "--resume", "last")
    assert "FALLING BACK to" in said
    assert_goes_on(results(tmp_path, "chosen"), results(whole, "whole"))
