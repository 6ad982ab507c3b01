"""The recipes on shelves: killed after any line, they reach the result of a run that nobody killed,
to the bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from portus.cli.output import Json
from portus.companions.shelf import Shelf

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
KILLS = max(2, int(os.environ.get("PORTUS_TEST_KILLS", "8")) // 4)
SMALL = ("--points", "1000", "--features", "40", "--iterations", "25")
RUNS = {
    "Lloyd": ("kmeans_shelf.py", "--clusters", "6"),
    "mini batches": ("kmeans_shelf.py", "--clusters", "6", "--mini-batch", "50"),
    "mixture": ("gmm_shelf.py", "--components", "3"),
}


def lines(shelf: Path, run: str, count: int | None) -> list[str]:
    """What a run says, killed after so many lines of it."""
    recipe, *wish = RUNS[run]
    command = [sys.executable, str(RECIPES / recipe), str(shelf), *wish, *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        found = []
        for line in child.stdout:
            found.append(line)
            if len(found) == count:
                child.kill()
                break
    assert count is not None or child.returncode == 0
    return found


def result(path: Path) -> dict[str, Json]:
    def plain(value: object) -> Json:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        found: Json = value.tobytes().hex() if hasattr(value, "tobytes") else value  # type: ignore[assignment]
        return found

    with Shelf(path, "r") as shelf:
        return {name: plain(shelf[name]) for name in shelf}


@pytest.mark.long
@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize("run", RUNS)
def test_a_recipe_that_is_killed_reaches_the_same_bits(tmp_path: Path, run: str, seed: int) -> None:
    rng = random.Random(seed)
    lines(tmp_path / "whole.portus", run, None)
    kills = 0
    while kills < KILLS:
        said = lines(tmp_path / "killed.portus", run, rng.randint(2, 9))
        if "converged" in said[-1]:  # it was through; begin again
            assert result(tmp_path / "killed.portus") == result(tmp_path / "whole.portus")
            (tmp_path / "killed.portus").unlink()
        else:
            kills += 1
    first, *_ = lines(tmp_path / "killed.portus", run, None)
    assert first.startswith("from iteration ")
    assert first != "from iteration 0\n"
    assert result(tmp_path / "killed.portus") == result(tmp_path / "whole.portus")
