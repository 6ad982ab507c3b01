"""The clock behind ``Cadence``: the duration of steps, and the time that saves add to them.

A step ends when an optimizer steps that has stepped since the step before ended, so trainings with
several optimizers are counted right too. A step is touched if a save was in flight in it, from the
call of save to the commit.

If parameters are on a CUDA device, a step takes the time between two events there, on the stream of
the optimizer. The clock reads events that have occurred, and waits for none.

``Placing`` chooses where device memory is copied first: on the device or to the host, by their
stalls, by Algorithm 1 of CheckFreq (FAST'21, section 4.2): on the device if that has room for a
second copy, and if that stalls training no longer than a copy to the host, which continues until
the next update. Its times are measured here: Ti and Tw by the steps between saves, Tc by the copies
of the saves before, Tg by the copies on the device. Nothing is copied on the device until a copy to
the host outlasted a step; then one is tried, and measured.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from torch.optim.optimizer import Optimizer

from portus.companions.cadence.bound import Costs
from portus.companions.cadence.estimate import SaveCosts, StepTimes
from portus.engine.fence import fence
from portus.engine.fence.device import CopyChoice, DeviceTimeline, Timeline
from portus.engine.media import calls
from portus.engine.pipeline.handle import SaveStats
from portus.engine.pipeline.run import Save

UNTOUCHED_MIN: Final = 3

FRESH: Final = 5
"""The least number of untouched steps in an interval."""

AROUND: Final = 64
"""The newest untouched steps to compare with steps that saves touched; all since the save before,
if these are more."""

TOUCHED_MAX: Final = 1 << 20
"""The most touched steps whose times are kept for ``take``."""

FOREIGN: Final = 10
"""A touched step was long for another reason, such as a validation, if it exceeds this many means,
any untouched step, and ``FOREIGN_S`` seconds, without the time that the save blocked."""

FOREIGN_S: Final = 1.0


SAVES_MAX: Final = 64
"""The most saves, the newest, whose statistics are kept for ``take``."""


class HostTimeline:
    """The moments of this process. ``now``: returns seconds, from any moment on."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.mark: Final = now

    def between(self, first: float, second: float) -> float:
        """Return the seconds between two moments: see ``Timeline``."""
        return second - first


