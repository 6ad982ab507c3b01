"""How deep ``make long`` goes: ``$PORTUS_TEST_DEPTH``, else 1. ``.ci/run`` says less."""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from typing import Final

import pytest

DEPTH: Final = float(os.environ.get("PORTUS_TEST_DEPTH", "1"))


def deep(count: int) -> int:
    """So many cases of ``count`` are tried, one at least."""
    return max(1, round(count * DEPTH))


def enough(count: int) -> int:
    """What is asked of a search that finds more than ``count`` at full depth."""
    return count if DEPTH >= 1 else deep(count) // 2


def left_out(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """Cases of parametrized tests that are not run: all but a share of each test's, drawn by
    ``seed``. What is not parametrized always runs, and so does each case of a test that is marked
    ``long(every_case=True)``, but for those that are ``long`` by themselves: it is slow, and not a
    sample of a search."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not all(mark.kwargs.get("every_case") for mark in item.iter_markers("long")):
            cases[item.nodeid.split("[")[0]].append(item)
    without: set[pytest.Item] = set()
    for name, ones in cases.items():
        draw = random.Random(f"{seed}:{name}")
        without.update(draw.sample(ones, len(ones) - math.ceil(len(ones) * min(DEPTH, 1))))
    return without
