"""Every record is kept twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError
from portus.reach.format.layout import SLOT_OFFSETS, RecordKind
from portus.reach.index.catalogue import newest_catalogue
from portus.reach.index.check import check
from portus.reach.index.records import Pointer, read_whole
from portus.reach.index.roots import read_slots, store_root
from tests.unit.index.pools import Pool, close_all


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


class Copied(Pool):
    """Two models, the second of which stays as it is; three versions of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.save("b", 0, [b"idle"])
        for step in (1, 2, 3):
            self.again(step)

    def again(self, step: int) -> None:
        self.save("a", step, [b"one"])

    def copied(self) -> dict[str, Pointer]:
        """What is kept twice."""
        root = self.writer.catalogue().root
        return {"catalogue": root.catalogue, "version": self.entry("a").pointer}

    def flip(self, place: Extent) -> None:
        self.change(place.end - 1)

    def change(self, offset: int) -> None:
        byte = bytearray(1)
        self.medium.load(offset, memoryview(byte))
        self.medium.store(offset, bytes([byte[0] ^ 1]))

    def loads(self) -> list[tuple[str, int]]:
        """What can be read of each version by somebody who looks now."""
        found = []
        reader = self.open_reader()
        for entry in reader.catalogue().entries():
            reader.record(entry)
            found.append((entry.info.model, entry.info.step))
        return sorted(found)

    def is_twice(self, pointer: Pointer, kind: RecordKind) -> bool:
        """True if two places or more hold the record, on pages of their own."""
        whole = set()
        for place in pointer.extents:
            try:
                read_whole(self.medium, pointer, kind, place.offset)
            except CorruptionError:
                continue
            whole.add(place.offset // PAGE)
        return len(whole) >= 2


KINDS = {"catalogue": RecordKind.CATALOGUE, "version": RecordKind.VERSION}

ALL = [("a", 1), ("a", 2), ("a", 3), ("b", 0)]


def test_all_records_are_kept_twice() -> None:
    pool = Copied()
    assert [
        what for what, each in pool.copied().items() if not pool.is_twice(each, KINDS[what])
    ] == []
    assert check_of(pool) == []


def check_of(pool: Pool) -> list[str]:
    return [str(finding) for finding in check(pool.open_reader())]


@pytest.mark.parametrize("what", KINDS)
def test_a_rotten_record_costs_nothing_and_is_said(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Copied()
    pool.flip(pool.copied()[what].extents[0])
    with caplog.at_level(logging.ERROR, "portus"):
        assert pool.loads() == ALL
    assert "read from its copy at byte" in caplog.text
    [found] = set(check_of(pool))
    assert found.startswith("F6")
    assert "its copy at byte" in found


class Slow:
    """A medium whose load number ``until`` waits while ``happens``."""

    def __init__(self, medium: Medium, until: int, happens: Callable[[], object]) -> None:
        self._medium = medium
        self._left = until
        self._happens = happens

    def load(self, offset: int, into: memoryview) -> None:
        self._left -= 1
        if self._left == 0:
            self._happens()
        self._medium.load(offset, into)

    def __getattr__(self, name: str) -> object:
        return getattr(self._medium, name)


def test_what_is_stored_over_while_it_is_read_is_not_called_damaged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Copied()
    pool.writer.max_bytes = pool.medium.size
    pool.writer.reserve(pool.writer.free_bytes() - 10 * PAGE)  # what is freed is soon used again
    steps = [3]

    def commit_again_and_again() -> None:
        for _ in range(30):
            steps.append(steps[-1] + 1)
            (first, *_) = pool.writer.catalogue().models["a"]
            pool.save("a", steps[-1], [bytes([steps[-1]])], retire=[first.info.id])

    medium = cast(Medium, Slow(pool.medium, 2, commit_again_and_again))
    with caplog.at_level(logging.WARNING, "portus"):
        found = newest_catalogue(medium, pool.writer.uuid)
    assert len(steps) > 1, "it was read with one load"
    assert found.models["a"][-1].info.step in steps
    assert caplog.text == ""


@pytest.mark.parametrize("reopen", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_a_rotten_catalogue_is_written_again_by_the_next_commit(reopen: bool, place: int) -> None:
    pool = Copied()
    pool.flip(pool.copied()["catalogue"].extents[place])
    if reopen:
        pool.reopen()
    for step in (4, 5):
        pool.again(step)
    assert pool.loads() == [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("a", 5), ("b", 0)]
    assert check_of(pool) == []


@pytest.mark.parametrize("place", [0, 1])
def test_a_version_with_one_rotten_record_outlives_all_commits(place: int) -> None:
    pool = Copied()
    pool.flip(pool.copied()["version"].extents[place])
    pool.reopen()
    for step in (4, 5, 6):
        pool.again(step)
    assert ("a", 3) in pool.loads()
    [finding] = check_of(pool)
    assert finding.startswith("F6: record of version 4")


def test_without_room_a_commit_goes_on_with_one_of_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Pool()
    pool.save("a", 1, [bytes(9 * PAGE)])
    full = pool.medium.size - pool.writer.free_bytes()
    pool.writer.max_bytes = pool.medium.size
    held = pool.writer.reserve(pool.writer.free_bytes() - 2 * PAGE)
    with caplog.at_level(logging.WARNING, "portus"):
        pool.save("a", 2, [b"small"])
    assert "no space for copies of records" in caplog.text
    assert full < pool.medium.size
    alone = (pool.entry("a").pointer, pool.writer.catalogue().root.catalogue)
    assert [each.copy for each in alone] == [0, 0]
    pool.writer.release(held)
    pool.save("a", 3, [b"small"])
    assert pool.entry("a").pointer.copy
    assert pool.writer.catalogue().root.catalogue.copy
    assert check_of(pool) == []


@pytest.mark.parametrize("offset", SLOT_OFFSETS)
@pytest.mark.parametrize("reopen", [False, True])
def test_a_rotten_root_slot_is_restored_from_its_copy(
    offset: int, reopen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Copied()
    pool.change(offset + 50)
    with caplog.at_level(logging.ERROR, "portus"):
        if reopen:
            pool.reopen()
        else:
            pool.again(4)
    assert f"root slot at byte {offset} is damaged" in caplog.text
    slots = read_slots(pool.medium)
    assert all(slots)
    assert slots[:2] == slots[2:]
    pool.again(5)
    assert check_of(pool) == []


def test_a_commit_notices_what_others_did_to_the_pool() -> None:
    pool = Copied()
    uuid = pool.writer.uuid
    root = pool.writer.catalogue().root
    other = type(root)(root.sequence + 1, root.next_version, root.size, root.catalogue)
    store_root(pool.medium, uuid, other)
    with pytest.raises(CorruptionError, match="of another writer"):
        pool.again(4)

    pool = Copied()
    for offset in SLOT_OFFSETS:
        pool.medium.store(offset, bytes(PAGE))
    with pytest.raises(CorruptionError, match="another program overwrote it"):
        pool.again(4)
