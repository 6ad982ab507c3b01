"""Tests that every medium must pass.

Subclass a contract and implement its abstract methods: how to make the object, and how to read and
change its bytes without its own methods, because a test of ``store`` must not rely on ``load``.
pytest then runs the suite. No test is skipped because of what a medium can do: a medium with
addresses inherits ``MappedMediumContract``.
"""

from __future__ import annotations

import abc
import array
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import pytest

from portus.engine.media.base import MappedMedium, Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.pool import Extents, SparseMedium

SIZE: Final = 3 * PAGE
"""Bytes of the medium that most tests use."""

# Around the ends of sectors and of pages.
_EDGES: Final = (0, 1, 511, 512, 513, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 7)


class MediumContract(abc.ABC):
    """Tests of a ``Medium``. Each test gets its own instance of the subclass."""

    @abc.abstractmethod
    def make(self, size: int) -> Medium:
        """Return a new writable medium of ``size`` zero bytes. The contract closes it."""

    @abc.abstractmethod
    def read_behind(self, medium: Medium, offset: int, length: int) -> bytes:
        """Return bytes of ``medium`` without calling its ``load``."""

    @abc.abstractmethod
    def write_behind(self, medium: Medium, offset: int, data: bytes) -> None:
        """Change bytes of ``medium`` without calling its ``store``."""

    @abc.abstractmethod
    def break_persist(self, medium: Medium) -> None:
        """Make the next persist fail, as a bad device would; later ones would succeed."""

    @pytest.fixture
    def medium(self) -> Iterator[Medium]:
        """A medium of ``SIZE`` zero bytes."""
        medium = self.make(SIZE)
        yield medium
        medium.close()

    def test_a_new_medium_is_zero_writable_and_as_long_as_asked(self, medium: Medium) -> None:
        assert medium.size == SIZE
        assert medium.info.writable
        assert medium.info.granularity > 0
        assert load(medium, 0, SIZE) == bytes(SIZE)
        assert self.read_behind(medium, 0, SIZE) == bytes(SIZE)

    def test_load_sees_what_was_stored_and_its_neighbours_stay(self, medium: Medium) -> None:
        tried = 0
        for offset in _EDGES:
            for length in _EDGES:
                if offset + length <= SIZE:
                    medium.store(0, b"\xff" * SIZE)
                    data = random.Random(offset * SIZE + length).randbytes(length)
                    medium.store(offset, data)
                    expected = b"\xff" * offset + data + b"\xff" * (SIZE - offset - length)
                    assert load(medium, 0, SIZE) == expected
                    assert load(medium, offset, length) == data
                    assert self.read_behind(medium, 0, SIZE) == expected
                    tried += 1
        assert tried > 60

    def test_load_sees_what_is_there_and_not_what_it_remembers(self, medium: Medium) -> None:
        medium.store(0, b"before")
        self.write_behind(medium, 0, b"behind")
        assert load(medium, 0, 6) == b"behind"

    def test_many_bytes_are_stored_and_loaded(self) -> None:
        medium, data = self.make(0), random.Random(1).randbytes((40 << 20) + 3)
        assert medium.size == 0
        medium.grow(1)
        assert load(medium, 0, 1) == b"\0"
        medium.grow(len(data) + 5)
        medium.store(5, data)
        medium.persist([Extent(5, len(data))])
        assert load(medium, 5, len(data)) == data
        medium.close()

    def test_any_contiguous_memory_is_taken_as_bytes(self, medium: Medium) -> None:
        numbers = array.array("i", [1, 2, 3])
        medium.store(8, memoryview(numbers))
        assert self.read_behind(medium, 8, 12) == numbers.tobytes()
        found = array.array("i", [0, 0, 0])
        medium.load(8, memoryview(found))
        assert found == numbers
        medium.store(8, memoryview(bytearray(b"abc")).toreadonly())
        assert self.read_behind(medium, 8, 3) == b"abc"

    def test_memory_with_gaps_or_without_leave_to_write_is_refused(self, medium: Medium) -> None:
        gaps = memoryview(bytearray(b"abcdef"))[::2]
        assert_raises(
            UsageError,
            lambda: medium.store(0, gaps),
            lambda: medium.load(0, gaps),
            lambda: medium.load(0, memoryview(b"abc")),
        )
        assert self.read_behind(medium, 0, SIZE) == bytes(SIZE)

    def test_nothing_outside_the_medium_is_touched(self, medium: Medium) -> None:
        for offset, length in ((-1, 1), (-1, 0), (SIZE, 1), (SIZE - 1, 2), (SIZE + 1, 0)):
            with pytest.raises(UsageError, match=medium.info.name):
                medium.store(offset, b"x" * length)
            with pytest.raises(UsageError):
                medium.load(offset, memoryview(bytearray(length)))
            if offset >= 0:
                with pytest.raises(UsageError):
                    medium.persist([Extent(0, 1), Extent(offset, length)])
        assert medium.size == SIZE
        assert self.read_behind(medium, 0, SIZE) == bytes(SIZE)
        medium.store(SIZE - 1, b"x")  # None of it has poisoned the medium.
        for offset in (0, 7, SIZE):
            medium.store(offset, b"")
            medium.load(offset, memoryview(bytearray()))

    def test_growth_is_zero_keeps_what_was_there_and_never_shrinks(self, medium: Medium) -> None:
        medium.store(0, b"a" * SIZE)
        for size in (SIZE + 1, SIZE + 5000, 9 * PAGE, 9 * PAGE + 1, 700 * PAGE + 3):
            before = medium.size
            medium.grow(size)
            assert medium.size == size
            assert load(medium, before, size - before) == bytes(size - before)
            assert self.read_behind(medium, before, size - before) == bytes(size - before)
            medium.store(size - 1, b"z")
            assert load(medium, size - 1, 1) == b"z"
            medium.store(size - 1, b"\0")
        for smaller in (size, size - 1, 0):
            medium.grow(smaller)
            assert medium.size == size
        assert load(medium, 0, SIZE) == b"a" * SIZE

    def test_what_is_poisoned_by_its_user_takes_no_stores_and_can_be_loaded(
        self, medium: Medium
    ) -> None:
        medium.store(0, b"older")
        medium.persist([Extent(0, 5)])
        medium.poison("somebody else wrote it")
        assert medium.is_poisoned
        assert_raises(
            MediumError,
            lambda: medium.store(0, b"newer"),
            lambda: medium.persist([Extent(0, 5)]),
            lambda: medium.grow(2 * SIZE),
            match="somebody else wrote it",
        )
        assert medium.size == SIZE
        assert load(medium, 0, 5) == b"older"

    def test_persist_takes_any_ranges_inside(self, medium: Medium) -> None:
        medium.store(10, b"kept")
        medium.persist([])
        medium.persist([Extent(SIZE, 0)])
        medium.persist([Extent(10, 4), Extent(0, SIZE), Extent(10, 4), Extent(12, 0)])
        assert self.read_behind(medium, 10, 4) == b"kept"

    def test_persist_takes_ranges_in_columns(self, medium: Medium) -> None:
        medium.store(10, b"kept")
        medium.persist(Extents(np.empty(0, np.int64), np.empty(0, np.int64)))
        medium.persist(Extents(np.array([SIZE - 1, 10, 0]), np.array([1, 4, 2])))
        assert self.read_behind(medium, 10, 4) == b"kept"
        with pytest.raises(UsageError):
            medium.persist(Extents(np.array([0, SIZE - 1]), np.array([1, 2])))
        with pytest.raises(UsageError):
            medium.persist(Extents(np.array([-1, 0]), np.array([2, 1])))
        assert not medium.is_poisoned

    def test_a_failed_persist_poisons_for_good_and_loads_go_on(self, medium: Medium) -> None:
        medium.store(0, b"older")
        medium.persist([Extent(0, 5)])
        self.break_persist(medium)
        medium.store(5, b"newer")
        before = medium.is_poisoned
        with pytest.raises(MediumError, match=medium.info.name):
            medium.persist([Extent(5, 5)])
        assert (before, medium.is_poisoned) == (False, True)
        assert_raises(
            MediumError,
            lambda: medium.persist([Extent(5, 5)]),
            lambda: medium.persist([]),
            lambda: medium.store(0, b"x"),
            lambda: medium.grow(2 * SIZE),
            match=medium.info.name,
        )
        assert medium.size == SIZE
        assert load(medium, 0, 5) == b"older"
        assert self.read_behind(medium, 0, 5) == b"older"

    def test_a_closed_medium_is_not_used(self) -> None:
        medium = self.make(SIZE)
        medium.close()
        medium.close()
        assert_raises(
            UsageError,
            lambda: medium.store(0, b"x"),
            lambda: medium.load(0, memoryview(bytearray(1))),
            lambda: medium.persist([Extent(0, 1)]),
            lambda: medium.grow(2 * SIZE),
        )

    def test_threads_use_disjoint_ranges_while_it_grows(self, medium: Medium) -> None:
        rounds, part = 200, SIZE // 4

        def work(index: int) -> None:
            source = random.Random(index)
            for _ in range(rounds):
                data = source.randbytes(part)
                medium.store(index * part, data)
                assert load(medium, index * part, part) == data

        with ThreadPoolExecutor(5) as threads:
            jobs = [threads.submit(work, index) for index in range(4)]
            for size in range(2 * SIZE, 40 * SIZE, 2 * SIZE):
                medium.grow(size)
            for job in jobs:
                job.result()
        assert load(medium, SIZE, medium.size - SIZE) == bytes(medium.size - SIZE)


