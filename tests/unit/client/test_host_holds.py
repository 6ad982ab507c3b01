"""Storage hosts: what files lead to is kept, whoever looks, from whichever directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import portus
from portus.cli import gc
from portus.client.files.host import HostPool
from portus.daemon.server import Server
from portus.dcp import GroupWriter
from tests.hosts import serving, url
from tests.unit.cli.scene import portus_json
from tests.unit.client.test_uncommitted import cut_off

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step))}


def by_checkpointer(place: str, run: Path, step: int) -> None:
    with portus.PoolCheckpointer(place, "run", keep=1) as trainer:
        trainer.save(state(step), step, reference=run / f"{step}.ckpt")


def by_writer(place: str, run: Path, step: int) -> None:
    writer = GroupWriter(place, "run", keep=1)
    writer.save_directory({"shards": state(step)}, run / str(step), step=step, files={"f": step})
    writer.close()


def start(tmp_path: Path, number: int, patch: pytest.MonkeyPatch) -> None:
    """In a working directory of its own."""
    home = tmp_path / f"start {number}"
    home.mkdir()
    patch.chdir(home)


def steps(server: Server) -> list[int]:
    with portus.open(url(server)) as pool:
        return sorted(info.step for info in pool.versions())


@pytest.mark.parametrize("save", [by_checkpointer, by_writer])
@pytest.mark.parametrize("place", ["pools", "memory:64M"])
def test_a_start_from_another_directory_retires_nothing_that_a_file_leads_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[str, Path, int], None],
    place: str,
) -> None:
    where = place if place.startswith("memory") else tmp_path / place
    with serving(where) as server:
        for number in (1, 2, 3):
            start(tmp_path, number, monkeypatch)
            save(url(server), tmp_path / "run", number)
        assert steps(server) == [1, 2, 3]
        portus.allow(url(server))
        if save is by_checkpointer:
            for number in (1, 2, 3):
                found = portus.load_reference(tmp_path / f"run/{number}.ckpt")
                assert isinstance(found, dict)
                assert found["w"][0] == number


def test_a_host_that_was_started_again_still_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        start(tmp_path, number, monkeypatch)
        with serving(tmp_path / "pools") as server:
            by_checkpointer(url(server), tmp_path / "run", number)
            assert steps(server) == list(range(1, number + 1))


def test_what_is_removed_from_another_directory_goes_on_the_host_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "pools") as server:
        for number in (1, 2, 3):
            start(tmp_path, number, monkeypatch)
            by_checkpointer(url(server), tmp_path / "run", number)
        start(tmp_path, 4, monkeypatch)
        with portus.PoolCheckpointer(url(server), "run", keep=1) as trainer:
            trainer.remove(tmp_path / "run/1.ckpt")
            trainer.save(state(4), 4, reference=tmp_path / "run/2.ckpt").wait()
            trainer.wait()
            assert trainer.steps() == [3, 4]
        host = HostPool(url(server))
        assert sorted(each.step for each in host.holds()) == [3, 4]
        host.close()


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.long)])
def test_restarts_from_new_directories_and_then_gc_leave_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(gc, "YOUNG_S", 0)
    with serving(tmp_path / "pools") as server:
        for number in range(1, count + 1):
            start(tmp_path, number, monkeypatch)
            by_checkpointer(url(server), Path("ckpt").absolute(), number)
            assert len(steps(server)) == number
            if number < count:
                monkeypatch.chdir(tmp_path)
                shutil.rmtree(tmp_path / f"start {number}")
        (pool,) = portus_json("gc", url(server))["pools"]
        assert pool["retired"] == [], "nobody said that they are gone"
        (pool,) = portus_json("gc", url(server), "--missing")["pools"]
        assert len(pool["retired"]) == count - 1
        assert steps(server) == [count]


@pytest.mark.long
@pytest.mark.parametrize("by", ["rm", "gc"])
def test_a_file_whose_version_was_retired_by_hand_elsewhere_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """And that of a save that was cut off is put aside, at the same start."""
    monkeypatch.setattr(gc, "YOUNG_S", 0)
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    paths = [run / f"{step}.ckpt" for step in range(3)]
    with serving(tmp_path / "pools") as server:
        start(tmp_path, 1, monkeypatch)
        cut_off(url(server), *paths)
        assert steps(server) == [0, 1]
        start(tmp_path, 2, monkeypatch)
        if by == "rm":
            portus_json("rm", "run@1", "--force", "--pool", url(server))
        else:
            run.rename(away)
            portus_json("gc", url(server), "--missing")
            away.rename(run)
        assert steps(server) == ([0] if by == "rm" else [])
        for _ in range(2):
            monkeypatch.chdir(tmp_path / "start 1")
            with portus.PoolCheckpointer(url(server), "run", keep=1) as trainer:
                trainer.save(state(9), 9).wait()
            names = ["0.ckpt", "1.ckpt", "2.ckpt.uncommitted"]
            assert sorted(path.name for path in run.iterdir()) == names


def test_of_what_was_retired_by_hand_not_too_much_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.client.files.host._RENOUNCED_MAX", 2)
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "pools") as server:
        with portus.PoolCheckpointer(url(server), "run", keep=None) as trainer:
            for step in range(5):
                trainer.save(state(step), step, reference=tmp_path / f"{step}.ckpt").wait()
        for step in range(4):
            portus_json("rm", f"run@{step}", "--force", "--pool", url(server))
        host = HostPool(url(server))
        assert [each.step for each in host.holds()] == [4]
        assert sorted(each.step for each in host.on_record()) == [2, 3, 4]
        host.close()
