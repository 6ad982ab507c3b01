"""A signal handler may wait for a save whatever it interrupted: where the core holds a lock that
the worker may want, it is seen from the stack that it does (decision 0055)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters import held_locks, signal_storm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", [way.__name__ for way in held_locks.WAYS])
def test_the_main_thread_holds_a_lock_in_marked_functions_alone(tmp_path: Path, way: str) -> None:
    ended = subprocess.run(
        [sys.executable, held_locks.__file__, way, str(tmp_path)],
        check=False, timeout=300, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    *found, count = ended.stdout.splitlines()
    found = [line for line in found if " holds the lock of " in line]
    assert found == []
    assert int(count) > 1000


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", [way.__name__ for way in signal_storm.WAYS])
def test_what_a_signal_handler_saves_at_any_line_is_there_when_it_waited(
    tmp_path: Path, way: str, seed: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.adapters.signal_storm", way, str(seed), "60", str(tmp_path)],
        check=False, timeout=200, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert int(ended.stdout.splitlines()[-1]) >= 60
