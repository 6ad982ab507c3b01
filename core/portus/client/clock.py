"""How long steps take, and what saves add to them: the clock behind ``Cadence``.

A step ends when an optimizer steps that has stepped since the step before ended, so trainings with
several optimizers are counted right too. It is touched if a save was in flight in it, from the call
of save to the commit. Times are those of this process: where a device works behind it, steps are
submitted as fast as they are done, on the mean, and nothing waits for the device here.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from torch.optim.optimizer import Optimizer

from portus.cadence.bounded import Costs
from portus.client import fence
from portus.pipeline.handle import SaveStats

UNTOUCHED: Final = 64
"""The newest untouched steps, whose median is what a step takes."""

UNTOUCHED_MIN: Final = 3

TOUCHED_MAX: Final = 1 << 20
"""Touched steps whose times are kept until somebody asks."""

FOREIGN: Final = 10
"""A touched step that takes so many medians, and over ``FOREIGN_S`` seconds, besides what the save
blocked, was long for another reason: a validation, an epoch's end."""

FOREIGN_S: Final = 1.0


SAVES_MAX: Final = 64
"""The newest saves whose statistics are kept until somebody asks."""


class Saving(Protocol):
    """What the clock knows of a save."""

    @property
    def over(self) -> bool: ...

    @property
    def stats(self) -> SaveStats: ...


class Clock:
    """Counts steps and times them, from when it is made until it is closed. One thread steps;
    saves may begin in another. ``now``: seconds, from any moment on."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now: Final = now
        self.steps = 0
        self.medium: str | None = None
        """What the newest save goes to, once there was one."""
        self.optimizers = False
        """True once an optimizer stepped."""
        self._stepped: set[int] = set()
        self._last: float | None = None
        self._ignored = False
        self._untouched: deque[float] = deque(maxlen=UNTOUCHED)
        self._touched: deque[float] = deque(maxlen=TOUCHED_MAX)
        self._flying: tuple[Saving, ...] = ()
        self._stats: list[SaveStats] = []
        self._from = 0.0
        global _clocks
        with _guard:
            _clocks = (*_clocks, self)
        fence.listen(self._before_step)

    def close(self) -> None:
        """Count no more."""
        global _clocks
        fence.unlisten(self._before_step)
        with _guard:
            _clocks = tuple(each for each in _clocks if each is not self)

    def tick(self) -> None:
        """A step ends here, and the next one begins."""
        now = self._now()
        last, self._last = self._last, now
        self.steps += 1
        ignored, self._ignored = self._ignored, False
        if last is None:
            return
        if self._flying:
            self._touched.append(math.inf if ignored else now - last)
            self._flying = tuple(each for each in self._flying if not each.over)
        elif not ignored:
            self._untouched.append(now - last)

    def ignore(self) -> None:
        """The time of the step that is under way says nothing: a validation is in it."""
        self._ignored = True

    def began(self, save: Saving, medium: str) -> None:
        """A save is about to begin."""
        self.medium = medium
        self._flying = (*(each for each in self._flying if not each.over), save)
        self._stats = [*self._stats[-SAVES_MAX:], save.stats]
        self._from = self._now()

    @property
    def step_s(self) -> float | None:
        """The median of the newest untouched steps; None before there are some."""
        few = len(self._untouched) < UNTOUCHED_MIN
        return None if few else statistics.median(self._untouched)

    def take(self) -> Costs | None:
        """What saves cost since this was called last; None if there was none, or if a step that
        they touched was long for another reason."""
        stats, self._stats = self._stats, []
        touched, self._touched = self._touched, deque(maxlen=TOUCHED_MAX)
        if not stats or not touched:
            return None
        # If all steps are touched, the shortest one: then saves seem dearer, not cheaper.
        step_s = self.step_s or min(touched)
        blocked_s = sum(each.blocked_s for each in stats)
        if max(touched) > blocked_s + max(FOREIGN * step_s, FOREIGN_S):
            return None
        cost_s = sum(touched) - len(touched) * step_s
        # While none is over nobody knows how long it takes: let the next one be later.
        save_s = max(each.total_s for each in stats) or 2 * (self._now() - self._from)
        return Costs(step_s=step_s, cost_s=cost_s, save_s=save_s, stall_s=min(blocked_s, save_s))

    def _before_step(self, optimizer: Optimizer) -> None:
        if not self.optimizers:  # calls that were taken for steps until now were none
            self.optimizers, self.steps, self._last = True, 0, None
            self._untouched.clear()
        number = id(optimizer)
        if number in self._stepped or not self._stepped:
            self._stepped = {number}
            self.tick()
        else:
            self._stepped.add(number)


_guard: Final = threading.Lock()
_clocks: tuple[Clock, ...] = ()


def begins(save: Saving, medium: str) -> None:
    """A save of this process is about to begin. ``medium``: the kind that it goes to."""
    for clock in _clocks:
        clock.began(save, medium)
