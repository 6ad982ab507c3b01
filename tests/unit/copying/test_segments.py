"""Cutting sources into segments, and the word to stop. No byte is touched here."""

from __future__ import annotations

import ctypes
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portus.engine.copying.segments import Segments, Sources, Stop, StoppedError, cut
from portus.engine.format.checksum import UNIT, digest, unit_count
from portus.engine.spec import PAGE, Extent
from portus.errors import AbandonedError, UsageError
from tests.unit.copying.sources import Source, columns_of

LENGTHS = st.one_of(
    st.integers(0, 3),
    st.integers(0, 100_000),
    st.sampled_from([UNIT - 1, UNIT, UNIT + 1, 2 * UNIT, 5 * UNIT + 7]),
)


@st.composite
def sources_with_extents(draw: st.DrawFn) -> list[Source]:
    """Sources at made-up addresses, cut into extents anywhere, empty ones too."""
    sources, address, offset = [], 1 << 20, 0
    for length in draw(st.lists(LENGTHS, max_size=12)):
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
        extents = []
        for start, end in zip([0, *cuts], [*cuts, length], strict=True):
            offset += draw(st.sampled_from([0, 1, 64, PAGE, 1 << 30]))
            extents.append(Extent(offset, end - start))
            offset += end - start
        sources.append(Source(address, length, tuple(extents)))
        address += length + draw(st.integers(0, 99))
    return sources


def columns(**lists: list[int]) -> Sources:
    names = ("address", "length", "extent_offset", "extent_length")
    return Sources(**{name: np.array(lists.get(name, []), np.int64) for name in names})


def segments_of(offsets: list[int], lengths: list[int]) -> Segments:
    rows = np.arange(len(offsets))
    return Segments(address=rows, offset=np.array(offsets), length=np.array(lengths), row=rows)


