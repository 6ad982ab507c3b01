"""``portus show``."""

from __future__ import annotations

import pytest
import torch

from portus.companions.shelf import Shelf
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.training.safetensors import Safetensors
from tests.unit.cli.scene import Run, pointing, portus, portus_json


def test_a_model_shows_its_versions(run: Run) -> None:
    said = portus("show", "net")
    assert said.code == 0
    assert said.out.splitlines()[0] == f"net in {run.net}"
    assert [line.split()[0] for line in said.out.splitlines()[2:]] == ["10", "20"]
    document = portus_json("show", "net")
    assert [each["step"] for each in document["versions"]] == [10, 20]
    [path] = run.point(5)
    assert portus("show", "led").out.splitlines()[2].endswith(str(path.parent))
    assert portus_json("show", "led")["versions"][0]["directory"] == str(path.parent)


def test_a_version_shows_what_is_in_its_file(run: Run) -> None:
    [version] = portus_json("show", "net@20")["versions"]
    [file] = version["files"]
    assert file["name"] == "step-00000020.pt"
    assert file["size"] == version["size"]
    tensors = {each["name"]: each for each in file["tensors"]}
    for name, tensor in run.states[20]["model"].items():
        shown = tensors[f"model.{name}"]
        assert shown["shape"] == list(tensor.shape)
        assert f"torch.{shown['dtype']}" == str(tensor.dtype)
        assert shown["size"] == tensor.numel() * tensor.element_size()
    assert file["others"] == {"epoch": "20", "text": "'x'", "lr": "[0.1, 0.2]"}
    assert 0 < version["shared"] < version["size"]
    said = portus("show", "net@20")
    assert "step-00000020.pt: 7.9 KiB" in said.out
    assert "model.tied" in said.out


def test_the_tensors_of_a_version_are_not_read(run: Run) -> None:
    run.damage(20, "weight")
    assert portus("show", "net@20").code == 0
    assert portus("verify", "net@20").code == 1


def test_each_file_of_a_version_is_shown(run: Run) -> None:
    directory = str(run.root / "ckpt" / "checkpoint-7")
    tensors = {"layer.weight": torch.ones(3, 4)}
    with pointing(run.led, "led") as files:
        files.save_directory(
            directory, {"optimizer.pt": {"lr": 1}, "m.safetensors": Safetensors(tensors)}, 7
        ).wait()
    [version] = portus_json("show", "led@7")["versions"]
    assert version["directory"] == directory
    found = {each["name"]: each for each in version["files"]}
    assert found["optimizer.pt"]["others"] == {"lr": "1"}
    [tensor] = found["m.safetensors"]["tensors"]
    assert tensor == {"name": "layer.weight", "dtype": "float32", "shape": [3, 4], "size": 48}
    said = portus("show", "led@7").out
    assert f"at      {directory}" in said
    assert "layer.weight  float32  [3, 4]" in said


def test_a_shelf_shows_every_leaf(run: Run) -> None:
    path = run.root / "shelf.portus"
    with Shelf(path) as shelf:
        shelf.t, shelf.n = torch.arange(12.0).reshape(3, 4), 5
    [version] = portus_json("show", "shelf@0", "--pool", path)["versions"]
    [tensor] = version["tensors"]
    assert tensor == {"name": "t", "dtype": "float32", "shape": [3, 4], "size": 48}
    assert version["others"] == {"n": "5"}
    assert "float32" in portus("show", "shelf@0", "--pool", path).out


def test_bytes_shared_with_older_versions_are_said(run: Run) -> None:
    with run.trainer() as trainer:
        for step in (30, 40, 50):
            trainer.save(run.states[20], step).wait()
    [version] = portus_json("show", "net@50")["versions"]
    assert 4000 < version["shared"] < version["size"], "all tensors, and not the pickle"
    assert "shared with older versions" in portus("show", "net@50").out


def test_two_versions_of_one_step_are_told_apart_by_their_ids(run: Run) -> None:
    run.point(20, directory="a")
    run.point(20, directory="b")
    lines = portus("show", "led").out.splitlines()
    assert lines[1].split()[:3] == ["STEP", "ID", "COMMIT"]
    twice = [line.split()[1] for line in lines[2:] if line.split()[0] == "20"]
    assert len(set(twice)) == 2
    ids = [each["id"] for each in portus_json("show", "led")["versions"]]
    assert twice == list(map(str, ids))
    versions = portus_json("show", "led@20")["versions"]
    assert [each["id"] for each in versions] == ids


