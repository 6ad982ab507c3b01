"""Guests that are killed in the middle of saves, and started again on the same NVDIMMs (V2, V3).

As a power failure, but for the caches: what the guest stored is in the page cache of the host,
which outlives it. So this shows that the engine recovers on real devices, with a real kernel and a
journal to replay. That every line was flushed is for ``tests/crash/test_lines.py`` to show.
"""

from __future__ import annotations

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
SAVES_MAX: Final = 12
"""Reported saves after which a guest is killed, at most."""

DELAY_S_MAX: Final = 0.3

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]


class Run:
    """One boot: what it found, and what it reported of each pool before it was killed."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self.found = [0 for _ in POOLS]
        self.saved = [0 for _ in POOLS]

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
    source = random.Random(seed)
    machine = Machine(devices="pmem", nvdimms=(tmp_path / "nvdimm0", tmp_path / "nvdimm1"))
    command = [sys.executable, "-m", "tests.hardware.saver", *POOLS]
    reported: Sequence[int] = [0 for _ in POOLS]
    ahead = 0
    for cycle in range(CYCLES + 1):
        with Guest(machine, command) as guest:
            boot_s = guest.boot()
            run = Run(guest)
            run.until("found", len(POOLS))
            print(f"cycle {cycle}: ready in {boot_s:.0f} s, found {run.found}", flush=True)
            for found, told in zip(run.found, reported, strict=True):
                assert told <= found <= told + 1, f"cycle {cycle}: {run.found}, told {reported}"
                ahead += found > told
            if cycle < CYCLES:
                run.until("saved", source.randint(1, SAVES_MAX))
                time.sleep(source.uniform(0, DELAY_S_MAX))
                run.end()
                reported = [max(pair) for pair in zip(run.found, run.saved, strict=True)]
    print(f"{CYCLES} power cycles, {sum(reported)} saves; {ahead} times one more than reported")
    assert min(reported) > CYCLES
