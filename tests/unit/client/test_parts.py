"""Reference files that lead to a part of a state: a checkpoint that is a directory of files."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.client import mend as mending
from portus.client.files.host import HostPool
from portus.client.files.keeper import Keeper
from portus.client.loading.resolve import POOLS
from portus.client.shards.grouped import census
from portus.daemon.house import ClientTimeouts
from portus.daemon.server import Server
from portus.index.directory import WRITERS
from portus.index.groups import new_id, part_model, part_token
from portus.media.local import LocalFiles
from portus.protocol.address import Address, Scheme
from tests.hosts import serving, url
from tests.moments import at, elsewhere

State = dict[str, Any]


def state(step: int) -> State:
    return {
        "weights.bin": {"w": torch.full((1000,), float(step)), "empty": {}},
        "moments.bin": {"state": {}, "step": step},
        "number": step,
    }


def save(to: portus.PoolCheckpointer, home: Path, step: int) -> portus.SaveHandle:
    parts = state(step)
    return to.save(parts, step, reference={str(home / name): name for name in parts})


def read(home: Path) -> list[Any]:
    weights = torch.load(home / "weights.bin")
    return [
        weights["w"][7].item(),
        torch.load(home / "moments.bin")["step"],
        torch.load(home / "number"),
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    portus.register_reference_loader()
    return tmp_path


def test_each_file_leads_to_its_part_alone(run: Path) -> None:
    with portus.PoolCheckpointer(run / ".portus", "run") as trainer:
        save(trainer, run / "one", 1)
        assert torch.load(run / "one" / "moments.bin") == {"state": {}, "step": 1}
        assert torch.load(run / "one" / "weights.bin").keys() == {"w", "empty"}
        trainer.wait()
        assert trainer.steps() == [1]
    assert read(run / "one") == [1, 1, 1]


def test_a_save_into_the_same_directory_replaces_all_and_lets_go_of_the_old(run: Path) -> None:
    with portus.PoolCheckpointer(run / ".portus", "run", keep=1) as trainer:
        for step in (1, 2, 3):
            save(trainer, run / "last", step).wait()
        trainer.wait()
        assert read(run / "last") == [3, 3, 3]
        assert trainer.steps() == [3]


def test_a_version_stays_until_the_last_of_its_files_is_gone(run: Path) -> None:
    with portus.PoolCheckpointer(run / ".portus", "run", keep=1) as trainer:
        save(trainer, run / "one", 1)
        for name in ("weights.bin", "moments.bin"):
            trainer.remove(run / "one" / name)
        save(trainer, run / "two", 2)
        trainer.wait()
        assert trainer.steps() == [1, 2]
        trainer.remove(run / "one" / "number")
        trainer.wait()
        assert trainer.steps() == [2]


def test_a_key_that_the_state_has_not_is_refused(run: Path) -> None:
    with (
        portus.PoolCheckpointer(run / ".portus", "run") as trainer,
        pytest.raises(portus.UsageError, match=r"x\.bin should lead to 'other'"),
    ):
        trainer.save({"a": 1}, 1, reference={str(run / "x.bin"): "other"})
    assert not (run / "x.bin").exists()


def test_a_directory_goes_only_once_what_replaces_it_is_committed(run: Path) -> None:
    with portus.PoolCheckpointer(run / ".portus", "run", keep=1, max_bytes=8 << 20) as trainer:
        save(trainer, run / "one", 1)
        (run / "one" / "notes.txt").write_text("the user's")
        huge = trainer.save({"w": torch.zeros(32 << 20)}, 2)
        trainer.remove(run / "one", after=huge)
        trainer.wait()
        assert not huge.committed
        assert read(run / "one") == [1, 1, 1]
        trainer.remove(run / "one", after=save(trainer, run / "two", 3))
        trainer.wait()
        assert not (run / "one").exists()
        assert trainer.steps() == [3]


def test_a_directory_removed_behind_our_back_gives_its_space_back(run: Path) -> None:
    big = {"w.bin": torch.rand(1 << 20)}
    with portus.PoolCheckpointer(run / ".portus", "run", keep=1) as trainer:
        for step in range(12):
            home = run / f"step_{step}"
            big["w.bin"].add_(1)
            trainer.save(big, step, reference={str(home / "w.bin"): "w.bin"}).wait()
            if step:
                shutil.rmtree(run / f"step_{step - 1}")
        trainer.wait()
        size = os.path.getsize(trainer.path)
    assert size < 6 * big["w.bin"].nbytes


def test_materialised_files_hold_their_parts(run: Path) -> None:
    with portus.PoolCheckpointer(run / ".portus", "run") as trainer:
        save(trainer, run / "one", 1)
        trainer.wait()
    assert len(portus.materialize(run / "one")) == 3
    assert not any(portus.is_reference(path) for path in (run / "one").iterdir())
    assert read(run / "one") == [1, 1, 1]


@pytest.fixture(params=["files", "host"])
def place(
    request: pytest.FixtureRequest, run: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A pool directory, or a storage host; what is not there is in the current directory."""
    monkeypatch.chdir(run)
    if request.param == "files":
        yield str(run / ".portus")
        return
    yield request.getfixturevalue("host")


