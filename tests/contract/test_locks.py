"""``FileLocks`` and ``ProcessLocks``, held to the contract."""

from __future__ import annotations

import abc
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.errors import BusyError, UsageError
from portus.reach.media.lock import FileLocks, ProcessLocks
from portus.reach.media.pool import Locks
from tests.contract.media import assert_raises


class LocksContract(abc.ABC):
    """Tests of ``Locks``, with several holders in one process."""

    @abc.abstractmethod
    def open_locks(self, holder: str) -> Locks:
        """Return a further holder of the locks of this test, whose errors call any ``holder``. The
        contract closes it."""

    @pytest.fixture
    def pair(self) -> Iterator[tuple[Locks, Locks]]:
        """Two holders of the same locks."""
        first, second = (self.open_locks("pid 7 on host h") for _ in range(2))
        yield first, second
        first.close()
        second.close()

    def test_there_is_one_writer(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        first.acquire_writer(0)
        with pytest.raises(BusyError, match="pid 7 on host h"):
            second.acquire_writer(0)
        first.close()
        second.acquire_writer(0)
        third = self.open_locks("pid 9")
        with pytest.raises(BusyError):
            third.acquire_writer(0)
        third.close()

    def test_all_pins_of_all_are_listed(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        first.acquire_writer(0)
        assert first.pins() == set()
        for version in (0, 1, 2, 70, 1 << 61):
            second.pin(version)
        second.pin(70)
        first.pin(5)
        assert first.pins() == {0, 1, 2, 5, 70, 1 << 61}
        second.unpin(1)
        second.unpin(70)
        assert first.pins() == {0, 2, 5, 70, 1 << 61}

    def test_a_writer_stays_the_writer(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        first.acquire_writer(0)
        first.acquire_writer(0)
        with pytest.raises(BusyError):
            second.acquire_writer(0)

    def test_the_wait_for_the_writer_has_an_end(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        first.acquire_writer(0)
        begin_s = time.monotonic()
        with pytest.raises(BusyError):
            second.acquire_writer(0.05)
        assert time.monotonic() - begin_s >= 0.05

    def test_who_waits_gets_the_lock_that_is_let_go(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        first.acquire_writer(0)
        waiting = threading.Thread(target=second.acquire_writer, args=(60,))
        waiting.start()
        first.close()
        waiting.join()

    def test_close_lets_go_of_all(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        first.acquire_writer(0)
        first.pin(3)
        first.close()
        first.close()
        second.acquire_writer(0)
        assert 3 not in second.pins()
        assert_raises(
            UsageError,
            lambda: first.acquire_writer(0),
            lambda: first.pin(3),
            first.pins,
        )

    def test_a_pin_is_seen_by_all_and_holds_one_version(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        first.acquire_writer(0)
        for holder in pair:
            holder.pin(5)
            assert [version in first.pins() for version in (4, 5, 6)] == [False, True, False]
            assert 5 in second.pins()
            holder.unpin(5)
            assert 5 not in first.pins()
            assert 5 not in second.pins()

    def test_pins_are_counted(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        second.pin(0)
        second.pin(0)
        first.pin(0)
        second.unpin(0)
        assert 0 in first.pins()
        second.unpin(0)
        assert 0 in first.pins()
        first.unpin(0)
        assert 0 not in first.pins()

    def test_only_what_is_pinned_is_unpinned(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        first.pin(1)
        for version in (1, 2):
            with pytest.raises(UsageError):
                second.unpin(version)
        assert 1 in second.pins()

    def test_being_asked_takes_nothing(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        assert 9 not in first.pins()
        second.pin(9)
        assert 9 in first.pins()
        first.pin(9)

    def test_a_version_that_cannot_be_is_refused(self, pair: tuple[Locks, Locks]) -> None:
        for version in (-1, 1 << 62):
            with pytest.raises(UsageError):
                pair[0].pin(version)

    def test_the_writer_may_pin_and_readers_need_no_writer(self, pair: tuple[Locks, Locks]) -> None:
        first, second = pair
        first.acquire_writer(0)
        first.pin(1)
        second.pin(1)
        assert first.pins() == {1}


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


def test_pins_within_a_process_are_counted_and_end_with_the_locks() -> None:
    locks = ProcessLocks()
    locks.acquire_writer(0)
    locks.pin(3)
    locks.pin(3)
    locks.pin(5)
    locks.unpin(3)
    locks.unpin(5)
    assert [version in locks.pins() for version in (3, 5)] == [True, False]
    assert locks.pins() == {3}
    for version in (-1, 1 << 62):
        with pytest.raises(UsageError):
            locks.pin(version)
    locks.close()
    assert locks.pins() == set()
