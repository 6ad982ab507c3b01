"""The choice of the first copy of device memory: on the device or to the host, by their stalls.

Algorithm 1 of CheckFreq (FAST'21, section 4.2): on the device if that has room for a second copy,
and if that stalls training no longer than a copy to the host, which continues until the next
update. Its times are measured here: Ti and Tw by the steps between saves, Tc by the copies of the
saves before, Tg by the copies on the device. Nothing is copied on the device until a copy to the
host outlasted a step; then one is tried, and measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from portus.companions.job.clock import Clock
from portus.engine.fence.device import CopyChoice, DeviceRoom, Timeline
from portus.engine.pipeline.run import Save


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

    def on_device(self, room: DeviceRoom) -> bool:
        """Return True if a copy on the device is the better one now."""
        self._learn()
        if self._step_s is None or self._host_copy_s is None:
            return False
        update_s = min(self._step_s, self._clock.called_after_s or 0.0)
        stall_s = self._host_copy_s - (self._step_s - update_s)
        # If nothing stalls, the host, whatever a copy on the device takes.
        return stall_s > 0 and room.is_enough and self._device_copy_s <= stall_s

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