@pytest.fixture
def host(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A storage host."""
    monkeypatch.chdir(run)
    with serving(run / "host") as server:
        yield url(server)


def cut_off_while_replacing(run: Path, place: str) -> None:
    """Step 2 was committed; of the three files in ``last`` one leads to it."""
    with portus.PoolCheckpointer(place, "run", keep=2) as trainer:
        save(trainer, run / "last", 1).wait()
        trainer.save(state(2), 2).wait()
        _, keeper = trainer._pool.open_or_create()
        keeper.replace(str(run / "last" / "number"), trainer.versions()[-1], "number")
    assert read(run / "last") == [1, 1, 2]


def test_files_of_two_versions_in_one_directory_are_mended(run: Path, place: str) -> None:
    cut_off_while_replacing(run, place)
    assert portus.mend(place) == []
    assert read(run / "last") == [2, 2, 2]


def test_files_that_were_never_committed_are_removed_only_when_asked(run: Path, place: str) -> None:
    with portus.PoolCheckpointer(place, "run") as trainer:
        save(trainer, run / "one", 1).wait()
        _, keeper = trainer._pool.open_or_create()
        keeper.place(str(run / "two.bin"), bytes(16), 2, "run", "number")
        portus.mend(place, uncommitted=True)
        assert (run / "two.bin").exists(), "it is open: the save may be under way"
    portus.mend(place)
    assert (run / "two.bin").exists()
    assert portus.mend(place, uncommitted=True) == [str(run / "two.bin")]
    assert not (run / "two.bin").exists()
    assert read(run / "one") == [1, 1, 1]


def test_files_on_a_host_are_left_alone_while_another_process_saves_that_model(run: Path) -> None:
    links = str(run / "links")
    with serving(run / "host", patience=ClientTimeouts(claim_s=0.1)) as server:
        for model in ("one", "two"):
            with portus.PoolCheckpointer(url(server), model, links=links) as trainer:
                _, keeper = trainer._pool.open_or_create()
                keeper.place(str(run / f"{model}.bin"), bytes(16), 2, model, "number")
        until_saved_are(server, set())
        other = HostPool(url(server), "two")
        assert portus.mend(url(server), uncommitted=True) == [], "its links are elsewhere"
        removed = portus.mend(url(server), uncommitted=True, links=links)
        assert removed == [str(run / "one.bin")]
        other.close()
        until_saved_are(server, set())
        removed = portus.mend(url(server), uncommitted=True, links=links)
        assert removed == [str(run / "two.bin")]


def until_saved_are(server: Server, models: set[str]) -> None:
    """A host hears a moment later that a client is gone."""
    until = time.monotonic() + 60
    while set(server._house.pools.of("default")._claims) != models:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_files_that_lead_to_a_pool_that_was_here_once_are_left_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that serves the wrong directory must not cost the references to the right one."""
    monkeypatch.chdir(run)
    address = Address(Scheme.UNIX, path=str(run / "host.sock"))
    with serving(run / "right", address=address) as server:
        place = url(server)
        cut_off_while_replacing(run, place)
    with serving(run / "wrong", address=address):
        assert portus.mend(place, uncommitted=True) == []
    with serving(run / "right", address=address):
        assert read(run / "last") == [1, 1, 2]
        assert portus.mend(place, uncommitted=True) == []
        assert read(run / "last") == [2, 2, 2]


def test_parts_of_a_group_that_a_rank_never_committed_are_mended_once_no_rank_saves(
    run: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mending, "_CLAIM_S", 0.1)
    group = new_id()
    path = run / "step_1" / "rank-0-of-2.shard"
    with portus.PoolCheckpointer(host, part_model("run", 0, 2)) as rank:
        token = part_token(group, 0)
        rank.save({"format": 1}, 1, token=token, reference={str(path): "format"}).wait()
    with portus.PoolCheckpointer(host, part_model("run", 1, 2)) as other:
        other.prepare(0)
        other.save({"format": 1}, 0, token=part_token(new_id(), 1)).wait()
        POOLS.closed(other._versions)  # as if it were another process
        assert portus.mend(host, uncommitted=True) == [], "it may commit yet"
    monkeypatch.setattr(mending, "_CLAIM_S", 60.0)
    assert portus.mend(host, uncommitted=True) == [str(path)]


def test_a_part_that_is_committed_while_mend_looks_makes_its_group_whole(
    run: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank of a job that ends, and the first of the next one."""
    monkeypatch.setattr(mending, "_CLAIM_S", 60.0)
    group = new_id()
    path = run / "step_1" / "rank-0-of-2.shard"
    with portus.PoolCheckpointer(host, part_model("run", 0, 2)) as rank:
        token = part_token(group, 0)
        rank.save({"format": 1}, 1, token=token, reference={str(path): "format"}).wait()
    last = portus.PoolCheckpointer(host, part_model("run", 1, 2))
    last.save({"format": 1}, 0, token=part_token(new_id(), 1)).wait()
    POOLS.closed(last._versions)  # as if it were another process

    def commit_and_end() -> None:
        last.save({"format": 1}, 1, token=part_token(group, 1)).wait()
        last.close()

    with at("return", census, elsewhere(commit_and_end)):
        assert portus.mend(host, uncommitted=True) == []
    assert portus.mend(host, uncommitted=True) == []
    assert torch.load(path) == 1


def test_a_part_that_was_never_committed_is_never_taken_from_another_step(run: Path) -> None:
    with portus.PoolCheckpointer(run / ".portus", "run") as trainer:
        save(trainer, run / "one", 1).wait()
        _, keeper = trainer._pool.open_or_create()
        keeper.place(str(run / "two.bin"), bytes(16), 2, "run", "number")
        with pytest.raises(portus.UsageError, match="never committed"):
            torch.load(run / "two.bin")


def test_mending_what_is_not_there_does_nothing(run: Path, place: str) -> None:
    assert portus.mend(run / "nothing", uncommitted=True) == []
    assert portus.mend(place, uncommitted=True) == []


class Slow(LocalFiles):
    """Between the link of a reference file and its name something else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def link(self, source: str, target: str) -> None:
        if not target.endswith(".new"):
            self.reached.set()
            self.go_on.wait(10)
        super().link(source, target)


def test_a_file_that_is_being_placed_is_not_taken_for_a_deleted_one(run: Path) -> None:
    with portus.PoolCheckpointer(run / ".portus", "run") as trainer:
        save(trainer, run / "one", 1).wait()
        files, writer = Slow(), WRITERS.open(trainer.path)
        keeper = Keeper(trainer.path, writer, files)
        place = (str(run / "coming"), bytes(15) + b"x", 2, "run")
        placing = threading.Thread(target=keeper.place, args=place)
        looking = threading.Thread(target=keeper.deleted)
        placing.start()
        assert files.reached.wait(10)
        looking.start()
        looking.join(0.2)  # all the time it needs, if nothing holds it up
        files.go_on.set()
        placing.join()
        looking.join()
        assert portus.is_reference(run / "coming")
        WRITERS.close(writer)
