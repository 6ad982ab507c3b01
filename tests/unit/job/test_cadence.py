"""When to save, in a loop: steps by the optimizers' hook, saves by what they are, time by hand."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import portus
from portus.companions.job import clock
from portus.engine.fence import fence
from portus.errors import UsageError
from tests.unit.job.flight import Flight
from tests.warm import Warm


@dataclass
class Moment:
    """Seconds, that pass when the test says so."""

    s: float = 0.0


class Training:
    """A loop whose time stands still but for what the test says that it takes."""

    def __init__(self, **options: Any) -> None:
        moment = self.now = Moment()
        self.cadence = portus.Cadence(now=lambda: moment.s, **options)
        self.layer = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.saved: list[int] = []
        self.steps = 0
        self.flight = Flight(over=True)
        self.left = 0

    def run(
        self, steps: int, *, step_s: float = 0.1, save_s: float = 0.07, flying: int = 1
    ) -> None:
        """A save makes the step after it longer by ``save_s``, and is over ``flying`` steps on."""
        for _ in range(steps):
            self.optimizer.step()
            self.now.s += step_s
            self.steps += 1
            self.left -= 1
            if self.left == 0:
                self.flight.over = True
                self.flight.stats.total_s = flying * step_s
            if self.cadence.should_save():
                self.saved.append(self.steps)
                self.flight, self.left = Flight(), flying
                fence.began(self.flight, "memory")
                self.flight.stats.call_s = save_s / 7
                self.now.s += save_s

    def intervals(self) -> list[int]:
        return [b - a for a, b in zip(self.saved, self.saved[1:], strict=False)]


def test_the_interval_keeps_the_bound_and_follows_both_ways(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="portus")
    training = Training(max_overhead=0.05)
    training.run(200)
    assert training.saved[:3] == [20, 40, 60], "as if a save cost one step; the first is no measure"
    assert training.intervals()[2:] == [14] * 10
    assert (
        "step 60: a save every 14 steps (the bound on overhead): a step takes 0.1 s, a save "
        in (caplog.text)
    )
    training.run(800, save_s=0.21)
    assert training.intervals()[-1] == 42
    training.run(400)
    assert training.intervals()[-1] in (14, 15)
    training.run(400, save_s=0.0, flying=9)
    assert training.intervals()[-1] == 15, "one save at a time, and some steps without one"


def test_saves_that_seemed_free_do_not_hide_what_a_step_takes() -> None:
    """Where each step is one of a save, none tells what it takes without: the machine gets faster,
    and saves seem to cost less than nothing, for ever."""
    training = Training(max_overhead=0.05)
    training.run(200, step_s=0.2, save_s=0.0)
    assert training.intervals()[-1] < 10
    training.run(400, step_s=0.05, save_s=0.04)
    assert training.intervals()[-1] in (16, 17)


def test_a_save_in_flight_costs_what_it_slows_down_too() -> None:
    training = Training(every=1000)
    training.run(1000, save_s=0.0, flying=20)
    training.run(20, step_s=0.15)
    training.run(20)
    costs = training.cadence._clock.take()
    assert costs is not None
    assert costs.step_s == pytest.approx(0.1)
    assert costs.cost_s == pytest.approx(20 * 0.05, abs=0.051)


def test_an_interval_of_ones_own_is_kept_and_what_it_costs_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training(every=10, max_overhead=0.05)
    training.run(55)
    assert training.saved == [10, 20, 30, 40, 50]
    [said] = [each for each in caplog.messages if "max_overhead" in each]
    assert said == (
        "a save every 10 steps costs 7.00% of the time, more than max_overhead=0.05: a save costs "
        "0.07 s, a step takes 0.1 s. Every 14 steps would stay within it, and so does every='auto'"
    )


def test_a_time_is_wall_time_whatever_steps_take() -> None:
    training = Training(every="3s")
    training.run(100)
    assert training.saved == [30, 60, 90]
    training.run(150, step_s=0.2)
    assert training.intervals()[-1] == 15


def test_a_time_goes_on_after_a_restart() -> None:
    training = Training(every="3s")
    training.run(50)
    resumed = Training(every="3s")
    resumed.now.s = 1000.0
    resumed.cadence.load_state_dict(training.cadence.state_dict())
    resumed.run(40)
    assert resumed.saved == [10, 40]


def test_a_given_mtbf_makes_saves_as_rare_as_loses_the_least(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training(max_overhead=0.05, mtbf="1h")
    training.run(1000)
    assert training.intervals()[-1] == 224
    assert "failures come" not in caplog.text
    training = Training(max_overhead=0.05, mtbf=1.05)
    training.run(100)
    assert "failures come about every 10 steps, before the next save" in caplog.text
    assert "max_overhead=0.07 would let saves come first" in caplog.text


def test_a_validation_in_a_touched_step_is_no_cost_of_a_save() -> None:
    for is_told in (False, True):
        training = Training(max_overhead=0.05)
        training.run(60)
        if is_told:
            training.cadence.ignore_step()
        training.now.s += 100.0  # the step after the third save began
        training.run(60)
        assert training.intervals() == [20, 20, 14, 14, 14, 14]


def test_several_optimizers_make_one_step_together() -> None:
    seen = clock.Clock()
    first, second = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2))
    for _ in range(5):
        first.step()
        second.step()
    assert seen.steps == 5
    for _ in range(4):
        second.step()
    assert seen.steps in (8, 9), "one that does not step any more holds up nothing"
    seen.close()
    first.step()
    second.step()
    assert seen.steps in (8, 9)


def test_without_an_optimizer_of_torch_a_call_is_a_step() -> None:
    cadence = portus.Cadence(every=5)
    assert [cadence.should_save() for _ in range(11)] == ([False] * 4 + [True]) * 2 + [False]


def test_calls_before_the_first_step_are_no_steps() -> None:
    training = Training(every=3)
    assert not any(training.cadence.should_save() for _ in range(2)), "batches are accumulated"
    training.run(7)
    assert training.saved == [3, 6]


def test_a_resumed_training_goes_on_with_its_interval() -> None:
    training = Training(max_overhead=0.05)
    training.run(90)
    state = training.cadence.state_dict()
    assert training.cadence._next == 102
    resumed = Training(max_overhead=0.05)
    resumed.cadence.load_state_dict(state)
    resumed.run(40)
    assert resumed.saved == [12, 26, 40]


@pytest.mark.parametrize(
    ("elsewhere", "saved"),
    [
        ({"hardware": "another"}, [12]),
        ({"ranks": 2}, [20]),
        ({"medium": "storage host"}, [12, 26]),
    ],
)
def test_what_was_measured_elsewhere_is_void(
    elsewhere: dict[str, object], saved: list[int]
) -> None:
    training = Training(max_overhead=0.05)
    training.run(90)
    state: dict[str, Any] = training.cadence.state_dict()
    resumed = Training(max_overhead=0.05)
    resumed.cadence.load_state_dict({**state, "measured_on": {**state["measured_on"], **elsewhere}})
    resumed.run(30)
    assert resumed.saved == saved, "how far the next save is, is the same on all ranks"
    assert resumed.cadence._tuner.costs is None or "medium" in elsewhere
    resumed.run(20, save_s=0.01)
    costs = resumed.cadence._tuner.costs
    assert costs is None or costs.cost_s < 0.08, "nothing of it is left"


def test_a_state_of_a_newer_portus_or_a_wrong_one_is_refused_and_nothing_changed() -> None:
    training = Training(max_overhead=0.05)
    training.run(90)
    state: dict[str, Any] = training.cadence.state_dict()
    before = training.cadence._next, training.cadence._tuner.costs
    assert state["costs"] is not None
    for wrong, said in (
        ({"format": 99, "left": 1}, "made by a newer one. Upgrade"),
        ({"format": None}, r"Expected `int`, got `null` - at `\$.format`"),
        ({"left": 0}, r"`int` >= 1 - at `\$.left`"),
        ({"costs": {"step_s": 1.0}}, "missing required field `cost_s`"),
        ({"costs": {**state["costs"], "step_s": "1"}}, "Expected `float`, got `str`"),
        ({"costs": {**state["costs"], "step_s": 0.0}}, "step_s: expected seconds over 0"),
    ):
        with pytest.raises(UsageError, match=said):
            training.cadence.load_state_dict({**state, **wrong})
        assert (training.cadence._next, training.cadence._tuner.costs) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_overhead": 0}, "max_overhead: expected a share"),
        ({"max_overhead": -1}, "max_overhead: expected a share"),
        ({"max_overhead": 3.5}, r"such as 0.035 for 3.5 %; found 3.5"),
        ({"every": 0}, "every: expected 'auto', a time such as '30s', or steps over 0, found 0"),
        ({"every": True}, "every: expected"),
        ({"every": 1.5}, "every: expected"),
        ({"every": "often"}, "every: expected a time such as '30s', '5min' or '1.5h', found 'o"),
        ({"every": "0s"}, "every: expected seconds over 0"),
        ({"mtbf": 0}, "mtbf: expected seconds over 0"),
        ({"mtbf": "4"}, "mtbf: expected a time"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        portus.Cadence(**options)


def test_saves_of_a_checkpointer_are_seen_and_nothing_stays_behind(tmp_path: Path) -> None:
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters())
    cadence = portus.Cadence(max_overhead=0.5)
    steps = 0
    with portus.PoolCheckpointer(tmp_path / "a.portus") as checkpointer:
        while cadence.decision is None or cadence.decision.costs is None:
            assert steps < 10_000
            layer(torch.ones(64)).sum().backward()
            optimizer.step()
            steps += 1
            if cadence.should_save():
                state = {"layer": layer.state_dict(), "optimizer": optimizer.state_dict()}
                checkpointer.save({**state, "cadence": cadence.state_dict()}, steps)
        assert cadence.decision.costs.save_s >= cadence.decision.costs.stall_s > 0
        found: Any = checkpointer.load()
        assert found["cadence"]["left"] == cadence._next - steps
        measured_on: Any = cadence.state_dict()["measured_on"]
        assert measured_on["medium"].startswith("file")
    del cadence
    gc.collect()
    assert not fence._hooks, "torch is left as it was"
    assert fence._listeners == ()


@pytest.mark.long
@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])
def test_all_ranks_save_at_the_steps_that_the_first_one_says(tmp_path: Path, backend: str) -> None:
    """Rank 1 is slower, so what it measures would say something else. The second backend is for
    tensors on devices only, as NCCL is, and there is no device here."""
    with Warm("tests.unit.job.paced").start("run", str(tmp_path), backend) as job:
        assert job.wait() == 0, job.rest()
        ranks = [(tmp_path / f"{rank}").read_text() for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    assert len(ranks[0].split()) > 6


def test_a_signal_handler_that_looks_at_the_clock_takes_no_step_from_whom_it_interrupted() -> None:
    """It may come at any line: between the look whether there is a step, and the taking of it."""
    times = iter(range(100))
    own = clock.Clock(lambda: float(next(times)))
    real, inside = own._timeline.between, [True]

    def between(first: Any, second: Any) -> float | None:
        if inside.pop() if inside else False:
            own._look()
            own.tick()
        return real(first, second)

    own.tick()
    own._timeline.between = between  # type: ignore[method-assign]
    for _ in range(5):
        own.tick()
    own.close()
    assert not own._pending
    assert len(own._untouched) == 6
