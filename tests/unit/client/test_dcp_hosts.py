"""Groups over several storage hosts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import portus
from portus.cli.app import app
from portus.dcp import GroupReader, groups, load
from portus.errors import TransportError, UsageError
from portus.index.place import Place, PlaceKind
from tests.hosts import Host, serving, url
from tests.unit.client.test_dcp import run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(*hosts: str, ranks: int = 2) -> tuple[int, list[float]]:
    """The step of what a load takes, and what each rank saved."""
    state: dict[str, Any] = {f"own{rank}": torch.zeros(1000) for rank in range(ranks)}
    group = load(state, GroupReader(hosts, "run"))
    assert all(torch.equal(each, each[0].expand(1000)) for each in state.values())
    return group.step, [float(each[0]) for each in state.values()]


def held(*hosts: str) -> list[tuple[str, int, list[int]]]:
    """By host and rank, the steps that are there."""
    found: dict[tuple[str, int], list[int]] = {}
    for group in groups(hosts, "run"):
        for rank, (pool, info) in group.parts.items():
            found.setdefault((pool.path, rank), []).append(info.step)
    return sorted((host, rank, steps) for (host, rank), steps in found.items())


@pytest.mark.long
def test_one_of_two_hosts_dies_and_comes_back_elsewhere_and_the_newest_whole_group_loads(
    tmp_path: Path,
) -> None:
    with (
        serving(tmp_path / "a") as first,
        Host(tmp_path / "b") as b,
        serving(tmp_path / "c") as other,
    ):
        a, c = url(first), url(other)
        run(tmp_path, "spread:2:1:4", SHARDED_POOL=f"{a},{b.url}")
        assert held(a, b.url) == sorted([(a, 0, [2, 3, 4]), (b.url, 1, [2, 3, 4])])
        assert loaded(c, b.url, a) == (4, [4, 4]), "whatever the order, and with one more"

        both = {"SHARDED_POOL": f"{a},{b.url}", "SHARDED_HOST": str(b.process.pid)}
        said = run(tmp_path, "spread:2:5:10:7", **both)
        b.ended()
        assert "6 rank 1 committed" in said
        assert all(f"{step} rank 1 failed" in said for step in range(7, 11))
        heard = next(line for line in said.splitlines() if line.startswith("rank 0 heard"))
        assert "rank 1 did not commit step 7; the last step that it committed is step 6" in heard
        ((_, _, steps),) = held(a, b.url)
        assert {5, 6} < set(steps), "the last whole group was given up"
        assert len(steps) <= 5, "parts of saves that rank 1 has no part of"
        with pytest.raises(TransportError, match=rf"ranks, those of 1 are not in .*{b.url}") as e:
            loaded(a, b.url)
        assert f"{b.url} cannot be read: " in str(e.value)

        run(tmp_path, "spread:2:11:12", SHARDED_POOL=f"{a},{c},{b.url}")  # a silent host
        with serving(tmp_path / "b") as again:
            b2 = url(again)
            assert loaded(a, b2) == (6, [6, 6]), "the newest whole one of before"
            assert loaded(a, b2, c) == (12, [12, 12])
            run(tmp_path, "spread:2:13:16", SHARDED_POOL=f"{b2},{c},{a}")
            now = held(a, b2, c)
            assert now == sorted([(b2, 0, [14, 15, 16]), (c, 1, [14, 15, 16])]), "moved ones stay"
            assert loaded(a, b2, c) == (16, [16, 16])


def test_ranks_that_name_other_hosts_are_told_at_the_first_save(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        hosts = [url(stack.enter_context(serving(tmp_path / each))) for each in "abc"]
        run(tmp_path, "elsewhere:2", SHARDED_POOL=",".join(hosts))
        assert groups(hosts, "run") == []


def test_several_storage_hosts_are_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Place.named(["portus://a", "portus+tls://me@b:1", "portus://a:7117"])
    assert (named.kind, named.path) == (PlaceKind.HOSTS, "portus://a:7117,portus+tls://me@b:1")
    assert [named.of_rank(rank).path for rank in (0, 1, 4)] == [
        "portus://a:7117",
        "portus+tls://me@b:1",
        "portus://a:7117",
    ]
    assert Place.named(named.path) == Place.named("portus://a , portus+tls://me@b:1") == named
    monkeypatch.setenv("PORTUS_POOL", named.path)
    assert Place.named(None) == named
    assert Place.named(["portus://a"]) == Place.named("portus://a")
    assert Place.named("portus+unix:///a,b").kind is PlaceKind.HOST, "a comma in a path"
    for wrong in ([], ["portus://a", "/pools"], ["pools"], "portus://a,/pools"):
        with pytest.raises(UsageError, match=r"expected|several pools are on storage hosts"):
            Place.named(wrong)
    with pytest.raises(UsageError, match="saved to one pool; expected one storage host, found 2"):
        portus.PoolCheckpointer(named, "run")


@pytest.mark.long
def test_a_directory_leads_to_a_group_on_several_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "a") as first, serving(tmp_path / "c") as other:
        a, c, links = url(first), url(other), str(tmp_path / ".links")
        with serving(tmp_path / "b") as second:
            b = url(second)
            # Rank 1 dies in the save of step 3, whose directory leads to nothing whole.
            run(tmp_path, "directories:2:3", SHARDED_POOL=f"{a},{b}")
            every = f"{c},{b},{a}"
            said = run(tmp_path, "read:1:2:2", "read:1:3:2", PORTUS_POOL=every)
            monkeypatch.setenv("PORTUS_POOL", every)
            assert said.count("has 2") == 2
            listed = CliRunner().invoke(app, ["ls", f"{a},{b}"])
            assert listed.exit_code == 0
            assert "2 of 2, complete" in listed.stdout
            assert "1 of 2, incomplete: not 1" in listed.stdout
            shown = CliRunner().invoke(app, ["show", "run@2"])
            assert a in shown.stdout
            assert b in shown.stdout

        with pytest.raises(TransportError, match=f"those of 1 are not in .*{b} cannot be read"):
            load({}, at(tmp_path / "2"))
        listed = CliRunner().invoke(app, ["ls", f"{a},{b}"])
        assert listed.exit_code != 0
        assert "1 of 2, incomplete: not 1" in listed.stdout
        with pytest.raises(TransportError):
            portus.mend([a, b], uncommitted=True, links=links)
        assert (tmp_path / "2/rank-0-of-2.shard").exists()

        with serving(tmp_path / "b") as again:
            hosts = [a, url(again)]
            assert len(portus.mend(hosts, uncommitted=True, links=links)) == 3
            assert not (tmp_path / "3/meta.pt").exists()
            monkeypatch.setenv("PORTUS_POOL", ",".join(hosts))
            assert torch.load(tmp_path / "2/meta.pt") == {"step": 2}
            portus.materialize(tmp_path / "2")
    assert at(tmp_path / "2") is None
    state = {"step": 0}
    dcp.load(state, checkpoint_id=str(tmp_path / "2"))
    assert state["step"] == 2


def at(directory: Path) -> Any:
    return GroupReader.at(directory)
