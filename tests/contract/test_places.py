"""The places of this package, held to the contract."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.index.directory import create_pool
from portus.index.place import Place
from portus.media.local import LocalFiles
from portus.places.base import Abilities, OpenPlace
from portus.places.directory import DirectoryPlace
from portus.places.opening import open_place, place_named
from portus.protocol.address import Address, Scheme
from portus.testing.hosting import serving, url
from portus.testing.places import PlaceContract

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="places are written on Linux only")


def is_volatile(path: Path) -> bool:
    with tempfile.NamedTemporaryFile(dir=path) as file:
        medium = LocalFiles().open(file.name, writable=False)
        try:
            return medium.info.volatile
        finally:
            medium.close()


class OnDisk(PlaceContract):
    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.abilities = Abilities(volatile=is_volatile(tmp_path), durable=1, addressable=False)

    def behind(self) -> Path:
        return self.path


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


class TestMirror(OnDisk):
    @pytest.fixture(autouse=True)
    def address(self, root: None) -> None:
        self.abilities = Abilities(volatile=False, durable=1, addressable=False)

    def open(self) -> OpenPlace:
        return open_place(place_named(f"file://{self.path}/bucket", "a test"))
