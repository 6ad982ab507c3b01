"""Pulls and pushes by requests that are carried out late, several at once: as a card does it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from portus.engine.copying.local import hash_sources
from portus.engine.copying.segments import Column, Sources, Stop
from portus.engine.format.checksum import UNIT
from portus.engine.media.base import MappedMedium, Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import TransportError
from portus.reach.media.local import LocalFiles
from portus.reach.media.space import Memory
from portus.reach.pools.image_draft import sum_sources
from portus.reach.transport import one_sided
from portus.reach.transport.one_sided import (
    Landing,
    PinnedPool,
    Rings,
    TransferResult,
    is_pinnable,
    transfer,
)
from portus.reach.transport.regions import Regions
from portus.reach.transport.stream import EndedError, Link
from portus.reach.transport.verbs import Domain, QueuePair, Region, WorkError
from portus.reach.versions.parts import sources
from portus.reach.versions.pool_draft import pack, place

KEY = 7
DEPTH = 6
SIZES = [0, 1, 63, 64, 65, 4096, 65_535, 65_536, 300_001, 0, UNIT, UNIT + 5, *range(1, 400)]

MORE = [UNIT] * 3 + [5000] * 50


class Card(QueuePair):
    """A queue pair whose requests are carried out when somebody looks: some, never ahead."""

    def __init__(self, registry: Registry, seed: int, fail_at: int = -1) -> None:
        self._registry = registry
        self.closed = False
        self.requests = 0
        self.longest = 0
        self._chance = random.Random(seed)
        self._fail_at = fail_at
        self._queue: deque[tuple[int, int, int]] = deque()
        self.keys: list[tuple[int, int, int]] = []
        """Where storages of the other side are, their lengths, and their keys."""

    def read(self, target: int, local_key: int, source: int, remote_key: int, length: int) -> None:
        self._request(target, source, length, (target, local_key), (source, remote_key))

    def write(self, target: int, remote_key: int, source: int, local_key: int, length: int) -> None:
        self._request(target, source, length, (source, local_key), (target, remote_key))

    def poll(self) -> int:
        assert not self.closed
        count = self._chance.randint(0, len(self._queue))
        for _ in range(count):
            ctypes.memmove(*self._queue.popleft())
        if 0 <= self._fail_at <= self.requests:
            raise WorkError("made to fail", denied=True)
        return count

    def close(self) -> None:
        self.closed = True

    def _request(
        self, target: int, source: int, length: int, local: tuple[int, int], remote: tuple[int, int]
    ) -> None:
        assert not self.closed
        [key] = {key for at, size, key in self.keys if at <= remote[0] < at + size}
        assert remote[1] == key
        start, size = self._registry.live[local[1]]
        assert start <= local[0], "it begins before its region"
        assert local[0] + length <= start + size, "it leaves its region"
        self.requests += 1
        self.longest = max(self.longest, length)
        self._queue.append((target, source, length))
        assert len(self._queue) <= DEPTH


class Registry(Domain):
    """Registers anything, without a device, and knows what is registered."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.live: dict[int, tuple[int, int]] = {}
        self.made = 0
        self._room = room

    def register_dmabuf(self, descriptor: int, offset: int, length: int) -> Region:
        os.fstat(descriptor)
        return self.register(offset, length, remote=True, writable=False)

    def register(self, start: int, length: int, *, remote: bool, writable: bool) -> Region:
        if length > self._room:
            raise TransportError(f"cannot register {length} bytes")
        self.made += 1
        number = self.made
        self.live[number] = start, length
        close = SimpleNamespace(lkey=number, rkey=KEY, close=lambda: self.live.pop(number))
        return Region(start, length, close)


@contextlib.contextmanager
def conversation() -> Iterator[tuple[Link, socket.socket]]:
    """The host's end, and the client's."""
    here, there = socket.socketpair()
    link = Link(here, is_client=False, name="client", silence_s=60)
    with there:
        yield link, there
    link.close()


@pytest.fixture
def link() -> Iterator[Link]:
    with conversation() as (link, _):
        yield link


class Client:
    """Storages of these sizes, and where the host finds them."""

    def __init__(self, sizes: list[int]) -> None:
        self.lengths = np.array(sizes, np.int64)
        self.arrays = [np.random.default_rng(n).bytes(n) for n in sizes]
        self.memory = [np.frombuffer(bytearray(each), np.uint8) for each in self.arrays]
        self.place = np.array([each.ctypes.data for each in self.memory], np.int64)
        self.sources = Sources.in_memory(self.place, self.lengths)

    def clear(self) -> None:
        for each in self.memory:
            each[:] = 0


