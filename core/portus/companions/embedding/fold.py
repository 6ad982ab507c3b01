"""Storages on their way into new extents, and the folding of a log into a new version, piece by
piece, while batches continue.

Theory. Nothing reaches the new extents until all pieces are durable; then a version that has them
is committed. So a crash before that, or storages that are given up, cost nothing but the work.

A dense part that may be older than the tables enters the pool that way, with a slice in each batch.
It was copied in memory when its batch ended. So training continues without changing it.

A fold is such an image of all storages, and a new log. The image is copied from memory that
training changes meanwhile. So a row in it may be of any batch since the fold began, or torn by an
update that ran beside the copy. That does no harm: the new log gets an entry for each batch since
then, with the rows that it changed, and image and entries together make the newest batch. So the
version may be committed with the entry of a batch that ended after all was copied: an update that
ran beside the last piece is in that entry. These entries count by their number, since they are not
based on a commit of their own. Until then each batch is also an entry of the old log.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from portus.companions.embedding.moment import Moment
from portus.companions.model_log import PIECE, Pieces
from portus.engine.copying.segments import Stop
from portus.engine.spec import Extent
from portus.reach.index.log import Bunch, LogWriter, entry_size
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import InPlaceStorage, VersionLog
from portus.reach.versions.parts import StorageRows


class Slices(Pieces):
    """The dense part of a moment, in ``moment.sliced`` slices, one for each batch from then on."""

    def __init__(self, pool: PoolWriter, moment: Moment) -> None:
        """Begin to store the storages that ``moment`` leaves, and reserve room for them. Raises
        ``MediumError``; then nothing is held."""
        indices = np.array(sorted(moment.left), np.int64)
        data = [moment.data[each] for each in indices]
        size = max(1, min(PIECE, sum(map(len, data)) // moment.sliced))
        super().__init__(pool, indices, data, size)
        self.moment: Final = moment
        self.due = 1
        """Slices to write before the next batch is committed."""

    @property
    def is_behind(self) -> bool:
        """True if a slice is due."""
        count = self.moment.sliced
        return not self.is_whole and (self.due >= count or self.done * count < self.size * self.due)


class Fold:
    """An image and a log in the making. One thread at a time."""

    def __init__(
        self,
        pool: PoolWriter,
        moment: Moment,
        log_length: int,
        kept: Sequence[StorageRows] = (),
        in_place: Sequence[InPlaceStorage] = (),
    ) -> None:
        """Begin to fold the state at ``moment`` and the batches after it. Reserve room for all of
        it, except storages that are ``kept`` in place, such as those changed ``in_place``. Raises
        ``MediumError``; then nothing is held."""
        self._pool: Final = pool
        self.length: Final = moment.length
        self._kept: Final = kept
        self._born: Final = pool.catalogue().root.sequence + 1
        """A commit number between the reservation of the pages and the commit."""
        there = [index for each in kept for index in each.indices.tolist()]
        afresh = np.setdiff1d(np.arange(len(moment.data)), there)
        data = [moment.data[each] for each in afresh]
        self.image: Final = Pieces(pool, afresh, data, PIECE)
        try:
            [self._area] = pool.reserve(log_length, contiguous=True)
        except BaseException:
            self.image.release()
            raise
        # A name of its own: remains of other logs in these pages count for nothing.
        log = VersionLog(self._area, os.urandom(16), self._born, 0, tuple(in_place))
        self.log: Final = LogWriter(pool.medium, log, look=pool.glance)
        self._persisted = 0
        """Bytes of the log that are durable."""
        self.batch = moment.batch
        self.dense_batch = moment.dense_batch
        self.contents = moment.contents

    def add(self, moment: Moment) -> bool:
        """Add a later batch. Return False if the log has no room for it: then give the fold up."""
        if not self._add(moment.bunches(self.image.extents.__getitem__)):
            return False
        self.batch = moment.batch
        if not moment.left:
            self.contents, self.dense_batch = moment.contents, moment.dense_batch
        return True

    def add_dense(self, moment: Moment) -> bool:
        """Add a dense part that earlier moments left out, and that was committed since. Return as
        ``add``."""
        if moment.dense_batch > self.dense_batch:
            extents = self.image.extents
            dense = [b for each in sorted(moment.left) for b in moment.whole(each, extents[each])]
            if not self._add(dense):
                return False
            self.contents, self.dense_batch = moment.contents, moment.dense_batch
        return True

    def go_on(self, stop: Stop) -> None:
        """Copy the next piece; it and all additions are durable on return. ``stop``: says whether a
        batch waits. Raises ``MediumError``."""
        used = self.log.used_extent.length
        self.image.go_on(stop, self._unpersisted_extents())
        self._persisted = used

    def finish(self, stop: Stop) -> tuple[list[StorageRows], list[Extent]]:
        """Copy all missing pieces. Return the rows of all storages, and the extents that are still
        to be persisted. No update may run, nor may one have run since the last batch was added."""
        while not self.image.is_whole:
            self.go_on(stop)
        return [self.image.rows(self._born), *self._kept], self._unpersisted_extents()

    def release(self) -> None:
        """Release the reserved room. All that was not committed becomes free."""
        self.image.release()
        self._pool.release([self._area])

    def _add(self, bunches: list[Bunch]) -> bool:
        if entry_size(0, [each.data.shape for each in bunches]) > self.log.room:
            return False
        self.log.advance(self.log.store(bunches, b"", self._born))
        return True

    def _unpersisted_extents(self) -> list[Extent]:
        used = self.log.used_extent
        rest = Extent(used.offset + self._persisted, used.length - self._persisted)
        return [rest] if rest.length else []
