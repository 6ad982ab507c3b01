"""The places of this package, held to the contract."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
import torch

import portus
from portus.engine.directory.folder import FOLDER
from portus.engine.job.settings import Settings
from portus.errors import UsageError
from portus.reach.index.directory import create_pool
from portus.reach.index.place import Place
from portus.reach.media.local import LocalFiles
from portus.reach.mirror import bucket
from portus.reach.mirror.address import UNMIRRORED
from portus.reach.places.base import Abilities, CopyOptions, OpenPlace
from portus.reach.places.directory import DirectoryPlace
from portus.reach.places.opening import open_place, place_named
from portus.reach.protocol.address import Address, Scheme
from portus.reach.training.training_files import TrainingFiles
from portus.testing.places import (
    MODEL,
    PlaceContract,
    check_place,
    draft,
    file_name,
    labels,
    open_files,
    read,
    tensors_of,
)
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
    """A place to which trainings of files save, too."""

    pool: Place | None = None
    mirror = UNMIRRORED

    @pytest.fixture(autouse=True)
    def checkpoints(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "checkpoints"
        self.directory.mkdir()

    def train(self) -> object:
        """Save a checkpoint of step 7 as a training does; return its state."""
        state = {"model": torch.arange(5000.0), "empty": torch.zeros(0), "step": 7}
        training = TrainingFiles(Settings(mirror=self.mirror), pool=self.pool)
        with contextlib.closing(training):
            training.begin(MODEL, str(self.directory.parent / ".portus"), str(self.directory))
            training.save(state, str(self.directory / "step=7.ckpt"), 7).wait()
        return state

    def test_what_a_training_saved_is_there(self, place: OpenPlace) -> None:
        state = self.train()
        portus.save(state, self.directory.parent / "step=7.ckpt", wait=True)
        [found] = place.list()
        assert found.info.step == 7
        with place.open(found.name) as checkpoint:
            [(name, file)] = checkpoint.files.items()
            assert name == "step=7.ckpt"
            assert read(file) == (self.directory.parent / name).read_bytes()
        assert check_place(place, None) == []


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

    def test_the_names_of_directories_that_a_draft_makes_are_durable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []
        sync = LocalFiles.sync

        def noted(files: LocalFiles, directory: str) -> None:
            synced.append(os.path.relpath(directory, self.directory))
            sync(files, directory)

        monkeypatch.setattr(LocalFiles, "sync", noted)
        with open_files([file_name(1)], tmp_path) as files, self.open() as place:
            nested = {f"a/b/{name}": file for name, file in files.items()}
            with place.draft(labels(1), nested, CopyOptions()) as commit:
                assert sorted(synced) == [".", "a"]
                commit()

    def test_a_draft_is_in_a_hidden_folder_until_it_is_committed(self, tmp_path: Path) -> None:
        def names() -> list[str]:
            return sorted(os.listdir(self.directory))

        with (
            open_files([file_name(1, part) for part in "ab"], tmp_path) as files,
            self.open() as place,
        ):
            inside = {f"new/{name[0]}er/{name}": file for name, file in files.items()}
            inside["new/" + file_name(1, "a")] = files[file_name(1, "a")]
            options = CopyOptions(times=dict.fromkeys(inside, 10**18))
            with place.draft(labels(1), inside, options):
                assert names() == [FOLDER, "new"]
                assert list((self.directory / "new").rglob("*.*")) == []
            assert names() == []
            with place.draft(labels(1), inside, options) as commit:
                commit()
            assert names() == ["new"]
            assert [each.info.time_ns for each in place.list()] == [10**18] * 3
            found = {each.relative_to(self.directory) for each in (self.directory).rglob("*.*")}
            assert found == set(map(Path, inside))


class OfVersions(Saved):
    def test_storages_of_a_draft_are_where_a_save_has_them(self, place: OpenPlace) -> None:
        self.train()
        [saved] = place.list()
        with saved.open() as checkpoint:
            with place.draft(labels(8), checkpoint.files, CopyOptions()) as commit:
                commit()
            inside = {f"in/{name}": file for name, file in checkpoint.files.items()}
            refused = place.draft(labels(9), inside, CopyOptions())
            with pytest.raises(UsageError, match="in no directory"), refused:
                pass
        before, copy = (each.table() for each in place.list())
        assert before is not None
        assert copy is not None
        for one, other in zip(before.files, copy.files, strict=True):
            assert one.offset.tolist() == other.offset.tolist() != []
            assert one.length.tolist() == other.length.tolist() == [20_000, 0]


class TestPool(OnDisk, OfVersions):
    @pytest.fixture(autouse=True)
    def made(self, root: None) -> None:
        self.pool = Place.parse(self.path / "gpt.portus")
        create_pool(self.pool.path, LocalFiles())

    def open(self) -> OpenPlace:
        assert self.pool is not None
        return open_place(self.pool)


class TestStorageHost(OnDisk, OfVersions):
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


class OfRuns(PlaceContract):
    def test_a_draft_that_is_not_committed_leaves_no_object(self, place: OpenPlace) -> None:
        with draft(place, 1):
            pass
        assert self.flip_behind(tensors_of(file_name(1))["t0"].tobytes()) == 0

    def test_times_are_those_of_the_files(self, place: OpenPlace, tmp_path: Path) -> None:
        with open_files([file_name(1)], tmp_path) as files:
            inside = {f"in/{name}": file for name, file in files.items()}
            options = CopyOptions(times=dict.fromkeys(inside, 10**18))
            with place.draft(labels(1), inside, options) as commit:
                commit()
        [found] = place.list()
        assert (found.name, found.info.time_ns) == (f"in/{file_name(1)}", 10**18)


class TestMirrorInDirectory(OnDisk, OfRuns):
    @pytest.fixture(autouse=True)
    def address(self, root: None) -> None:
        self.abilities = Abilities(volatile=False, durable=1, addressable=False)
        self.path = self.path / "bucket"
        self.path.mkdir()
        self.mirror = f"file://{self.path}"

    def open(self) -> OpenPlace:
        return open_place(place_named(self.mirror, "a test"))


class TestMirrorInBucket(Saved, OfRuns):
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
