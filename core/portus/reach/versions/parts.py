"""The rows of a version, gathered from groups of copied or shared storages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from portus.engine.copying.segments import Digests, Sources, ranges
from portus.engine.format.checksum import unit_counts
from portus.engine.pipeline.plan import Column
from portus.engine.spec import Extent
from portus.reach.format.layout import EXTENT, STORAGE, UNIT_DIGEST
from portus.reach.index.records import Rows, VersionRecord


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
        record.extents[ranges(record.first_extent[indices], counts)],
        counts,
        record.digests(indices),
        rows["born"].astype(np.int64),
    )


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
    storages["born"] = born
    return storages, extents, units


def _in_order(indices: Column, counts: Column, rows: list[Rows], dtype: np.dtype[np.void]) -> Rows:
    """Return rows in the order of the storages ``indices``, which have ``counts`` of them each."""
    if len(rows) == 1:
        return rows[0]
    order = np.argsort(np.repeat(indices, counts), kind="stable")
    return np.concatenate([np.empty(0, dtype), *rows])[order]


def _as_rows(digests: Digests) -> Rows:
    return np.ascontiguousarray(digests).view(UNIT_DIGEST.dtype).reshape(-1)
