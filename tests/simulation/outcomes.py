"""The outcomes of a power loss: every combination that ``disk`` allows, or the telling ones.

Theory. A power loss decides a few things, each by itself: what an unpersisted page holds, how
long a file is, which names are there. Each is an *axis* with its options. An outcome is one option
for each axis, so all of them are a product. It is tried whole while it is small. When it is not,
bugs are found near its corners: nearly all lost (something was needed and not persisted), nearly
all kept (something was not to be there yet), one page torn; the rest is sampled.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

from portus.engine.media.read_file import SECTOR
from portus.engine.spec import PAGE
from portus.reach.media.pmem import LINE
from tests.simulation.disk import Disk, NameTable, Page

WORD: Final = 8
"""Bytes that a processor stores as one: a store can be cut at any multiple of it."""

EXHAUSTIVE_MAX: Final = 4096
"""If a power loss has no more outcomes than this, torn pages aside, all are tried."""

NOISE: Final = random.Random("noise").randbytes(PAGE)
"""What a disk may leave of a page that it was writing when the power went, in the worst case."""


class PowerLossChoice(Protocol):
    """One thing that power loss decides, decided."""

    def apply(self, disk: Disk) -> None:
        """Make it so on a disk that has lost everything not persisted."""

    def describe(self) -> str:
        """Return the choice in words, for whoever looks at a failure."""


@dataclass(frozen=True, slots=True)
class PageIs:
    """What a page holds."""

    file: int
    index: int
    content: bytes
    note: str

    def apply(self, disk: Disk) -> None:
        """See ``PowerLossChoice``."""
        disk.files[self.file].pages[self.index] = Page((self.content,), False)

    def describe(self) -> str:
        """See ``PowerLossChoice``."""
        return f"page {self.index} of file {self.file} {self.note}"


@dataclass(frozen=True, slots=True)
class SizeIs:
    """How long a file is."""

    file: int
    size: int

    def apply(self, disk: Disk) -> None:
        """See ``PowerLossChoice``."""
        disk.files[self.file].sizes = (self.size,)
        disk.files[self.file].cut()

    def describe(self) -> str:
        """See ``PowerLossChoice``."""
        return f"file {self.file} has {self.size} bytes"


@dataclass(frozen=True, slots=True)
class NamesAre:
    """The names that there are, and the file of each."""

    names: tuple[tuple[str, int], ...]

    def apply(self, disk: Disk) -> None:
        """See ``PowerLossChoice``."""
        disk.names = NameTable(dict(self.names), dict(self.names))

    def describe(self) -> str:
        """See ``PowerLossChoice``."""
        return "names: " + (", ".join(f"{path} = {file}" for path, file in self.names) or "none")


@dataclass(frozen=True, slots=True)
class Axis:
    """The options for one decision: ``whole``, oldest state first, and ``torn`` ones."""

    whole: tuple[PowerLossChoice, ...]
    torn: tuple[PowerLossChoice, ...] = ()
    page: Page | None = None
    unit: int = SECTOR

    def mix(self, seed: random.Random) -> PowerLossChoice:
        """Any option; for a page also one whose every sector or line was decided by itself."""
        first = self.whole[0]
        pure = 0.75 if self.unit == SECTOR else 0.25
        if self.page is None or not isinstance(first, PageIs) or seed.random() < pure:
            return seed.choice(self.whole + self.torn)
        # Within a line of memory, any 8 bytes too: a bulk copy stores them in no order.
        unit = WORD if self.unit == LINE and seed.random() < 0.3 else self.unit
        pieces = [
            seed.choice(self.page.states)[start : start + unit] for start in range(0, PAGE, unit)
        ]
        return PageIs(
            first.file, first.index, b"".join(pieces), f"has pieces of {unit} bytes of any state"
        )


def power_loss(lost: Disk, choices: Sequence[PowerLossChoice]) -> Disk:
    """What is there after the power came back, if ``choices`` was the outcome.

    lost: the disk without anything that was not persisted; not changed.
    """
    after = lost.copy()
    for choice in choices:
        choice.apply(after)
    after.forget_unnamed()
    return after


def axes(disk: Disk, seed: random.Random, *, noise: bool = False) -> list[Axis]:
    """All that a power loss now would decide, in the order in which it is to be applied."""
    names = [tuple(sorted(each.items())) for each in disk.names.outcomes(seed)]
    found = [Axis(tuple(NamesAre(each) for each in names))]
    for number in sorted({file for each in names for _, file in each}):
        file = disk.files[number]
        for index, page in sorted(file.pages.items()):
            found.append(_page_axis(number, index, page, unit=file.unit, noise=noise))
        # After the pages: it cuts off those behind the end.
        found.append(Axis(tuple(SizeIs(number, size) for size in file.sizes)))
    return [axis for axis in found if len(axis.whole) > 1]


def outcomes(
    disk: Disk, seed: random.Random, *, noise: bool = False
) -> Iterator[Sequence[PowerLossChoice]]:
    """Outcomes of a power loss now, the telling ones first; some come twice.

    All kept; all lost; each single thing changed in these two, and each pair; every torn state of
    a page, the rest kept or lost. Then every combination, if there are at most ``EXHAUSTIVE_MAX``,
    and some more with torn pages; else anything, at random, without end.

    noise: a page that was changed may also hold ``NOISE``.
    """
    found = axes(disk, seed, noise=noise)
    kept = [axis.whole[-1] for axis in found]
    lost = [axis.whole[0] for axis in found]
    yield kept
    yield lost
    yield from _changed(found, (lost, kept), 1)
    torn = list(_torn(found, (lost, kept)))
    yield from _shuffled(torn, seed)
    yield from _changed(found, (lost, kept), 2)
    rest: Iterable[object] = itertools.count()
    if combinations(found) <= EXHAUSTIVE_MAX:
        yield from _shuffled(itertools.product(*(axis.whole for axis in found)), seed)
        if all(axis.unit == SECTOR for axis in found):
            rest = torn  # lines can be torn in far more ways than these
    for _ in rest:
        yield _random(found, seed)


def combinations(found: Sequence[Axis]) -> int:
    """How many outcomes there are, torn pages aside."""
    return math.prod(len(axis.whole) for axis in found)


def _shuffled(
    choices: Iterable[Sequence[PowerLossChoice]], seed: random.Random
) -> Iterator[Sequence[PowerLossChoice]]:
    listed = list(choices)
    seed.shuffle(listed)
    return iter(listed)


def _changed(
    found: Sequence[Axis], backgrounds: Sequence[list[PowerLossChoice]], count: int
) -> Iterator[Sequence[PowerLossChoice]]:
    """Backgrounds with ``count`` of their choices changed."""
    for places in itertools.combinations(range(len(found)), count):
        for options in itertools.product(*(found[place].whole for place in places)):
            for background in backgrounds:
                choices = list(background)
                for place, option in zip(places, options, strict=True):
                    choices[place] = option
                yield choices


def _torn(
    found: Sequence[Axis], backgrounds: Sequence[list[PowerLossChoice]]
) -> Iterator[Sequence[PowerLossChoice]]:
    for place, axis in enumerate(found):
        for option, background in itertools.product(axis.torn, backgrounds):
            yield [*background[:place], option, *background[place + 1 :]]


def _random(found: Sequence[Axis], seed: random.Random) -> Sequence[PowerLossChoice]:
    """Mostly kept, mostly lost, or half and half, with some of the axes mixed."""
    share = seed.choice((0.1, 0.5, 0.9))
    choices: list[PowerLossChoice] = []
    for axis in found:
        newest = seed.random() < share
        choices.append(axis.mix(seed) if seed.random() < 0.3 else axis.whole[-1 if newest else 0])
    return choices


def _page_axis(number: int, index: int, page: Page, *, unit: int, noise: bool) -> Axis:
    count = len(page.states)
    whole = tuple(
        PageIs(number, index, state, f"has state {place} of {count}")
        for place, state in enumerate(page.states, 1)
    )
    # Between oldest and newest, and between the last two.
    pairs = dict.fromkeys((page.states[place], page.states[-1]) for place in {0, max(count - 2, 0)})
    torn = tuple(
        PageIs(number, index, content, f"is torn: {note}")
        for before, after in pairs
        if before != after
        for content, note in _tears(before, after, unit)
    )
    if noise and len(set(page.states)) > 1:
        torn = (*torn, PageIs(number, index, NOISE, "is noise"))
    return Axis(whole, torn, page, unit)


@lru_cache(maxsize=4096)
def _tears(before: bytes, after: bytes, unit: int) -> tuple[tuple[bytes, str], ...]:
    """What two states of a page can be torn into: at each sector or line, either side first, and
    in the middle of the bytes that differ."""
    tears = {}
    for cut in range(unit, PAGE, unit):
        tears[after[:cut] + before[cut:]] = f"new up to byte {cut}"
        tears[before[:cut] + after[cut:]] = f"new from byte {cut}"
    starts = range(0, PAGE, WORD)
    differ = [at for at in starts if before[at : at + WORD] != after[at : at + WORD]]
    cut = differ[len(differ) // 2]
    tears[after[:cut] + before[cut:]] = f"new up to byte {cut}"
    return tuple(
        (content, note) for content, note in tears.items() if content not in (before, after)
    )
