"""``FileLocks`` and ``ProcessLocks``, held to the contract."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from portus.reach.media.lock import FileLocks, LockTable, ProcessLocks
from portus.reach.media.pool import Locks
from portus.testing.contract import LocksContract


class TestFileLocks(LocksContract):
    @pytest.fixture(autouse=True, params=["/dev/shm", tempfile.gettempdir()])
    def place(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if not Path(request.param).is_dir():
            pytest.skip(f"no directory {request.param} here")
        with tempfile.NamedTemporaryFile(dir=request.param) as file:
            self.path = file.name
            yield

    def open_locks(self, describe_holder: Callable[[], str]) -> Locks:
        return FileLocks(self.path, writable=True, describe_holder=describe_holder)


class TestProcessLocks(LocksContract):
    @pytest.fixture(autouse=True)
    def table(self) -> None:
        self.shared = LockTable()

    def open_locks(self, describe_holder: Callable[[], str]) -> Locks:
        return ProcessLocks(self.shared, describe_holder=describe_holder)
