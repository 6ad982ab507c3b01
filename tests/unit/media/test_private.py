"""Memory that is changed in place: what the kernel tells, and what is compared, misses nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from portus.companions.media import private
from portus.companions.media.private import PrivateMapping
from portus.engine.spec import PAGE


def committed(size: int, rng: np.random.Generator) -> PrivateMapping:
    """Memory whose view is what was committed: all of it was written to once."""
    memory = PrivateMapping(size)
    memory.view[:size] = rng.integers(0, 255, size, np.uint8)
    for start, end in memory.changes():
        memory.committed[start:end] = memory.view[start:end]
    assert np.array_equal(memory.view, memory.committed)
    return memory


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("size", [1, 700, 60_001, 300_001, (3 << 20) + 5])
def test_every_changed_byte_is_in_a_run_and_runs_are_in_order(
    monkeypatch: pytest.MonkeyPatch, told: bool, size: int
) -> None:
    if told and not private.tells():
        pytest.skip("this kernel tells nothing")
    monkeypatch.setattr(private, "tells", lambda: told)
    rng = np.random.default_rng(size)
    memory = committed(size, rng)
    assert not memory.changes()
    for count in (1, 3, size // 2):
        places = rng.integers(0, size, count)
        memory.view[places] += 1
        runs = memory.changes()
        inside = np.zeros(size, bool)
        for start, end in runs:
            inside[start:end] = True
        assert inside[places].all()
        assert all(before[1] < after[0] for before, after in itertools.pairwise(runs))
        assert all(0 <= start < end <= size for start, end in runs)
        memory.revert()
        assert np.array_equal(memory.view, memory.committed)
        assert not memory.changes()


def test_of_a_large_array_the_pages_that_changed_are_told_and_no_more() -> None:
    rng = np.random.default_rng(3)
    memory = committed(400 * PAGE, rng)
    memory.view[7 * PAGE + 4000] += 1  # not in the line that is compared first
    memory.view[8 * PAGE] += 1
    memory.view[300 * PAGE - 1] += 1
    assert list(memory.changes()) == [(7 * PAGE, 9 * PAGE), (299 * PAGE, 300 * PAGE)]
    memory.view[: 300 * PAGE : PAGE] += 1
    memory.view[350 * PAGE - 9] += 1
    assert list(memory.changes()) == [(0, 300 * PAGE), (349 * PAGE, 350 * PAGE)]
