"""Checks that take their time."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from portus.engine.format.checksum import UNIT
from portus.engine.media.read_file import Pace
from portus.reach.index.check import CheckOptions, Finding, check_pool
from portus.reach.index.directory import open_reader
from portus.reach.index.place import Place
from portus.reach.index.pool import PoolWriter
from portus.reach.media.file import UncachedFile
from portus.reach.media.local import LocalFiles
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.page_cache import forget, in_memory

SIZE = 3 * UNIT + 5000


def state(step: int) -> dict[str, torch.Tensor]:
    chance = np.random.default_rng(step)
    return {"x": torch.from_numpy(chance.integers(0, 255, SIZE, np.uint8))}


@pytest.fixture
def pool(tmp_path: Path) -> Place:
    path = tmp_path / "run.portus"
    with PoolCheckpointer(path, keep=None) as run:
        for step in (1, 2):
            run.save(state(step), step).wait()
    return Place.parse(path)


def size_of(pool: Place) -> int:
    """Bytes of each version: of its file."""
    with contextlib.closing(open_reader(pool.path)) as reader:
        [size] = {each.info.size for each in reader.catalogue().entries()}
    assert SIZE < size < SIZE + 5000
    return size


def rot(pool: Place, step: int, offset: int) -> None:
    reader = open_reader(pool.path)
    try:
        [entry] = [each for each in reader.catalogue().entries() if each.info.step == step]
        place = reader.record(entry).storage_extents(0)[0].offset + offset
    finally:
        reader.close()
    with open(pool.path, "r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_no_more_is_read_in_a_second_than_was_said(pool: Place) -> None:
    waited: list[float] = []
    told: list[tuple[int, int]] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        time.sleep(seconds / 100)  # what is not waited for is asked for again

    size = size_of(pool)
    start_s = time.monotonic()
    pace = Pace(20 << 20, wait)
    look = CheckOptions(progress=lambda done, total: told.append((done, total)), pace=pace)
    assert check_pool(pool.path, look) == []
    passed_s = time.monotonic() - start_s
    sizes = [after[0] - before[0] for before, after in itertools.pairwise(told)]
    assert told[-1] == (2 * size, 2 * size)
    assert max(sizes) <= UNIT + 5000, "it comes in small pieces"
    assert len(waited) >= 2 * SIZE // UNIT
    assert waited[0] == 0
    # Before the last piece all others have had their time.
    assert waited[-1] + passed_s >= (2 * SIZE - UNIT) / (20 << 20)


def test_rot_is_told_when_it_is_found_and_the_rest_is_read_all_the_same(pool: Place) -> None:
    rot(pool, 1, 10)
    rot(pool, 2, 2 * UNIT + 7)
    order: list[str] = []

    def told(finding: Finding) -> None:
        order.append(finding.where)

    def advance(done: int, total: int) -> None:
        order.append(f"{done}")

    look = CheckOptions(tell=told, progress=advance, pace=Pace(1 << 40, lambda seconds: None))
    found = check_pool(pool.path, look)
    assert [each.where for each in found] == [each for each in order if "version" in each]
    assert "step 1" in found[0].where
    assert "step 2" in found[1].where
    assert order.index(found[0].where) < order.index(f"{size_of(pool) + UNIT}"), (
        "before the next version is read"
    )


@pytest.mark.long
def test_a_version_that_is_retired_meanwhile_is_no_error_and_is_not_waited_for(
    tmp_path: Path,
) -> None:
    path, waited = tmp_path / "run.portus", list[float]()
    with PoolCheckpointer(path, keep=2) as run:
        for step in (1, 2):
            run.save(state(step), step).wait()
        steps = iter(range(3, 9))

        def wait(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 2:  # step 1 is being read, and keeps its space; step 2 goes
                for step in steps:
                    run.save(state(step), step).wait()

        assert check_pool(str(path), CheckOptions(pace=Pace(1 << 40, wait))) == []
        assert len(waited) < 2 * SIZE // UNIT, "the retired version was not read"
        assert run.steps() == [7, 8]


def test_the_disk_is_read_and_nothing_is_kept_of_it_in_memory(pool: Place) -> None:
    with open(pool.path, "rb", buffering=0) as file:
        with contextlib.closing(LocalFiles().open_uncached(pool.path)) as opened:
            if not isinstance(opened, UncachedFile):
                pytest.skip("this file system has no O_DIRECT")
        forget(file)
        look = CheckOptions(pace=Pace(1 << 40, lambda seconds: None))
        assert check_pool(pool.path, look) == []
        assert not in_memory(file)[UNIT // mmap.PAGESIZE]


@pytest.mark.parametrize(
    "end", [KeyboardInterrupt, pytest.param(SystemExit, marks=pytest.mark.long)]
)
def test_one_that_is_ended_holds_nothing(pool: Place, end: type[BaseException]) -> None:
    def wait(seconds: float) -> None:
        raise end

    with pytest.raises(end):
        check_pool(pool.path, CheckOptions(pace=Pace(1, wait)))
    with PoolCheckpointer(pool.path, keep=1) as run:
        run.save(state(3), 3).wait()
        run.save(state(4), 4).wait()
        assert run._steps.pool.open().locks.pins() == set()


def test_a_pool_that_is_open_is_read_as_it_is(pool: Place, tmp_path: Path) -> None:
    called: list[float] = []
    wait: Callable[[float], object] = called.append
    with PoolCheckpointer(pool.path) as run:
        run.load()
        writer = run._steps.pool.open()
        assert isinstance(writer, PoolWriter)
        assert check_pool(writer, CheckOptions(pace=Pace(1 << 40, wait))) == []
    assert called
