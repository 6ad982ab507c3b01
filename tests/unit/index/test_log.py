"""Entries of a log: which count, what they are for, and what is damage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from portus.engine.spec import PAGE, Extent, VersionInfo
from portus.errors import CorruptionError
from portus.reach.format.layout import DATA_START, EXTENT, STORAGE, UNIT_DIGEST
from portus.reach.index.log import Bunch, Entry, LogWriter, PatchPlaces, entries, read_log
from portus.reach.index.records import VersionLog, VersionRecord
from portus.reach.media.space import Memory

PAGES = 30


def version(*, born: tuple[int, ...] = (3, 5), commit: int = 5, counted: int = 0) -> VersionRecord:
    """Storages of 10,000 bytes in two extents, and of 100; behind them the log."""
    storages = np.zeros(2, STORAGE.dtype)
    storages["length"], storages["extents"] = (10_000, 100), (2, 1)
    storages["born"] = born
    rows = [(20 * PAGE, 2 * PAGE), (10 * PAGE, 10_000 - 2 * PAGE), (15 * PAGE, 100)]
    info = VersionInfo("shelf", 1, commit, 0, os.urandom(16), 0, 10_100)
    log = VersionLog(Extent(DATA_START + 20 * PAGE, PAGES * PAGE), os.urandom(16), 2, counted)
    units = np.zeros(2, UNIT_DIGEST.dtype)
    return VersionRecord(info, b"", storages, np.array(rows, EXTENT.dtype), units, log)


def appended(medium: Memory, record: VersionRecord, count: int = 4) -> LogWriter:
    assert record.log is not None
    writer = LogWriter(medium, record.log)
    for number in range(1, count + 1):
        data = np.full((1, 50), number, np.uint8)
        writer.append([Bunch(np.array([15 * PAGE]), data)], b"{}", record.info.commit)
    return writer


@pytest.fixture
def medium() -> Iterator[Memory]:
    made = Memory(DATA_START + (20 + 1200) * PAGE)
    yield made
    made.close()


def test_a_patch_is_for_the_storage_that_has_its_bytes_since_it_stands_there() -> None:
    places = PatchPlaces(version())

    def found(commit: int, offset: int, length: int = 8) -> list[tuple[int, int]]:
        patch = Bunch(np.array([offset]), np.zeros((1, length), np.uint8))
        entry = Entry(Extent(0, PAGE), 1, commit, b"", [patch])
        return [(storage, int(start)) for storage, [start], _ in places.of(entry)]

    assert found(5, 20 * PAGE + 3) == [(0, 3)]
    assert found(3, 10 * PAGE + 3) == [(0, 2 * PAGE + 3)]
    assert found(2, 10 * PAGE + 3) == []  # it was another's then
    assert found(5, 15 * PAGE) == [(1, 0)]
    assert found(4, 15 * PAGE) == []
    assert found(5, 15 * PAGE + 99) == []  # beyond its end
    assert found(5, 12 * PAGE) == found(5, PAGE) == []


def test_entries_come_back_in_order_and_a_version_counts_its_own(medium: Memory) -> None:
    record = version()
    writer = appended(medium, record)
    assert [each.number for each in entries(medium, record)] == [1, 2, 3, 4]
    writer.advance(writer.store([], b"", 6))
    assert len(list(entries(medium, record))) == 4
    assert record.log is not None
    following = replace(
        record, info=replace(record.info, commit=6), log=replace(record.log, entries=5)
    )
    assert [each.contents for each in entries(medium, following)] == [b""] * 5
    writer.append([], b"[]", 6)
    assert len(list(entries(medium, record))) == 4
    assert read_log(medium, following).contents == b"[]"
    earlier = replace(record, info=replace(record.info, commit=4))
    assert list(entries(medium, earlier)) == []


def test_every_damaged_entry_but_the_last_is_found(medium: Memory) -> None:
    record = version()
    writer = appended(medium, record)
    assert record.log is not None
    whole = np.frombuffer(bytearray(writer.used_extent.length), np.uint8)
    medium.load(record.log.extent.offset, whole.data)
    size = writer.used_extent.length // 4
    for place in (0, 5, 40, 70, 90, 110, PAGE - 1, PAGE, PAGE + 49, size + 7, 3 * size - 1):
        medium.store(record.log.extent.offset + place, bytes([whole[place] ^ 4]))
        with pytest.raises(CorruptionError, match=f"entry {place // size + 1} of the log"):
            list(entries(medium, record))
        medium.store(record.log.extent.offset + place, bytes([whole[place]]))
    medium.store(record.log.extent.offset + 3 * size, b"?")
    assert len(list(entries(medium, record))) == 3
    counted = replace(record, log=replace(record.log, entries=4))
    with pytest.raises(CorruptionError, match="expected 4 entries"):
        list(entries(medium, counted))


def test_what_is_behind_the_end_is_blanked(medium: Memory) -> None:
    record = version()
    assert record.log is not None
    appended(medium, record)
    *_, third, _ = entries(medium, record)
    LogWriter(medium, record.log, third).cut()
    assert [each.number for each in entries(medium, record)] == [1, 2, 3]


def test_a_crash_while_entries_are_blanked_makes_no_damage() -> None:
    """An entry that is not there, and has others behind it, is damage. So those behind the end are
    blank, and durably, before the one at the end is."""
    medium = Journaled(DATA_START + (20 + 1200) * PAGE)
    with contextlib.closing(medium):
        record = version()
        assert record.log is not None
        appended(medium, record, 5)
        *_, third, fourth, fifth = entries(medium, record)
        medium.done.clear()
        LogWriter(medium, record.log, third).cut()
    end, behind = fourth.extent.offset, fifth.extent.offset
    assert [act for act in medium.done if act[1] in (end, behind)] == [
        ("store", behind),
        ("persist", behind),
        ("store", end),
        ("persist", end),
    ]


class Journaled(Memory):
    """Tells in which order bytes were stored and persisted, and where."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.done: list[tuple[str, int]] = []

    def store(self, offset: int, data: bytes | memoryview) -> None:
        super().store(offset, data)
        self.done.append(("store", offset))

    def persist(self, ranges: Sequence[Extent]) -> None:
        super().persist(ranges)
        self.done.extend(("persist", each.offset) for each in ranges)


