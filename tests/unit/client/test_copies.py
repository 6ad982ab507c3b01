"""A version that a file leads to is kept, wherever the run was copied or moved to."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.cli.main import main
from portus.client.files import fate
from portus.client.files.keeper import Keeper, keeper_of
from portus.client.loading.resolve import KnownPools, load_reference
from portus.client.loading.view import open_pool
from portus.index.directory import WRITERS, links_directory
from portus.media.local import LocalFiles


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), float(step))}


def opened(run: Path, *, keep: int = 1, pool: Path | None = None) -> portus.PoolCheckpointer:
    return portus.PoolCheckpointer(pool or run / ".portus", "net", keep=keep)


def save(to: portus.PoolCheckpointer, run: Path, step: int, name: str | None = None) -> None:
    to.save(state(step), step, reference=run / "ckpt" / (name or f"{step}.ckpt")).wait()


def trained(run: Path, steps: int = 3) -> None:
    with opened(run) as trainer:
        for step in range(1, steps + 1):
            save(trainer, run, step)


def loaded(path: Path) -> int:
    """The step that a process would load that has no pool open, and was told of none."""
    found = load_reference(path, KnownPools(open_pool))
    assert isinstance(found, dict)
    assert bool((found["w"] == found["w"][0]).all())
    return int(found["w"][0])


def gc(run: Path, *more: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["portus", "gc", str(run / ".portus"), *more])
        with pytest.raises(SystemExit, match="0"):
            main()


def states(run: Path) -> dict[int, fate.Fate]:
    directory = links_directory(str(run / ".portus" / "net.portus"))
    found = fate.links(directory, LocalFiles(), adopt=False)
    return {link.reference.step: link.state for link in found}


def by_cp(run: Path, copy: Path) -> None:
    subprocess.run(["cp", "-r", run, copy], check=True)


def by_archive(run: Path, copy: Path) -> None:
    with tarfile.open(run.parent / "backup.tar", "w") as packed:
        for name in (".portus", "ckpt"):
            for path in sorted((run / name).rglob("*")):
                if path.is_file():
                    packed.add(path, path.relative_to(run), recursive=False)
    copy.mkdir()
    with tarfile.open(run.parent / "backup.tar") as packed:
        packed.extractall(copy)


def by_rsync(run: Path, copy: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("no rsync on this machine")
    subprocess.run(["rsync", "-a", f"{run}/", f"{copy}/"], check=True)


def by_links(run: Path, copy: Path) -> None:
    subprocess.run(["cp", "-a", run, copy], check=True)


HOW: list[Callable[[Path, Path], object]] = [
    by_cp,
    shutil.copytree,
    by_archive,
    by_rsync,
    by_links,
]


@pytest.mark.parametrize("how", HOW)
def test_a_run_that_was_copied_goes_on_and_loses_nothing(
    tmp_path: Path, how: Callable[[Path, Path], object]
) -> None:
    run, copy = tmp_path / "run", tmp_path / "run2"
    trained(run)
    how(run, copy)
    shutil.rmtree(run)
    gc(copy)
    with opened(copy) as trainer:
        for step in (4, 5):
            save(trainer, copy, step)
        trainer.wait()
        assert trainer.steps() == [1, 2, 3, 4, 5]
    gc(copy)
    assert [loaded(copy / f"ckpt/{step}.ckpt") for step in range(1, 6)] == [1, 2, 3, 4, 5]


def test_what_is_deleted_in_a_copy_goes_there_once_it_was_adopted(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "run2"
    trained(run)
    by_cp(run, copy)
    shutil.rmtree(run)
    with opened(copy) as trainer:
        trainer.remove(copy / "ckpt/1.ckpt")
        trainer.wait()
        assert trainer.steps() == [2, 3]
        os.unlink(copy / "ckpt/2.ckpt")
    gc(copy)
    with opened(copy) as trainer:
        assert trainer.steps() == [3]


def test_a_copy_and_its_original_go_on_side_by_side_and_leave_each_other_alone(
    tmp_path: Path,
) -> None:
    run, copy = tmp_path / "run", tmp_path / "run2"
    trained(run)
    by_cp(run, copy)
    with opened(run) as original, opened(copy) as copied:
        original.remove(run / "ckpt/1.ckpt")
        copied.remove(copy / "ckpt/2.ckpt")
        save(original, run, 4)
        save(copied, copy, 5)
        save(original, run, 6, "3.ckpt")
        original.wait()
        copied.wait()
        assert original.steps() == [2, 4, 6]
        assert copied.steps() == [1, 3, 5]
    gc(run)
    gc(copy)
    assert [loaded(run / f"ckpt/{step}.ckpt") for step in (2, 4, 3)] == [2, 4, 6]
    assert [loaded(copy / f"ckpt/{step}.ckpt") for step in (1, 3, 5)] == [1, 3, 5]
    assert portus.mend(copy / ".portus", uncommitted=True) == []
    with opened(copy) as copied:
        copied.remove(run / "ckpt/2.ckpt")  # by a path that the copy brought with it
        copied.wait()
        assert copied.steps() == [1, 3, 5]


def test_a_copy_is_loaded_from_its_own_pool_while_the_original_is_open(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "run2"
    trained(run)
    by_cp(run, copy)
    with opened(run) as original:
        original.remove(run / "ckpt/1.ckpt")
        original.wait()
        found = portus.load_reference(copy / "ckpt/1.ckpt")
        assert isinstance(found, dict)
        assert found["w"][0] == 1


def test_a_pool_that_was_copied_alone_judges_no_file_of_the_original(tmp_path: Path) -> None:
    pools, run = tmp_path / "pools", tmp_path / "run"
    with opened(run, pool=pools) as trainer:
        for step in (1, 2, 3):
            save(trainer, run, step)
    by_cp(pools, tmp_path / "pools2")
    counts = [os.stat(path).st_nlink for path in sorted((run / "ckpt").iterdir())]
    with opened(run, pool=tmp_path / "pools2") as copied:
        copied.save(state(9), 9).wait()
        os.unlink(run / "ckpt/1.ckpt")
        assert copied._pool.writer is not None
        assert not copied._pool.writer.deleted()
        assert {1, 2, 3} < set(copied.steps())
    assert [os.stat(path).st_nlink for path in sorted((run / "ckpt").iterdir())] == counts[1:]


def test_real_files_in_a_copy_and_gc_there_leave_the_files_of_the_original(
    tmp_path: Path,
) -> None:
    run, copy = tmp_path / "run", tmp_path / "run2"
    trained(run)
    by_cp(run, copy)
    portus.materialize(copy / "ckpt")
    gc(copy)
    gc(copy, "--missing")
    assert [path.stat().st_nlink for path in (run / "ckpt").iterdir()] == [2, 2, 2]
    gc(run)
    assert [loaded(run / f"ckpt/{step}.ckpt") for step in (1, 2, 3)] == [1, 2, 3]
    assert torch.load(copy / "ckpt/2.ckpt")["w"][0] == 2


def test_a_run_that_is_renamed_in_the_middle_of_a_save_keeps_that_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the file was put there, and before that is durable."""
    run, away = tmp_path / "run", tmp_path / "away"
    make_durable = Keeper.make_durable

    def rename(keeper: Keeper, paths: Iterable[str]) -> None:
        if (run / "ckpt" / "2.ckpt").exists():
            run.rename(away)
        make_durable(keeper, paths)

    monkeypatch.setattr(Keeper, "make_durable", rename)
    with opened(run) as trainer:
        for step in (1, 2, 3):
            save(trainer, run, step)
    assert [loaded(away / "ckpt" / f"{step}.ckpt") for step in (1, 2)] == [1, 2]
    assert loaded(run / "ckpt" / "3.ckpt") == 3


