"""``kill -9`` at random moments of a training whose tables are protected: it goes on from a batch's
boundary, with the same bits as one that nobody killed (V14)."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

from portus.reach.index.check import check
from portus.reach.index.findings import Severity
from tests.crash import embedded
from tests.device import stand_in
from tests.warm import Warm

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "10"))
ANSWER_S_MAX = 600.0
"""Who compares repeats all batches first, also on a busy machine."""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.timeout(ANSWER_S_MAX + 60 * KILLS),
]
DELAY_S_MAX = 0.02
DEVICE = 64 << 20


def tables_in(folder: Path, in_place: bool) -> Path:
    """Where a pool will be, or is to be: in place, in a file that stands in for a device."""
    path = folder / "tables.portus"
    if in_place:
        with open(path, "wb") as file:
            file.truncate(DEVICE)
        (folder / embedded.FACTS).mkdir()
    return path


@pytest.mark.long
@pytest.mark.parametrize("in_place", [False, True])
def test_a_killed_training_goes_on_from_its_last_batch_bit_for_bit(
    tmp_path: Path, seed: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place (V15): on a file that stands in for a device."""
    path, rng = tables_in(tmp_path, in_place), random.Random(seed)
    trainers = Warm("tests.crash.embedded")
    told = 0
    for _ in range(KILLS):
        with trainers.start("run", str(path)) as child:
            lines = [child.line(ANSWER_S_MAX) for _ in range(rng.randint(1, 12))]
            time.sleep(rng.uniform(0, DELAY_S_MAX))
            lines += child.kill()
        for line in lines:
            word, _, number = line.partition(" ")
            if word == "resumed":
                assert told - 1 <= int(number) <= told + 1
                told = int(number)
            told = max(told, int(number))
    with trainers.start("compare", str(path)) as child:
        word, _, number = child.line(ANSWER_S_MAX).partition(" ")
    assert told - 1 <= int(number) <= told + 1
    assert word == "same"
    if in_place:
        stand_in(str(path), str(tmp_path / embedded.FACTS), monkeypatch)
    findings = check(path)
    assert [found for found in findings if found.severity is Severity.ERROR] == []


@pytest.mark.long
@pytest.mark.parametrize("in_place", [False, True])
def test_a_killed_relaxed_training_has_the_rows_of_its_last_batch_and_a_dense_part_within_the_gap(
    tmp_path: Path, seed: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rng = tables_in(tmp_path, in_place), random.Random(seed)
    trainers = Warm("tests.crash.embedded")
    rows, dense, told = dict[int, str](), dict[int, str](), 0
    gaps = set()
    for _ in range(KILLS):
        with trainers.start("relax", str(path)) as child:
            lines = [child.line(ANSWER_S_MAX) for _ in range(rng.randint(1, 20))]
            time.sleep(rng.uniform(0, DELAY_S_MAX))
            lines += child.kill()
        for line in lines:
            word, *numbers, of_rows, of_dense = line.split()
            told, dense_batch = int(numbers[0]), int(numbers[-1])
            if word == "resumed":
                assert max(dense, default=0) - 1 <= told <= max(dense, default=0) + 1
                assert rows.get(told, of_rows) == of_rows
                assert dense.get(dense_batch, of_dense) == of_dense
                gaps.add(told - dense_batch)
                for each in [each for each in dense if each > told]:
                    del rows[each], dense[each]
                dense_batch = told  # what was told of it goes on from an older dense part
            rows[told], dense[dense_batch] = of_rows, of_dense
    assert max(gaps) < embedded.GAP
    assert KILLS < 10 or len(gaps) > 2
    if in_place:
        stand_in(str(path), str(tmp_path / embedded.FACTS), monkeypatch)
    findings = check(path)
    assert [found for found in findings if found.severity is Severity.ERROR] == []
