"""``portus show``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from portus.client.paths.pooled import PoolCheckpointer
from tests.unit.cli.scene import Run, portus, portus_json


def test_a_model_shows_its_versions(run: Run) -> None:
    said = portus("show", "net")
    assert said.code == 0
    assert said.out.splitlines()[0] == f"net in {run.net}"
    assert [line.split()[0] for line in said.out.splitlines()[2:]] == ["10", "20"]
    document = portus_json("show", "net")
    assert [each["step"] for each in document["versions"]] == [10, 20]
    assert document["versions"][1]["references"][0]["path"] == str(run.last)


def test_a_version_shows_every_leaf(run: Run) -> None:
    [version] = portus_json("show", "net@20")["versions"]
    tensors = {each["name"]: each for each in version["tensors"]}
    for name, tensor in run.states[20]["model"].items():
        shown = tensors[f"model.{name}"]
        assert shown["shape"] == list(tensor.shape)
        assert f"torch.{shown['dtype']}" == str(tensor.dtype)
        assert shown["strides"] == list(tensor.stride())
        assert shown["size"] == tensor.numel() * tensor.element_size()
    assert {each["name"]: each["value"] for each in version["leaves"]} == {
        "epoch": 20,
        "text": "x",
        "lr": [0.1, 0.2],
    }
    assert 0 < version["shared"] < version["size"], "all but the weights is as in step 10"
    said = portus("show", "net@20")
    assert "model.tied" in said.out
    assert "shares memory with model.weight" in said.out
    assert "held by last.ckpt" in said.out


def test_bytes_shared_with_older_versions_are_said(run: Run) -> None:
    with run.trainer() as trainer:
        for step in (30, 40, 50):
            trainer.save(run.states[20], step).wait()
    [version] = portus_json("show", "net@50")["versions"]
    assert version["shared"] == version["size"] > 0
    assert "shared with older versions" in portus("show", "net@50").out


def test_two_versions_of_one_step_are_told_apart_by_their_ids(run: Run) -> None:
    with run.trainer() as trainer:
        trainer.save({"again": torch.zeros(1)}, 20).wait()
    lines = portus("show", "net").out.splitlines()
    assert lines[1].split()[:3] == ["STEP", "ID", "COMMIT"]
    twice = [line.split()[1] for line in lines[2:] if line.split()[0] == "20"]
    assert len(set(twice)) == 2
    ids = [each["id"] for each in portus_json("show", "net")["versions"] if each["step"] == 20]
    assert twice == list(map(str, ids))


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


def test_a_step_that_came_twice_shows_both(run: Run) -> None:
    with run.trainer() as trainer:
        trainer.save({"again": torch.zeros(1)}, 20).wait()
    versions = portus_json("show", "net@20")["versions"]
    assert [v["tensors"][0]["name"] for v in versions] == [
        "model.weight",
        "again",
    ]


def test_a_reference_file_shows_its_version(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    [by_step] = portus_json("show", "net@20")["versions"]
    monkeypatch.chdir("/")
    [by_path] = portus_json("show", run.last)["versions"]
    assert by_path == by_step


def test_a_reference_file_that_is_not_near_its_pool_shows_its_version(tmp_path: Path) -> None:
    with PoolCheckpointer(tmp_path / "pools", "far") as checkpointer:
        checkpointer.save({"a": 1}, 3, reference=tmp_path / "3.ckpt").wait()
    [version] = portus_json("show", tmp_path / "3.ckpt")["versions"]
    assert (version["model"], version["step"]) == ("far", 3)
    with PoolCheckpointer(tmp_path / ".portus", "near") as checkpointer:
        checkpointer.save({"a": 1}, 3).wait()
    [version] = portus_json("show", tmp_path / "3.ckpt")["versions"]
    assert version["model"] == "far", "a pool of something else above it hides nothing"
    said = portus("show", tmp_path / "3.ckpt", "--pool", tmp_path / ".portus")
    assert "leads to step 3 of model 'far', which is not in" in said.err


@pytest.mark.parametrize("command", ["ls", "gc", "scrub"])
def test_a_reference_file_in_place_of_a_pool_is_said_to_be_one(run: Run, command: str) -> None:
    said = portus(command, run.last)
    assert said.code == 2
    assert "is a reference file" in said.err


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


def test_a_damaged_tree_is_one_line_and_exit_code_1(run: Run) -> None:
    data = run.net.read_bytes()
    run.net.write_bytes(data.replace(b'"text":"x"', b'"text":"y"'))
    said = portus("show", "net@20")
    assert said.code == 1
    assert "tree record" in said.err
    assert len(said.err.splitlines()) == 1


def test_values_of_odd_kinds_are_shown(run: Run) -> None:
    state = {"a": float("nan"), "b": b"xyz", "c": {1: "one"}, "d": (), "e": 1 << 80}
    with PoolCheckpointer(run.pool / "odd.portus", "odd") as trainer:
        trainer.save(state, 1).wait()
    lines = [line.split() for line in portus("show", "odd@1").out.splitlines()]
    shown = {line[0]: line[1] for line in lines if line and line[0] in {"a", "b", "c.1", "d", "e"}}
    assert shown == {"a": "float", "b": "bytes", "c.1": "str", "d": "list", "e": "int"}