@pytest.mark.parametrize("moved", ["run", "pool"])
def test_a_run_that_is_renamed_while_it_trains_loses_nothing(tmp_path: Path, moved: str) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    with opened(run) as trainer:
        save(trainer, run, 1)
        if moved == "run":
            run.rename(away)
        else:
            (run / ".portus").rename(run / "pools.old")
        save(trainer, run, 2)
        save(trainer, run, 3)
        trainer.wait()
    first = away if moved == "run" else run
    assert [loaded(run / f"ckpt/{step}.ckpt") for step in (2, 3)] == [2, 3]
    again = away / ".portus" if moved == "run" else run / "pools.old"
    with opened(run, pool=again) as trainer:
        save(trainer, run, 4)
        trainer.wait()
        assert trainer.steps() == [1, 2, 3, 4]
    assert [loaded(run / f"ckpt/{step}.ckpt") for step in (2, 3, 4)] == [2, 3, 4]
    assert loaded(first / "ckpt/1.ckpt") == 1


def test_a_run_that_was_moved_is_told_from_one_that_was_deleted(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    trained(run)
    run.rename(moved)
    os.unlink(moved / "ckpt/1.ckpt")
    here, gone, unknown = fate.Fate.ALIVE, fate.Fate.DELETED, fate.Fate.UNKNOWN
    assert states(moved) == {1: gone, 2: here, 3: here}
    shutil.move(moved / "ckpt", tmp_path / "elsewhere")
    os.unlink(tmp_path / "elsewhere/2.ckpt")
    (moved / "ckpt").mkdir()
    assert states(moved) == {1: unknown, 2: unknown, 3: here}
    gc(moved)
    with opened(moved) as trainer:
        assert trainer.steps() == [1, 2, 3]
    gc(moved, "--missing")
    with opened(moved) as trainer:
        assert trainer.steps() == [3]


@pytest.mark.parametrize("place", ["ckpt/keep.ckpt", "keep.ckpt", "best/of/all.ckpt"])
def test_a_copy_of_a_file_holds_its_version_through_rotation_and_deletion(
    tmp_path: Path, place: str
) -> None:
    run = tmp_path / "run"
    with opened(run) as trainer:
        save(trainer, run, 1)
        save(trainer, run, 2)
        save(trainer, run, 3, "last.ckpt")
        for step in (1, 2, 3):
            name = "last" if step == 3 else str(step)
            target = run / place.replace(".ckpt", f"{step}.ckpt")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(run / f"ckpt/{name}.ckpt", target)
        trainer.remove(run / "ckpt/1.ckpt")
        os.unlink(run / "ckpt/2.ckpt")
        save(trainer, run, 4, "last.ckpt")
        trainer.wait()
        assert trainer._pool.writer is not None
        assert not trainer._pool.writer.deleted()
        assert trainer.steps() == [1, 2, 3, 4]
    gc(run)
    for step in (1, 2, 3):
        kept = run / place.replace(".ckpt", f"{step}.ckpt")
        assert loaded(kept) == step
        os.unlink(kept)
    gc(run)
    with opened(run) as trainer:
        assert trainer.steps() == [4], "and it is gone with the copy"


def test_links_that_were_lost_are_made_again_for_the_files_that_are_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run)
    shutil.rmtree(run / ".portus/net.references")
    with opened(run) as trainer:
        save(trainer, run, 4)
        save(trainer, run, 5)
        trainer.wait()
        assert trainer.steps() == [1, 2, 3, 4, 5]
    assert [loaded(run / f"ckpt/{step}.ckpt") for step in range(1, 6)] == [1, 2, 3, 4, 5]


