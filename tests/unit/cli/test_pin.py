"""``portus pin`` and ``portus unpin``."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import portus as face
from portus.client.files.pins import pin
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.daemon.mirrors import TenantMirrors
from portus.dcp import GroupWriter, groups
from portus.errors import StaleError
from portus.format.reference import pin_at
from portus.index.directory import open_reader
from portus.index.place import Place
from portus.mirror.address import parse
from portus.spec import VersionInfo
from tests.hosts import serving, url
from tests.unit.cli.scene import Run, portus, portus_json

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def steps(place: str | Path, model: str = "net") -> list[int]:
    with face.open(place) as pool:
        return [info.step for info in pool.versions(model)]


def train(place: str | Path, numbers: Sequence[int], model: str = "net") -> None:
    with PoolCheckpointer(place, model, keep=1) as trainer:
        for step in numbers:
            trainer.save({"step": torch.tensor(step)}, step).wait()


def test_a_pinned_version_stays_over_restarts_and_until_it_is_unpinned(run: Run) -> None:
    assert portus("pin", "net@10").code == 0
    assert "before" in portus("pin", "net@10").out
    train(run.pool, [30, 40])
    train(run.pool, [50])
    assert steps(run.pool) == [10, 20, 50]
    assert "held by a pin" in portus("show", "net@10").out
    assert "a pin" in portus("ls", run.net).out
    [version] = portus_json("show", "net@10")["versions"]
    assert version["references"] == [{"path": None, "state": "pinned"}]
    assert portus("unpin", "net@10").code == 0
    assert portus("unpin", "net@10").code == 2
    train(run.pool, [60])
    assert steps(run.pool) == [20, 60]


@pytest.mark.long
def test_a_trainer_that_is_at_work_heeds_a_pin_and_its_end(run: Run) -> None:
    with PoolCheckpointer(run.pool, "net", keep=1) as trainer:
        trainer.save({"step": 30}, 30).wait()
        assert portus("pin", "net@30").code == 0
        for step in (40, 50):
            trainer.save({"step": step}, step).wait()
        assert trainer.steps() == [20, 30, 50]
        assert portus("unpin", "net@30").code == 0
        trainer.save({"step": 60}, 60).wait()
        assert trainer.steps() == [20, 60]


@pytest.mark.parametrize("command", ["pin", "unpin"])
@pytest.mark.parametrize(
    "arguments",
    [("file:///m/net@10",), ("file:///m/net@10", "--pool", ".portus"), ("net@10", "-p", "s3://b")],
)
def test_a_mirror_is_not_pinned_and_the_error_says_what_to_do(
    run: Run,
    tmp_path: Path,
    command: str,
    arguments: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for place in (run.root, elsewhere):
        monkeypatch.chdir(place)
        said = portus(command, *arguments)
        assert said.code == 2
        assert "versions of a mirror cannot be pinned" in said.err
        assert f"portus {command} MODEL@STEP --pool POOL" in said.err


def test_no_other_command_takes_a_pinned_version_away(run: Run) -> None:
    portus("pin", "net@10")
    for force in ((), ("--force",)):
        said = portus("rm", "net@10", *force)
        assert (said.code, "portus unpin net@10" in said.err) == (2, True)
    run.last.unlink()
    assert portus("rm", "net", "--keep", "1", "--force").code == 0
    assert portus("gc", "--missing").code == 0
    assert steps(run.pool) == [10]
    assert portus("verify").code == 0


def test_a_version_with_a_file_that_is_removed_stays_if_it_is_pinned(run: Run) -> None:
    portus("pin", "net@20")
    with run.trainer() as trainer:
        trainer.save({"step": 30}, 30, reference=run.last).wait()
        trainer.remove(run.last)
        trainer.wait()
        assert trainer.steps() == [10, 20]


def test_a_pin_goes_along_with_a_run_that_is_copied(run: Run, tmp_path: Path) -> None:
    portus("pin", "net@10")
    copy = tmp_path / "copy"
    shutil.copytree(run.pool, copy)
    train(copy, [30])
    assert {10, 30} <= set(steps(copy))


def test_to_a_portus_that_knows_no_pins_it_is_a_file_that_is_not_where_it_was(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    portus("pin", "net@10")
    monkeypatch.setattr("portus.format.reference.Reference.is_pin", False)
    [link] = portus_json("show", "net@10")["versions"][0]["references"]
    assert link["state"] == "unknown"
    train(run.pool, [30, 40])
    assert steps(run.pool) == [10, 20, 40]


@pytest.mark.long
def test_a_version_that_is_retired_in_that_moment_is_not_pinned_and_that_is_said(
    run: Run,
) -> None:
    """Its writer decided before the pin was there."""
    links = run.pool / "net.references"
    place = Place.named(run.net)
    raised: list[BaseException] = []

    def pin_it() -> None:
        with contextlib.closing(open_reader(place.path)) as reader:
            [info] = [each.info for each in reader.catalogue().entries() if each.info.step == 10]
            try:
                pin(place, reader, info)
            except StaleError as error:
                raised.append(error)

    with run.trainer() as trainer:

        def late(infos: Sequence[VersionInfo]) -> list[int]:
            other.start()
            while not list(links.glob("*.copy")):
                assert other.is_alive()
            return [infos[0].id]

        other = threading.Thread(target=pin_it)
        trainer.part.surplus = late
        trainer.save({"step": 30}, 30).wait()
        other.join(60)
        assert trainer.steps() == [20, 30]
    assert "retired just now" in str(raised)
    assert not list(links.glob("*.copy"))
    gone = portus("pin", "net@10")
    assert (gone.code, "there is no net@10" in gone.err) == (2, True)


def test_a_shelf_is_not_pinned(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    with face.Shelf(path) as shelf:
        shelf.x = torch.zeros(1)
        said = portus("pin", "shelf@0", "--pool", str(path))
    assert (said.code, "changes in place" in said.err) == (2, True)
    assert "a pin" not in portus("ls", str(path)).out


def test_it_needs_one_step(run: Run) -> None:
    said = portus("pin", "net")
    assert (said.code, "say which, net@STEP" in said.err) == (2, True)
    assert portus("pin", "net@11").code == 2
    assert portus("pin", "other").code == 0


@pytest.mark.long
def test_all_parts_of_a_sharded_step_are_pinned(host_pool: str) -> None:
    writer = GroupWriter(host_pool, "run", keep=1)
    for step in (1, 2):
        writer.save({"w": torch.tensor(step)}, step=step).wait()
    assert portus("pin", "run@2", "--pool", host_pool).code == 0
    for step in (3, 4, 5):
        writer.save({"w": torch.tensor(step)}, step=step).wait()
    writer.close()
    assert [group.step for group in groups(host_pool, "run")] == [2, 4, 5]


def test_a_host_keeps_what_is_pinned_whoever_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "pools") as server, PoolCheckpointer(url(server), keep=1) as trainer:
        for step in (1, 2):
            trainer.save({"step": step}, step).wait()
        assert portus("pin", "default@2", "--pool", url(server)).code == 0
        for step in (3, 4):
            trainer.save({"step": step}, step).wait()
        assert trainer.steps() == [2, 4]
        assert "a pin" in portus("ls", url(server)).out
        said = portus("rm", "default@2", "--force", "--pool", url(server))
        assert (said.code, "is pinned" in said.err) == (2, True)
        assert portus("gc", "--missing", "--pool", url(server)).code == 0
        assert trainer.steps() == [2, 4]
    with serving(tmp_path / "pools") as server:
        train(url(server), [5], "default")
        assert steps(url(server), "default") == [2, 5]
        assert portus("unpin", "default@2", "--pool", url(server)).code == 0
        train(url(server), [6], "default")
        assert steps(url(server), "default") == [6]
    assert os.listdir(tmp_path / "pools")


def test_a_fresh_node_has_the_pinned_version_and_the_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, run = f"file://{tmp_path}/bucket", tmp_path / "run"
    monkeypatch.setenv("PORTUS_MIRROR", mirror)
    run.mkdir()
    monkeypatch.chdir(run)
    train(".portus", [10, 20])
    assert portus("pin", "net@20").code == 0
    train(".portus", [30, 40])
    assert portus("ls", mirror).out.count("a pin") == 1
    assert portus("rm", "--yes", f"{mirror}/net@20").code == 2, "held by a pin"
    for turn in (1, 2):  # the second node knows it from the first one
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(run)
        run.mkdir()
        monkeypatch.chdir(run)
        train(".portus", [40 + turn])
        assert steps(".portus") == [20, 40 + turn]
        assert "held by a pin" in portus("show", "net@20").out
    assert portus("unpin", "net@20").code == 0
    train(".portus", [50])
    assert steps(".portus") == [50]
    assert "a pin" not in portus("ls", mirror).out


def test_a_fresh_host_has_the_pinned_version_and_the_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bucket = parse(f"file://{tmp_path}/bucket")
    with serving(tmp_path / "1", mirrors=TenantMirrors(bucket)) as server:
        train(url(server), [10])
        assert portus("pin", "net@10", "--pool", url(server)).code == 0
        train(url(server), [20])
    with serving(tmp_path / "2", mirrors=TenantMirrors(bucket)) as server:
        train(url(server), [30, 40])
        assert steps(url(server)) == [10, 40]
        assert portus("unpin", "net@10", "--pool", url(server)).code == 0
        train(url(server), [50])
        assert steps(url(server)) == [50]


@pytest.mark.parametrize("name", ["../../x", "A" * 32, "", "f" * 31, "f" * 33, "f" * 31 + "/"])
def test_no_other_path_of_a_mirror_is_taken_for_a_pin(name: str) -> None:
    assert pin_at(f"/portus-pin/{name}") is None
    assert pin_at("f" * 32) is None
    assert pin_at("/portus-pin/" + "f" * 32) == "f" * 32
