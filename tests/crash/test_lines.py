"""The same engine on a DAX device: every subset of the lines that were not drained (V1, V2, V3).

The real medium for devices runs on simulated memory: see ``tests.simulation.lines``. The search
must also find each of the mistakes that such a medium could make.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import pytest

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import PortusError
from portus.reach.index.directory import open_writer
from portus.reach.index.pool import PoolWriter
from portus.reach.index.roots import format_pool, is_blank
from portus.reach.media.pmem import LINE
from portus.reach.media.space import SpaceMedium
from tests.crash.trainer import (
    POOL,
    SMALL,
    Fact,
    Plan,
    Trainer,
    process,
    retire_by_itself,
    save_and_retire,
    save_one,
    save_three,
    verify,
)
from tests.depth import deep
from tests.simulation import lines
from tests.simulation.crash import CrashFiles, Recording, record
from tests.simulation.explore import Explorer, ImageError
from tests.simulation.lines import CrashSpace

SIZE: Final = SMALL + 10 * PAGE
"""Bytes of the device: a few saves, then space must be used again."""


def device() -> CrashFiles:
    files = CrashFiles(["/pools"])
    lines.make_device(files, POOL, SIZE)
    return files


def pool_on_device(files: CrashFiles) -> Medium | None:
    medium = lines.open_device(files, POOL)
    return None if is_blank(medium) else medium


class OnDevice(Trainer):
    """A process whose pool is on a device, through ``medium``."""

    medium: type[SpaceMedium] = SpaceMedium

    def opened(self) -> SpaceMedium:
        return lines.open_device(self.files, POOL, self.medium)

    def is_there(self) -> bool:
        return not is_blank(self.opened())

    def create(self) -> None:
        format_pool(self.opened())

    def open_pool(self) -> PoolWriter:
        files = lines.files_with_device(self.files, POOL, self.medium)
        return open_writer(POOL, files, locks=self.locks())


def only_open(trainer: Trainer) -> None:
    """Makes the pool, if need be, and saves nothing."""


def explorer(
    plans: Sequence[Plan], budgets: tuple[int, ...], trainer: type[Trainer] = OnDevice
) -> Explorer[Fact]:
    return Explorer(
        processes=[process(plan, trainer) for plan in plans],
        verify=lambda files, facts: verify(files, facts, pool_on_device),
        start=device,
        budgets=budgets,
    )


EXPLORATIONS: Final[dict[str, tuple[tuple[Plan, ...], tuple[int, ...], int]]] = {
    "first format, begun again": ((only_open, save_one), (200, 20), 1700),
    "save, share": ((save_three, save_one), (120, 6), 2200),
    "save, retire, use space again": ((save_and_retire, save_one), (120, 6), 2900),
    "retire by itself": ((retire_by_itself,), (150,), 2700),
}


DEEPER: Final = deep(3)

LONG: Final = ("save, share", "save, retire, use space again", "retire by itself")
"""Those that take long."""


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in EXPLORATIONS],
)
def test_every_subset_of_undrained_lines_leaves_the_state_before_or_after(name: str) -> None:
    plans, budgets, images_min = EXPLORATIONS[name]
    found = explorer(plans, budgets).explore()
    print(f"{name}: {found}")
    assert len(found.images) >= images_min


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", EXPLORATIONS)
def test_a_deeper_search_of_lines_finds_nothing_either(name: str, seed: int) -> None:
    plans, budgets, _ = EXPLORATIONS[name]
    deeper = explorer(plans, tuple(DEEPER * budget for budget in budgets))
    print(replace(deeper, seed=seed).explore())


# --- mistakes of a medium -------------------------------------------------------------------


class NothingFlushed(SpaceMedium):
    def _write_back(self, ranges: Sequence[Extent]) -> None:
        self._space.drain()


class NothingDrained(SpaceMedium):
    def _write_back(self, ranges: Sequence[Extent]) -> None:
        for extent in ranges:
            self._space.flush(extent.offset, extent.length)


class DrainedBeforeFlushed(SpaceMedium):
    def _write_back(self, ranges: Sequence[Extent]) -> None:
        self._space.drain()
        for extent in ranges:
            self._space.flush(extent.offset, extent.length)


class OnlyTheLastRange(SpaceMedium):
    def _write_back(self, ranges: Sequence[Extent]) -> None:
        super()._write_back(ranges[-1:])


class OnlyTheFirstLine(SpaceMedium):
    def _write_back(self, ranges: Sequence[Extent]) -> None:
        super()._write_back([Extent(each.offset, min(each.length, LINE)) for each in ranges])


class BeginsALineLate(SpaceMedium):
    def _write_back(self, ranges: Sequence[Extent]) -> None:
        super()._write_back([Extent(each.offset + LINE, each.length - LINE) for each in ranges])


class OnlyTheFirstHalf(SpaceMedium):
    def _write_back(self, ranges: Sequence[Extent]) -> None:
        super()._write_back([Extent(each.offset, each.length // 2) for each in ranges])


class FlushedBeforeStored(SpaceMedium):
    """Lines are flushed when bytes are stored, but before they are, and only drained later."""

    def store(self, offset: int, data: bytes | memoryview) -> None:
        self._space.flush(offset, len(data))
        super().store(offset, data)

    def _write_back(self, ranges: Sequence[Extent]) -> None:
        self._space.drain()


MISTAKES: Final[dict[str, type[SpaceMedium]]] = {
    "nothing is flushed": NothingFlushed,
    "nothing is drained": NothingDrained,
    "it drains before it flushes": DrainedBeforeFlushed,
    "of several ranges, the last alone is flushed": OnlyTheLastRange,
    "of each range, the first line alone is flushed": OnlyTheFirstLine,
    "flushes begin a line late": BeginsALineLate,
    "of each range, the first half alone is flushed": OnlyTheFirstHalf,
    "lines are flushed before they are stored to": FlushedBeforeStored,
}


def with_medium(kind: type[SpaceMedium]) -> type[Trainer]:
    class Wrong(OnDevice):
        medium = kind

    return Wrong


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_with_lines_is_found(name: str) -> None:
    search = explorer((save_three,), (60,), with_medium(MISTAKES[name]))
    with pytest.raises(ImageError) as caught:
        search.explore()
    print(caught.value)
    with pytest.raises((AssertionError, PortusError)):
        search.replay(caught.value.case)


@pytest.mark.long
def test_flushing_when_bytes_are_stored_and_draining_later_is_right_too() -> None:
    class FlushedAtOnce(SpaceMedium):
        def store(self, offset: int, data: bytes | memoryview) -> None:
            super().store(offset, data)
            self._space.flush(offset, len(data))

        def _write_back(self, ranges: Sequence[Extent]) -> None:
            self._space.drain()

    print(explorer((save_three,), (60,), with_medium(FlushedAtOnce)).explore())


def power_losses(act: Callable[[CrashSpace], None]) -> set[bytes]:
    """What may be in the first line of a device, and the one behind it, after ``act``."""
    files = CrashFiles()
    lines.make_device(files, "/device", PAGE, b"a" * 2 * LINE)
    recording: Recording[Fact] = record(
        lambda files, report: act(CrashSpace(files, "/device")), files
    )
    found = set()
    images = recording.points[-1].power_losses(random.Random(1))
    for _, image in zip(range(3000), images, strict=False):
        content = bytearray(2 * LINE)
        CrashSpace(image.files(), "/device").load(0, memoryview(content))
        found.add(bytes(content))
    return found


OLD, NEW, NEWER = b"a" * LINE, b"b" * LINE, b"c" * LINE


def test_lines_that_were_not_drained_arrive_in_any_subset_and_torn() -> None:
    found = power_losses(lambda space: space.store(0, memoryview(NEW + NEW)))
    assert {OLD + OLD, OLD + NEW, NEW + OLD, NEW + NEW} <= found
    torn = [each for each in found if 0 < each[:LINE].count(b"b") < LINE]
    assert len(torn) > 50
    assert all(len(set(each[at : at + 8])) == 1 for each in found for at in range(0, 2 * LINE, 8))


def test_a_drained_line_has_arrived_and_its_neighbour_may_have() -> None:
    def act(space: CrashSpace) -> None:
        space.store(0, memoryview(NEW + NEW))
        space.flush(0, 1)
        space.drain()

    found = power_losses(act)
    assert {each[:LINE] for each in found} == {NEW}
    assert {OLD, NEW} <= {each[LINE:] for each in found}


def test_a_line_stored_to_after_its_flush_is_at_least_as_new_as_that() -> None:
    def act(space: CrashSpace) -> None:
        space.store(0, memoryview(NEW))
        space.flush(0, LINE)
        space.store(0, memoryview(NEWER))
        space.drain()

    first = {each[:LINE] for each in power_losses(act)}
    assert {NEW, NEWER} <= first
    assert not any(b"a" in each for each in first)


def test_a_flush_without_a_drain_is_no_promise() -> None:
    def act(space: CrashSpace) -> None:
        space.store(0, memoryview(NEW))
        space.flush(0, LINE)

    assert {OLD, NEW} <= {each[:LINE] for each in power_losses(act)}
