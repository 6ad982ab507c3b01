"""Every legal image after a crash opens, whole (V1, V2, V3, V5, V10).

The engine's pool and pipeline save files of images on a simulated disk. Each exploration crashes
them at every event, kills and power losses both, and lets the next process go on from there. With
``-m long`` the same goes much deeper.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from portus.engine.spec import PAGE
from tests.crash.trainer import (
    SMALL,
    Fact,
    Plan,
    Roomy,
    Trainer,
    disk,
    give_back,
    give_back_and_go_on,
    grow,
    process,
    retire_by_itself,
    save_and_retire,
    save_one,
    save_three,
    save_together,
    verify,
)
from tests.depth import deep
from tests.simulation.crash import Faults
from tests.simulation.explore import Exploration, Explorer

IMAGES_MIN: Final = 10_000

Plans = tuple[Plan, ...]


def only_open(trainer: Trainer) -> None:
    """Makes the pool, if need be, and saves nothing."""


EXPLORATIONS: Final[Mapping[str, tuple[Plans, tuple[int, ...], int]]] = {
    "first format, begun three times": ((only_open, only_open, save_one), (240, 24, 6), 310),
    "save, share": ((save_three, save_one), (70, 4), 1000),
    "save, retire, use space again": ((save_and_retire, save_one), (75, 4), 1300),
    "several clients, one commit": ((save_together, save_one), (50, 4), 1900),
    "retire by itself": ((retire_by_itself,), (170,), 1900),
    "grow": ((grow, save_one), (70, 4), 850),
    "give space back": ((give_back, save_one), (40, 3), 1000),
    "give space back in a run": ((give_back_and_go_on,), (60,), 850),
    "crash in recovery from a crash": ((save_one, save_one, save_one), (70, 6, 3), 1000),
}
"""What the processes do, how many images are verified at a moment of each, and how many distinct
ones there are at least. Chance and the clock begin anew with each run, so images that differ in
nothing else are one. Two explorations have hardly an image in common."""

DEEPER: Final = deep(2)
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


def persists_of(plan: Plan, trainer: type[Trainer] = Trainer) -> int:
    files = disk()
    process(plan, trainer)(files, lambda fact: None)
    return files.persists


def explored_with(faults: Faults, plan: Plan, trainer: type[Trainer] = Trainer) -> Exploration:
    """``plan`` where an operation fails, and the pool is opened again in the same boot."""
    search = explorer((plan,), (30,), faults, trainer)
    found = replace(search, after_fault=True).explore()
    assert found.images, "no operation failed"
    return found


def _some(numbers: Sequence[int]) -> list[Any]:
    """Parameters; two of three wait for `make long`."""
    marks = [() if place % 3 == 0 else (pytest.mark.long,) for place in range(len(numbers))]
    return [pytest.param(number, marks=mark) for number, mark in zip(numbers, marks, strict=True)]


def persist_fails(number: int) -> Faults:
    return Faults(persist=frozenset({number}))


class Tight(Trainer):
    """One that has to use space again, but has room for a save that is begun again."""

    max_bytes = SMALL + 10 * PAGE


def no_space(number: int) -> Faults:
    return Faults(grow=frozenset({number}))


LONG: Final = (
    "save, retire, use space again",
    "several clients, one commit",
    "retire by itself",
    "give space back in a run",
    "crash in recovery from a crash",
    "give space back",
)
"""Those that take long, and have parts in common with the others."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in EXPLORATIONS],
)
def test_every_crash_leaves_the_state_before_or_after(name: str) -> None:
    plans, budgets, images_min = EXPLORATIONS[name]
    found = explorer(plans, budgets).explore()
    print(f"{name}: {found}")
    assert len(found.images) >= images_min


def test_a_search_does_the_same_each_time() -> None:
    first, second = (explorer((only_open, save_one), (1,)).explore() for _ in range(2))
    assert first == second


@pytest.mark.long
@pytest.mark.parametrize("number", _some(range(1, persists_of(save_and_retire) + 1)))
def test_a_failed_persist_and_a_power_loss_later_lose_nothing_reported(number: int) -> None:
    print(explored_with(persist_fails(number), save_and_retire))


@pytest.mark.long
@pytest.mark.parametrize("number", _some(range(1, persists_of(save_together, Roomy) + 1)))
def test_a_persist_that_several_share_fails_for_all_and_loses_nothing_reported(number: int) -> None:
    print(explored_with(persist_fails(number), save_together, Roomy))


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
@pytest.mark.parametrize("plan", [save_three, retire_by_itself, grow])
def test_no_failed_persist_loses_anything(plan: Plan, part: int, seed: int) -> None:
    """None (0), and every persist of a plan, in turns of ``PARTS`` tests, which may go on side by
    side; fewer, by ``DEPTH``. What comes before the failure is searched once, where none fails."""
    trainer = Roomy if plan in (save_three, retire_by_itself) else Tight
    numbers = range(part, persists_of(plan, trainer) + 1, PARTS)
    for number in random.Random(seed).sample(numbers, deep(len(numbers))):
        search = explorer((plan, save_one), (4, 1), persist_fails(number), trainer)
        found = replace(search, seed=seed, after_fault=number > 0).explore()
        assert found.images, f"persist {number} did not fail"
        print(number, found)
