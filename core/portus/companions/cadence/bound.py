"""The rule of Portus: the bound on overhead first, then the least expected loss within it.

Theory. A save costs training C seconds of wall time: all that its steps took longer than without
one, blocked or merely slowed. Of every interval of k steps that share is C / (k * Ti), and it stays
within the bound p from k = C / (p * Ti) on. One save must end before the next begins. So k * Ti is
at least the part of a save (Tc + Ts) that runs beside training, without the part that stalls it
(To). Any k from there on is allowed. A job whose mtbf is known takes the k with the least loss,
where C / (k * Ti) + k * Ti / (2 * mtbf) is least. A job without one saves as often as allowed:
whatever its mtbf is, no other allowed k loses less work.

So k = ceil(max((Tc + Ts - To) / Ti, C / (p * Ti))), and more if the mtbf asks for more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from portus.engine.settings.fits import is_number, over_zero
from portus.errors import UsageError

MAX_OVERHEAD: Final = 0.035
"""The default bound: 3.5 %, as in CheckFreq (FAST 2021)."""

_EPSILON: Final = 1e-12
"""A quotient this little above a whole number is that number: 0.14 / (0.05 * 0.2) is 14."""

Reason = Literal["bound", "turn", "failures", "first", "steps"]

WHY: Final[dict[str, str]] = {
    "bound": "the bound on overhead",
    "turn": "a save takes so long",
    "failures": "the least loss at this mtbf",
    "steps": "some steps without a save are needed to know what one takes",
    "first": "nothing was measured yet",
}
"""The reasons for an interval, in words for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured costs of saves for a training, in seconds.

    ``step_s``: a step that no save touched (Ti). ``cost_s``: all that one save adds to the time of
    training (C); a measured one may be under 0. ``save_s``: from the call of save until its commit
    (Tc + Ts). ``stall_s``: the part of it for which training stood still (To).

    Raises ``UsageError`` for a number that is not finite, or under 0 (except ``cost_s``), and for a
    step of 0 s.
    """

    step_s: float
    cost_s: float
    save_s: float = 0.0
    stall_s: float = 0.0

    def __post_init__(self) -> None:
        over_zero("step_s", self.step_s, "seconds")
        if not is_number(self.cost_s):
            raise UsageError(f"cost_s: expected seconds, found {self.cost_s!r}")
        not_negative("save_s", self.save_s, "seconds")
        not_negative("stall_s", self.stall_s, "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The wishes of a user.

    ``max_overhead``: the share of the time without saves that saves may add (p). ``mtbf_s``: mean
    time between failures of the whole job, in seconds; None: unknown.

    Raises ``UsageError`` for values out of range.
    """

    max_overhead: float = MAX_OVERHEAD
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        share("max_overhead", self.max_overhead)
        if self.mtbf_s is not None:
            over_zero("mtbf_s", self.mtbf_s, "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An interval in steps, the reason for it, and the numbers behind it. The first one has no
    ``costs`` yet."""

    steps: int
    reason: Reason
    rule: Rule
    costs: Costs | None = None

    @property
    def overhead(self) -> float:
        """The share of the time without saves that saves are expected to add; 0 if unknown."""
        return 0.0 if self.costs is None else overhead(self.costs, self.steps)

    def __str__(self) -> str:
        text = f"a save every {self.steps} steps ({WHY[self.reason]}): "
        if self.costs is None:
            return f"{text}at most {self.rule.max_overhead:.2%} asked for"
        costs = self.costs
        text += (
            f"a step takes {costs.step_s:.3g} s, a save costs {costs.cost_s:.3g} s, is committed "
            f"after {costs.save_s:.3g} s and stalls {costs.stall_s:.3g} s; expected overhead "
            f"{self.overhead:.2%} of at most {self.rule.max_overhead:.2%}"
        )
        return text if self.rule.mtbf_s is None else f"{text}, mtbf {self.rule.mtbf_s:.6g} s"


def round_up(steps: float) -> int:
    """Return the least number of whole steps that is not under ``steps``; at least 1."""
    return max(1, math.ceil(steps * (1 - _EPSILON)))


def share(name: str, value: object) -> float:
    """Return ``value`` as a float. Raise ``UsageError`` unless it is over 0 and under 1."""
    if not is_number(value) or not 0 < value < 1:  # type: ignore[operator]
        raise UsageError(
            f"{name}: expected a share of the time without saves, over 0 and under 1, such as "
            f"0.035 for 3.5 %; found {value!r}"
        )
    return float(value)  # type: ignore[arg-type]


def overhead(costs: Costs, steps: int) -> float:
    """Return the share of the time without saves that one save every ``steps`` steps adds."""
    return max(0.0, costs.cost_s) / (steps * costs.step_s)


def shortest(costs: Costs, max_overhead: float) -> tuple[int, Reason]:
    """Return the shortest interval in which saves end in turn and within the bound, and which of
    the two limits it."""
    in_turn = round_up((costs.save_s - costs.stall_s) / costs.step_s)
    in_bound = round_up(costs.cost_s / (max_overhead * costs.step_s))
    return (in_bound, "bound") if in_bound >= in_turn else (in_turn, "turn")


def least_lost(costs: Costs, mtbf_s: float) -> int:
    """Return the interval that loses the least to saves and failures together, to first order; of
    two with the same loss, the shorter one.

    Source: Young (1974), in whole steps: k + 1 loses no less than k from the first k on for which
    k * (k + 1) >= 2 * C * mtbf / Ti**2.
    """
    product = 2 * max(0.0, costs.cost_s) * mtbf_s / costs.step_s**2
    steps = max(1, math.floor((math.sqrt(1 + 4 * product) - 1) / 2) - 1)
    # From below by whole steps: the root is a float, and may be one step off.
    while steps * (steps + 1) < product * (1 - 1e-12):
        steps += 1
    return steps


def decide(costs: Costs, rule: Rule) -> Decision:
    """Return the interval for these costs under this rule."""
    steps, reason = shortest(costs, rule.max_overhead)
    if rule.mtbf_s is not None and (better := least_lost(costs, rule.mtbf_s)) > steps:
        steps, reason = better, "failures"
    return Decision(steps=steps, reason=reason, rule=rule, costs=costs)


def describe_conflict(costs: Costs, rule: Rule) -> str:
    """Return a text that failures come before saves under this rule, with a remedy; "" if they do
    not, or if the rule has no mtbf."""
    if rule.mtbf_s is None:
        return ""
    most = max(1, int(rule.mtbf_s / costs.step_s))
    steps, reason = shortest(costs, rule.max_overhead)
    if steps <= most:
        return ""
    if reason == "turn":
        cause = f"takes {costs.save_s:.3g} s until it is committed, and there is one at a time"
        remedy = "Faster storage"
    else:
        cause = f"costs {costs.cost_s:.3g} s, and max_overhead={rule.max_overhead:g}"
        remedy = f"max_overhead={_upwards(overhead(costs, most)):g}"
    return (
        f"failures come about every {most} steps, before the next save: a save {cause}, so saves "
        f"are {steps} steps of {costs.step_s:.3g} s apart. {remedy} would let saves come first"
    )


def _upwards(value: float) -> float:
    """Return ``value`` with two digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit * (1 - 1e-12)) * unit


