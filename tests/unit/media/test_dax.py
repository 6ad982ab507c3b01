"""What of persistent memory can be seen on a machine without any. The rest: ``tests/hardware``."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest

from portus.engine.media.addresses import AddressRange
from portus.engine.media.base import PLAIN_FILE
from portus.engine.media.file_calls import FileSystemTraits
from portus.engine.media.process import Descriptor
from portus.engine.spec import PAGE, Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.dax import (
    DaxDevice,
    DaxFile,
    DeviceFacts,
    accepts_map_sync,
    device_facts,
    is_device,
    open_device,
)
from portus.reach.media.file import MAPPED_FILE
from portus.reach.media.local import LocalFiles
from portus.reach.media.pmem import processor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="devices are Linux's")

HUGE = 2 << 20


def test_what_is_no_dax_device_is_told_apart_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for place in ("/dev/null", tmp_path, tmp_path / "pipe", tmp_path / "file", tmp_path / "none"):
        assert device_facts(str(place)) is None
        assert not is_device(str(place))


def test_what_is_no_dax_device_is_not_opened_as_one() -> None:
    with pytest.raises(UsageError, match="expected a DAX device"):
        open_device("/dev/null", writable=True)
    with pytest.raises(UsageError, match="found a character device"):
        LocalFiles().open("/dev/null", writable=True)


def test_without_libpmem_it_is_said_what_to_install() -> None:
    with pytest.raises(MediumError, match="install libpmem1"):
        processor("libpmem-that-is-missing.so.9")


def test_a_library_without_the_calls_is_no_libpmem() -> None:
    with pytest.raises(MediumError, match="cannot be loaded"):
        processor("libc.so.6")


def test_a_libpmem_that_is_told_to_flush_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMEM_NO_FLUSH", "1")
    with pytest.raises(MediumError, match="unset it"):
        processor()


def test_an_ordinary_file_is_not_taken_for_persistent_memory(directory: Path) -> None:
    medium = LocalFiles().create(str(directory / "file"), 4096)
    assert medium.info.kind in (MAPPED_FILE, PLAIN_FILE)
    medium.close()
    descriptor = Descriptor(str(directory / "file"), os.O_RDWR)
    assert not accepts_map_sync(descriptor)
    descriptor.close()


@pytest.mark.parametrize("alignment", [mmap.PAGESIZE, HUGE, 1 << 30])
def test_addresses_are_aligned_as_asked_and_usable_to_the_end(alignment: int) -> None:
    addresses = AddressRange("aligned", 3 * HUGE, alignment=alignment)
    assert addresses.start % alignment == 0
    addresses.map(3 * HUGE)
    ctypes.memset(addresses.start, 7, 3 * HUGE)
    addresses.map(5 * HUGE)
    assert ctypes.string_at(addresses.start + 3 * HUGE - 1, 2) == b"\7\0"
    addresses.close()
    addresses.close()


def test_aligning_leaves_nothing_behind() -> None:
    before = mapped_bytes()
    for _ in range(50):
        AddressRange("aligned", HUGE, alignment=1 << 30).close()
    assert abs(mapped_bytes() - before) < 1 << 30


def mapped_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * mmap.PAGESIZE


class Noting:
    """A processor that writes nothing back, and knows what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int] | str] = []

    def flush(self, address: int, length: int) -> None:
        self.asked.append((address, length))

    def drain(self) -> None:
        self.asked.append("drain")


class WithoutMapSync(DaxFile):
    """A file where there is no DAX: mapped, but not with MAP_SYNC."""

    def _map(self, size: int, descriptor: Descriptor, file_system: FileSystemTraits) -> None:
        self._addresses.map(size, descriptor.number)


def noted(directory: Path, kind: str, cpu: Noting) -> DaxFile | DaxDevice:
    """A medium of ``kind`` on an ordinary file, of 16 pages."""
    path = str(directory / kind)
    with open(path, "wb") as file:
        file.truncate(16 * PAGE)
    if kind == "file":
        return WithoutMapSync(
            Descriptor(path, os.O_RDWR), FileSystemTraits(volatile=False, early=False), cpu=cpu
        )
    facts = DeviceFacts(path, 16 * PAGE, PAGE, volatile=False)
    return DaxDevice(facts, writable=True, cpu=cpu, size=PAGE)


@pytest.mark.parametrize("kind", ["file", "device"])
def test_every_range_is_written_back_and_then_waited_for(directory: Path, kind: str) -> None:
    cpu = Noting()
    medium = noted(directory, kind, cpu)
    try:
        medium.store(0, b"x" * PAGE)
        cpu.asked.clear()
        medium.persist([Extent(64, 10), Extent(128, 0), Extent(1000, 2000)])
        start = medium.address(Extent(0, PAGE))
        assert cpu.asked == [(start + 64, 10), (start + 1000, 2000), "drain"]
    finally:
        medium.close()


def test_what_a_device_is_grown_by_is_cleared_and_written_back(directory: Path) -> None:
    cpu = Noting()
    medium = noted(directory, "device", cpu)
    try:
        medium.grow(3 * PAGE)
        start = medium.address(Extent(0, PAGE))
        assert cpu.asked == [(start + PAGE, 2 * PAGE), "drain"]
    finally:
        medium.close()
