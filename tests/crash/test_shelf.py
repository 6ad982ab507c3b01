"""After a crash at any moment a shelf is as it was at one commit, on disks and on DAX devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import pytest

from portus.companions import model_log
from portus.companions.media import private
from portus.companions.media.private import PrivateMapping
from portus.companions.shelf import store
from portus.engine.spec import Extent
from portus.reach.index import log
from portus.reach.index.log import LogWriter
from portus.reach.index.pool import PoolWriter
from tests.crash import logged
from tests.crash.mistaken_logs import (
    ForTheVersionBefore,
    HeadAlonePersisted,
    NotCut,
    NotDrained,
    NotPersisted,
    OverTheLastEntry,
    TwoEntries,
    WhatCountsIsInCachesOnly,
    digest_not_compared,
)
from tests.crash.shelf_user import (
    DEVICE,
    LOG,
    OnDevice,
    Plan,
    Roomy,
    State,
    User,
    begin,
    go_on,
    rearrange,
    survive,
    sync,
    take_its_place,
    transact,
    verify,
)
from tests.depth import deep, enough
from tests.simulation.crash import CrashFiles, Faults
from tests.simulation.explore import Explorer, ImageError

IMAGES_MIN: Final = 10_000
DEEPER: Final = 6


@pytest.fixture(autouse=True)
def small_arrays_stand_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages are told apart."""
    monkeypatch.setattr(private, "_WHOLE_MAX", 0)


Plans = Sequence[Plan]
Searched = Explorer[tuple[State, ...]]


def on_disk(plans: Plans, budgets: tuple[int, ...], user: type[User] = User) -> Searched:
    return logged.on_disk(plans, budgets, user, verify)


def on_disk_roomily(plans: Plans, budgets: tuple[int, ...]) -> Searched:
    return on_disk(plans, budgets, Roomy)


def on_disk_by_the_rules(plans: Plans, budgets: tuple[int, ...]) -> Searched:
    return logged.each_by_the_rules(on_disk(plans, budgets))


def on_device(plans: Plans, budgets: tuple[int, ...]) -> Searched:
    return logged.on_device(plans, budgets, OnDevice, verify, DEVICE)


Search = tuple[Callable[..., Searched], Plans, tuple[int, ...], int]

EXPLORATIONS: Final[dict[str, Search]] = {
    "transactions": (on_disk, (transact, go_on), (5, 1), 150),
    "sync": (on_disk, (sync,), (8,), 30),
    "names and shapes": (on_disk, (rearrange,), (8,), 60),
    "space used again": (on_disk_roomily, (take_its_place,), (6,), 100),
    "crash in recovery from a crash": (on_disk, (begin, begin, go_on), (1, 1, 1), 30),
    "transactions on a device": (on_device, (transact,), (12,), 150),
    "names and shapes on a device": (on_device, (rearrange,), (12,), 200),
}
"""As in ``test_explore``."""


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", EXPLORATIONS)
def test_every_crash_leaves_a_shelf_as_it_was_at_one_commit(name: str) -> None:
    search, plans, budgets, images_min = EXPLORATIONS[name]
    found = search(plans, budgets).explore()
    print(f"{name}: {found}")
    assert len(found.images) >= images_min


def test_every_crash_leaves_small_arrays_that_are_logged_whole_as_they_were_at_one_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    found = on_disk_roomily((transact, go_on), (3, 1)).explore()
    print(found)
    assert len(found.images) >= 100


def persist_fails(number: int) -> Searched:
    """``survive``, from the failure on. Persists 7 to 9 are those of entries."""

    def start() -> CrashFiles:
        return CrashFiles(["/pools"], faults=Faults(persist=frozenset({number})))

    return replace(on_disk((survive,), (20,)), start=start, after_fault=True)


@pytest.mark.parametrize("number", [7, 8, 9])
def test_a_failed_persist_and_a_power_loss_later_lose_no_commit_of_a_shelf(number: int) -> None:
    found = persist_fails(number).explore()
    assert found.images, "no persist failed"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_more_than_ten_thousand_images_of_shelves_are_opened(seed: int) -> None:
    images: set[bytes] = set()
    for name, (search, plans, budgets, _) in EXPLORATIONS.items():
        deeper = search((*plans, go_on), tuple(deep(DEEPER * budget) for budget in (*budgets, 1)))
        found = replace(deeper, seed=seed).explore()
        print(f"{name}: {found}")
        images |= found.images
    assert len(images) > enough(IMAGES_MIN)


