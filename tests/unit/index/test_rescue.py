"""Versions are found again when both root slots are lost."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from portus.errors import CorruptionError
from portus.format.layout import DATA_START, SLOT, SLOT_OFFSETS, SUPERBLOCK_OFFSETS
from portus.index.pool import PoolReader
from portus.index.records import VersionRecord
from portus.index.rescue import find_versions, is_whole
from portus.media.lock import ProcessLocks
from tests.unit.index.pools import Pool, close_all


@pytest.fixture(autouse=True)
def pools_closed() -> Iterator[None]:
    """Each sets much address space aside."""
    yield
    close_all()


def destroy(pool: Pool, *offsets: int) -> None:
    for offset in offsets:
        pool.medium.store(offset, os.urandom(SLOT.size))


def steps(records: list[VersionRecord]) -> list[tuple[str, int]]:
    return [(record.info.model, record.info.step) for record in records]


def content(pool: Pool, record: VersionRecord, storage: int) -> bytes:
    found = b""
    for extent in record.storage_extents(storage):
        data = bytearray(extent.length)
        pool.medium.load(extent.offset, memoryview(data))
        found += data
    return found


def test_versions_come_back_when_both_slots_are_lost() -> None:
    pool = Pool()
    first = pool.save("a", 1, [b"x" * 100, b"y" * 5000])
    pool.save("ä", 7, [b"z" * 9])
    pool.save("a", 2, [b"x" * 100, b"w" * 5000], share=first)
    before = [pool.writer.record(entry) for entry in pool.writer.catalogue().entries()]
    destroy(pool, *SLOT_OFFSETS)
    with pytest.raises(CorruptionError, match="both root slots"):
        PoolReader(pool.medium, ProcessLocks()).catalogue()
    found = find_versions(pool.medium)
    assert steps(found) == [("a", 1), ("ä", 7), ("a", 2)]
    assert {record.info for record in found} == {record.info for record in before}
    assert all(is_whole(pool.medium, record) for record in found)
    assert content(pool, found[2], 0) == b"x" * 100
    assert content(pool, found[2], 1) == b"w" * 5000


def test_versions_come_back_when_the_superblock_is_lost_too() -> None:
    pool = Pool()
    pool.save("a", 1, [b"x"])
    destroy(pool, *SLOT_OFFSETS, *SUPERBLOCK_OFFSETS)
    assert steps(find_versions(pool.medium)) == [("a", 1)]


def test_a_version_whose_bytes_are_gone_is_not_whole() -> None:
    pool = Pool()
    record = pool.save("a", 1, [b"x" * 100, b"y"])
    for place in (record.layout.offset, record.tree.offset, record.storage_extents(0)[0].offset):
        kept = bytearray(16)
        pool.medium.load(place + 70, memoryview(kept))
        pool.medium.store(place + 70, os.urandom(16))
        assert steps(find_versions(pool.medium)) == [("a", 1)]
        assert not is_whole(pool.medium, record)
        pool.medium.store(place + 70, bytes(kept))
    assert is_whole(pool.medium, record)


def test_a_damaged_version_record_is_not_found() -> None:
    pool = Pool()
    pool.save("a", 1, [b"x"])
    pool.save("a", 2, [b"y"])
    place = pool.entry("a", 0).pointer
    pool.medium.store(place.offset + 80, b"\xff")
    assert steps(find_versions(pool.medium)) == [("a", 2)]


def test_records_of_another_pool_in_saved_bytes_do_not_count() -> None:
    other = Pool()
    other.save("other", 1, [b"x"])
    raw = bytearray(other.medium.size)
    other.medium.load(0, memoryview(raw))
    pool = Pool()
    pool.save("a", 1, [bytes(raw)])
    destroy(pool, *SLOT_OFFSETS)
    assert steps(find_versions(pool.medium)) == [("a", 1)]


def test_records_are_found_on_both_sides_of_what_is_read_at_once() -> None:
    pool = Pool()
    for step in range(5):
        pool.save("a", step, [b"PREC" * 500, b" PREC" * 99])
    assert [step for _, step in steps(find_versions(pool.medium, chunk=72))] == [0, 1, 2, 3, 4]


def test_an_empty_pool_holds_none() -> None:
    assert find_versions(Pool().medium) == []
    assert Pool().medium.size == DATA_START
