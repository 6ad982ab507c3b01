"""The check of shared bytes: no page of two commits (V1), no overlap (F13)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.engine.spec import PAGE
from portus.reach.index.check_catalogue import ReachedRun
from portus.reach.index.check_version import CheckedVersion, owners
from portus.reach.index.findings import Findings
from portus.reach.index.space import Runs, runs_of

NAMED_MAX: Final = 20
"""Overlaps of one kind that are named one by one."""

Column = npt.NDArray[np.int64]


def check_reach(
    seen: Iterable[CheckedVersion], records: Iterable[ReachedRun], findings: Findings
) -> None:
    """Check runs of bytes that both roots reached at one moment."""
    reach = _Reach(list(seen), list(records))
    _check_overlaps(reach, findings)
    _check_pages(reach, findings)


class _Reach:
    """All runs of bytes that are reached: columns ``start``, ``end`` and ``commit``. A shared run
    occurs once for each owner."""

    def __init__(self, seen: list[CheckedVersion], records: list[ReachedRun]) -> None:
        listed = [*records, *(each for version in seen for each in version.runs)]
        alone = [(each.extent.offset, each.extent.length, each.commit) for each in listed]
        rows = [np.array(alone, np.int64).reshape(-1, 3)]
        self._listed: Final = listed
        self._seen: Final = seen
        rows += [_rows(version) for version in seen]
        self._firsts: Final = np.cumsum([0, *map(len, rows)])
        table = np.concatenate(rows)
        self.start: Final[Column] = table[:, 0]
        self.end: Final[Column] = table[:, 0] + table[:, 1]
        self.commit: Final[Column] = table[:, 2]

    def distinct(self) -> Column:
        """Return the indices of distinct runs, sorted by start."""
        if not len(self.start):
            return np.empty(0, np.int64)
        order = np.lexsort((self.end, self.start))
        start, end = self.start[order], self.end[order]
        new = np.append(True, (np.diff(start) != 0) | (np.diff(end) != 0))
        chosen: Column = order[new]
        return chosen

    def name(self, index: int) -> str:
        """Return a description of one run, for people."""
        block = int(np.searchsorted(self._firsts, index, "right")) - 1
        row = index - int(self._firsts[block])
        where = f"bytes {self.start[index]} to {self.end[index]}"
        if block == 0:
            return f"{self._listed[row].what} ({where}, commit {self.commit[index]})"
        version = self._seen[block - 1]
        storage = int(owners(version.record.storages["extents"])[_good(version)][row])
        return f"storage {storage} of {version.name} ({where}, commit {self.commit[index]})"

    def touching(self, page: int, commit: int) -> int:
        """Return the index of a run of ``commit`` in ``page``."""
        inside = (self.start < (page + 1) * PAGE) & (self.end > page * PAGE)
        return int(np.flatnonzero(inside & (self.commit == commit))[0])


def _good(version: CheckedVersion) -> npt.NDArray[np.bool_]:
    """Return a mask of the extents that belong to a sound storage and are not empty."""
    storages, extents = version.record.storages, version.record.extents
    good: npt.NDArray[np.bool_] = version.sound[owners(storages["extents"])]
    return good & (extents["length"] > 0)


def _rows(version: CheckedVersion) -> npt.NDArray[np.int64]:
    storages, extents = version.record.storages, version.record.extents
    born = np.repeat(storages["born"].astype(np.int64), storages["extents"].astype(np.int64))
    columns = (extents["offset"].astype(np.int64), extents["length"].astype(np.int64), born)
    rows: npt.NDArray[np.int64] = np.stack(columns, axis=1)[_good(version)]
    return rows


def _check_overlaps(reach: _Reach, findings: Findings) -> None:
    order = reach.distinct()
    for first, second in _meetings(reach.start[order], reach.end[order]):
        findings.error(
            "F13", reach.name(int(order[second])), "bytes of its own",
            f"it overlaps {reach.name(int(order[first]))}",
        )  # fmt: skip


def _check_pages(reach: _Reach, findings: Findings) -> None:
    runs, commits = _pages_by_commit(reach)
    order = np.argsort(runs[:, 0], kind="stable")
    runs, commits = runs[order], commits[order]
    for first, second in _meetings(runs[:, 0], runs[:, 1]):
        page = int(runs[second, 0])
        both = [reach.touching(page, int(commits[index])) for index in (first, second)]
        findings.error(
            "V1", f"page {page} (byte {page * PAGE})", "bytes of one commit",
            " and ".join(map(reach.name, both)),
        )  # fmt: skip


def _pages_by_commit(reach: _Reach) -> tuple[Runs, Column]:
    """Return the pages of each commit, merged, and the commit of each run."""
    order = np.argsort(reach.commit, kind="stable")
    cuts = np.flatnonzero(np.diff(reach.commit[order])) + 1
    parts = [part for part in np.split(order, cuts) if len(part)]
    runs = [runs_of(reach.start[part], (reach.end - reach.start)[part]) for part in parts]
    commits = [np.full(len(r), reach.commit[p[0]]) for r, p in zip(runs, parts, strict=True)]
    return (
        np.concatenate([np.empty((0, 2), np.int64), *runs]),
        np.concatenate([np.empty(0, np.int64), *commits]),
    )


def _meetings(start: Column, end: Column) -> list[tuple[int, int]]:
    """Return pairs of overlapping runs, by position, ``NAMED_MAX`` at most. ``start`` is sorted."""
    if len(start) < 2:
        return []
    # Of all earlier runs: a long one may overlap a run after its next one.
    furthest = np.maximum.accumulate(end)
    late = np.flatnonzero(start[1:] < furthest[:-1]) + 1
    return [(int(np.argmax(end[:index])), index) for index in late[:NAMED_MAX].tolist()]
