"""Goodput and what restarts lose, against what is known: replayed traces, and small histories."""

from __future__ import annotations

import random

import pytest

from portus.companions.journal.account import Account, account
from portus.companions.journal.lines import Line, Saved, SessionBegun, SessionEnded
from tests.bench.cadence import HOUR, Job, Load, Outcome, drawn, replay, ways
from tests.bench.journal import OFTEN, token, written

SHARE_MAX = 0.01
"""Of the true goodput, by which the one of a report may be off."""


def seen(outcome: Outcome) -> Account:
    found = account(written(outcome))
    assert found is not None
    return found


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("way", list(ways(Job(), HOUR)))
def test_goodput_is_within_a_hundredth_of_the_truth_in_replayed_traces(way: str) -> None:
    for mtbf_h, hours, load, seed in (
        (0.75, 60, Load(), 1),
        (4, 150, Load(), 2),
        (3, 120, OFTEN, 3),
    ):
        job = Job(load=load)
        failures = drawn(mtbf_h * HOUR, hours * HOUR, seed)
        outcome = replay(job, ways(job, mtbf_h * HOUR)[way], failures, hours * HOUR)
        found = seen(outcome)
        assert found.goodput == pytest.approx(outcome.goodput, rel=SHARE_MAX)
        lost = sum(each.lost_steps for each in found.restarts)
        assert lost == pytest.approx(sum(outcome.lost), abs=1 + len(found.restarts))
        assert len(found.restarts) >= len(outcome.lost) - 1
        assert found.saves_s == pytest.approx(outcome.cost_s, rel=0.05, abs=60)
        parts = found.kept_s + found.lost_s + found.saves_s + found.down_s + found.other_s
        assert parts == pytest.approx(found.wall_s, rel=0.01)


def session(
    name: str, at_s: float, steps: int, *, resumed: int | None = None, closed: bool = False,
    saves: tuple[int, ...] = (), step: int = 0, asked: tuple[int, ...] = (), boot: str = "b",
    time_s: float | None = None,
) -> list[Line]:  # fmt: skip
    """A session of steps of 1 s; ``saves`` by what they are called, ``step`` when it begins."""
    begun = SessionBegun(
        session=name, at_s=at_s, time_ns=int((at_s if time_s is None else time_s) * 1e9), boot=boot,
        process=1, resumed=None if resumed is None else token(resumed),
        resumed_step=resumed,
    )  # fmt: skip
    lines: list[Line] = [begun]
    for number, each in enumerate(saves, 1):
        done = each - step
        lines.append(
            Saved(
                session=name, number=number, step=each, steps=done,
                at_s=at_s + done, token=token(each), work_s=float(done),
            )
        )  # fmt: skip
    ended = SessionEnded(
        session=name, closed=closed, steps=steps, at_s=at_s + steps,
        work_s=float(steps),
        asked={token(each): each - step for each in asked},
    )  # fmt: skip
    return [*lines, ended]


def one(*lines: list[Line]) -> Account:
    found = account([line for each in lines for line in each])
    assert found is not None
    return found


def test_what_a_restart_loses_is_counted_from_where_it_went_on() -> None:
    found = one(
        session("a", 100, 25, saves=(10, 20)),
        session("b", 200, 8, resumed=20, saves=(25,), step=20),
        session("c", 300, 9, resumed=10, step=10),  # not from the newest one
    )
    first, second = found.restarts
    assert (first.lost_steps, first.resumed_step, first.at) == (5, 20, 20)
    assert (second.lost_steps, second.resumed_step, second.at) == (18, 10, 10)
    assert (found.steps, found.pending_steps, found.lost_steps) == (19, 9, 23)
    assert (found.kept_s, found.lost_s) == (19.0, 23.0)
    assert (found.wall_s, found.down_s) == (209.0, 75.0 + 92.0)
    assert found.goodput == pytest.approx(19 / 209)


def test_a_version_that_was_committed_and_not_told_is_where_a_session_goes_on() -> None:
    found = one(
        session("a", 100, 25, saves=(10,), asked=(10, 20)), session("b", 200, 5, resumed=20)
    )
    assert found.restarts[0].lost_steps == 5


def test_a_job_that_was_killed_before_its_first_save_lost_all() -> None:
    found = one(session("a", 100, 7), session("b", 120, 5))
    assert (found.restarts[0].lost_steps, found.restarts[0].resumed_step) == (7, None)
    assert (found.steps, found.earlier) == (5, 0)


def test_a_job_that_ended_and_is_run_again_from_the_start_is_another_training() -> None:
    found = one(session("a", 100, 20, saves=(20,), closed=True), session("b", 200, 5, closed=True))
    assert (found.restarts, found.earlier, found.steps, found.wall_s) == ((), 1, 5, 5.0)


def test_where_no_version_tells_the_numbers_of_steps_do() -> None:
    found = one(
        session("a", 100, 25, saves=(10, 20), closed=True),
        session("b", 200, 9, saves=(24,), step=20),  # from a real file of step 20
    )
    assert found.restarts[0].resumed_step == 20
    assert found.restarts[0].lost_steps == 5
    assert not found.restarts[0].killed


def test_a_clock_that_is_set_changes_nothing_within_a_boot() -> None:
    found = one(
        session("a", 100, 20, saves=(20,), time_s=5000),
        session("b", 130, 5, resumed=20, time_s=5001),  # set back by half a minute
    )
    assert found.down_s == 10.0
    after_boot = one(
        session("a", 100, 20, saves=(20,), time_s=5000),
        session("b", 3, 5, resumed=20, boot="c", time_s=5050),
    )
    assert after_boot.down_s == 30.0


def test_a_session_whose_end_nobody_told_came_at_least_as_far_as_its_lines() -> None:
    found = one(
        session("a", 100, 25, saves=(10, 20))[:-1], session("b", 200, 5, resumed=20, closed=True)
    )
    assert (found.restarts[0].lost_steps, found.restarts[0].is_exact) == (0, False)


def test_any_lines_give_an_account_that_adds_up() -> None:
    rng = random.Random(7)
    for _ in range(300):
        lines: list[Line] = []
        for number in range(rng.randrange(1, 6)):
            steps = rng.randrange(40)
            saves = tuple(sorted(rng.sample(range(1, 60), rng.randrange(4))))
            made = session(
                f"s{number}", rng.uniform(0, 100), steps, saves=saves,
                resumed=rng.choice([None, *range(60)]), closed=rng.random() < 0.3,
                boot=rng.choice("ab"), time_s=rng.uniform(0, 100),
            )  # fmt: skip
            lines += rng.sample(made, rng.randrange(1, len(made) + 1))
        found = account(lines)
        if found is not None:
            assert 0 <= found.goodput <= 1
            parts = (found.kept_s, found.lost_s, found.saves_s, found.down_s, found.other_s)
            assert sum(parts) == pytest.approx(found.wall_s)
            assert min(parts) >= 0
            assert min(found.wall_s, found.lost_s, found.down_s, found.other_s, found.steps) >= 0
