"""What ways to choose an interval are worth: traces of failures, replayed.

python -m tests.bench.cadence [--write]      prints the tables of docs/cadence.md, or renews them
                                             there, and the pictures beside them
python -m tests.bench.cadence --trace FILE   replays failures of your own: seconds since the start,
                                             one a line

A replay knows steps, saves and failures, and nothing else. Every way to choose saves in the same
manner, so that only the interval differs.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from portus.companions.cadence.bound import Costs, Rule, Tuner
from tests.bench.pages import table, written
from tests.bench.published import Profile, Released, algorithm_1, daly_s

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
HOUR: Final = 3600.0
BOUND: Final = 0.035
"""The overhead that CheckFreq reports, and what is asked for here."""

PROFILE: Final = Profile(step_s=1.0, update_s=0.1, host_copy_s=2.5, device_copy_s=0.01, store_s=5.0)


@dataclass(frozen=True, slots=True)
class Load:
    """Times, as (from, to) in seconds, in which something else uses the machine: then steps take
    ``steps`` times as long, and saves cost and take ``saves`` times as much."""

    times: tuple[tuple[float, float], ...] = ()
    steps: float = 1.0
    saves: float = 1.0

    def at(self, moment: float) -> tuple[float, float, float]:
        """What steps and saves take at a moment, and until when."""
        for begin, end in self.times:
            if moment < begin:
                return 1.0, 1.0, begin
            if moment < end:
                return self.steps, self.saves, end
        return 1.0, 1.0, math.inf

    def after(self, moment: float, work_s: float) -> float:
        """When work that takes ``work_s`` without load is done, begun at a moment."""
        while True:
            slower, _, until = self.at(moment)
            if moment + work_s * slower <= until:
                return moment + work_s * slower
            work_s -= (until - moment) / slower
            moment = until

    def work(self, begin: float, end: float) -> float:
        """What is done between two moments, in seconds of work without load."""
        done = 0.0
        while begin < end:
            slower, _, until = self.at(begin)
            done += (min(until, end) - begin) / slower
            begin = until
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training. ``slowed``: the share of its speed that it loses while a save is in flight.
    ``restart_s``: from a failure until it goes on. Without a GPU's room for a second copy."""

    profile: Profile = PROFILE
    slowed: float = 0.3
    restart_s: float = 60.0
    epoch_steps: int = 3600
    load: Load = field(default_factory=Load)

    def costs(self, moment: float | None = None) -> Costs:
        """What a save costs where nothing else uses the machine; or at a moment."""
        steps, saves = (1.0, 1.0) if moment is None else self.load.at(moment)[:2]
        return _costs(self.profile, self.slowed, steps, saves)


@functools.lru_cache
def _costs(profile: Profile, slowed: float, steps: float, saves: float) -> Costs:
    stall_s = algorithm_1(profile, BOUND).stall_s
    save_s = profile.host_copy_s + profile.store_s
    cost_s = stall_s + slowed * (save_s - stall_s)
    return Costs(
        step_s=steps * profile.step_s,
        cost_s=saves * cost_s,
        save_s=saves * save_s,
        stall_s=saves * stall_s,
    )


