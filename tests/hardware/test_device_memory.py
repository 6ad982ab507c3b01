"""Memory of devices by verbs: what is registered of it, and a whole save where nothing can be.

No GPU is needed. The memory that stands for a device's is in a file of the kernel's, mapped here,
and /dev/udmabuf makes true dmabufs of it. Soft-RoCE takes none (kernel 6.12), so this sees it
refused, and by its address the same memory taken. Where a kernel takes them they are transferred.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pytest

pytest.importorskip("pyverbs.device", reason="no pyverbs; make test-hardware", exc_type=ImportError)

from portus.engine.copying.segments import memory
from portus.engine.media.linux import MAP_ANONYMOUS, MAP_PRIVATE, map_pages, unmap_pages
from portus.engine.pipeline.plan import OnDevice, Snapshot
from portus.engine.spec import PAGE
from portus.errors import TransportError
from portus.reach.daemon.server import Server
from portus.reach.transport.regions import DeviceAccess, Regions
from portus.reach.versions.host import HostPool
from tests.cuda import Library
from tests.hardware.states import Bytes, holds, saved, snapshot_of, state_of, steps
from tests.hardware.test_verbs_host import check_sound, pool_on
from tests.hosts import url

SIZES = [5, 100_000, (2 << 20) + 7, 300, 1 << 20]
"""Some are small; one is no multiple of anything."""

HERE_SIZE = 1 << 20
_CREATE: Final = 0x40187542  # UDMABUF_CREATE, of linux/udmabuf.h
_SEAL_SHRINK: Final = 2
_NO_ACCESS: Final = 0  # PROT_NONE

pytestmark = [
    *(pytest.mark.rdma, pytest.mark.pmem, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("by_verbs_alone"),
]


class Device:
    """So many bytes that stand for a device's memory. They are there when it is settled."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._file = os.memfd_create("device", os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, self.size)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEAL_SHRINK)
        self.start = map_pages(
            0, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, (self._file, 0)
        )

    def export(self, start: int, size: int) -> int:
        """A dmabuf of this range. Raises ``OSError`` where that is not all of the device."""
        if not self.start <= start <= start + size <= self.start + self.size:
            raise OSError(errno.EINVAL, "no memory of the device")
        wanted = bytearray(struct.pack("<IIQQ", self._file, 1, start - self.start, size))
        descriptor = os.open("/dev/udmabuf", os.O_RDWR)
        try:
            return int(fcntl.ioctl(descriptor, _CREATE, wanted))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        unmap_pages(self.start, self.size)
        os.close(self._file)


class Fed:
    """A storage at ``address`` of a device; another way leads to its bytes from here."""

    def __init__(self, address: int, data: Bytes) -> None:
        self.there = OnDevice(0, address, self)
        self._data = data

    def await_device(self) -> None:
        memory(self.there.address, len(self._data))[:] = self._data.data

    @contextlib.contextmanager
    def units(self) -> Iterator[Iterator[tuple[int, int]]]:
        yield iter([(self._data.ctypes.data, len(self._data))])


class Unreachable(Fed):
    """On a device that no processor here has a way to."""

    def await_device(self) -> None:
        """It is."""


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device(sum(SIZES) + PAGE * len(SIZES))
    yield made
    made.close()


