"""After a crash at any moment tables, dense part and marks are as they were at one batch, on disks
and on DAX devices (V14)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from portus.companions import model_log
from portus.companions.embedding import fold, store
from portus.companions.embedding.fold import Fold
from portus.companions.embedding.moment import Moment
from portus.companions.embedding.store import TableStore
from portus.engine.copying.segments import Stop
from portus.engine.spec import Extent
from portus.reach.index import log
from portus.reach.index.log import Bunch, LogWriter
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionRecord
from tests.crash import logged
from tests.crash.embedding_user import (
    DENSE_BYTES,
    DEVICE,
    Folding,
    FoldingOnDevice,
    OnDevice,
    Plan,
    Roomy,
    RoomyOnDevice,
    State,
    User,
    begin,
    folded,
    folded_and_marked,
    go_on,
    marked,
    relaxed,
    sliced,
    sliced_and_folded,
    survive,
    survive_folding,
    train,
    verify,
    written_by_others,
)
from tests.crash.mistaken_logs import (
    HeadAlonePersisted,
    NotDrained,
    NotPersisted,
    OverTheLastEntry,
    WhatCountsIsInCachesOnly,
    digest_not_compared,
)
from tests.crash.mistaken_slices import (
    a_slice_is_not_persisted,
    slices_are_committed_before_the_last_one,
    slices_go_over_the_dense_part_that_counts,
)
from tests.depth import deep, enough
from tests.simulation.crash import CrashFiles, Faults
from tests.simulation.explore import Explorer, ImageError

IMAGES_MIN: Final = 10_000
DEEPER: Final = 60

Plans = Sequence[Plan]
Searched = Explorer[tuple[State, ...]]


def on_disk(plans: Plans, budgets: tuple[int, ...], user: type[User] = User) -> Searched:
    return logged.on_disk(plans, budgets, user, verify)


def on_disk_roomily(plans: Plans, budgets: tuple[int, ...]) -> Searched:
    return on_disk(plans, budgets, Roomy)


def on_device_roomily(plans: Plans, budgets: tuple[int, ...]) -> Searched:
    return logged.on_device(plans, budgets, RoomyOnDevice, verify, DEVICE)


def on_disk_folding(plans: Plans, budgets: tuple[int, ...]) -> Searched:
    return on_disk(plans, budgets, Folding)


def on_device_folding(plans: Plans, budgets: tuple[int, ...]) -> Searched:
    return logged.on_device(plans, budgets, FoldingOnDevice, verify, DEVICE)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table is a piece of a fold by itself, and so is the dense part."""
    monkeypatch.setattr(fold, "PIECE", DENSE_BYTES)


def on_device(plans: Plans, budgets: tuple[int, ...]) -> Searched:
    return logged.on_device(plans, budgets, OnDevice, verify, DEVICE)


Search = tuple[Callable[..., Searched], Plans, tuple[int, ...], int]

EXPLORATIONS: Final[dict[str, Search]] = {
    "batches": (on_disk, (train, go_on), (4, 1), 60),
    "relaxed": (on_disk, (relaxed,), (4,), 30),
    "a dense part in slices": (on_disk_roomily, (sliced, go_on), (1, 1), 60),
    "slices while folding in": (on_disk_folding, (sliced_and_folded,), (4,), 60),
    "slices on a device": (on_device_roomily, (sliced,), (4,), 60),
    "marks": (on_disk, (marked,), (6,), 60),
    "written by others": (on_disk, (written_by_others,), (4,), 30),
    "folding in": (on_disk_folding, (folded, go_on), (2, 1), 60),
    "folding in with marks": (on_disk_folding, (folded_and_marked,), (3,), 60),
    "folding in on a device": (on_device_folding, (folded,), (4,), 60),
    "crash in recovery from a crash": (on_disk, (begin, begin, go_on), (1, 1, 1), 30),
    "batches on a device": (on_device, (train,), (6,), 60),
    "marks on a device": (on_device, (marked,), (4,), 60),
}
"""As in ``test_explore``."""


LONG: Final = (
    "a dense part in slices",
    "slices on a device",
    "folding in on a device",
    "crash in recovery from a crash",
    "marks on a device",
    "what was in caches is believed",
)
"""Those that take long."""


def _by_length(names: Iterable[str]) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in names]


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", _by_length(EXPLORATIONS))
def test_every_crash_leaves_tables_and_dense_part_at_one_batch(name: str) -> None:
    search, plans, budgets, images_min = EXPLORATIONS[name]
    found = search(plans, budgets).explore()
    print(f"{name}: {found}")
    assert len(found.images) >= images_min


