"""Intervals that others published, to compare with: Young's, Daly's and CheckFreq's.

Young and Daly suppose failures that come at random at a constant rate, at any moment.

CheckFreq: its algorithm as it was published, and its behaviour as it was released. Source: J.
Mohan, A. Phanishayee, V. Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing",
FAST'21, Algorithm 1; and its repository, msr-fiddle/CheckFreq (2021). The two differ: what was
released does not use ``p`` nor ``Tw``, and its interval only grows.
"""

from __future__ import annotations

import enum
import math
import statistics
from dataclasses import dataclass, fields
from typing import Final

from portus.companions.cadence.bound import not_negative, round_up, share
from portus.engine.settings.fits import over_zero


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between saves that lose the least time, to first order.

    cost_s: what a save adds to the time of training (not its whole duration); 0 or more.
    mtbf_s: mean time between failures of the whole job; over 0.

    Source: J. W. Young, CACM 17(9), 1974: the square root of 2 * cost * mtbf. Good while the cost
    is far under the mtbf. Raises ``UsageError`` outside these ranges.
    """
    not_negative("cost_s", cost_s, "seconds")
    return math.sqrt(2 * cost_s * over_zero("mtbf_s", mtbf_s, "seconds"))


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """The same to higher order; good while the cost is under half of the mtbf, and the mtbf beyond.

    Source: J. T. Daly, Future Generation Computer Systems 22(3), 2006, equation 37.
    """
    first = young_s(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def slowdown(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Wall time for each second of work, if a save follows each ``interval_s`` of it; at least 1.

    restart_s: from a failure until training goes on. A save counts once it is over.

    Source: Daly (2006), equation 20: the expected time under exponential failures, exact where
    failures also hit saves and restarts.
    """
    over_zero("interval_s", interval_s, "seconds")
    not_negative("cost_s", cost_s, "seconds")
    over_zero("mtbf_s", mtbf_s, "seconds")
    not_negative("restart_s", restart_s, "seconds")
    tries = math.expm1((interval_s + cost_s) / mtbf_s)
    return mtbf_s * math.exp(restart_s / mtbf_s) * tries / interval_s


class SnapshotPlace(str, enum.Enum):
    """Where the copy is made that training waits for."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a training and its saves take. Seconds and bytes; the paper's names behind.

    ``step_s``: an iteration (Ti). ``update_s``: of it, the update of the weights (Tw).
    ``host_copy_s``: a copy of the state to the host (Tc). ``device_copy_s``: a copy on the device
    (Tg). ``store_s``: from the host to storage (Ts). ``size``: of the state (m). ``device_used``:
    what training takes of the device at most (M). ``device_size``: what it has (Mmax); 0 without.

    Raises ``UsageError`` for what is under 0, and for a step of 0 s.
    """

    step_s: float
    update_s: float
    host_copy_s: float
    device_copy_s: float
    store_s: float
    size: int = 0
    device_used: int = 0
    device_size: int = 0

    def __post_init__(self) -> None:
        over_zero("step_s", self.step_s, "seconds")
        for field in fields(self):
            unit = "seconds" if field.name.endswith("_s") else "bytes"
            not_negative(field.name, getattr(self, field.name), unit)

    @property
    def fits_device(self) -> bool:
        """True if the device has room for a second copy of the state."""
        return self.device_size - self.device_used > self.size


def place_snapshot(profile: Profile) -> tuple[SnapshotPlace, float]:
    """Where Algorithm 1 copies, and what that stalls training for (To, s): on the device if there
    is room, and if training stands still no longer for it than for a copy to the host, which goes
    on until the next update."""
    window = profile.step_s - profile.update_s
    host_stall = max(0.0, profile.host_copy_s - window)
    rounding = 1e-12 * profile.host_copy_s
    if profile.fits_device and profile.device_copy_s <= host_stall + rounding:
        return SnapshotPlace.DEVICE, profile.device_copy_s
    return SnapshotPlace.HOST, host_stall


@dataclass(frozen=True, slots=True)
class IntervalChoice:
    """An interval in steps (k), where to copy, and what a save stalls training for (To, s)."""

    steps: int
    snapshot: SnapshotPlace
    stall_s: float