def test_a_large_entry_is_stored_piece_by_piece(medium: Memory) -> None:
    record = version()
    assert record.log is not None
    record = replace(record, log=replace(record.log, extent=Extent(DATA_START, 1200 * PAGE)))
    assert record.log is not None
    data = np.frombuffer(os.urandom(3 << 20), np.uint8).reshape(1, -1)
    LogWriter(medium, record.log).append([Bunch(np.array([DATA_START]), data)], b"{}", 5)
    [entry] = entries(medium, record)
    assert np.array_equal(entry.bunches[0].data, data)


@pytest.mark.parametrize("size", [7, 700, PAGE + 4])
def test_rows_in_bunches_come_back_over_extents_and_windows(medium: Memory, size: int) -> None:
    record = version()
    assert record.log is not None
    rng = np.random.default_rng(size)
    image = np.zeros(10_000, np.uint8)
    writer = LogWriter(medium, record.log)
    extents = [(0, 2 * PAGE, 20 * PAGE), (2 * PAGE, 10_000, 10 * PAGE)]
    for _ in range(4):
        bunches = []
        for begin, end, offset in extents:
            if end - begin >= size:
                start = rng.choice(np.arange(begin, end - size + 1, size), 2)
                data = rng.integers(0, 256, (2, size), np.uint8)
                bunches.append(Bunch(start - begin + offset, data))
                for row, at in enumerate(start.tolist()):
                    image[at : at + size] = data[row]
        writer.append(bunches, b"", record.info.commit)
    found = read_log(medium, record)
    for low, high in ((0, 10_000), (0, 1), (5, PAGE), (100, 9_999), (PAGE, 2 * PAGE + 1)):
        target = bytearray(high - low)
        found.over(0, low, memoryview(target))
        assert bytes(target) == image[low:high].tobytes()


def test_what_each_entry_writes_whole_takes_memory_once(medium: Memory) -> None:
    """And between two of these, others write a part of it, or all of it and more."""
    record = version()
    assert record.log is not None
    rng = np.random.default_rng(5)
    image = np.zeros(PAGE, np.uint8)
    writer = LogWriter(medium, record.log)
    parts = [(0, PAGE), (100, 50), (0, PAGE), (90, 80), (100, 50), (200, 30)]
    for start, length in parts:
        data = rng.integers(0, 256, (1, length), np.uint8)
        image[start : start + length] = data
        place = 20 * PAGE + start
        writer.append([Bunch(np.array([place]), data)], b"", record.info.commit)
    found = read_log(medium, record)
    target = bytearray(PAGE)
    found.over(0, 0, memoryview(target))
    assert bytes(target) == image.tobytes()
    assert len(found.changes[0]) == len({*parts})
    assert found.entries == len(parts)