def persist_fails(number: int, plan: Plan = survive, user: type[User] = User) -> Searched:
    """The plan, from the failure on. Of ``survive`` persists 7 to 9 are those of entries, and a
    root."""

    def start() -> CrashFiles:
        return CrashFiles(["/pools"], faults=Faults(persist=frozenset({number})))

    return replace(on_disk((plan,), (20,), user), start=start, after_fault=True)


@pytest.mark.parametrize("number", [7, 8, 9])
def test_a_failed_persist_and_a_power_loss_later_lose_no_durable_batch(number: int) -> None:
    found = persist_fails(number).explore()
    assert found.images, "no persist failed"


@pytest.mark.parametrize("number", range(8, 16))
def test_a_persist_that_fails_while_the_log_is_folded_in_loses_no_durable_batch(
    number: int,
) -> None:
    found = replace(persist_fails(number, survive_folding, Folding), budgets=(4,)).explore()
    assert found.images, "no persist failed"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_more_than_ten_thousand_images_of_tables_are_opened(seed: int) -> None:
    images: set[bytes] = set()
    for name, (search, plans, budgets, _) in EXPLORATIONS.items():
        if len(plans) < 3:  # that one is as deep as it gets in its time
            plans, budgets = plans[:1], (deep(DEEPER * budgets[0]),)
        found = replace(search(plans, budgets), seed=seed).explore()
        print(f"{name}: {found}")
        images |= found.images
    assert len(images) > enough(IMAGES_MIN)


# --- mistakes -------------------------------------------------------------------------------


def of_log(writer: type[LogWriter]) -> Mistake:
    def patched(patch: pytest.MonkeyPatch) -> None:
        for module in (model_log, fold):
            patch.setattr(module, "LogWriter", writer)

    return patched


