"""The commands on checkpoints that are files: ``ls``, ``show``, ``verify``, ``gc``,
``rm``, ``export``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_safetensors

import portus
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.unit.cli.scene import portus as command
from tests.unit.cli.scene import portus_json as document
from tests.warm import in_process


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
        "from portus.engine.writer.image_file import ImageFile\n"
        "ImageFile.finish = lambda file: os.kill(os.getpid(), 9)\n"
        "portus.save({'x': torch.zeros(1000)}, sys.argv[1], wait=True)\n"
    )
    path = runs / "b" / "new.pt"
    assert in_process(program, str(path)).returncode == -9
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


def test_verify_reads_all_files_of_a_directory_at_the_pace_that_is_said(runs: Path) -> None:
    began_s = time.monotonic()
    said = document("verify", runs, "--rate", "200/s")
    assert [each["healthy"] for each in said["files"]] == [True] * 3
    waited_s = time.monotonic() - began_s
    assert waited_s >= 2 * 48 / 200, "the storages of all but the last file"
    path = runs / "a" / "step-00000002.pt"
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((4,), 2.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    damaged = command("verify", runs, "--rate", "1G/s")
    assert damaged.code == 1
    assert "step-00000002.pt: DAMAGED" in damaged.out
    assert command("verify", runs / "b" / "epoch=1-step=7.ckpt", "--rate", "1G/s").code == 0


def test_rm_removes_one_file_and_none_that_a_link_leads_to(runs: Path) -> None:
    assert command("rm", runs / "a" / "step-00000001.pt").code == 0
    assert sorted(os.listdir(runs / "a"))[-1:] == ["step-00000002.pt"]
    led = runs / "b" / "epoch=1-step=7.ckpt"
    said = command("rm", led)
    assert said.code == 2
    assert "last.ckpt points to it" in said.err
    assert command("rm", led, "--force").code == 0
    assert not led.exists()
    for wrong in (runs / "a", runs / "b" / "notes.txt", runs / "nothing.pt"):
        assert command("rm", wrong).code == 2
    assert (runs / "b" / "notes.txt").exists()
    assert (runs / "a" / "step-00000002.pt").exists()


def test_rm_removes_the_files_of_a_directory_that_do_not_stay(tmp_path: Path) -> None:
    with portus.Checkpointer(tmp_path / "a", keep=100) as checkpointer:
        for step in range(1, 9):
            checkpointer.save(state(step), step, metrics={"loss": abs(step - 3)})
    before = os.listdir(tmp_path / "a")
    (tmp_path / "a" / "last.pt").symlink_to("step-00000002.pt")
    assert "last.pt points to it" in command("rm", tmp_path / "a", "--keep", "1").err
    assert set(os.listdir(tmp_path / "a")) == {"last.pt", *before}
    (tmp_path / "a" / "last.pt").unlink()
    said = command("rm", tmp_path / "a", "--keep", "last=2,every=5,best=loss:min:1")
    assert "4 files removed" in said.out
    stay = [f"step-{step:08d}.pt" for step in (3, 5, 7, 8)]
    assert [name for name in sorted(os.listdir(tmp_path / "a")) if name[0] == "s"] == stay
    assert len(document("rm", tmp_path / "a", "--keep", "1", code=0)["removed"]) == 3
    assert command("rm", tmp_path / "a", "--keep", "1").out.startswith("0 files removed")
    for wrong, why in (
        (("rm", tmp_path / "a"), "or --keep to say which"),
        (("rm", tmp_path / "a" / stay[-1], "--keep", "1"), "expected a directory for --keep"),
        (("rm", tmp_path / "a", "--keep", "0"), "keep"),
    ):
        said = command(*wrong)
        assert said.code == 2
        assert why in said.err
    (tmp_path / "b").mkdir()
    torch.save({}, tmp_path / "b" / "epoch=1.ckpt")
    said = command("rm", tmp_path / "b", "--keep", "1")
    assert "expected the files of a Checkpointer" in said.err
    assert (tmp_path / "b" / "epoch=1.ckpt").exists()


def test_export_writes_the_tensors_of_a_file_as_safetensors(runs: Path, tmp_path: Path) -> None:
    source, out = runs / "a" / "step-00000002.pt", tmp_path / "model.safetensors"
    said = command("export", source, out, "--strip", "model.")
    assert said.code == 0
    assert "left out 2 values" in said.err
    found = load_safetensors(out)
    assert list(found) == ["weight"]
    assert torch.equal(found["weight"], state(2)["model"]["weight"])
    assert command("export", source, out).code == 2, "it is there already"
    assert command("export", source, out, "--force").code == 0
    assert list(load_safetensors(out)) == ["model.weight"]


def test_export_takes_what_names_say_also_to_a_torch_file(tmp_path: Path) -> None:
    w = torch.arange(6.0).reshape(2, 3)
    torch.save({"model": {"w": w, "t": w.T, "b": torch.ones(2)}, "step": 3}, tmp_path / "a.pt")
    assert (
        command("export", tmp_path / "a.pt", tmp_path / "b.pt", "--names", "model.[wb]").code == 0
    )
    found = torch.load(tmp_path / "b.pt")
    assert torch.equal(found["model"]["w"], w)
    assert sorted(found["model"]) == ["b", "w"]
    said = command("export", tmp_path / "a.pt", tmp_path / "c.safetensors")
    assert "share memory" in said.err
    assert torch.equal(load_safetensors(tmp_path / "c.safetensors")["model.t"], w.T)
    assert (
        "no tensor"
        in command("export", tmp_path / "a.pt", tmp_path / "d.pt", "--names", "step").err
    )
    assert not (tmp_path / "d.pt").exists()


def test_export_to_a_directory_writes_the_weights_as_from_pretrained_reads_them(
    tmp_path: Path,
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=8, vocab_size=32)
    model = GPT2LMHeadModel(config)
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}}
    whole = {"model": model.state_dict(), "optimizer": optimizer, "step": 3}
    portus.save(whole, tmp_path / "step.pt", wait=True)
    for limit, count in (("5GB", 1), ("20KB", 2)):
        out = tmp_path / f"out-{count}"
        said = command("export", tmp_path / "step.pt", out, "--shard-size", limit)
        assert said.code == 0, said.err
        assert "optimizer.state.0.exp_avg" in said.out + said.err
        assert len(list(out.glob("model*.safetensors"))) == count
        assert command("verify", out).out.count("healthy by the checksums of Portus") == count
        config.save_pretrained(out)
        found = GPT2LMHeadModel.from_pretrained(out).state_dict()
        assert all(torch.equal(found[name], each) for name, each in model.state_dict().items())
        assert "already exists" in command("export", tmp_path / "step.pt", out).err
    out = tmp_path / "some"
    assert command("export", tmp_path / "step.pt", out, "--names", "optimizer.*").code == 0
    assert [each.name for each in out.iterdir()] == ["model.safetensors"]
    assert command("export", tmp_path, out / "no").code == 2


def test_export_runs_nothing_of_a_file_and_writes_nothing_of_a_damaged_one(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "odd": Odd(torch.ones(1))}, tmp_path / "odd.pt")
    said = command("export", tmp_path / "odd.pt", tmp_path / "out.safetensors")
    assert said.code == 2
    assert "Odd" in said.err
    with portus.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save({"w": torch.full((99,), 7.0)}, 1)
    os.replace(tmp_path / "run" / "step-00000001.pt", tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(torch.full((9,), 7.0).numpy().tobytes())] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    assert command("export", tmp_path / "a.pt", tmp_path / "out.safetensors").code == 1
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "odd.pt", "run"]
    assert command("export", tmp_path, tmp_path / "out.safetensors").code == 2


def test_safetensors_files_are_checkpoints_as_well(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"layer.weight": torch.ones(3, 4), "half": torch.ones(2).half()}
    portus.save_safetensors(tensors, path, {"format": "pt"}).wait()
    assert "model.safetensors" in command("ls", tmp_path).out
    said = command("show", path)
    assert said.out.splitlines()[0].endswith("checksums of Portus")
    assert "layer.weight  float32  [3, 4]" in said.out
    assert "format  'pt'" in said.out
    found = document("show", path)
    assert found["verified_by"] == "digests"
    assert found["tensors"][0] == {
        "name": "layer.weight",
        "dtype": "float32",
        "shape": [3, 4],
        "size": 48,
    }
    assert "healthy by the checksums of Portus" in command("verify", tmp_path).out
    assert "healthy by the checksums of Portus" in command("verify", path, "--rate", "1G/s").out
    command("export", path, tmp_path / "half.pt", "--names", "half")
    assert torch.equal(torch.load(tmp_path / "half.pt")["half"], tensors["half"])
    whole = path.read_bytes()
    for at in [*range(0, 800, 13), len(whole) - 1]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        said = command("verify", path)
        assert (said.code, "DAMAGED" in said.out) == (1, True), at
    stock = pytest.importorskip("safetensors.torch")
    stock.save_file(tensors, path)
    said = command("verify", path)
    assert (said.code, "healthy by the structure alone" in said.out) == (0, True)
    assert document("show", path)["verified_by"] == "structure"


def test_a_directory_that_has_the_hidden_folder_alone_has_no_file_to_verify(tmp_path: Path) -> None:
    (tmp_path / ".portus").mkdir()
    said = command("verify", tmp_path)
    assert (said.code, "no checkpoint file to verify" in said.err) == (2, True)


@pytest.mark.parametrize("has_pool", [False, True])
@pytest.mark.parametrize("name", ["show", "verify", "rm"])
def test_a_directory_without_checkpoints_is_called_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_pool: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    if has_pool:
        with PoolCheckpointer(".portus/net.portus", "net") as run:
            run.save({"x": torch.zeros(3)}, 1).wait()
    said = command(name, "empty")
    assert said.code == 2
    assert "empty: there are no checkpoints in this directory" in said.err
    assert ("it holds the models 'net'" in said.err) == has_pool


@pytest.mark.parametrize("name", ["show", "verify", "rm"])
def test_a_file_that_is_missing_is_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = command(name, "last.pt")
    assert missing.code == 2
    assert "last.pt: there is no checkpoint file of this name" in missing.err
    assert command("ls", "last").err.endswith("there is no file or directory of this name\n")
    assert "name a directory, or a pool" in command("ls").err
