"""What is at the path of a pool may be the pool of another by now, and is left alone then; and
whoever waits for a pool finds what became of it meanwhile."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import portus
from portus.errors import MediumError
from portus.index.directory import WRITERS, create_pool, journal_directory, open_writer, remove_pool
from portus.index.messages import read_failure
from portus.index.pool import PoolWriter
from portus.media.local import LocalFiles
from tests.unit.client.stuck import WAIT_S_MAX, Gate, gated, is_in, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

AWAY: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "moved": lambda place: place.rename(place.with_name("elsewhere")),
}

WAITS = """
import sys, torch, portus
with portus.PoolCheckpointer(sys.argv[1], "run", keep=1) as waited:
    print(*waited.steps(), flush=True)
    waited.save({"weight": torch.zeros(64)}, 400).wait()
"""


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return tmp_path / "pools" / "run.portus"


def save(checkpointer: portus.PoolCheckpointer, step: int, path: Path | None = None) -> None:
    checkpointer.save({"weight": torch.full((64,), float(step))}, step, reference=path).wait()


def another_run(pool: Path, path: Path) -> None:
    with portus.PoolCheckpointer(pool, "run", keep=3) as checkpointer:
        save(checkpointer, 100, path)


def step_at(path: Path) -> int:
    return int(torch.load(path)["weight"][0])


@pytest.mark.parametrize("way", AWAY)
def test_at_the_end_of_a_run_that_saved_nothing_the_pool_of_another_stays(
    pool: Path, tmp_path: Path, way: str
) -> None:
    unused = portus.PoolCheckpointer(pool, "run")
    unused.prepare(4000)
    AWAY[way](pool.parent)
    another_run(pool, tmp_path / "100.ckpt")
    unused.close()
    assert step_at(tmp_path / "100.ckpt") == 100
    assert Path(journal_directory(str(pool))).is_dir()


@pytest.mark.parametrize("way", AWAY)
def test_a_run_that_goes_on_in_a_successor_takes_no_pool_of_another_away(
    pool: Path, tmp_path: Path, way: str
) -> None:
    with portus.PoolCheckpointer(pool, "run", keep=1) as before:
        save(before, 1)
        before.wait()  # the journal is written behind the commit
        AWAY[way](pool.parent)
        another_run(pool, tmp_path / "100.ckpt")
        for step in (2, 3, 4):
            with contextlib.suppress(MediumError):  # the first one finds out
                save(before, step)
        assert before.steps()[-1] == 4
    assert step_at(tmp_path / "100.ckpt") == 100
    with contextlib.closing(LocalFiles().open(str(pool), writable=False)) as medium:
        assert read_failure(medium) == "", "it is not told of the saves of another"


def test_who_waits_for_a_run_that_goes_on_in_a_successor_goes_on_there(pool: Path) -> None:
    gate: Gate = gated(pool)
    before = portus.PoolCheckpointer(pool, "run", keep=1)
    save(before, 100)
    command = [sys.executable, "-c", WAITS, str(pool)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stderr is not None
        assert "waiting up to" in waiting.stderr.readline()
        gate.broken = True
        with pytest.raises(MediumError):
            save(before, 200)
        save(before, 300)
        gate.broken = False
        before.close()
        assert not pool.exists(), "or nothing was tried"
        output, errors = waiting.communicate(timeout=WAIT_S_MAX)
    assert output.split() == ["300"], errors
    assert not pool.exists()
    with portus.open(pool.parent) as view:
        assert view.steps("run") == [400]


def test_mending_a_pool_that_its_writer_took_away_meanwhile_does_nothing(pool: Path) -> None:
    holder = held(pool)
    told: list[list[str]] = []
    mending = threading.Thread(
        target=lambda: told.append(portus.mend(pool.parent, uncommitted=True, wait_s=WAIT_S_MAX))
    )
    mending.start()
    until(lambda: is_in(mending, "acquire_writer"))
    remove_pool(str(pool), LocalFiles())
    holder.close()
    mending.join()
    assert told == [[]]


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
        assert found[0].superblock.uuid != holder.superblock.uuid
        assert found[0].medium.size == medium.size
    WRITERS.close(found[0])


def test_a_run_loads_from_a_pool_that_another_process_made_after_it_began(
    pool: Path, tmp_path: Path
) -> None:
    with portus.PoolCheckpointer(pool, "run", keep=2) as early:
        another_run(pool, tmp_path / "100.ckpt")
        loaded = early.load()
        assert isinstance(loaded, dict)
        assert loaded["weight"].tolist() == [100.0] * 64


def held(pool: Path) -> PoolWriter:
    """A pool that another one has open, to everybody in this process."""
    pool.parent.mkdir()
    create_pool(str(pool), LocalFiles())
    return open_writer(str(pool), LocalFiles())
