"""TorchTitan's checkpoint manager, and stock's class that Portus takes over. More is in the matrix:
``tests/matrix``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from portus.engine.loading.checkpoint_file import has_digests
from tests.adapters.forked import environments
from tests.matrix.trainings import TITAN
from tests.nursery import nursery

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not TITAN.exists(), reason="TorchTitan is not installed"),
]


def train(root: Path, how: str, steps: int, at: int = -1) -> list[str]:
    """What it said of its begin, and of its end."""
    with contextlib.ExitStack() as stack:
        (environment,) = environments(stack, 1)
        wanted = ("train", str(root), environment, how, steps, at)
        child = stack.enter_context(nursery("tests.adapters.titan_jobs").start(*wanted))
        said = [line for line in child.rest() if line.startswith(("from", "end"))]
        assert child.wait() == 0, (root / "errors.txt").read_text()
    return said


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("how", ["portus", "taken"])
def test_it_saves_what_stock_loads_and_keeps_so_many(tmp_path: Path, how: str) -> None:
    _, end = train(tmp_path, how, 4)
    folder = tmp_path / "checkpoint"
    assert sorted(os.listdir(folder)) == [".portus", "step-3", "step-4"]
    assert all(map(has_digests, (folder / "step-4").iterdir()))
    for by in ("stock", how):
        begin, _ = train(tmp_path, by, 0)
        assert begin.split()[1:] == end.split()[1:]
    begin, _ = train(tmp_path, how, 1, at=3)
    assert begin.startswith("from 3 ")


@pytest.mark.long
def test_the_newest_that_is_damaged_is_passed_over_and_one_by_name_is_an_error(
    tmp_path: Path,
) -> None:
    train(tmp_path, "portus", 3)
    (file,) = (tmp_path / "checkpoint" / "step-3").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(AssertionError, match="CorruptionError"):
        train(tmp_path, "portus", 0, at=3)
    begin, _ = train(tmp_path, "portus", 0)
    assert begin.startswith("from 2 ")
    assert "passed over" in (tmp_path / "errors.txt").read_text()
