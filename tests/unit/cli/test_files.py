"""The commands on checkpoints that are files: ``ls``, ``show``, ``verify``, ``gc``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from tests.unit.cli.scene import portus as command
from tests.unit.cli.scene import portus_json as document


class Odd:
    """A class that is not made for whoever only looks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3, 4), float(step))}, "step": step, "name": "x" * 99}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs: by a ``Checkpointer``, and by stock ``torch.save``."""
    with portus.Checkpointer(tmp_path / "runs" / "a") as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(step), step, metrics={"loss": 0.5}).wait()
    (tmp_path / "runs" / "b").mkdir()
    torch.save(state(7), tmp_path / "runs" / "b" / "epoch=1-step=7.ckpt")
    (tmp_path / "runs" / "b" / "last.ckpt").symlink_to("epoch=1-step=7.ckpt")
    (tmp_path / "runs" / "b" / "notes.txt").write_text("x")
    return tmp_path / "runs"


def test_ls_lists_the_files_of_each_directory_below(runs: Path) -> None:
    said = command("ls", runs)
    assert said.code == 0
    for name in ("step-00000001.pt", "step-00000002.pt", "epoch=1-step=7.ckpt"):
        assert name in said.out
    assert "last.ckpt" not in said.out
    found = document("ls", runs)["directories"]
    assert [each["path"] for each in found] == [str(runs / "a"), str(runs / "b")]
    assert [file["step"] for each in found for file in each["files"]] == [1, 2, 7]


def test_many_files_are_cut_to_the_newest_unless_all_are_asked_for(tmp_path: Path) -> None:
    for number in range(25):
        torch.save(number, tmp_path / f"step={number:02d}.pt")
        os.utime(tmp_path / f"step={number:02d}.pt", (number, number))
    assert "step=04.pt" not in command("ls", tmp_path).out
    assert "5 older: --all" in command("ls", tmp_path).out
    assert "step=04.pt" in command("ls", tmp_path, "--all").out


def test_within_a_run_no_argument_is_needed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with portus.Checkpointer(runs / "a") as checkpointer:
        checkpointer.save(state(3), 3).wait()
        monkeypatch.chdir(runs / "a")
        (runs / "a" / ".portus").mkdir(exist_ok=True)
        assert "step-00000003.pt" in command("ls").out
        assert "all are healthy" in command("verify").out


def test_verify_says_by_what_and_finds_each_kind_of_damage(runs: Path) -> None:
    said = command("verify", runs)
    assert said.code == 0
    assert "3 files: all are healthy" in said.out
    assert "epoch=1-step=7.ckpt: healthy by the CRC32s of the zip" in said.out
    path = runs / "a" / "step-00000002.pt"
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):  # the first bytes too: by then its name says what it is
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        said = command("verify", path)
        assert said.code == 1, at
        assert "DAMAGED" in said.out, at
    path.write_bytes(whole[:-10])
    found = document("verify", runs, code=1)
    assert [each["healthy"] for each in found["files"]] == [True, False, True]
    assert found["healthy"] is False


def test_show_has_the_tensors_the_other_values_and_the_note(runs: Path) -> None:
    said = command("show", runs / "a" / "step-00000002.pt")
    assert said.code == 0
    assert "checksums of Portus" in said.out
    assert "model.weight" in said.out
    assert "[3, 4]" in said.out
    assert '"loss":0.5' in said.out
    found = document("show", runs / "b" / "epoch=1-step=7.ckpt")
    assert found["tensors"] == [
        {"name": "model.weight", "dtype": "float32", "shape": [3, 4], "size": 48}
    ]
    assert found["others"]["step"] == "7"
    assert found["verified_by"] == "crc32"


def test_show_makes_no_object_of_a_class_that_a_file_names(tmp_path: Path) -> None:
    with portus.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"odd": Odd(torch.zeros(5))}, 1).wait()
    said = command("show", tmp_path / "step-00000001.pt")
    assert said.code == 0
    assert "odd" in said.out
    assert "20" in said.out


def test_gc_removes_what_a_killed_process_left_and_nothing_else(runs: Path) -> None:
    program = (
        "import os, sys, portus, torch\n"
        "from portus.writer.image_file import ImageFile\n"
        "ImageFile.finish = lambda file: os.kill(os.getpid(), 9)\n"
        "portus.save({'x': torch.zeros(1000)}, sys.argv[1], wait=True)\n"
    )
    path = runs / "b" / "new.pt"
    done = subprocess.run([sys.executable, "-c", program, path], check=False, timeout=60)
    assert done.returncode == -9
    assert not path.exists()
    hidden = runs / "b" / ".portus"
    before = sorted(os.listdir(hidden))
    assert before
    assert "would be removed" in command("gc", runs, "--dry-run").out
    assert sorted(os.listdir(hidden)) == before
    assert "removed" in command("gc", runs).out
    assert not hidden.exists()
    assert "nothing to do" in command("gc", runs).out
    assert sorted(os.listdir(runs / "b")) == ["epoch=1-step=7.ckpt", "last.ckpt", "notes.txt"]


def test_bad_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert command("show", tmp_path / "text.pt").code == 2
    assert command("verify", tmp_path / "nothing.pt").code == 2
