"""``Cadence``: says when a training is to save."""

from __future__ import annotations

import logging
import os
import platform
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import torch

from portus.cadence.bounded import Costs, Decision, Rule, Tuner, decide, overhead, shortest
from portus.cadence.steps import parse_every, parse_seconds
from portus.client.clock import Clock
from portus.client.exchange import standing, told_by_first
from portus.errors import UsageError

_log: Final = logging.getLogger("portus")

FIRST_STEPS: Final = 10
"""Until the first save, where the interval is said as a time, and no step was timed yet."""


class Cadence:
    """Says when a training is to save: at the steps that keep what saves cost within a bound.

    ::

        cadence = portus.Cadence(max_overhead=0.035)
        for batch in loader:
            ...
            optimizer.step()
            if cadence.should_save():
                checkpointer.save({..., "cadence": cadence.state_dict()}, step)

    Args:
        every: "auto" follows what saves cost, both ways; "30s", "5min" or "1h" is a time, in whole
            steps; a number is that many steps.
        max_overhead: The share of the time without saves that all that saves cost training may
            add, on the whole. With an interval of your own it is only compared, and a warning
            says which interval would keep it.
        mtbf: Mean time between failures of the whole job: seconds, or "4h". Then saves are as far
            apart as loses the least, if the bound is kept. None: as near as the bound allows.
        process_group: The ranks that save together; None: all. Of a backend for tensors on CPUs,
            such as gloo, or nothing is told without the device.
        now: Seconds, from any moment on; another clock is for replays and tests.

    A step is one of the optimizer (of all of them, if there are several); where none of torch's
    steps, it is a call of ``should_save``. All ranks have to take the same steps. Raises
    ``UsageError`` for what makes no sense.
    """

    def __init__(
        self,
        every: str | int = "auto",
        *,
        max_overhead: float = 0.035,
        mtbf: float | str | None = None,
        process_group: Any = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every: Final[Literal["auto"] | int | float] = parse_every(every)
        mtbf_s = None if mtbf is None else parse_seconds("mtbf", mtbf)
        self.rule: Final = Rule(max_overhead=max_overhead, mtbf_s=mtbf_s)
        self.decision: Decision | None = None
        """The newest one, on rank 0."""
        self._group: Final = process_group
        self._tuner: Final = Tuner(self.rule)
        self._clock: Final = Clock(now)
        self._next = self._first()
        self._due = 0
        """The newest step that was one to save at."""
        self._measured_on: dict[str, str | int] | None = None
        """Where what was loaded was measured, until a save shows that it was here."""
        self._said = False
        weakref.finalize(self, self._clock.close)

    @property
    def next_step(self) -> int:
        """The step that the next save is due at, counted from when this was made."""
        return self._next

    def should_save(self) -> bool:
        """True if the state is to be saved now. Call it after each step, on all ranks.

        Where it is true, rank 0 tells the others the step of the next save: a broadcast, which
        waits for all ranks. Otherwise it costs under a microsecond.
        """
        if not self._clock.optimizers:
            self._clock.tick()
        if self._clock.steps < self._next:
            return False
        self._due = self._clock.steps
        self._next = self._due + self._interval()
        return True

    def ignore_step(self) -> None:
        """Do not count the time of the step that is under way: something else is in it, such as a
        validation."""
        self._clock.ignore()

    def state_dict(self) -> dict[str, object]:
        """What was measured, and how many steps are left until the next save. On rank 0 the
        whole; the others know only the steps."""
        return {
            **self._tuner.state_dict(self._here()),
            "left": max(1, self._next - self._clock.steps),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on as it was, the next save as many steps away as it was. What was measured on other
        hardware, with another number of ranks or to another kind of medium is void; then it is
        measured anew. All ranks have to load the same.

        Raises ``UsageError`` for the state of a newer Portus; then nothing changed.
        """
        here = self._here()
        saved = state.get("measured_on")
        on: Mapping[str, object] = saved if isinstance(saved, Mapping) else {}
        left = state.get("left")
        if self._clock.medium is None and isinstance(on.get("medium"), str):
            here["medium"] = str(on["medium"])  # the first save will show
        counts = self._tuner.load_state_dict(state, here)
        self._measured_on = here if counts and self._clock.medium is None else None
        is_whole = isinstance(left, int) and not isinstance(left, bool) and left > 0
        # The same on all ranks, whatever their hardware is.
        steps = left if is_whole and on.get("ranks") == here["ranks"] else self._first()
        assert isinstance(steps, int)
        self._next = self._clock.steps + (
            min(steps, self.every) if isinstance(self.every, int) else steps
        )

    def _first(self) -> int:
        if self.every == "auto":
            return self._tuner.decide().steps
        return self.every if isinstance(self.every, int) else FIRST_STEPS

    def _interval(self) -> int:
        """Steps from here to the next save, the same on all ranks."""
        rank, count = standing(self._group)
        measured = self._clock.take()  # on every rank, so that none keeps them for ever
        steps = self._decide(measured) if rank == 0 else 0
        if count == 1 or isinstance(self.every, int):
            return self.every if isinstance(self.every, int) else steps
        told = told_by_first(steps, self._group)
        assert isinstance(told, int)
        return told

    def _decide(self, measured: Costs | None) -> int:
        self._void_elsewhere()
        if measured is not None:
            self._tuner.note(measured)
        costs = self._tuner.costs
        if self.every == "auto":
            decision = self.decision = self._tuner.decide()
            _log.info("step %d: %s", self._due, decision)
            if costs is not None and self.rule.mtbf_s is not None:
                self._say_once(self._hopeless(costs))
            return decision.steps
        steps = self._own_interval()
        if costs is not None:
            share = overhead(costs, steps)
            _log.info("step %d: a save every %d steps costs %.2f %%", self._due, steps, 100 * share)
            if share > self.rule.max_overhead:
                self._say_once(self._too_dear(costs, steps))
        return steps

    def _own_interval(self) -> int:
        if isinstance(self.every, int):
            return self.every
        assert isinstance(self.every, float)
        step_s = self._clock.step_s
        return FIRST_STEPS if step_s is None else max(1, round(self.every / step_s))

    def _too_dear(self, costs: Costs, steps: int) -> str:
        least, _ = shortest(costs, self.rule.max_overhead)
        return (
            f"a save every {steps} steps costs {overhead(costs, steps):.2%} of the time, more than "
            f"max_overhead={self.rule.max_overhead:g}: a save costs {costs.cost_s:.3g} s, a step "
            f"takes {costs.step_s:.3g} s. Every {least} steps would keep it, and every='auto' does"
        )

    def _hopeless(self, costs: Costs) -> str | None:
        """What to say if the bound lets failures come faster than saves."""
        assert self.rule.mtbf_s is not None
        most = max(1, int(self.rule.mtbf_s / costs.step_s))
        try:
            decide(costs, replace(self.rule, steps_max=most))
        except UsageError as error:
            return f"{error}. Failures come about every {most} steps"
        return None

    def _say_once(self, text: str | None) -> None:
        if text is not None and not self._said:
            self._said = True
            _log.warning("%s", text)

    def _void_elsewhere(self) -> None:
        """Now that a save showed the medium: was what was loaded measured there?"""
        measured_on, medium = self._measured_on, self._clock.medium
        if measured_on is None or medium is None:
            return
        self._measured_on = None
        if measured_on["medium"] != medium:
            self._tuner.forget()
            _log.info("saves go to another medium now (%s): they are timed anew", medium)

    def _here(self) -> dict[str, str | int]:
        _, count = standing(self._group)
        return {
            "hardware": _hardware(),
            "ranks": count,
            "medium": self._clock.medium or "",
        }


def _hardware() -> str:
    processors = f"{os.cpu_count()} processors, {platform.machine()}"
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {processors}"
    return processors