def test_a_directory_that_cannot_be_looked_at_proves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, 1)
    (run / "ckpt").rename(run / "gone")
    os.symlink(tmp_path / "not mounted", run / "ckpt")
    os.unlink(run / "gone/1.ckpt")
    os.rmdir(run / "gone")
    assert states(run) == {1: fate.Fate.UNKNOWN}


def test_a_link_that_leads_in_a_circle_beside_the_checkpoints_holds_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, 1)
    os.symlink("circle", run / "ckpt/circle")
    os.unlink(run / "ckpt/1.ckpt")
    assert states(run) == {1: fate.Fate.DELETED}


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.long)])
def test_restarts_each_from_a_copy_of_the_last_end_with_what_is_kept(
    tmp_path: Path, count: int
) -> None:
    run = tmp_path / "run 0"
    trained(run, 1)
    for number in range(1, count + 1):
        copy = tmp_path / f"run {number}"
        shutil.copytree(run, copy)
        shutil.rmtree(run)
        run = copy
        with opened(run, keep=2) as trainer:
            save(trainer, run, number, "last.ckpt")
    gc(run)
    with opened(run, keep=2) as trainer:
        assert trainer.steps() == [1, count]
    assert loaded(run / "ckpt/last.ckpt") == count
    assert loaded(run / "ckpt/1.ckpt") == 1


