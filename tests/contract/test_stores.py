"""The stores of this package, held to the contract. A real S3 server: ``tests/s3``."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from portus.reach.mirror.address import parse
from portus.reach.mirror.opening import open_store
from portus.reach.mirror.store import Store
from tests.contract.stores import StoreContract
from tests.simulation.model_store import ModelStore

NUMBERS = itertools.count()


class TestFolder(StoreContract):
    @pytest.fixture(autouse=True, params=["/dev/shm", tempfile.gettempdir()])
    def place(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if not os.path.isdir(request.param):
            pytest.skip(f"no directory {request.param} here")
        with tempfile.TemporaryDirectory(dir=request.param) as root:
            self.root = Path(root, "made", "by the store")
            yield

    def open(self) -> Store:
        return open_store(parse(f"file://{self.root}"))

    def read_behind(self, name: str) -> bytes | None:
        path = self.root / name
        return path.read_bytes() if path.is_file() else None

    def write_behind(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class TestMemory(StoreContract):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.name = f"contract-{next(NUMBERS)}"
        self.behind = obstore.store.MemoryStore()

    def open(self) -> Store:
        from portus.reach.mirror import bucket

        bucket._MEMORY.setdefault(self.name, self.behind)
        return open_store(parse(f"memory:{self.name}"))

    def read_behind(self, name: str) -> bytes | None:
        try:
            return bytes(obstore.get(self.behind, name).bytes())
        except FileNotFoundError:
            return None

    def write_behind(self, name: str, data: bytes) -> None:
        obstore.put(self.behind, name, data)


class TestModelStore(StoreContract):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.model = ModelStore()

    def open(self) -> Store:
        return ModelStore(self.model.objects)

    def read_behind(self, name: str) -> bytes | None:
        return self.model.objects.get(name, (None, 0.0))[0]

    def write_behind(self, name: str, data: bytes) -> None:
        self.model.objects[name] = data, self.model.now