class MappedMediumContract(MediumContract):
    """The tests of ``MediumContract``, and tests of the addresses of a ``MappedMedium``."""

    @abc.abstractmethod
    def make(self, size: int) -> MappedMedium:
        """Return a new medium, as in ``MediumContract``."""

    def test_bytes_written_or_stored_are_at_their_address(self, medium: MappedMedium) -> None:
        extent = Extent(PAGE - 2, 5)
        ctypes.memmove(medium.address(extent), b"hello", 5)
        medium.wrote(extent)
        assert load(medium, PAGE - 3, 7) == b"\0hello\0"
        medium.store(100, b"hello")
        assert ctypes.string_at(medium.address(Extent(100, 5)), 5) == b"hello"
        medium.persist([extent])
        assert self.read_behind(medium, PAGE - 3, 7) == b"\0hello\0"

    def test_offsets_and_addresses_go_together(self, medium: MappedMedium) -> None:
        assert isinstance(medium, MappedMedium)
        first = medium.address(Extent(0, SIZE))
        assert first % PAGE == 0
        assert medium.address(Extent(SIZE - 1, 1)) == first + SIZE - 1
        assert medium.address(Extent(SIZE, 0)) == first + SIZE

    def test_an_address_stays_when_the_medium_grows(self, medium: MappedMedium) -> None:
        before = medium.address(Extent(0, SIZE))
        ctypes.memmove(before, b"kept", 4)
        for size in (SIZE + 1, 5 * SIZE + 1, (64 << 20) + 1):
            medium.grow(size)
            assert medium.address(Extent(0, size)) == before
            assert ctypes.string_at(before, 4) == b"kept"
            assert ctypes.string_at(before + size - 1, 1) == b"\0"
            ctypes.memmove(before + size - 2, b"z", 1)
            medium.wrote(Extent(size - 2, 1))
            assert load(medium, size - 2, 2) == b"z\0"
            ctypes.memmove(before + size - 2, b"\0", 1)

    def test_much_can_be_written_at_an_address(self) -> None:
        length, piece = 40 << 20, 1 << 20
        medium, data = self.make(length), random.Random(2).randbytes(length)
        address = medium.address(Extent(0, length))
        for offset in range(0, length, piece):
            ctypes.memmove(address + offset, data[offset : offset + piece], piece)
            medium.wrote(Extent(offset, piece))
        medium.persist([Extent(0, length)])
        assert load(medium, 0, length) == data
        assert self.read_behind(medium, 0, length) == data
        medium.expect(Extent(PAGE - 1, length - PAGE))
        assert load(medium, 0, length) == data
        medium.close()
        with pytest.raises(UsageError):
            medium.address(Extent(0, 1))

    def test_nothing_outside_has_an_address(self, medium: MappedMedium) -> None:
        for extent in (Extent(SIZE, 1), Extent(SIZE - 1, 2), Extent(SIZE + 1, 0)):
            with pytest.raises(UsageError):
                medium.address(extent)
            for tell in (medium.expect, medium.wrote):
                with pytest.raises(UsageError):
                    tell(extent)

    def test_a_poisoned_medium_gives_no_address(self, medium: MappedMedium) -> None:
        self.break_persist(medium)
        with pytest.raises(MediumError):
            medium.persist([Extent(0, 1)])
        for tell in (medium.address, medium.expect, medium.wrote):
            with pytest.raises(MediumError):
                tell(Extent(0, 1))


