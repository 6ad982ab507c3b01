"""``kill -9`` of a training with a mirror; then its machine is lost with the run, and another one
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
from typing import Any

import pytest
import torch

import portus
from portus.reach.mirror.address import parse
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.opening import open_store
from tests.crash.mirrored_saver import KEEP
from tests.crash.saver import Training
from tests.hosts import Host
from tests.same import assert_same
from tests.warm import Warm

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
    """Trainings are killed, and run and machine are lost each time; what counts in the mirror is
    what the next one begins with."""
    random_, address = random.Random(seed), f"file://{folder}/bucket"
    children = Warm("tests.crash.mirrored_saver")
    counted = behind = 0
    with contextlib.closing(open_store(parse(address))) as store:
        mirror = Mirror(store, "net")
        for number in range(KILLS):
            run = folder / f"machine {number}" / "net"
            with children.start("train_for_ever", str(run), address) as child:
                lines = [child.line() for _ in range(random_.randint(1, LINES_MAX))]
                assert lines[0] == f"resumed {counted}", f"kill {number}"
                before = mirror.read().newest
                time.sleep(random_.uniform(0, DELAY_S_MAX))
                told = max(int(line.partition(" ")[2]) for line in [*lines, *child.kill()])
            newest = mirror.read().newest
            if newest is not None:
                assert max(counted, before.step if before else 0) <= newest.step <= told + 1
                counted = newest.step
            behind += counted < told
            if run.parent.exists():  # not if it was killed before it began to save
                shutil.rmtree(run.parent)
    run = folder / "the last" / "net"
    with portus.Checkpointer(run, mirror=address, keep=KEEP) as saver:
        if counted:
            assert_same(saver.load(weights_only=False), Training(counted).state())
        saver.save(Training(counted + 1).state(), counted + 1)
    with contextlib.closing(open_store(parse(address))) as store:
        assert len(Mirror(store, "net").read().added) == KEEP, "what is to go goes at last"
    print(f"{KILLS} machines, {counted} steps; {behind} times the mirror was behind")
    assert counted >= KILLS // 2, "too few steps were mirrored"


@pytest.mark.long
@pytest.mark.timeout(120 + 20 * KILLS)
def test_what_the_mirror_of_a_host_counts_outlives_each_host_for_plain_torch_too(
    folder: Path, seed: int
) -> None:
    """Hosts are killed, and their machines are lost; whoever has the bucket alone finds in it the
    files of what counts, and the next host begins with them."""
    random_, bucket = random.Random(seed), f"file://{folder}/bucket"
    step = counted = 0
    settings: Any = {"keep": KEEP, "journal": False, "on_error": "warn", "fence_timeout": 5.0}
    with contextlib.closing(open_store(parse(f"{bucket}/default"))) as store:
        mirror = Mirror(store, "net")
        for number in range(KILLS):
            pools = folder / f"pools {number}"
            with (
                Host(pools, "--mirror", bucket) as host,
                portus.PoolCheckpointer(host.url, "net", **settings) as saver,
            ):
                if counted:
                    step = counted
                    assert_same(saver.load(weights_only=False), Training(step).state())
                for _ in range(random_.randint(1, LINES_MAX)):
                    step += 1
                    saver.save(Training(step).state(), step).wait()
                time.sleep(random_.uniform(0, DELAY_S_MAX))
                step += 1
                saver.save(Training(step).state(), step)
                time.sleep(random_.uniform(0, DELAY_S_MAX / 10))
                host.kill()
            for added in mirror.read().added:
                [file] = added.files.values()
                found = torch.load(
                    folder / "bucket" / "default" / "net" / file.name, weights_only=False
                )
                assert_same(found, Training(added.step).state())
            newest = mirror.read().newest
            if newest is not None:
                assert counted <= newest.step <= step
                counted = newest.step
            shutil.rmtree(pools)
    assert counted >= KILLS // 2, "too few steps were mirrored"
