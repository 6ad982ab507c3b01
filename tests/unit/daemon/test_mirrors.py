"""``portus serve POOL --mirror URL``: what a storage host has outlives its machine."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.errors import TransportError, UsageError
from portus.reach.daemon import mirrors as mirrors_of_hosts
from portus.reach.daemon.main import prepare
from portus.reach.daemon.mirrors import TenantMirrors
from portus.reach.daemon.options import ServeOptions
from portus.reach.mirror.address import StoreAddress, parse
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.opening import open_store
from portus.reach.mirror.store import ListedObject, Store, UnwritableError
from tests.hosts import Host, serving, url
from tests.moments import until
from tests.same import assert_same
from tests.unit.cli.scene import pointing
from tests.unit.cli.scene import portus as portus_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")


def state(step: int) -> dict[str, Any]:
    return {"frozen": torch.arange(1000), "model": torch.full((64,), float(step)), "step": step}


@pytest.fixture
def bucket(tmp_path: Path) -> StoreAddress:
    return parse(f"file://{tmp_path}/bucket")


def steps(bucket: StoreAddress, model: str = "net", tenant: str = "default") -> list[int]:
    below = parse(f"{bucket}/{tenant}")
    return sorted(each.step for each in Mirror(open_store(below), model).read().added)


def save(pools: Path, bucket: StoreAddress | None, *wanted: int) -> None:
    """Save these steps to a host, and end it."""
    mirrors = None if bucket is None else TenantMirrors(bucket)
    with (
        serving(pools, mirrors=mirrors) as server,
        portus.PoolCheckpointer(url(server), "net") as saver,
    ):
        for step in wanted:
            saver.save(state(step), step).wait()


@pytest.mark.parametrize("place", ["directory", "memory:64M"])
def test_a_fresh_host_hands_out_what_the_mirror_of_the_one_before_has(
    tmp_path: Path, bucket: StoreAddress, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pointers that the trainer has lead there."""
    monkeypatch.chdir(tmp_path)
    where = [place if ":" in place else str(tmp_path / f"{place} {n}") for n in range(2)]
    with serving(where[0], mirrors=TenantMirrors(bucket)) as server:
        with pointing(url(server), "net") as files:
            for step in (1, 2, 3):
                files.save(state(step), str(tmp_path / f"{step % 2}.ckpt"), step).wait()
        with portus.PoolCheckpointer(url(server), "other") as saver:
            saver.save(state(7), 7).wait()
        with portus.open(url(server)) as pool:
            expected = pool.steps("net")
    assert steps(bucket) == expected == [2, 3]
    assert steps(bucket, "other") == [7]
    with serving(where[1], mirrors=TenantMirrors(bucket)) as server:
        portus.allow(url(server))
        for step in (2, 3):
            path = tmp_path / f"{step % 2}.ckpt"
            assert portus.is_reference(path)
            assert_same(portus.load(path), state(step))
        with portus.PoolCheckpointer(url(server), "net", keep=2) as saver:
            assert_same(saver.load(), state(3))
            saver.save(state(4), 4).wait()
        with portus.PoolCheckpointer(url(server), "other") as saver:
            assert_same(saver.load(), state(7))
    assert steps(bucket)[-1] == 4


def test_a_claim_starts_no_thread_and_writes_nothing_to_the_mirror(
    tmp_path: Path, bucket: StoreAddress
) -> None:
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "portus-mirror-net"]

    with (
        serving(tmp_path / "pools", mirrors=TenantMirrors(bucket)) as server,
        portus.PoolCheckpointer(url(server), "net") as saver,
    ):
        [hosted] = server.house.pools.all()
        assert hosted.mirror is not None
        assert "net" in hosted.mirror._copiers
        assert (threads(), list((tmp_path / "bucket").rglob("*"))) == ([], [])
        saver.save(state(1), 1).wait()
        assert len(threads()) == 1
    assert steps(bucket) == [1]


