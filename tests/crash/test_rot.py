"""2,000 flipped bytes: a load gives the bits that were saved, or an error (V4, V6).

One byte of a pool or of a pointer is changed where a root reaches it, everything is loaded,
and the byte is put back. Loads may not take more memory than a whole pool needs, nor time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch

import portus
from portus.engine.job.settings import Settings
from portus.engine.spec import Extent
from portus.errors import CorruptionError, MediumError, PortusError
from portus.reach.format.layout import SLOT, SLOT_OFFSETS
from portus.reach.index.directory import open_reader
from portus.reach.index.place import Place
from portus.reach.index.reader import PoolReader
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.pools.view import PoolView
from portus.reach.training.training_files import TrainingFiles
from tests.depth import deep
from tests.same import assert_same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

POOL_FLIPS = max(200, deep(1600))
FILE_FLIPS = max(60, deep(400))
WRITES = 40
STEPS = (1, 2, 3)
MEMORY_MAX = 128 << 20
"""Bytes of addresses that all the loads together may add."""

TWICE = ("root slots", "catalogue", "versions")

ALWAYS = {
    **{twice: {("same", "same")} for twice in TWICE},
    "newest bytes": {("fell back", "same"), ("fell back", "CorruptionError")},
    "older bytes": {("same", "same"), ("same", "CorruptionError")},
    "shared bytes": {("CorruptionError", "CorruptionError")},
}
"""By what was hit: what becomes of loads of the newest version, and of one of any step. There are
two of all that several versions depend on."""

State = dict[str, Any]


def state_of(step: int) -> State:
    """A few KiB that belong to one step; "frozen" is shared by all versions."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(1500, generator=generator)
    return {
        "weight": weight,
        "tied": weight,
        "view": weight[10:30],
        "frozen": torch.arange(1000.0),
        "scalar": torch.tensor(step),
        "step": step,
        "note": {"lr": 0.1 * step, "tags": ["a", step]},
    }


STATES = {step: state_of(step) for step in (*STEPS, STEPS[-1] + 1)}


