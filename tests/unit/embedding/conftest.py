"""What tests of tables have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import stand_in

DEVICE = 112 << 20


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    """The path of a device."""
    path = tmp_path / "dax"
    with open(path, "wb") as file:
        file.truncate(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        stand_in(str(path), str(tmp_path / "facts"), patch)
        yield str(path)
