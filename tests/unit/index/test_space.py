from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from portus.engine.spec import PAGE
from portus.reach.index.space import EMPTY, Runs, alone, choose, gaps, merge, page_count, runs_of

_RANGES = st.lists(st.tuples(st.integers(0, 60 * PAGE), st.integers(0, 5 * PAGE)), max_size=12)


def _pages(ranges: list[tuple[int, int]]) -> set[int]:
    return {
        page
        for offset, length in ranges
        if length
        for page in range(offset // PAGE, -(-(offset + length) // PAGE))
    }


def _pages_of(runs: Runs) -> set[int]:
    return {page for first, after in runs.tolist() for page in range(first, after)}


def _runs(ranges: list[tuple[int, int]]) -> Runs:
    return runs_of([offset for offset, _ in ranges], [length for _, length in ranges])


@given(_RANGES)
def test_runs_are_the_pages_touched_sorted_and_apart(ranges: list[tuple[int, int]]) -> None:
    runs = _runs(ranges)
    assert _pages_of(runs) == _pages(ranges)
    assert page_count(runs) == len(_pages(ranges))
    assert bool((runs[1:, 0] > runs[:-1, 1]).all()), "neighbours are joined"


@given(_RANGES, _RANGES)
def test_merged_is_the_union(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    assert _pages_of(merge([_runs(left), _runs(right)])) == _pages(left) | _pages(right)


@given(_RANGES)
def test_gaps_and_reach_share_no_page_and_leave_none_out(ranges: list[tuple[int, int]]) -> None:
    free = _pages_of(gaps(_runs(ranges), 3, 50))
    assert free == set(range(3, 50)) - _pages(ranges)


@given(st.lists(_RANGES, max_size=4))
def test_gaps_are_of_all_reaches_though_these_overlap_and_are_in_no_order(
    many: list[list[tuple[int, int]]],
) -> None:
    free = gaps(np.concatenate([EMPTY, *map(_runs, many)]), 3, 50)
    assert _pages_of(free) == set(range(3, 50)).difference(*map(_pages, many))
    assert page_count(free) == len(_pages_of(free)), "no page is free twice"


@given(_RANGES, st.integers(0, 60))
def test_a_choice_is_free_and_whole_or_there_is_not_enough(
    ranges: list[tuple[int, int]], pages: int
) -> None:
    free = gaps(_runs(ranges), 0, 70)
    chosen = choose(free, pages)
    if chosen is None:
        assert page_count(free) < pages
        return
    taken = [page for each in chosen for page in range(each.offset // PAGE, each.end // PAGE)]
    assert len(taken) == len(set(taken)) == pages
    assert set(taken) <= _pages_of(free)


def test_the_smallest_run_that_fits_is_taken() -> None:
    free = np.array([[0, 10], [20, 24], [30, 33]], np.int64)
    (chosen,) = choose(free, 3) or []
    assert chosen.offset == 30 * PAGE


def test_nothing_is_free_in_nothing() -> None:
    assert choose(EMPTY, 1) is None
    assert choose(EMPTY, 0) == []


@given(st.lists(_RANGES, max_size=5))
def test_alone_counts_the_pages_that_no_other_reach_has(many: list[list[tuple[int, int]]]) -> None:
    found = alone([_runs(each) for each in many])
    for index, ranges in enumerate(many):
        others = [_pages(each) for place, each in enumerate(many) if place != index]
        assert found[index] == len(_pages(ranges) - set().union(*others))