def test_what_is_unique_to_a_version_is_what_removing_it_frees(run: Run) -> None:
    with run.trainer() as trainer:
        trainer.save({"frozen": torch.zeros(1 << 20), "own": torch.ones(1 << 18)}, 30).wait()
        trainer.save(
            {"frozen": torch.zeros(1 << 20), "own": torch.full((1 << 18,), 2.0)}, 40
        ).wait()
    versions = {each["step"]: each for each in portus_json("show", "net")["versions"]}
    assert 1 << 20 <= versions[40]["unique"] < (1 << 20) + (1 << 16) < versions[40]["size"]
    kept = portus_json("ls", run.net)["pools"][0]["kept"]
    [shown] = portus_json("show", "net@40")["versions"]
    assert shown["unique"] == versions[40]["unique"]
    assert "unique  1.0 MiB, which no other version has" in portus("show", "net@40").out
    assert portus("rm", "net@40").code == 0
    freed = kept - portus_json("ls", run.net)["pools"][0]["kept"]
    assert abs(freed - shown["unique"]) <= 1 << 16, "but for the records of the commit"


def test_a_pointer_shows_what_it_leads_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = run.point(5)
    [version] = portus_json("show", "led@5")["versions"]
    monkeypatch.chdir("/")
    by_path = portus_json("show", path)
    assert by_path["tensors"] == version["files"][0]["tensors"]
    assert by_path["step"] == 5
    assert by_path["leads_to"] == f"led@5 in {run.led}"
    assert f"points to led@5 in {run.led}" in portus("show", path).out
    assert "points to led@5" in portus("ls", path.parent).out


def test_a_pointer_in_place_of_a_pool_is_said_to_be_one(run: Run) -> None:
    [path] = run.point(5)
    for arguments in (("gc", path), ("show", "led", "--pool", path)):
        said = portus(*arguments)
        assert said.code == 2
        assert "is a pointer to a checkpoint" in said.err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "it holds the models 'net', 'other'"),
        ("net@30", "model 'net' has steps 10, 20"),
        ("net@x", "model 'net' has steps 10, 20"),
        ("@", "it holds the models"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_is(
    run: Run, target: str, message: str
) -> None:
    said = portus("show", target)
    assert said.code == 2
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_a_model_whose_name_has_a_step_in_it_is_found(run: Run) -> None:
    with PoolCheckpointer(run.pool / "a@5.portus", "a@5") as trainer:
        trainer.save([1], 7).wait()
    assert [v["step"] for v in portus_json("show", "a@5")["versions"]] == [7]
    assert [v["step"] for v in portus_json("show", "a@5@7")["versions"]] == [7]


def test_what_is_in_a_pool_that_cannot_be_read_is_not_said_to_be_missing(run: Run) -> None:
    run.net.write_bytes(b"x" * 40_000)
    said = portus("show", "net")
    assert said.code == 1
    assert "is not a Portus pool" in said.err
    assert portus("show", "other").code == 0


def test_a_damaged_table_is_one_line_and_exit_code_1(run: Run) -> None:
    data = run.net.read_bytes()
    run.net.write_bytes(data.replace(b'"name":"step-00000020.pt"', b'"name":"step-00000021.pt"'))
    for arguments in (("show", "net@20"), ("show", "net"), ("export", "net@20", "out.pt")):
        said = portus(*arguments)
        assert said.code == 1
        assert "version record" in said.err
        assert len(said.err.splitlines()) == 1
    said = portus("ls", run.net)
    assert said.code == 0
    assert "version record" in said.err


def test_values_of_odd_kinds_are_shown(run: Run) -> None:
    state = {"a": float("nan"), "b": b"xyz", "c": {1: "one"}, "d": (), "e": 1 << 80}
    with PoolCheckpointer(run.pool / "odd.portus", "odd") as trainer:
        trainer.save(state, 1).wait()
    [version] = portus_json("show", "odd@1")["versions"]
    others = version["files"][0]["others"]
    assert others == {"a": "nan", "b": "bytes", "c.1": "'one'", "d": "()", "e": str(1 << 80)}
