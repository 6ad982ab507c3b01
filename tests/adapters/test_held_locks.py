"""A signal handler may wait for a save whatever it interrupted: where the core holds a lock that
the worker may want, it is seen from the stack that it does (decision 0055). Locks are taken in the
order of the architecture page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters import held_locks, signal_storm
from tests.locks import locks_of_the_code, rows_of_the_page

ROOT = Path(__file__).parents[2]


def ran(way: str, directory: Path) -> tuple[list[str], int]:
    """Return what a way of ``held_locks`` printed, and how many lines ran with a lock held."""
    ended = subprocess.run(
        [sys.executable, held_locks.__file__, way, str(directory)],
        check=False, timeout=300, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'core'}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    *found, count = ended.stdout.splitlines()
    return found, int(count)


SHORT = [held_locks.lightning.__name__, held_locks.by_hand.__name__]


def check(way: str, directory: Path) -> None:
    """Go one way, line by line."""
    directory.mkdir()
    found, count = ran(way, directory)
    assert [line for line in found if held_locks.HOLDS in line] == []
    assert count > 1000
    assert in_another_order(found) == []


@pytest.mark.long(every_case=True)
@pytest.mark.timeout(300)  # line by line, on a busy machine
@pytest.mark.parametrize("way", SHORT)
def test_the_main_thread_holds_a_lock_in_marked_functions_alone(tmp_path: Path, way: str) -> None:
    check(way, tmp_path / way)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_so_it_does_in_all_other_ways_to_train(tmp_path: Path) -> None:
    """Not parametrized: less depth leaves out no way."""
    others = {way.__name__ for way in held_locks.WAYS} - {*SHORT}
    assert len(others) == len(held_locks.WAYS) - len(SHORT)
    for way in sorted(others):
        check(way, tmp_path / way)


@pytest.mark.long(every_case=True)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", [way.__name__ for way in held_locks.IN_ORDER_ALONE])
def test_locks_are_taken_in_the_order_of_the_page(tmp_path: Path, way: str) -> None:
    found, _ = ran(way, tmp_path)
    assert in_another_order(found) == []


def in_another_order(found: list[str]) -> list[str]:
    """Return which locks were taken while one was held that the page lists beside or below them."""
    nested = [line.split(held_locks.TAKES) for line in found if held_locks.TAKES in line]
    names = {f"{lock.path}:{n}": lock.name for lock in locks_of_the_code() for n in lock.lines}
    row_of = {name: row for row, names in enumerate(rows_of_the_page()) for name in names}
    pairs = [(names[outer], names[inner]) for outer, inner in nested if {outer, inner} <= {*names}]
    assert pairs
    return [f"{outer}, then {inner}" for outer, inner in pairs if row_of[outer] >= row_of[inner]]


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
