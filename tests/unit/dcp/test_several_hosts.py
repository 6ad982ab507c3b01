"""Sharded checkpoints over several storage hosts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

import portus
import portus.dcp
from portus.errors import UsageError
from portus.reach.daemon.requests.guest import Guest
from portus.reach.daemon.session import ServedConnection
from portus.reach.index.place import Place, PlaceKind
from portus.reach.protocol.messages import Message
from tests.hosts import Host, serving, url
from tests.unit.dcp.running import run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def held(host: str) -> dict[str, list[int]]:
    """By rank, the steps that are on a host."""
    with portus.open(host) as pool:
        return {model.partition("/")[2]: sorted(pool.steps(model)) for model in pool.models()}


@pytest.mark.long
def test_ranks_are_spread_over_hosts_and_their_shards_loaded_by_other_numbers_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()
    answer = ServedConnection._answer

    def heard(served: ServedConnection, guest: Guest, message: Message) -> None:
        asked[message.kind.name] += 1
        answer(served, guest, message)

    monkeypatch.setattr(ServedConnection, "_answer", heard)
    with serving(tmp_path / "a") as first, serving(tmp_path / "b") as second:
        a, b = url(first), url(second)
        run(tmp_path, "hosts_save:4:fsdp:5", PORTUS_POOL=f"{a},{b}")
        # 5 saves of 4 ranks, of which 2 are removed; a removal reads nothing.
        requests = {"BEGIN": 20, "CONFIRM": 20, "RETIRE": 8, "PIN": 0}
        assert {name: asked[name] for name in requests} == requests
        loads = [f"hosts_load:{count}:fsdp:5" for count in (1, 2, 3)]
        run(tmp_path, *loads, PORTUS_POOL=f"{a},{b}")
        assert held(a) == {"rank-0": [3, 4, 5], "rank-2": [3, 4, 5]}, "keep is for all hosts"
        assert held(b) == {"rank-1": [3, 4, 5], "rank-3": [3, 4, 5]}
        run(tmp_path, "hosts_load:2:fsdp:4", PORTUS_POOL=f"{b},{a}")
        names = sorted(each for each in os.listdir(tmp_path) if each.startswith("step_"))
        assert names == ["step_3", "step_4", "step_5"]


@pytest.mark.long
def test_one_of_two_hosts_dies_and_is_back_and_what_was_complete_loads(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as first, Host(tmp_path / "b") as second:
        both = f"{url(first)},{second.url}"
        run(
            tmp_path,
            "hosts_train:2:1:5:4,5",
            PORTUS_POOL=both,
            HOST=str(second.process.pid),
        )
        second.ended()
        second.start()
        run(tmp_path, "hosts_load:1:fsdp:3", "hosts_train:2:6:8", PORTUS_POOL=both)
        run(tmp_path, "hosts_load:3:fsdp:8", PORTUS_POOL=both)


@pytest.mark.long
def test_a_host_that_is_missing_is_said_by_its_pointers(tmp_path: Path) -> None:
    with serving(tmp_path / "a") as first:
        with serving(tmp_path / "b") as second:
            run(tmp_path, "hosts_save:2:fsdp", PORTUS_POOL=f"{url(first)},{url(second)}")
            gone = url(second)
        with pytest.raises(AssertionError, match=gone):
            run(tmp_path, "hosts_load:1:fsdp:2", PORTUS_POOL=url(first))


def test_several_storage_hosts_are_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    named = Place.parse(["portus://a", "portus+tls://me@b:1", "portus://a:7117"])
    assert (named.kind, named.path) == (PlaceKind.HOSTS, "portus://a:7117,portus+tls://me@b:1")
    assert [named.of_rank(rank).path for rank in (0, 1, 4)] == [
        "portus://a:7117",
        "portus+tls://me@b:1",
        "portus://a:7117",
    ]
    assert Place.parse(named.path) == Place.parse("portus://a , portus+tls://me@b:1") == named
    monkeypatch.setenv("PORTUS_POOL", named.path)
    assert Place.parse(None) == named
    assert Place.parse(["portus://a"]) == Place.parse("portus://a")
    assert Place.parse("portus+unix:///a,b").kind is PlaceKind.HOST, "a comma in a path"
    for wrong in ([], ["portus://a", "/pools"], ["pools"], "portus://a,/pools"):
        with pytest.raises(UsageError, match=r"expected|several pools are on storage hosts"):
            Place.parse(wrong)
    with (
        pytest.raises(UsageError, match="saved to one pool; expected one storage host, found 2"),
        contextlib.closing(portus.PoolCheckpointer(named.path, "run")),
    ):
        raise AssertionError("it was taken")