def test_the_newest_versions_that_were_removed_stay_in_the_mirror_and_are_not_fetched(
    tmp_path: Path, bucket: StoreAddress
) -> None:
    for step in range(1, 7):  # each is mirrored, before the next one removes another
        with (
            serving(tmp_path / "pools", mirrors=TenantMirrors(bucket, keep=2)) as server,
            portus.PoolCheckpointer(url(server), "net", keep=2) as saver,
        ):
            saver.save(state(step), step).wait()
    assert steps(bucket) == [3, 4, 5, 6]
    with (
        serving(tmp_path / "fresh", mirrors=TenantMirrors(bucket, keep=1)) as server,
        portus.PoolCheckpointer(url(server), "net", keep=2) as saver,
    ):
        with portus.open(url(server)) as pool:
            assert pool.steps("net") == [5, 6]
        saver.save(state(7), 7).wait()
    assert steps(bucket) == [5, 6, 7]
    with serving(tmp_path / "fresh", mirrors=TenantMirrors(bucket, keep=1)) as server:
        assert portus_command("rm", "net@7", "--pool", url(server)).code == 0
    assert steps(bucket) == [6, 7]
    assert_same(portus.load(f"{bucket}/default/net"), state(6))
    assert_same(portus.load(f"{bucket}/default/net@7"), state(7))
    moved = portus.load(f"{bucket}/default/net@7", map_location="meta")
    leaves = torch.utils._pytree.tree_leaves(moved)
    assert all(each.is_meta for each in leaves if torch.is_tensor(each))


def test_what_a_claim_fetched_from_a_replica_is_mirrored_without_a_commit(
    tmp_path: Path, bucket: StoreAddress
) -> None:
    with serving(tmp_path / "second") as second:
        with (
            serving(tmp_path / "first", replica=url(second)) as first,
            portus.PoolCheckpointer(url(first), "net") as saver,
        ):
            saver.save(state(1), 1).wait()
        mirrors = TenantMirrors(bucket)
        with (
            serving(tmp_path / "fresh", mirrors=mirrors, replica=url(second)) as fresh,
            portus.PoolCheckpointer(url(fresh), "net"),
        ):
            until(lambda: steps(bucket) == [1])


def test_a_host_makes_the_lost_log_of_its_mirror_anew_when_it_starts(
    tmp_path: Path, bucket: StoreAddress
) -> None:
    save(tmp_path / "pools", bucket, 1, 2)
    expected = steps(bucket)
    shutil.rmtree(tmp_path / "bucket/default/net/_portus/log")
    assert steps(bucket) == []
    with serving(tmp_path / "pools", mirrors=TenantMirrors(bucket)):
        pass
    assert steps(bucket) == expected


