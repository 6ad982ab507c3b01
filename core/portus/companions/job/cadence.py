"""``Cadence``: decides when a training saves."""

from __future__ import annotations

import logging
import os
import platform
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

import msgspec
import torch

from portus.companions.cadence.bound import (
    MAX_OVERHEAD,
    Costs,
    Decision,
    Rule,
    Tuner,
    describe_conflict,
    overhead,
    shortest,
)
from portus.companions.job import journal
from portus.companions.job.clock import Clock
from portus.companions.job.exchange import beside, broadcast, standing
from portus.companions.job.preemption import Preemption
from portus.companions.job.stock import Framework
from portus.engine.settings.fits import parse_seconds
from portus.errors import UsageError

_log: Final = logging.getLogger("portus")

FORMAT: Final = 1
"""The format of the state of a ``Cadence``."""

CHECKS: Final = 0.7
"""The share of the time left, in steps as long as those before, after which rank 0 of several ranks
that save at times looks at the clock again and tells the others."""


def parse_cadence(
    every: str | int = "auto", max_overhead: float = MAX_OVERHEAD, mtbf: float | str | None = None
) -> tuple[Literal["auto"] | int | float, Rule]:
    """Return a user's interval as "auto", steps (an int) or seconds (a float), and the rule. Raise
    ``UsageError`` for invalid values."""
    rule = Rule(
        max_overhead=max_overhead, mtbf_s=None if mtbf is None else parse_seconds("mtbf", mtbf)
    )
    if every == "auto":
        return "auto", rule
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every, rule
    if isinstance(every, str):
        return parse_seconds("every", every), rule
    raise UsageError(
        f"every: expected 'auto', a time such as '30s', or steps over 0, found {every!r}"
    )


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a cadence. measured_on: the hardware, the number of ranks and the kind of medium
    of the costs. left, left_s: steps, or seconds, until the next save."""

    format: Annotated[int, msgspec.Meta(ge=1)]
    measured_on: dict[str, str | int]
    costs: Costs | None
    left: Annotated[int, msgspec.Meta(ge=1)]
    left_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Cadence:
    """Decides when a training saves, so that the cost of saves stays within a bound.

    ```python
    cadence = portus.Cadence(max_overhead=0.035)
    for batch in loader:
        ...
        optimizer.step()
        if cadence.should_save():
            checkpointer.save({..., "cadence": cadence.state_dict()}, step)
    ```

    Args:
        every: "auto" follows the cost of saves, up and down. "30s", "5min" or "1h" is wall time: a
            save comes at the first step that ends so long after the last one began, whatever the
            steps take. A number is that many steps.
        max_overhead: How much all saves together may add to the time of a training without saves,
            as a fraction. With a fixed ``every`` this only sets off a warning, which names an
            interval within the bound.
        mtbf: Mean time between failures of the whole job: seconds, or a text like "4h". The
            interval then minimises the expected loss, within the bound. None: as short as the bound
            allows.
        process_group: The ranks that save together, with a backend for CPU tensors, such as gloo.
            None: all ranks, by a gloo group of its own if the job's group is for devices only.
        preemption: Also asked at each step: a training that has to leave must save first.
        now: A clock in seconds, for replays and tests. None: the clock of this process, and for
            steps on a CUDA device its events; nothing waits for them.

    A step is a step of the optimizer (of all of them, if there are several); if none of torch's
    optimizers steps, it is a call of ``should_save``. All ranks have to take the same steps. Raises
    ``UsageError`` for a value that is not allowed.
    """

    MAX_OVERHEAD: Final = MAX_OVERHEAD
    """The default bound."""

    UNSEEN: Final = "10min"
    """The adapters' interval in place of "auto" when Portus is turned off: other code saves then,
    and its cost is not visible here."""

    def __init__(
        self,
        every: str | int = "auto",
        *,
        max_overhead: float = MAX_OVERHEAD,
        mtbf: float | str | None = None,
        process_group: Any = None,
        preemption: Preemption | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.every, self.rule = parse_cadence(every, max_overhead, mtbf)
        self.decision: Decision | None = None
        """The newest decision, on rank 0."""
        self._group: Any = process_group
        self._has_group = process_group is not None
        self._preemption: Final = preemption
        self._tuner: Final = Tuner(self.rule)
        self._clock: Final = Clock(now)
        self._since_s = self._clock.now_s()
        """The time at which the newest save began, or this object."""
        self._saves = 0
        """The number of intervals that were decided since."""
        self._next = self._first()
        self._due = 0
        """The newest step at which a save was due."""
        self._measured_on: dict[str, str | int] | None = None
        """The hardware of loaded measurements, until a save shows that it is the same here."""
        self._has_warned = False
        # The clock listens to all optimizers of the process: a cadence needs no close.
        weakref.finalize(self, self._clock.close)

    @classmethod
    def create(
        cls,
        framework: Framework,
        every: str | int,
        max_overhead: float,
        mtbf: float | str | None,
        *,
        is_seen: bool,
    ) -> Cadence:
        """Return a cadence for a training under ``framework``. is_seen: False if it saves itself,
        so that nothing can be measured."""
        if every == "auto" and not is_seen:
            every = cls.UNSEEN
            framework.say_once(
                "Portus: checkpoints do not go through Portus here, so Portus cannot measure what "
                f"saves cost: every='auto' saves every {every}"
            )
        return cls(every, max_overhead=max_overhead, mtbf=mtbf)

    def should_save(self) -> bool:
        """Return True if the state should be saved now. Call it after each step, on all ranks.

        When it is True, rank 0 broadcasts the step of the next save, which blocks until all ranks
        have called it. Otherwise it costs less than a microsecond.
        """
        if not self._clock.optimizers:
            self._clock.tick()
        if self._preemption is not None and self._preemption.should_leave():
            return True
        if self._clock.steps < self._next:
            return False
        if isinstance(self.every, float):
            left = self._broadcast(self._steps_left)
            if left > 0:
                self._next = self._clock.steps + left
                return False
        self._due, self._since_s = self._clock.steps, self._clock.now_s()
        self._saves += 1
        measured = self._clock.take()  # on every rank, so no rank keeps them for ever
        self._next = self._due + self._broadcast(lambda: self._decide(measured))
        return True

    def ignore_step(self) -> None:
        """Exclude the time of the current step, because it contains something else, such as a
        validation."""
        self._clock.ignore()

    def state_dict(self) -> dict[str, object]:
        """Return the measurements, and the number of steps, or seconds, left until the next save.
        Only rank 0 has the measurements."""
        left_s = self.every - self._passed_s if isinstance(self.every, float) else None
        state = _State(
            format=FORMAT,
            measured_on=self._here(),
            costs=self._tuner.costs,
            left=max(1, self._next - self._clock.steps),
            left_s=None if left_s is None else max(0.0, left_s),
        )
        plain: dict[str, object] = msgspec.to_builtins(state)
        return plain

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a saved state: the next save is as many steps away as it was. Discard
        measurements from other hardware, another number of ranks or another kind of medium; new
        ones replace them. All ranks have to load the same state.

        Raises ``UsageError`` for the state of a newer Portus, or a wrong one, and changes nothing
        then.
        """
        number = state.get("format")
        if isinstance(number, int) and number > FORMAT:
            raise UsageError(
                f"the state of a cadence has format {number}, and this Portus knows up to "
                f"{FORMAT}: it was made by a newer one. Upgrade Portus here, or leave this state "
                "out; then costs are measured again"
            )
        try:
            saved = msgspec.convert(dict(state), _State)
        except msgspec.ValidationError as error:
            raise UsageError(f"the state of a cadence: {error}") from error
        here = self._here()
        if self._clock.medium is None and "medium" in saved.measured_on:
            here["medium"] = saved.measured_on["medium"]  # the first save will show it
        self._tuner.costs = saved.costs if saved.measured_on == here else None
        is_sure = self._tuner.costs is None or self._clock.medium is not None
        self._measured_on = None if is_sure else here
        # The same on all ranks, whatever their hardware.
        is_same = saved.measured_on.get("ranks") == here["ranks"]
        steps = saved.left if is_same else self._first()
        if isinstance(self.every, float):
            if saved.left_s is not None and saved.left_s <= self.every:
                self._since_s = self._clock.now_s() - (self.every - saved.left_s)
            steps = 1
        self._next = self._clock.steps + (
            min(steps, self.every) if isinstance(self.every, int) else steps
        )

    @property
    def _passed_s(self) -> float:
        """Return the seconds since the newest save began, or this object."""
        return self._clock.now_s() - self._since_s

    def _first(self) -> int:
        if self.every == "auto":
            return self._tuner.decide().steps
        return self.every if isinstance(self.every, int) else 1

    def _broadcast(self, decide: Callable[[], int]) -> int:
        """Return rank 0's decision, on all ranks."""
        # Times are noisy: ranks that decide alone decide differently, and a save that only some of
        # them begin hangs.
        rank, count = standing(self._group)
        steps = decide() if rank == 0 else 0
        if isinstance(self.every, int):
            return self.every
        if count == 1:
            return steps
        if not self._has_group:
            self._group, self._has_group = beside(), True
        told = broadcast(steps, self._group)
        assert isinstance(told, int)
        return told

    def _steps_left(self) -> int:
        """Return the steps until the next look at the clock; 0 if it is time to save."""
        assert isinstance(self.every, float)
        left_s = self.every - self._passed_s
        if left_s <= 0:
            return 0
        _, count = standing(self._group)
        step_s = self._clock.step_s
        if count == 1 or step_s is None:
            return 1
        return max(1, int(CHECKS * left_s / step_s))

    def _decide(self, measured: Costs | None) -> int:
        self._void_elsewhere()
        if measured is not None and self._saves > 2:  # the first ones make what later ones reuse
            self._tuner.note(measured)
        costs = self._tuner.costs
        if self.every == "auto":
            decision = self._tuner.decide()
            if decision.steps < self._clock.steps_min:
                decision = replace(decision, steps=self._clock.steps_min, reason="steps")
            self.decision = decision
            _log.info("step %d: %s", self._due, decision)
            journal.note_decision(decision)
            if costs is not None:
                self._warn_once(describe_conflict(costs, self.rule))
            # k and k + 1 in turn: slow steps with a period must not meet each save, or none
            # (decision 0124).
            turn = self._saves % 2 if self._clock.is_uneven else 0
            return decision.steps + turn
        steps = self._own_interval()
        if costs is not None:
            share = overhead(costs, steps)
            _log.info("step %d: a save every %d steps costs %.2f %%", self._due, steps, 100 * share)
            if share > self.rule.max_overhead:
                self._warn_once(self._too_dear(costs, steps))
        return self._steps_left() if isinstance(self.every, float) else steps

    def _own_interval(self) -> int:
        """Return the steps of the user's interval, if steps take as long as so far."""
        if isinstance(self.every, int):
            return self.every
        assert isinstance(self.every, float)
        step_s = self._clock.step_s
        return 1 if step_s is None else max(1, round(self.every / step_s))

    def _too_dear(self, costs: Costs, steps: int) -> str:
        least, _ = shortest(costs, self.rule.max_overhead)
        return (
            f"a save every {steps} steps costs {overhead(costs, steps):.2%} of the time, more "
            f"than max_overhead={self.rule.max_overhead:g}: a save costs {costs.cost_s:.3g} s, "
            f"a step takes {costs.step_s:.3g} s. Every {least} steps would stay within it, and "
            "so does every='auto'"
        )

    def _warn_once(self, text: str) -> None:
        if text and not self._has_warned:
            self._has_warned = True
            _log.warning("%s", text)

    def _void_elsewhere(self) -> None:
        """Drop the loaded measurements if a save showed another medium."""
        measured_on, medium = self._measured_on, self._clock.medium
        if measured_on is None or medium is None:
            return
        self._measured_on = None
        if measured_on["medium"] != medium:
            self._tuner.costs = None
            _log.info("saves now go to another medium (%s): their cost is measured again", medium)

    def _here(self) -> dict[str, str | int]:
        _, count = standing(self._group)
        hardware = f"{os.cpu_count()} processors, {platform.machine()}"
        if torch.cuda.is_available():
            hardware = f"{torch.cuda.get_device_name()}, {hardware}"
        return {
            "hardware": hardware,
            "ranks": count,
            "medium": self._clock.medium or "",
        }
