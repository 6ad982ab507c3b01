"""Saves and restores by requests that read and write the client's memory, without such a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from portus.engine.copying.local import hash_sources
from portus.engine.copying.segments import Sources, Stop, memory
from portus.errors import MediumError, TransportError, UsageError
from portus.reach.daemon.server import Server
from portus.reach.index.check import check
from portus.reach.transport.regions import SMALL
from portus.reach.versions.host import HostPool
from tests import soft_rdma
from tests.hardware.states import Bytes, holds, loaded, saved, snapshot_of, state_of, steps
from tests.hosts import connect_again_at_once, serving, url
from tests.moments import until

SIZES = [0, 1, 64, 4096, SMALL - 1, SMALL, 70_001, 0, (16 << 20) + 5, 100, *range(1, 50)]
SMALL_ONES = sum(size for size in SIZES if size < SMALL)


@pytest.fixture(autouse=True)
def by_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    soft_rdma.use(monkeypatch)
    connect_again_at_once(monkeypatch)


@pytest.fixture(params=["memory", "file"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    place = "memory:64M" if request.param == "memory" else tmp_path / "pools"
    with serving(place, quota=64 << 20) as made:
        yield made


@contextlib.contextmanager
def pool_on(server: Server) -> Iterator[HostPool]:
    with contextlib.closing(HostPool(url(server), "run")) as pool:
        yield pool


def state() -> list[Bytes]:
    return [np.full(size, number % 251, np.uint8) for number, size in enumerate(SIZES)]


def is_sound(server: Server) -> bool:
    """Once the host has noticed that a connection ended."""
    hosted = server.house.pools.of("default")
    until(lambda: not hosted.saves, within_s=20)
    return not hosted.saves and not hosted.writer._space._held and check(hosted.writer) == []


def test_a_state_of_all_sizes_comes_back_and_small_ones_go_over_the_socket(server: Server) -> None:
    counts, total = server.house.counters.counts, sum(SIZES)
    with pool_on(server) as pool:
        stats = saved(pool, snapshot_of(state(), 1))
        straight = server.house.pools.of("default").writer.medium.info.volatile
        assert stats.bounced_bytes == (SMALL_ONES if straight else total)
        assert counts["verbs_bytes"] == total - SMALL_ONES
        assert counts["pulled_bytes"] == total
        assert counts["bounced_bytes"] == (0 if straight else total - SMALL_ONES)
        assert holds(pool, state(), 1)
        assert counts["verbs_bytes"] == 2 * (total - SMALL_ONES)
    assert is_sound(server)


def test_bytes_that_arrive_otherwise_cost_a_version_and_then_go_over_the_socket(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that another thread writes between the pull and the hash."""
    mine, read = state(), soft_rdma.SoftPair.read
    start = mine[8].ctypes.data

    def torn(
        pair: soft_rdma.SoftPair, target: int, own: int, source: int, key: int, length: int
    ) -> None:
        read(pair, target, own, source, key, length)
        if start <= source < start + SIZES[8]:
            memory(target, 1)[0] ^= 1

    monkeypatch.setattr(soft_rdma.SoftPair, "read", torn)
    with pool_on(server) as pool:
        for step in (1, 2):
            before = server.house.counters.counts["verbs_bytes"]
            snapshot = snapshot_of(mine, step)
            snapshot.late[8] = False  # no fence guards it
            if step == 1:
                with pytest.raises(TransportError, match="arrived are not those that were sent"):
                    saved(pool, snapshot)
                assert is_sound(server)
            else:
                saved(pool, snapshot)
        direct = sum(size for size in SIZES if size >= SMALL) - SIZES[8]
        assert server.house.counters.counts["verbs_bytes"] - before == direct
        assert steps(pool) == [2]
        assert holds(pool, mine, 2)


def test_bytes_that_change_while_they_are_written_back_are_not_handed_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = soft_rdma.SoftPair.write

    def torn(
        pair: soft_rdma.SoftPair, target: int, key: int, source: int, own: int, length: int
    ) -> None:
        write(pair, target, key, source, own, length - 1)

    with pool_on(server) as pool:
        saved(pool, snapshot_of(state(), 1))
        monkeypatch.setattr(soft_rdma.SoftPair, "write", torn)
        with pytest.raises(TransportError, match="load again"):
            loaded(pool, [np.zeros_like(each) for each in state()], 1)
        monkeypatch.setattr(soft_rdma.SoftPair, "write", write)
        assert holds(pool, state(), 1)


def test_a_handle_that_lies_is_refused_and_others_save(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool_on(server) as pool:
        snapshot = snapshot_of(state(), 1)
        draft = pool.draft(snapshot)
        draft._ready(Stop())
        for region in draft._reached.taken:  # type: ignore[union-attr]
            region.region.close()
        with pytest.raises(UsageError, match="a region cannot be reached"):
            draft.copy(np.arange(len(SIZES)), snapshot.address, Stop())
        draft.release()
        assert is_sound(server)
        saved(pool, snapshot_of(state(), 2))
        assert holds(pool, state(), 2)


def test_an_offer_without_room_may_be_made_again_and_nothing_is_sent_twice(server: Server) -> None:
    big = [*state_of(40 << 20, 1), np.full(100, 7, np.uint8)]
    with pool_on(server) as pool:
        saved(pool, snapshot_of(state_of(30 << 20, 1), 1))
        snapshot = snapshot_of(big, 2)
        draft, indices = pool.draft(snapshot), np.arange(2)
        with pytest.raises(MediumError, match="more bytes needed"):
            draft.copy(indices, snapshot.address, Stop())
        draft.copy(indices[1:], snapshot.address[1:], Stop())
        pulled = server.house.counters.counts["pulled_bytes"]
        pool.let_go([entry.info.token for entry in pool.catalogue().entries()])
        digests = draft.copy(indices, snapshot.address, Stop())
        lengths = np.array([40 << 20, 100])
        assert np.array_equal(
            digests, hash_sources(Sources.in_memory(snapshot.address, lengths), Stop())
        )
        assert server.house.counters.counts["pulled_bytes"] - pulled == 40 << 20
        draft.release()
    assert is_sound(server)


def test_memory_that_cannot_be_registered_goes_over_the_socket(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(soft_rdma.SoftDomain, "refused", frozenset({70_001}))
    with pool_on(server) as pool, pytest.raises(UsageError, match="cannot register 70001"):
        saved(pool, snapshot_of(state(), 1))
    monkeypatch.setenv("PORTUS_TRANSPORT", "auto")
    with pool_on(server) as pool:
        for step in (2, 3):
            assert saved(pool, snapshot_of(state(), step)).bounced_bytes == sum(SIZES)
        assert holds(pool, state(), 3)
    assert sum("over the socket" in each for each in caplog.messages) == 1
    assert is_sound(server)
