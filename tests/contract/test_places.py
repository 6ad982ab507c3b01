"""The places of this package, held to the contract."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from portus.reach.index.directory import create_pool
from portus.reach.index.place import Place
from portus.reach.media.local import LocalFiles
from portus.reach.mirror import bucket
from portus.reach.places.base import Abilities, OpenPlace
from portus.reach.places.directory import DirectoryPlace
from portus.reach.places.opening import open_place, place_named
from portus.reach.protocol.address import Address, Scheme
from portus.testing.hosting import serving, url
from portus.testing.places import PlaceContract

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


class OnDisk(PlaceContract):
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
        (self.path / "checkpoints").mkdir(exist_ok=True)
        place = open_place(place_named(str(self.path / "checkpoints"), "a test"))
        assert isinstance(place, DirectoryPlace)
        return place


class TestPool(OnDisk):
    def open(self) -> OpenPlace:
        path = str(self.path / "gpt.portus")
        if not os.path.exists(path):
            create_pool(path, LocalFiles())
        return open_place(Place.named(path))


class TestStorageHost(OnDisk):
    @pytest.fixture(autouse=True)
    def served(self, root: None, tmp_path: Path) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as short:  # paths of sockets are
            address = Address(Scheme.UNIX, path=f"{short}/door")
            with serving(tmp_path / "host", address=address) as server:
                self.url = url(server)
                yield

    def open(self) -> OpenPlace:
        return open_place(Place.named(self.url))


class TestMirrorInDirectory(OnDisk):
    @pytest.fixture(autouse=True)
    def address(self, root: None) -> None:
        self.abilities = Abilities(volatile=False, durable=1, addressable=False)

    def open(self) -> OpenPlace:
        return open_place(place_named(f"file://{self.path}/bucket", "a test"))


class TestMirrorInBucket(PlaceContract):
    """In memory, by the code of buckets; a real S3 server: ``tests/s3``."""

    abilities = Abilities(volatile=True, durable=1, addressable=False)

    @pytest.fixture(autouse=True)
    def bucket(self) -> None:
        self.name = f"places-{next(NUMBERS)}"
        self.store = obstore.store.MemoryStore()

    def open(self) -> OpenPlace:
        bucket._MEMORY.setdefault(self.name, self.store)
        return open_place(place_named(f"memory:{self.name}", "a test"))

    def flip_behind(self, wanted: bytes) -> int:
        found = 0
        for each in [each["path"] for page in self.store.list() for each in page]:
            data = bytes(self.store.get(each).bytes())
            if wanted in data:
                self.store.put(each, data.replace(wanted, flipped(wanted)))
                found += 1
        return found
