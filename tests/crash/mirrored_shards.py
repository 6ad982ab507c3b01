"""Sharded jobs with a mirror, for test_part_mirror and the tests that kill them."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import portus.dcp
from portus.client.files import run_mirror
from portus.dcp import GroupReader, GroupWriter
from portus.mirror import behind
from portus.mirror.address import StoreAddress
from portus.mirror.opening import open_store
from tests.unit.client import sharded
from tests.unit.client.sharded import Job, digest_of, say, tell

QUICK_S, SLOW_S = 0.01, 0.04
"""What an object takes to a store: for most ranks, and for one at a quarter of their speed."""
PAUSE_MIN_S = 0.05
"""Between two tries, where the store does not answer."""

run = sharded.run
"""For the nursery."""


def warm_up() -> None:
    """For the nursery: all imports are done."""


def address(root: Path) -> str:
    """Of the mirror: a folder, if no other was named."""
    return os.environ.get("SHARDED_MIRROR") or f"file://{root}/bucket"


class Paced:
    """A store that takes its time for each object."""

    def __init__(self, address: StoreAddress, put_s: float) -> None:
        self._store = open_store(address)
        self._put_s = put_s

    def __getattr__(self, call: str) -> Any:
        return getattr(self._store, call)

    def put(self, name: str, parts: Any) -> None:
        time.sleep(self._put_s)
        self._store.put(name, parts)


def train(
    rank: int, count: int, root: Path, first: str, saves: str, slow: str = "-1", nodes: str = "1"
) -> None:
    """Go on from what there is, if ``first`` is over 1, and save ``saves`` times, or for ever if
    that is 0. slow: a rank at a quarter of the speed. nodes: over 1, machines with disks of their
    own; the ranks go round."""
    say(f"process {rank} {os.getpid()}")
    setattr(behind, "_PAUSE_MIN_S", PAUSE_MIN_S)  # noqa: B010
    if int(slow) >= 0:
        put_s = SLOW_S if rank == int(slow) else QUICK_S
        setattr(run_mirror, "open_store", lambda address: Paced(address, put_s))  # noqa: B010
    pools, job = root / "run" / "pools", Job(1, count)
    if int(nodes) > 1:
        pools = root / "run" / f"node-{rank % int(nodes)}" / "pools"
    writer = GroupWriter(pools, "run", mirror=address(root), mirror_wait=60)
    if int(first) > 1:
        state = job.state(0)
        found = portus.dcp.load(state, GroupReader(pools, "run", mirror=address(root)))
        job.take(state)
        tell(rank, "loaded", found.step, job)
    steps = (
        itertools.count(int(first)) if saves == "0" else range(int(first), int(first) + int(saves))
    )
    for step in steps:
        job.step(step)
        digest = digest_of(job)
        directory = root / "run" / "ckpt" / f"step_{step}"
        if step % 5 == 0:
            writer.save_directory(job.state(step), directory, step=step, files={f"{rank}.pt": step})
        else:
            writer.save(job.state(step), step=step)
        if rank == 0:
            say(f"saved {step} {digest}")
    writer.close()


def look(rank: int, count: int, root: Path) -> None:
    """Load from the mirror alone, and make no pool."""
    job = Job(2, count)
    state = job.state(0)
    reader = GroupReader(root / "none", "run", mirror=address(root))
    found = portus.dcp.load(state, reader)
    job.take(state)
    tell(rank, "loaded", found.step, job)
    assert not (root / "none").exists()


sharded.TASKS |= {"mirrored": train, "look_there": look}