# --- mistakes -------------------------------------------------------------------------------


def of_log(writer: type[LogWriter]) -> Mistake:
    def patched(patch: pytest.MonkeyPatch) -> None:
        for module in (model_log, store):
            patch.setattr(module, "LogWriter", writer)

    return patched


def whatever_is_there_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(log, "_counts", lambda entry, record, its: True)


def older_values_win(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(log, "replace", lambda found, contents: found)


def a_page_is_changed_after_the_scan(patch: pytest.MonkeyPatch) -> None:
    right = PrivateMapping.changes
    patch.setattr(PrivateMapping, "changes", lambda self: right(self)[:1])


def folded_in_without_the_log(patch: pytest.MonkeyPatch) -> None:
    right = store.ShelfStore._replace

    def wrong(self: store.ShelfStore, *args: object) -> None:
        self._logged.clear()
        right(self, *args)  # type: ignore[arg-type]

    patch.setattr(store.ShelfStore, "_replace", wrong)


def the_log_is_used_again_at_once(patch: pytest.MonkeyPatch) -> None:
    right = store.ShelfStore._replace

    def wrong(self: store.ShelfStore, *args: object) -> None:
        """The new log has the pages of the old one, which the older root reaches."""
        old = self._log
        with pytest.MonkeyPatch.context() as inner:
            if old is not None:
                writer = self._writer()
                reserve = writer.reserve

                def again(length: int, *, contiguous: bool = False) -> list[Extent]:
                    return [old.log.extent] if contiguous and length == LOG else reserve(length)

                def release(extents: Sequence[Extent], right: object = writer.release) -> None:
                    if list(extents) != [old.log.extent]:
                        right(extents)  # type: ignore[operator]

                inner.setattr(
                    store.ShelfStore, "_writer", lambda self: Lent(writer, again, release)
                )
            right(self, *args)  # type: ignore[arg-type]

    patch.setattr(store.ShelfStore, "_replace", wrong)


class Lent:
    def __init__(self, writer: PoolWriter, reserve: object, release: object) -> None:
        self._writer, self.reserve, self.release = writer, reserve, release

    def __getattr__(self, name: str) -> object:
        return getattr(self._writer, name)


def undrained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OnDevice, "medium", NotDrained)


Mistake = Callable[[pytest.MonkeyPatch], None]

MISTAKES: Final[dict[str, tuple[Mistake, Search]]] = {
    "an entry is not persisted": (of_log(NotPersisted), (on_disk, (transact,), (20,), 0)),
    "its head alone is": (of_log(HeadAlonePersisted), (on_disk, (transact,), (20,), 0)),
    "its digest is not compared": (digest_not_compared, (on_disk, (transact,), (20,), 0)),
    "what was in caches is believed": (
        of_log(WhatCountsIsInCachesOnly),
        (on_disk, (transact, go_on), (4, 10), 0),
    ),
    "an entry for each array": (of_log(TwoEntries), (on_disk, (transact,), (20,), 0)),
    "an entry over the last one": (of_log(OverTheLastEntry), (on_disk, (transact,), (20,), 0)),
    "entries of the next commit count": (
        whatever_is_there_counts,
        (on_disk, (rearrange,), (20,), 0),
    ),
    "older values win": (older_values_win, (on_disk, (rearrange,), (20,), 0)),
    "a page is changed after the scan": (
        a_page_is_changed_after_the_scan,
        (on_disk, (sync,), (20,), 0),
    ),
    "folded in without the log": (folded_in_without_the_log, (on_disk, (transact,), (20,), 0)),
    "an entry is for the version before": (
        of_log(ForTheVersionBefore),
        (on_disk, (rearrange,), (20,), 0),
    ),
    "the log is used again at once": (
        the_log_is_used_again_at_once,
        (on_disk_by_the_rules, (transact,), (20,), 0),
    ),
    "counted before it is drained": (undrained, (on_device, (transact,), (20,), 0)),
}


@pytest.mark.long
def test_what_is_left_of_a_torn_entry_may_be_made_whole_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_log(NotCut)(monkeypatch)
    with pytest.raises(ImageError):
        on_device((transact, go_on), (40, 30)).explore()


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_a_shelf_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake, (search, plans, budgets, _) = MISTAKES[name]
    mistake(monkeypatch)
    with pytest.raises(ImageError):
        search(plans, budgets).explore()
