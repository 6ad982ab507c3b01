"""The moment of a batch that has ended, copied so that training may continue.

The rows that changed, and the dense part, are copied. A table that is taken whole is not copied,
and stays unchanged until the moment is durable. If the dense part is written in slices, the moments
of some batches have the copy of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from portus.companions.embedding.mapping import MappedTables
from portus.companions.embedding.moment import NO_ROWS, Bytes, Moment, Rows, RowsThere
from portus.companions.embedding.tables import ProtectedTraining, Table, copy_rows, settings_of
from portus.engine.spec import TensorSpec
from portus.engine.state.pickling import PickledState
from portus.engine.state.walk import walk
from portus.reach.pools.weights_only import LoadCheck, pickle_for_pool

_SLICES_SHARE: Final = 4
"""The share of the batches of a gap that write a slice of the dense part: one of so many."""


class Moments:
    """The moments of one training. For the training thread alone."""

    def __init__(
        self,
        training: ProtectedTraining,
        mapped: MappedTables | None,
        *,
        extra: Callable[[], object] | None,
        every: int,
    ) -> None:
        """every: the dense part stays fewer than this many batches older than the tables."""
        self._training: Final = training
        self._mapped: Final = mapped
        self._extra: Final = extra
        self._every: Final = every
        self._slices: Final = 0 if every == 1 else max(1, every // _SLICES_SHARE)
        """The number of slices of the dense part; 0: one piece, in the entry of its batch."""
        self.dense: _DensePart | None = None
        """The dense part that was taken last, if it is written in slices."""
        self._loadable: Final = LoadCheck()
        self._pickle = b""
        self._tensors: tuple[TensorSpec, ...] = ()
        """Pickle and tensors of the state that was taken last."""
        # In a storage of its own, so that a batch can replace it in an older dense part.
        self._counter: Final = torch.tensor(0, device="cpu")
        self.is_whole = True
        """True if the next moment takes all tables whole."""
        self.is_collecting = False
        """True while a moment requests states, which then include tables."""
        self.announced: Mapping[int, torch.Tensor] = {}
        """Rows that the next batch will update, as far as it is known."""
        self._before: tuple[_DensePart | None, bool, Mapping[int, torch.Tensor]] = None, True, {}
        """The values before the last moment, for ``take_again``."""
        self._said: object = None
        """The result of ``extra`` for the last moment."""
        self.settings = ""
        """Settings of the optimizers in the state of the last moment."""

    def let_go(self) -> None:
        """Forget how the last moment was taken: it is not taken again."""
        self._before, self._said = (None, True, {}), None

    def take_again(self, batch: int, *, afresh: bool) -> Moment:
        """Return the moment of a batch again, in place of the last one, which is discarded. afresh:
        call ``extra`` again."""
        self.dense, was_whole, self.announced = self._before
        self.is_whole = self.is_whole or was_whole
        return self.take(batch, asks=afresh)

    def take(self, batch: int, *, asks: bool = True) -> Moment:
        """Return the moment of a batch, with the changed rows and the dense part copied. asks: call
        ``extra``, instead of using its last result."""
        mapped, dense = self._mapped, self.dense
        self.settings = settings_of(self._training.optimizers)
        self._before = dense, self.is_whole, self.announced
        if dense is not None and self._leaves(dense, batch):
            data = [*dense.moment.data]
            data[dense.counter] = np.array([batch], np.int64).view(np.uint8)
            return replace(
                dense.moment,
                batch=batch,
                data=data,
                rows=_copy_changes(self._training.tables, dense.index, dense.moment.placed),
                left=dense.others,
                sliced=0,
                ahead=self._rows_ahead(),
            )
        if mapped is not None:
            self.is_whole = mapped.adopt() or self.is_whole
            self._before = dense, self.is_whole, self.announced
            mapped.measure()
        state = self._state(batch, asks=asks)
        flat = pickle_for_pool(state)
        self._check(state, flat)
        index = {each.data_ptr(): place for place, each in enumerate(flat.storages)}
        places, digests = ({}, {}) if mapped is None else mapped.locate(index)
        rows = _copy_changes(self._training.tables, index, places)
        data = [_copy(each, place, rows, places) for place, each in enumerate(flat.storages)]
        counter = index[self._counter.data_ptr()]
        others = {*range(len(data))} - rows.keys() - {counter} - {*digests.values()}
        left: set[int] = set()
        if self._slices and not self.is_whole and dense is not None:
            # After a load the durable one may be as old as allowed: this one is not sliced.
            left = others
        moment = Moment(
            batch=batch,
            contents=flat.pickle,
            data=data,
            rows=None if self.is_whole else rows,
            left=left,
            dense_batch=batch,
            sliced=self._slices if left else 0,
            tensors=self._tensors,
            placed=places,
            digests=digests,
            ahead=self._rows_ahead(),
        )
        self.is_whole = False
        if self._slices:
            self.dense = _DensePart(moment, index, counter, others)
        return moment

    def _rows_ahead(self) -> list[RowsThere]:
        """Return the rows in the pool that the next batch was announced to update, once."""
        if self._mapped is None:
            return []
        announced, self.announced = self.announced, {}
        return [
            each
            for place, number in announced.items()
            for each in self._mapped.rows(self._training.tables[place], number)
        ]

    def _leaves(self, dense: _DensePart, batch: int) -> bool:
        """Return whether a batch can use ``dense`` instead of a new copy of the dense part."""
        if self.is_whole or batch - dense.moment.batch >= self._every - self._slices:
            return False
        tensors = (tensor for table in self._training.tables for tensor in table.tensors())
        return all(tensor.data_ptr() in dense.index for tensor in tensors)

    def _state(self, batch: int, *, asks: bool) -> dict[str, object]:
        self.is_collecting = True
        self._counter.fill_(batch)
        try:
            if asks:
                self._said = None if self._extra is None else self._extra()
            return {
                "batch": self._counter,
                "dense_batch": torch.tensor(batch, device="cpu"),
                "model": self._training.model.state_dict(),
                "optimizers": [each.state_dict() for each in self._training.optimizers],
                "optimizer_kinds": self._training.optimizer_kinds,
                "extra": self._said,
                **({} if self._mapped is None else {"digests": self._mapped.digests}),
            }
        finally:
            self.is_collecting = False

    def _check(self, state: object, flat: PickledState) -> None:
        """Check from its pickle that a state can be loaded again. Raise ``UsageError`` if not."""
        if flat.pickle != self._pickle:
            found = walk(state, flat.storages)
            found.refuse_freed()
            self._loadable.check(state, flat)
            self._pickle, self._tensors = flat.pickle, found.tensors


@dataclass(frozen=True, slots=True)
class _DensePart:
    """A copied dense part, unchanged since its moment. ``index``: the index of each storage then,
    by its address; ``counter``: that of the number of the batch; ``others``: those of the dense
    part."""

    moment: Moment
    index: Mapping[int, int]
    counter: int
    others: Collection[int]


def _copy_changes(
    tables: Sequence[Table], index: Mapping[int, int], places: Collection[int]
) -> dict[int, Rows]:
    """Return copies of the rows that changed since the last moment, by the index of their storage.
    Storages in ``places`` are in the pool already, and are not copied."""
    found: dict[int, Rows] = {}
    for table in tables:
        number = table.rows()
        for tensor in table.tensors():
            place = index[tensor.data_ptr()]
            found[place] = NO_ROWS if place in places else copy_rows(tensor, number)
    return found


def _copy(
    storage: torch.UntypedStorage, index: int, tables: Collection[int], places: Collection[int]
) -> Bytes:
    """Return a copy of a storage; of a table its own memory, and nothing if that is in the pool:
    a reference would keep it from being closed."""
    if index in places:
        return np.empty(0, np.uint8)
    data = bytes_of(storage)
    return data if index in tables or storage.device.type != "cpu" else data.copy()


def bytes_of(storage: torch.UntypedStorage) -> Bytes:
    """Return the bytes of a storage: its memory, or a copy if that is on a device."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu()).numpy()
