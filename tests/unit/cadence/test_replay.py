"""The replays of docs/cadence.md: right by hand, by theory, and the page has their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from portus.companions.cadence.bound import Costs, Rule, Tuner
from tests.bench.cadence import (
    BOUND,
    DOCS,
    HOUR,
    AsReleased,
    Fixed,
    Job,
    Load,
    Ours,
    drawn,
    main,
    replay,
    tables,
)
from tests.bench.pages import written
from tests.bench.published import Profile, Released, slowdown

PLAIN = Job(
    profile=Profile(step_s=1.0, update_s=1.0, host_copy_s=2.0, device_copy_s=0.0, store_s=3.0),
    slowed=0.0,
    restart_s=7.0,
)
"""A save stalls for 2 s and is committed after 5 s."""


@pytest.mark.long
def test_the_page_has_the_numbers_of_the_replays() -> None:
    page = (DOCS / "cadence.md").read_text()
    assert written(page, tables()) == page, "python -m tests.bench.cadence --write renews it"
    assert (DOCS / "cadence.png").is_file()


def test_a_job_by_hand() -> None:
    """Saves begin at 10 s (of step 10) and 22 s (of step 20). When it is killed, at 26 s, the
    second is not committed, and two steps came after it. It goes on at 33 s, from step 10."""
    outcome = replay(PLAIN, Fixed(10), [26.0], 50.0)
    assert PLAIN.costs() == Costs(step_s=1.0, cost_s=2.0, save_s=5.0, stall_s=2.0)
    assert [moment for moment, _ in outcome.intervals] == [0.0, 10.0, 22.0, 33.0, 43.0]
    assert outcome.lost == [20 + 2 - 10]
    assert outcome.steps == 10 + 10 + 5
    assert outcome.goodput == 25 / 50
    assert outcome.overhead == (2 + 2 + 2) / (10 + 10 + 2 + 10 + 5)


def test_a_save_that_is_not_over_holds_the_next_one_up() -> None:
    outcome = replay(PLAIN, Fixed(1), [], 100.0)
    assert [moment for moment, _ in outcome.intervals][:4] == [0.0, 1.0, 6.0, 11.0]


def test_a_failure_while_the_job_starts_again_kills_that_too() -> None:
    outcome = replay(PLAIN, Fixed(10), [12.0, 15.0, 20.0], 40.0)
    assert [moment for moment, _ in outcome.intervals] == [0.0, 10.0, 27.0, 37.0]
    assert outcome.lost == [10.0]


def test_a_load_stretches_steps_and_work_is_told_without_it() -> None:
    load = Load(((10.0, 20.0),), steps=2.0)
    assert load.after(5.0, 7.0) == 14.0
    assert load.after(5.0, 12.0) == 22.0
    assert load.work(5.0, 22.0) == 12.0


@pytest.mark.parametrize(("interval", "mtbf_s"), [(50, 300.0), (100, 900.0), (400, 900.0)])
def test_a_fixed_interval_has_the_goodput_of_dalys_formula(interval: int, mtbf_s: float) -> None:
    """Saves that stall for all that they take, as the formula has them."""
    at_once = Job(
        profile=Profile(step_s=1.0, update_s=1.0, host_copy_s=4.0, device_copy_s=0.0, store_s=0.0),
        slowed=0.0,
        restart_s=20.0,
    )
    horizon = 3000 * mtbf_s
    outcome = replay(at_once, Fixed(interval), drawn(mtbf_s, horizon), horizon)
    assert len(outcome.lost) > 2000
    assert outcome.goodput * slowdown(interval, 4.0, mtbf_s, 20.0) == pytest.approx(1, rel=0.03)


def test_no_failure_loses_more_than_two_intervals() -> None:
    way = Ours(Tuner(Rule(max_overhead=BOUND)))
    outcome = replay(Job(), way, drawn(HOUR / 4, 100 * HOUR), 100 * HOUR)
    longest = max(steps for _, steps in outcome.intervals)
    assert len(outcome.lost) > 300
    assert longest < max(outcome.lost) <= 2 * longest


@pytest.mark.parametrize("saves", [1.0, 3.0])
def test_the_bound_is_held_under_a_load_that_comes_and_goes(saves: float) -> None:
    load = Load(tuple((hour * HOUR, (hour + 1) * HOUR) for hour in (2, 4, 6)), 1.5, saves)
    outcome = replay(Job(load=load), Ours(Tuner(Rule(max_overhead=BOUND))), [], 9 * HOUR)
    assert 0.9 * BOUND < outcome.overhead < 1.02 * BOUND


def test_what_was_released_waits_for_its_profile_and_then_grows() -> None:
    outcome = replay(Job(), AsReleased(Released(Job().profile)), [], 2 * HOUR)
    steps = [steps for _, steps in outcome.intervals]
    assert steps[:4] == [99 + 5, 5, 7, 9]
    assert steps[-1] == 69 == max(steps[1:])
    assert Job().costs().cost_s / 67 > 0.05 > Job().costs().cost_s / 69


def test_failures_of_ones_own_are_replayed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    trace.write_text("4000\n9000.5\n")
    monkeypatch.setattr("sys.argv", ["cadence", "--trace", str(trace)])
    main()
    table = capsys.readouterr().out
    assert "| every epoch |" in table
    assert "| Portus | " in table
    trace.write_text("")
    with pytest.raises(SystemExit, match="expected seconds over 0, one a line"):
        main()