def test_what_lies_beside_the_checkpoints_is_not_read_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for number in range(20):
        (run / f"data/{number}").mkdir(parents=True)
        for each in range(50):
            (run / f"data/{number}/{each}.txt").write_bytes(b"x" * 500)
    past = time.time() - 60
    for path in [run, *run.rglob("*")]:
        os.utime(path, (past, past))
    with opened(run) as trainer:
        save(trainer, run, 1)
        pool = trainer.path
    writer = WRITERS.open(pool)
    try:
        keeper = keeper_of(pool, writer)
        counts = []
        for _ in range(2):
            keeper._survey.renew()
            assert keeper._survey.is_complete
            counts.append(keeper._survey.files_read)
        assert counts[0] > 1000
        assert counts[1] <= counts[0] + 5
    finally:
        WRITERS.close(writer)


def test_what_is_held_for_files_that_nobody_finds_is_said_where_space_is_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trained(run)
    shutil.rmtree(run / "ckpt")
    assert set(states(run).values()) == {fate.Fate.UNKNOWN}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["portus", "ls", str(run / ".portus")])
        with pytest.raises(SystemExit, match="0"):
            main()
    said = capsys.readouterr().out
    assert "3 versions, 58.6 KiB, held for files that are not where they were" in said
    assert f"at {run / 'ckpt/3.ckpt'}" in said
    settings: dict[str, Any] = {"keep": 1, "on_error": "raise", "max_bytes": 1 << 20}
    with portus.PoolCheckpointer(run / ".portus", "net", **settings) as trainer:
        handle = trainer.save({"w": torch.zeros(1 << 18)}, 4, reference=run / "ckpt/4.ckpt")
        with pytest.raises(portus.MediumError, match="60000 bytes are 3 versions whose files"):
            handle.wait()
        assert trainer.steps() == [1, 2, 3]
    gc(run, "--missing")
    with opened(run) as trainer:
        assert trainer.steps() == []


def test_a_copy_that_cannot_be_linked_holds_its_version_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, copy = tmp_path / "1.ckpt", tmp_path / "kept.ckpt"

    def full(*_: object) -> None:
        raise portus.MediumError(errno.ENOSPC, "no room for a name")

    with portus.PoolCheckpointer(tmp_path / ".portus", "run", keep=1) as checkpointer:
        checkpointer.save({"step": 1}, 1, reference=first).wait()
        shutil.copy(first, copy)
        checkpointer.save({"step": 2}, 2, reference=tmp_path / "2.ckpt").wait()
        with monkeypatch.context() as patch:
            patch.setattr(LocalFiles, "link", full)
            checkpointer.remove(first)
            checkpointer.wait()
        checkpointer.save({"step": 3}, 3).wait()
        assert portus.load_reference(copy) == {"step": 1}
