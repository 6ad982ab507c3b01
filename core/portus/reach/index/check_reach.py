"""The check of shared bytes: no page of two commits (V1), no overlap (F13)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from portus.engine.spec import PAGE
from portus.reach.index.check_catalogue import ReachedRun
from portus.reach.index.findings import Finding, Findings
from portus.reach.index.records import VersionRecord

NAMED_MAX: Final = 20
"""Overlaps of one kind that are named one by one."""


def check_reach(
    versions: Iterable[VersionRecord], alone: Iterable[ReachedRun], findings: Findings
) -> None:
    """Check the runs of bytes that versions reached at one moment. alone: those of records."""
    versions = list(versions)
    logs = [(each.log, f"log of {each.name}") for each in versions]
    runs = [ReachedRun(log.extent, log.born, name) for log, name in logs if log is not None]
    reach = _Reach(versions, [*alone, *runs])
    for first, second in reach.overlaps()[:NAMED_MAX]:
        found = f"it overlaps {reach.name(first)}"
        findings.add(Finding("F13", reach.name(second), "bytes of its own", found))
    for page, first, second in reach.common_pages()[:NAMED_MAX]:
        where, found = f"page {page} (byte {page * PAGE})", f"{reach.name(first)} and "
        findings.add(Finding("V1", where, "bytes of one commit", found + reach.name(second)))


class _Reach:
    """All runs of bytes that are reached, in columns: those of ``alone``, and then those of each
    version. A shared run is there once for each version."""

    def __init__(self, versions: list[VersionRecord], alone: list[ReachedRun]) -> None:
        self._versions: Final = versions
        self._alone: Final = alone
        rows = [np.array([(e.extent.offset, e.extent.end, e.commit) for e in alone], np.int64)]
        for each in versions:
            counts = each.storages["extents"].astype(np.int64)
            offset, length = (each.extents[name].astype(np.int64) for name in ("offset", "length"))
            born = np.repeat(each.storages["born"].astype(np.int64), counts)
            rows.append(np.stack([offset, offset + length, born], axis=1))
        self._firsts: Final = np.cumsum([0, *map(len, rows)])
        table = np.concatenate([each.reshape(-1, 3) for each in rows])
        self._start, self._end, self._commit = table.T

    def overlaps(self) -> list[tuple[int, int]]:
        """Return pairs of runs that overlap, except those that are the same in several owners."""
        owner = np.repeat(np.arange(len(self._firsts) - 1), np.diff(self._firsts))
        order = np.lexsort((owner, self._end, self._start))
        start, end, owner = self._start[order], self._end[order], owner[order]
        same = (np.diff(start) == 0) & (np.diff(end) == 0)
        twice = np.flatnonzero(same & (np.diff(owner) == 0) & (owner[1:] > 0))
        pairs = list(zip(order[twice].tolist(), order[twice + 1].tolist(), strict=True))
        order = np.append(order[:1], order[1:][~same])
        start, end = self._start[order], self._end[order]
        # Of all earlier runs: a long one may overlap a run after its next one.
        late = np.flatnonzero(start[1:] < np.maximum.accumulate(end)[:-1]) + 1
        for index in late[:NAMED_MAX].tolist():
            pairs.append((int(order[np.argmax(end[:index])]), int(order[index])))
        return pairs

    def common_pages(self) -> list[tuple[int, int, int]]:
        """Return pages of two commits, with a run of each. Where runs do not overlap, these are
        first or last pages of them."""
        run = np.tile(np.arange(len(self._start)), 2)
        page = np.concatenate([self._start, self._end - 1]) // PAGE
        commit = self._commit[run]
        order = np.lexsort((commit, page))
        page, commit, run = page[order], commit[order], run[order]
        found = np.flatnonzero((np.diff(page) == 0) & (np.diff(commit) != 0))
        columns = (page[found], run[found], run[found + 1])
        return list(zip(*(each.tolist() for each in columns), strict=True))

    def name(self, index: int) -> str:
        """Return a description of one run, for people."""
        owner = int(np.searchsorted(self._firsts, index, "right")) - 1
        row = index - int(self._firsts[owner])
        where = f"bytes {self._start[index]} to {self._end[index]}, commit {self._commit[index]}"
        if owner == 0:
            return f"{self._alone[row].what} ({where})"
        record = self._versions[owner - 1]
        ends = np.cumsum(record.storages["extents"].astype(np.int64))
        storage = int(np.searchsorted(ends, row, "right"))
        return f"storage {storage} of {record.name} ({where})"
