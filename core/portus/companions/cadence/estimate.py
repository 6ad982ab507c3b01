"""Estimates of the time of a step, and of the time that saves add, from noisy measurements.

Theory. The estimate of a step is its mean: the bound on overhead is about wall time, and a median
ignores a loader that is slow once in eight steps. A cost is a difference of two distributions, that
of touched steps and that of untouched ones. The difference of their means needs hundreds of saves
if steps are uneven. But a save shifts the distribution, and the median of all differences between a
touched and an untouched step finds that shift with few saves (Hodges and Lehmann, 1963). A save
touches several steps, and most of its cost may be in one of them. So the first touched steps of all
saves are compared, then the second ones, and so on, and the shifts are added.

A slow step at every eighth one would always meet a save that comes at every eighth one. So if steps
are uneven, intervals alternate between k and k + 1 steps.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

STEPS: Final = 512
"""The number of newest untouched steps that count."""

SAVES: Final = 16
"""The number of newest saves that count."""

NEWEST: Final = 32
"""The newest steps reveal a new level if ``NEWEST_MIN`` of this many are on one side."""

NEWEST_MIN: Final = 28

CHANGED: Final = 3
"""A new cost is detected by this many saves in a row that all cost more than those before, or all
less; by twice as many if steps are uneven, since chance makes three in a row."""

APART: Final = 1.25
"""The least ratio of two levels that counts as a change."""

START: Final = 5
"""First steps of a session, which are dropped if they take ``OUTLIER`` times as long as others, for
example to compile."""

OUTLIER: Final = 10

UNEVEN: Final = 1.1
"""The ratio of mean and median, either way, from which steps are uneven."""

COMPARED: Final = 32
"""Untouched steps to compare each touched one with, evenly spaced by their length."""

PLACES: Final = 256
"""Touched steps of a save to compare one by one; further steps are compared by their mean."""


class StepTimes:
    """The times of untouched steps, in seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=STEPS)
        self._count = 0

    def __len__(self) -> int:
        return len(self._times)

    def add(self, took_s: float) -> None:
        """Add a step that no save touched."""
        self._count += 1
        self._times.append(took_s)
        # By now there are as many later steps to compare the first ones with.
        if self._count == 2 * START:
            self._forget_start()
        if self._count % (NEWEST // 2) == 0:
            self._forget_another_level()

    def clear(self) -> None:
        """Forget all steps."""
        self._times.clear()
        self._count = 0

    def newest(self, count: int) -> list[float]:
        """Return the newest ``count`` times."""
        return list(self._times)[-count:]

    @property
    def mean_s(self) -> float:
        """The mean time of a step."""
        return statistics.fmean(self._times)

    @property
    def longest_s(self) -> float:
        """The longest time of a step."""
        return max(self._times, default=0.0)

    @property
    def is_uneven(self) -> bool:
        """True if steps differ so much that some may always meet a save."""
        usual = statistics.median(self._times) if self._times else 0.0
        return usual > 0 and not 1 / UNEVEN < self.mean_s / usual < UNEVEN

    def _forget_start(self) -> None:
        times = list(self._times)
        usual = statistics.median(times[START:])
        kept = [each for each in times[:START] if each <= OUTLIER * usual]
        self._times = deque([*kept, *times[START:]], STEPS)

    def _forget_another_level(self) -> None:
        times = list(self._times)
        older, newer = times[:-NEWEST], times[-NEWEST:]
        if len(older) < NEWEST:
            return
        before = statistics.median(older)
        above = sum(each > APART * before for each in newer)
        below = sum(each * APART < before for each in newer)
        if max(above, below) >= NEWEST_MIN:
            # A new level, as of another batch size: the mean of both would fit neither
            # (decision 0124).
            self._times = deque(newer, STEPS)


@dataclass(frozen=True, slots=True)
class _Save:
    """The times of one save. ``added_s``: for each touched step, how much longer it took than each
    untouched one. ``rest_s``: the total that the steps after these added."""

    added_s: tuple[tuple[float, ...], ...]
    rest_s: float

    @property
    def total_s(self) -> float:
        return sum(statistics.median(each) for each in self.added_s) + self.rest_s


class SaveCosts:
    """The time that saves add to training, in seconds."""

    def __init__(self) -> None:
        self._saves: deque[_Save] = deque(maxlen=SAVES)
        self._count = 0

    def add(
        self, touched_s: Sequence[float], untouched_s: Sequence[float], *, is_uneven: bool
    ) -> None:
        """Add the times around one more save.

        touched_s: the times of the steps that it touched, in order. untouched_s: the times of the
        steps around them; at least one. is_uneven: whether these differ much.
        """
        self._count += 1
        if self._count == 2:
            self._saves.clear()  # the first save of a process makes buffers that later ones reuse
        usual = _space_evenly(untouched_s)
        added = tuple(tuple(took - each for each in usual) for took in touched_s[:PLACES])
        rest = touched_s[PLACES:]
        self._saves.append(_Save(added, sum(rest) - len(rest) * statistics.fmean(untouched_s)))
        self._forget_another_cost(2 * CHANGED if is_uneven else CHANGED)

    @property
    def cost_s(self) -> float:
        """The total that a save adds. May be under 0."""
        longest = max(len(each.added_s) for each in self._saves)
        total = sum(each.rest_s for each in self._saves)
        for place in range(longest):
            added = [each.added_s[place] for each in self._saves if place < len(each.added_s)]
            # The shift of Hodges and Lehmann: means of noisy steps need hundreds of saves
            # (decision 0124).
            total += statistics.median(itertools.chain(*added)) * len(added)
        return total / len(self._saves)

    def _forget_another_cost(self, changed: int) -> None:
        totals = [each.total_s for each in self._saves]
        older, newer = totals[:-changed], totals[-changed:]
        if len(older) < CHANGED:
            return
        dearer = min(newer) > APART * max(older) and min(newer) > 0
        cheaper = min(older) > APART * max(newer) and min(older) > 0
        if dearer or cheaper:
            self._saves = deque(list(self._saves)[-changed:], SAVES)


def _space_evenly(times: Sequence[float]) -> list[float]:
    """Return at most ``COMPARED`` of some times, evenly spaced by their length."""
    ordered, count = sorted(times), min(len(times), COMPARED)
    return [ordered[(2 * each + 1) * len(ordered) // (2 * count)] for each in range(count)]
