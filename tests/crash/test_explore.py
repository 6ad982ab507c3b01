"""Every legal image after a crash opens, whole (V1, V2, V3, V5, V10).

The engine's pool, pipeline and reference files run on a simulated disk. Each exploration crashes
them at every event, kills and power losses both, and lets the next process go on from there. With
``-m long`` the same goes much deeper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import pytest

from portus.spec import PAGE
from portus.testing.crash import Faults
from portus.testing.explore import Exploration, Explorer
from tests.crash.trainer import (
    SMALL,
    Fact,
    Plan,
    Roomy,
    Trainer,
    collect,
    disk,
    give_back,
    give_back_and_go_on,
    grow,
    process,
    refer,
    retire_by_itself,
    save_and_retire,
    save_one,
    save_three,
    save_together,
    verify,
)

IMAGES_MIN: Final = 10_000

Plans = tuple[Plan, ...]


def only_open(trainer: Trainer) -> None:
    """Makes the pool, if need be, and saves nothing."""


EXPLORATIONS: Final[Mapping[str, tuple[Plans, tuple[int, ...], int]]] = {
    "first format, begun three times": ((only_open, only_open, save_one), (200, 20, 5), 1800),
    "save, share": ((save_three, save_one), (60, 4), 1300),
    "save, retire, use space again": ((save_and_retire, save_one), (60, 4), 1800),
    "several clients, one commit": ((save_together, save_one), (40, 4), 1900),
    "retire by itself": ((retire_by_itself,), (100,), 1100),
    "grow": ((grow, save_one), (60, 4), 1400),
    "collect what was deleted": ((collect,), (30,), 1100),
    "give space back": ((give_back, save_one), (30, 3), 1400),
    "give space back in a run": ((give_back_and_go_on,), (40,), 600),
    "reference files": ((refer, save_one), (60, 3), 2600),
    "crash in recovery from a crash": ((save_one, save_one, save_one), (60, 6, 3), 4500),
}
"""What the processes do, how many images are verified at a moment of each, and how many distinct
ones there are at least. Two explorations have hardly an image in common."""

DEEPER: Final = 4
PARTS: Final = 4


def explorer(
    plans: Plans,
    budgets: tuple[int, ...],
    faults: Faults | None = None,
    trainer: type[Trainer] = Trainer,
) -> Explorer[Fact]:
    first, *others = plans
    return Explorer(
        processes=[process(first, trainer), *(process(each, Roomy) for each in others)],
        verify=verify,
        start=lambda: disk(faults),
        budgets=budgets,
        noise=True,
    )


def persists_of(plan: Plan) -> int:
    files = disk()
    process(plan)(files, lambda fact: None)
    return files.persists


def explored_with(faults: Faults, plan: Plan, trainer: type[Trainer] = Trainer) -> Exploration:
    """``plan`` where an operation fails, and the pool is opened again in the same boot."""
    return explorer((plan,), (30,), faults, trainer).explore()


def persist_fails(number: int) -> Faults:
    return Faults(persist=frozenset({number}))


class Tight(Trainer):
    """One that has to use space again, but has room for a save that is begun again."""

    max_bytes = SMALL + 10 * PAGE


def no_space(number: int) -> Faults:
    return Faults(grow=frozenset({number}))


@pytest.mark.parametrize("name", EXPLORATIONS)
def test_every_crash_leaves_the_state_before_or_after(name: str) -> None:
    plans, budgets, images_min = EXPLORATIONS[name]
    found = explorer(plans, budgets).explore()
    print(f"{name}: {found}")
    assert len(found.images) >= images_min


@pytest.mark.parametrize("number", range(1, persists_of(save_and_retire) + 1))
def test_a_failed_persist_and_a_power_loss_later_lose_nothing_reported(number: int) -> None:
    print(explored_with(persist_fails(number), save_and_retire))


@pytest.mark.parametrize("number", range(1, persists_of(save_together) + 1))
def test_a_persist_that_several_share_fails_for_all_and_loses_nothing_reported(number: int) -> None:
    print(explored_with(persist_fails(number), save_together, Roomy))


@pytest.mark.parametrize("number", [3, 5, 8, 11])
def test_a_failed_persist_loses_no_reference_file(number: int) -> None:
    print(explored_with(persist_fails(number), refer, Tight))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_space_to_grow_loses_nothing(number: int) -> None:
    print(explored_with(no_space(number), grow))


def test_more_than_ten_thousand_distinct_images_are_opened_and_verified() -> None:
    assert sum(images_min for _, _, images_min in EXPLORATIONS.values()) > IMAGES_MIN


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", EXPLORATIONS)
def test_a_deeper_search_finds_nothing_either(name: str, seed: int) -> None:
    plans, budgets, _ = EXPLORATIONS[name]
    deeper = explorer(plans, tuple(budget * DEEPER for budget in budgets))
    print(replace(deeper, seed=seed).explore())


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("plan", [save_three, retire_by_itself, grow, collect, refer])
def test_no_failed_persist_loses_anything(plan: Plan, part: int, seed: int) -> None:
    """Every persist of a plan, in turns of ``PARTS`` tests, which may go on side by side."""
    trainer = Roomy if plan in (save_three, retire_by_itself) else Tight
    budgets = (6, 1) if plan in (collect, refer) else (16, 3)  # of many files, and slow
    for number in range(1 + part, persists_of(plan) + 1, PARTS):
        search = explorer((plan, save_one), budgets, persist_fails(number), trainer)
        print(number, replace(search, seed=seed).explore())
