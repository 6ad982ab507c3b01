"""What is to be committed of one batch: where it is in memory, and where it goes in the pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.engine.copying.segments import memory
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
    """Where a tensor with rows is in the pool. ``row``, ``cell``: bytes of each. ``sums``: digests
    of its units, as they were committed last; empty before the first commit. ``logged``: cells
    whose bytes are in undo entries of this batch, in order; ``old``: the digests that these had.
    """

    extent: Extent
    row: int
    cell: int
    sums: list[int] = field(default_factory=list)
    logged: Column = field(default_factory=lambda: np.empty(0, np.int64))
    old: list[int] = field(default_factory=list)

    @property
    def units(self) -> int:
        """How many there are."""
        return unit_count(self.extent.length)


RowsThere = tuple[TensorLocation, Column]
"""Rows by their numbers, each once, in order."""


NO_ROWS: Final = Rows(np.empty(0, np.int64), np.empty((0, 0), np.uint8))
"""The rows of a table that is in the pool itself: nothing of it is copied."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is to be committed of one batch.

    ``address``, ``length``: of the storages of the state, in this process. They stay as they are
    until the commit is over; tables do only if ``rows`` is None. ``rows``: of those that are
    tables, what changed since the moment before, copied; the others are taken whole. None: all of
    each is taken. ``left``: storages that an entry leaves as they were, and the contents with
    them, if there are any; a version takes them all. ``tensors``: those of the state,
    if they are known. ``alive``: what has the memory.

    ``placed``: of the storages that are in the pool already, the place; ``rows``, if it is not
    None, has ``NO_ROWS`` of these. ``digests``: of each of them, the storage that is to have the
    digests of its units, and whose memory the store fills. ``ahead``: what the next batch was
    announced to change there.
    """

    batch: int
    contents: bytes
    address: Column
    length: Column
    rows: Mapping[int, Rows] | None
    left: Collection[int] = ()
    dense_batch: int = 0
    sliced: int = 0
    tensors: tuple[TensorSpec, ...] | None = None
    alive: object = field(default=None, compare=False)
    placed: Mapping[int, TensorLocation] = field(default_factory=dict)
    digests: Mapping[int, int] = field(default_factory=dict)
    ahead: Sequence[RowsThere] = ()

    def bunches(self, extents_of: Callable[[int], Sequence[Extent]]) -> list[Bunch]:
        """What an entry of it has: new rows, and the rest whole. ``extents_of``: a storage, by its
        place, in the pool. ``rows`` is not None."""
        assert self.rows is not None
        found: list[Bunch] = []
        for index in range(len(self.length)):
            if index in self.rows:
                found += _bunches_of(self.rows[index], extents_of(index))
            elif index not in self.left:
                found += self.whole(index, extents_of(index))
        return found

    def dense_bunches(self, extents: Sequence[Sequence[Extent]]) -> list[Bunch]:
        """Bunches of the dense storages that the moment left, whole. extents: of each storage, in
        the pool."""
        return [bunch for index in sorted(self.left) for bunch in self.whole(index, extents[index])]

    def whole(self, index: int, extents: Sequence[Extent]) -> list[Bunch]:
        """A storage, all of it, as patches of the pool; ``extents``: its place there."""
        address, length = int(self.address[index]), int(self.length[index])
        if not length:
            return []
        data = np.frombuffer(memory(address, length), np.uint8).reshape(1, -1)
        return _bunches_of(Rows(np.zeros(1, np.int64), data), extents)


def _bunches_of(rows: Rows, extents: Sequence[Extent]) -> list[Bunch]:
    """Rows of a storage as patches of the pool; one that goes over the end of an extent is cut."""
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
