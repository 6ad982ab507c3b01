"""Folding a log in, piece by piece, while batches go on.

Theory. A fold is an image of all storages in new extents, and a new log. The image is copied from
the memory that training changes meanwhile, so a row in it is of any batch since the fold began, or
torn by the update that ran beside the copy. That does no harm, since the new log gets an entry for
each batch since then, with the rows that it changed: over the image they make the newest batch.
So the version may be committed with the entry of a batch that ended after all was copied: an update
that ran beside the last piece is in that one. These entries count by their number, since they stand
on no commit of their own.

Nothing reaches what a fold writes before that commit, and until then each batch is an entry of the
log that is folded in as well. So a crash, or a fold that is given up, costs nothing but its work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from portus.companions.embedding.moment import Moment
from portus.engine.copying.local import copy
from portus.engine.copying.segments import Digests, Source, Stop
from portus.engine.format.checksum import UNIT
from portus.engine.spec import Extent
from portus.reach.index.commit_records import NewVersion
from portus.reach.index.log import Bunch, LogWriter, entry_size
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionLog
from portus.reach.versions.parts import StorageRows, part, rows_of

PIECE: Final = UNIT
"""Bytes that are copied and persisted at once, and so what a batch may have to wait for."""


class Fold:
    """An image and a log in the making. One thread at a time."""

    def __init__(self, pool: PoolWriter, moment: Moment, log_length: int) -> None:
        """Begin to fold the state at ``moment`` and the batches after it, and reserve room for all
        of it. Raises ``MediumError``; then nothing is held."""
        self._pool: Final = pool
        self._length: Final = moment.length
        self._held: Final[list[list[Extent]]] = []
        self._alive: object = moment.alive
        self._born: Final = pool.catalogue().root.sequence + 1
        """Not before the pages were reserved, and not after the commit."""
        try:
            for length in moment.length.tolist():
                self._held.append(pool.reserve(length) if length else [])
            [area] = pool.reserve(log_length, contiguous=True)
            self._held.append([area])
        except BaseException:
            self.release()
            raise
        # A name of its own: remains of other logs in these pages count for nothing.
        log = VersionLog(area, os.urandom(16), self._born, 0)
        self._log: Final = LogWriter(pool.medium, log, look=pool.glance)
        self._extents: Final = [
            part(extents, 0, length)
            for extents, length in zip(self._held, moment.length.tolist(), strict=False)
        ]
        self._pieces: Final = list(
            _pieces(moment.address.tolist(), moment.length.tolist(), self._extents)
        )
        self._digests: Final[list[Digests]] = []
        self._waiting: Final[list[tuple[list[Bunch], object]]] = []
        """What is to become entries, and what has the memory."""
        self._queued = 0
        """Bytes of these entries."""
        self._persisted = 0
        """Bytes of the log."""
        self.batch = moment.batch
        self.dense_batch = moment.dense_batch
        self.contents = moment.contents
        self.done = 0
        """Bytes of the image."""

    @property
    def is_whole(self) -> bool:
        """True once all of the image is durable."""
        return len(self._digests) == len(self._pieces)

    @property
    def size(self) -> int:
        """Bytes of the image."""
        return int(self._length.sum())

    def add(self, moment: Moment) -> bool:
        """A batch since. False if the log has no room for it: then give the fold up."""
        if not self._add(moment.bunches(self._extents.__getitem__), moment.alive):
            return False
        self.batch = moment.batch
        if not moment.left:
            self.contents, self.dense_batch = moment.contents, moment.dense_batch
        return True

    def add_dense(self, moment: Moment) -> bool:
        """The dense part that a batch had left, and that was committed since. As ``add``."""
        if moment.dense_batch > self.dense_batch:
            if not self._add(moment.dense_bunches(self._extents), moment.alive):
                return False
            self.contents, self.dense_batch = moment.contents, moment.dense_batch
        return True

    def go_on(self, stop: Stop) -> None:
        """Copy the next piece, if there is one, and what was added since the one before; durable on
        return. ``stop``: says whether somebody waits. Raises ``MediumError``."""
        stored = self._store_entries()
        if not self.is_whole:
            piece = self._pieces[len(self._digests)]
            digests = copy(self._pool.medium, piece, stop)
            stored += [extent for source in piece for extent in source.extents]
            self._pool.medium.persist(stored)
            self._digests.append(digests)
            self.done += sum(source.length for source in piece)
        elif stored:
            self._pool.medium.persist(stored)
        self._persisted = self._log.used_extent.length

    def version(self, model: str, stop: Stop) -> tuple[NewVersion, list[Extent]]:
        """The version that it makes, and what of it is to be persisted yet. Copies all that is
        missing. No update is running, nor has one run since the batch that was added last."""
        while not self.is_whole:
            self.go_on(stop)
        self._store_entries()
        units = np.concatenate([np.empty((0, 16), np.uint8), *self._digests])
        every = np.arange(len(self._length))
        group = StorageRows.over(every, self._extents, units, self._born)
        storages, extents, digests = rows_of([group], self._length)
        new = NewVersion(
            model=model,
            step=self.batch,
            token=os.urandom(16),
            contents=self.contents,
            storages=storages,
            extents=extents,
            units=digests,
            log=replace(self._log.log, entries=self._log.count),
            has_bunches=True,
        )
        return new, self._unpersisted_extents()

    def log(self, committed: VersionLog) -> LogWriter:
        """The log, to go on with, as the version that was committed has it."""
        self._log.log = committed
        return self._log

    def release(self) -> None:
        """Let go of the room, which is free again but for what was committed."""
        for each in self._held:
            self._pool.release(each)
        self._held.clear()
        self._alive = None

    def _add(self, bunches: list[Bunch], alive: object) -> bool:
        size = entry_size([], 0, [each.data.shape for each in bunches])
        if self._log.used_extent.length + self._queued + size > self._log.log.extent.length:
            return False
        self._waiting.append((bunches, alive))
        self._queued += size
        return True

    def _store_entries(self) -> list[Extent]:
        for bunches, _ in self._waiting:
            self._log.advance(self._log.store([], b"", self._born, bunches))
        self._waiting.clear()
        self._queued = 0
        return self._unpersisted_extents()

    def _unpersisted_extents(self) -> list[Extent]:
        used = self._log.used_extent
        rest = Extent(used.offset + self._persisted, used.length - self._persisted)
        return [rest] if rest.length else []


def _pieces(
    addresses: Sequence[int], lengths: Sequence[int], extents: Sequence[Sequence[Extent]]
) -> Iterator[list[Source]]:
    """All storages as pieces: units of long ones, and short ones together. Each has one digest."""
    piece: list[Source] = []
    size = 0
    for address, length, own in zip(addresses, lengths, extents, strict=True):
        for start in range(0, max(1, length), UNIT):
            step = min(UNIT, length - start)
            if piece and size + step > PIECE:
                yield piece
                piece, size = [], 0
            inside = tuple(part(own, start, start + step))
            piece.append(Source(address + start if step else 0, step, inside))
            size += step
    if piece:
        yield piece
