"""``kill -9`` at random moments of a loop on a shelf: it goes on from an iteration's boundary, with
the same bits (V13)."""

from __future__ import annotations

import os
import random
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from portus.companions.shelf import Shelf
from portus.reach.index.check import check
from portus.reach.index.findings import Severity
from tests.crash import shelf_loop
from tests.warm import Warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "12"))
FILE_KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "6"))
DELAY_S_MAX = 0.01


@pytest.mark.long
def test_a_killed_loop_goes_on_from_the_iteration_that_it_told_of(
    tmp_path: Path, seed: int
) -> None:
    path, rng = tmp_path / "loop.portus", random.Random(seed)
    told = kills = 0
    for _ in range(KILLS):
        with Warm("tests.crash.shelf_loop").start("run", str(path)) as child:
            lines = [child.line() for _ in range(rng.randint(1, 8))]
            time.sleep(rng.uniform(0, DELAY_S_MAX))
            lines += child.kill()
        kills += 1
        for line in lines:
            word, _, number = line.partition(" ")
            if word == "resumed":
                assert int(number) in (told, told + 1)
            told = max(told, int(number))
    with Shelf(path) as shelf:
        assert shelf.step in (told, told + 1)
        shelf_loop.verify(shelf)
    findings = check(path)
    assert [found for found in findings if found.severity is Severity.ERROR] == []
    print(f"{kills} kills, {told} iterations; each at a boundary")
    assert kills == KILLS


@pytest.mark.long
def test_a_file_of_np_savez_that_was_killed_in_a_write_is_lost(tmp_path: Path, seed: int) -> None:
    """What there was before a shelf: the file is neither as before nor as after."""
    path, rng = tmp_path / "state.npz", random.Random(seed)
    kills = FILE_KILLS
    found = {"whole": 0, "broken": 0}
    for _ in range(kills):
        with Warm("tests.crash.shelf_loop").start("run_on_file", str(path)) as child:
            for _ in range(rng.randint(1, 8)):
                child.line()
            time.sleep(rng.uniform(0, DELAY_S_MAX))
            child.kill()
        try:
            with path.open("rb") as file, np.load(file) as state:
                small, large = state["small"], state["large"]
                found["whole" if small.size and large.size else "broken"] += 1
        except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile):
            found["broken"] += 1
    print(f"np.savez, {kills} kills: {found}")
    assert sum(found.values()) == kills
    assert found["broken"], "no kill was in a write"
