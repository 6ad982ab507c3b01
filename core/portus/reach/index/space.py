"""Free space is derived, never stored (V10): space is free if no root and no pin reaches it.

Space is counted in pages. A *reach* is a sorted array of page runs (first page, page after the
last), one for each version and one for the records of each root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.engine.spec import PAGE, Extent

Runs = npt.NDArray[np.int64]

EMPTY: Final[Runs] = np.empty((0, 2), np.int64)


def runs_of(offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> Runs:
    """Return the pages that byte ranges touch, sorted and merged. Empty ranges touch none."""
    start = np.asarray(offsets).astype(np.int64)
    size = np.asarray(lengths).astype(np.int64)
    some = size > 0
    pages = np.empty((np.count_nonzero(some), 2), np.int64)
    pages[:, 0] = start[some] // PAGE
    pages[:, 1] = -(-(start[some] + size[some]) // PAGE)
    return merge([pages])


def extents_runs(extents: Iterable[Extent]) -> Runs:
    """Return the runs of pages of extents."""
    pages = [(each.offset // PAGE, -(-each.end // PAGE)) for each in extents if each.length]
    return merge([np.array(pages, np.int64)]) if pages else EMPTY


def merge(reaches: Iterable[Runs]) -> Runs:
    """Return the union of reaches."""
    together = np.concatenate([EMPTY, *reaches])
    if len(together) < 2:
        return together
    starts, ends = together.T
    order = starts.argsort(kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    opens = starts[1:] > ends[:-1]
    found = np.empty((1 + np.count_nonzero(opens), 2), np.int64)
    found[0, 0], found[1:, 0] = starts[0], starts[1:][opens]
    found[:-1, 1], found[-1, 1] = ends[:-1][opens], ends[-1]
    return found


def gaps(reach: Runs, first_page: int, after_page: int) -> Runs:
    """Return the pages of [first_page, after_page) outside of ``reach``, merged or not."""
    starts, ends = reach[(reach[:, 1] > first_page) & (reach[:, 0] < after_page)].T
    order = starts.argsort(kind="stable")
    found = np.empty((len(order) + 1, 2), np.int64)
    # Runs may overlap: a gap begins after the furthest end so far.
    found[0, 0], found[1:, 0] = first_page, np.maximum.accumulate(ends[order])
    found[:-1, 1], found[-1, 1] = starts[order], after_page
    return found[found[:, 1] > found[:, 0]]


def without(runs: Runs, others: Runs) -> Runs:
    """Return the pages of ``runs`` that are not among ``others``; both merged."""
    if not len(runs) or not len(others):
        return runs
    first, after = int(runs[0, 0]), int(runs[-1, 1])
    return gaps(np.concatenate([gaps(runs, first, after), others]), first, after)


def page_count(runs: Runs) -> int:
    """Return the number of pages in merged runs."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def alone(reaches: Sequence[Runs]) -> list[int]:
    """Return, for each reach (merged), the number of pages that none of the others has."""
    counts = [len(each) for each in reaches]
    whose = np.repeat(np.arange(1, len(reaches) + 1), counts)
    runs = np.concatenate([EMPTY, *reaches])
    edges = np.concatenate([runs[:, 0], runs[:, 1]])
    order = np.argsort(edges, kind="stable")
    depth = np.cumsum(np.repeat([1, -1], len(runs))[order])
    owner = np.cumsum(np.concatenate([whose, -whose])[order])
    length = np.append(np.diff(edges[order]), 0)
    own = depth == 1  # there ``owner`` is that of the one run that is open
    pages = np.bincount(owner[own], weights=length[own], minlength=len(reaches) + 1)
    return [int(each) for each in pages[1:]]


def last(free: Runs, pages: int) -> list[Extent] | None:
    """Return the end of the largest free run, far from what ``choose`` takes, or None if it has
    fewer than ``pages``."""
    sizes = free[:, 1] - free[:, 0]
    if not len(sizes) or int(sizes.max()) < pages:
        return None
    after = int(free[np.argmax(sizes), 1])
    return [Extent((after - pages) * PAGE, pages * PAGE)]


def choose(free: Runs, pages: int) -> list[Extent] | None:
    """Return ``pages`` pages of the free runs: the smallest run that holds them all, else the
    largest runs first. Return None if there are not enough."""
    if pages == 0:
        return []
    sizes = free[:, 1] - free[:, 0]
    fitting = np.flatnonzero(sizes >= pages)
    if len(fitting):
        # The smallest that fits: large runs stay for what needs one in one piece, such as records.
        best = fitting[np.argmin(sizes[fitting])]
        return [Extent(int(free[best, 0]) * PAGE, pages * PAGE)]
    if int(sizes.sum()) < pages:
        return None
    chosen, missing = [], pages
    for index in np.argsort(-sizes, kind="stable"):
        taken = min(missing, int(sizes[index]))
        chosen.append(Extent(int(free[index, 0]) * PAGE, taken * PAGE))
        missing -= taken
        if not missing:
            break
    return chosen
