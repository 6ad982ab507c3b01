"""Slices of a dense part, each written with one mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from portus.companions.embedding.fold import Slices
from portus.companions.embedding.moment import Moment
from portus.companions.embedding.store import TableStore
from portus.companions.model_log import _cut


def _without(
    patch: pytest.MonkeyPatch, call: str, is_wrong: Callable[[Slices], bool] = lambda _: True
) -> None:
    """Pieces of slices that ``is_wrong`` chooses are written by a medium that ignores a call."""
    right = Slices.go_on

    def wrong(self: Slices, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as within:
            if is_wrong(self):
                within.setattr(type(self._pool.medium), call, lambda *_: None)
            right(self, *arguments)

    patch.setattr(Slices, "go_on", wrong)


def _is_last(slices: Slices) -> bool:
    return len(slices._digests) + 1 == len(slices._pieces)


def a_slice_is_not_persisted(patch: pytest.MonkeyPatch) -> None:
    _without(patch, "persist")


def slices_are_committed_before_the_last_one(patch: pytest.MonkeyPatch) -> None:
    """It is stored, and persisted later."""
    _without(patch, "persist", _is_last)


def slices_end_one_early(patch: pytest.MonkeyPatch) -> None:
    """They are taken for whole when one is missing, which is hashed and never stored."""
    _without(patch, "store", _is_last)


def slices_go_over_the_dense_part_that_counts(patch: pytest.MonkeyPatch) -> None:
    """Where it is, and not to new extents."""
    right = TableStore._slice_on

    def wrong(self: TableStore, moment: Moment) -> None:
        right(self, moment)
        slices, record = self._slices, self._record
        if slices is not None and not slices.done and record is not None:
            indices = slices.indices
            there = [list(record.storage_extents(each)) for each in indices.tolist()]
            slices.extents[:] = there
            slices._pieces[:] = _cut([moment.data[each] for each in indices], there, 1)

    patch.setattr(TableStore, "_slice_on", wrong)


def the_contents_are_those_of_the_dense_part_before(patch: pytest.MonkeyPatch) -> None:
    right = TableStore._slice_on

    def wrong(self: TableStore, moment: Moment) -> None:
        right(self, moment)
        if self._slices is not None:
            moment = replace(self._slices.moment, contents=self._contents)
            self._slices.moment = moment  # type: ignore[misc]

    patch.setattr(TableStore, "_slice_on", wrong)
