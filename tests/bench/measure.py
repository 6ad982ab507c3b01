"""Taking turns: every contender of a row once per round, so that a drifting machine is fair."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

Run = Callable[[], float]
"""One measured run; what it returns is the figure (seconds, unless the row says otherwise)."""

_HOG: Final = "import numpy\na = numpy.ones(1 << 23)\nb = a.copy()\nwhile True: b[:] = a; a[:] = b"


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, median and greatest of some figures."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, figures: list[float]) -> Spread:
        return cls(min(figures), statistics.median(figures), max(figures))


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the table of ``docs/benchmarks.md``.

    ``ratio``: (this, that): the bar is about the median of this / that, taken round by round.
    ``bar``: what it must be, ``at_most`` or at least; None: it is only shown. Without ``ratio``:
    the figure of ``this``.
    """

    name: str
    bar: float | None
    at_most: bool = True
    this: str = "portus"
    that: str | None = None
    unit: str = "s"
    figures: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""

    @property
    def value(self) -> Spread:
        """What the bar is about."""
        mine = self.figures[self.this]
        if self.that is None:
            return Spread.of(mine)
        pairs = zip(mine, self.figures[self.that], strict=True)
        return Spread.of([left / right for left, right in pairs])

    @property
    def met(self) -> bool:
        """True if the median meets the bar, or there is none."""
        median = self.value.median
        if self.bar is None:
            return True
        return median <= self.bar if self.at_most else median >= self.bar

    def run(self, contenders: dict[str, Run], rounds: int, warmups: int = 1) -> Row:
        """Measure: ``warmups`` rounds that do not count, then ``rounds`` that do."""
        for number in range(warmups + rounds):
            for name, contender in contenders.items():
                gc.collect()
                figure = contender()
                if number >= warmups:
                    self.figures.setdefault(name, []).append(figure)
        return self


def timed(act: Callable[[], object]) -> Run:
    """A run that measures seconds of ``act``."""

    def run() -> float:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    return run


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """A list that holds the seconds of the block, once it has ended."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


@contextmanager
def hog() -> Iterator[None]:
    """A process that does nothing but copy memory, on the first core."""
    process = subprocess.Popen([sys.executable, "-c", _HOG])
    try:
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        yield
    finally:
        process.kill()
        process.wait()
