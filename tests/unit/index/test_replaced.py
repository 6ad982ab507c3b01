"""What is at the path of a pool may be the pool of another by now, and is left alone then; and
whoever waits for a pool finds what became of it meanwhile."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import portus
from portus.errors import MediumError
from portus.reach.index.directory import WRITERS, create_pool, journal_directory, open_writer
from portus.reach.index.pool import PoolWriter
from portus.reach.index.roots import read_failure
from portus.reach.media.local import LocalFiles
from tests.moments import WAIT_S_MAX, is_in, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

AWAY: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "moved": lambda place: place.rename(place.with_name("elsewhere")),
}


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return tmp_path / "pools" / "run.portus"


def save(checkpointer: portus.PoolCheckpointer, step: int) -> None:
    checkpointer.save({"weight": torch.full((64,), float(step))}, step).wait()


def another_run(pool: Path) -> None:
    with portus.PoolCheckpointer(pool, "run", keep=3) as checkpointer:
        save(checkpointer, 100)


def steps_at(pool: Path) -> list[int]:
    with portus.open(pool) as view:
        return view.steps("run")


@pytest.mark.parametrize("way", AWAY)
def test_at_the_end_of_a_run_that_saved_nothing_the_pool_of_another_stays(
    pool: Path, way: str
) -> None:
    unused = portus.PoolCheckpointer(pool, "run", max_bytes=4 << 20)
    with pytest.raises(MediumError):
        unused.save({"weight": torch.zeros(4 << 20)}, 1).wait()
    AWAY[way](pool.parent)
    another_run(pool)
    unused.close()
    assert steps_at(pool) == [100]
    assert Path(journal_directory(str(pool))).is_dir()


def test_who_waits_for_a_pool_that_a_third_one_makes_anew_opens_the_new_one(pool: Path) -> None:
    holder = held(pool)
    found: list[PoolWriter] = []
    waiting = threading.Thread(
        target=lambda: found.append(WRITERS.open(str(pool), timeout_s=WAIT_S_MAX))
    )
    waiting.start()
    until(lambda: is_in(waiting, "acquire_writer"))
    pool.unlink()
    create_pool(str(pool), LocalFiles())
    holder.close()
    waiting.join()
    with contextlib.closing(LocalFiles().open(str(pool), writable=False)) as medium:
        assert found[0].uuid != holder.uuid
        assert found[0].medium.size == medium.size
    WRITERS.close(found[0])


def test_a_run_loads_from_a_pool_that_another_process_made_after_it_began(
    pool: Path,
) -> None:
    with portus.PoolCheckpointer(pool, "run", keep=2) as early:
        another_run(pool)
        loaded = early.load()
        assert isinstance(loaded, dict)
        assert loaded["weight"].tolist() == [100.0] * 64


def held(pool: Path) -> PoolWriter:
    """A pool that another one has open, to everybody in this process."""
    pool.parent.mkdir()
    create_pool(str(pool), LocalFiles())
    return open_writer(str(pool), LocalFiles())


@pytest.mark.parametrize("way", AWAY)
def test_a_run_whose_pool_was_taken_away_leaves_the_one_in_its_place_alone(
    pool: Path, way: str
) -> None:
    with portus.PoolCheckpointer(pool, "run", keep=1) as before:
        save(before, 1)
        before.wait()
        AWAY[way](pool.parent)
        another_run(pool)
        for step in (2, 3):
            with pytest.raises(MediumError) if way == "removed" else contextlib.nullcontext():
                save(before, step)
    assert steps_at(pool) == [100]
    if way == "moved":
        assert steps_at(pool.parent.with_name("elsewhere") / pool.name) == [3]
    with contextlib.closing(LocalFiles().open(str(pool), writable=False)) as medium:
        assert read_failure(medium) == "", "it is not told of the saves of another"
