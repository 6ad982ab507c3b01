"""Records that several versions depend on are kept twice, and looked at before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE
from portus.errors import CorruptionError
from portus.reach.format.layout import COPIES, SUPERBLOCK_OFFSETS, RecordKind
from portus.reach.index.catalogue import newest_catalogue
from portus.reach.index.check import check
from portus.reach.index.pool import REFRESH_COMMITS
from portus.reach.index.records import NOWHERE, Pointer, read_whole
from portus.reach.index.roots import read_roots, store_root, whole_superblock
from tests.unit.index.pools import Pool, close_all


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_all()


class Copied(Pool):
    """Two models, the second of which stays as it is; three versions with the same contents."""

    def __init__(self) -> None:
        super().__init__()
        self.save("b", 0, [b"idle"])
        self.newest = self.save("a", 1, [b"one"])
        for step in (2, 3):
            self.again(step)

    def again(self, step: int) -> None:
        """A save as ``PoolDraft`` makes it: contents are those before, if they are sound."""
        before = self.newest
        sound = self.writer.is_sound(before.contents, RecordKind.CONTENTS)
        self.newest = self.save("a", step, [b"one"], share=before if sound else None)

    def copied(self) -> dict[str, Pointer]:
        """What is kept twice."""
        catalogue = self.writer.catalogue()
        return {
            "table": catalogue.root.table,
            "idle index": catalogue.models["b"].pointer,
            "index": catalogue.models["a"].pointer,
            "contents": self.newest.contents,
        }

    def places(self, pointer: Pointer) -> list[Pointer]:
        copies = self.writer.catalogue().copies_of(pointer)
        return [pointer, *(copy.pointer for copy in copies)]

    def flip(self, place: Pointer) -> None:
        self.change(place.offset + place.length - 1)

    def change(self, offset: int) -> None:
        byte = bytearray(1)
        self.medium.load(offset, memoryview(byte))
        self.medium.store(offset, bytes([byte[0] ^ 1]))

    def loads(self) -> list[tuple[str, int]]:
        """What can be read of each version by somebody who looks now."""
        found = []
        reader = self.open_reader()
        for entry in reader.catalogue().entries():
            reader.contents(reader.record(entry))
            found.append((entry.info.model, entry.info.step))
        return sorted(found)

    def is_twice(self, pointer: Pointer, kind: RecordKind) -> bool:
        """True if two places or more hold the record, on pages of their own."""
        whole = set()
        for place in self.places(pointer):
            try:
                read_whole(self.medium, place, kind)
            except CorruptionError:
                continue
            whole.add(place.offset // PAGE)
        return len(whole) >= 2


KINDS = {
    "table": RecordKind.MODEL_TABLE,
    "idle index": RecordKind.MODEL_INDEX,
    "index": RecordKind.MODEL_INDEX,
    "contents": RecordKind.CONTENTS,
}

ALL = [("a", 1), ("a", 2), ("a", 3), ("b", 0)]


def test_all_that_several_versions_depend_on_is_kept_twice() -> None:
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
    pool.flip(pool.copied()[what])
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


@pytest.mark.parametrize("until", range(2, 5))
def test_what_is_stored_over_while_it_is_read_is_not_called_damaged(
    until: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Copied()
    pool.writer.max_bytes = pool.medium.size
    pool.writer.reserve(pool.writer.free_bytes() - 10 * PAGE)  # what is freed is soon used again
    steps = [3]

    def commit_again_and_again() -> None:
        for _ in range(30):
            steps.append(steps[-1] + 1)
            (first, *_) = pool.writer.catalogue().models["a"].versions
            pool.newest = pool.save("a", steps[-1], [bytes([steps[-1]])], retire=[first.info.id])

    medium = cast(Medium, Slow(pool.medium, until, commit_again_and_again))
    with caplog.at_level(logging.WARNING, "portus"):
        found = newest_catalogue(medium, pool.writer.superblock.uuid)
    assert len(steps) > 1, "it was read with fewer loads"
    assert found.models["a"].versions[-1].info.step in steps
    assert caplog.text == ""


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("reopen", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_rotten_is_not_relied_on_by_the_next_commit(
    what: str, reopen: bool, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Copied()
    pool.flip(pool.places(pool.copied()[what])[place])
    if reopen:
        pool.reopen()
    for step in (4, 5, 6):
        pool.again(step)
    assert pool.loads() == [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("a", 5), ("a", 6), ("b", 0)]
    for each, pointer in pool.copied().items():
        assert pool.is_twice(pointer, KINDS[each]), each
    records = [pool.writer.record(entry) for entry in pool.writer.catalogue().models["a"].versions]
    assert all(pool.is_twice(record.contents, RecordKind.CONTENTS) for record in records)


def test_a_rotten_list_of_copies_costs_the_copies_until_the_next_commit() -> None:
    pool = Copied()
    pool.flip(pool.writer.catalogue().root.copies)
    assert pool.loads() == ALL
    assert [each for each in check_of(pool) if each.startswith("F6: copies record")]
    pool.reopen()
    assert pool.writer.catalogue().copies == ()
    pool.again(4)
    for each, pointer in pool.copied().items():
        assert pool.is_twice(pointer, KINDS[each]), each
    pool.again(5)  # in the place of the other root
    assert check_of(pool) == []


def test_what_an_older_portus_left_without_copies_has_them_after_the_next_commit() -> None:
    pool = Copied()
    for root in read_roots(pool.medium, pool.writer.superblock.uuid):
        plain = type(root)(root.sequence, root.next_version, root.size, root.table)
        store_root(pool.medium, pool.writer.superblock.uuid, plain)
    pool.reopen()
    assert pool.writer.catalogue().root.copies == NOWHERE
    pool.again(4)
    for each, pointer in pool.copied().items():
        assert pool.is_twice(pointer, KINDS[each]), each
    assert check_of(pool) == []


def test_what_is_shared_is_written_afresh_after_many_commits() -> None:
    pool = Copied()
    before = pool.copied()
    for step in range(REFRESH_COMMITS):
        pool.again(step)
        pool.writer.retire([pool.newest.info.id - 1])
    after = pool.copied()
    assert [what for what in before if before[what].offset == after[what].offset] == []
    assert check_of(pool) == []


def test_without_room_a_commit_goes_on_with_one_of_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Pool()
    first = pool.save("a", 1, [bytes(9 * PAGE)])
    full = pool.medium.size - pool.writer.free_bytes()
    pool.writer.max_bytes = pool.medium.size
    held = pool.writer.reserve(pool.writer.free_bytes() - 2 * PAGE)
    with caplog.at_level(logging.WARNING, "portus"):
        pool.save("a", 2, [b"small"], share=None)
    assert "no space for copies of records" in caplog.text
    assert full < pool.medium.size
    pool.writer.release(held)
    pool.save("a", 3, [b"small"])
    found = [pool.writer.record(entry).contents for entry in pool.writer.catalogue().entries()]
    assert first.contents in found
    assert all(pool.writer.catalogue().copies_of(each) for each in found)
    assert check_of(pool) == []


@pytest.mark.parametrize("offset", SUPERBLOCK_OFFSETS)
@pytest.mark.parametrize("reopen", [False, True])
def test_a_rotten_superblock_is_restored_from_its_copy(
    offset: int, reopen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Copied()
    pool.change(offset + 50)
    with caplog.at_level(logging.ERROR, "portus"):
        if reopen:
            pool.reopen()
        else:
            pool.again(4)
    assert f"superblock at byte {offset} is damaged" in caplog.text
    blocks = [whole_superblock(pool.medium, each) for each in SUPERBLOCK_OFFSETS]
    assert blocks == [pool.writer.superblock] * 2
    assert blocks[0] is not None
    assert blocks[0].compat & COPIES
    pool.again(5)
    assert check_of(pool) == []


def test_a_commit_notices_what_others_did_to_the_pool() -> None:
    pool = Copied()
    uuid = pool.writer.superblock.uuid
    root = pool.writer.catalogue().root
    other = type(root)(root.sequence + 1, root.next_version, root.size, root.table, root.copies)
    store_root(pool.medium, uuid, other)
    with pytest.raises(CorruptionError, match="of another writer"):
        pool.again(4)

    pool = Copied()
    for offset in SUPERBLOCK_OFFSETS:
        pool.medium.store(offset, bytes(PAGE))
    with pytest.raises(CorruptionError, match="another program overwrote it"):
        pool.again(4)
