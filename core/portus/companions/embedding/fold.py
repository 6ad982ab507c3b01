"""The folding of a log into a new version, piece by piece, while batches continue.

Theory. A fold is an image of all storages in new extents (``pieces``), and a new log. The image is
copied from memory that training changes meanwhile. So a row in it may be of any batch since the
fold began, or torn by an update that ran beside the copy. That does no harm: the new log gets an
entry for each batch since then, with the rows that it changed, and image and entries together make
the newest batch. So the version may be committed with the entry of a batch that ended after all was
copied: an update that ran beside the last piece is in that entry. These entries count by their
number, since they are not based on a commit of their own.

Nothing reaches the pages of a fold before that commit, and until then each batch is also an entry
of the old log. So a crash, or a fold that is given up, costs nothing but its work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from portus.companions.embedding.moment import Column, Moment
from portus.companions.embedding.pieces import Pieces
from portus.engine.copying.segments import Stop
from portus.engine.spec import Extent
from portus.reach.index.commit_records import NewVersion
from portus.reach.index.log import Bunch, LogWriter, entry_size
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import InPlaceStorage, VersionLog
from portus.reach.versions.parts import StorageRows, rows_of


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
        self._length: Final = moment.length
        self._kept: Final = kept
        self._born: Final = pool.catalogue().root.sequence + 1
        """A commit number between the reservation of the pages and the commit."""
        there = [index for each in kept for index in each.indices.tolist()]
        afresh = np.setdiff1d(np.arange(len(moment.length)), there)
        self.image: Final = Pieces(pool, moment, afresh)
        try:
            [self._area] = pool.reserve(log_length, contiguous=True)
        except BaseException:
            self.image.release()
            raise
        # A name of its own: remains of other logs in these pages count for nothing.
        log = VersionLog(self._area, os.urandom(16), self._born, 0, tuple(in_place))
        self._log: Final = LogWriter(pool.medium, log, look=pool.glance)
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
            if not self._add(moment.dense_bunches(self.image.extents)):
                return False
            self.contents, self.dense_batch = moment.contents, moment.dense_batch
        return True

    def go_on(self, stop: Stop) -> None:
        """Copy the next piece; it and all additions are durable on return. ``stop``: says whether a
        batch waits. Raises ``MediumError``."""
        used = self._log.used_extent.length
        self.image.go_on(stop, self._unpersisted_extents())
        self._persisted = used

    def version(self, model: str, stop: Stop) -> tuple[NewVersion, list[Extent]]:
        """Return the version of the fold, and the extents that are still to be persisted. Copies
        all missing pieces. No update may run, nor may one have run since the last batch was added.
        """
        while not self.image.is_whole:
            self.go_on(stop)
        log = replace(self._log.log, entries=self._log.count)
        groups = [self.image.rows(self._born), *self._kept]
        new = version_of(model, self.batch, self.contents, groups, self._length, log)
        return new, self._unpersisted_extents()

    def log(self, committed: VersionLog) -> LogWriter:
        """Return the log as the committed version has it, ready for more entries."""
        self._log.log = committed
        return self._log

    def release(self) -> None:
        """Release the reserved room. All that was not committed becomes free."""
        self.image.release()
        self._pool.release([self._area])

    def _add(self, bunches: list[Bunch]) -> bool:
        if entry_size([], 0, [each.data.shape for each in bunches]) > self._log.room:
            return False
        self._log.advance(self._log.store([], b"", self._born, bunches))
        return True

    def _unpersisted_extents(self) -> list[Extent]:
        used = self._log.used_extent
        rest = Extent(used.offset + self._persisted, used.length - self._persisted)
        return [rest] if rest.length else []


def version_of(
    model: str,
    batch: int,
    contents: bytes,
    groups: list[StorageRows],
    lengths: Column,
    log: VersionLog | None,
    token: bytes | None = None,
) -> NewVersion:
    """Return a version of storages of ``lengths``, each in one group, to be committed."""
    storages, extents, units = rows_of(groups, lengths)
    return NewVersion(
        model=model,
        step=batch,
        token=os.urandom(16) if token is None else token,
        contents=contents,
        storages=storages,
        extents=extents,
        units=units,
        log=log,
        has_bunches=True,
    )
