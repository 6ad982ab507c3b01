"""Versions are found again when both root slots are lost."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from portus.errors import CorruptionError, MediumError
from portus.reach.format.layout import DATA_START, SLOT, SLOT_OFFSETS, RecordKind
from portus.reach.index.check import check
from portus.reach.index.findings import Severity
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.index.rescue import RecoverableVersion, choose, find_versions, is_whole
from portus.reach.media.lock import ProcessLocks
from tests.unit.index.pools import Forger, Pool, close_all


@pytest.fixture(autouse=True)
def pools_closed() -> Iterator[None]:
    """Each sets much address space aside."""
    yield
    close_all()


def destroy(pool: Pool, *offsets: int) -> None:
    for offset in offsets:
        pool.medium.store(offset, os.urandom(SLOT.size))


def steps(found: list[RecoverableVersion]) -> list[tuple[str, int]]:
    return [(each.record.info.model, each.record.info.step) for each in found]


def test_versions_with_a_page_together_are_not_chosen_together() -> None:
    pool = Pool()
    pool.save("a", 1, [b"x" * 100])
    first = pool.writer.record(pool.entry("a")).storage_extents(0)[0]
    newer = pool.save("b", 2, [b"y" * 10])
    pool.medium.store(first.end + 28, b"y" * 10)

    def beside(version: list[Any]) -> None:
        version[3] = (first.end + 28).to_bytes(8, "little") + version[3][8:]

    pool.writer.retire([pool.entry("a").info.id])
    Forger(pool.medium).forge(RecordKind.VERSION, beside)
    older, whole, forged = find_versions(pool.medium)
    assert whole.record.info == forged.record.info == newer.info
    assert is_whole(pool.medium, forged.record)
    assert choose([older, whole]) == [older, whole]
    assert choose([older, forged]) == [forged], "the newer one"


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
    with pytest.raises(CorruptionError, match="portus rescue"):
        PoolReader(pool.medium, ProcessLocks()).catalogue()
    found = find_versions(pool.medium)
    assert steps(found) == [("a", 1), ("ä", 7), ("a", 2)]
    assert {each.record.info for each in found} == {record.info for record in before}
    assert all(is_whole(pool.medium, each.record) for each in found)
    assert content(pool, found[2].record, 0) == b"x" * 100
    assert content(pool, found[2].record, 1) == b"w" * 5000


def test_a_version_whose_bytes_are_gone_is_not_whole() -> None:
    pool = Pool()
    record = pool.save("a", 1, [b"x" * 100, b"y"])
    place = record.storage_extents(0)[0].offset
    assert is_whole(pool.medium, record)
    pool.medium.store(place + 70, os.urandom(16))
    assert steps(find_versions(pool.medium)) == [("a", 1)]
    assert not is_whole(pool.medium, record)


def test_a_damaged_version_record_is_not_found() -> None:
    pool = Pool()
    pool.save("a", 1, [b"x"])
    pool.save("a", 2, [b"y"])
    both = [("a", 1), ("a", 2)]
    for place, expected in zip(pool.entry("a", 0).pointer.extents, (both, both[1:]), strict=True):
        assert steps(find_versions(pool.medium)) == both
        pool.medium.store(place.offset + 80, b"\xff")
        assert steps(find_versions(pool.medium)) == expected, "only its copy is left, or none"


def test_records_of_another_pool_in_saved_bytes_do_not_count() -> None:
    other = Pool()
    other.save("other", 1, [b"x"])
    raw = bytearray(other.medium.size)
    other.medium.load(0, memoryview(raw))
    pool = Pool()
    pool.save("a", 1, [bytes(raw)])
    destroy(pool, *SLOT_OFFSETS[1:])
    assert steps(find_versions(pool.medium)) == [("a", 1)]


def test_records_are_found_on_both_sides_of_what_is_read_at_once() -> None:
    pool = Pool()
    for step in range(5):
        pool.save("a", step, [b"PREC" * 500, b" PREC" * 99])
    assert [step for _, step in steps(find_versions(pool.medium, chunk=72))] == [0, 1, 2, 3, 4]


def test_an_empty_pool_holds_none() -> None:
    assert find_versions(Pool().medium) == []
    assert Pool().medium.size == DATA_START


def places_of(pool: Pool) -> tuple[int, ...]:
    return SLOT_OFFSETS[pool.writer.catalogue().root.slot :: 2]


def listed(reader: PoolReader) -> list[tuple[str, int]]:
    infos = [entry.info for entry in reader.catalogue().entries()]
    return [(info.model, info.step) for info in sorted(infos, key=lambda info: info.id)]


@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_a_rotten_newest_slot_hides_no_version(
    place: int, blank: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool()
    pool.save("b", 7, [b"idle"])
    first = pool.save("a", 1, [b"one", b"shared"])
    pool.save("a", 2, [b"two", b"shared"], share=first, retire=[first.info.id])
    pool.writer.locks.close()
    if blank:
        pool.medium.store(places_of(pool)[place], bytes(SLOT.size))
    else:
        destroy(pool, places_of(pool)[place])
    assert listed(pool.open_reader()) == [("b", 7), ("a", 2)]
    [finding] = check(pool.open_reader())
    assert finding.severity is Severity.MEND
    assert finding.invariant == "F1"
    assert f"byte {places_of(pool)[place]}" in finding.where
    assert "nothing is lost" in finding.found

    with caplog.at_level(logging.ERROR, "portus"):
        pool.writer = pool.open()
    assert "is damaged; restored from its copy" in caplog.text
    assert check(pool.open_reader()) == []
    assert listed(pool.writer) == [("b", 7), ("a", 2)]
    pool.save("a", 3, [b"three"])
    assert listed(pool.open_reader()) == [("b", 7), ("a", 2), ("a", 3)]
    assert check(pool.open_reader()) == []


def test_a_root_that_was_stored_in_one_place_alone_ends_all_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readers may see it: nothing that it reaches may be written over."""
    pool = Pool()
    pool.save("a", 1, [b"one"])
    store, seen = pool.medium.store, list[int]()

    def full(offset: int, data: bytes | memoryview) -> None:
        seen.extend({offset} & {*SLOT_OFFSETS})
        if len(seen) == 2:
            raise MediumError(errno.ENOSPC, "full")
        store(offset, data)

    monkeypatch.setattr(pool.medium, "store", full)
    with pytest.raises(MediumError, match="full"):
        pool.save("a", 2, [b"two"])
    monkeypatch.undo()
    assert len(seen) == 2
    with pytest.raises(MediumError, match="no more writes: a root was stored in part"):
        pool.save("a", 3, [b"three"])


