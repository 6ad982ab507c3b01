"""When to save: every rule against a search of all intervals, in exact arithmetic."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from portus.companions.cadence.bound import Costs, Rule, Tuner, decide, describe_conflict, overhead
from portus.errors import UsageError
from tests.bench.published import (
    IntervalChoice,
    Profile,
    Released,
    SnapshotPlace,
    algorithm_1,
    daly_s,
    slowdown,
    young_s,
)

MS = Fraction(1, 1000)
INTERVALS = range(1, 50_000)
"""All that a search tries; the ranges below need no more."""

milliseconds = st.integers(0, 1000)
steps_ms = st.integers(10, 1000)
thousandths = st.integers(10, 200)
"""Of the bound on overhead."""


def first(holds: Any) -> int:
    """The shortest interval that holds, of which every longer one does too."""
    low, high = INTERVALS.start, INTERVALS.stop
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    assert low < INTERVALS.stop
    return low


@example(44, 0, 51, 7, 0, True, 10)  # alike, but for the rounding of seconds
@given(
    steps_ms,
    st.integers(0, 9),
    milliseconds,
    milliseconds,
    milliseconds,
    st.booleans(),
    thousandths,
)
def test_algorithm_1_is_the_shortest_interval_of_the_cheaper_copy(
    step: int, update: int, host: int, device: int, store: int, fits: bool, bound: int
) -> None:
    profile = Profile(
        step_s=step / 1000,
        update_s=update / 1000,
        host_copy_s=host / 1000,
        device_copy_s=device / 1000,
        store_s=store / 1000,
        size=100,
        device_used=50,
        device_size=151 if fits else 150,
    )
    stalls = {SnapshotPlace.HOST: max(0, host - (step - update))}
    if fits:
        stalls[SnapshotPlace.DEVICE] = device
    stall = min(stalls.values())
    steps = first(lambda k: k * step >= host + store - stall and 1000 * stall <= bound * k * step)
    found = algorithm_1(profile, bound / 1000)
    assert found.steps == steps
    assert found.stall_s == pytest.approx(stall / 1000)
    assert stalls[found.snapshot] == pytest.approx(stall)
    assert found.snapshot is SnapshotPlace.DEVICE or not fits or host - (step - update) < device


@given(
    steps_ms, st.integers(0, 300), milliseconds, milliseconds, thousandths, st.integers(1, 10**5)
)
def test_ours_is_the_least_loss_of_all_intervals_within_the_bound(
    step: int, cost: int, save: int, stall: int, bound: int, mtbf: int
) -> None:
    costs = Costs(step_s=step / 1000, cost_s=cost / 1000, save_s=save / 1000, stall_s=stall / 1000)
    allowed = first(lambda k: k * step >= save - stall and 1000 * cost <= bound * k * step)
    assert decide(costs, Rule(max_overhead=bound / 1000)).steps == allowed

    def loses_less(k: int) -> bool:
        """Than the next longer one; lost: C / (k * Ti) + k * Ti / (2 * mtbf)."""
        return 2 * cost * 1000 * mtbf <= k * (k + 1) * step * step

    best = max(allowed, first(loses_less))
    decision = decide(costs, Rule(max_overhead=bound / 1000, mtbf_s=float(mtbf)))
    assert decision.steps == best
    assert decision.overhead <= bound / 1000 * (1 + 1e-9)


@given(steps_ms, st.integers(1, 300), st.integers(1, 10**5))
def test_no_neighbour_loses_less(step: int, cost: int, mtbf: int) -> None:
    """What the search above supposes: that the loss falls, and then rises."""

    def lost(k: int) -> Fraction:
        return Fraction(cost, k * step) + Fraction(k * step, 2000 * mtbf)

    costs = Costs(step_s=step / 1000, cost_s=cost / 1000)
    best = decide(costs, Rule(max_overhead=0.999, mtbf_s=float(mtbf))).steps
    near = [k for each in (1, 2, best // 2, best * 2) for k in (each, best + each, best - each)]
    shortest = decide(costs, Rule(max_overhead=0.999)).steps
    assert all(lost(best) <= lost(k) for k in near if k >= shortest)


def test_quotients_that_are_whole_are_not_rounded_up_again() -> None:
    assert 0.007 / (0.01 * 0.7) > 1, "in floats it is more"
    assert decide(Costs(step_s=0.7, cost_s=0.007), Rule(max_overhead=0.01)).steps == 1


def test_the_example_of_the_paper_and_of_what_was_released() -> None:
    profile = Profile(step_s=0.2, update_s=0.02, host_copy_s=0.5, device_copy_s=0.05, store_s=1.0)
    choice = algorithm_1(profile, 0.035)
    assert (choice.steps, choice.snapshot) == (46, SnapshotPlace.HOST)
    assert choice.stall_s == pytest.approx(0.32)
    released = Released(profile)
    for _ in range(100):
        released.step(0.2)
    assert released.steps == 5, "its stall would be 32 % of the time"


def test_a_device_with_room_is_copied_on() -> None:
    profile = Profile(
        step_s=0.2, update_s=0.02, host_copy_s=0.5, device_copy_s=0.01, store_s=1.0,
        size=1, device_used=2, device_size=4,
    )  # fmt: skip
    assert algorithm_1(profile, 0.05) == IntervalChoice(8, SnapshotPlace.DEVICE, 0.01)


@given(st.floats(1e-3, 1e3), st.floats(3.0, 1e5))
def test_daly_is_next_to_the_best_of_all_intervals(cost: float, ratio: float) -> None:
    mtbf = ratio * cost
    around = [daly_s(cost, mtbf) * (1 + part / 100) for part in range(-90, 400)]
    best = min(slowdown(interval, cost, mtbf) for interval in around)
    assert slowdown(daly_s(cost, mtbf), cost, mtbf) <= 1.01 * best
    assert young_s(cost, mtbf) == pytest.approx(math.sqrt(2 * cost * mtbf))


def test_where_failures_come_faster_than_saves_daly_works_for_one_mtbf() -> None:
    assert daly_s(20.0, 10.0) == 10.0
    assert daly_s(0.0, 10.0) == 0.0


def released(**options: Any) -> Released:
    """What decided on 5 steps, of 1 s each."""
    profile = Profile(
        step_s=1.0, update_s=0.1, host_copy_s=1.0, device_copy_s=0.0, store_s=5.0, size=1
    )
    found = Released(profile, **options)
    for number in range(1, 101):
        assert not found.due, "it saves nothing while it measures"
        found.step(1.0 if 5 <= number < 100 else 77.0)
    assert (found.steps, found.mean_s) == (5, 1.0)
    return found


def saves(found: Released, steps: int, step_s: float, save_s: float) -> list[int]:
    """After which of so many steps it saved, when a save makes its step longer by ``save_s``."""
    after = []
    for number in range(steps):
        if found.due:
            after.append(number)
            found.step(step_s + save_s)
        else:
            found.step(step_s)
    return after


def test_what_was_released_watches_a_whole_interval_and_adds_two_steps() -> None:
    found = released()
    assert saves(found, 10, 1.0, 0.3) == [4, 9]
    assert found.steps == 5
    saves(found, 1, 1.0, 0.3)
    assert found.steps == 7, "0.3 s of 5 s are 6 %"
    saves(found, 100, 1.0, 0.3)
    assert found.steps == 7, "0.3 s of 7 s are 4.3 %, and that was the last time it looked"
    saves(found, 100, 1.0, 30.0)
    assert found.steps == 7


def test_what_was_released_never_saves_more_often_and_a_dynamic_one_never_stops() -> None:
    found = released(dynamic=True)
    saves(found, 200, 1.0, 0.01)
    assert found.steps == 5
    saves(found, 1000, 1.2, 0.0)
    grown = found.steps
    assert grown is not None
    assert grown > 40, "steps that became slower are taken for the cost of saves"
    saves(found, 1000, 1.0, 0.0)
    assert found.steps >= grown


def test_what_was_released_goes_on_with_its_interval_after_a_restart() -> None:
    found = released()
    found.restart()
    assert saves(found, 30, 1.0, 9.0) == [5, 10, 15, 20, 25], "it drops the time of the save itself"
    fresh = Released(Profile(step_s=1, update_s=0, host_copy_s=1, device_copy_s=1, store_s=1))
    saves(fresh, 60, 1.0, 0.0)
    fresh.restart()
    assert saves(fresh, 99, 1.0, 0.0) == []


def tuned(tuner: Tuner, cost_s: float, step_s: float = 0.1, saves: int = 12) -> int:
    for _ in range(saves):
        tuner.note(Costs(step_s=step_s, cost_s=cost_s, save_s=0.3, stall_s=0.01))
    return tuner.decide().steps


def test_the_interval_follows_costs_both_ways() -> None:
    tuner = Tuner(Rule(max_overhead=0.05))
    assert tuned(tuner, 0.07) == 14
    assert tuned(tuner, 0.19, saves=1) > 14
    assert tuned(tuner, 0.19) == 38
    assert tuned(tuner, 0.07, saves=4) < 20
    assert tuned(tuner, 0.07) == 15, "it comes near from above"
    assert tuned(tuner, 0.07, step_s=0.2, saves=1) == 8, "a step that takes longer pays more of it"
    assert tuned(tuner, -0.01) == 3, "a save has to end before the next one begins"


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_on_the_whole_however_costs_vary(seed: int) -> None:
    rng = random.Random(seed)
    tuner = Tuner(Rule(max_overhead=0.035))
    cost = worked = 0.0
    for number in range(4000):
        mean = 2.0 if number // 500 % 2 else 0.5
        seconds = rng.gammavariate(4, mean / 4)
        tuner.note(Costs(step_s=0.1, cost_s=seconds))
        worked += tuner.decide().steps * 0.1
        cost += seconds
    assert 0.030 < cost / worked < 0.036


def test_a_first_interval_supposes_that_a_save_costs_a_step() -> None:
    assert Tuner(Rule(max_overhead=0.035)).decide().steps == 29


@pytest.mark.parametrize("share", [0, -0.1, 1, 3.5, math.nan, math.inf, True, "0.1", None])
def test_a_bound_that_is_no_share_is_refused(share: Any) -> None:
    with pytest.raises(UsageError, match=r"max_overhead: expected a share .* found"):
        Rule(max_overhead=share)


def test_what_makes_no_sense_is_refused_by_name() -> None:
    for make, said in (
        (lambda: Rule(mtbf_s=0), "mtbf_s: expected seconds over 0, found 0"),
        (lambda: Costs(step_s=0, cost_s=1), "step_s: expected seconds over 0"),
        (lambda: Costs(step_s=1, cost_s=math.nan), "cost_s: expected seconds, found nan"),
        (lambda: Costs(step_s=1, cost_s=1, save_s=-1), "save_s: expected seconds, 0 or more"),
        (lambda: young_s(1, 0), "mtbf_s: expected"),
        (lambda: slowdown(0, 1, 1), "interval_s: expected"),
        (
            lambda: Profile(
                step_s=1, update_s=0, host_copy_s=0, device_copy_s=0, store_s=0, size=-1
            ),
            "size: expected bytes, 0 or more, found -1",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            make()


def test_failures_that_come_before_saves_are_said_with_what_would_help() -> None:
    costs = Costs(step_s=0.1, cost_s=2.13, save_s=3.0, stall_s=0.5)
    told = describe_conflict(costs, Rule(max_overhead=0.001, mtbf_s=50.0))
    assert "about every 500 steps" in told
    assert "so saves are 21300 steps of 0.1 s apart. max_overhead=0.043 would let" in told
    assert describe_conflict(costs, Rule(max_overhead=0.043, mtbf_s=50.0)) == ""
    assert overhead(costs, 500) <= 0.043
    told = describe_conflict(costs, Rule(max_overhead=0.9, mtbf_s=2.4))
    assert "so saves are 25 steps of 0.1 s apart. Faster storage would let" in told
    assert describe_conflict(costs, Rule(max_overhead=0.9, mtbf_s=2.5)) == ""
    assert describe_conflict(costs, Rule(max_overhead=0.001)) == ""


def test_a_decision_says_its_numbers() -> None:
    decision = decide(
        Costs(step_s=0.1, cost_s=0.07, save_s=0.3, stall_s=0.01),
        Rule(max_overhead=0.05, mtbf_s=3600.0),
    )
    assert str(decision) == (
        "a save every 224 steps (the least loss at this mtbf): a step takes 0.1 s, a save costs "
        "0.07 s, is committed after 0.3 s and stalls 0.01 s; expected overhead 0.31% of at most "
        "5.00%, mtbf 3600 s"
    )
