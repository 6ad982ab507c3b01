"""``portus gc``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from portus.cli.output import size_text
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.index.directory import on_disk, open_reader
from tests.unit.cli.scene import Run, portus, portus_json


def steps(run: Run) -> list[int]:
    models = portus_json("ls", run.net)["pools"][0]["models"]
    return [each["step"] for model in models for each in model["versions"]]


def unlinked(run: Run) -> None:
    """As where no hard link can be made: the links directory holds a copy."""
    links = run.pool / "net.references"
    [name] = os.listdir(links)
    data = run.last.read_bytes()
    os.unlink(links / name)
    (links / f"{name}.copy").write_bytes(data)


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_versions_whose_reference_files_were_deleted_are_let_go_of(run: Run) -> None:
    run.last.unlink()
    said = portus("gc")
    assert said.code == 0
    assert "net@20 deleted" in said.out
    assert steps(run) == [10]
    assert os.listdir(run.pool / "net.references") == []
    assert portus("gc").out.count("nothing to do") == 2


def test_what_has_a_reference_or_never_had_one_stays(run: Run) -> None:
    os.rename(run.last, run.root / "moved.ckpt")
    document = portus_json("gc", "--missing")
    assert [pool["retired"] for pool in document["pools"]] == [[], []]
    assert steps(run) == [10, 20]


def test_a_dry_run_says_the_same_and_changes_nothing(run: Run) -> None:
    run.last.unlink()
    before = contents(run.root)
    document = portus_json("gc", "--dry-run", "--empty")
    assert document["dry_run"] is True
    assert [each["step"] for each in document["pools"][0]["retired"]] == [20]
    assert [pool["removed"] for pool in document["pools"]] == [False, False]
    assert contents(run.root) == before


def test_a_dry_run_works_while_a_trainer_writes_and_gc_does_not(run: Run) -> None:
    run.last.unlink()
    with run.trainer():
        assert portus("gc", "--dry-run").code == 0
    assert steps(run) == [10, 20]


def test_what_may_have_been_moved_is_let_go_of_only_when_said(run: Run) -> None:
    unlinked(run)
    assert steps(run) == [10, 20]
    run.last.unlink()
    assert "last.ckpt (missing)" in portus("ls").out
    assert portus("gc").code == 0
    assert steps(run) == [10, 20]
    assert [each["step"] for each in portus_json("gc", "--missing")["pools"][0]["retired"]] == [20]
    assert steps(run) == [10]
    assert os.listdir(run.pool / "net.references") == []


def test_a_version_that_another_reference_holds_stays(run: Run) -> None:
    with run.trainer() as trainer:
        keeper = trainer._pool.open_or_create()[1]
        keeper.place(str(run.root / "b.ckpt"), trainer.versions()[-1].token, 20, "net")
    run.last.unlink()
    assert portus_json("gc")["pools"][0]["retired"] == []
    (run.root / "b.ckpt").unlink()
    assert len(portus_json("gc")["pools"][0]["retired"]) == 1


def test_empty_pool_files_are_removed_only_when_said(run: Run) -> None:
    run.last.unlink()
    assert portus("rm", "net", "--yes").code == 0
    assert portus("gc").code == 0
    assert run.net.exists()
    assert portus_json("gc", "--empty")["pools"][0]["removed"] is True
    assert not run.net.exists()
    assert not (run.pool / "net.references").exists()
    assert (run.pool / "other.portus").exists()


def test_one_pool_that_cannot_be_collected_does_not_stop_the_others(run: Run) -> None:
    run.last.unlink()
    (run.pool / "a.portus").write_bytes(b"x" * 40_000)
    said = portus("gc")
    assert said.code == 1
    assert "is not a Portus pool" in said.err
    assert steps(run) == [10]


def test_it_gives_space_back_to_the_file_system_and_none_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = 4 << 20
    path = tmp_path / ".portus" / "default.portus"
    with PoolCheckpointer(keep=None) as run:
        for step in range(1, 7):
            run.save({"x": torch.full((size // 4,), float(step))}, step).wait()
    with contextlib.closing(open_reader(str(path))) as reader:
        [first, *_] = reader.catalogue().entries()
        with reader.pinned(first.info.id):
            for step in (2, 3, 4, 1):
                assert portus("rm", f"default@{step}", "--force").code == 0
            [place] = reader.record(first).storage_extents(0)
            data = bytearray(place.length)
            reader.medium.load(place.offset, memoryview(data))
            assert data == torch.ones(size // 4).numpy().tobytes()
            before = on_disk(str(path))
            assert 3 * size <= before < 4 * size
    [document] = portus_json("gc")["pools"]
    assert document["freed"] == before - on_disk(str(path)) >= size
    assert portus_json("ls")["pools"][0]["on_disk"] == on_disk(str(path))
    assert portus("verify").code == 0
    with PoolCheckpointer(keep=None) as run:
        assert run.steps() == [5, 6]
        for step in range(7, 10):  # where there are holes
            run.save({"x": torch.full((size // 4,), float(step))}, step).wait()
    assert portus("verify").code == 0


def test_a_dry_run_tells_about_how_much_space_would_be_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = 1 << 20
    with PoolCheckpointer(keep=2) as run:
        for step in range(5):
            file = tmp_path / "last.ckpt" if step == 4 else None
            state = {"x": torch.full((size // 4,), float(step))}
            run.save(state, step, reference=file).wait()
    assert "nothing to do" in portus("gc", "--dry-run").out
    path = tmp_path / ".portus" / "default.portus"
    path.write_bytes(path.read_bytes())  # a copy has no holes
    (tmp_path / "last.ckpt").unlink()
    taken = on_disk(str(path))
    dry = portus("gc", "--dry-run").out
    assert "default@4 would be deleted" in dry
    assert " MiB would be returned to the file system" in dry
    [would] = portus_json("gc", "--dry-run")["pools"]
    assert on_disk(str(path)) == taken
    [did] = portus_json("gc")["pools"]
    assert did["freed"] > 2 * size
    assert abs(would["freed"] - did["freed"]) < 100_000
    assert "nothing to do" in portus("gc", "--dry-run").out
    path.write_bytes(path.read_bytes())
    [would] = portus_json("gc", "--dry-run")["pools"]
    assert would["freed"] > size
    assert f"about {size_text(would['freed'])} would be returned" in portus("gc", "--dry-run").out


def test_the_end_of_a_run_gives_space_back(tmp_path: Path) -> None:
    size = 4 << 20
    with PoolCheckpointer(tmp_path / "pool", keep=1) as run:
        for step in range(5):
            run.save({"x": torch.full((size // 4,), float(step))}, step).wait()
        run.wait()
        path = run.path
        assert on_disk(path) > 2 * size
    assert on_disk(path) < size + (1 << 20)
    with PoolCheckpointer(tmp_path / "pool", keep=1) as run:
        loaded = run.load()
    assert isinstance(loaded, dict)
    assert torch.equal(loaded["x"], torch.full((size // 4,), 4.0))


def test_a_pool_that_is_emptied_and_removed_at_once_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with PoolCheckpointer(model="run") as run:
        for step in (1, 2):
            run.save({"x": torch.zeros(4)}, step, reference=tmp_path / f"{step}.ckpt").wait()
    for step in (1, 2):
        (tmp_path / f"{step}.ckpt").unlink()
    said = portus("gc", "--empty")
    assert said.code == 0, said.err
    assert "empty, removed" in said.out
    assert not (tmp_path / ".portus").exists()
