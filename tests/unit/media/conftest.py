"""File systems to try media on that every machine has."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(params=["/dev/shm", tempfile.gettempdir()])
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory in memory, then one on the disk."""
    if not os.path.isdir(request.param):
        pytest.skip(f"no directory {request.param} here")
    with tempfile.TemporaryDirectory(dir=request.param) as name:
        yield Path(name)
