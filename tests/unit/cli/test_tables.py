"""The command line on pools with protected tables: strict, relaxed, and in place."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import portus as library
from portus.cli.output import BUSY, USAGE
from portus.embedding import protect
from portus.engine.spec import PAGE
from tests.crash.embedded import same
from tests.unit.cli.scene import portus, portus_json

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

GOLDEN = Path(__file__).parents[2] / "golden" / "format-1-in-place.portus.gz"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(40, 4, sparse=True)
        self.top = torch.nn.Linear(4, 1)


def train(path: Path, batches: int, **settings: Any) -> None:
    """Train, with a mark after the second batch."""
    model = Model()
    both = [torch.optim.Adagrad([model.table.weight]), torch.optim.SGD(model.top.parameters(), 1.0)]
    with protect(model, both, pool=path, log_bytes=64 * PAGE, **settings) as tables:
        for number in range(batches):
            for each in both:
                each.zero_grad()
            model.top(model.table(torch.tensor([number]))).sum().backward()
            for each in both:
                each.step()
            if number == 1:
                model.state_dict()
            tables.wait()


@pytest.fixture(params=["strict", "relaxed", "in place"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, int]]:
    """A pool, and up to which batch each part of it is. In place, with a batch to be undone."""
    path = tmp_path / "tables.portus"
    if request.param == "in place":
        path.write_bytes(gzip.decompress(GOLDEN.read_bytes()))
        return path, {"tables": 6, "dense part": 6}
    settings = {"mode": "relaxed", "gap": 5} if request.param == "relaxed" else {}
    train(path, 7, **settings)
    return path, {"tables": 7, "dense part": 5 if settings else 7}


Pool = tuple[Path, dict[str, int]]


def test_tables_are_listed_shown_and_verified(pool: Pool) -> None:
    path, batches = pool
    said = portus("ls", path)
    assert said.code == 0
    assert [line.split("  ")[0] for line in said.out.splitlines()[2:]] == [
        "embedding",
        "embedding marks",
    ]
    [listed] = portus_json("show", "embedding", "--pool", path)["versions"]
    target = f"embedding@{listed['step']}"
    [version] = portus_json("show", target, "--pool", path)["versions"]
    assert version["batches"] == batches
    said = portus("show", target, "--pool", path)
    wanted = ", ".join(f"{number} of the {name}" for name, number in batches.items())
    assert f"\nbatch   {wanted}\n" in said.out
    [mark] = portus_json("show", "embedding marks@2", "--pool", path)["versions"]
    assert mark["batches"]["tables"] == 2
    for command in (("verify", "--pool", path), ("verify", path, "--rate", "1G/s")):
        said = portus(*command)
        assert said.code == 0, said
        assert ": healthy; " in said.out


def test_tables_are_exported_as_they_are_loaded(pool: Pool, tmp_path: Path) -> None:
    path, batches = pool
    with library.open(path) as view:
        state: Any = view.load("embedding")
    files = [tmp_path / "tables.safetensors", tmp_path / "tables.pt"]
    chosen = ("--names", "model.*", "--strip", "model.")
    for said in (
        portus("export", "embedding", files[0], "--pool", path, *chosen),
        portus("export", "embedding", files[1], "--pool", path),
    ):
        assert said.code == 0
        note = "as relaxed mode leaves it: the tables at batch 7, the dense part at batch 5"
        assert (note in said.err) == (batches["tables"] != batches["dense part"])
    found: dict[str, torch.Tensor] = load_file(files[0])
    whole = torch.load(files[1], weights_only=True)
    assert found.keys() == whole["model"].keys() == state["model"].keys()
    for name, each in state["model"].items():
        assert torch.equal(found[name], each)
        assert torch.equal(whole["model"][name], each)


def test_tensors_of_every_layout_are_exported(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    kept = {
        "part": whole[3:9],
        "turned": whole.reshape(3, 4).t(),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
        "negative": torch._neg_view(torch.arange(3.0)),
        "expanded": torch.tensor([1.5]).expand(3, 4),
        "empty": torch.zeros(0, 3),
    }
    path, out = tmp_path / "tables.portus", tmp_path / "tables.safetensors"
    train(path, 2, extra=lambda: kept)
    chosen = ("--pool", path, "--names", "extra", "--strip", "extra.")
    said = portus("export", "embedding", out, *chosen)
    assert said.code == 0, said
    assert "extra.part, extra.turned" in said.err
    found: dict[str, torch.Tensor] = load_file(out)
    assert found.keys() == kept.keys()
    for name, each in kept.items():
        assert torch.equal(found[name], each), name
    assert "healthy by the checksums of Portus" in portus("verify", out).out


@pytest.mark.filterwarnings("ignore")
def test_what_torch_makes_of_bytes_alone_is_shown_exported_and_loaded_in_part(
    tmp_path: Path,
) -> None:
    kept = torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.qint8)
    path, out = tmp_path / "tables.portus", tmp_path / "tables.pt"
    train(path, 2, extra=lambda: kept)
    assert portus("show", "embedding@1", "--pool", path).code == 0
    assert portus("export", "embedding", out, "--pool", path).code == 0
    with library.open(path) as view:
        whole: Any = view.load("embedding")
        part: Any = view.load("embedding", names=["extra", "model.top.*"])
        target: Any = {"model": Model().state_dict()}
        view.restore_into(target, "embedding", names="model.*")
    for each in (whole, part, torch.load(out, weights_only=True)):
        assert torch.equal(each["extra"].dequantize(), torch.arange(3.0))
        assert torch.equal(each["model"]["top.bias"], whole["model"]["top.bias"])
    for name, each in whole["model"].items():
        assert torch.equal(target["model"][name], each)


def test_tables_outlive_the_collection_of_garbage_a_rescue_and_their_marks(
    pool: Pool, tmp_path: Path
) -> None:
    path, _ = pool
    into = tmp_path / "rescued.portus"

    def content(path: Path) -> object:
        with library.open(path) as view:
            return view.load("embedding")

    before = content(path)
    assert portus("gc", path).code == 0
    assert portus("rescue", path, "--into", into).code == 0
    assert same(content(into), before)
    assert same(content(path), before)
    for arguments in (("embedding marks@2",), ("embedding marks",)):
        said = portus("rm", *arguments, "--pool", path)
        assert said.code == USAGE
        assert "embedding marks@2: a checkpoint that was saved at batch 2" in said.err
    said = portus("rm", "embedding marks@2", "--force", "--pool", path)
    assert (said.code, said.out.splitlines()[0]) == (0, "removed embedding marks@2 (version 2)")
    assert same(content(path), before)
    assert portus("verify", "--pool", path).code == 0
    assert portus("rm", "embedding", "--pool", path).code == USAGE  # asks, and nobody answers
    assert portus("rm", "embedding", "--yes", "--pool", path).code == 0
    assert portus_json("ls", path)["pools"][0]["models"] == []
    assert portus("verify", "--pool", path).code == 0


def test_beside_a_training_tables_are_read_and_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tables.portus"
    monkeypatch.setattr("portus.reach.places.pool.WAIT_S", 0.0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with protect(model, optimizer, pool=path, log_bytes=64 * PAGE) as tables:
        for number in range(2):
            model.top(model.table(torch.tensor([number]))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tables.wait()
            shown = portus_json("show", "embedding@1", "--pool", path)["versions"][0]
            assert shown["batches"]["tables"] == number + 1
            assert portus("verify", "--pool", path).code == 0
            for command in (("gc", path), ("rm", "embedding@1", "--pool", path)):
                said = portus(*command)
                assert said.code == BUSY
                assert "another writer has held it" in said.err
    out = tmp_path / "tables.pt"
    assert portus("export", "embedding", out, "--pool", path).code == 0
    found = torch.load(out, weights_only=True)
    assert torch.equal(found["model"]["table.weight"], model.table.weight.detach())