class Way(Protocol):
    """A way to choose the interval."""

    def interval(self, past: Costs | None, coming: Costs) -> int:
        """Steps until the next save. ``past``: what was measured since the save before, if that
        was one; ``coming``: what the interval will show to those who look at each step."""

    def restart(self) -> None:
        """The job was killed and goes on."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    steps: int

    def interval(self, past: Costs | None, coming: Costs) -> int:
        return self.steps

    def restart(self) -> None:
        """Nothing to remember."""


@dataclass(frozen=True, slots=True)
class AsReleased:
    """CheckFreq, by the behaviour of its code; its own bound is 5 %."""

    released: Released

    def interval(self, past: Costs | None, coming: Costs) -> int:
        if self.released.is_settled and self.released.due:
            return self.released.steps or 1
        steps, seconds = 0, coming.step_s + coming.cost_s
        while True:
            self.released.step(seconds)
            steps, seconds = steps + 1, coming.step_s
            if self.released.due:
                return steps

    def restart(self) -> None:
        self.released.restart()


@dataclass(frozen=True, slots=True)
class Ours:
    """``portus.companions.cadence.bound``; what it measured is part of the state."""

    tuner: Tuner

    def interval(self, past: Costs | None, coming: Costs) -> int:
        if past is not None:
            self.tuner.note(past)
        return self.tuner.decide().steps

    def restart(self) -> None:
        """It goes on with what it knew."""


def ways(job: Job, mtbf_s: float) -> dict[str, Way]:
    """What is compared. ``mtbf_s`` is told to Young and Daly, and to one of ours."""
    young = daly_s(job.costs().cost_s, mtbf_s) / job.profile.step_s
    return {
        "every 1000 steps": Fixed(1000),
        "every epoch": Fixed(job.epoch_steps),
        "CheckFreq, as released": AsReleased(Released(job.profile)),
        "Young/Daly": Fixed(max(1, round(young))),
        "Portus": Ours(Tuner(Rule(max_overhead=BOUND))),
        "Portus, mtbf given": Ours(Tuner(Rule(max_overhead=BOUND, mtbf_s=mtbf_s))),
    }


@dataclass(frozen=True, slots=True)
class Span:
    """What was done from the begin of one save, or of the job, to the begin of the next, a failure
    or the end: steps, each of ``step_s``. ``committed_s``: when the save that was in flight was;
    None if none was. ``cost_s``: of that save."""

    begin_s: float
    end_s: float
    steps: float
    step_s: float
    committed_s: float | None
    cost_s: float
    failed: bool


@dataclass(slots=True)
class Outcome:
    """What became of a job. ``steps``: done at the end, and ``possible``: without saves and
    failures. ``cost_s`` of saves, ``worked_s`` by steps, those done twice included. ``lost``: steps
    to be done again, for each failure. ``intervals``: (moment, steps)."""

    steps: float = 0.0
    possible: float = 0.0
    cost_s: float = 0.0
    worked_s: float = 0.0
    lost: list[float] = field(default_factory=list)
    intervals: list[tuple[float, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """The share of what was possible that is done, and still there."""
        return self.steps / self.possible

    @property
    def overhead(self) -> float:
        """What saves added to the time of steps."""
        return self.cost_s / self.worked_s


def replay(job: Job, way: Way, failures: Sequence[float], horizon_s: float) -> Outcome:
    """A job from 0 to ``horizon_s``, killed at each of these moments (seconds, in order). A
    failure while it starts again kills that too."""
    found = Outcome(possible=job.load.work(0.0, horizon_s) / job.profile.step_s)
    now = done = durable = 0.0
    pending: tuple[float, float] | None = None  # the save in flight: when it ends, what it saves
    past: Costs | None = None
    while now < horizon_s:
        costs = job.costs(now)
        steps = way.interval(past, costs)
        found.intervals.append((now, steps))
        begin = now + (costs.cost_s if pending else 0.0)
        ready = job.load.after(begin, steps * job.profile.step_s)
        end = max(ready, pending[0]) if pending else ready  # one save at a time
        failure = _next(failures, now)
        until = min(end, failure, horizon_s)
        made = min(float(steps), job.load.work(begin, until) / job.profile.step_s)
        found.cost_s += min(until, begin) - now + max(0.0, until - ready)
        worked_s = max(0.0, min(until, ready) - begin)
        found.worked_s += worked_s
        committed_s = pending[0] if pending and pending[0] <= until else None
        found.spans.append(
            Span(
                begin_s=now,
                end_s=until,
                steps=made,
                step_s=worked_s / made if made else costs.step_s,
                committed_s=committed_s,
                cost_s=until - now - worked_s if committed_s is not None else 0.0,
                failed=until == failure,
            )
        )
        done += made
        if pending and pending[0] <= until:
            durable, past = (
                pending[1],
                replace(costs, step_s=(ready - begin) / steps, cost_s=begin - now + end - ready),
            )
        pending = (end + job.costs(end).save_s, done)
        now = until
        if until == failure:
            found.lost.append(done - durable)
            done, pending, past = durable, None, None
            way.restart()
            while failure <= now:
                now = failure + job.restart_s
                failure = _next(failures, failure)
    found.steps = done
    return found


def _next(failures: Sequence[float], moment: float) -> float:
    position = bisect.bisect_right(failures, moment)
    return failures[position] if position < len(failures) else math.inf


def drawn(mtbf_s: float, horizon_s: float, seed: int = 0) -> list[float]:
    """Moments of failures that come at random, ``mtbf_s`` apart on the mean."""
    rng, found, moment = random.Random(seed), [], 0.0
    while moment < horizon_s:
        moment += rng.expovariate(1 / mtbf_s)
        found.append(moment)
    return found


MTBFS: Final = {"15 min": HOUR / 4, "45 min": 0.75 * HOUR, "4 h": 4 * HOUR, "22 h": 22 * HOUR}
TRACE_S: Final = 2 * 7 * 24 * HOUR

HOG: Final = Load(
    tuple((hour * HOUR, (hour + 1) * HOUR) for hour in (2, 5, 8, 11)), steps=1.5, saves=3.0
)
HOG_HOURS: Final = 14


def goodput_table(outcomes: dict[str, dict[str, Outcome]]) -> str:
    """Of each way, over all traces."""
    rows = []
    for name, each in outcomes.items():
        goodputs = " | ".join(f"{100 * outcome.goodput:.1f} %" for outcome in each.values())
        rare = each["22 h"]
        rows.append(f"| {name} | {goodputs} | {100 * rare.overhead:.2f} % |")
    head = " | ".join(("way", *(f"mtbf {name}" for name in MTBFS), "overhead, at 22 h"))
    return table(head, rows)


def hog_table(outcomes: dict[str, Outcome]) -> str:
    """The same job, on a machine that something else uses four hours of fourteen."""
    rows = []
    for name, each in outcomes.items():
        alone, under = _intervals_at(each, 1.9 * HOUR), _intervals_at(each, 2.9 * HOUR)
        after = _intervals_at(each, 4.9 * HOUR)
        overhead = f"{100 * each.overhead:.2f} %"
        rows.append(f"| {name} | {alone} | {under} | {after} | {overhead} |")
    return table("way | steps before | under load | three hours later | overhead", rows)


def _intervals_at(outcome: Outcome, moment: float) -> int:
    return [steps for begin, steps in outcome.intervals if begin <= moment][-1]


def by_mtbf() -> dict[str, dict[str, Outcome]]:
    """All ways, on a drawn trace for each mtbf."""
    job = Job()
    found: dict[str, dict[str, Outcome]] = {}
    for label, mtbf_s in MTBFS.items():
        failures = drawn(mtbf_s, TRACE_S)
        for name, way in ways(job, mtbf_s).items():
            found.setdefault(name, {})[label] = replay(job, way, failures, TRACE_S)
    return found


def under_load() -> dict[str, Outcome]:
    """Ways that follow what they see, and one that does not, without a failure."""
    job = Job(load=HOG)
    chosen: dict[str, Way] = {
        "Algorithm 1, once": Fixed(algorithm_1(job.profile, BOUND).steps),
        "CheckFreq, as released": AsReleased(Released(job.profile)),
        "CheckFreq, as released, dynamic": AsReleased(Released(job.profile, dynamic=True)),
        "Portus": Ours(Tuner(Rule(max_overhead=BOUND))),
    }
    return {name: replay(job, way, [], HOG_HOURS * HOUR) for name, way in chosen.items()}


def tables() -> dict[str, str]:
    """By their marks in the page."""
    return {"goodput": goodput_table(by_mtbf()), "hog": hog_table(under_load())}


def draw(path: Path) -> None:
    """Goodput over the mean time between failures, and the interval while a load comes and goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name, each in by_mtbf().items():
        hours = [MTBFS[label] / HOUR for label in each]
        panels[0].plot(hours, [100 * one.goodput for one in each.values()], "o-", label=name)
    panels[0].set_xscale("log")
    panels[0].set_xlabel("mean time between failures, hours")
    panels[0].set_ylabel("goodput, %")
    for name, outcome in under_load().items():
        moments = [moment / HOUR for moment, _ in outcome.intervals]
        steps = [steps for _, steps in outcome.intervals]
        panels[1].step(moments, steps, where="post", label=name)
    for begin, end in HOG.times:
        panels[1].axvspan(begin / HOUR, end / HOUR, color="gray", alpha=0.15)
    panels[1].set_yscale("log")
    panels[1].set_xlabel("hours (gray: something else uses the machine)")
    panels[1].set_ylabel("interval, steps")
    for panel in panels:
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})


def replayed(trace: Path) -> str:
    """A table for failures of one's own."""
    failures = sorted(float(line) for line in trace.read_text().split())
    if not failures or failures[0] <= 0:
        raise SystemExit(f"{trace}: expected seconds over 0, one a line, found none or less")
    mtbf_s = failures[-1] / len(failures)
    rows = [
        f"| {name} | {100 * outcome.goodput:.1f} % | {100 * outcome.overhead:.2f} % | "
        f"{statistics.fmean(outcome.lost):.0f} |"
        for name, way in ways(Job(), mtbf_s).items()
        for outcome in [replay(Job(), way, failures, failures[-1])]
    ]
    return table("way | goodput | overhead | steps lost at a failure", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the page and its picture")
    parser.add_argument("--trace", type=Path, help="failures to replay: seconds, one a line")
    arguments = parser.parse_args()
    if arguments.trace is not None:
        print(replayed(arguments.trace))
    elif arguments.write:
        page = DOCS / "cadence.md"
        page.write_text(written(page.read_text(), tables()))
        draw(DOCS / "cadence.png")
    else:
        print("\n\n".join(tables().values()))


if __name__ == "__main__":
    main()
