"""The state of a training in a pool, committed batch by batch at the price of its changes.

Theory. It is one version with a log, like a shelf: the tables and all other storages as they were
at its commit, and over them an entry for each batch since. An entry has the new rows of the tables,
and all of the dense part; or none of it, if it may be older than the tables. So tables and dense
part are one commit, with one persist, and neither can be newer than the other.

A dense part that may be older than the tables is in no entry. It is written in slices beside
batches (``pieces``). When all are there, a version is committed that has them. Its other storages
and its log are those of the newest version, whose entries so far it counts by their number.

A log that fills is folded in while batches continue (``fold``). Then a batch is a new version, with
new extents and a new log, which has the entries of the batches meanwhile.

A mark is another version, of a model of its own. It stands for one batch as long as it is kept. It
has the storages of the newest version, its log, and the number of entries at that time. Later
entries are based on the commit of the newest version, not on that of the mark, so the mark does not
include them. All that a mark reaches stays, whatever is folded in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from portus.companions.embedding.fold import Fold, Slices
from portus.companions.embedding.moment import Moment
from portus.companions.model_log import ModelWithLog
from portus.engine.copying.segments import Stop
from portus.engine.image.key_paths import storages_in
from portus.engine.media.file_calls import OUT_OF_SPACE
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import TensorSpec
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.index.catalogue import MARKS as MARKS
from portus.reach.index.commit_records import new_version
from portus.reach.index.log import LogState
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.versions.parts import StorageRows, share

MODEL: Final = "embedding"
"""The model of the tables, and of the dense part of their training."""


class TableStore(ModelWithLog[PoolWriter]):
    """The state of one training in a pool. One thread at a time."""

    model = MODEL
    _beside = (MARKS,)
    _kind = "tables of a training"
    _log_min = 64 << 20
    _log_share = 2
    fold_from = 0.75
    """The used share of the log at which it is folded in."""

    in_place = False
    """True if tables are changed in the pool itself: see ``in_pool``."""

    def __init__(self, pool: PoolWriter, log_bytes: int | None = None) -> None:
        """Read the log, and make its valid entries durable.

        log_bytes: the size of the log; None: a sensible one.
        Raises ``CorruptionError``, ``MediumError``; ``UsageError`` if the pool holds other data.
        """
        super().__init__(pool, log_bytes)
        self._alike: tuple[bytes, object] = b"", None
        """Contents with the same tensors, and these, if they are known."""
        self._entry_bytes = 0
        """Bytes of the entry of the last batch."""
        self._fold: Fold | None = None
        """What the log is being folded into."""
        self._has_no_room = False
        """True if there was no room to begin a fold; the log is used up first."""
        self._slices: Slices | None = None
        """A dense part that is being written."""
        self.batch = 0
        """The batch that was committed last, or loaded."""
        self._dense_batch = 0
        """The batch of the dense part that was committed last, as far as it is known."""
        self._open()

    def marks(self) -> Sequence[VersionEntry]:
        """Return all marks, oldest first."""
        model = self.pool.catalogue().models.get(MARKS)
        return () if model is None else model

    def image_of(self, mark: VersionEntry) -> int:
        """Return the first byte of the image of a mark in the pool. It is equal for marks that
        share an image and a log, and for the newest version until the log is folded in."""
        record = self.pool.record(mark)
        if record.log is not None:
            return record.log.extent.offset
        extents = (record.storage_extents(index) for index in range(len(record.storages)))
        return min((each.offset for found in extents for each in found), default=0)

    def commit(self, moment: Moment) -> None:
        """Commit a moment; durable on return. Raises ``MediumError``; then earlier commits stay,
        and ``rows`` of the next moment must be None. Raises ``CorruptionError`` if another program
        changed the pool."""
        fold = self._fold
        if fold is not None and not (self._is_next(moment) and fold.add(moment)):
            self._give_up_fold()
            fold = None
        if fold is not None and fold.image.is_whole:
            self._replace(fold)
        elif self._append(moment):
            if fold is None:
                self._begin_fold(moment)
        elif fold is not None:
            self._replace(fold)
        else:
            self._fold_in(moment)
        self.batch = moment.batch
        self._slice_on(moment)

    @property
    def has_more(self) -> bool:
        """True while ``go_on`` has work to do."""
        if self._slices is not None and self._slices.is_behind:
            return True
        return self._fold is not None and not self._fold.image.is_whole

    @property
    def is_behind(self) -> bool:
        """True if ``go_on`` must run before the next batch: a slice is due, or the log fills faster
        than it is folded in, so that a batch would have to wait for all the rest."""
        if self._slices is not None and self._slices.is_behind:
            return True
        fold, log = self._fold, self._log
        if fold is None or log is None or fold.image.is_whole:
            return False
        begin = log.log.extent.length * self.fold_from
        # When the next one is there too.
        filled = log.used_extent.length + self._entry_bytes - begin
        return fold.image.done * (log.log.extent.length - begin) < fold.image.size * filled

    def go_on(self, stop: Stop) -> None:
        """Write the slice that is due, or fold in the next piece. ``stop``: says whether a batch
        waits. The next batch may change its tables meanwhile. Raises as ``commit``."""
        if self._log is not None:
            self._log.look()
        slices = self._slices
        if slices is not None and slices.is_behind:
            slices.go_on(stop)
            if slices.is_whole:
                self._commit_slices(slices)
        elif self._fold is not None and not self._fold.image.is_whole:
            self._fold.go_on(stop)

    def give_up(self) -> None:
        """Discard pieces that are not committed: training continues from another state than
        theirs."""
        self._give_up_fold()
        self._give_up_slices()

    def mark(self, batch: int, token: bytes, retire: Collection[int] = ()) -> None:
        """Keep the committed state as the version of ``token``, and retire other marks, by their
        ids; durable on return. Raises as ``commit``."""
        record, log = self._record, self._log
        assert record is not None, "a mark of nothing"
        assert log is not None
        log.look()
        now = replace(log.log, entries=log.count)
        labels = Labels(model=MARKS, step=batch, token=token, contents=self._contents)
        rows = record.storages, record.extents, record.units
        self.pool.commit(new_version(labels, rows, now), (), retire)

    # --- a batch in the log ---------------------------------------------------------------------

    def _is_next(self, moment: Moment) -> bool:
        """Return whether a moment is a change of the committed state, and not all of it again."""
        record = self._record
        if record is None or moment.rows is None:
            return False
        if not np.array_equal(moment.length, record.length):
            return False
        # Contents are parsed only if it is not known otherwise whether they name the same
        # tensors: parsing takes longer than many batches do.
        contents, tensors = self._alike
        if moment.contents in (self._contents, contents):
            return True
        if tensors is not None and moment.tensors == tensors:
            return True
        if _storages_of(self._contents) != _storages_of(moment.contents):
            return False
        self._alike = moment.contents, moment.tensors
        return True

    def tensors(self) -> list[TensorSpec]:
        """Return the tensors of what is committed."""
        return _storages_of(self._contents)[1]

    def _append(self, moment: Moment) -> bool:
        """Commit by an entry of the log. Return False if an entry cannot do it."""
        log, record = self._log, self._record
        if log is None or record is None or not self._is_next(moment):
            return False
        bunches = moment.bunches(record.storage_extents)
        contents = self._contents if moment.left else moment.contents
        # Rows and dense part in one entry: with two stores a crash leaves two moments, and a load
        # would have to look for a pair (decision 0170).
        size = self._append_entry(bunches, contents)
        if not size:
            return False
        self._entry_bytes = size
        if not moment.left:
            self._dense_batch = moment.dense_batch
        return True

    # --- a dense part in slices -----------------------------------------------------------------

    def _slice_on(self, moment: Moment) -> None:
        """Count the next slice as due after a batch was committed: of a dense part that begins with
        the batch, or of an earlier one."""
        slices = self._slices
        if slices is not None and slices.moment.dense_batch <= self._dense_batch:  # folded in
            self._give_up_slices()
            slices = None
        if slices is not None:
            slices.due += 1
        elif moment.sliced and self._dense_batch < moment.dense_batch:
            self._slices = Slices(self.pool, moment)

    def _commit_slices(self, slices: Slices) -> None:
        """Commit by a version with a dense part whose slices are all written."""
        record, log = self._record, self._log
        assert record is not None
        assert log is not None
        others, dense = np.setdiff1d(np.arange(len(record.storages)), slices.indices), slices.moment
        groups: list[StorageRows] = [slices.rows(), share(record, others)]
        try:
            self._commit_version(self.batch, dense.contents, groups, dense.length, log)
        finally:
            self._give_up_slices()
        self._dense_batch = dense.dense_batch
        if self._fold is not None and not self._fold.add_dense(dense):
            self._give_up_fold()

    def _give_up_slices(self) -> None:
        if self._slices is not None:
            self._slices.release()
            self._slices = None

    # --- a new version --------------------------------------------------------------------------

    def _begin_fold(self, moment: Moment) -> None:
        """Begin to fold the committed state in, ``moment`` included, if the log is filling. Do
        nothing if there is no room now: readers may hold some."""
        log = self._log
        if log is None or self._has_no_room:
            return
        if log.used_extent.length <= log.log.extent.length * self.fold_from:
            return
        try:
            self._fold = self._fold_of(moment)
        except MediumError as error:
            if error.errno not in OUT_OF_SPACE:
                raise
            self._has_no_room = True

    def _fold_of(self, moment: Moment) -> Fold:
        """Return a fold that begins with a moment. Raises ``MediumError``."""
        return Fold(self.pool, moment, self._log_length(int(moment.length.sum())))

    def _fold_in(self, moment: Moment) -> None:
        """Commit a moment by a version with all of its state, and a new log."""
        self._replace(self._fold_of(moment))  # no other thread continues it

    def _replace(self, fold: Fold) -> None:
        """Commit by the version of a fold that contains the moment."""
        try:
            if self._log is not None:
                self._log.look()
            groups, stored = fold.finish(Stop())
            self._commit_version(fold.batch, fold.contents, groups, fold.length, fold.log, stored)
        finally:
            self._fold = None
            fold.release()
        self._dense_batch, self._alike = fold.dense_batch, (b"", None)
        self._has_no_room = False

    def _give_up_fold(self) -> None:
        if self._fold is not None:
            self._fold.release()
            self._fold = None

    # --- opening --------------------------------------------------------------------------------

    def _read_version(self, record: VersionRecord, logged: LogState) -> None:
        assert record.log is not None
        if bool(record.log.in_place) != self.in_place:
            raise UsageError(
                f"{self.pool.medium.info.name}: expected tables with in_place={self.in_place}, "
                f"found some that were protected with in_place={not self.in_place}; pass that "
                "again, or use another pool"
            )


def _storages_of(contents: bytes) -> tuple[set[str], list[TensorSpec]]:
    """Return the storages and the tensors that the contents of tables name."""
    found = storages_in(contents)
    if found is None:
        raise CorruptionError("the contents of tables are no pickle of torch")
    return found
