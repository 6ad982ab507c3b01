"""Dense parts in slices, each written with one mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from portus.companions.embedding.moment import Moment
from portus.companions.embedding.slices import Slices
from portus.companions.embedding.store import TableStore


def a_slice_is_not_persisted(patch: pytest.MonkeyPatch) -> None:
    right = Slices.go_on

    def wrong(self: Slices) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(type(self._pool.medium), "persist", lambda medium, ranges: None)
            right(self)

    patch.setattr(Slices, "go_on", wrong)


def slices_are_committed_before_the_last_one(patch: pytest.MonkeyPatch) -> None:
    """It is stored, and persisted later."""
    right = Slices.go_on

    def wrong(self: Slices) -> None:
        if self.done + 1 < self.count or self.count == 1:
            right(self)
            return
        with pytest.MonkeyPatch.context() as within:
            within.setattr(type(self._pool.medium), "persist", lambda medium, ranges: None)
            right(self)

    patch.setattr(Slices, "go_on", wrong)


def slices_go_over_the_dense_part_that_counts(patch: pytest.MonkeyPatch) -> None:
    """Where it is, and not to new extents."""
    right = TableStore._slice_on

    def wrong(self: TableStore, moment: Moment) -> None:
        right(self, moment)
        slices, record = self._slices, self._record
        if slices is not None and not slices.done and record is not None:
            there = [list(record.storage_extents(each)) for each in slices.indices.tolist()]
            slices._extents[:] = there

    patch.setattr(TableStore, "_slice_on", wrong)


def slices_end_one_early(patch: pytest.MonkeyPatch) -> None:
    """They are taken for whole when one is missing, which is hashed and never stored."""
    right = Slices.go_on

    def wrong(self: Slices) -> None:
        right(self)
        if self.done + 1 == self.count:
            with pytest.MonkeyPatch.context() as within:
                within.setattr(type(self._pool.medium), "store", lambda medium, at, data: None)
                right(self)

    patch.setattr(Slices, "go_on", wrong)


def the_contents_are_those_of_the_dense_part_before(patch: pytest.MonkeyPatch) -> None:
    right = TableStore._slice_on

    def wrong(self: TableStore, moment: Moment) -> None:
        right(self, moment)
        if self._slices is not None:
            moment = replace(self._slices.moment, contents=self._contents)
            self._slices.moment = moment  # type: ignore[misc]

    patch.setattr(TableStore, "_slice_on", wrong)
