"""Media on DAX devices and on a file system with DAX, held to the contract, on the real thing."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from portus.engine.media.base import MappedMedium, Medium
from portus.engine.spec import Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.dax import (
    DAX_DEVICE,
    DAX_FILE,
    DaxDevice,
    DaxFile,
    device_facts,
    is_device,
    open_device,
)
from portus.reach.media.local import LocalFiles
from portus.reach.media.pmem import Libpmem, processor
from portus.reach.media.pool import SparseMedium
from tests.contract.media import MappedMediumContract, SparseMediumContract, assert_raises
from tests.hardware.conftest import DEVDAX, EXPANDER, FSDAX

pytestmark = [pytest.mark.pmem, pytest.mark.timeout(600)]


class Breaking:
    """The processor of this machine, whose fence fails once when asked to, as none does."""

    def __init__(self, real: Libpmem) -> None:
        self._real = real
        self.fails = False
        self.flushed: list[tuple[int, int]] = []
        self.drained = 0

    def flush(self, address: int, length: int) -> None:
        self._real.flush(address, length)
        self.flushed.append((address, length))

    def drain(self) -> None:
        self._real.drain()
        self.drained += 1
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def assert_writes_back(medium: MappedMedium, cpu: Breaking) -> None:
    ranges = [Extent(0, 100), Extent(4096, 200)]
    places = [(medium.address(each), each.length) for each in ranges]
    cpu.flushed.clear()
    drained = cpu.drained
    medium.persist([*ranges, Extent(7, 0)])
    assert cpu.flushed == places
    assert cpu.drained == drained + 1


class OnDevice(MappedMediumContract):
    """Each medium is the first part of the device, cleared; one is open at a time."""

    path: str

    def make(self, size: int) -> MappedMedium:
        self.cpu = Breaking(processor())
        whole = open_device(self.path, writable=True, cpu=self.cpu)
        ctypes.memset(whole.address(Extent(0, whole.size)), 0, 80 << 20)
        whole.close()
        return open_device(self.path, writable=True, size=size, cpu=self.cpu)

    def read_behind(self, medium: Medium, offset: int, length: int) -> bytes:
        with self.mapping() as behind:
            return bytes(behind[offset : offset + length])

    def write_behind(self, medium: Medium, offset: int, data: bytes) -> None:
        with self.mapping() as behind:
            behind[offset : offset + len(data)] = data

    def break_persist(self, medium: Medium) -> None:
        self.cpu.fails = True

    def mapping(self) -> mmap.mmap:
        facts = device_facts(self.path)
        assert facts is not None
        with open(self.path, "r+b", buffering=0) as file:
            return mmap.mmap(file.fileno(), facts.size)

    def test_it_has_the_size_of_the_device_and_ends_there(self) -> None:
        facts = device_facts(self.path)
        assert facts is not None
        medium = open_device(self.path, writable=True)
        assert medium.size == facts.size > 0
        assert medium.size % facts.alignment == 0
        medium.store(medium.size - 1, b"z")
        with pytest.raises(MediumError, match="the device has"):
            medium.grow(medium.size + 1)
        medium.store(medium.size - 1, b"\0")  # That did not poison it.
        medium.close()

    def test_persist_writes_its_ranges_back_and_waits_once(self) -> None:
        medium = self.make(1 << 20)
        assert_writes_back(medium, self.cpu)
        medium.close()

    def test_a_reader_sees_stores_and_may_not_store(self) -> None:
        medium = self.make(1 << 20)
        reader = LocalFiles().open(self.path, writable=False)
        medium.store(5, b"hello")
        found = bytearray(5)
        reader.load(5, memoryview(found))
        assert bytes(found) == b"hello"
        assert_raises(
            UsageError,
            lambda: reader.store(0, b"x"),
            lambda: reader.grow(2),
            lambda: reader.persist([]),
            match="opened for reading",
        )
        reader.close()
        medium.close()


class TestDevdax(OnDevice):
    path = DEVDAX

    def test_it_survives_power_loss(self, medium: Medium) -> None:
        assert medium.info.kind is DAX_DEVICE
        assert not medium.info.volatile


class TestExpander(OnDevice):
    path = EXPANDER

    def test_without_a_namespace_it_is_volatile(self, medium: Medium) -> None:
        assert medium.info.kind is DAX_DEVICE
        assert medium.info.volatile


class TestFsdax(MappedMediumContract, SparseMediumContract):
    @pytest.fixture(autouse=True)
    def place(self) -> Iterator[None]:
        self.cpu = Breaking(processor())
        self.paths: list[Path] = []
        yield
        for path in self.paths:
            path.unlink()

    def make(self, size: int) -> DaxFile:
        path = Path(FSDAX, f"medium {len(self.paths)}")
        medium = LocalFiles(cpu=self.cpu).create(str(path), size)
        self.paths.append(path)
        assert medium.info.kind is DAX_FILE
        assert isinstance(medium, DaxFile)
        return medium

    def after_power_loss(self, medium: SparseMedium) -> Iterable[bytes]:
        yield self.read_behind(medium, 0, medium.size)

    def read_behind(self, medium: Medium, offset: int, length: int) -> bytes:
        with open(medium.info.name, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def write_behind(self, medium: Medium, offset: int, data: bytes) -> None:
        with open(medium.info.name, "r+b") as file:
            file.seek(offset)
            file.write(data)

    def break_persist(self, medium: Medium) -> None:
        self.cpu.fails = True

    def test_it_survives_power_loss(self, medium: Medium) -> None:
        assert not medium.info.volatile

    def test_persist_writes_its_ranges_back_and_waits_once(self, medium: MappedMedium) -> None:
        assert_writes_back(medium, self.cpu)


def test_what_is_a_dax_device_is_known_without_opening_it() -> None:
    assert is_device(DEVDAX)
    assert is_device(EXPANDER)
    assert not is_device("/dev/null")
    assert not is_device(FSDAX)
    assert not is_device("/dev/missing")


def test_another_character_device_is_refused() -> None:
    with pytest.raises(UsageError, match="found a character device"):
        LocalFiles().open("/dev/null", writable=True)


def test_a_device_is_opened_as_files_are() -> None:
    medium = LocalFiles().open(DEVDAX, writable=True)
    assert isinstance(medium, DaxDevice)
    medium.close()
