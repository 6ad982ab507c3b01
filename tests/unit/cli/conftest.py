"""A run with a pool in its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.scene import Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """One of its own, in the current directory."""
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path)
