"""Storages on their way into new extents, piece by piece, while batches continue.

Theory. Nothing reaches the new extents until all pieces are durable; then a version that has them
is committed. So a crash before that, or storages that are given up, cost nothing but the work.

A dense part that may be older than the tables enters the pool that way, with a slice in each batch.
It was copied in memory when its batch ended. So training continues without changing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from portus.companions.embedding.moment import Column, Moment
from portus.engine.copying.local import copy
from portus.engine.copying.segments import Digests, Source, Stop
from portus.engine.format.checksum import UNIT
from portus.engine.spec import Extent
from portus.reach.index.pool import PoolWriter
from portus.reach.versions.parts import StorageRows, part

PIECE: Final = UNIT
"""Bytes to copy and persist together, and so the longest that a batch may have to wait for."""


class Pieces:
    """Storages that are written in pieces. One thread at a time."""

    def __init__(
        self, pool: PoolWriter, moment: Moment, indices: Column, piece: int | None = None
    ) -> None:
        """Reserve room for the storages ``indices`` of a moment. piece: the bytes of a piece, which
        may be larger if it is of a single storage; None: ``PIECE``. Raises ``MediumError``; then
        nothing is held."""
        self._pool: Final = pool
        self._alive: Final = moment.alive
        self.indices: Final = indices
        self._held: Final[list[list[Extent]]] = []
        lengths = moment.length[indices].tolist()
        try:
            for length in lengths:
                self._held.append(pool.reserve(length) if length else [])
        except BaseException:
            self.release()
            raise
        self.extents: Final = [
            part(extents, 0, length) for extents, length in zip(self._held, lengths, strict=True)
        ]
        """The new extents of each storage."""
        cut = _cut(moment.address[indices].tolist(), lengths, self.extents, piece or PIECE)
        self._pieces: Final = list(cut)
        self._digests: Final[list[Digests]] = []
        self.size: Final = int(sum(lengths))
        """Bytes of all storages."""
        self.done = 0
        """Bytes that are durable."""

    @property
    def is_whole(self) -> bool:
        """True once all pieces are durable."""
        return len(self._digests) == len(self._pieces)

    def go_on(self, stop: Stop, others: Sequence[Extent] = ()) -> None:
        """Store the next piece; it and ``others``, which were stored before, are durable on return.
        ``stop``: says whether a batch waits. Raises ``MediumError``."""
        piece = self._pieces[len(self._digests)]
        digests = copy(self._pool.medium, piece, stop)
        stored = [extent for source in piece for extent in source.extents]
        self._pool.medium.persist([*others, *stored])
        self._digests.append(digests)
        self.done += sum(source.length for source in piece)

    def rows(self, born: int = 0) -> StorageRows:
        """Return the rows of the storages once all are durable. born: the commit before which no
        version had their extents; 0: the next one."""
        units = np.concatenate([np.empty((0, 16), np.uint8), *self._digests])
        return StorageRows.over(self.indices, self.extents, units, born)

    def release(self) -> None:
        """Release the reserved room. All that was not committed becomes free."""
        for each in self._held:
            self._pool.release(each)
        self._held.clear()


class Slices(Pieces):
    """The dense part of a moment, in ``moment.sliced`` slices, one for each batch from then on."""

    def __init__(self, pool: PoolWriter, moment: Moment) -> None:
        """Begin to store the storages that ``moment`` leaves, and reserve room for them. Raises
        ``MediumError``; then nothing is held."""
        indices = np.array(sorted(moment.left), np.int64)
        size = int(moment.length[indices].sum())
        super().__init__(pool, moment, indices, max(1, min(PIECE, size // moment.sliced)))
        self.moment: Final = moment
        self.due = 1
        """Slices to write before the next batch is committed."""

    @property
    def is_behind(self) -> bool:
        """True if a slice is due."""
        count = self.moment.sliced
        return not self.is_whole and (self.due >= count or self.done * count < self.size * self.due)


def _cut(
    addresses: Sequence[int], lengths: Sequence[int], extents: Sequence[Sequence[Extent]], most: int
) -> Iterator[list[Source]]:
    """Yield all storages as pieces: units of long ones, and short ones together, up to ``most``
    bytes. Each source has one digest."""
    piece: list[Source] = []
    size = 0
    for address, length, own in zip(addresses, lengths, extents, strict=True):
        for start in range(0, max(1, length), UNIT):
            step = min(UNIT, length - start)
            if piece and size + step > most:
                yield piece
                piece, size = [], 0
            inside = tuple(part(own, start, start + step))
            piece.append(Source(address + start if step else 0, step, inside))
            size += step
    if piece:
        yield piece
