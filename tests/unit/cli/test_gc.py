"""``portus gc``."""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import shutil
from pathlib import Path

import pytest
import torch

from portus.engine.format import pointer_marks
from portus.engine.format.checksum import digest
from portus.engine.format.pointer_marks import POINTER_MAX
from portus.reach.format import reference
from portus.reach.index.directory import on_disk, open_reader
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.unit.cli.scene import Run, pointing, portus, portus_json, state


def steps(pool: Path) -> list[int]:
    models = portus_json("ls", pool)["pools"][0]["models"]
    return [each["step"] for model in models for each in model["versions"]]


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_versions_whose_pointers_were_deleted_go_when_somebody_says_so(run: Run) -> None:
    first, _ = run.point(1, 2)
    first.unlink()
    assert portus("gc", run.led).code == 0
    assert steps(run.led) == [1, 2]
    arguments: tuple[str | Path, ...] = ("gc", run.led, "--missing", first.parent)
    refused = portus(*arguments)
    assert refused.code == 2
    assert "led@1" in refused.out
    assert "use --yes" in refused.err
    assert steps(run.led) == [1, 2]
    [would] = portus_json(*arguments, "--dry-run")["pools"]
    assert [each["step"] for each in would["retired"]] == [1]
    assert steps(run.led) == [1, 2]
    said = portus(*arguments, "--yes")
    assert said.code == 0
    assert "1 version removed" in said.out
    assert steps(run.led) == [2]
    assert portus_json(*arguments)["pools"][0]["retired"] == []


def test_only_what_had_its_pointers_there_or_below_is_looked_at(run: Run) -> None:
    [a] = run.point(1, directory="runs/a")
    [b] = run.point(2, directory="runs/b")
    [c] = run.point(3, directory="other")
    for path in (a, b, c):
        path.unlink()
    (run.root / "link").symlink_to(run.root / "runs")

    def gone(*directories: Path) -> list[int]:
        options = [each for directory in directories for each in ("--missing", directory)]
        [pool] = portus_json("gc", run.led, "--dry-run", *options)["pools"]
        return [each["step"] for each in pool["retired"]]

    assert gone(a.parent) == [1]
    assert gone(run.root / "runs") == [1, 2]
    assert gone(run.root / "link" / "a") == [1]
    assert gone(a.parent, c.parent) == [1, 3]
    assert gone(run.root / "run") == []
    shutil.rmtree(run.root / "runs")
    assert gone(run.root / "runs") == [1, 2]
    assert portus("gc", "--missing", run.root, "--yes").code == 0
    assert steps(run.led) == []
    assert steps(run.net) == [10, 20], "they never had any"


def test_a_version_with_one_of_several_pointers_stays_and_a_damaged_one_stops_it(run: Run) -> None:
    first, second = run.point(1, 2)
    os.replace(second, first)
    [pool] = portus_json("gc", run.led, "--dry-run", "--missing", run.root)["pools"]
    assert [each["step"] for each in pool["retired"]] == [1]
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    said = portus("gc", run.led, "--missing", run.root, "--yes")
    assert said.code == 1
    assert str(first) in said.err
    assert steps(run.led) == [1, 2]


def test_a_version_whose_pointer_was_renamed_or_moved_within_the_directory_stays(run: Run) -> None:
    [renamed, gone] = run.point(1, 2, directory="runs/a")
    [moved] = run.point(3, directory="runs/b")
    [linked] = run.point(4, directory="runs/c")
    [out] = run.point(5, directory="runs/d")
    renamed.rename(renamed.parent / "best")
    gone.unlink()
    moved.parent.rename(run.root / "runs" / ".kept")
    far = run.root / "far"
    linked.parent.rename(far)
    (run.root / "runs" / "old").symlink_to(far)  # a directory, and it leads back up
    (far / "up").symlink_to(run.root / "runs")
    (run.root / "runs" / "broken").symlink_to(run.root / "nowhere")
    out.rename(run.root / "out.pt")
    os.mkfifo(run.root / "runs" / "pipe")
    runs = run.root / "runs"
    said = portus("gc", run.led, "--missing", runs, "--yes")
    assert said.code == 0, said.err
    assert steps(run.led) == [1, 3, 4]
    assert portus_json("gc", run.led, "--missing", runs / "b", "--dry-run")["pools"][0]["retired"]


def test_a_version_of_several_files_stays_while_one_pointer_is_anywhere_below(run: Run) -> None:
    directory = run.root / "ckpt" / "step"
    names = [f"rank-{rank}.pt" for rank in range(3)]
    with pointing(run.led, "led") as files:
        files.save_directory(str(directory), {name: state(1) for name in names}, 1).wait()
    collect = ("gc", run.led, "--missing", run.root / "ckpt", "--yes")
    directory.rename(run.root / "ckpt" / "best")
    for name in names[:2]:
        (run.root / "ckpt" / "best" / name).unlink()
    assert portus(*collect).code == 0
    assert steps(run.led) == [1]
    (run.root / "ckpt" / "best" / names[2]).unlink()
    assert portus(*collect).code == 0
    assert steps(run.led) == []


