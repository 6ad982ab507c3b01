"""After a crash at any moment tables that are changed in place are as they were at one batch, on a
DAX device of which any subset of the lines not drained may have arrived (V14, V15)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from portus.companions import model_log
from portus.companions.embedding import fold, pool_tables
from portus.companions.embedding.moment import Moment
from portus.companions.embedding.pool_tables import PlacedStore
from portus.companions.embedding.store import TableStore
from portus.reach.index.in_place import cell_digests
from portus.reach.index.log import Bunch, LogState, LogWriter, read_log
from tests.crash import logged
from tests.crash.embedding_user import State, verify
from tests.crash.mistaken_slices import (
    a_slice_is_not_persisted,
    slices_are_committed_before_the_last_one,
    slices_end_one_early,
    slices_go_over_the_dense_part_that_counts,
    the_contents_are_those_of_the_dense_part_before,
)
from tests.crash.placed_user import (
    DEVICE,
    Plan,
    User,
    begin,
    go_on,
    left_half_done,
    marked,
    same_rows,
    sliced,
    sliced_and_announced,
    sliced_and_folded,
    train,
)
from tests.depth import deep, enough
from tests.simulation.explore import Explorer, ImageError

Searched = Explorer[tuple[State, ...]]

IMAGES_MIN: Final = 2_000
DEEPER: Final = 40


def explorer(plans: Sequence[Plan], budgets: tuple[int, ...], user: type[User] = User) -> Searched:
    return logged.on_device(plans, budgets, user, verify, DEVICE)


EXPLORATIONS: Final[dict[str, tuple[tuple[Plan, ...], tuple[int, ...], int]]] = {
    "batches": ((train,), (1,), 60),
    "the same rows": ((same_rows,), (2,), 60),
    "left half done": ((left_half_done, go_on), (1, 1), 60),
    "marks": ((marked,), (2,), 60),
    "a dense part in slices": ((sliced, go_on), (1, 1), 60),
    "slices and what is announced": ((sliced_and_announced,), (2,), 60),
    "slices while folding in": ((sliced_and_folded,), (1,), 60),
    "crash in recovery from a crash": ((begin, begin, go_on), (1, 1, 1), 60),
}


LONG: Final = (
    "a dense part in slices",
    "slices while folding in",
    "slices with the contents of before",
    "crash in recovery from a crash",
    "closing says that half a batch counts",
    "digests are those of the batch before",
    "left half done",
    "nothing is put back",
    "of a row one cell alone is logged",
    "the log is folded in within a batch",
    "undo is taken for what was written",
    "what is put back is in caches only",
    "what was not announced is not logged",
    "a mark shares the tables",
    "a row is logged once and for all",
)
"""Those that take long."""


def _by_length(names: Iterable[str]) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in names]


@pytest.mark.parametrize("name", _by_length(EXPLORATIONS))
def test_every_crash_leaves_tables_in_place_at_one_batch(name: str) -> None:
    plans, budgets, images_min = EXPLORATIONS[name]
    found = explorer(plans, budgets).explore()
    print(f"{name}: {found}")
    assert len(found.images) >= images_min


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_thousands_of_images_of_tables_in_place_are_opened(seed: int) -> None:
    images: set[bytes] = set()
    for name, (plans, budgets, _) in EXPLORATIONS.items():
        if len(plans) == 3:  # that one is as deep as it gets in its time
            continue
        found = replace(explorer(plans[:1], (deep(DEEPER * budgets[0]),)), seed=seed).explore()
        print(f"{name}: {found}")
        images |= found.images
    assert len(images) > enough(IMAGES_MIN)


# --- mistakes -------------------------------------------------------------------------------

Mistake = Callable[[pytest.MonkeyPatch], None]


class UndoNotDurable(LogWriter):
    """An update begins before its undo is drained."""

    def append(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> None:
        if undo:
            self.advance(self.store(bunches, contents, commit, undo=True))
        else:
            super().append(bunches, contents, commit)


class UndoThatCounts(LogWriter):
    """Undo is not flagged: it is taken for what was written."""

    def append(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> None:
        super().append(bunches, contents, commit)


def log_of(writer: type[LogWriter]) -> Mistake:
    def patched(patch: pytest.MonkeyPatch) -> None:
        for module in (model_log, fold):
            patch.setattr(module, "LogWriter", writer)

    return patched


class LoggedAfterwards(User):
    """Rows are logged once they were written."""

    def update(self, rows: Mapping[str, Sequence[int]], step: int) -> None:
        self.write(rows, step)
        self.log(rows)


class NobodyAnnounced(User):
    """What was not announced is not logged, such as the rows of another rank."""

    def batch(self, wide: Sequence[int], narrow: Sequence[int], **named: Any) -> None:
        self.announced = named.get("ahead")
        super().batch(wide, narrow, **named)

    def update(self, rows: Mapping[str, Sequence[int]], step: int) -> None:
        if self.announced is None:
            self.log(rows)
        self.write(rows, step)


class LoggedBeforeThePreviousUpdate(User):
    """The undo of a batch has rows as they were before the batch before it updated them."""

    def batch(self, wide: Sequence[int], narrow: Sequence[int], **named: Any) -> None:
        every = {each: each.extent.length // each.cell for each in self.places.values()}
        self.early = {each: self.store._read(each, np.arange(n)) for each, n in every.items()}
        super().batch(wide, narrow, **named)

    def end(self, step: int, sliced: int = 0, **named: Any) -> None:
        cells = {each: each.logged for each in self.places.values() if len(each.logged)}
        super().end(step, sliced, **named)
        for place, number in cells.items():
            data = self.early[place][number]
            assert self.store._log is not None
            assert self.store._record is not None
            bunch = Bunch(pool_tables._offsets(place, number), data)
            self.store._log.append([bunch], b"", self.store._record.info.commit, undo=True)
            place.logged, place.old = number, cell_digests(number, data)


def logged_once_and_for_all(patch: pytest.MonkeyPatch) -> None:
    """What was logged before the update of one batch is taken for the undo of the next."""
    right = PlacedStore.commit

    def wrong(self: PlacedStore, moment: Moment) -> None:
        kept = [(place, place.logged) for place in self.places.values()]
        right(self, moment)
        for place, cells in kept:
            place.logged = cells
            place.old = cell_digests(cells, self._read(place, cells)) if len(cells) else []

    patch.setattr(PlacedStore, "commit", wrong)


def rows_not_durable(patch: pytest.MonkeyPatch) -> None:
    """The batch is committed, and its rows are in caches."""
    patch.setattr(pool_tables, "_runs", lambda place: np.empty((0, 2), np.int64))


def one_cell_of_a_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pool_tables, "cells_of", lambda rows, row, cell: np.unique(rows * row // cell))


def digests_of_the_batch_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlacedStore, "_new_sums", lambda self, place: list(place.sums))


def sealed_in_a_batch(patch: pytest.MonkeyPatch) -> None:
    """Closing says that what is unfinished counts."""
    patch.setattr(PlacedStore, "seal", _sealed)


def _sealed(self: PlacedStore) -> None:
    assert self._log is not None
    assert self._record is not None
    self._log.append([], b"", self._record.info.commit)


def nothing_is_put_back(patch: pytest.MonkeyPatch) -> None:
    """Who opens the pool says that undo was carried out, and did nothing."""
    patch.setattr(model_log, "read_log", _forgotten)


def _forgotten(medium: Any, record: Any) -> LogState:
    found = read_log(medium, record)
    return replace(found, undo=[replace(each, bunches=()) for each in found.undo])


def put_back_in_caches_only(patch: pytest.MonkeyPatch) -> None:
    """What was put back is not durable when the undo is gone."""
    right = PlacedStore._open

    def wrong(self: PlacedStore) -> None:
        medium = self.pool.medium
        persist = medium.persist
        medium.persist = lambda ranges: persist(  # type: ignore[method-assign]
            [each for each in ranges if each.length >= 4096]
        )
        try:
            right(self)
        finally:
            medium.persist = persist  # type: ignore[method-assign]

    patch.setattr(PlacedStore, "_open", wrong)


def marks_share_the_tables(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlacedStore, "mark", TableStore.mark)


def folded_in_within_a_batch(patch: pytest.MonkeyPatch) -> None:
    """The log is folded in at every entry of undo, and what it had of this batch is gone."""

    def wrong(self: PlacedStore, size: int) -> None:
        self._fold_in(self._standing())

    patch.setattr(PlacedStore, "_make_room", wrong)


def announced_before_the_slices_end(patch: pytest.MonkeyPatch) -> None:
    """The undo of the next batch is in the log that the last slice ends."""
    right = PlacedStore._fold_in

    def wrong(self: PlacedStore, moment: Moment) -> None:
        if self._slices is not None and self._slices.is_whole:
            self.log(moment.ahead)
        right(self, moment)

    patch.setattr(PlacedStore, "_fold_in", wrong)


def a_fold_between_slices_has_what_is_in_memory(patch: pytest.MonkeyPatch) -> None:
    """Of the dense part that is being written, and says the text of the one before."""
    right = PlacedStore._fold_of

    def wrong(self: PlacedStore, moment: Moment) -> Any:
        if self._slices is not None and not self._slices.is_whole:
            data = [*moment.data]
            for each in self._slices.indices.tolist():
                data[each] = self._slices.moment.data[each]
            moment = replace(moment, data=data)
        return right(self, moment)

    patch.setattr(PlacedStore, "_fold_of", wrong)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The engine is right, and who uses it is not."""


