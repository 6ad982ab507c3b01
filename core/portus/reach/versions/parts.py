"""The rows of a version, gathered from groups of copied or shared storages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from portus.engine.copying.segments import Digests, Sources, ranges
from portus.engine.format.checksum import storage_digest, unit_counts
from portus.engine.pipeline.plan import Column, Flags
from portus.engine.spec import Extent, VersionInfo
from portus.reach.format.layout import EXTENT, STORAGE, UNIT_DIGEST
from portus.reach.index.records import Rows, VersionRecord

REFRESH_COMMITS: Final = 64
"""Commits after which shared storages are copied again, since rot in them is in every version that
shares them."""


@dataclass(frozen=True, slots=True)
class StorageRows:
    """Some storages of a save.

    ``indices``: among those of the state. ``extents``: their rows one after another, ``counts`` for
    each. ``digests``: of their units. ``born``: the commit that copied them, 0 for this one.
    """

    indices: Column
    extents: Rows
    counts: Column
    digests: Digests
    born: Column

    @classmethod
    def over(
        cls, indices: Column, extents: Sequence[Sequence[Extent]], digests: Digests, born: int = 0
    ) -> StorageRows:
        """Return rows of storages whose extents are given one by one, all of the same commit."""
        return cls(
            indices,
            np.array(
                [(part.offset, part.length) for each in extents for part in each], EXTENT.dtype
            ),
            np.array([len(each) for each in extents], np.int64),
            digests,
            np.full(len(indices), born, np.int64),
        )


@dataclass(frozen=True, slots=True)
class PreviousVersion:
    """A committed version of a pool, to share with: a ``Previous``."""

    record: VersionRecord

    @property
    def info(self) -> VersionInfo:
        """The facts of the version, of its record."""
        return self.record.info

    @property
    def length(self) -> Column:
        length: Column = self.record.storages["length"].astype(np.int64)
        return length

    @property
    def may_share(self) -> Flags:
        born = self.record.storages["born"].astype(np.int64)
        flags: Flags = born + REFRESH_COMMITS > self.record.info.commit
        return flags

    def digests(self, indices: Column) -> Digests:
        return unit_digests(self.record.storages[indices], self.record.units)


def sources(address: Column, length: Column, extents: Rows) -> Sources:
    """Return storages as sources, with the extents that hold them end to end."""
    return Sources(
        address=address,
        length=length,
        extent_offset=extents["offset"].astype(np.int64),
        extent_length=extents["length"].astype(np.int64),
    )


def share(record: VersionRecord, indices: Column) -> StorageRows:
    """Return the storages ``indices`` as a committed version holds them."""
    rows = record.storages[indices]
    counts = rows["extents"].astype(np.int64)
    return StorageRows(
        indices,
        record.extents[ranges(rows["first_extent"].astype(np.int64), counts)],
        counts,
        unit_digests(rows, record.units),
        rows["born"].astype(np.int64),
    )


def unit_digests(storages: Rows, units: Rows) -> Digests:
    """Return unit digests of some storages. ``units``: of all storages of the version."""
    counts = unit_counts(storages["length"].astype(np.int64))
    return _as_digests(units[ranges(storages["first_unit"].astype(np.int64), counts)])


def part(extents: Sequence[Extent], start: int, end: int) -> list[Extent]:
    """Return the extents of the bytes ``start`` to ``end`` of the bytes that ``extents`` hold."""
    found, before = [], 0
    for extent in extents:
        low, high = max(start - before, 0), min(end - before, extent.length)
        if low < high:
            found.append(Extent(extent.offset + low, high - low))
        before += extent.length
    return found


def offsets_in(groups: list[StorageRows], storage: Column, offset: Column) -> Column:
    """Return the place in the pool of byte ``offset`` of each storage; groups have all."""
    count = 1 + max(int(group.indices.max(initial=-1)) for group in groups)
    extents = np.concatenate([group.extents for group in groups])
    length = extents["length"].astype(np.int64)
    ends = np.cumsum(length)
    counts = np.concatenate([group.counts for group in groups])
    first = np.zeros(count, np.int64)
    first[np.concatenate([group.indices for group in groups])] = np.cumsum(counts) - counts
    at = (ends - length)[np.minimum(first[storage], len(extents) - 1)] + offset
    row = np.searchsorted(ends, at, "right")
    found: Column = extents["offset"].astype(np.int64)[row] + at - (ends - length)[row]
    return found


def rows_of(groups: list[StorageRows], lengths: Column) -> tuple[Rows, Rows, Rows]:
    """Return storage, extent and unit rows of storages of ``lengths``, each in one group."""
    indices = np.concatenate([group.indices for group in groups] or [np.empty(0, np.int64)])
    assert len(indices) == len(lengths), f"{len(indices)} of {len(lengths)} storages were placed"
    counts = np.zeros(len(lengths), np.int64)
    born = np.zeros(len(lengths), np.int64)
    for group in groups:
        counts[group.indices] = group.counts
        born[group.indices] = group.born
    extents = _in_order(indices, counts[indices], [group.extents for group in groups], EXTENT.dtype)
    per_storage = unit_counts(lengths)
    units = _in_order(
        indices,
        per_storage[indices],
        [_as_rows(group.digests) for group in groups],
        UNIT_DIGEST.dtype,
    )
    storages = np.zeros(len(lengths), STORAGE.dtype)
    storages["length"] = lengths
    storages["extents"] = counts
    storages["first_extent"] = np.cumsum(counts) - counts
    storages["first_unit"] = np.cumsum(per_storage) - per_storage
    storages["born"] = born
    storages["digest"] = _storage_digests(units, per_storage)
    return storages, extents, units


def _storage_digests(units: Rows, per_storage: Column) -> Rows:
    first = np.cumsum(per_storage) - per_storage
    digests = units["digest"][first].copy()
    for index in np.flatnonzero(per_storage > 1):
        own = units[first[index] : first[index] + per_storage[index]]
        digests[index] = np.void(storage_digest([bytes(row["digest"]) for row in own]))
    result: Rows = digests
    return result


def _in_order(indices: Column, counts: Column, rows: list[Rows], dtype: np.dtype[np.void]) -> Rows:
    """Return rows in the order of the storages ``indices``, which have ``counts`` of them each."""
    if len(rows) == 1:
        return rows[0]
    order = np.argsort(np.repeat(indices, counts), kind="stable")
    return np.concatenate([np.empty(0, dtype), *rows])[order]


def _as_rows(digests: Digests) -> Rows:
    return np.ascontiguousarray(digests).view(UNIT_DIGEST.dtype).reshape(-1)


def _as_digests(rows: Rows) -> Digests:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(-1, UNIT_DIGEST.size)