def algorithm_1(profile: Profile, max_overhead: float) -> IntervalChoice:
    """CheckFreq's Algorithm 1: the shortest interval in which one save ends before the next one
    begins, and whose stall is at most ``max_overhead`` (p) of the steps' time.

    The printed algorithm does not round; here steps are rounded up, so that both hold. Raises
    ``UsageError`` unless ``max_overhead`` is over 0 and under 1.
    """
    share("max_overhead", max_overhead)
    snapshot, stall = place_snapshot(profile)
    in_turn = (profile.host_copy_s + profile.store_s - stall) / profile.step_s
    in_bound = stall / (max_overhead * profile.step_s)
    return IntervalChoice(max(round_up(in_turn), round_up(in_bound)), snapshot, stall)


PROFILED_FROM: Final = 5
"""The first iteration that the released code times; it decides at ``DECIDES_AT``."""

DECIDES_AT: Final = 100

GROWS_BY: Final = 2


def released_interval(profile: Profile, step_s: float) -> IntervalChoice:
    """What the released code decides after it measured a step of ``step_s``: a stall is the whole
    copy, nothing of it is hidden, and no bound counts."""
    over_zero("step_s", step_s, "seconds")
    stall, snapshot = profile.host_copy_s, SnapshotPlace.HOST
    if profile.fits_device and stall >= profile.device_copy_s:
        stall, snapshot = profile.device_copy_s, SnapshotPlace.DEVICE
    copy_s = profile.device_copy_s if snapshot is SnapshotPlace.DEVICE else profile.host_copy_s
    whole = copy_s + profile.store_s
    return IntervalChoice(max(1, math.ceil((whole - stall) / step_s)), snapshot, stall)


class Released:
    """The released iterator, an iteration at a time: ask ``due``, save if so, then ``step``.

    It measures steps 5 to 99 and saves nothing meanwhile. From its first save on it watches whole
    intervals: one that took over ``1 + max_overhead`` times its steps, as they were in the profile,
    makes the interval longer by 2 steps; the first one that did not ends the watch, unless
    ``dynamic``. The profile is never made again, so where steps themselves get slower, with
    ``dynamic`` the interval grows for ever. The end of an epoch, where it saves too, is left out.
    """

    def __init__(
        self, profile: Profile, *, max_overhead: float = 0.05, dynamic: bool = False
    ) -> None:
        self.steps: int | None = None
        """The interval; None while it measures."""
        self.mean_s = 0.0
        """What a step took in the profile."""
        self._profile: Final = profile
        self._max_overhead: Final = share("max_overhead", max_overhead)
        self._dynamic: Final = dynamic
        self._calls = 0
        self._since = 0
        self._times: list[float] = []
        self._watching = False
        self._watched_enough = False
        self._watched = -1
        self._drops = False

    @property
    def due(self) -> bool:
        """True if the released code saves before the next iteration."""
        return self.steps is not None and self._since == self.steps

    @property
    def is_settled(self) -> bool:
        """True if the interval stays as it is until a restart."""
        return self._watched_enough

    def step(self, seconds: float) -> None:
        """The iteration that took ``seconds`` has ended, the save that was due after it has begun
        (what that blocked is part of the seconds), and the next iteration begins."""
        if self.steps is None:
            self._measure(seconds)
        elif self.due:
            self._since = 0
            if not self._watching and not self._watched_enough:
                self._watching, self._times = True, []
        if self._watching:
            self._watch(seconds)
        self._since += 1

    def restart(self) -> None:
        """The job was killed and starts again: interval and profile come from its file, the watch
        begins anew and drops the first two times and the last one of its first interval."""
        if self.steps is None:
            self._calls, self._times = 0, []
            return
        self._since, self._times = 0, []
        self._watching = self._watched_enough = False
        self._watched, self._drops = 0, True

    def _measure(self, seconds: float) -> None:
        self._calls += 1
        if PROFILED_FROM <= self._calls < DECIDES_AT:
            self._times.append(seconds)
        elif self._calls == DECIDES_AT:
            self.mean_s = statistics.fmean(self._times)
            self.steps = released_interval(self._profile, self.mean_s).steps
            self._since = 0

    def _watch(self, seconds: float) -> None:
        assert self.steps is not None
        self._watched += 1
        if 0 < self._watched <= self.steps:
            self._times.append(seconds)
        elif self._watched == self.steps + 1:
            if self._drops and len(self._times) > 3:
                self._times, self._drops = self._times[2:-1], False
            expected = self.mean_s * len(self._times)
            if sum(self._times) - expected > self._max_overhead * expected:
                self.steps += GROWS_BY
            elif not self._dynamic:
                self._watching, self._watched_enough = False, True
            self._times, self._watched = [], 0