ONE: Final = ((train,), (20,))
TWO: Final = ((left_half_done, go_on), (3, 20))
KEPT: Final = ((marked,), (20,))
SAME: Final = ((same_rows,), (20,))
SLICED: Final = ((sliced,), (20,))
ANNOUNCED: Final = ((sliced_and_announced,), (20,))
SLICED_AND_FOLDED: Final = ((sliced_and_folded,), (2,))

Search = tuple[tuple[Plan, ...], tuple[int, ...]]

MISTAKES: Final[dict[str, tuple[Mistake, Search, type[User]]]] = {
    "undo is not durable before the update": (log_of(UndoNotDurable), ONE, User),
    "undo is taken for what was written": (log_of(UndoThatCounts), ONE, User),
    "rows are logged after the update": (nothing, ONE, LoggedAfterwards),
    "a row is logged before the previous update": (nothing, SAME, LoggedBeforeThePreviousUpdate),
    "what was not announced is not logged": (nothing, ONE, NobodyAnnounced),
    "a row is logged once and for all": (logged_once_and_for_all, ONE, User),
    "a batch is committed before its rows are durable": (rows_not_durable, ONE, User),
    "of a row one cell alone is logged": (one_cell_of_a_row, ONE, User),
    "digests are those of the batch before": (digests_of_the_batch_before, ONE, User),
    "closing says that half a batch counts": (sealed_in_a_batch, TWO, User),
    "nothing is put back": (nothing_is_put_back, TWO, User),
    "what is put back is in caches only": (put_back_in_caches_only, TWO, User),
    "a mark shares the tables": (marks_share_the_tables, KEPT, User),
    "the log is folded in within a batch": (folded_in_within_a_batch, ONE, User),
    "a slice is not persisted": (a_slice_is_not_persisted, SLICED, User),
    "the last slice is not drained": (slices_are_committed_before_the_last_one, SLICED, User),
    "slices end one early": (slices_end_one_early, ANNOUNCED, User),
    "slices over what counts": (slices_go_over_the_dense_part_that_counts, ANNOUNCED, User),
    "slices with the contents of before": (
        the_contents_are_those_of_the_dense_part_before,
        SLICED,
        User,
    ),
    "announced before the slices end": (announced_before_the_slices_end, ANNOUNCED, User),
    "folded in with slices in the making": (
        a_fold_between_slices_has_what_is_in_memory,
        SLICED_AND_FOLDED,
        User,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", _by_length(MISTAKES))
def test_a_mistake_of_tables_in_place_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake, (plans, budgets), user = MISTAKES[name]
    mistake(monkeypatch)
    with pytest.raises(ImageError):
        explorer(plans, budgets, user).explore()