class SparseMediumContract(MediumContract):
    """The tests of ``MediumContract``, and tests of how a ``SparseMedium`` gives space back. A
    medium that also has addresses inherits both contracts."""

    @abc.abstractmethod
    def make(self, size: int) -> SparseMedium:
        """Return a new medium, as in ``MediumContract``."""

    @abc.abstractmethod
    def after_power_loss(self, medium: SparseMedium) -> Iterable[bytes]:
        """Return the possible contents after a power loss at this moment: as many cases as
        possible, and at least the one in which nothing is lost."""

    @pytest.fixture
    def sparse(self) -> Iterator[SparseMedium]:
        """A medium of 16 pages: page n holds the byte n + 1, durably."""
        medium = self.make(len(_PAGES))
        medium.store(0, _PAGES)
        medium.persist([Extent(0, len(_PAGES))])
        yield medium
        medium.close()

    def test_what_is_discarded_is_zero_and_all_else_stays(self, sparse: SparseMedium) -> None:
        assert isinstance(sparse, SparseMedium)
        assert sparse.discard(_extents(2, 3, 4, 9)) >= 0
        assert sparse.discard([]) == 0
        assert sparse.size == len(_PAGES)
        assert load(sparse, 0, len(_PAGES)) == _pages_without(2, 3, 4, 9)
        assert self.read_behind(sparse, 0, len(_PAGES)) == _pages_without(2, 3, 4, 9)
        for hole in sparse.holes():
            assert load(sparse, hole.offset, hole.length) == bytes(hole.length)

    def test_what_is_filled_keeps_its_bytes_and_is_stored_to(self, sparse: SparseMedium) -> None:
        sparse.discard(_extents(2, 3, 4, 9))
        sparse.fill([Extent(0, 4 * PAGE), Extent(9 * PAGE, PAGE)])
        assert load(sparse, 0, len(_PAGES)) == _pages_without(2, 3, 4, 9)
        assert sparse.size == len(_PAGES)
        for hole in sparse.holes():
            sparse.fill([hole])
        sparse.store(2 * PAGE, b"\x03" * PAGE)
        sparse.persist([Extent(2 * PAGE, PAGE)])
        assert self.read_behind(sparse, 0, len(_PAGES)) == _pages_without(3, 4, 9)

    def test_it_grows_behind_what_was_discarded_at_its_end(self, sparse: SparseMedium) -> None:
        sparse.discard(_extents(14, 15))
        sparse.grow(len(_PAGES) + PAGE)
        assert sparse.size == len(_PAGES) + PAGE
        assert load(sparse, 0, sparse.size) == _pages_without(14, 15) + bytes(PAGE)

    def test_power_loss_leaves_what_was_discarded_or_zero(self, sparse: SparseMedium) -> None:
        discarded, tried = (2, 3, 9), 0
        sparse.discard(_extents(*discarded))
        for found in self.after_power_loss(sparse):
            tried += 1
            assert len(found) == len(_PAGES)
            for place in range(0, len(found), 512):
                sector, before = found[place : place + 512], _PAGES[place : place + 512]
                is_zero = place // PAGE in discarded and sector == bytes(512)
                assert sector == before or is_zero
        assert tried

    def test_power_loss_after_a_persist_leaves_what_was_stored_there(
        self, sparse: SparseMedium
    ) -> None:
        sparse.discard(_extents(2, 3))
        sparse.fill(_extents(2))
        sparse.store(2 * PAGE, b"new" + bytes(PAGE - 3))
        sparse.persist([Extent(2 * PAGE, PAGE)])
        for found in self.after_power_loss(sparse):
            assert found[2 * PAGE : 3 * PAGE] == b"new" + bytes(PAGE - 3)

    def test_nothing_outside_is_discarded_or_filled(self, sparse: SparseMedium) -> None:
        end = len(_PAGES)
        for extent in (Extent(end, 1), Extent(end - 1, 2), Extent(end + PAGE, PAGE)):
            for give in (sparse.discard, sparse.fill):
                with pytest.raises(UsageError):
                    give([Extent(0, PAGE), extent])
        assert load(sparse, 0, end) == _PAGES

    def test_a_poisoned_medium_gives_nothing_back(self, sparse: SparseMedium) -> None:
        self.break_persist(sparse)
        sparse.store(0, b"newer")
        with pytest.raises(MediumError):
            sparse.persist([Extent(0, 5)])
        assert_raises(
            MediumError, lambda: sparse.discard(_extents(2)), lambda: sparse.fill(_extents(2))
        )
        assert load(sparse, PAGE, len(_PAGES) - PAGE) == _PAGES[PAGE:]


_PAGES: Final = b"".join(bytes([number + 1]) * PAGE for number in range(16))


def _extents(*pages: int) -> list[Extent]:
    return [Extent(page * PAGE, PAGE) for page in pages]


def _pages_without(*pages: int) -> bytes:
    kept = (0 if number in pages else number + 1 for number in range(16))
    return b"".join(bytes([value]) * PAGE for value in kept)


def load(medium: Medium, offset: int, length: int) -> bytes:
    """Return what ``medium.load`` fills a target with that held other bytes before."""
    target = bytearray(b"\xa5" * length)
    medium.load(offset, memoryview(target))
    return bytes(target)


def assert_raises(
    error: type[Exception], *calls: Callable[[], object], match: str | None = None
) -> None:
    """Assert that each of ``calls`` raises ``error``, with a message that matches ``match``."""
    for call in calls:
        with pytest.raises(error, match=match):
            call()