def test_a_slot_that_a_crash_tore_leads_to_the_commit_before() -> None:
    pool = Pool()
    pool.save("a", 1, [b"one"])
    pool.save("a", 2, [b"two"])
    pool.writer.locks.close()
    destroy(pool, *places_of(pool))
    assert listed(pool.open_reader()) == [("a", 1)]
    assert {each.severity for each in check(pool.open_reader())} == {Severity.WARNING}
    pool.writer = pool.open()
    assert check(pool.open_reader()) == []
    assert listed(pool.writer) == [("a", 1)]


@pytest.mark.parametrize("place", [0, 1])
def test_a_crash_between_the_two_places_of_a_slot_leaves_either_commit(place: int) -> None:
    pool = Pool()
    for step in (1, 2, 3):
        pool.save("a", step, [b"%d" % step])
    root = pool.writer.catalogue().root
    at = places_of(pool)[place]
    before = bytearray(SLOT.size)
    pool.medium.load(at, memoryview(before))
    pool.save("a", 4, [b"4"])
    pool.save("a", 5, [b"5"])
    assert pool.writer.catalogue().root.slot == root.slot
    pool.writer.locks.close()
    pool.medium.store(at, bytes(before))
    assert listed(pool.open_reader())[-1] == ("a", 5)
    [finding] = check(pool.open_reader())
    assert (finding.invariant, finding.severity) == ("F1", Severity.WARNING)
    pool.writer = pool.open()
    assert check(pool.open_reader()) == []
    assert listed(pool.writer)[-1] == ("a", 5)


def test_what_was_retired_does_not_come_back_by_a_rotten_slot() -> None:
    pool = Pool()
    for step in range(3):
        pool.save("a", step, [b"x" * 100 * step])
    pool.writer.retire([pool.entry("a", 0).info.id])
    pool.writer.locks.close()
    destroy(pool, places_of(pool)[0])
    assert listed(pool.open_reader()) == [("a", 1), ("a", 2)]


def test_the_first_commit_of_a_pool_is_found_without_its_slot() -> None:
    pool = Pool()
    pool.save("a", 1, [b"one"])
    pool.writer.locks.close()
    destroy(pool, places_of(pool)[0])
    assert listed(pool.open_reader()) == [("a", 1)]
    assert listed(pool.open()) == [("a", 1)]