class Tuner:
    """Averages of recent costs, and the interval for them: longer when saves get more expensive,
    shorter when they get cheaper.

    Costs of saves are noisy. Each new one counts as much as all earlier ones together: the average
    forgets an outlier after a few saves, and follows a change in as many.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule: Final = rule
        self.costs: Costs | None = None
        """The average costs; None before the first save was measured."""

    def note(self, measured: Costs) -> None:
        """Note the measured costs of one more save."""
        before = self.costs
        if before is None:
            self.costs = measured
            return
        self.costs = Costs(
            step_s=measured.step_s,  # an average of many steps already
            cost_s=(before.cost_s + measured.cost_s) / 2,
            save_s=(before.save_s + measured.save_s) / 2,
            stall_s=(before.stall_s + measured.stall_s) / 2,
        )

    def decide(self) -> Decision:
        """Return the interval from here on. While nothing is measured, as if a save cost one
        step."""
        if self.costs is None:
            steps = round_up(1 / self.rule.max_overhead)
            return Decision(steps=steps, reason="first", rule=self.rule)
        return decide(self.costs, self.rule)


def not_negative(name: str, value: object, unit: str) -> float:
    """``value`` as a float. Raises ``UsageError`` unless it is a finite number, 0 or more."""
    if not is_number(value) or not value >= 0:  # type: ignore[operator]
        raise UsageError(f"{name}: expected {unit}, 0 or more, found {value!r}")
    return float(value)  # type: ignore[arg-type]
