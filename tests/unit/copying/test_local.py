"""Bytes and digests arrive, whatever the split, the engine and the medium."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from portus.engine.copying import local, native
from portus.engine.copying.local import Engine, PurePython, check, copy, fetch, hash_sources
from portus.engine.copying.segments import Segments, Sources, Stop, StoppedError
from portus.engine.copying.segments import memory as _view
from portus.engine.format.checksum import UNIT, digest
from portus.engine.media.base import MappedMedium, Medium, MediumInfo
from portus.engine.spec import PAGE, Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.space import Memory
from tests.unit.copying.sources import Source, columns_of

Buffer = NDArray[np.uint8]

ROUNDS = 20
BYTES = 3 << 20
STOP_S_MAX = 5.0
EDGES = (
    *(0, 0, 1, 2, 63, 64, 65, 1023, 1024, 1025, PAGE - 1, PAGE, PAGE + 1),
    *(native.PIECE - 1, native.PIECE, native.PIECE + 1, local.LOAD + 5, local.SCRATCH + 1),
)


@dataclass(frozen=True)
class Case:
    """Sources in ``memory``, and where they go: never one byte for two of them."""

    memory: Buffer
    sources: tuple[Source, ...]

    @property
    def columns(self) -> Sources:
        return columns_of(self.sources)

    @property
    def expected(self) -> list[bytes]:
        """The unit digests, by the reference."""
        return [
            digest(self.bytes_of(source)[start : start + UNIT])
            for source in self.sources
            for start in range(0, max(1, source.length), UNIT)
        ]

    def bytes_of(self, source: Source) -> bytes:
        start = source.address - self.memory.ctypes.data if source.length else 0
        return self.memory[start : start + source.length].tobytes()

    def only_sources(self) -> Buffer:
        """The memory, with zeros between the sources."""
        memory = np.zeros_like(self.memory)
        for source in self.sources:
            start = source.address - self.memory.ctypes.data if source.length else 0
            end = start + source.length
            memory[start:end] = self.memory[start:end]
        return memory

    def elsewhere(self) -> Case:
        """The same sources in other memory, zeroed."""
        memory = np.zeros_like(self.memory)
        moved = memory.ctypes.data - self.memory.ctypes.data
        return Case(
            memory,
            tuple(
                Source(s.address + moved if s.length else 0, s.length, s.extents)
                for s in self.sources
            ),
        )


def random_case(rng: random.Random, room: int) -> Case:
    """Sources of odd lengths at odd addresses, split anywhere, scattered over ``room`` bytes."""
    lengths: list[int] = []
    while len(lengths) < 30 and sum(lengths) < BYTES and (not lengths or rng.random() < 0.97):
        below = rng.choice([20, 3000, 300_000])
        lengths.append(rng.choice(EDGES) if rng.random() < 0.3 else rng.randrange(below))
    memory = np.frombuffer(rng.randbytes(sum(lengths) + 100 * len(lengths)), np.uint8).copy()
    pieces = [_split(rng, length) for length in lengths]
    places = _places(rng, [size for own in pieces for size in own], room)
    sources, start = [], 0
    for length, own in zip(lengths, pieces, strict=True):
        start += rng.randrange(100)
        extents = tuple(Extent(next(places), size) for size in own)
        sources.append(Source(memory.ctypes.data + start if length else 0, length, extents))
        start += length
    return Case(memory, tuple(sources))


def _split(rng: random.Random, length: int) -> list[int]:
    cuts = sorted(rng.randrange(length + 1) for _ in range(rng.choice([0, 0, 1, 3])))
    return [end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)]


def _places(rng: random.Random, sizes: list[int], room: int) -> Iterator[int]:
    """An offset for each size; mostly side by side, but not in order."""
    order = rng.sample(range(len(sizes)), len(sizes)) if rng.random() < 0.5 else range(len(sizes))
    offsets = [0] * len(sizes)
    free = room - sum(sizes)
    end = 0
    for index in order:
        gap = min(rng.choice([0, 0, 0, 1, 63, PAGE - 1, PAGE, 20_000]), free)
        free -= gap
        offsets[index] = end + gap
        end += gap + sizes[index]
    return iter(offsets)


def rows(digests: Buffer) -> list[bytes]:
    return [row.tobytes() for row in digests]


def contents(medium: Medium) -> Buffer:
    held = np.empty(medium.size, np.uint8)
    medium.load(0, held.data)
    return held


def test_random_sources_go_to_the_pool_and_come_back(
    engine: Engine, medium: Medium, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        case = random_case(rng, medium.size)
        before = contents(medium)
        assert rows(copy(medium, case.columns, Stop(), engine=engine)) == case.expected

        expected = before
        for source in case.sources:
            data, start = case.bytes_of(source), 0
            for extent in source.extents:
                place = slice(extent.offset, extent.end)
                expected[place] = np.frombuffer(data[start : start + extent.length], np.uint8)
                start += extent.length
        assert np.array_equal(contents(medium), expected)  # nothing else was touched

        assert rows(hash_sources(case.columns, Stop(), engine=engine)) == case.expected
        assert rows(check(medium, case.columns, Stop(), engine=engine)) == case.expected

        back = case.elsewhere()
        assert rows(fetch(medium, back.columns, Stop(), engine=engine)) == case.expected
        assert np.array_equal(back.memory, case.only_sources())  # nothing else was touched


Busy = Callable[[Buffer], threading.Event]


@pytest.fixture
def busy() -> Iterator[Busy]:
    """Writes an array over and over, in another thread. The event is set each time."""
    done = threading.Event()
    threads: list[threading.Thread] = []

    def write(memory: Buffer) -> threading.Event:
        wrote = threading.Event()

        def over_and_over() -> None:
            while not done.is_set():
                np.add(memory, 1, out=memory)
                wrote.set()

        threads.append(threading.Thread(target=over_and_over))
        threads[-1].start()
        return wrote

    yield write
    done.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("size", [1 << 20, UNIT // 2], ids=["gathered", "big"])
def test_the_digest_is_of_what_was_stored_though_the_source_changes_meanwhile(
    engine: Engine, medium: Medium, size: int, busy: Busy
) -> None:
    case = big_case(size + 7)
    wrote = busy(case.memory)
    for _ in range(10):
        wrote.clear()
        wrote.wait()
        stored = rows(copy(medium, case.columns, Stop(), engine=engine))
        assert rows(check(medium, case.columns, Stop(), engine=engine)) == stored


def test_what_is_fetched_is_hashed_where_it_arrived(engine: Engine, busy: Busy) -> None:
    """Memory that another process has as well may change while it is read."""
    case, medium = big_case(UNIT // 2), Memory(UNIT)
    there = np.frombuffer(_view(medium.address(Extent(0, UNIT)), UNIT), np.uint8)
    wrote = busy(there)
    back = case.elsewhere()
    for _ in range(10):
        wrote.clear()
        wrote.wait()
        arrived = rows(fetch(medium, back.columns, Stop(), engine=engine))
        assert arrived == back.expected


def test_every_flipped_bit_is_seen(engine: Engine, medium: Medium, seed: int) -> None:
    rng = random.Random(seed)
    flips = 0
    for _ in range(ROUNDS):
        case = random_case(rng, medium.size)
        copy(medium, case.columns, Stop(), engine=engine)
        extents = [e for source in case.sources for e in source.extents if e.length]
        if not extents:
            continue
        extent = rng.choice(extents)
        offset = rng.choice(
            [extent.offset, extent.end - 1, rng.randrange(extent.offset, extent.end)]
        )
        flipped = bytearray(1)
        medium.load(offset, memoryview(flipped))
        flipped[0] ^= 1 << rng.randrange(8)
        medium.store(offset, bytes(flipped))

        found = rows(check(medium, case.columns, Stop(), engine=engine))
        assert sum(a != b for a, b in zip(found, case.expected, strict=True)) == 1
        assert found == rows(fetch(medium, case.elsewhere().columns, Stop(), engine=engine))
        flips += 1
    assert flips > ROUNDS // 2


@pytest.mark.long
def test_units_of_a_big_source_are_hashed_each(engine: Engine) -> None:
    case = big_case(2 * UNIT + 12_345, 3 * UNIT)
    assert case.sources[0].length + case.sources[1].length > local.TWO_THREADS_MIN
    medium = Memory(case.sources[-1].extents[-1].end)
    stop = Stop()
    assert rows(copy(medium, case.columns, stop, engine=engine)) == case.expected
    assert stop.bytes_done == len(case.memory)
    assert rows(check(medium, case.columns, Stop(), engine=engine)) == case.expected
    back = case.elsewhere()
    assert rows(fetch(medium, back.columns, Stop(), engine=engine)) == case.expected
    assert np.array_equal(back.memory, case.memory)
    medium.close()


@pytest.mark.long
def test_two_threads_do_each_unit_once(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 16 << 10, rng.randrange(60_000)]) for _ in range(2000)]
    case = big_case(*lengths, UNIT + 9, *lengths, 2 * UNIT - 9)
    case = Case(case.memory, tuple(in_extents_of(source, 300_001) for source in case.sources))
    assert len(case.memory) > native.SECOND_THREAD_MIN
    medium, stop = Memory(len(case.memory)), Stop()
    assert rows(copy(medium, case.columns, stop, engine=engine)) == case.expected
    assert stop.bytes_done == len(case.memory)
    assert np.array_equal(contents(medium), case.memory)
    assert rows(fetch(medium, case.elsewhere().columns, Stop(), engine=engine)) == case.expected
    medium.close()


def in_extents_of(source: Source, size: int) -> Source:
    """The same place in the pool, named in more extents."""
    start, length = source.extents[0].offset, source.length
    pieces = [Extent(start + at, min(size, length - at)) for at in range(0, length, size)]
    return Source(source.address, length, tuple(pieces))


def big_case(*lengths: int) -> Case:
    """Big sources, one extent for each, side by side."""
    memory = np.random.default_rng(1).integers(0, 256, sum(lengths), dtype=np.uint8)
    starts = np.cumsum([0, *lengths]).tolist()
    return Case(
        memory,
        tuple(
            Source(memory.ctypes.data + start, length, (Extent(start, length),))
            for start, length in zip(starts[:-1], lengths, strict=True)
        ),
    )


def test_a_small_source_may_be_strewn_over_many_pages(engine: Engine) -> None:
    count = 2 * local.SCRATCH // PAGE
    medium, memory = Memory(count * PAGE), np.arange(count).astype(np.uint8)
    strewn = tuple(Extent(i * PAGE, 1) for i in range(count))
    sources = Sources.at([memory.ctypes.data], [count], strewn)
    assert rows(copy(medium, sources, Stop(), engine=engine)) == [digest(memory.data)]
    assert rows(check(medium, sources, Stop(), engine=engine)) == [digest(memory.data)]
    medium.close()


def test_many_small_sources_come_with_few_loads() -> None:
    medium = Counting(20 << 20)
    memory = np.zeros(1000 * 5000, np.uint8)
    small = [
        Source(memory.ctypes.data + 5000 * i, 5000, (Extent(5056 * i, 5000),)) for i in range(1000)
    ]
    fetch(medium, columns_of(small), Stop())
    assert 0 < medium.loads < 10
    medium.close()


def test_many_small_sources_go_with_few_stores(engine: Engine) -> None:
    medium = Unmapped(20 << 20)
    assert not isinstance(medium, MappedMedium)
    case = big_case(*[5000] * 1000, *[64] * 1000)
    assert rows(copy(medium, case.columns, Stop(), engine=engine)) == case.expected
    assert 0 < medium.stores < 5
    held = np.empty(len(case.memory), np.uint8)
    medium.load(0, held.data)
    assert np.array_equal(held, case.memory)
    medium.close()


class Unmapped:
    """Memory without addresses, which counts its stores."""

    def __init__(self, size: int) -> None:
        self._memory = Memory(size)
        self.info, self.size, self.is_poisoned = self._memory.info, size, False
        self.grow = self._memory.grow
        self.load: Callable[[int, memoryview], None] = self._memory.load
        self.persist, self.close = self._memory.persist, self._memory.close
        self.poison = self._memory.poison
        self.stores = 0

    def store(self, offset: int, data: bytes | memoryview) -> None:
        self.stores += 1
        self._memory.store(offset, data)


class Disk(Memory):
    """Memory that says that it is none: what is under its addresses may be a bad sector."""

    @property
    def info(self) -> MediumInfo:
        return dataclasses.replace(super().info, volatile=False)


class Counting(Disk):
    """A disk that counts its loads, and knows what it was told was written."""

    loads = 0

    def load(self, offset: int, target: memoryview) -> None:
        self.loads += 1
        super().load(offset, target)

    def wrote(self, extent: Extent) -> None:
        super().wrote(extent)
        self.told = [*getattr(self, "told", []), extent]


def test_a_mapped_medium_is_told_of_every_page_that_was_written_and_no_other(
    engine: Engine, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        medium = Counting(10 << 20)
        case = random_case(rng, medium.size)
        copy(medium, case.columns, Stop(), engine=engine)
        told = {page for extent in getattr(medium, "told", []) for page in pages(extent)}
        written = {page for s in case.sources for extent in s.extents for page in pages(extent)}
        assert told == written
        medium.close()


def pages(extent: Extent) -> range:
    """Numbers of the pages that it touches."""
    return range(extent.offset // PAGE, -(-extent.end // PAGE) if extent.length else 0)


# A long call: the same bytes again and again, so that it takes no memory.

REPEATED = 64 << 20
LONG = 1000


def long_sources(memory: Buffer) -> Sources:
    again = np.full(LONG, REPEATED, np.int64)
    return Sources(
        address=np.full(LONG, memory.ctypes.data, np.int64),
        length=again,
        extent_offset=np.zeros(LONG, np.int64),
        extent_length=again,
    )


CALLS: dict[str, Callable[[Medium, Sources, Stop, Engine], object]] = {
    "copy": lambda medium, sources, stop, engine: copy(medium, sources, stop, engine=engine),
    "hash": lambda medium, sources, stop, engine: hash_sources(sources, stop, engine=engine),
    "fetch": lambda medium, sources, stop, engine: fetch(medium, sources, stop, engine=engine),
    "check": lambda medium, sources, stop, engine: check(medium, sources, stop, engine=engine),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_stop_in_the_middle_ends_a_call_soon(engine: Engine, call: str) -> None:
    medium, memory, stop = Memory(REPEATED), np.zeros(REPEATED, np.uint8), Stop()
    ended: list[float] = []

    def run() -> None:
        with pytest.raises(StoppedError):
            CALLS[call](medium, long_sources(memory), stop, engine)
        ended.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    while not stop.bytes_done:
        time.sleep(0)
    asked = time.monotonic()
    stop.set()
    thread.join()
    assert ended[0] - asked < STOP_S_MAX
    assert 0 < stop.bytes_done < LONG * REPEATED
    medium.close()


@pytest.mark.parametrize("call", CALLS)
def test_a_stop_set_before_moves_nothing(engine: Engine, call: str) -> None:
    medium, memory, stop = Memory(REPEATED), np.ones(REPEATED, np.uint8), Stop()
    stop.set()
    with pytest.raises(StoppedError):
        CALLS[call](medium, long_sources(memory), stop, engine)
    assert stop.bytes_done == 0
    assert not contents(medium).any()
    assert memory.all()
    medium.close()


def segments_at(memory: Buffer, length: int) -> Segments:
    """The memory in segments of ``length``, each a unit."""
    starts = np.arange(0, len(memory), length)
    return Segments(
        address=memory.ctypes.data + starts,
        offset=starts,
        length=np.minimum(length, len(memory) - starts),
        row=np.arange(len(starts)),
    )


@pytest.mark.parametrize("length", [100, 1 << 20])
def test_an_engine_does_nothing_once_asked_to_stop(engine: Engine, length: int) -> None:
    segments, stop = segments_at(np.zeros(4 << 20, np.uint8), length), Stop()
    stop.set()
    digests = np.zeros((len(segments), 16), np.uint8)
    with pytest.raises(StoppedError):
        engine.move(segments, None, digests, stop)
    assert stop.bytes_done == 0
    assert not digests.any()


def test_a_stop_is_seen_inside_a_segment(engine: Engine) -> None:
    memory, stop = np.zeros(4 << 30, np.uint8), Stop()  # never touched: it takes no memory

    def run() -> None:
        with pytest.raises(StoppedError):
            engine.move(segments_at(memory, len(memory)), None, np.zeros((1, 16), np.uint8), stop)

    thread = threading.Thread(target=run)
    thread.start()
    while not stop.bytes_done:
        time.sleep(0)
    stop.set()
    thread.join()
    assert 0 < stop.bytes_done < len(memory)


class Slow(Unmapped):
    """A medium that is so slow that somebody asks to stop during its first store or load."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.stop, self.loads = Stop(), 0
        self.load = self._load

    def store(self, offset: int, data: bytes | memoryview) -> None:
        super().store(offset, data)
        self.stop.set()

    def _load(self, offset: int, target: memoryview) -> None:
        self._memory.load(offset, target)
        self.loads += 1
        self.stop.set()


