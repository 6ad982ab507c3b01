"""``portus export``."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import portus as library
from portus.companions.shelf import Shelf
from portus.engine.format.checksum import UNIT
from portus.engine.job.settings import Settings
from portus.reach.pools import resolve
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.training.training_files import TrainingFiles
from tests.unit.cli.scene import Run, pointing, portus, portus_json, scattered, state

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def saved(run: Run, state: Any, model: str = "x") -> None:
    with PoolCheckpointer(run.pool / f"{model}.portus", model, on_error="raise") as trainer:
        trainer.save(state, 1).wait()


# --- as it was saved ----------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["out.pt", "step-00000010.pt", "pytorch_model.bin"])
def test_the_file_is_the_one_that_save_writes(run: Run, out: str) -> None:
    path = run.root / "stock" / "step-00000010.pt"
    path.parent.mkdir()
    library.save(run.states[10], path, wait=True)
    document = portus_json("export", "net@10", out)
    assert Path(out).read_bytes() == path.read_bytes()
    assert document["exact"] is True
    assert document["step"] == 10
    assert document["out"] == str(run.root / out)
    assert document["size"] == path.stat().st_size
    said = portus("export", "net@10", out, "--force")
    assert "net@10, as it was saved" in said.out
    assert portus("verify", "out.pt").code == (0 if out == "out.pt" else 2)


def test_a_pointer_leads_to_the_file_that_the_training_would_have_put_there(run: Run) -> None:
    [path] = run.point(1)
    there = run.root / "files" / path.name
    with contextlib.closing(TrainingFiles(Settings(journal=False))) as files:
        files.save(state(1), str(there), 1).wait()
    assert portus("export", path, "out.pt").code == 0
    assert portus("export", "led@1", "again.pt").code == 0
    assert Path("out.pt").read_bytes() == Path("again.pt").read_bytes() == there.read_bytes()


def test_all_kinds_of_values_are_in_it(run: Run) -> None:
    values = {
        "empty": torch.zeros(0),
        "array": np.arange(9000),
        "bytes": bytes(9000),
        "half": torch.arange(70).half(),
        "conjugate": torch.tensor([1 + 2j, -3 - 4j]).conj(),
        "nothing": None,
    }
    for each in (values, {}, 5, [torch.zeros(3), values]):
        saved(run, each)
        assert portus("export", "x", "out.pt", "--force").code == 0
        path = run.root / "step-00000001.pt"
        library.save(each, path, wait=True)
        assert Path("out.pt").read_bytes() == path.read_bytes()


def test_a_pointer_is_followed_to_a_pool_that_was_moved(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = run.point(1)
    monkeypatch.chdir("/")
    monkeypatch.setattr(resolve, "ALLOWED", [])
    moved, out = run.root / "moved.portus", run.root / "out.pt"
    os.rename(run.led, moved)
    assert portus("export", path, out).code == 2
    assert portus("export", path, out, "--pool", moved).code == 0
    assert torch.load(out, weights_only=False)["epoch"] == 1


@pytest.fixture
def several(run: Run) -> Path:
    """A directory of pointers to the files of one version, and of another file."""
    directory = run.root / "ckpt" / "checkpoint-7"
    with pointing(run.led, "led") as files:
        files.save_directory(str(directory), {"a.pt": state(1), "b.pt": state(2)}, 7).wait()
    (directory / "below").mkdir()
    (directory / "below" / "config.json").write_text("{}")
    return directory


def expected(run: Run) -> dict[str, bytes]:
    found = {}
    for step, name in ((1, "a.pt"), (2, "b.pt")):
        library.save(state(step), run.root / name, wait=True)
        found[name] = (run.root / name).read_bytes()
    return found


def test_of_several_files_a_directory_gets_all(run: Run, several: Path) -> None:
    assert portus("export", "led@7", "out").code == 0
    found = {each.name: each.read_bytes() for each in Path("out").iterdir()}
    assert found == expected(run)
    assert "already exists" in portus("export", "led@7", "out").err
    assert portus("export", "led@7", "out", "--force").code == 0
    Path("out/mine").write_bytes(b"")
    assert "remove it yourself" in portus("export", "led@7", "out", "--force").err
    assert sorted(os.listdir("out")) == ["a.pt", "b.pt", "mine"]


def test_of_several_files_one_may_be_chosen(run: Run, several: Path) -> None:
    assert portus("export", "led@7", "one.pt", "--file", "b.pt").code == 0
    assert Path("one.pt").read_bytes() == expected(run)["b.pt"]
    said = portus("export", "led@7", "two.pt", "--file", "c.pt")
    assert said.code == 2
    assert "['a.pt', 'b.pt']" in said.err
    assert "--file" in portus("export", "led@7", "out", "--names", "model").err
    assert portus("export", "led@7", "w.safetensors", "--file", "a.pt").code == 0
    assert torch.equal(
        safetensors.load_file("w.safetensors")["model.weight"], state(1)["model"]["weight"]
    )


def test_a_directory_of_pointers_becomes_one_of_files(run: Run, several: Path) -> None:
    assert portus("export", several, "out").code == 0
    assert {name: Path("out", name).read_bytes() for name in ("a.pt", "b.pt")} == expected(run)
    assert Path("out/below/config.json").read_text() == "{}"
    assert sorted(os.listdir("out")) == ["a.pt", "b.pt", "below"]
    assert torch.load("out/a.pt", weights_only=False)["epoch"] == 1


def test_damage_in_one_of_them_leaves_nothing(run: Run, several: Path) -> None:
    run.damage(2, "weight", run.led)
    before = sorted(os.listdir(run.root))
    for target in ("led@7", several):
        said = portus("export", target, "out")
        assert said.code == 1
        assert "b.pt" in said.err
    assert sorted(os.listdir(run.root)) == before


@pytest.mark.long
def test_files_of_many_units_and_extents_come_back(run: Run) -> None:
    big = torch.arange(3 * UNIT // 8 + 1001)
    saved(run, {"big": big, "middle": big[1000:5000], "i": torch.arange(5).int()})
    assert portus("export", "x", "out.pt").code == 0
    library.save(
        {"big": big, "middle": big[1000:5000], "i": torch.arange(5).int()},
        "step-00000001.pt",
        wait=True,
    )
    assert Path("out.pt").read_bytes() == Path("step-00000001.pt").read_bytes()


def test_a_storage_in_many_extents_comes_back(run: Run) -> None:
    with PoolCheckpointer(run.pool / "x.portus", "x", keep=None) as trainer:
        trainer.save({"x": torch.zeros(100_000)}, 1).wait()
        with scattered(trainer.path):
            trainer.save({"x": torch.arange(100_000.0)}, 2).wait()
    assert portus("export", "x@2", "out.pt").code == 0
    assert torch.equal(torch.load("out.pt")["x"], torch.arange(100_000.0))


# --- as a file of another kind ------------------------------------------------------------------


def test_every_tensor_comes_back_from_a_safetensors_file(run: Run) -> None:
    out = run.root / "out.safetensors"
    said = portus("export", "net@20", out)
    assert said.code == 0
    loaded = safetensors.load_file(out)
    expected = {f"model.{name}": tensor for name, tensor in run.states[20]["model"].items()}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor)
    assert "share memory" in said.err
    assert "model.weight, model.tied" in said.err
    assert "left out 3 values that safetensors cannot hold: epoch, text, lr" in said.err


def test_names_choose_and_strip_shortens(run: Run) -> None:
    out = run.root / "out.safetensors"
    chosen = ("-n", "model.[wt]*", "-n", "model.half", "--strip", "model.")
    portus_json("export", "net", out, *chosen)
    assert sorted(safetensors.load_file(out)) == ["half", "tied", "weight"]
    portus_json("export", "net", run.root / "part.pt", "--names", "model.half")
    assert list(torch.load(run.root / "part.pt")["model"]) == ["half"]
    [path] = run.point(1)
    portus_json("export", path, run.root / "other.pt", "--names", "model.half")
    assert list(torch.load(run.root / "other.pt")["model"]) == ["half"]


def test_a_directory_gets_the_weights(run: Run) -> None:
    document = portus_json("export", "net", "out")
    assert os.listdir("out") == ["model.safetensors"]
    assert "weight" in safetensors.load_file("out/model.safetensors")
    assert document["exact"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["net", "out.txt", "--names", "model"], "ends in one of .safetensors, .pt"),
        (["net", "there.pt"], "--force"),
        (["net", "nowhere/out.pt"], "no such directory"),
        (["net", "out.safetensors", "--names", "lr"], "net@20 has no tensor of such a name"),
        (["net", "out.pt", "--strip", "model."], "--strip is for"),
        (["net", "out.pt", "--file", "other"], "there is no file 'other'"),
        (["nothing", "out.pt"], "there is no nothing"),
        ([".", "out"], "found a directory"),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_is_written(
    run: Run, arguments: list[str], message: str
) -> None:
    torch.save({"x": torch.zeros(1)}, "there.pt")
    data = Path("there.pt").read_bytes()
    before = sorted(os.listdir())
    said = portus("export", *arguments)
    assert said.code == 2, said
    assert message in said.err
    assert sorted(os.listdir()) == before
    assert Path("there.pt").read_bytes() == data


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "out"])
def test_damage_is_found_and_no_file_is_left(run: Run, name: str) -> None:
    run.damage(20, "weight")
    before = sorted(os.listdir())
    said = portus("export", "net", name)
    assert said.code == 1
    assert "net@20 was not exported" in said.err
    assert re.search("is damaged|not those that were saved", said.err)
    assert sorted(os.listdir()) == before
    assert portus("export", "net@10", name).code == 0


def test_a_file_that_is_there_stays_until_the_new_one_is_whole(run: Run) -> None:
    for name in ("out.safetensors", "out.pt"):
        portus("export", "net@10", name)
    before = [Path(name).read_bytes() for name in ("out.safetensors", "out.pt")]
    run.damage(20, "weight")
    for name, data in zip(("out.safetensors", "out.pt"), before, strict=True):
        assert portus("export", "net@20", name, "--force").code == 1
        assert Path(name).read_bytes() == data


# --- shelves ------------------------------------------------------------------------------------


def metadata(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    found: dict[str, str] = json.loads(raw[8 : 8 + length])["__metadata__"]
    return found


@pytest.fixture
def shelf(run: Run) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "half": np.arange(4096, dtype=np.float16).reshape(64, 64),
        "whole": np.arange(9000, dtype=np.int64),
        "true": np.ones((70, 80), np.bool_),
        "one": np.array(2.5, np.float32),
    }
    path = run.root / "shelf.portus"
    with Shelf(path) as shelf:
        shelf.a, shelf.t, shelf.n = arrays, torch.zeros(4), 5
        shelf.c = torch.arange(12.0).reshape(3, 4).t()
        shelf.odd = [np.full(3000, "abc"), np.arange(3000, dtype=">i8")]
        with shelf.transaction():
            shelf.a["half"][1], shelf.t[2] = 7, 8
    arrays["half"][1] = 7
    return path, arrays


Filled = tuple[Path, dict[str, np.ndarray[Any, Any]]]


def test_the_arrays_of_a_shelf_are_exported_as_they_were_committed_last(
    run: Run, shelf: Filled
) -> None:
    path, arrays = shelf
    out = run.root / "out.safetensors"
    said = portus("export", "shelf", out, "--pool", path)
    assert said.code == 0, said.err
    assert "left out 3 values" in said.err
    loaded = safetensors.load_file(out)
    assert loaded.keys() == {"t", "c", *(f"a.{name}" for name in arrays)}
    for name, array in arrays.items():
        assert np.array_equal(loaded[f"a.{name}"].numpy(), array)
    assert loaded["t"].tolist() == [0, 0, 8, 0]
    assert torch.equal(loaded["c"], torch.arange(12.0).reshape(3, 4).t())
    said_in_it = json.loads(metadata(out)["portus"])
    assert said_in_it["model"] == "shelf"
    assert metadata(out)["format"] == "pt"


def test_a_shelf_is_exported_as_a_torch_file_and_by_names(run: Run, shelf: Filled) -> None:
    path, arrays = shelf
    assert portus("export", "shelf", "out.pt", "--pool", path).code == 0
    loaded = torch.load("out.pt", weights_only=False)
    assert np.array_equal(loaded["a"]["half"], arrays["half"])
    chosen = ("--names", "a", "--strip", "a.")
    assert portus("export", "shelf", "a.safetensors", "--pool", path, *chosen).code == 0
    assert safetensors.load_file("a.safetensors").keys() == arrays.keys()
    for arguments, why in (
        (("out", *chosen), "has no files"),
        (("b.pt", *chosen), "--strip is for"),
        (("b.txt",), "ends in one of"),
        (("out.pt",), "--force"),
        (("b.safetensors", "--names", "n"), "no tensor of such a name"),
    ):
        said = portus("export", "shelf", *arguments, "--pool", path)
        assert (said.code, why in said.err) == (2, True), said


def test_the_newest_of_several_pool_files_is_meant(run: Run) -> None:
    with PoolCheckpointer(run.pool / "a.portus", "net") as trainer:
        trainer.save({"new": torch.ones(1)}, 5).wait()
    assert portus_json("export", "net", "out.safetensors")["step"] == 5


@pytest.mark.parametrize("out", ["no/such/x.pt", "no/such/x.safetensors", "no/such/x"])
def test_a_directory_for_out_that_is_missing_is_said(tmp_path: Path, out: str) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "stock.pt")
    said = portus("export", tmp_path / "stock.pt", tmp_path / out)
    assert (said.code, "there is no such directory" in said.err) == (2, True)
