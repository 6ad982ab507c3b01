"""``portus ls``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from portus.cli import words
from portus.companions.shelf import Shelf
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.unit.cli.scene import Run, portus, portus_json, state


def test_it_lists_models_steps_sizes_and_directories_of_pointers(run: Run) -> None:
    run.point(5)
    said = portus("ls")
    assert said.code == 0
    assert said.err == ""
    led, net, _ = said.out.split("\n\n")
    lines = net.splitlines()
    assert lines[0].startswith(f"{run.net}: 2 versions, file of ")
    assert lines[1].split() == ["MODEL", "STEP", "SAVED", "SIZE", "FILES", "DIRECTORY"]
    assert lines[2].split()[:2] == ["net", "10"]
    assert lines[3].split()[:2] == ["net", "20"]
    assert lines[3].endswith("KiB      1")
    assert "ago" in lines[3]
    assert led.splitlines()[2].endswith("1  ckpt")


def test_its_document_says_the_same(run: Run) -> None:
    run.point(5)
    led, net, other = portus_json("ls")["pools"]
    assert net["path"] == str(run.net)
    assert net["size"] == run.net.stat().st_size
    [model] = net["models"]
    assert model["name"] == "net"
    assert [each["step"] for each in model["versions"]] == [10, 20]
    for each in model["versions"]:
        [file] = each["files"]
        assert file["name"] == f"step-{each['step']:08d}.pt"
        assert file["size"] == each["size"]
        assert each["directory"] is None
    assert led["models"][0]["versions"][0]["directory"] == str(run.root / "ckpt")
    assert other["models"][0]["versions"][0]["step"] == 1


def test_a_shelf_has_no_files(run: Run) -> None:
    with Shelf(run.root / "shelf.portus") as shelf:
        shelf.a = torch.zeros(3)
    said = portus("ls", run.root / "shelf.portus")
    assert said.out.splitlines()[2].endswith("B")
    [version] = portus_json("ls", run.root / "shelf.portus")["pools"][0]["models"][0]["versions"]
    assert (version["files"], version["directory"]) == (None, None)


@pytest.mark.parametrize("how", ["argument", "option", "variable", "above", "file"])
def test_a_pool_is_found(run: Run, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    below = run.root / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below if how in ("above", "file") else "/")
    if how == "variable":
        monkeypatch.setenv("PORTUS_POOL", str(run.pool))
    ways: dict[str, list[str | Path]] = {
        "argument": [run.pool],
        "option": ["--pool", run.pool],
        "file": [run.net],
    }
    arguments = ways.get(how, [])
    assert len(portus_json("ls", *arguments)["pools"]) == (1 if how == "file" else 2)


def test_no_pool_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")  # nobody's pool is above
    said = portus("ls")
    assert said.code == 2
    assert said.out == ""
    assert "--pool PATH" in said.err
    assert len(said.err.splitlines()) == 1
    document = portus_json("ls", tmp_path / "nothing", code=2)
    assert document["error"]["kind"] == "UsageError"
    assert document["error"]["exit_code"] == 2


def test_a_place_where_nothing_was_saved_yet_is_said_to_have_no_pools_yet(tmp_path: Path) -> None:
    said = portus("ls", tmp_path)
    assert (said.code, said.out) == (0, f"{tmp_path}: no pools yet; the first save makes one\n")


def test_a_damaged_pool_does_not_hide_the_others(run: Run) -> None:
    run.net.write_bytes(b"x" * 40_000)
    said = portus("ls")
    assert said.code == 1
    assert "is not a Portus pool" in said.err
    assert "other" in said.out
    document = portus_json("ls", code=1)
    assert [sorted(pool) for pool in document["pools"]] == [
        [
            *("failure", "free", "kept", "models", "on_disk", "path"),
            *("reclaimable", "size", "uuid"),
        ],
        ["error", "path"],
    ]


def test_old_versions_are_left_out_unless_all_are_asked_for(run: Run) -> None:
    with run.trainer() as trainer:
        for step in range(30, 45):
            trainer.save({"x": torch.zeros(1)}, step).wait()
    said = portus("ls", run.net)
    assert "7 older: --all" in said.out
    assert len(portus("ls", run.net, "--all").out.splitlines()) == 2 + 17
    assert len(portus_json("ls", run.net)["pools"][0]["models"][0]["versions"]) == 17


def test_it_works_while_a_trainer_writes(run: Run) -> None:
    with run.trainer() as trainer:
        handle = trainer.save(run.states[20], 30)
        assert portus("ls").code == 0
        handle.wait()
        assert [v["step"] for v in portus_json("ls")["pools"][0]["models"][0]["versions"]] == [
            10,
            20,
            30,
        ]


def test_odd_names_are_shown_as_they_are(run: Run) -> None:
    with PoolCheckpointer(run.pool / "b.portus", "[bold]a/b c[/] ä") as trainer:
        trainer.save([1], 5).wait()
    assert "[bold]a/b c[/] ä" in portus("ls").out
    assert portus("show", "[bold]a/b c[/] ä@5").code == 0


@pytest.mark.parametrize("why", ["no space", "poisoned"])
def test_it_tells_which_save_failed_last_and_why(run: Run, why: str) -> None:
    assert portus_json("ls", run.net)["pools"][0]["failure"] is None
    with PoolCheckpointer(run.net, "net", keep=None, max_bytes=8 << 20, on_error="warn") as trainer:
        trainer.save(state(30), 30).wait()
        if why == "poisoned":
            medium = trainer._steps.pool.open().medium
            medium._poison = "the disk\nis gone"  # type: ignore[attr-defined]
            trainer.save(state(40), 40)
        else:
            trainer.save({"x": torch.zeros(4 << 20)}, 40)
    with run.trainer():  # who opens it says so beside it
        said = portus("ls", run.net).out
    [line] = [each for each in said.splitlines() if each.startswith("the last save that failed")]
    assert line.startswith("the last save that failed: net@40 at 20")
    assert ("more bytes needed" if why == "no space" else "the disk is gone") in line
    assert portus_json("ls", run.net)["pools"][0]["failure"] in line


def test_it_tells_what_is_kept_what_gc_gives_back_and_what_saves_can_use(run: Run) -> None:
    size = 1 << 20
    with run.trainer() as trainer:
        for step in range(30, 34):
            trainer.save({"x": torch.full((size // 4,), float(step))}, step).wait()
    before = portus_json("ls", run.net)["pools"][0]  # a pool that is open may grow meanwhile
    assert 4 * size < before["kept"] < 5 * size
    assert before["kept"] + before["free"] == before["size"]
    assert before["reclaimable"] == before["on_disk"] - before["kept"]
    run.net.write_bytes(run.net.read_bytes())  # a copy has no holes
    between = portus_json("ls", run.net)["pools"][0]
    assert f"reclaimable {words.size(between['reclaimable'])}" in portus("ls", run.net).out
    [collected] = portus_json("gc", run.net)["pools"]
    assert 0 < collected["freed"] <= between["reclaimable"]
    assert between["reclaimable"] - collected["freed"] < 256 << 10, "room for records stays"
    after = portus_json("ls", run.net)["pools"][0]
    assert after["reclaimable"] < 256 << 10
