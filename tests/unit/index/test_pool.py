from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from portus.engine.media.base import MappedMedium
from portus.engine.spec import PAGE, Extent
from portus.errors import BusyError, CorruptionError, MediumError, StaleError, UsageError
from portus.reach.format.layout import DATA_START, SLOT, SLOT_OFFSETS
from portus.reach.index.check import check
from portus.reach.index.directory import WRITERS, create_pool, open_reader
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.roots import (
    format_pool,
    read_failure,
    read_holder,
    read_roots,
    store_failure,
)
from portus.reach.media.local import LocalFiles
from portus.reach.media.lock import FileLocks, ProcessLocks
from portus.reach.media.space import Memory
from tests.moments import at
from tests.unit.index.engine import reader_of, save, stored, writer


def _flip(pool: PoolReader, offset: int) -> None:
    byte = memoryview(bytearray(1))
    pool.medium.load(offset, byte)
    pool.medium.store(offset, bytes([byte[0] ^ 1]))


def test_what_is_committed_comes_back_from_a_fresh_reader() -> None:
    pool = writer()
    data = [b"weights" * 1000, b"", b"x", bytes(20 << 20)]
    record = save(pool, data, model="ä model", step=-3)
    found = reader_of(pool)
    (entry,) = found.catalogue().entries()
    assert entry.info == record.info
    assert (entry.info.step, entry.info.model, entry.info.commit) == (-3, "ä model", 2)
    assert stored(found, found.record(entry)) == data


def test_newest_is_commit_order_when_a_step_comes_twice() -> None:
    pool = writer()
    infos = [save(pool, [b"a"], step=step).info for step in (5, 6, 5)]
    assert [entry.info for entry in pool.catalogue().entries()] == infos
    assert [info.id for info in infos] == [1, 2, 3]


def test_committed_bytes_stay_while_others_come_and_go() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pool = writer()
    alive: dict[int, tuple[str, list[bytes]]] = {}
    for step in range(200):
        model = rng.choice("abc")
        data = [rng.randbytes(rng.choice([0, 1, 100, 5000, 30000])) for _ in range(4)]
        gone = [each for each in alive if rng.random() < 0.5]
        record = save(pool, data, model=model, step=step, retire=gone)
        for each in gone:
            del alive[each]
        alive[record.info.id] = (model, data)
        found = {entry.info.id: entry for entry in pool.catalogue().entries()}
        assert found.keys() == alive.keys()
        for version, (name, expected) in alive.items():
            assert found[version].info.model == name
            assert stored(pool, pool.record(found[version])) == expected
    again = PoolWriter(pool.medium, ProcessLocks())
    assert again.catalogue().models == pool.catalogue().models
    assert again.free_bytes() == pool.free_bytes(), "free space is derived, so nothing leaks (V10)"


def test_space_of_a_retired_version_is_used_again_and_the_pool_does_not_grow() -> None:
    pool = writer()
    last: list[int] = []
    sizes = []
    for step in range(20):
        last = [save(pool, [bytes([step]) * (3 << 20)], step=step, retire=last).info.id]
        sizes.append(pool.medium.size)
    assert sizes[-1] == sizes[3]


