"""Tables that are trained in the pool itself, on memory that persists: undo in place.

Theory. A batch is committed at the price of its changes, without a copy of any table: the rows stay
where they are. So the bytes that an update is about to change are first copied to the log of the
version, as undo, and become durable there. ``log`` returns before the update writes. When the batch
ends, its cells are made durable in place. Then one entry commits it, with the dense part and the
new digests of the tables. Until that entry exists, a process that opens the pool restores the bytes
of the undo entries: see ``reach.index.in_place``, which has the rules.

The undo bytes of a cell must be from after the last update of the batch before, and from before the
first update of its own batch. So a cell is logged once in each batch, after the commit of the batch
before. Further changed cells are logged when they are found, before the update.

A full log is folded in: a new version has the tables in place, a new copy of the dense part, and a
new log. The same happens when all slices of a dense part are written. A mark, which stays, is a
copy of everything: nothing that another version or a reader relies on is changed in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.companions.embedding.fold import Fold
from portus.companions.embedding.moment import Bytes, Column, Moment, RowsThere, TensorLocation
from portus.companions.embedding.store import MARKS, TableStore
from portus.companions.model_log import Pieces
from portus.engine.copying.segments import Stop, memory
from portus.engine.format.checksum import DIGEST_SIZE, UNIT
from portus.engine.media.base import MappedMedium
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import PAGE, Extent
from portus.errors import UsageError
from portus.reach.index.commit_records import new_version
from portus.reach.index.in_place import (
    InPlaceReader,
    cell_digests,
    cell_size,
    cells_of,
    encode_sums,
    unit_sum,
    update_sum,
)
from portus.reach.index.log import Bunch, LogState, entry_size, read_log
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import InPlaceStorage
from portus.reach.media.pool import Extents
from portus.reach.versions.parts import StorageRows, rows_of

_FREE_SHARE: Final = 2
"""The share of a log that is free when a batch begins: one half."""


class PlacedStore(TableStore):
    """The state of one training with tables in place in its pool. One thread at a time."""

    in_place = True
    fold_from = 1.0  # not beside batches
    _spare = 2 * PAGE  # for the entries that `_make_room` names

    def __init__(self, pool: PoolWriter, log_bytes: int | None = None) -> None:
        """Open the pool as ``TableStore`` does, and undo the changes of an uncommitted batch."""
        self.places: Mapping[int, TensorLocation] = {}
        """Places of the tables of the newest version, by the index of the storage."""
        self._reserved: list[Extent] = []
        super().__init__(pool, log_bytes)

    def place(self, length: int, row: int) -> TensorLocation:
        """Reserve room for a tensor of ``length`` bytes, over 0, with rows of ``row`` bytes.

        The caller fills it. It belongs to the tensor from the next commit that contains it. Raises
        ``MediumError`` (ENOSPC) if there is no room in one piece.
        """
        [area] = self.pool.reserve(length, contiguous=True)
        self._reserved.append(area)
        return TensorLocation(Extent(area.offset, length), row, cell_size(length, row))

    def log(self, rows: Sequence[RowsThere]) -> None:
        """Make the bytes of rows durable as undo before they are changed, except those logged in
        this batch already.

        Raises ``MediumError``; ``UsageError`` if a batch needs more room than a log has.
        """
        found: list[tuple[TensorLocation, Column, Bytes]] = []
        for place, numbers in rows:
            if place.sums:  # else it is in no commit yet
                # Once in a batch: the bytes before its first update are restored
                # (decision 0178).
                cells = np.setdiff1d(
                    cells_of(numbers, place.row, place.cell), place.logged, assume_unique=True
                )
                if len(cells):
                    found.append((place, cells, self._read(place, cells)))
        if not found:
            return
        bunches = [Bunch(_offsets(place, cells), data) for place, cells, data in found]
        self._make_room(entry_size(0, [each.data.shape for each in bunches]) + self._spare)
        assert self._log is not None
        assert self._record is not None
        # Durable before the update writes a byte of these rows (decision 0178).
        self._log.append(bunches, b"", self._record.info.commit, undo=True)
        for place, cells, data in found:
            old, place.logged = place.logged, np.concatenate([place.logged, cells])
            place.old = place.old + cell_digests(cells, data)
            if len(old) and cells[0] < old[-1]:
                order = np.argsort(place.logged, kind="stable")
                place.logged = place.logged[order]
                place.old = [place.old[each] for each in order.tolist()]

    def commit(self, moment: Moment) -> None:
        """Commit as ``TableStore`` does: the current bytes of the moment's places, and the rest of
        it. Then write the slice that is due, and log the rows that were announced."""
        sums: dict[int, list[int]] = {}
        changed: list[NDArray[np.int64]] = []
        for index, place in moment.placed.items():
            if moment.rows is None or not place.sums:
                units = enumerate(self._units(place))
                sums[index] = [unit_sum(data, place.cell, rank) for rank, data in units]
                changed.append(np.array([[place.extent.offset, place.extent.length]]))
            else:
                sums[index] = self._new_sums(place)
                changed.append(_runs(place))
        if changed:
            # Before the entry that commits them: it must not be there without the rows
            # (decision 0178).
            self.pool.medium.persist(Extents(*np.concatenate(changed).T))
        for index, each in sums.items():
            moment.data[moment.digests[index]][:] = np.frombuffer(encode_sums(each), np.uint8)
        super().commit(moment)
        for index, place in moment.placed.items():
            place.sums = sums[index]
        for place in self.places.values():
            place.logged, place.old = np.empty(0, np.int64), []
        slices = self._slices
        while slices is not None and slices.is_behind:
            slices.go_on(Stop())
        if slices is not None and slices.is_whole:
            dense = slices.moment
            try:
                self._fold_in(
                    replace(moment, contents=dense.contents, dense_batch=dense.dense_batch)
                )
            finally:
                self._give_up_slices()
        self.log(moment.ahead)  # in the new log, if there is one by now

    def mark(self, batch: int, token: bytes, retire: Collection[int] = ()) -> None:
        """Keep a mark as ``TableStore`` does, but as a copy of everything."""
        if self._log is not None:
            self._log.look()
        moment = self._standing()
        image = Pieces(self.pool, np.arange(len(moment.data)), moment.data)
        try:
            while not image.is_whole:
                image.go_on(Stop())
            labels = Labels(model=MARKS, step=batch, token=token, contents=moment.contents)
            made = new_version(labels, rows_of([image.rows()], moment.length))
            self.pool.commit(made, (), retire)
        finally:
            image.release()

    def seal(self) -> None:
        """Seal the log as ``TableStore`` does. If an uncommitted batch has begun, leave the log as
        it is: the next process that opens the pool restores the bytes of its undo entries."""
        begun = any(len(place.logged) for place in self.places.values())
        if not begun and self._log is not None and self._log.room > PAGE:
            super().seal()

    # --- a batch in the log ---------------------------------------------------------------------

    def _append(self, moment: Moment) -> bool:
        """Commit all that is not in place by an entry of the log. Return False if an entry cannot
        do it."""
        return dict(moment.placed) == self.places and super()._append(moment)

    def _new_sums(self, place: TensorLocation) -> list[int]:
        """Return the digests of units after a batch that changed the logged cells."""
        new = cell_digests(place.logged, self._read(place, place.logged))
        sums, unit = list(place.sums), place.logged // (UNIT // place.cell)
        first, ends = np.unique(unit, return_index=True)
        bounds = [*ends.tolist(), len(unit)]
        for rank, low, high in zip(first.tolist(), bounds, bounds[1:], strict=False):
            sums[rank] = update_sum(sums[rank], place.old[low:high], new[low:high])
        return sums

    def _make_room(self, size: int) -> None:
        """Make room in the log for an entry of ``size`` bytes and two more: one that ends an undo,
        or seals the log, and one that says that a newer version has the tables."""
        log = self._log
        assert log is not None
        begins = not any(len(place.logged) for place in self.places.values())
        if begins and log.room < max(size, log.log.extent.length // _FREE_SHARE):
            self._fold_in(self._standing())
            assert self._log is not None
            log = self._log
        if log.room < size:
            raise UsageError(
                f"{self.pool.medium.info.name}: expected a batch whose changed rows fit into a log "
                f"of {log.log.extent.length} bytes, found another {size} bytes of them; nothing "
                "was updated: give more log_bytes"
            )

    # --- a new version of all but the tables ----------------------------------------------------

    def _fold_of(self, moment: Moment) -> Fold:
        """Return a fold of a moment whose tables stay in place, as does a dense part with all its
        slices."""
        kept, in_place, before = list[StorageRows](), list[InPlaceStorage](), self._record
        for index, place in sorted(moment.placed.items()):
            units = moment.data[moment.digests[index]].reshape(-1, DIGEST_SIZE).copy()
            known = [i for i, each in self.places.items() if each is place]
            born = int(before.storages["born"][known[0]]) if known and before is not None else 0
            kept.append(StorageRows.over(np.array([index]), [[place.extent]], units, born))
            in_place.append(InPlaceStorage(index, place.cell, moment.digests[index]))
        if self._slices is not None and self._slices.is_whole:
            kept.append(self._slices.rows())
        return Fold(self.pool, moment, self._log_length(int(moment.length.sum())), kept, in_place)

    def _fold_in(self, moment: Moment) -> None:
        before, record = self._log, self._record
        super()._fold_in(moment)
        self.places = dict(moment.placed)
        for area in self._reserved:
            self.pool.release([area])
        self._reserved.clear()
        if before is not None and record is not None and before.room >= PAGE:
            # A reader of the old version learns that a newer one has its tables.
            before.store([], b"", record.info.commit, undo=True)

    def _standing(self) -> Moment:
        """Return the committed state as a moment. No update may have begun since."""
        record = self._record
        assert record is not None, "a moment of nothing"
        assert record.log is not None
        there = InPlaceReader(self.pool.medium, record, read_log(self.pool.medium, record))
        data = list[Bytes]()
        for index in range(len(record.storages)):
            place = self.places.get(index)
            if place is None:
                data.append(np.frombuffer(there.content(index), np.uint8))
            elif isinstance(self.pool.medium, MappedMedium):
                address = self.pool.medium.address(place.extent)
                data.append(np.frombuffer(memory(address, place.extent.length), np.uint8))
            else:
                units = b"".join(map(bytes, self._units(place)))
                data.append(np.frombuffer(units, np.uint8))
        digests = {each.storage: each.digests for each in record.log.in_place}
        return Moment(
            batch=self.batch,
            contents=self._contents,
            data=data,
            rows=None,
            dense_batch=self._dense_batch,
            placed=self.places,
            digests=digests,
        )

    # --- bytes of places ------------------------------------------------------------------------

    def _read(self, place: TensorLocation, cells: Column) -> Bytes:
        """Return copies of cells of a place, as they are now."""
        medium, start = self.pool.medium, place.extent.offset
        if isinstance(medium, MappedMedium):
            data = memory(medium.address(place.extent), place.extent.length)
            found: Bytes = np.frombuffer(data, np.uint8).reshape(-1, place.cell)[cells]
            return found
        found = np.empty((len(cells), place.cell), np.uint8)
        for row, number in enumerate(cells.tolist()):
            medium.load(start + number * place.cell, found[row].data)
        return found

    def _units(self, place: TensorLocation) -> Iterator[memoryview]:
        """Yield all units of a place; each is valid until the next."""
        held = memoryview(bytearray(min(UNIT, place.extent.length)))
        for at in range(0, place.extent.length, UNIT):
            target = held[: min(UNIT, place.extent.length - at)]
            self.pool.medium.load(place.extent.offset + at, target)
            yield target

    # --- opening --------------------------------------------------------------------------------

    def _open(self) -> LogState:
        logged = super()._open()
        record, log = self._record, self._log
        if record is None or log is None or record.log is None:
            return logged
        medium = self.pool.medium
        self.batch = record.info.step
        bunches = [bunch for entry in logged.undo for bunch in entry.bunches]
        for bunch in bunches:
            for offset, cell in zip(bunch.offset.tolist(), bunch.data, strict=True):
                medium.store(offset, cell.data)
        if bunches:
            lengths = [np.full_like(each.offset, each.data.shape[1]) for each in bunches]
            offsets = [each.offset for each in bunches]
            medium.persist(Extents(np.concatenate(offsets), np.concatenate(lengths)))
        if logged.undo:
            log.append([], b"", record.info.commit)  # only now that they are restored
        there, places = InPlaceReader(medium, record, logged), dict[int, TensorLocation]()
        counts = {each.storage: each.shape[0] for each in self.tensors() if each.shape}
        for each in record.log.in_place:
            [extent] = record.storage_extents(each.storage)
            row, sums = extent.length // counts[each.storage], there.sums(each.storage)
            places[each.storage] = TensorLocation(extent, row, each.cell, sums)
        self.places = places
        return logged


def _offsets(place: TensorLocation, cells: Column) -> Column:
    found: Column = place.extent.offset + cells * place.cell
    return found


def _runs(place: TensorLocation) -> NDArray[np.int64]:
    """Return the extents of the logged cells in the pool, with neighbours joined: offset and length
    of each, of shape (runs, 2)."""
    cells = place.logged
    first = np.flatnonzero(np.diff(cells, prepend=-2) != 1)
    count = np.diff(first, append=len(cells))
    return np.stack([place.extent.offset + cells[first] * place.cell, count * place.cell], 1)
