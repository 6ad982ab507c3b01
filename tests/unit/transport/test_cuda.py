"""How the memory of a CUDA device is registered, and what follows when that is refused."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import numpy as np
import pytest

from portus.engine.spec import PAGE
from portus.errors import TransportError
from portus.reach.transport import cuda
from portus.reach.transport.cuda import Driver
from portus.reach.transport.regions import HERE, DeviceAccess, Regions, StagedError
from portus.reach.transport.verbs import Region
from tests.cuda import Library, memfd
from tests.unit.transport.test_onesided import Registry

ADDRESS = 0x7F00_0000_0200
"""As torch gives them: a multiple of 512."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refused(_start: int, _size: int) -> int:
    raise OSError


def no_driver() -> Driver:
    raise TransportError("there is no CUDA driver")


class Refusing(Registry):
    """A device that takes no dmabuf; its system, no address but those it knows."""

    def __init__(self, known: range = range(0)) -> None:
        super().__init__()
        self._known = known

    def register_dmabuf(self, descriptor: int, offset: int, length: int) -> Region:
        raise TransportError("cannot register a dmabuf: Operation not supported")

    def register(self, start: int, length: int, *, remote: bool, writable: bool) -> Region:
        if start not in self._known:
            raise TransportError("cannot register: Bad address")
        return super().register(start, length, remote=remote, writable=writable)


def taken(regions: Regions, device: int, address: int = ADDRESS, size: int = 100) -> Region:
    columns = (np.array([address]), np.array([size]), np.array([True]), np.array([device]))
    [known] = regions.take([object()], *columns)
    regions.give_back([known])
    return known.region


def test_a_dmabuf_has_whole_pages_and_says_where_the_bytes_begin() -> None:
    library = Library(memfd)
    driver = library.driver()
    for address, size, start, length in (
        (ADDRESS, 100, ADDRESS - 0x200, PAGE),
        (ADDRESS, PAGE, ADDRESS - 0x200, 2 * PAGE),
        (ADDRESS - 0x200, PAGE, ADDRESS - 0x200, PAGE),
        (ADDRESS + PAGE - 0x200, 3 * PAGE + 1, ADDRESS - 0x200 + PAGE, 4 * PAGE),
    ):
        descriptor, offset = driver.export(1, address, size)
        os.close(descriptor)
        assert library.ranges[-1] == (start, length)
        assert offset == address - start
    assert (library.retained, library.pushed) == (0, [])


def test_what_the_driver_refuses_is_an_error_that_leaves_no_context() -> None:
    library = Library(refused)
    with pytest.raises(TransportError, match="cuMemGetHandleForAddressRange failed with CUresult"):
        library.driver().export(0, ADDRESS, PAGE)
    assert (library.retained, library.pushed) == (0, [])
    with pytest.raises(TransportError, match="cuDeviceGet failed with CUresult 101"):
        library.driver().export(2, ADDRESS, PAGE)


def test_a_driver_that_is_old_or_not_there_is_said() -> None:
    with pytest.raises(TransportError, match="the CUDA driver has no cuInit"):
        Driver(SimpleNamespace())
    if not os.path.exists("/dev/nvidiactl"):
        with pytest.raises(TransportError, match="there is no CUDA driver"):
            cuda.driver()


def test_device_memory_is_registered_as_a_dmabuf_where_that_is_taken() -> None:
    regions = Regions(Registry(), Library(memfd).driver)
    before = descriptors()
    region = taken(regions, 1)
    assert (region.start, region.length) == (0x200, 100), "as pyverbs has it"
    assert taken(regions, 1, ADDRESS - 0x200).start == 0
    assert regions.way(1) is DeviceAccess.DMABUF
    assert descriptors() == before


@pytest.mark.parametrize("cuda_driver", [no_driver, Library(refused).driver, Library(memfd).driver])
def test_what_is_no_dmabuf_is_registered_by_its_address(cuda_driver: object) -> None:
    regions = Regions(Refusing(range(ADDRESS, ADDRESS + PAGE)), cuda_driver)  # type: ignore[arg-type]
    before = descriptors()
    assert taken(regions, 0).start == ADDRESS
    assert (regions.way(0), regions.way(1)) == (DeviceAccess.PEER, DeviceAccess.DMABUF)
    assert descriptors() == before


def test_a_device_that_is_refused_all_ways_is_staged_for_good_and_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Refusing(range(1000, 2000))
    regions = Regions(registry, no_driver)
    with caplog.at_level(logging.WARNING, "portus"):
        for _ in range(2):
            with pytest.raises(StagedError):
                taken(regions, 0)
    assert regions.staged_devices() == [0]
    [line] = caplog.messages
    assert "there is no CUDA driver" in line
    assert "Bad address" in line
    taken(regions, HERE, 1500)
    taken(regions, 1, 1600)
    assert regions.way(1) is DeviceAccess.PEER
    assert regions.staged_devices() == [0]


def test_a_device_that_brought_other_bytes_is_staged() -> None:
    regions = Regions(Registry(), Library(memfd).driver)
    taken(regions, 0)
    regions.distrust({0}, "the bytes that arrived are not those that were sent")
    assert regions.staged_devices() == [0]
    with pytest.raises(StagedError):
        taken(regions, 0)
