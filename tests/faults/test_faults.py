"""System calls fail under real trainings: they go on, and lose nothing that was told (V8)."""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.depth import deep
from tests.faults import calls
from tests.faults.calls import Call, Fault, Where
from tests.faults.runs import KINDS
from tests.faults.search import complaints, faults, report_of

_WHY_NOT = "" if os.environ.get("PORTUS_FAULTS") == "required" else calls.why_not()

pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)

SAMPLE = 4
"""Faults of each kind of training that are tried each time."""

LONG_S, LONG_S_MAX = deep(30), 240
"""Seconds of each kind in a long search; and the most, on a machine that is slow."""

LATER = ("accelerate", "transformers")
"""Kinds that are tried by chance in `make long` alone: they take long to start."""

MET_MIN = 30
"""Of the calls that it lets fail, so many are reached, however long that takes."""

POOL, FILES = Where

TELLING = {
    "by_hand": [
        Fault(Call.CLOSE, POOL, 3, errno.EINTR, False),
        Fault(Call.CLOSE, FILES, 11, errno.EINTR, True),
        Fault(Call.FSTAT, POOL, 25, errno.EIO, True),
        Fault(Call.FSTAT, FILES, 15, errno.EIO, True),
        Fault(Call.STAT, FILES, 20, errno.ELOOP, True),
        Fault(Call.ANY, POOL, 112, errno.ELOOP, True),
    ],
    "lightning": [
        Fault(Call.FSTAT, POOL, 15, errno.EIO, False),
        Fault(Call.UNLINK, FILES, 0, errno.EIO, True),
        Fault(Call.FSTAT, FILES, 27, errno.ESTALE, True),
    ],
    "accelerate": [
        Fault(Call.LIST, FILES, 66, errno.ELOOP, True),
        Fault(Call.CLOSE, FILES, 71, errno.EIO, True),
        Fault(Call.STATFS, POOL, 3, errno.EIO, True),
        Fault(Call.WRITE, POOL, 2, errno.EACCES, False),
    ],
}
"""Each of these once ended a training, left a lock behind, or a file that led to another step. The
first of each kind is in `make test`."""


def wrong(kind: str, root: Path, fault: Fault, stock: Counter[str]) -> tuple[bool, list[str]]:
    """Whether the call was met, and what is wrong then. stock: who else ended trainings."""
    try:
        report = report_of(kind, str(root), fault)
    except AssertionError as error:
        return True, [f"{fault}: {error}"]
    if report.stopped_by == "stock":
        stock[report.stopped.rpartition("site-packages/")[2]] += 1
    return bool(report.hit), [f"{fault} ({report.hit}): {each}" for each in complaints(report)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, fault, marks=pytest.mark.long if number else ())
        for kind, some in TELLING.items()
        for number, fault in enumerate(some)
    ],
    ids=str,
)
def test_a_call_that_fails_stops_no_training_that_has_a_version(
    kind: str, fault: Fault, tmp_path: Path
) -> None:
    met, found = wrong(kind, tmp_path / "run", fault, Counter())
    assert met, "the run makes fewer calls by now: choose another number"
    assert not found


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=pytest.mark.long if each in LATER else ()) for each in KINDS],
)
def test_of_calls_by_chance_none_stops_a_training_that_has_a_version(
    kind: str, tmp_path: Path, seed: int
) -> None:
    counted = report_of(kind, str(tmp_path / "run"), None)
    assert not complaints(counted)
    met, found = 0, []
    for fault in islice(faults(counted, random.Random(seed)), SAMPLE):
        reached, complained = wrong(kind, tmp_path / "run", fault, Counter())
        met += reached
        found += complained
    assert not found
    assert met >= SAMPLE / 2


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_search_finds_no_call_that_stops_a_training_either(
    kind: str, tmp_path: Path, seed: int
) -> None:
    counted = report_of(kind, str(tmp_path / "run"), None)
    start, tried, met, stock = time.monotonic(), 0, 0, Counter[str]()
    found: list[str] = []
    for fault in faults(counted, random.Random(seed)):
        if time.monotonic() > start + (LONG_S if met > MET_MIN else LONG_S_MAX):
            break
        reached, complained = wrong(kind, tmp_path / "run", fault, stock)
        tried, met = tried + 1, met + reached
        found += complained
    calls_in_all = sum(count for _, _, count in counted.counts)
    print(f"{kind}: {tried} faults, {met} met, {calls_in_all} calls in a run")
    for place, count in stock.most_common():
        print(f"stopped by the framework's own call {count} times: {place}")
    assert not found
    assert met > MET_MIN