def room_for(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[Sources, int]:
    """Places in a pool, as a draft has them: two extents, cut in the middle of a storage."""
    offsets, size = pack(lengths)
    first = size // 2 // PAGE * PAGE
    rest = -(-size // PAGE) * PAGE - first
    room = [Extent(3 * PAGE, first), Extent(first + 9 * PAGE, rest)]
    extents, _ = place(offsets, lengths, room)
    return sources(np.zeros(len(lengths), np.int64), lengths, extents), first + rest + 20 * PAGE


def pull(card: Card, landing: Landing, moved: Sources, place: Column, link: Link) -> TransferResult:
    """Pull what lies at ``place`` with the client."""
    return move(card, landing, moved, place, link, is_pull=True)


def push(card: Card, landing: Landing, moved: Sources, place: Column, link: Link) -> TransferResult:
    return move(card, landing, moved, place, link, is_pull=False)


def move(
    card: Card, landing: Landing, moved: Sources, place: Column, link: Link, *, is_pull: bool
) -> TransferResult:
    key = KEY + np.arange(len(place))
    columns = (place.tolist(), moved.length.tolist(), key.tolist())
    card.keys = list(zip(*columns, strict=True))
    there = replace(moved, address=place)
    return transfer(card, landing, there, key, link, is_pull=is_pull)


class Host:
    """A pool, and what is registered of it."""

    def __init__(self, medium: Medium, link: Link) -> None:
        self.registry = Registry()
        self.link = link
        self._medium = medium
        self._rings = Rings(self.registry)

    def card(self, seed: int, fail_at: int = -1) -> Card:
        return Card(self.registry, seed, fail_at)

    def landing(self) -> Landing:
        """A fresh one, as each transfer has it."""
        if isinstance(self._medium, MappedMedium) and is_pinnable(self._medium):
            return PinnedPool(self.registry, self._medium)
        with self._rings.borrow(self.link, self._medium) as ring:
            return ring


@pytest.fixture
def host(medium: Medium, link: Link) -> Host:
    return Host(medium, link)


@pytest.fixture(params=["straight", "ring"])
def medium(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Medium]:
    monkeypatch.setattr(one_sided, "AHEAD", 2)
    monkeypatch.setattr(one_sided, "BLOCK", 5 << 20)
    monkeypatch.setattr(one_sided, "DEPTH", DEPTH)
    size = room_for(np.array([*SIZES, *MORE], np.int64))[1]
    if request.param == "straight":
        made: Medium = Memory(size)
    else:
        made = LocalFiles().create(str(tmp_path / "pool"), size)
    assert is_pinnable(made) == (request.param == "straight") or made.info.volatile
    yield made
    made.close()


def test_what_is_pulled_is_stored_and_comes_back(medium: Medium, host: Host, seed: int) -> None:
    client = Client(SIZES)
    expected = hash_sources(client.sources, Stop())
    moved, _ = room_for(client.lengths)
    card = host.card(seed)
    done = pull(card, host.landing(), moved, client.place, host.link)
    assert np.array_equal(done.digests, expected)
    assert done.crcs.tolist() == sum_sources(client.sources).tolist()
    assert done.bounced == (0 if is_pinnable(medium) else moved.size)
    assert card.longest <= one_sided.PIECE
    client.clear()
    done = push(host.card(seed), host.landing(), moved, client.place, host.link)
    assert np.array_equal(done.digests, expected)
    for array, memory in zip(client.arrays, client.memory, strict=True):
        assert memory.tobytes() == array


def test_what_lies_between_two_storages_stays_as_it_is(
    medium: Medium, host: Host, seed: int
) -> None:
    """Though they lie alike on both sides: it may be another version's."""
    medium.store(0, b"x" * 4 * PAGE)
    memory = np.frombuffer(bytearray(b"y" * 3 * PAGE), np.uint8)
    moved = Sources(
        address=np.zeros(2, np.int64),
        length=np.array([2000, 100]),
        extent_offset=np.array([PAGE, 2 * PAGE]),
        extent_length=np.array([2000, 100]),
    )
    start = memory.ctypes.data
    card = host.card(seed)
    pull(card, host.landing(), moved, np.array([start, start + PAGE]), host.link)
    found = bytearray(4 * PAGE)
    medium.load(0, memoryview(found))
    expected = bytearray(b"x" * 4 * PAGE)
    expected[PAGE : PAGE + 2000] = b"y" * 2000
    expected[2 * PAGE : 2 * PAGE + 100] = b"y" * 100
    assert found == expected
    assert card.requests == 2


def test_a_pull_that_fails_anywhere_closes_the_pair_first(
    medium: Medium, host: Host, seed: int
) -> None:
    client = Client(MORE)
    moved, _ = room_for(client.lengths)
    failed = 0
    for fail_at in range(1, 13):
        card = host.card(seed, fail_at)
        with pytest.raises(WorkError):
            pull(card, host.landing(), moved, client.place, host.link)
        assert card.closed
        failed += 1
    assert failed == 12
    done = pull(host.card(seed), host.landing(), moved, client.place, host.link)
    assert np.array_equal(done.digests, hash_sources(client.sources, Stop()))


def test_a_client_that_hangs_up_ends_a_pull(medium: Medium, host: Host) -> None:
    class Stuck(Card):
        def poll(self) -> int:
            return 0

    client = Client([70_000])
    card, landing = Stuck(host.registry, 0), host.landing()
    with conversation() as (link, there):
        there.close()
        with pytest.raises(EndedError, match="client is gone"):
            pull(card, landing, room_for(client.lengths)[0], client.place, link)
    assert card.closed


def test_a_block_of_a_pool_is_registered_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided, "BLOCK", 1 << 20)
    registry, medium = Registry(), Memory(1 << 19)
    pool, start = PinnedPool(registry, medium), medium.address(Extent(0, 0))
    first = pool.region(start)
    assert (first.length, pool.region(start + 5)) == (1 << 19, first)
    medium.grow(5 << 20)
    assert pool.region(start + 5) is first
    rest = pool.region(start + (1 << 19))  # what was added to the first block
    assert (rest.start, rest.length) == (first.end, 1 << 19)
    assert pool.region(start + (3 << 20) + 7).start == first.start + (3 << 20)
    assert registry.made == 3
    medium.close()


def test_rings_are_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch, link: Link) -> None:
    monkeypatch.setattr(one_sided, "RINGS_MAX", 1)
    registry, medium = Registry(), Memory(1 << 19)
    rings = Rings(registry)
    with conversation() as (lost, there):
        there.close()
        with rings.borrow(link, medium) as ring:
            assert ring.region(0).length == one_sided.AHEAD * UNIT
            with pytest.raises(EndedError), rings.borrow(lost, medium):
                pass
        with rings.borrow(lost, medium) as again:
            assert again is ring
    assert registry.made == 1
    medium.close()


