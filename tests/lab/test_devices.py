"""What is marked ``rdma`` or ``pmem``, run where there are such devices: a guest for each long
file, and one for all short ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.lab.guest import ROOT, Guest, whole

FOLDER = ROOT / "tests" / "hardware"
SHORT = {"test_dax.py", "test_device_memory.py", "test_doctor.py", "test_verbs.py"}
"""These take less time than the start of a guest and of pytest in it."""

FILES = sorted(FOLDER.glob("test_*.py"), key=lambda each: each.stat().st_size, reverse=True)
GUESTS = [[each.name] for each in FILES if each.name not in SHORT] + [sorted(SHORT)]
RUN_S_MAX = 1800

pytestmark = [pytest.mark.lab, pytest.mark.timeout(RUN_S_MAX + 300)]


@pytest.mark.parametrize("files", GUESTS, ids="+".join)
def test_what_needs_devices_passes_in_a_guest(files: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-v", "--durations=0", "-p", "no:cacheprovider"]
    command += ["-m", "rdma or pmem", *(str(FOLDER / each) for each in files)]
    with Guest(whole(tmp_path), command) as guest:
        print(f"ready in {guest.boot():.0f} s")
        last = ""
        for line in guest.lines(RUN_S_MAX):
            print(line)
            last = line
        assert guest.wait(60) == 0, last
    assert re.search(r"\b[1-9][0-9]* passed", last), last
    assert "skipped" not in last, f"in the lab there is every device: {last}"
    for each in tmp_path.iterdir():
        each.unlink()  # half a gigabyte of NVDIMMs
