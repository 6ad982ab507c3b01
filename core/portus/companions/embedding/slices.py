"""The dense part of one batch on its way into the pool, in slices beside the batches that follow.

Theory. It is copied in memory when its batch is over, so training goes on and changes none of it.
It goes to new extents, a slice for each batch, and each slice is persisted by itself. Nothing
reaches these extents until all slices are there. Then a version is committed that has the tables
and the log of the newest one, and this dense part; until then the version before has the one before
(``TableStore.go_on``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import xxhash

from portus.companions.embedding.moment import Moment
from portus.engine.copying.segments import memory
from portus.engine.format.checksum import DIGEST_SIZE, UNIT
from portus.engine.spec import Extent
from portus.reach.index.pool import PoolWriter
from portus.reach.versions.parts import StorageRows, part


class Slices:
    """A dense part in the making. One thread at a time."""

    def __init__(self, pool: PoolWriter, moment: Moment) -> None:
        """Begin to store what ``moment`` leaves, and reserve room for it. Raises ``MediumError``;
        then nothing is held."""
        self._pool: Final = pool
        self.moment: Final = moment
        self.indices: Final = np.array(sorted(moment.left), np.int64)
        self.count: Final = moment.sliced
        self.due = 1
        """How many are to be there before the next batch is committed."""
        self.done = 0
        self._held: Final[list[list[Extent]]] = []
        lengths = moment.length[self.indices].tolist()
        try:
            for length in lengths:
                self._held.append(pool.reserve(length) if length else [])
        except BaseException:
            self.release()
            raise
        self._extents: Final = [
            part(extents, 0, length) for extents, length in zip(self._held, lengths, strict=True)
        ]
        self._size: Final = -(-sum(lengths) // self.count)
        self._pieces: Final = self._cut(moment.address[self.indices].tolist(), lengths)
        self._piece: tuple[int, Extent, bool] | None = None
        """What is left of one that was begun."""
        self._hasher: Final = xxhash.xxh3_128()
        self._digests: Final[list[bytes]] = []

    @property
    def batch(self) -> int:
        """Return the batch that this dense part is of."""
        return self.moment.dense_batch

    @property
    def is_behind(self) -> bool:
        """True if a slice is due."""
        return self.done < min(self.due, self.count)

    @property
    def is_whole(self) -> bool:
        """True once all of it is durable."""
        return self.done == self.count

    def go_on(self) -> None:
        """Store the next slice; durable on return. Raises ``MediumError``."""
        self.done += 1
        room = None if self.is_whole else self._size
        stored = list(self._store(room))
        if stored:
            self._pool.medium.persist(stored)

    def rows(self) -> StorageRows:
        """Where it is, once it is whole."""
        digests = np.frombuffer(b"".join(self._digests), np.uint8).reshape(-1, DIGEST_SIZE)
        return StorageRows.over(self.indices, self._extents, digests)

    def release(self) -> None:
        """Let go of the room, which is free again but for what was committed."""
        for each in self._held:
            self._pool.release(each)
        self._held.clear()

    def _store(self, room: int | None) -> Iterator[Extent]:
        """Store so many bytes of what is left, or all; where they are."""
        while room is None or room:
            piece = self._piece or next(self._pieces, None)
            if piece is None:
                return
            address, extent, ends_unit = piece
            step = extent.length if room is None else min(room, extent.length)
            if step:
                data = memory(address, step)
                self._hasher.update(data)
                self._pool.medium.store(extent.offset, data)
                yield Extent(extent.offset, step)
            room = None if room is None else room - step
            rest = Extent(extent.offset + step, extent.length - step)
            self._piece = (address + step, rest, ends_unit) if rest.length else None
            if self._piece is None and ends_unit:
                self._digests.append(self._hasher.digest())
                self._hasher.reset()

    def _cut(self, addresses: list[int], lengths: list[int]) -> Iterator[tuple[int, Extent, bool]]:
        """Address, and place in the pool, of what is in one piece; whether a unit ends there."""
        for address, length, own in zip(addresses, lengths, self._extents, strict=True):
            if not length:
                yield 0, Extent(0, 0), True
            for start in range(0, length, UNIT):
                parts = part(own, start, min(start + UNIT, length))
                at = address + start
                for number, extent in enumerate(parts, 1):
                    yield at, extent, number == len(parts)
                    at += extent.length