class DensePartApart(LogWriter):
    """Tables and dense part are an entry each."""

    def append(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> None:
        super().append(bunches[:1], b"", commit)
        super().append(bunches[1:], contents, commit, undo=undo)


class RowsLeftOut(LogWriter):
    """The last rows of a batch come with the next one."""

    late: Sequence[Bunch] = ()

    def append(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> None:
        both = [*self.late, *bunches[:-1]]
        self.late = bunches[-1:]
        super().append(both, contents, commit, undo=undo)


def the_log_is_folded_in_without_this_batch(patch: pytest.MonkeyPatch) -> None:
    right = Fold.add

    def wrong(self: Fold, moment: Moment) -> bool:
        if not self.image.is_whole:
            return right(self, moment)
        self.batch, self.contents = moment.batch, moment.contents
        return True

    patch.setattr(Fold, "add", wrong)


def what_came_while_it_was_folded_in_is_cut_with_the_log(patch: pytest.MonkeyPatch) -> None:
    right = Fold.add

    def wrong(self: Fold, moment: Moment) -> bool:
        return not self.image.is_whole or right(self, moment)

    patch.setattr(Fold, "add", wrong)


def a_fold_is_committed_before_the_update_beside_it_is_over(patch: pytest.MonkeyPatch) -> None:
    """With what was copied of rows that were half way."""
    right, add = TableStore.go_on, Fold.add
    newest: list[Moment] = []

    def added(self: Fold, moment: Moment) -> bool:
        newest[:] = [moment]
        return add(self, moment)

    def wrong(self: TableStore, stop: Stop) -> None:
        right(self, stop)
        if newest and self._fold is not None and self._fold.image.is_whole:
            self._replace(self._fold)

    patch.setattr(Fold, "add", added)
    patch.setattr(TableStore, "go_on", wrong)


def a_piece_is_not_persisted(patch: pytest.MonkeyPatch) -> None:
    right = Fold.go_on

    def wrong(self: Fold, stop: Stop) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(type(self._pool.medium), "persist", lambda medium, ranges: None)
            right(self, stop)

    patch.setattr(Fold, "go_on", wrong)


def the_old_version_goes_before_the_new_one_is_there(patch: pytest.MonkeyPatch) -> None:
    right = TableStore._replace

    def wrong(self: TableStore, fold: Fold) -> None:
        self.pool.retire(self._superseded_versions())
        right(self, fold)

    patch.setattr(TableStore, "_replace", wrong)


def the_log_is_cut_too_early(patch: pytest.MonkeyPatch) -> None:
    """Its pages are blanked for the next one while the older root still reaches them."""
    right = TableStore._replace

    def wrong(self: TableStore, fold: Fold) -> None:
        old, finish = self._log, fold.finish

        def cutting(*arguments: Any) -> Any:  # once it was seen that nobody else changed it
            if old is not None:
                self.pool.medium.store(old.log.extent.offset, bytes(old.used_extent.length))
            return finish(*arguments)

        with pytest.MonkeyPatch.context() as within:
            within.setattr(fold, "finish", cutting)
            right(self, fold)

    patch.setattr(TableStore, "_replace", wrong)


def a_fold_has_the_dense_part_of_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fold, "add_dense", lambda self, moment: True)


def marks(change: Callable[[VersionRecord, Any], VersionRecord]) -> Mistake:
    """Marks that are another version than they should be."""
    return committed(store.MARKS, change)


def committed(model: str, change: Callable[[VersionRecord, Any], VersionRecord]) -> Mistake:
    """Versions of a model that are others than they should be."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        right = PoolWriter.commit

        def wrong(
            self: PoolWriter,
            new: VersionRecord | None,
            data: Sequence[Extent] = (),
            retire: Collection[int] = (),
        ) -> object:
            if new is not None and new.info.model == model:
                new = change(new, new.log)
            return right(self, new, data, retire)

        patch.setattr(PoolWriter, "commit", wrong)

    return patched


def entries_of_the_newest_count_for_marks(patch: pytest.MonkeyPatch) -> None:
    """A mark goes on with the newest version: entries behind it count for it too."""
    patch.setattr(log, "_counts", lambda entry, record, its: True)


def undrained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OnDevice, "medium", NotDrained)


Mistake = Callable[[pytest.MonkeyPatch], None]

MISTAKES: Final[dict[str, tuple[Mistake, Search]]] = {
    "an entry is not persisted": (of_log(NotPersisted), (on_disk, (train,), (20,), 0)),
    "its head alone is": (of_log(HeadAlonePersisted), (on_disk, (train,), (20,), 0)),
    "its digest is not compared": (digest_not_compared, (on_disk, (train,), (20,), 0)),
    "what was in caches is believed": (
        of_log(WhatCountsIsInCachesOnly),
        (on_disk, (train, go_on), (4, 10), 0),
    ),
    "an entry over the last one": (of_log(OverTheLastEntry), (on_disk_roomily, (train,), (20,), 0)),
    "the dense part apart": (of_log(DensePartApart), (on_disk_roomily, (train,), (20,), 0)),
    "rows left out": (of_log(RowsLeftOut), (on_disk, (train,), (20,), 0)),
    "folded in without this batch": (
        the_log_is_folded_in_without_this_batch,
        (on_disk_folding, (folded,), (4,), 0),
    ),
    "what came meanwhile is cut with the log": (
        what_came_while_it_was_folded_in_is_cut_with_the_log,
        (on_disk_folding, (folded,), (4,), 0),
    ),
    "folded in too early": (
        a_fold_is_committed_before_the_update_beside_it_is_over,
        (on_disk_folding, (folded,), (4,), 0),
    ),
    "a piece is not persisted": (
        a_piece_is_not_persisted,
        (on_disk_folding, (folded,), (20,), 0),
    ),
    "the old version goes first": (
        the_old_version_goes_before_the_new_one_is_there,
        (on_disk, (train,), (20,), 0),
    ),
    "the log is cut too early": (the_log_is_cut_too_early, (on_disk, (train,), (20,), 0)),
    "a slice is not persisted": (a_slice_is_not_persisted, (on_disk_roomily, (sliced,), (20,), 0)),
    "the last slice is not drained": (
        slices_are_committed_before_the_last_one,
        (on_device_roomily, (sliced,), (20,), 0),
    ),
    "slices over what counts": (
        slices_go_over_the_dense_part_that_counts,
        (on_disk_roomily, (sliced,), (20,), 0),
    ),
    "slices without the entries so far": (
        committed(store.MODEL, lambda new, log: replace(new, log=replace(log, entries=0))),
        (on_disk_roomily, (sliced,), (20,), 0),
    ),
    "folded in without the slices": (
        a_fold_has_the_dense_part_of_before,
        (on_disk_folding, (sliced_and_folded,), (4,), 0),
    ),
    "a mark counts an entry less": (
        marks(lambda new, log: replace(new, log=replace(log, entries=max(0, log.entries - 1)))),
        (on_disk, (marked,), (20,), 0),
    ),
    "a mark has no log": (
        marks(lambda new, log: replace(new, log=None)),
        (on_disk, (marked,), (20,), 0),
    ),
    "a mark goes on": (entries_of_the_newest_count_for_marks, (on_disk, (marked,), (20,), 0)),
    "counted before it is drained": (undrained, (on_device, (train,), (20,), 0)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", _by_length(MISTAKES))
def test_a_mistake_of_tables_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake, (search, plans, budgets, _) = MISTAKES[name]
    mistake(monkeypatch)
    with pytest.raises(ImageError):
        search(plans, budgets).explore()
