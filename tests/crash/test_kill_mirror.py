"""``kill -9`` of a training with a mirror; then its machine is lost, run and pool, and another one
goes on from the mirror alone. ``PORTUS_TEST_KILLS=100`` kills as many."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import portus
from portus.mirror.address import parse
from portus.mirror.mirror import Mirror
from portus.mirror.opening import open_store
from portus.testing.nursery import nursery
from tests.crash.mirrored_saver import KEEP
from tests.crash.saver import Training
from tests.hosts import Host
from tests.unit.client.same import assert_same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "4"))
DELAY_S_MAX = 0.1
LINES_MAX = 6


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="portus-kill-") as name:
        yield Path(name)


@pytest.mark.long
@pytest.mark.timeout(120 + 5 * KILLS)
def test_what_the_mirror_counts_outlives_each_machine_bit_for_bit(folder: Path, seed: int) -> None:
    lose_machines(folder, f"file://{folder}/bucket", seed)


@pytest.mark.long
@pytest.mark.timeout(120 + 5 * KILLS)
def test_so_does_what_the_memory_of_a_second_storage_host_has(folder: Path, seed: int) -> None:
    with Host("memory:1G") as host:
        lose_machines(folder, host.url, seed)


def lose_machines(folder: Path, address: str, seed: int) -> None:
    """Kill trainings, and lose run and pool each time; what counts in the mirror at ``address`` is
    what the next one begins with."""
    with contextlib.closing(open_store(parse(address))) as store:
        lose_each(folder, address, Mirror(store, "net"), seed)


def lose_each(folder: Path, address: str, mirror: Mirror, seed: int) -> None:
    random_ = random.Random(seed)
    children = nursery("tests.crash.saver")
    counted = behind = lost = 0
    for number in range(KILLS):
        run = folder / f"machine {number}"
        run.mkdir()
        told = 0
        with children.start(
            "tests.crash.mirrored_saver:train_for_ever", str(run), address
        ) as child:
            lines = [child.line() for _ in range(random_.randint(1, LINES_MAX))]
            word, _, resumed = lines[0].partition(" ")
            assert (word, int(resumed)) == ("resumed", counted), f"kill {number}"
            before = mirror.read().newest
            time.sleep(random_.uniform(0, DELAY_S_MAX))
            told = max(int(line.partition(" ")[2]) for line in [*lines, *child.kill()])
        newest = mirror.read().newest
        steps = [each.step for each in mirror.read().versions]
        assert len(steps) <= KEEP + 1, steps
        if newest is not None:
            assert newest.step >= max(counted, before.step if before else 0)
            assert newest.step <= told + 1
            counted = newest.step
        behind += counted < told
        with_pool = random_.random() < 0.25  # the machine comes back, this time
        if with_pool:
            with portus.open(run / ".portus") as pool:
                assert max(pool.steps("net"), default=0) >= counted
        lost += 1
        shutil.rmtree(run)
    run = folder / "the last"
    with portus.PoolCheckpointer(run / ".portus", "net", mirror=address, keep=KEEP) as saver:
        if counted:
            assert_same(saver.load(), Training(counted).state())
            assert_same(
                portus.load_reference(run / "ckpt" / "last.ckpt"), Training(counted).state()
            )
    print(f"{lost} machines, {counted} steps; {behind} times the mirror was behind")
    assert counted > KILLS // 4