def test_a_start_of_a_host_lists_each_model_once_and_once_more(
    tmp_path: Path, bucket: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To know which models and tenants there are takes a list for each, and one that finds the
    end."""
    names = ["net", "other", "third"]
    with (
        serving(tmp_path / "pools", mirrors=TenantMirrors(bucket)) as server,
        portus.PoolCheckpointer(url(server), "net") as saver,
    ):
        saver.save(state(1), 1).wait()
        for name in names[1:]:
            with portus.PoolCheckpointer(url(server), name) as other:
                other.save(state(1), 1).wait()
    listed: list[str] = []

    def opened(address: StoreAddress) -> Any:
        return Listed(open_store(address), listed)

    monkeypatch.setattr(mirrors_of_hosts, "open_store", opened)
    for pools in ("pools", "elsewhere"):
        with serving(tmp_path / pools, mirrors=TenantMirrors(bucket)) as server:
            portus.PoolCheckpointer(url(server), "net").close()
        assert len(listed) in (len(names) + 1, len(names) + 1 + len(["default"]) + 1), pools
        listed.clear()


class Listed:
    """A store that notes each prefix that it lists."""

    def __init__(self, store: Store, listed: list[str]) -> None:
        self._store = store
        self._listed = listed

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        self._listed.append(prefix)
        return self._store.list(prefix, after)

    def __getattr__(self, call: str) -> Any:
        return getattr(self._store, call)


class Away:
    """A store that does not answer, while it is told so."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, call: str) -> Any:
        if is_away and call != "close":
            raise TransportError("the store does not answer")
        return getattr(self._store, call)


is_away: list[bool] = []


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Not empty: no store answers a host."""
    is_away.clear()
    monkeypatch.setattr(mirrors_of_hosts, "open_store", lambda address: Away(open_store(address)))
    monkeypatch.setattr("portus.reach.mirror.background_copier._PAUSE_MIN_S", 0.01)
    return is_away


def test_a_host_without_an_answer_of_its_mirror_serves_what_it_has_and_starts_no_new_pool(
    tmp_path: Path, bucket: StoreAddress, away: list[bool]
) -> None:
    pools = tmp_path / "pools"
    away.append(True)
    with (
        pytest.raises(TransportError, match="does not answer"),
        serving(pools, mirrors=TenantMirrors(bucket)),
    ):
        raise AssertionError
    away.clear()
    save(pools, bucket, 1)
    away.append(True)
    with serving(pools, mirrors=TenantMirrors(bucket)) as server:
        hosted = server.house.pools.of("default")
        with portus.PoolCheckpointer(url(server), "net") as saver:
            assert_same(saver.load(), state(1))
            saver.save(state(2), 2).wait()
        assert hosted.mirror is not None
        assert [info.step for info in hosted.mirror.missing()] == [1, 2]
        assert hosted.mirror.lag_s > 0
        mirror = hosted.mirror
        until(lambda: "does not answer" in mirror.failure)
        away.clear()
        until(lambda: not mirror.missing())
        until(lambda: not mirror.failure)
        assert mirror.lag_s == 0
    assert steps(bucket) == [1, 2]


def test_a_model_whose_history_went_on_elsewhere_is_named_and_the_others_are_served(
    tmp_path: Path, bucket: StoreAddress, caplog: pytest.LogCaptureFixture
) -> None:
    behind, pools = tmp_path / "behind", tmp_path / "pools"
    with serving(behind, mirrors=TenantMirrors(bucket)) as server:
        for model in ("net", "other"):
            with portus.PoolCheckpointer(url(server), model) as saver:
                saver.save(state(1), 1).wait()
    shutil.copytree(behind, tmp_path / "copy")
    save(pools, bucket, 2, 3, 4)
    save(tmp_path / "copy", None, 9)
    expected = steps(bucket)
    with (
        caplog.at_level(logging.ERROR),
        serving(tmp_path / "copy", mirrors=TenantMirrors(bucket)) as server,
    ):
        with pytest.raises(UsageError, match="'net' continued elsewhere"):
            portus.PoolCheckpointer(url(server), "net")
        with portus.PoolCheckpointer(url(server), "other") as saver:
            assert_same(saver.load(), state(1))
    assert "continued elsewhere" in caplog.text
    assert steps(bucket) == expected


def test_a_host_replaces_what_its_store_lost_and_deletes_what_never_counted_once_a_day(
    tmp_path: Path,
    bucket: StoreAddress,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pools, there = tmp_path / "pools", tmp_path / "bucket" / "default" / "net" / "versions"
    save(pools, bucket, 1, 2)
    whole = {each: each.read_bytes() for each in there.rglob("*") if each.is_file()}
    assert len(whole) == 4
    left = there / "step-00000009-000000000000" / "cut-off.pt"
    left.parent.mkdir()
    left.write_bytes(b"a part")
    os.utime(left, (1, 1))
    for each in whole:
        each.unlink()
    save(pools, bucket)
    assert left.exists(), "that costs a list of all objects, so no start does it"
    monkeypatch.setattr("portus.reach.mirror.copier._CARE_NS", 0)
    with serving(pools, mirrors=TenantMirrors(bucket)):
        until(lambda: not left.exists())
    assert {each: each.read_bytes() for each in whole} == whole
    assert caplog.text.count("had lost objects") == 2
    assert steps(bucket) == [1, 2]


def rot(pools: Path, step: int) -> None:
    """Damage a step in the pool."""
    [pool] = pools.glob("*.portus")
    data = pool.read_bytes()
    with pool.open("r+b") as file:
        file.seek(data.index(state(step)["model"].numpy().tobytes()))
        file.write(b"rot")


def test_of_lost_versions_those_that_the_pool_has_whole_are_replaced(
    tmp_path: Path,
    bucket: StoreAddress,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pools, there = tmp_path / "pools", tmp_path / "bucket" / "default" / "net" / "versions"
    save(pools, bucket, 1, 2)
    rot(pools, 1)
    [kept] = there.glob("step-00000002-*/*.pt")
    whole = kept.read_bytes()
    shutil.rmtree(there)
    monkeypatch.setattr("portus.reach.mirror.copier._CARE_NS", 0)
    with serving(pools, mirrors=TenantMirrors(bucket)):
        until(lambda: "had lost objects" in caplog.text)
    assert "step 1 lost objects" in caplog.text
    assert kept.read_bytes() == whole


def test_the_mirror_keeps_its_newest_where_what_replaced_it_is_damaged(
    tmp_path: Path, bucket: StoreAddress, caplog: pytest.LogCaptureFixture
) -> None:
    pools = tmp_path / "pools"
    save(pools, bucket, 1)
    with (
        serving(pools) as server,
        portus.PoolCheckpointer(url(server), "net", keep=1) as saver,
    ):
        saver.save(state(2), 2).wait()
    rot(pools, 2)
    save(pools, bucket)
    assert "step 2 is not mirrored" in caplog.text
    assert steps(bucket) == [1]
    shutil.rmtree(pools)
    with (
        serving(pools, mirrors=TenantMirrors(bucket)) as server,
        portus.PoolCheckpointer(url(server), "net") as saver,
    ):
        assert_same(saver.load(), state(1))


def test_a_host_without_the_right_to_delete_says_so_once_and_saves(
    tmp_path: Path,
    bucket: StoreAddress,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Locked(Away):
        def delete(self, names: list[str]) -> None:
            raise UsageError("cannot delete: permission is denied")

    monkeypatch.setattr(mirrors_of_hosts, "open_store", lambda at: Locked(open_store(at)))
    with (
        serving(tmp_path / "pools", mirrors=TenantMirrors(bucket)) as server,
        portus.PoolCheckpointer(url(server), "net", keep=1) as saver,
    ):
        mirror = server.house.pools.of("default").mirror
        assert mirror is not None
        for step in (1, 2, 3):
            saver.save(state(step), step).wait()
            until(lambda: not mirror.missing())
    assert steps(bucket) == [3]
    assert caplog.text.count("permission is denied") == 1
    assert len(list((tmp_path / "bucket" / "default" / "net" / "versions").iterdir())) == 3


def test_tenants_have_mirrors_apart(tmp_path: Path, bucket: StoreAddress) -> None:
    with serving(tmp_path / "pools", mirrors=TenantMirrors(bucket)) as server:
        for number, tenant in enumerate(("anna", "ben")):
            with portus.PoolCheckpointer(url(server, tenant), "net") as saver:
                saver.save(state(number), number).wait()
    assert (steps(bucket, tenant="anna"), steps(bucket, tenant="ben")) == ([0], [1])
    with serving("memory:64M", mirrors=TenantMirrors(bucket)) as server:
        assert {each.tenant for each in server.house.pools.all()} == {"anna", "ben"}
        with portus.PoolCheckpointer(url(server, "ben"), "net") as saver:
            assert_same(saver.load(), state(1))


@pytest.mark.long
def test_portus_serve_waits_for_its_mirror_at_sigterm_and_begins_with_it(
    tmp_path: Path, bucket: StoreAddress
) -> None:
    for number in range(2):
        with Host(tmp_path / f"pools {number}", "--mirror", str(bucket)) as host:
            with portus.PoolCheckpointer(host.url, "net") as saver:
                if number:
                    assert_same(saver.load(), state(1))
                saver.save(state(number + 1), number + 1).wait()
            assert host.stop() == 0
        assert steps(bucket) == list(range(1, number + 2))


def test_wrong_words_end_the_start(tmp_path: Path) -> None:
    for mirror, words in (
        ("s3//bucket", r"--mirror 's3//bucket': expected s3://"),
        ("portus://h", r"--mirror 'portus://h': a storage host is no mirror: .* --replica"),
    ):
        with pytest.raises(UsageError, match=words):
            prepare(ServeOptions(place=str(tmp_path), listen=["127.0.0.1:0"], mirror=mirror))


def test_a_host_with_models_begins_with_no_mirror_that_it_may_read_and_not_write(
    tmp_path: Path, bucket: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReadAlone(Away):
        def create(self, name: str, data: bytes) -> bool:
            raise UnwritableError(f"cannot create {name}: permission is denied")

    save(tmp_path / "pools", bucket, 1)
    expected = steps(bucket)
    monkeypatch.setattr(mirrors_of_hosts, "open_store", lambda at: ReadAlone(open_store(at)))
    with (
        pytest.raises(
            UsageError, match=r"default: nothing can be mirrored there: it may be read, not wri.*"
        ) as raised,
        serving(tmp_path / "pools", mirrors=TenantMirrors(bucket)),
    ):
        raise AssertionError
    assert "give it that right, or name another mirror" in str(raised.value)
    save(tmp_path / "pools", None, 2)
    assert steps(bucket) == expected
