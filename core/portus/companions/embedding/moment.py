"""The state of one batch to commit: its memory, and its place in the pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.engine.format.checksum import unit_count
from portus.engine.spec import Extent, TensorSpec
from portus.reach.index.log import Bunch
from portus.reach.versions.parts import part

Column = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table that changed: their numbers, and their bytes, of shape (rows, bytes of
    each)."""

    number: Column
    data: Bytes


@dataclass(slots=True, eq=False)
class TensorLocation:
    """The place of a tensor with rows in the pool. ``row``, ``cell``: bytes of each. ``sums``:
    digests of its units at the last commit; empty before the first. ``logged``: cells whose bytes
    are in undo entries of this batch, in order; ``old``: their digests then."""

    extent: Extent
    row: int
    cell: int
    sums: list[int] = field(default_factory=list)
    logged: Column = field(default_factory=lambda: np.empty(0, np.int64))
    old: list[int] = field(default_factory=list)

    @property
    def units(self) -> int:
        """The number of units."""
        return unit_count(self.extent.length)


RowsThere = tuple[TensorLocation, Column]
"""The place of a tensor, and distinct numbers of its rows, in order."""


NO_ROWS: Final = Rows(np.empty(0, np.int64), np.empty((0, 0), np.uint8))
"""The changed rows of a table that is in the pool itself: none, since nothing is copied."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of one batch to commit.

    ``data``: the bytes of the storages of the state. They stay unchanged until the commit has
    ended; those of tables only if ``rows`` is None. ``rows``: for each table, copies of the rows
    that changed since the moment before; other storages are taken whole. None: all storages are
    taken whole. ``left``: storages that an entry leaves unchanged, together with the contents; a
    version takes them all. ``tensors``: those of the state, if they are known.

    ``placed``: the places of storages that are in the pool already, whose ``data`` are not used;
    ``rows``, if it is not None, has ``NO_ROWS`` for them. ``digests``: for each of them, the
    storage for the digests of its units, whose memory the store fills. ``ahead``: rows there that
    the next batch was announced to change.
    """

    batch: int
    contents: bytes
    data: Sequence[Bytes]
    rows: Mapping[int, Rows] | None
    left: Collection[int] = ()
    dense_batch: int = 0
    sliced: int = 0
    tensors: tuple[TensorSpec, ...] | None = None
    placed: Mapping[int, TensorLocation] = field(default_factory=dict)
    digests: Mapping[int, int] = field(default_factory=dict)
    ahead: Sequence[RowsThere] = ()

    @property
    def length(self) -> Column:
        """The bytes of each storage."""
        found = [len(each) for each in self.data]
        for index, place in self.placed.items():
            found[index] = place.extent.length
        return np.array(found, np.int64)

    def bunches(self, extents_of: Callable[[int], Sequence[Extent]]) -> list[Bunch]:
        """Return the bunches of the moment's entry: changed rows, and other storages whole.
        ``extents_of``: returns the extents of a storage in the pool. ``rows`` is not None."""
        assert self.rows is not None
        found: list[Bunch] = []
        for index in range(len(self.data)):
            if index in self.rows:
                found += _bunches_of(self.rows[index], extents_of(index))
            elif index not in self.left:
                found += self.whole(index, extents_of(index))
        return found

    def whole(self, index: int, extents: Sequence[Extent]) -> list[Bunch]:
        """Return all of a storage as patches of the pool; ``extents``: its place there."""
        return _bunches_of(Rows(np.zeros(1, np.int64), self.data[index].reshape(1, -1)), extents)


def _bunches_of(rows: Rows, extents: Sequence[Extent]) -> list[Bunch]:
    """Return rows of a storage as patches of the pool. A row across two extents is cut."""
    size = rows.data.shape[1]
    if not len(rows.number) or not size:
        return []
    offset = np.array([each.offset for each in extents], np.int64)
    ends = np.cumsum([each.length for each in extents])
    begins = np.append(0, ends[:-1])
    start = rows.number * size
    first = np.searchsorted(ends, start, "right")
    whole = start + size <= ends[first]
    found = []
    place = offset[first] + start - begins[first]
    if whole.all():
        return [Bunch(place, rows.data)]
    if whole.any():
        found.append(Bunch(place[whole], rows.data[whole]))
    for row in np.flatnonzero(~whole).tolist():
        done = 0
        for extent in part(extents, int(start[row]), int(start[row]) + size):
            piece = rows.data[row : row + 1, done : done + extent.length]
            found.append(Bunch(np.array([extent.offset]), np.ascontiguousarray(piece)))
            done += extent.length
    return found
