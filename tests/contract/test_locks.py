"""``FileLocks`` and ``ProcessLocks``, held to the contract."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.reach.media.lock import FileLocks, LockTable, ProcessLocks
from portus.reach.media.pool import Locks
from portus.testing.contract import LocksContract


class HeldLocks(FileLocks):
    """Locks that somebody holds who is known."""

    holder = ""

    def describe_holder(self) -> str:
        return self.holder


class TestFileLocks(LocksContract):
    @pytest.fixture(autouse=True, params=["/dev/shm", tempfile.gettempdir()])
    def place(self, request: pytest.FixtureRequest) -> Iterator[None]:
        if not Path(request.param).is_dir():
            pytest.skip(f"no directory {request.param} here")
        with tempfile.NamedTemporaryFile(dir=request.param) as file:
            self.path = file.name
            yield

    def open_locks(self, holder: str) -> Locks:
        locks = HeldLocks(self.path, writable=True)
        locks.holder = holder
        return locks


class TestProcessLocks(LocksContract):
    @pytest.fixture(autouse=True)
    def table(self) -> None:
        self.shared = LockTable()

    def open_locks(self, holder: str) -> Locks:
        return ProcessLocks(self.shared, holder=holder)
