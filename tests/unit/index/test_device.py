"""Pools on devices, made in place: every crash leaves a pool, or a device that is blank (V2)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pytest

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, UsageError
from portus.reach.format.layout import DATA_START, SLOT_OFFSETS
from portus.reach.index.check import check
from portus.reach.index.findings import Severity
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.roots import format_pool, is_blank, read_slots
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.space import Memory
from tests.simulation import lines
from tests.simulation.crash import CrashFiles
from tests.simulation.explore import Explorer
from tests.unit.index.pools import OPENED, close_all, save

DEVICE: Final = "/device"
SIZE: Final = 24 * PAGE

BEGUN: Final = "begun"
MADE: Final = "made"
"""What a process reports when it has made a pool, or found one; and before it does so by force."""


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Each sets much address space aside."""
    yield
    close_all()


def memory(size: int) -> Memory:
    OPENED.append(Memory(size))
    return OPENED[-1]


def device(content: bytes = b"") -> Callable[[], CrashFiles]:
    def start() -> CrashFiles:
        files = CrashFiles()
        lines.make_device(files, DEVICE, SIZE, content)
        return files

    return start


def make_if_blank(files: CrashFiles, report: Callable[[str], None]) -> None:
    medium = lines.open_device(files, DEVICE)
    if is_blank(medium):
        format_pool(medium)
    PoolWriter(medium, ProcessLocks())
    report(MADE)


def make_anyway(files: CrashFiles, report: Callable[[str], None]) -> None:
    report(BEGUN)
    format_pool(lines.open_device(files, DEVICE))
    report(MADE)


def assert_pool(medium: Medium) -> PoolReader:
    assert not is_blank(medium)
    pool = PoolReader(medium, ProcessLocks())
    errors = [each for each in check(pool) if each.severity is Severity.ERROR]
    # The text of who writes has no digest, and may be torn: that breaks F2.
    broken = [str(each) for each in errors if each.invariant != "F2"]
    assert not broken, broken
    return pool


def blank_or_a_pool(files: CrashFiles, facts: Sequence[str]) -> None:
    medium = lines.open_device(files, DEVICE)
    if facts or not is_blank(medium):
        assert_pool(medium)


def old_pool() -> bytes:
    """A device that holds a pool with two versions."""
    medium = memory(SIZE)
    format_pool(medium)
    writer = PoolWriter(medium, ProcessLocks())
    for step in (1, 2):
        save(writer, "a", step, [bytes([step]) * 5000])
    assert medium.size == SIZE
    content = bytearray(SIZE)
    medium.load(0, memoryview(content))
    writer.close()
    return bytes(content)


@pytest.mark.parametrize("length", [1, 3 * PAGE, 5 * PAGE])
def test_an_empty_pool_whose_first_pages_have_other_data_is_not_blank(length: int) -> None:
    medium = memory(SIZE)
    format_pool(medium)
    medium.store(0, b"x" * length)
    medium.store(PAGE, b"x" * length)
    assert is_blank(medium) == (length == 1), "a slot may be torn by a crash; the rest may not"


@pytest.mark.long
def test_every_crash_leaves_a_blank_device_or_a_pool() -> None:
    found = Explorer(
        processes=[make_if_blank, make_if_blank, make_if_blank],
        verify=blank_or_a_pool,
        start=device(),
        budgets=(300, 30, 5),
    ).explore()
    print(found)
    assert len(found.images) > 150


@pytest.mark.long
def test_a_pool_is_never_taken_for_blank_and_made_anew_by_force_alone() -> None:
    content = old_pool()

    def verify(files: CrashFiles, facts: Sequence[str]) -> None:
        """The old pool, nobody's (a wish may be repeated), or blank; and the new one at the end."""
        medium = lines.open_device(files, DEVICE)
        if facts[-1:] == (MADE,):
            assert not assert_pool(medium).catalogue().ids()
            return
        if not is_blank(medium):
            try:
                ids = PoolReader(medium, ProcessLocks()).catalogue().ids()
            except CorruptionError:
                return
            assert ids in ({1, 2}, {1}, set())
            return
        format_pool(medium)
        assert_pool(medium)

    found = Explorer(
        processes=[make_anyway, make_anyway],
        verify=verify,
        start=device(content),
        budgets=(300, 30),
    ).explore()
    print(found)
    assert len(found.images) > 150


@pytest.fixture
def medium() -> Memory:
    return memory(SIZE)


def test_zeros_are_blank(medium: Memory) -> None:
    assert is_blank(medium)
    medium.store(DATA_START, b"behind the header is data")
    assert is_blank(medium)


@pytest.mark.parametrize("offset", [0, 512, 1024, PAGE, 3 * PAGE, 6 * PAGE, DATA_START - 1])
def test_what_somebody_else_wrote_is_not_blank(medium: Memory, offset: int) -> None:
    medium.store(offset, b"x")
    assert not is_blank(medium)


def test_a_device_without_room_for_a_header_is_refused() -> None:
    with pytest.raises(UsageError, match="needs at least 32768 bytes"):
        is_blank(memory(DATA_START - 1))


def test_a_pool_that_holds_something_is_not_blank_without_its_first_page() -> None:
    medium = memory(SIZE)
    medium.store(0, old_pool())
    medium.store(0, bytes(PAGE))
    assert not is_blank(medium)
    assert PoolReader(medium, ProcessLocks()).catalogue().ids() == {1, 2}


def test_a_pool_is_not_blank_whichever_byte_of_its_header_is_damaged() -> None:
    content = bytearray(old_pool())
    tried = 0
    for offset in (at + byte for at in SLOT_OFFSETS for byte in range(128)):
        medium = memory(SIZE)
        medium.store(0, bytes(content))
        medium.store(offset, bytes([content[offset] ^ 0xFF]))
        assert not is_blank(medium), f"byte {offset}"
        medium.close()
        tried += 1
    assert tried == 512


def test_making_a_pool_touches_nothing_behind_its_header() -> None:
    data = random.Random(1).randbytes(SIZE)
    medium = memory(SIZE)
    medium.store(0, data)
    format_pool(medium)
    found = bytearray(SIZE)
    medium.load(0, memoryview(found))
    assert found[DATA_START:] == data[DATA_START:]
    slots = read_slots(medium)
    assert all(slots)
    assert slots[:2] == slots[2:]