class Rotten:
    """A pool of three versions, each with a pointer, on which bytes are flipped."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.portus"
        self.files = {step: folder / f"{step}.ckpt" for step in STEPS}
        files = TrainingFiles(Settings(), pool=Place.parse(self.path))
        files.begin("default", str(folder / ".portus"), str(folder))
        for step in STEPS:
            files.save(STATES[step], str(self.files[step]), step).wait()
        files.close()
        reader = open_reader(str(self.path))
        self.places = dict(_places(reader))
        reader.close()

    def some_byte(self, number: int, random_: random.Random) -> tuple[str, int]:
        """One place after another, and the offset of any byte of it."""
        place = list(self.places)[number % len(self.places)]
        extent = random_.choice(self.places[place])
        return place, extent.offset + random_.randrange(extent.length)

    @contextlib.contextmanager
    def flipped(self, path: Path, offset: int, mask: int) -> Iterator[None]:
        descriptor = os.open(path, os.O_RDWR)
        try:
            byte = os.pread(descriptor, 1, offset)
            os.pwrite(descriptor, bytes([byte[0] ^ mask]), offset)
            yield
            os.pwrite(descriptor, byte, offset)
        finally:
            os.close(descriptor)


def _places(pool: PoolReader) -> Iterator[tuple[str, list[Extent]]]:
    """Everything that a load of any version looks at, by what it is."""
    yield "root slots", [Extent(offset, SLOT.size) for offset in SLOT_OFFSETS]
    catalogue = pool.catalogue()
    (model,) = catalogue.models.values()
    records = [pool.record(entry) for entry in model]
    yield "catalogue", catalogue.root.catalogue.extents[:1]
    yield "versions", [entry.pointer.extents[0] for entry in model]
    bytes_of = [
        {(int(row["offset"]), int(row["length"])) for row in record.extents} for record in records
    ]
    shared = set.intersection(*bytes_of)
    yield "newest bytes", [Extent(*place) for place in bytes_of[-1] - shared]
    yield "older bytes", [Extent(*place) for each in bytes_of[:-1] for place in each - shared]
    yield "shared bytes", [Extent(*place) for place in shared]


@pytest.fixture
def rotten(tmp_path: Path) -> Rotten:
    return Rotten(tmp_path)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Who asks for much more memory than there is by now does not get it."""
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_MAX, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Loud(logging.Handler):
    """Counts what is said at the level of an error, and keeps none of it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


@contextlib.contextmanager
def listening() -> Iterator[Loud]:
    """In place of everybody else who listens: some thousand errors are said here."""
    logger, handler = logging.getLogger("portus"), Loud()
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def outcome(load: Callable[[], object], wanted: int, loud: Loud) -> str:
    """What became of a load of the step ``wanted``. What is not named here raises."""
    before = loud.count
    try:
        state = load()
    except PortusError as error:
        return type(error).__name__
    assert isinstance(state, dict)
    assert_same(state, STATES[state["step"]])
    if state["step"] == wanted:
        return "same"
    return "fell back" if loud.count > before else "fell back silently"


@pytest.mark.long
def test_a_flipped_byte_of_a_pool_is_never_handed_out(rotten: Rotten, seed: int) -> None:
    random_ = random.Random(seed)
    seen: dict[str, Counter[str]] = {place: Counter() for place in rotten.places}
    with little_memory(), listening() as loud:
        for number in range(POOL_FLIPS):
            place, offset = rotten.some_byte(number, random_)
            step = random_.choice(STEPS)
            with rotten.flipped(rotten.path, offset, 1 << random_.randrange(8)):
                newest, other = loaded(rotten, step, loud)
            seen[place].update([f"newest {newest}", other])
            if place in ALWAYS:
                assert (newest, other) in ALWAYS[place], f"{place}, byte {offset}"
        assert loaded(rotten, 1, loud) == ("same", "same")
    for place, outcomes in seen.items():
        print(f"{place}: {dict(outcomes)}")
    assert not any(outcomes["newest fell back silently"] for outcomes in seen.values())
    assert sum(each["newest fell back"] for each in seen.values()) > POOL_FLIPS // 10
    assert sum(each["CorruptionError"] for each in seen.values()) > POOL_FLIPS // 10


@pytest.mark.long
def test_a_damaged_pool_can_be_written_and_loses_no_more(rotten: Rotten, seed: int) -> None:
    random_ = random.Random(seed)
    whole, coming = rotten.path.read_bytes(), STEPS[-1] + 1
    written = 0
    with listening() as loud:
        for number in range(WRITES):
            place, offset = rotten.some_byte(number, random_)
            with rotten.flipped(rotten.path, offset, 1 << random_.randrange(8)):
                there = whole_steps(rotten, loud)
                with (
                    contextlib.suppress(PortusError),
                    PoolCheckpointer(rotten.path, keep=None) as opened,
                ):
                    opened.save(STATES[coming], coming).wait()
                    there.add(coming)
                assert whole_steps(rotten, loud) == there, f"{place}, byte {offset}"
                written += coming in there
            rotten.path.write_bytes(whole)
    assert written > WRITES * 3 // 4


def test_a_rotten_record_loses_no_version_of_a_run(rotten: Rotten) -> None:
    """Neither those that are there, nor those saved later on top of it."""
    [record, *_] = rotten.places["versions"]
    descriptor = os.open(rotten.path, os.O_RDWR)
    with listening() as loud:
        with PoolCheckpointer(rotten.path, keep=None) as opened:
            opened.save(STATES[4], 4).wait()
            byte = os.pread(descriptor, 1, record.end - 1)
            os.pwrite(descriptor, bytes([byte[0] ^ 1]), record.end - 1)
            opened.save(STATES[4], 5).wait()
        os.close(descriptor)
        assert whole_steps(rotten, loud) == set(STATES)
        assert loud.count
        with PoolView(rotten.path) as view:
            said = loud.count
            assert_same(view.load(step=5), STATES[4])
        assert loud.count == said, "a version relies on what was rotten before it"


def halved(path: Path, other: bytes) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path, other: bytes) -> None:
    path.write_bytes(b"")


def blanked(path: Path, other: bytes) -> None:
    with path.open("r+b") as file:
        file.write(bytes(1 << 20))


def replaced(path: Path, other: bytes) -> None:
    with path.open("r+b") as file:
        file.write(other)


@pytest.mark.parametrize("deed", [halved, emptied, blanked, replaced])
def test_a_pool_that_others_change_under_a_trainer_is_noticed_at_the_next_save(
    deed: Callable[[Path, bytes], None], rotten: Rotten, tmp_path: Path
) -> None:
    with PoolCheckpointer(tmp_path / "other.portus") as other:
        other.save(STATES[1], 1).wait()
    with PoolCheckpointer(rotten.path, keep=None) as opened:
        opened.save(STATES[4], 4).wait()
        opened.wait()  # who makes room for the next save in the background notices it as well
        deed(rotten.path, (tmp_path / "other.portus").read_bytes())
        with pytest.raises((CorruptionError, MediumError), match=r"another program|trunc"):
            opened.save(STATES[4], 5).wait()


def whole_steps(rotten: Rotten, loud: Loud) -> set[int]:
    return {step for step in STATES if loaded(rotten, step, loud)[1] == "same"}


def loaded(rotten: Rotten, step: int, loud: Loud) -> tuple[str, str]:
    """What became of a load of the newest version, and of one of ``step``."""
    try:
        view = PoolView(rotten.path)
    except PortusError as error:
        return type(error).__name__, type(error).__name__
    with view:
        newest = outcome(view.load, STEPS[-1], loud)
        return newest, outcome(lambda: view.load(step=step), step, loud)


def test_a_flipped_byte_of_a_pointer_leads_nowhere_else(rotten: Rotten, seed: int) -> None:
    random_ = random.Random(seed)
    portus.register_reference_loader()
    same = 0
    with little_memory():
        for number in range(FILE_FLIPS):
            step = STEPS[number % len(STEPS)]
            file = rotten.files[step]
            offset = random_.randrange(file.stat().st_size)
            with rotten.flipped(file, offset, 1 << random_.randrange(8)):
                with pytest.raises(CorruptionError, match=file.name):
                    portus.read_reference(file)
                with pytest.raises((CorruptionError, UnpicklingError)):
                    portus.load(file)
                # Torch looks at few bytes of its own archive, and has errors of many kinds.
                with contextlib.suppress(Exception):
                    assert_state(torch.load(file), step)
                    same += 1
    print(f"{same} of {FILE_FLIPS} files were still good enough for torch.load")
    assert 0 < same < FILE_FLIPS


def assert_state(state: object, step: int) -> None:
    """As ``AssertionError`` is an ``Exception``, it is raised as something that is not."""
    try:
        assert_same(state, STATES[step])
    except AssertionError as error:
        pytest.fail(f"something else was loaded: {error}")
