"""How deep long searches go: ``$PORTUS_TEST_DEPTH``, else 1. ``.ci/run`` says less."""

from __future__ import annotations

import os
from typing import Final

DEPTH: Final = float(os.environ.get("PORTUS_TEST_DEPTH", "1"))


def deep(count: int) -> int:
    """So many cases of ``count`` are tried, one at least."""
    return max(1, round(count * DEPTH))