def test_no_two_commits_write_one_page() -> None:
    medium = _Recorded(DATA_START)
    format_pool(medium)
    pool = PoolWriter(medium, ProcessLocks())
    pages: list[set[int]] = []
    for step in range(10):
        medium.stored.clear()
        save(pool, [b"small", bytes(PAGE + 1)], step=step)
        pages.append({p for o, n in medium.stored for p in range(o // PAGE, -(-(o + n) // PAGE))})
    shared = {offset // PAGE for offset in SLOT_OFFSETS}
    for index, mine in enumerate(pages):
        for other in pages[index + 1 :]:
            assert mine & other <= shared


def test_a_pinned_version_keeps_its_space_after_it_was_retired() -> None:
    locks = ProcessLocks()
    medium = Memory(DATA_START)
    format_pool(medium)
    pool = PoolWriter(medium, locks)
    first = save(pool, [b"first" * 1000])
    reader = PoolReader(medium, locks)
    with reader.pin(first.info.id) as entry:
        record = reader.record(entry)
        last = [first.info.id]
        for step in range(6):
            last = [save(pool, [bytes([step]) * 5000], step=step, retire=last).info.id]
        assert stored(reader, record) == [b"first" * 1000]
    for step in range(6):
        last = [save(pool, [bytes([step]) * 5000], step=step, retire=last).info.id]
    assert stored(reader, record) != [b"first" * 1000], "let go, the space was used again"


def test_who_reads_for_long_ends_where_there_is_no_other_room() -> None:
    size = 1 << 20
    pool = writer(max_bytes=DATA_START + 3 * size)
    first = save(pool, [b"1" * size])
    second = save(pool, [b"2" * size], retire=[first.info.id])
    pool.locks.pin(first.info.id)
    asked = []

    def end() -> bool:
        asked.append(1)
        pool.locks.unpin(first.info.id)
        return True

    pool.yields.append(end)
    pool.retire([])
    assert pool.free_bytes() < size + size // 2
    pool.release(pool.reserve(size + size // 2))
    assert asked == [1]
    assert stored(pool, second) == [b"2" * size]


def test_a_writer_that_opens_leaves_alone_what_a_reader_pins_since_the_writer_before_it() -> None:
    locks = ProcessLocks()
    medium = Memory(DATA_START)
    format_pool(medium)
    pool = PoolWriter(medium, locks)
    first = save(pool, [b"first" * 1000])
    reader = PoolReader(medium, locks)
    with reader.pin(first.info.id) as entry:
        record = reader.record(entry)
        pool.retire([first.info.id])
        save(pool, [b"second"])
        # The writer is killed: only the reader knows of the first version now.
        again = PoolWriter(medium, locks)
        last: list[int] = []
        for step in range(6):
            last = [save(again, [bytes([step]) * 5000], step=step, retire=last).info.id]
        assert stored(reader, record) == [b"first" * 1000]
        size = medium.size
    for step in range(6):
        last = [save(again, [bytes([step]) * 5000], step=step, retire=last).info.id]
    assert medium.size == size, "let go, all free space is used again"


def test_a_retired_version_cannot_be_pinned() -> None:
    pool = writer()
    record = save(pool, [b"x"])
    pool.retire([record.info.id])
    with (
        pytest.raises(StaleError, match="load the newest again"),
        reader_of(pool).pin(record.info.id),
    ):
        pass


def test_two_threads_that_make_a_pool_at_the_same_path_make_one(tmp_path: Path) -> None:
    path = str(tmp_path / "a.portus")
    found: list[bytes] = []

    def make() -> None:
        create_pool(path, LocalFiles())
        with contextlib.closing(open_reader(path)) as reader:
            found.append(reader.uuid)

    def make_in_between() -> None:
        other = threading.Thread(target=make)
        other.start()
        other.join()

    left = tmp_path / f".a.portus.{os.getpid()}-1.new"
    left.touch()  # of a process that had this number and was killed
    with at("call", format_pool, make_in_between):
        make()
    assert len(set(found)) == 1
    assert len(found) == 2
    assert os.listdir(tmp_path) == ["a.portus"]


def test_what_the_older_root_reaches_is_not_reserved() -> None:
    pool = writer(DATA_START + (2 << 20), max_bytes=DATA_START + (2 << 20))
    first = save(pool, [bytes(1 << 20)])
    pool.retire([first.info.id])
    held = pool.free_bytes()
    assert held < 1 << 20, "slot of the commit before still reaches it"
    wanted = (1 << 20) + (512 << 10)
    pool.release(pool.reserve(wanted))  # settles: commits once more, so that no slot reaches it
    assert pool.free_bytes() > 1 << 20


def test_space_is_made_present_in_one_call_and_keeps_its_bytes(tmp_path: Path) -> None:
    create_pool(str(tmp_path / "a.portus"), LocalFiles())
    pool = WRITERS.open(str(tmp_path / "a.portus"))
    try:
        if not isinstance(pool.medium, MappedMedium):
            pytest.skip("pools on this file system have no addresses")
        room = pool.reserve(16 << 20)
        pool.medium.store(room[0].offset, b"kept")
        for extent in room:
            pool.medium.expect(extent)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        found = bytearray(4)
        pool.medium.load(room[0].offset, memoryview(found))
        assert found == b"kept"
        for extent in room:
            ctypes.memset(pool.medium.address(extent), 1, extent.length)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < (16 << 20) // PAGE // 2
    finally:
        WRITERS.close(pool)


def test_no_space_is_an_error_that_says_how_much_and_changes_nothing() -> None:
    pool = writer(max_bytes=DATA_START + (4 << 20))
    record = save(pool, [b"kept"])
    before = pool.free_bytes()
    with pytest.raises(MediumError, match="max_bytes") as caught:
        pool.reserve(64 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert pool.free_bytes() == before
    assert stored(pool, record) == [b"kept"]
    save(pool, [b"more"])


class Asked(ProcessLocks):
    """Something else happens when it is asked for a pin."""

    act: Callable[[], object] = staticmethod(lambda: None)

    def pins(self) -> set[int]:
        found = super().pins()
        act, self.act = self.act, lambda: None
        act()
        return found


def test_who_holds_all_the_space_is_said_while_a_reader_lets_go() -> None:
    locks = Asked()
    pool = PoolWriter(writer().medium, locks, max_bytes=DATA_START + (4 << 20))
    first = save(pool, [b"read"]).info.id
    reading = contextlib.ExitStack()
    reading.enter_context(PoolReader(pool.medium, locks).pin(first))
    pool.retire([first])
    for _ in range(2):
        save(pool, [b"kept"])

    def let_go() -> None:
        reading.close()
        pool.free_bytes()  # as a reservation in another thread does: it needs no turn

    with (
        at("call", PoolWriter._full, lambda: setattr(locks, "act", let_go)),
        pytest.raises(MediumError, match="max_bytes"),
    ):
        pool.reserve(64 << 20)


class Contended(PoolWriter):
    """While it grows for one, another takes what was added: that needs no turn."""

    others = 2

    def _grow(self, pages: int, *, contiguous: bool) -> None:
        super()._grow(pages, contiguous=contiguous)
        if self.others:
            self.others -= 1
            other = threading.Thread(target=lambda: taken.append(self.reserve(4 << 20)))
            other.start()
            other.join(20)


taken: list[list[Extent]] = []


def test_space_that_was_added_for_one_may_be_taken_by_another() -> None:
    medium = Memory(DATA_START)
    format_pool(medium)
    pool = Contended(medium, ProcessLocks())
    taken.clear()
    taken.append(pool.reserve(4 << 20))
    assert len(taken) == 3
    pages = [
        page
        for extents in taken
        for each in extents
        for page in range(each.offset // PAGE, each.end // PAGE)
    ]
    assert len(pages) == len(set(pages)) == 3 * (4 << 20) // PAGE


def test_a_damaged_newest_root_leads_to_the_one_before_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = writer()
    save(pool, [b"one"], step=1)
    save(pool, [b"two"], step=2)
    for place in pool.catalogue().root.catalogue.extents:
        _flip(pool, place.end - 1)
    with caplog.at_level(logging.ERROR, "portus"):
        steps = [entry.info.step for entry in reader_of(pool).catalogue().entries()]
    assert steps == [1]
    assert "commit 3 is damaged" in caplog.text


def test_both_roots_damaged_is_corruption_not_an_empty_pool() -> None:
    pool = writer()
    save(pool, [b"one"])
    for offset in SLOT_OFFSETS:
        _flip(pool, offset + 40)
    with pytest.raises(CorruptionError, match="both root slots"):
        reader_of(pool)


def test_each_slot_serves_when_the_others_are_damaged() -> None:
    pool = writer()
    save(pool, [b"one"], step=1)
    pool.look()
    pool._commit_again()
    for kept in SLOT_OFFSETS:
        lost = [offset for offset in SLOT_OFFSETS if offset != kept]
        for offset in lost:
            _flip(pool, offset + 50)
        assert [entry.info.step for entry in reader_of(pool).catalogue().entries()] == [1]
        for offset in lost:
            _flip(pool, offset + 50)


@pytest.mark.parametrize("offset", SLOT_OFFSETS)
def test_a_root_of_another_pool_in_one_place_costs_nothing(offset: int) -> None:
    """A write that was meant for another file, with an intact root in it."""
    pool, other, page = writer(), writer(), bytearray(PAGE)
    save(pool, [b"one"], step=1)
    for step in range(9):
        save(other, [b"two"], step=step)
    other.medium.load(offset, memoryview(page))
    pool.medium.store(offset, bytes(page))
    assert [entry.info.step for entry in reader_of(pool).catalogue().entries()] == [1]
    assert {finding.invariant for finding in check(reader_of(pool))} <= {"F1", "F3"}


def test_what_a_first_commit_left_in_its_slot_is_gone_once_somebody_opens() -> None:
    medium = Memory(DATA_START)
    format_pool(medium)
    rest = b"the second line of a root that was only tried"
    for offset in SLOT_OFFSETS[::2]:
        medium.store(offset + 64, rest)
    PoolWriter(medium, ProcessLocks())
    for offset in SLOT_OFFSETS:
        found = bytearray(SLOT.size)
        medium.load(offset, memoryview(found))
        assert rest not in found
        assert any(found)


def test_no_pool_at_all_is_said() -> None:
    medium = Memory(DATA_START)
    medium.store(0, b"GGUF" + bytes(100))
    with pytest.raises(CorruptionError, match="not a Portus pool"):
        PoolReader(medium, ProcessLocks())
    with pytest.raises(CorruptionError, match="truncated"):
        PoolReader(Memory(100), ProcessLocks())


def test_a_newer_format_is_refused_and_says_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    from portus.reach.index import roots

    medium = Memory(DATA_START)
    monkeypatch.setattr(roots, "FORMAT_VERSION", 2)
    format_pool(medium)
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"newer Portus.*Upgrade"):
        PoolReader(medium, ProcessLocks())


@pytest.mark.parametrize("text", ["a\0b\x01", "\udcff", "one\ntwo\r\u202e", "x" * 600])
def test_whatever_a_client_says_of_its_failure_the_pool_stays_sound(text: str) -> None:
    medium = Memory(DATA_START)
    format_pool(medium)
    pool = PoolWriter(medium, ProcessLocks())
    holder = read_holder(medium)
    store_failure(medium, text)
    assert check(pool) == []
    assert read_holder(medium) == holder
    assert read_failure(medium).isprintable()
    assert len(read_failure(medium)) > 0


def test_a_second_writer_is_refused_with_the_holder_named(tmp_path: Path) -> None:
    file = tmp_path / "pool"
    file.touch()
    first, second = (FileLocks(str(file), writable=True) for _ in range(2))
    medium = Memory(DATA_START)
    format_pool(medium)
    pool = PoolWriter(medium, first)
    with pytest.raises(BusyError):
        PoolWriter(medium, second, timeout_s=0.05)
    assert "pid" in read_holder(medium)
    pool.locks.close()
    PoolWriter(medium, second, timeout_s=0.05)
    second.close()


def test_a_truncated_pool_is_corruption_and_not_a_crash() -> None:
    pool = writer()
    save(pool, [bytes(1 << 20)])
    short = Memory(DATA_START + PAGE)
    data = memoryview(bytearray(short.size))
    pool.medium.load(0, data)
    short.store(0, data)
    with pytest.raises(CorruptionError, match="truncated"):
        PoolReader(short, ProcessLocks()).catalogue()


def test_a_failed_persist_leaves_every_older_version_and_ends_writing() -> None:
    failing = [False]

    def sync() -> None:
        if failing[0]:
            raise OSError(errno.EIO, "input/output error")

    medium = Memory(DATA_START)
    medium.space.drain = sync  # type: ignore[method-assign]
    format_pool(medium)
    pool = PoolWriter(medium, ProcessLocks())
    record = save(pool, [b"old"])
    failing[0] = True
    with pytest.raises(MediumError):
        save(pool, [b"new"])
    failing[0] = False
    with pytest.raises(MediumError):
        save(pool, [b"never retried"])
    (root, _) = read_roots(medium, pool.uuid)
    assert root.sequence == record.info.commit
    assert stored(reader_of(pool), record) == [b"old"]


def test_readers_of_a_busy_writer_never_see_wrong_bytes() -> None:
    import threading

    locks = ProcessLocks()
    medium = Memory(DATA_START)
    format_pool(medium)
    pool = PoolWriter(medium, locks)
    last = [save(pool, [b"\0" * 40000]).info.id]
    done = threading.Event()
    reads, stale = [0], [0]
    wrong: list[str] = []

    def read() -> None:
        reader = PoolReader(medium, locks)
        while not done.is_set():
            (entry,) = reader.catalogue().entries()
            try:
                with reader.pin(entry.info.id) as pinned:
                    (data,) = stored(reader, reader.record(pinned))
            except StaleError:
                stale[0] += 1
                continue
            reads[0] += 1
            if data != bytes([entry.info.step % 256]) * 40000:
                wrong.append(f"step {entry.info.step}")

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    step = 0
    while reads[0] < 200 and step < 20000:
        step += 1
        last = [save(pool, [bytes([step % 256]) * 40000], step=step, retire=last).info.id]
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert reads[0] >= 200


class _Recorded(Memory):
    """Memory that notes every store; no addresses are given, so every store is a call."""

    def __init__(self, size: int) -> None:
        self.stored: list[tuple[int, int]] = []
        super().__init__(size)

    def store(self, offset: int, data: bytes | memoryview) -> None:
        self.stored.append((offset, len(data)))
        super().store(offset, data)
