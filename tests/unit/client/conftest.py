"""What tests of files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.engine.paths import process


@pytest.fixture
def own_saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test has a saver of its own, which is closed behind it, and works in its directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_savers", [])
    monkeypatch.setattr(process, "_writers", [])
    yield
    process._finish()
