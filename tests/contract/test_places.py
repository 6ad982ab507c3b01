"""The places of this package, held to the contract."""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import obstore
import pytest
import torch

from portus.engine.job.settings import Settings
from portus.reach.index.directory import create_pool
from portus.reach.index.place import Place
from portus.reach.media.local import LocalFiles
from portus.reach.mirror import bucket
from portus.reach.mirror.address import UNMIRRORED
from portus.reach.places.base import Abilities, OpenPlace
from portus.reach.places.directory import DirectoryPlace
from portus.reach.places.opening import open_place, place_named
from portus.reach.protocol.address import Address, Scheme
from portus.reach.training.safetensors import Safetensors
from portus.reach.training.training_files import TrainingFiles
from portus.testing.places import MODEL, PlaceContract, Tensors
from tests.hosts import serving, url

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="places are written on Linux only")


NUMBERS = itertools.count()


def is_volatile(path: Path) -> bool:
    with tempfile.NamedTemporaryFile(dir=path) as file:
        medium = LocalFiles().open(file.name, writable=False)
        try:
            return medium.info.volatile
        finally:
            medium.close()


def flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


class Saved(PlaceContract):
    """A place to which a training of files saves."""

    pool: Place | None = None
    mirror = UNMIRRORED

    @pytest.fixture(autouse=True)
    def checkpoints(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "checkpoints"
        self.directory.mkdir()

    def save(self, files: Mapping[str, Tensors], step: int, ready: Callable[[], None]) -> None:
        states = {
            name: Safetensors({key: torch.from_numpy(each) for key, each in tensors.items()})
            for name, tensors in files.items()
        }
        training = TrainingFiles(Settings(mirror=self.mirror), of_directories=True, pool=self.pool)
        with contextlib.closing(training):
            training.begin(MODEL, str(self.directory.parent / ".portus"), str(self.directory))
            directory = str(self.directory / f"checkpoint-{step}")
            training.save_directory(directory, states, step, ready=ready).wait()


class OnDisk(Saved):
    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.abilities = Abilities(volatile=is_volatile(tmp_path), durable=1, addressable=False)

    def flip_behind(self, wanted: bytes) -> int:
        found = 0
        for path in filter(Path.is_file, self.path.rglob("*")):
            at = path.read_bytes().find(wanted)
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(flipped(wanted))
                found += 1
        return found


class TestDirectory(OnDisk):
    def open(self) -> OpenPlace:
        place = open_place(place_named(str(self.directory), "a test"))
        assert isinstance(place, DirectoryPlace)
        return place


class TestPool(OnDisk):
    @pytest.fixture(autouse=True)
    def made(self, root: None) -> None:
        self.pool = Place.parse(self.path / "gpt.portus")
        create_pool(self.pool.path, LocalFiles())

    def open(self) -> OpenPlace:
        assert self.pool is not None
        return open_place(self.pool)


class TestStorageHost(OnDisk):
    @pytest.fixture(autouse=True)
    def served(self, root: None, tmp_path: Path) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as short:  # paths of sockets are
            address = Address(Scheme.UNIX, path=f"{short}/listener")
            with serving(tmp_path / "host", address=address) as server:
                self.pool = Place.parse(url(server))
                yield

    def open(self) -> OpenPlace:
        assert self.pool is not None
        return open_place(self.pool)


class TestMirrorInDirectory(OnDisk):
    @pytest.fixture(autouse=True)
    def address(self, root: None) -> None:
        self.abilities = Abilities(volatile=False, durable=1, addressable=False)
        self.path = self.path / "bucket"
        self.path.mkdir()
        self.mirror = f"file://{self.path}"

    def open(self) -> OpenPlace:
        return open_place(place_named(self.mirror, "a test"))


class TestMirrorInBucket(Saved):
    """In memory, by the code of buckets; a real S3 server: ``tests/s3``."""

    abilities = Abilities(volatile=True, durable=1, addressable=False)

    @pytest.fixture(autouse=True)
    def bucket(self) -> None:
        self.name = f"places-{next(NUMBERS)}"
        self.mirror = f"memory:{self.name}"
        self.store = obstore.store.MemoryStore()

    def open(self) -> OpenPlace:
        bucket._MEMORY.setdefault(self.name, self.store)
        return open_place(place_named(self.mirror, "a test"))

    def flip_behind(self, wanted: bytes) -> int:
        found = 0
        for each in [each["path"] for page in self.store.list() for each in page]:
            data = bytes(self.store.get(each).bytes())
            if wanted in data:
                self.store.put(each, data.replace(wanted, flipped(wanted)))
                found += 1
        return found