class Clock(fence.Listener):
    """A counter and timer of steps, from its creation until its close. One thread steps; saves may
    begin in another. ``now``: returns seconds, from any moment on; None: those of this process, and
    of the device that the first optimizer's parameters are on."""

    @calls.mark
    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self.now_s: Final = now or time.perf_counter
        """The seconds of this process, from any moment on."""
        self._timeline: Timeline = HostTimeline(self.now_s)
        self._is_free: Final = now is None
        self.steps = 0
        self.medium: str | None = None
        """The medium of the newest save, once there was one."""
        self.optimizers = False
        """True once an optimizer stepped."""
        self._stepped: set[int] = set()
        self._last: Any = None
        self._ignored = False
        self._pending: deque[tuple[Any, Any, bool, bool]] = deque()
        """The steps whose ends may not have come yet: from, to, touched, ignored."""
        self._call: tuple[Any, Any] | None = None
        self.called_after_s: float | None = None
        """The known time from the step's end, before its update, to the newest call of a save. So
        much of the step after it has passed when the copy begins (CheckFreq's Tw)."""
        self._untouched: Final = StepTimes()
        self._costs: Final = SaveCosts()
        self._touched: deque[float] = deque(maxlen=TOUCHED_MAX)
        self._fresh = 0
        """The number of untouched steps since the call of ``take``."""
        self.steps_min = 1
        """The shortest interval that has ``FRESH`` untouched steps, as the last one was."""
        self._flying: tuple[Save, ...] = ()
        self._stats: list[SaveStats] = []
        self._from = 0.0
        fence.listen(self)

    @calls.mark
    def close(self) -> None:
        """Stop counting."""
        fence.unlisten(self)

    def tick(self) -> None:
        """End a step, and begin the next one."""
        mark = self._timeline.mark()
        last, self._last = self._last, mark
        self.steps += 1
        ignored, self._ignored = self._ignored, False
        if last is None or mark is None:
            return
        touched = bool(self._flying)
        if touched:
            self._flying = tuple(each for each in self._flying if not each.over)
        self._pending.append((last, mark, touched, ignored))
        self._look()

    def _look(self) -> None:
        """Measure the steps that have ended. A signal handler may do so in the middle of this."""
        between = self._timeline.between
        while True:
            try:
                step = self._pending.popleft()
            except IndexError:
                break
            first, second, touched, ignored = step
            took = between(first, second)
            if took is None:
                # Not there yet on the device: it is looked at after the next step, without a wait.
                self._pending.appendleft(step)
                break
            if touched:
                # Infinite, so `take` finds it too long, and skips what was measured with it.
                self._touched.append(math.inf if ignored else took)
            elif not ignored:
                self._untouched.add(took)
                self._fresh += 1
        call = self._call
        if call is not None:
            after = between(*call)
            if after is not None:
                self.called_after_s, self._call = after, None

    def ignore(self) -> None:
        """Ignore the time of the current step: it contains a validation."""
        self._ignored = True

    def began(self, save: Save, medium: str) -> None:
        """Record a save that is about to begin."""
        self.medium = medium
        self._flying = (*(each for each in self._flying if not each.over), save)
        self._stats = [*self._stats[-SAVES_MAX:], save.stats]
        self._from = self.now_s()
        mark = self._timeline.mark()
        if self._last is not None and mark is not None:
            self._call = (self._last, mark)

    @property
    def step_s(self) -> float | None:
        """Return the mean of the newest untouched steps; None before there are some."""
        few = len(self._untouched) < UNTOUCHED_MIN
        return None if few else self._untouched.mean_s

    @property
    def is_uneven(self) -> bool:
        """Return True if untouched steps differ much from each other."""
        return self._untouched.is_uneven

    def take(self) -> Costs | None:
        """Return the cost of saves, by those since the last call and those before; None if there
        was no save, or if a step that one touched was long for another reason."""
        self._look()
        stats, self._stats = self._stats, []
        touched, self._touched = self._touched, deque(maxlen=TOUCHED_MAX)
        fresh, self._fresh = self._fresh, 0
        if not stats or not touched:
            return None
        self.steps_min = len(touched) + FRESH
        step_s = self.step_s
        around = self._untouched.newest(max(fresh, AROUND))
        if fresh == 0 or not around:
            # If all steps are touched, the shortest one: then saves seem dearer, not cheaper.
            around = [min((*touched, *around))]
            step_s = around[0] if step_s is None else min(step_s, around[0])
        elif step_s is None:
            step_s = self._untouched.mean_s
        blocked_s = sum(each.blocked_s for each in stats)
        foreign_s = max(FOREIGN * step_s, FOREIGN_S, self._untouched.longest_s)
        if max(touched) > blocked_s + foreign_s:
            return None
        self._costs.add(list(touched), around, is_uneven=self.is_uneven)
        cost_s = self._costs.cost_s
        # Until one has ended its time is unknown: let the next one be later.
        save_s = max(each.total_s for each in stats) or 2 * (self.now_s() - self._from)
        return Costs(step_s=step_s, cost_s=cost_s, save_s=save_s, stall_s=min(blocked_s, save_s))

    def before_step(self, optimizer: Optimizer) -> None:
        """Count the step that ends here, if one does."""
        if not self.optimizers:  # earlier calls were not steps
            self.optimizers, self.steps, self._last = True, 0, None
            self._untouched.clear()
            self._fresh = 0
            self._pending.clear()
            self._timeline = self._timeline_of(optimizer)
        number = id(optimizer)
        # Several optimizers may make one step: it ends when one of them steps again.
        if number in self._stepped or not self._stepped:
            self._stepped = {number}
            self.tick()
        else:
            self._stepped.add(number)

    def _timeline_of(self, optimizer: Optimizer) -> Timeline:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        device = next((each.device for each in parameters if each.is_cuda), None)
        return self._timeline if device is None or not self._is_free else DeviceTimeline(device)


class Placing(CopyChoice):
    """The ``CopyChoice`` of the saves of one model. ``now``: as for ``Clock``."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._clock: Final = Clock(now)
        self._newest: Save | None = None
        self._step_s: float | None = None
        self._host_copy_s: float | None = None
        self._device_copy_s = 0.0
        self._copying: tuple[Timeline, Any, Any] | None = None
        weakref.finalize(self, self._clock.close)

    def begins(self, save: Save) -> None:
        """Record that a save of this model has begun."""
        self._newest = save

    def note_copy(self, timeline: Timeline, first: Any, second: Any) -> None:
        """Record the two moments of a copy on the device, which may be still to come."""
        self._copying = (timeline, first, second)

    def on_device(self, size: int, free: int) -> bool:
        """Return True if a copy on the device is the better one now."""
        self._learn()
        if self._step_s is None or self._host_copy_s is None:
            return False
        update_s = min(self._step_s, self._clock.called_after_s or 0.0)
        stall_s = self._host_copy_s - (self._step_s - update_s)
        # If nothing stalls, the host, whatever a copy on the device takes.
        return stall_s > 0 and free > size and self._device_copy_s <= stall_s

    def _learn(self) -> None:
        costs = self._clock.take()
        step_s = self._clock.step_s or (costs.step_s if costs is not None else None)
        self._step_s = step_s or self._step_s
        newest = self._newest
        if newest is not None and newest.over and newest.stats.copy_s > 0:
            self._host_copy_s = newest.stats.copy_s
        if self._copying is not None:
            timeline, first, second = self._copying
            took = timeline.between(first, second)
            if took is not None:
                self._device_copy_s, self._copying = took, None
