"""``portus export``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portus.cli.output import size_text
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.format.checksum import UNIT
from portus.image.safetensors import DTYPES
from portus.shelf import Shelf
from tests.golden.make import scattered
from tests.unit.cli.scene import Run, portus, portus_json

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def metadata(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    found: dict[str, str] = json.loads(raw[8 : 8 + length])["__metadata__"]
    return found


def saved(run: Run, state: Any, model: str = "x") -> None:
    with PoolCheckpointer(run.pool, model, on_error="raise") as trainer:
        trainer.save(state, 1).wait()


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
    assert "left out 3 values" in said.err
    assert "epoch, text, lr" in said.err


def test_a_safetensors_file_says_where_it_is_from(run: Run) -> None:
    out = run.root / "out.safetensors"
    document = portus_json("export", "net", out)
    assert metadata(out)["format"] == "pt"
    assert json.loads(metadata(out)["portus"]) == {
        "model": "net",
        "step": 20,
        "token": document["token"],
    }
    assert document["out"] == str(out)
    assert document["size"] == out.stat().st_size
    assert document["tensors"] == 10
    assert document["left_out"] == ["epoch", "text", "lr"]
    assert document["shared"] == [["model.weight", "model.tied", "model.columns", "model.row"]]


def test_a_torch_file_is_what_torch_save_makes_of_the_loaded_state(run: Run) -> None:
    out = run.root / "out.pt"
    said = portus("export", "net@10", out)
    assert said.code == 0
    loaded = torch.load(out, weights_only=True)
    assert loaded["epoch"] == 10
    assert loaded["lr"] == [0.1, 0.2]
    assert loaded["model"]["tied"].data_ptr() == loaded["model"]["weight"].data_ptr()
    for name, tensor in run.states[10]["model"].items():
        assert torch.equal(loaded["model"][name], tensor)


def test_names_choose_and_strip_shortens(run: Run) -> None:
    out = run.root / "out.safetensors"
    arguments: list[str | Path] = [
        "export",
        "net",
        out,
        "-n",
        "model.[wt]*",
        "-n",
        "model.half",
        "--strip",
        "model.",
    ]
    portus_json(*arguments)
    assert sorted(safetensors.load_file(out)) == ["half", "tied", "weight"]
    portus_json("export", "net", run.root / "part.pt", "--names", "model.half")
    assert list(torch.load(run.root / "part.pt")["model"]) == ["half"]
    portus_json("export", "net", out, "-f", "-n", "model")
    assert len(safetensors.load_file(out)) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["net", "out.bin"], "ends in one of .safetensors, .pt"),
        (["net", "there.pt"], "--force"),
        (["net", "nowhere/out.pt"], "no such directory"),
        (["net", "out.safetensors", "--names", "lr"], "no tensor of such a name"),
        (["net", "out.pt", "--strip", "model."], "--strip is for"),
        (["nothing", "out.pt"], "there is no nothing"),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_is_written(
    run: Run, arguments: list[str], message: str
) -> None:
    Path("there.pt").write_bytes(b"old")
    before = sorted(os.listdir())
    said = portus("export", *arguments)
    assert said.code == 2
    assert message in said.err
    assert sorted(os.listdir()) == before
    assert Path("there.pt").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_damage_is_found_and_no_file_is_left(run: Run, name: str) -> None:
    run.damage(20, "model.weight")
    before = sorted(os.listdir())
    said = portus("export", "net", name)
    assert said.code == 1
    assert "net@20" in said.err
    assert re.search("model.(weight|columns)", said.err)
    assert sorted(os.listdir()) == before
    assert portus("export", "net@10", name).code == 0


def test_a_file_that_is_there_stays_until_the_new_one_is_whole(run: Run) -> None:
    out = run.root / "out.safetensors"
    portus("export", "net@10", out)
    before = out.read_bytes()
    run.damage(20, "model.weight")
    assert portus("export", "net@20", out, "--force").code == 1
    assert out.read_bytes() == before


@pytest.mark.long
def test_tensors_of_many_units_and_extents_come_back(run: Run) -> None:
    big = torch.arange(3 * UNIT // 8 + 1001)
    middle = big[1000 : 2 * UNIT // 8 + 5]
    turned = big[: 2 * UNIT // 8].view(2, -1).t()
    saved(run, {"big": big, "middle": middle, "turned": turned, "i": torch.arange(5).int()})
    out = run.root / "out.safetensors"
    assert portus("export", "x", out).code == 0
    loaded = safetensors.load_file(out)
    assert torch.equal(loaded["big"], big)
    assert torch.equal(loaded["middle"], middle)
    assert torch.equal(loaded["turned"], turned)


def test_a_storage_in_many_extents_comes_back(run: Run) -> None:
    with PoolCheckpointer(run.pool, "x", keep=None) as trainer:
        trainer.save({"x": torch.zeros(100_000)}, 1).wait()
        with scattered(trainer.path):
            trainer.save({"x": torch.arange(100_000.0)}, 2).wait()
    out = run.root / "out.safetensors"
    assert portus("export", "x@2", out).code == 0
    assert torch.equal(safetensors.load_file(out)["x"], torch.arange(100_000.0))


def test_the_arrays_of_a_shelf_are_exported_as_they_were_committed_last(run: Run) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "half": np.arange(4096, dtype=np.float16).reshape(64, 64),
        "whole": np.arange(9000, dtype=np.int64),
        "true": np.ones((70, 80), np.bool_),
        "one": np.array(2.5, np.float32),
    }
    with Shelf(run.root / "shelf.portus") as shelf:
        shelf.a, shelf.t, shelf.n = arrays, torch.zeros(4), 5
        shelf.odd = [np.full(3000, "abc"), np.arange(3000, dtype=">i8")]
        with shelf.transaction():
            shelf.a["half"][1], shelf.t[2] = 7, 8
    out = run.root / "out.safetensors"
    said = portus("export", "shelf", out, "--pool", run.root / "shelf.portus")
    assert said.code == 0, said.err
    assert "left out 3 values" in said.err
    loaded = safetensors.load_file(out)
    arrays["half"][1] = 7
    assert loaded.keys() == {"t", *(f"a.{name}" for name in arrays)}
    for name, array in arrays.items():
        assert np.array_equal(loaded[f"a.{name}"].numpy(), array)
    assert loaded["t"].tolist() == [0, 0, 8, 0]


def test_every_tensor_is_aligned_in_the_file(run: Run) -> None:
    saved(run, {"a": torch.ones(1).bool(), "b": torch.ones(3).half(), "c": torch.ones(1).double()})
    out = run.root / "out.safetensors"
    assert portus("export", "x", out).code == 0
    raw = out.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + length])
    starts = {name: 8 + length + head[name]["data_offsets"][0] for name in "abc"}
    assert starts["b"] % 2 == 0
    assert starts["c"] % 8 == 0


def test_lazy_bits_are_carried_out(run: Run) -> None:
    values = torch.tensor([1 + 2j, -3 - 4j])
    saved(run, {"c": values.conj(), "n": values.conj().imag})
    out = run.root / "out.safetensors"
    assert portus("export", "x", out).code == 0
    loaded = safetensors.load_file(out)
    assert torch.equal(loaded["c"], values.conj().resolve_conj())
    assert torch.equal(loaded["n"], values.conj().imag.resolve_neg())


def test_every_dtype_of_safetensors_comes_back(run: Run) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    state = {
        name: (raw % 2 if name == "bool" else raw).view(getattr(torch, name)).reshape(2, -1).t()
        for name in DTYPES
        if hasattr(torch, name) and name != "float8_e8m0fnu"
    }
    saved(run, state)
    out = run.root / "out.safetensors"
    assert portus("export", "x", out).code == 0
    loaded = safetensors.load_file(out)
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_dtypes_that_safetensors_has_not_are_refused(run: Run) -> None:
    saved(run, {"a": torch.zeros(2), "z": torch.zeros(2, dtype=torch.complex128)})
    said = portus("export", "x", "out.safetensors")
    assert said.code == 2
    assert "z is complex128" in said.err
    assert portus("export", "x", "out.safetensors", "--names", "a").code == 0


def test_arrays_bytes_and_meta_tensors_are_left_out(run: Run) -> None:
    saved(
        run,
        {
            "t": torch.zeros(2),
            "array": torch.zeros(4000).numpy(),
            "bytes": bytes(9000),
            "meta": torch.empty(2, device="meta"),
        },
    )
    document = portus_json("export", "x", "out.safetensors")
    assert document["left_out"] == ["array", "bytes", "meta"]
    assert list(safetensors.load_file("out.safetensors")) == ["t"]


def test_names_that_meet_after_stripping_are_refused(run: Run) -> None:
    saved(run, {"a.x": torch.zeros(1), "x": torch.zeros(1)})
    said = portus("export", "x", "out.safetensors", "--strip", "a.")
    assert said.code == 2
    assert "would be called x" in said.err


def test_no_room_is_said_before_anything_is_written(run: Run) -> None:
    saved(run, {"a": torch.zeros(1).expand(1 << 30, 1 << 20)})
    said = portus("export", "x", "out.safetensors")
    assert said.code == 74
    assert size_text(1 << 52) in said.err
    assert not Path("out.safetensors").exists()


def test_the_newest_of_several_pool_files_is_meant(run: Run) -> None:
    with PoolCheckpointer(run.pool / "a.portus", "net") as trainer:
        trainer.save({"new": torch.ones(1)}, 5).wait()
    assert portus_json("export", "net", "out.safetensors")["step"] == 5


def test_the_version_of_a_reference_file_is_exported(run: Run) -> None:
    assert portus_json("export", run.last, "out.safetensors")["step"] == 20
