"""The DLRM recipe: killed after any batch, it ends with the bits of a run that nobody killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "2"))
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.long
@pytest.mark.timeout(300 + 60 * KILLS)
def test_the_demo_kills_resumes_and_finds_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(RECIPES / "dlrm_tiny.py"), "--demo"]
    batches = str(4 * (KILLS + 1))
    sizes = ["--batches", batches, "--rows", "300", "--batch", "32", "--kills", str(KILLS)]
    found = subprocess.run(
        [*command, *sizes], cwd=tmp_path, capture_output=True, text=True, env={**os.environ}
    )
    assert found.returncode == 0, found.stderr
    assert "BIT-IDENTICAL" in found.stdout
    lines = [line.strip() for line in found.stdout.splitlines()]
    starts = [line for line in lines if line.startswith("from batch")]
    assert starts[:2] == ["from batch 0", "from batch 0"]
    assert len(starts) == KILLS + 2
    for kill, start in enumerate(starts[2:], 1):
        assert int(start.rpartition(" ")[2]) >= 4 * kill - 1
