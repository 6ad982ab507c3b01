"""Guests that are killed in the middle of saves, and started again on the same NVDIMMs: versions,
shelves, and tables in place (V2, V3, V13, V15).

As a power failure, but for the caches: what the guest stored is in the page cache of the host,
which outlives it. So this shows that the engine recovers on real devices, with a real kernel and a
journal to replay. That every line was flushed is for ``tests/crash/test_lines.py`` to show.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.hardware.conftest import DEVDAX_IN_LAB, FSDAX_IN_LAB
from tests.lab.guest import Guest, Machine

POOLS: Final = (DEVDAX_IN_LAB, f"{FSDAX_IN_LAB}/run.portus")
CYCLES: Final = 20
SHELF_CYCLES: Final = int(os.environ.get("PORTUS_TEST_CYCLES", "2"))
PLACED_CYCLES: Final = int(os.environ.get("PORTUS_TEST_CYCLES", "1"))
SAVES_MAX: Final = 12
"""Reported saves after which a guest is killed, at most."""

DELAY_S_MAX: Final = 0.3

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]


class Run:
    """One boot: what it found, and what it reported of each place before it was killed."""

    def __init__(self, guest: Guest, places: int) -> None:
        self._guest = guest
        self.found = [0] * places
        self.saved = [0] * places

    def until(self, word: str, count: int, timeout_s: float = 300) -> None:
        """Read until ``word`` was said ``count`` times."""
        while count:
            line = self._guest.line(timeout_s)
            count -= self._heard(line, word)

    def end(self) -> None:
        """Kill the guest; what it still had said counts."""
        self._guest.kill()
        for line in self._guest.rest():
            self._heard(line, "")

    def _heard(self, line: str, word: str) -> bool:
        parts = line.split()
        if len(parts) != 3 or parts[0] not in ("found", "saved"):
            print(f"the saver said: {line}")  # a traceback, before the guest ends too early
            return False
        numbers = self.found if parts[0] == "found" else self.saved
        numbers[int(parts[1])] = int(parts[2])
        return parts[0] == word


def test_the_newest_reported_version_verifies_after_every_power_cycle(
    tmp_path: Path, seed: int
) -> None:
    reported = survive("tests.hardware.saver", POOLS, CYCLES, tmp_path, seed)
    assert min(reported) > CYCLES


def test_a_shelf_is_at_its_newest_transaction_after_every_power_cycle(
    tmp_path: Path, seed: int
) -> None:
    """V13 on a device, of which no page can be mapped to be private, and on a file with DAX."""
    shelves = (DEVDAX_IN_LAB, f"{FSDAX_IN_LAB}/shelf.portus")
    reported = survive("tests.hardware.shelves", shelves, SHELF_CYCLES, tmp_path, seed)
    assert sum(reported) >= SHELF_CYCLES


def test_tables_in_place_are_at_one_batch_after_every_power_cycle(
    tmp_path: Path, seed: int
) -> None:
    """V15, where the tables are the device's own lines, and on a file with DAX."""
    pools = (DEVDAX_IN_LAB, f"{FSDAX_IN_LAB}/tables.portus")
    reported = survive("tests.hardware.placed", pools, PLACED_CYCLES, tmp_path, seed)
    assert sum(reported) >= PLACED_CYCLES


def survive(
    program: str, places: Sequence[str], cycles: int, folder: Path, seed: int
) -> Sequence[int]:
    """Kill a guest in which ``program`` goes on and on at ``places``, so often; it has to find what
    it reported, or one step more. What it had reported at last."""
    source = random.Random(seed)
    machine = Machine(devices="pmem", nvdimms=(folder / "nvdimm0", folder / "nvdimm1"))
    reported: Sequence[int] = [0 for _ in places]
    ahead = 0
    for cycle in range(cycles + 1):
        with Guest(machine, [sys.executable, "-m", program, *places]) as guest:
            boot_s = guest.boot()
            run = Run(guest, len(places))
            run.until("found", len(places))
            print(f"cycle {cycle}: ready in {boot_s:.0f} s, found {run.found}", flush=True)
            for found, told in zip(run.found, reported, strict=True):
                assert told <= found <= told + 1, f"cycle {cycle}: {run.found}, told {reported}"
                ahead += found > told
            if cycle < cycles:
                run.until("saved", source.randint(1, SAVES_MAX))
                time.sleep(source.uniform(0, DELAY_S_MAX))
                run.end()
                reported = [max(pair) for pair in zip(run.found, run.saved, strict=True)]
    print(f"{cycles} power cycles, {sum(reported)} saves; {ahead} times one more than reported")
    return reported