@pytest.mark.parametrize("length", [100, local.SCRATCH])
def test_a_stop_is_seen_between_two_stores_and_two_loads(engine: Engine, length: int) -> None:
    memory = np.ones(3 * length, np.uint8)
    apart = [Extent(start, length) for start in (0, 2 * local.SCRATCH, 5 * local.SCRATCH)]
    source = Sources.at([memory.ctypes.data], [3 * length], apart)
    for call in CALLS.keys() - {"hash"}:
        medium = Slow(apart[-1].end)
        with pytest.raises(StoppedError):
            CALLS[call](medium, source, medium.stop, engine)
        assert medium.stores + medium.loads == 1
        medium.close()


class Failing(Disk):
    """A disk with a sector that cannot be read, once: only one thread will meet it."""

    bad = 0

    def load(self, offset: int, target: memoryview) -> None:
        if offset <= (bad := self.bad) < offset + len(target):
            self.bad = -1
            raise MediumError(5, f"bad sector at {bad}")
        super().load(offset, target)


@pytest.mark.parametrize("call", ["fetch", "check"])
@pytest.mark.parametrize("bad", [0, 1 << 20, (64 << 20) - 1])
def test_an_error_of_the_medium_is_raised_whichever_thread_meets_it(
    engine: Engine, call: str, bad: int
) -> None:
    medium, memory = Failing(REPEATED), np.zeros(REPEATED, np.uint8)
    medium.bad = bad
    stop = Stop()
    with pytest.raises(MediumError, match=f"bad sector at {bad}"):
        CALLS[call](medium, long_sources(memory), stop, engine)
    beside = [each for each in threading.enumerate() if each.name.startswith("portus-copying")]
    assert not any(each.is_alive() for each in beside)  # its last lines may still run
    assert stop.bytes_done < LONG * REPEATED // 10
    medium.close()


