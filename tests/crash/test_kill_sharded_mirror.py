"""``kill -9`` of four ranks with a mirror; then all their disks are lost, and a job of some number
of ranks goes on from the mirror alone. ``PORTUS_TEST_KILLS=100`` kills as many."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.lost_jobs import Jobs
from tests.hosts import Host

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "2"))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.timeout(300 + 60 * KILLS),
    pytest.mark.long,
]

RANKS = (4, 4, 2, 3, 1, 8)
DELAY_S_MAX = 0.3


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="portus-kill-") as name:
        yield Path(name)


def test_the_newest_complete_group_of_the_mirror_outlives_all_machines(
    folder: Path, seed: int
) -> None:
    lose_machines(folder, f"file://{folder}/bucket", seed)


def test_so_does_that_of_the_memory_of_a_second_storage_host(folder: Path, seed: int) -> None:
    with Host("memory:1G") as host:
        lose_machines(folder, host.url, seed)


def lose_machines(folder: Path, address: str, seed: int) -> None:
    """Kill jobs at random moments, and lose all their disks each time; the newest complete group of
    the mirror at ``address`` is what the next one begins with."""
    chance = random.Random(seed)
    jobs, newest = Jobs(folder, address, {}), 0
    for number in range(KILLS + 1):
        count = RANKS[number % len(RANKS)]
        with jobs.running(count, slow=chance.randrange(count)) as child:
            until = jobs.newest + 1 + chance.randrange(4)
            while jobs.newest < until:
                jobs.hear(child.line())
            time.sleep(chance.uniform(0, DELAY_S_MAX))
            jobs.kill(child)
        complete = jobs.mirrored().complete
        steps = [group.step for group in complete]
        assert max(steps, default=0) >= newest, f"kill {number}: {steps}, {newest} was there"
        newest = max(steps, default=0)
    print(f"{KILLS + 1} kills, {len(jobs.saved)} saves, the last group of the mirror: {newest}")
    assert newest > KILLS // 4
