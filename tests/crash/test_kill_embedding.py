"""``kill -9`` at random moments of a training whose tables are protected: it goes on from a batch's
boundary, with the same bits as one that nobody killed (V14)."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

from portus.index.check import check
from portus.index.findings import Severity
from portus.testing.device import stand_in
from portus.testing.nursery import nursery
from tests.crash import embedded

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "10"))
ANSWER_S_MAX = 600.0
"""Who compares repeats all batches first, also on a busy machine."""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.timeout(ANSWER_S_MAX + 60 * KILLS),
]
DELAY_S_MAX = 0.02
DEVICE = 64 << 20


@pytest.mark.long
@pytest.mark.parametrize("in_place", [False, True])
def test_a_killed_training_goes_on_from_its_last_batch_bit_for_bit(
    tmp_path: Path, seed: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place (V15): on a file that stands in for a device."""
    path, rng = tmp_path / "tables.portus", random.Random(seed)
    if in_place:
        with open(path, "wb") as file:
            file.truncate(DEVICE)
        (tmp_path / embedded.FACTS).mkdir()
    trainers = nursery("tests.crash.embedded")
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