# --- the client's regions ---


def taken(regions: Regions, owners: list[object], address: list[int], *, late: bool) -> list[int]:
    """Register these, as a save does, end the save, and give the numbers of what was used."""
    length = np.full(len(owners), 100, np.int64)
    lasting = np.full(len(owners), late, np.bool_)
    known = regions.take(owners, np.array(address, np.int64), length, lasting)
    starts = [each.region.start for each in known]
    regions.give_back(known)
    return starts


def test_a_region_is_kept_for_the_same_owner_at_the_same_place_alone() -> None:
    registry = Registry()
    regions = Regions(registry)
    one, other = object(), object()
    assert taken(regions, [one, other], [1000, 2000], late=True) == [1000, 2000]
    taken(regions, [one, other], [1000, 2000], late=True)
    assert registry.made == 2
    taken(regions, [object(), other], [1000, 2000], late=True)  # another owner, an old address
    assert registry.made == 3
    taken(regions, [object(), other], [1000, 3000], late=True)  # the same owner, elsewhere
    assert registry.made == 5
    assert len(registry.live) == 2, "what is not named any more is let go of"


def test_what_is_copied_at_once_is_registered_for_one_save() -> None:
    registry = Registry()
    regions = Regions(registry)
    taken(regions, [object()], [1000], late=False)
    assert (len(regions), registry.live) == (0, {})


def test_a_region_in_use_outlives_a_save_that_does_not_name_it() -> None:
    registry = Registry()
    regions = Regions(registry)
    length, lasting = np.array([100]), np.array([True])
    first = regions.take([object()], np.array([1000]), length, lasting)
    taken(regions, [object()], [2000], late=True)
    assert (1000, 100) in registry.live.values()
    regions.give_back(first)
    assert list(registry.live.values()) == [(2000, 100)]
    regions.forget()
    assert registry.live == {}


def test_a_registration_that_is_refused_leaves_none_in_use() -> None:
    registry = Registry(room=1000)
    regions = Regions(registry)
    lengths, lasting = np.array([100, 2000]), np.array([False, False])
    with pytest.raises(TransportError, match="cannot register 2000"):
        regions.take([object(), object()], np.array([1000, 2000]), lengths, lasting)
    assert registry.live == {}