def fed_at(start: int, state: Sequence[Bytes], kind: type[Fed] = Fed) -> list[Fed]:
    """Each begins 512 bytes into a page of its own."""
    found, place = [], start
    for each in state:
        found.append(kind(place + 512, each))
        place += -(-(512 + each.nbytes) // PAGE) * PAGE
    return found


def snapshot_on(feeds: Sequence[Fed], state: Sequence[Bytes], step: int) -> Snapshot:
    """``state``: first what is here, then what the feeds have."""
    first = len(state) - len(feeds)
    plain = snapshot_of(state, step)
    owners = [*state[:first], *feeds]
    address = np.where(np.arange(len(state)) < first, plain.address, 0)
    fed = dict(enumerate(feeds, first))
    return dataclasses.replace(plain, address=address, owners=owners, feeds=fed)


def with_driver(pool: HostPool, library: Library) -> Regions:
    """What ``pool`` registers from now on, of devices by that driver."""
    assert pool.links.verbs is not None
    pool.links.verbs = made = Regions(pool.links.verbs.domain, library.driver)
    return made


def takes_dmabufs(regions: Regions, device: Device) -> bool:
    descriptor = device.export(device.start, PAGE)
    try:
        regions.domain.register_dmabuf(descriptor, 0, PAGE).close()
    except TransportError:
        return False
    finally:
        os.close(descriptor)
    return True


def keys_of(regions: Regions) -> set[int]:
    return {each.region.remote_key for each in regions._known.values()}


def states(step: int) -> list[Bytes]:
    """One here, the others on the device."""
    chance = np.random.default_rng(step)
    return [
        *state_of(HERE_SIZE, 1, step),
        *(chance.integers(0, 255, size, np.uint8) for size in SIZES),
    ]


def test_device_memory_is_pulled_straight_by_the_first_way_that_is_taken(
    server: Server, device: Device
) -> None:
    counters, total = server.house.counters, HERE_SIZE + sum(SIZES)
    small = SIZES[0] + SIZES[3]
    with pool_on(url(server)) as pool:
        library = Library(device.export)
        regions = with_driver(pool, library)
        way = DeviceAccess.DMABUF if takes_dmabufs(regions, device) else DeviceAccess.PEER
        state = states(1)
        feeds = fed_at(device.start, state[1:])
        stats = saved(pool, snapshot_on(feeds, state, 1))
        assert stats.bounced_bytes == small, "the small ones alone"
        assert counters.counts["verbs_bytes"] == total - small
        assert counters.counts["pulled_bytes"] == total
        assert regions.way(0) is way
        assert library.ranges, "a dmabuf was made, and offered"
        asked, keys = len(library.ranges), keys_of(regions)
        again = states(2)
        for feed, data in zip(feeds, again[1:], strict=True):
            feed._data = data
        state[0][:] = again[0]
        saved(pool, snapshot_on(feeds, [state[0], *again[1:]], 2))
        assert keys_of(regions) == keys
        assert len(library.ranges) == asked
        assert counters.counts["verbs_bytes"] == 2 * (total - small)
        assert [holds(pool, states(step), step) for step in (1, 2)] == [True, True]
    check_sound(server)


def test_device_memory_that_nothing_registers_is_staged_and_the_save_is_whole(
    server: Server, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """As the addresses of a GPU are without a driver that helps: nothing is mapped there."""
    nowhere = map_pages(0, device.size, _NO_ACCESS, MAP_PRIVATE | MAP_ANONYMOUS, (-1, 0))
    counters, on_device = server.house.counters, sum(SIZES)
    with pool_on(url(server)) as pool, caplog.at_level(logging.WARNING, "portus"):
        regions = with_driver(pool, Library(device.export))
        for step in (1, 2):
            state = states(step)
            feeds = fed_at(nowhere, state[1:], Unreachable)
            stats = saved(pool, snapshot_on(feeds, state, step))
            assert stats.bounced_bytes == on_device
            assert counters.counts["verbs_bytes"] == step * HERE_SIZE, "what is here goes as before"
            assert counters.counts["pulled_bytes"] == step * (HERE_SIZE + on_device)
        assert regions.staged_devices() == [0]
        assert [holds(pool, states(step), step) for step in (1, 2)] == [True, True]
    [line] = [each for each in caplog.messages if "pinned memory" in each]
    assert "Bad address" in line
    unmap_pages(nowhere, device.size)
    check_sound(server)


def test_a_device_whose_bytes_arrive_otherwise_costs_a_save_and_is_staged(
    server: Server, device: Device
) -> None:
    """Its memory is never settled: a card would read what was there before."""
    with pool_on(url(server)) as pool:
        regions = with_driver(pool, Library(device.export))
        state = states(1)
        feeds = fed_at(device.start, state[1:], Unreachable)
        with pytest.raises(
            TransportError, match="the bytes that arrived are not those that were sent"
        ):
            saved(pool, snapshot_on(feeds, state, 1))
        assert regions.staged_devices() == [0]
        saved(pool, snapshot_on(feeds, state, 2))
        assert steps(pool) == [2]
        assert holds(pool, state, 2)
    check_sound(server)