@given(sources_with_extents())
def test_segments_are_the_sources_cut_where_source_unit_or_extent_begins(
    sources: list[Source],
) -> None:
    expected, row = [], 0
    for source in sources:
        done = 0
        for extent in source.extents:
            start = done
            while done < start + extent.length:
                end = min(start + extent.length, (done // UNIT + 1) * UNIT)
                place = extent.offset + done - start
                expected.append((source.address + done, place, end - done, row + done // UNIT))
                done = end
        row += unit_count(source.length)
    segments, digests = cut(columns_of(sources))
    found = zip(segments.address, segments.offset, segments.length, segments.row, strict=True)
    assert [tuple(map(int, segment)) for segment in found] == expected
    assert digests.shape == (row, 16)


@given(sources_with_extents())
def test_an_empty_source_has_the_digest_of_nothing(sources: list[Source]) -> None:
    _, digests = cut(columns_of(sources))
    rows = np.cumsum([0, *(unit_count(source.length) for source in sources)])
    for source, row in zip(sources, rows, strict=False):
        expected = digest(b"") if source.length == 0 else bytes(16)
        assert digests[row].tobytes() == expected


@given(sources_with_extents(), st.integers(1, 4 * UNIT), st.sampled_from([0, PAGE]))
def test_batches_are_whole_units_within_the_limit(
    sources: list[Source], size_max: int, gap: int
) -> None:
    segments, _ = cut(columns_of(sources))
    batches = list(segments.batches(size_max, gap=gap))
    rows = [row for batch in batches for row in batch.row.tolist()]
    assert rows == segments.row.tolist()
    for before, after in itertools.pairwise(batches):
        assert before.row[-1] != after.row[0]
    for batch in batches:
        small = batch.size + gap * len(batch) <= size_max
        assert small or batch.row[0] == batch.row[-1]


def test_batches_are_as_large_as_the_limit_allows() -> None:
    segments = segments_of([0] * 6, [10, 10, 10, 25, 5, 10])
    assert [len(batch) for batch in segments.batches(20)] == [2, 1, 1, 2]
    assert [len(batch) for batch in segments.batches(30)] == [3, 2, 1]


@given(sources_with_extents(), st.sampled_from([PAGE + 1, 1 << 20, UNIT]))
def test_pieces_are_the_same_bytes_and_never_longer(sources: list[Source], size_max: int) -> None:
    segments, _ = cut(columns_of(sources))
    pieces = segments.pieces(size_max)
    assert pieces.size == segments.size
    assert all(length <= size_max for length in pieces.length.tolist())
    starts = set(segments.address.tolist())
    ends = (pieces.address + pieces.length).tolist()
    assert starts <= set(pieces.address.tolist())
    assert {a for a in pieces.address.tolist() if a not in starts} <= set(ends)
    assert (pieces.address - pieces.offset).tolist() == np.repeat(
        segments.address - segments.offset, -(-segments.length // size_max)
    ).tolist()


def test_neighbours_in_the_pool_are_one_run() -> None:
    segments = segments_of([500, 0, 100, 2 * PAGE + 600], [100, 100, 400, 5])
    assert segments.runs() == [Extent(0, 600), Extent(2 * PAGE + 600, 5)]


def test_runs_of_what_overlaps_hold_it_once() -> None:
    assert segments_of([0, 0, 100, 2000], [3000, 10, 10, 9000]).runs() == [Extent(0, 11000)]
    assert segments_of([0, 9, 100], [50 * PAGE, 10, 10]).runs() == [Extent(0, 50 * PAGE)]


def test_runs_may_be_asked_to_have_no_gaps() -> None:
    segments = segments_of([0, 10, 21], [10, 10, 10])
    assert segments.runs(gap=1) == [Extent(0, 20), Extent(21, 10)]


def test_a_gap_of_a_page_ends_a_run_and_a_smaller_one_does_not() -> None:
    assert segments_of([0, PAGE + 9], [10, 10]).runs() == [Extent(0, PAGE + 19)]
    assert segments_of([0, PAGE + 10], [10, 10]).runs() == [Extent(0, 10), Extent(PAGE + 10, 10)]


def test_columns_may_say_that_one_extent_holds_many_sources() -> None:
    packed = columns(address=[8, 100], length=[3, 5], extent_offset=[64], extent_length=[8])
    segments, _ = cut(packed)
    assert segments.offset.tolist() == [64, 67]


@pytest.mark.parametrize(
    "wrong",
    [
        {"address": [8], "length": [3, 4]},
        {"address": [8], "length": [-3]},
        {"address": [-8], "length": [3]},
        {"address": [8], "length": [3], "extent_offset": [0]},
        {"address": [8], "length": [3], "extent_offset": [0], "extent_length": [4]},
        {"address": [8], "length": [3], "extent_offset": [-1], "extent_length": [3]},
    ],
)
def test_columns_that_make_no_sense_are_refused(wrong: dict[str, list[int]]) -> None:
    with pytest.raises(UsageError):
        columns(**wrong)


def test_columns_of_another_type_are_refused() -> None:
    narrow = np.array([1], np.int32)
    empty = np.array([], np.int64)
    with pytest.raises(UsageError, match="int64"):
        Sources(address=narrow, length=narrow, extent_offset=empty, extent_length=empty)  # type: ignore[arg-type]  # the point


def test_a_stop_is_asked_once_and_for_good() -> None:
    stop = Stop()
    stop.check()
    assert not stop.is_set()
    stop.set()
    assert stop.is_set()
    with pytest.raises(StoppedError):
        stop.check()
    assert issubclass(StoppedError, AbandonedError)


def test_what_is_done_is_counted_from_every_thread() -> None:
    stop = Stop()

    def count() -> None:
        for _ in range(2000):
            stop.add(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stop.bytes_done == 8000


def test_a_helper_finds_asked_and_done_at_the_shared_address() -> None:
    stop = Stop()
    stop.add(7)
    stop.set()
    assert list((ctypes.c_int64 * 2).from_address(stop.flags_address)) == [1, 7]
