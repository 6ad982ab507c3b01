"""``LocalFiles``, held to the contract on ext4 and on tmpfs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from portus.reach.media.local import LocalFiles
from portus.reach.media.pool import FileSystem
from tests.contract.files import FilesContract


class OnDisk(FilesContract):
    root: str

    @pytest.fixture(autouse=True, params=["/dev/shm", tempfile.gettempdir()])
    def place(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if not os.path.isdir(request.param):
            pytest.skip(f"no directory {request.param} here")
        with tempfile.TemporaryDirectory(dir=request.param) as root:
            self.root = root
            yield

    def directory(self) -> str:
        return self.root

    def read_behind(self, path: str) -> bytes | None:
        if not os.path.exists(path):
            return None
        with open(path, "rb") as file:
            return file.read()

    def write_behind(self, path: str, data: bytes) -> None:
        with open(path, "xb") as file:
            file.write(data)


class TestMapped(OnDisk):
    def files(self) -> FileSystem:
        return LocalFiles()


class TestPlain(OnDisk):
    def files(self) -> FileSystem:
        return LocalFiles(mapped=False)