def test_what_is_memory_is_read_where_it_lies(engine: Engine) -> None:
    class Asked(Memory):
        def load(self, offset: int, target: memoryview) -> None:
            pytest.fail("a load was asked for")

    medium = Asked(UNIT + (2 << 20))
    case = big_case(UNIT + 1, 7, 1 << 20)
    copy(medium, case.columns, Stop(), engine=engine)
    assert rows(check(medium, case.columns, Stop(), engine=engine)) == case.expected
    before = case.memory.copy()
    case.memory[:] = 0
    assert rows(fetch(medium, case.columns, Stop(), engine=engine)) == case.expected
    assert np.array_equal(case.memory, before)
    medium.close()


def test_what_is_memory_is_read_with_one_call_of_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call waits for its second thread, whose priority is low, at its end."""
    monkeypatch.setattr(local, "BATCH", 1 << 20)
    case = big_case(1 << 20, 7, 1 << 20, 1 << 20)
    medium = Memory(len(case.memory))
    copy(medium, case.columns, Stop(), engine=engine)
    for call in (check, fetch):
        seen = Watching(engine)
        assert rows(call(medium, case.columns, Stop(), engine=seen)) == case.expected
        assert seen.calls == 1
    medium.close()


def test_poisoned_memory_can_still_be_loaded_from(engine: Engine) -> None:
    failing = [False]

    def sync() -> None:
        if failing[0]:
            raise OSError(5, "input/output error")

    medium = Memory(2 << 20)
    medium.space.drain = sync  # type: ignore[method-assign]
    case = big_case(1 << 20)
    copy(medium, case.columns, Stop(), engine=engine)
    failing[0] = True
    with pytest.raises(MediumError):
        medium.persist([Extent(0, PAGE)])
    assert rows(check(medium, case.columns, Stop(), engine=engine)) == case.expected
    medium.close()


def test_a_source_without_an_address_is_refused() -> None:
    medium = Memory(PAGE)
    nowhere = Sources.at([0], [5], [Extent(0, 5)])
    for call in (copy, fetch):
        with pytest.raises(UsageError, match="address"):
            call(medium, nowhere, Stop())
    with pytest.raises(UsageError, match="address"):
        hash_sources(nowhere, Stop())
    assert rows(check(medium, nowhere, Stop())) == [digest(bytes(5))]
    medium.close()


def test_a_source_without_extents_is_refused_where_the_pool_is_needed() -> None:
    medium, memory = Memory(PAGE), np.ones(5, np.uint8)
    homeless = Sources.at([memory.ctypes.data], [5], [])
    for call in (copy, fetch, check):
        with pytest.raises(UsageError, match="extents"):
            call(medium, homeless, Stop())
    assert rows(hash_sources(homeless, Stop())) == [digest(bytes([1] * 5))]
    medium.close()


def test_an_extent_outside_the_medium_is_refused_and_nothing_is_written(engine: Engine) -> None:
    medium, memory = Memory(PAGE), np.ones(10, np.uint8)
    assert isinstance(medium, MappedMedium)
    with pytest.raises(UsageError):
        copy(
            medium,
            Sources.at([memory.ctypes.data], [10], [Extent(PAGE - 5, 10)]),
            Stop(),
            engine=engine,
        )
    assert not contents(medium).any()
    medium.close()


def test_no_sources_are_no_work(engine: Engine, medium: Medium) -> None:
    none, empty = Sources.at([], [], []), Sources.at([0], [0], [])
    assert copy(medium, none, Stop(), engine=engine).shape == (0, 16)
    assert fetch(medium, none, Stop(), engine=engine).shape == (0, 16)
    assert rows(copy(medium, empty, Stop(), engine=engine)) == [digest(b"")]


def test_the_engine_gets_whole_units(engine: Engine) -> None:
    seen = Watching(engine)
    case = big_case(UNIT + 1, 7, 3 * UNIT)
    medium = Memory(len(case.memory))
    copy(medium, case.columns, Stop(), engine=seen)
    assert seen.most <= local.BATCH
    assert len(seen.rows) == len(set(seen.rows)) == len(case.expected)
    medium.close()


class Watching(PurePython):
    """An engine that remembers what it was asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.rows: list[int] = []
        self.most = 0
        self.calls = 0

    def move(
        self,
        segments: Segments,
        target: NDArray[np.int64] | None,
        digests: Buffer,
        stop: Stop,
        crcs: NDArray[np.uint32] | None = None,
        file: int = -1,
        kept: ctypes.c_int64 | None = None,
    ) -> None:
        self.calls += 1
        self.rows += np.unique(segments.row).tolist()
        self.most = max(self.most, segments.size)
        self._engine.move(segments, target, digests, stop, crcs, file, kept)


WHILE_THE_INTERPRETER_ENDS = """
import threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from portus.engine.format.checksum import UNIT, digest
from portus.reach.media.space import Memory
from portus.engine.spec import Extent
from portus.engine.copying.local import Sources, Stop, copy, fetch

memory, medium = np.ones(8 * UNIT, np.uint8), Memory(8 * UNIT)
source = Sources.at([memory.ctypes.data], [len(memory)], [Extent(0, len(memory))])

def threads_can_start():
    try:
        ThreadPoolExecutor(1).submit(int).result()
    except RuntimeError:
        return False
    return True

def work():
    while threads_can_start():
        pass
    expected = 8 * digest(memory[:UNIT].data)
    assert copy(medium, source, Stop()).tobytes() == expected
    memory[:] = 0
    assert fetch(medium, source, Stop()).tobytes() == expected
    assert memory.all()
    print("done")

threading.Thread(target=work).start()
"""


def test_bytes_are_moved_while_the_interpreter_goes_down() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WHILE_THE_INTERPRETER_ENDS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("done\n", "")