@pytest.mark.parametrize("kind", ["link", "directory", "damaged", "newer"])
def test_nothing_of_a_pool_goes_while_something_below_cannot_be_read(run: Run, kind: str) -> None:
    first, second, third = run.point(1, 2, 3)
    first.unlink()
    second.rename(third.parent / "renamed")
    odd = third.parent / "odd"
    if kind == "damaged":
        odd.write_bytes(third.read_bytes()[:-1])
    elif kind == "newer":
        body = json.dumps({"portus": reference.FORMAT + 1})
        odd.write_bytes(reference._archive(digest(body.encode()).hex() + body))
    else:
        odd.symlink_to(odd)
    root = odd if kind == "directory" else run.root / "ckpt"
    said = portus("gc", run.led, "--missing", root, "--missing", run.root / "ckpt", "--yes")
    assert said.code == {"damaged": 1, "newer": 2}.get(kind, 74)
    assert "led@1" in said.out
    assert "led@2" not in said.out
    assert "nothing was removed" in said.out
    assert str(odd) in said.err
    assert steps(run.led) == [1, 2, 3]
    odd.unlink()
    assert portus("gc", run.led, "--missing", run.root / "ckpt", "--yes").code == 0
    assert steps(run.led) == [2, 3]


def test_what_is_no_pointer_does_not_stop_it(run: Run) -> None:
    [first] = run.point(1)
    first.unlink()
    (run.root / "ckpt" / "large").write_bytes(pointer_marks.README + bytes(POINTER_MAX))
    for module in (pointer_marks, reference):
        # An environment with Portus may lie below.
        copied = run.root / "ckpt" / f"{module.__name__}.py"
        shutil.copy(str(module.__file__), copied)
        py_compile.compile(str(copied), doraise=True)
    said = portus("gc", run.led, "--missing", run.root / "ckpt", "--yes")
    assert said.code == 0, said.err
    assert steps(run.led) == []


def test_it_is_not_asked_about_at_a_place_where_nothing_is_missing(run: Run) -> None:
    run.point(1)
    said = portus("gc", run.led, "--missing", run.root)
    assert (said.code, said.err) == (0, "")


def test_a_dry_run_changes_nothing(run: Run) -> None:
    before = contents(run.root)
    document = portus_json("gc", "--dry-run", "--empty")
    assert document["dry_run"] is True
    assert [pool["removed"] for pool in document["pools"]] == [False, False]
    assert contents(run.root) == before


def test_a_dry_run_works_while_a_trainer_writes(run: Run) -> None:
    with run.trainer():
        assert portus("gc", "--dry-run").code == 0
    assert steps(run.net) == [10, 20]


def test_empty_pool_files_are_removed_only_when_said(run: Run) -> None:
    assert portus("rm", "net", "--yes").code == 0
    assert portus("gc").code == 0
    assert run.net.exists()
    assert portus_json("gc", "--empty")["pools"][0]["removed"] is True
    assert not run.net.exists()
    assert (run.pool / "other.portus").exists()


def test_one_pool_that_cannot_be_collected_does_not_stop_the_others(run: Run) -> None:
    (run.pool / "a.portus").write_bytes(b"x" * 40_000)
    document = portus_json("gc", code=1)
    assert document["pools"][0]["error"]["kind"] == "CorruptionError"
    assert [pool["removed"] for pool in document["pools"][1:]] == [False, False]


def test_it_gives_space_back_to_the_file_system_and_none_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = 4 << 20
    path = tmp_path / ".portus" / "default.portus"
    with PoolCheckpointer(path, keep=None) as run:
        for step in range(1, 7):
            run.save({"x": torch.full((size // 4,), float(step))}, step).wait()
    with contextlib.closing(open_reader(str(path))) as reader:
        [first, *_] = reader.catalogue().entries()
        with reader.pin(first.info.id):
            for step in (2, 3, 4, 1):
                assert portus("rm", f"default@{step}").code == 0
            [place] = reader.record(first).storage_extents(0)
            data = bytearray(place.length)
            reader.medium.load(place.offset, memoryview(data))
            assert data == torch.ones(size // 4).numpy().tobytes()
            before = on_disk(str(path))
            assert 3 * size <= before < 4 * size
    assert portus_json("gc", "--dry-run")["pools"][0]["freed"] > size // 2
    [document] = portus_json("gc")["pools"]
    assert document["freed"] == before - on_disk(str(path)) >= size
    assert portus_json("ls")["pools"][0]["on_disk"] == on_disk(str(path))
    assert portus("verify").code == 0
    with PoolCheckpointer(path, keep=None) as run:
        assert [each.step for each in run.versions()] == [5, 6]
        for step in range(7, 10):  # where there are holes
            run.save({"x": torch.full((size // 4,), float(step))}, step).wait()
    assert portus("verify").code == 0


def test_the_end_of_a_run_gives_space_back(tmp_path: Path) -> None:
    size = 4 << 20
    path = tmp_path / "pool.portus"
    with PoolCheckpointer(path, keep=1) as run:
        for step in range(5):
            run.save({"x": torch.full((size // 4,), float(step))}, step).wait()
        assert on_disk(str(path)) > 2 * size
    assert on_disk(str(path)) < size + (1 << 20)
    with PoolCheckpointer(path, keep=1) as run:
        loaded = run.load()
    assert torch.equal(loaded["x"], torch.full((size // 4,), 4.0))


def test_a_pool_that_is_emptied_and_removed_at_once_is_gone(run: Run) -> None:
    for path in run.point(1, 2):
        path.unlink()
    said = portus("gc", run.led, "--missing", run.root, "--yes", "--empty")
    assert said.code == 0, said.err
    assert "empty, removed" in said.out
    assert not run.led.exists()
