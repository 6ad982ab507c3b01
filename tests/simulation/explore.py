"""Crashes processes at every step, in every legal way, and asks whether what is left is right.

Theory. A crash is tried at every event of the first process: killed with caches alive, killed in
the middle of a store, and by power loss, with as many images as the budget allows. ``verify`` sees
each distinct image once for each set of facts that were known before the crash. Then the next
process runs on what the kills, and some power losses, left behind, and crashes in its turn: so a
crash in the recovery from a crash is tried, and kill, reopen, write more, power loss.

Between two persists the set of images only grows, so most of the budget goes to the moments before
a persist or a sync, and at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic

from tests.simulation.crash import (
    CrashFiles,
    DiskImage,
    Fact,
    Point,
    Recording,
    Scenario,
    record,
    same_each_time,
)

_DUPLICATES: Final = 4
"""Outcomes tried at a point for each image of its budget: many are images seen before."""

_MINOR: Final = 8
"""The budget of a moment at which nothing settles is smaller by this factor."""

Case = tuple[tuple[int, int], ...]
"""One image: for each process the point at which it crashed, and which image that left. Power
losses count from 0; kills are -1 and -2."""


class ImageError(AssertionError):
    """A legal image that is wrong. ``case`` brings it back: ``Explorer.replay``."""

    def __init__(self, message: str, case: Case) -> None:
        super().__init__(message)
        self.case: Final = case


@dataclass(slots=True)
class Exploration:
    """What was tried. ``images``: digests of the distinct ones; ``verified``: calls of verify;
    ``crashes``: moments; ``runs``: of processes."""

    images: set[bytes] = field(default_factory=set)
    verified: int = 0
    crashes: int = 0
    runs: int = 0

    def __str__(self) -> str:
        return (
            f"{len(self.images)} distinct images, {self.verified} verified, "
            f"{self.crashes} crash points in {self.runs} runs"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explorer(Generic[Fact]):
    """What to explore, and how far.

    processes: each runs on what the crash of the one before left; facts go on from one to the
    next. They, and ``verify``, must do the same each time, so that a case can be replayed, and that
    an image which two runs leave is verified once. Chance and the date are the same each time.
    verify: raises anything if ``CrashFiles`` after a crash do not fit the facts, oldest first.
    It may store to them.
    start: where the first process runs.
    budgets: images to verify at a moment of the first process, of the second...; the last goes on.
    after_fault: moments of the first process before an operation failed are passed over. They are
    those of a run without faults, which is to be explored besides, once for all faults.
    noise: a page that was being changed may also come back as noise. That is more than a medium may
    do by its contract; what never shares a page between old and new survives it all the same.
    followed: images of a power loss, at each moment that settles something, on which the next
    process runs; those of kills are followed all.
    """

    processes: Sequence[Scenario[Fact]]
    verify: Callable[[CrashFiles, Sequence[Fact]], None]
    start: Callable[[], CrashFiles] = CrashFiles
    budgets: Sequence[int] = (200, 10)
    followed: int = 2
    after_fault: bool = False
    noise: bool = False
    seed: int = 1

    def explore(self) -> Exploration:
        """Try it all. Raises ``ImageError`` for the first image that ``verify`` does not pass."""
        search = _Search(self)
        search.run(self.start(), (), ())
        return search.found

    def replay(self, case: Case) -> None:
        """Verify one image once more, and run the next process, if there is one, on it."""
        files, facts = self.start(), tuple[Fact, ...]()
        for level, (number, index) in enumerate(case):
            point = self.record(level, files, facts).points[number]
            image = self.image(point, case[:level], index)
            facts, files = point.facts, image.files()
        self.verify(files, facts)
        if len(case) < len(self.processes):
            self.record(len(case), image.files(), facts)

    def record(self, level: int, files: CrashFiles, facts: tuple[Fact, ...]) -> Recording[Fact]:
        """A run of the process ``level``, counted from 0."""
        with same_each_time(level):
            return record(self.processes[level], files, facts)

    def image(self, point: Point[Fact], before: Case, index: int) -> DiskImage:
        """The image that ``index`` names at ``point``, after the crashes ``before``."""
        if index < 0:
            return point.kills()[-index - 1]
        return next(itertools.islice(self.power_losses(point, before), index, None))

    def power_losses(self, point: Point[Fact], before: Case) -> Iterator[DiskImage]:
        """All that the power may leave at ``point``, in an order that the seed decides."""
        seed = random.Random(repr((self.seed, before, point.number)))
        return point.power_losses(seed, noise=self.noise)


class _Search(Generic[Fact]):
    """One exploration, as far as it got."""

    def __init__(self, explorer: Explorer[Fact]) -> None:
        self.explorer: Final = explorer
        self._passed: Final[set[tuple[bytes, tuple[Fact, ...]]]] = set()
        self.found: Final = Exploration()

    def run(self, files: CrashFiles, facts: tuple[Fact, ...], before: Case) -> None:
        """Let the next process run on ``files``, and crash at every point."""
        recording = self.explorer.record(len(before), files, facts)
        self.found.runs += 1
        for point in recording.points:
            if self.explorer.after_fault and not before and not point.failed:
                continue
            settles = point.event is None or point.event.settles
            if settles or not before:
                self.found.crashes += 1
                _Moment(self, recording, point, before, settles).explore()

    def verify(
        self, image: DiskImage, point: Point[Fact], explain: Callable[[], ImageError]
    ) -> bool:
        """Verify ``image``, unless it was; False then."""
        digest = image.digest()
        self.found.images.add(digest)
        if (digest, point.facts) in self._passed:
            return False
        with _explained(explain):
            self.explorer.verify(image.files(), point.facts)
        self._passed.add((digest, point.facts))
        self.found.verified += 1
        return True

    def follow(self, image: DiskImage, point: Point[Fact], case: Case, explain: Explain) -> None:
        """Let the next process, if there is one, run on ``image``."""
        if len(case) < len(self.explorer.processes):
            with _explained(explain):
                self.run(image.files(), point.facts, case)


@dataclass(frozen=True, slots=True)
class _Moment(Generic[Fact]):
    """One point of one run, with all that a crash there may leave."""

    search: _Search[Fact]
    recording: Recording[Fact]
    point: Point[Fact]
    before: Case
    settles: bool

    def explore(self) -> None:
        """Verify the images, and let the next process run on some."""
        explorer = self.search.explorer
        for index, image in enumerate(self.point.kills(), 1):
            self._verify(image, -index)
            self._follow(image, -index)
        budget = explorer.budgets[min(len(self.before), len(explorer.budgets) - 1)]
        if not self.settles:
            budget = -(-budget // _MINOR)
        fresh: list[int] = []
        images = explorer.power_losses(self.point, self.before)
        for index, image in enumerate(itertools.islice(images, budget * _DUPLICATES)):
            if len(fresh) == budget:
                break
            if self._verify(image, index):
                fresh.append(index)
                if self.settles and len(fresh) <= explorer.followed:
                    self._follow(image, index)

    def _verify(self, image: DiskImage, index: int) -> bool:
        return self.search.verify(image, self.point, lambda: self._explain(image, index))

    def _follow(self, image: DiskImage, index: int) -> None:
        case = (*self.before, (self.point.number, index))
        self.search.follow(image, self.point, case, lambda: self._explain(image, index))

    def _explain(self, image: DiskImage, index: int) -> ImageError:
        case = (*self.before, (self.point.number, index))
        event = f"before {self.point.event.text}" if self.point.event else "at the end"
        lines = [
            f"a crash left what is wrong; seed {self.search.explorer.seed}, case {case}",
            f"process {len(case)} crashed at point {self.point.number}, {event}",
            "after these events:",
            *(f"  {line}" for line in self.recording.tail(self.point.number)),
            f"facts: {self.point.facts!r}",
            "the crash decided:",
            *(f"  {line}" for line in image.note),
        ]
        return ImageError("\n".join(lines), case)


Explain = Callable[[], ImageError]


@contextlib.contextmanager
def _explained(explain: Explain) -> Iterator[None]:
    """Turn whatever is raised inside into an ``ImageError`` that says how to get there again."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        raise explain() from error
