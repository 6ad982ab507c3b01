"""The media of this package, held to the contract; files on ext4 and on tmpfs."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from portus.engine.media.base import PLAIN_FILE, MappedMedium, Medium, MediumInfo
from portus.engine.spec import Extent
from portus.errors import MediumError
from portus.reach.media.dax import DAX_DEVICE
from portus.reach.media.file import MAPPED_FILE, MappedFile, PlainFile
from portus.reach.media.local import LocalFiles
from portus.reach.media.pool import SparseMedium
from portus.reach.media.space import MEMORY, WORD, Memory, SpaceMedium
from tests.contract.media import (
    MappedMediumContract,
    MediumContract,
    SparseMediumContract,
)
from tests.simulation import lines
from tests.simulation.crash import CrashFiles
from tests.simulation.lines import CrashSpace


class Broken:
    """A sync that fails once when asked to, as a device would."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(self, *_descriptor: int) -> None:
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for number in _descriptor:
            os.fdatasync(number)


class OnDisk:
    """Back doors of a file."""

    @pytest.fixture(autouse=True, params=["/dev/shm", tempfile.gettempdir()])
    def place(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if not os.path.isdir(request.param):
            pytest.skip(f"no directory {request.param} here")
        with tempfile.TemporaryDirectory(dir=request.param) as directory:
            self.directory, self.count, self.sync = Path(directory), 0, Broken()
            yield

    def new_path(self) -> str:
        self.count += 1
        return str(self.directory / f"medium {self.count}")

    def read_behind(self, medium: Medium, offset: int, length: int) -> bytes:
        with open(medium.info.name, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def write_behind(self, medium: Medium, offset: int, data: bytes) -> None:
        with open(medium.info.name, "r+b") as file:
            file.seek(offset)
            file.write(data)

    def break_persist(self, medium: Medium) -> None:
        self.sync.fails = True

    def after_power_loss(self, medium: SparseMedium) -> Iterable[bytes]:
        """What a real file system leaves, ``faults/test_power.py`` looks at."""
        yield self.read_behind(medium, 0, medium.size)


class TestMappedFile(OnDisk, MappedMediumContract, SparseMediumContract):
    def make(self, size: int) -> MappedFile:
        medium = LocalFiles(sync=self.sync).create(self.new_path(), size)
        if medium.info.kind is not MAPPED_FILE:
            pytest.skip(f"the file system of {self.directory} is not one to be mapped")
        assert isinstance(medium, MappedFile)
        return medium


class TestPlainFile(OnDisk, SparseMediumContract):
    def make(self, size: int) -> PlainFile:
        medium = LocalFiles(mapped=False, sync=self.sync).create(self.new_path(), size)
        assert medium.info.kind is PLAIN_FILE
        assert type(medium) is PlainFile
        return medium


class BreakingSpace(CrashSpace):
    """Simulated memory whose processor fails once when asked to, as none does."""

    fails = False

    def drain(self) -> None:
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().drain()


class TestSimulatedDevice(MediumContract):
    """What ``DaxDevice`` does with its space. The real ones are in ``tests/hardware``."""

    def make(self, size: int) -> Medium:
        self.files = CrashFiles()
        lines.make_device(self.files, "/device", 64 << 20)
        self.space = BreakingSpace(self.files, "/device")
        info = MediumInfo(DAX_DEVICE, "/device", WORD, volatile=False, writable=True)
        return SpaceMedium(self.space, info, size)

    def read_behind(self, medium: Medium, offset: int, length: int) -> bytes:
        content = bytearray(length)
        CrashSpace(self.files, "/device").load(offset, memoryview(content))
        return bytes(content)

    def write_behind(self, medium: Medium, offset: int, data: bytes) -> None:
        CrashSpace(self.files, "/device").store(offset, memoryview(data))

    def break_persist(self, medium: Medium) -> None:
        self.space.fails = True

    def test_it_ends_where_the_device_does(self, medium: Medium) -> None:
        with pytest.raises(MediumError, match="the device has 67108864"):
            medium.grow((64 << 20) + 1)
        medium.store(0, b"not poisoned")


class TestMemory(MappedMediumContract):
    def make(self, size: int) -> MappedMedium:
        self.sync, medium = Broken(), Memory(size)
        medium.space.drain = self.sync  # type: ignore[method-assign]
        return medium

    def read_behind(self, medium: Medium, offset: int, length: int) -> bytes:
        return ctypes.string_at(self._start(medium) + offset, length)

    def write_behind(self, medium: Medium, offset: int, data: bytes) -> None:
        ctypes.memmove(self._start(medium) + offset, data, len(data))

    def break_persist(self, medium: Medium) -> None:
        self.sync.fails = True

    def _start(self, medium: Medium) -> int:
        assert isinstance(medium, Memory)
        return medium.space.addresses.start

    def test_it_is_volatile(self, medium: Medium) -> None:
        assert medium.info.volatile
        assert medium.info.kind is MEMORY


def test_a_store_that_was_not_persisted_waits_for_the_sync(tmp_path: Path) -> None:
    synced: list[int] = []
    medium = LocalFiles(sync=synced.append).create(str(tmp_path / "a"), 100)
    medium.store(0, b"x")
    medium.persist([])
    medium.persist([Extent(3, 0)])
    assert synced == []
    medium.persist([Extent(0, 1), Extent(5, 1)])
    assert len(synced) == 1
    medium.close()
