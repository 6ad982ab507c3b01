"""``Pace``: reading at a bounded speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

Wait = Callable[[float], object]
"""Receives seconds to wait, 0 or more. An error that it raises ends the paced work."""


class Pace:
    """Waits so that no second has more reads than the limit. Idle time earns no credit."""

    def __init__(self, bytes_per_s: int, wait: Wait = time.sleep) -> None:
        self._bytes_per_s: Final = bytes_per_s
        self._wait: Final = wait
        self._free_s = time.monotonic()

    def take(self, size: int) -> None:
        """Wait until ``size`` bytes may be read. Raises the errors of ``wait``."""
        now_s = time.monotonic()
        self._wait(max(0.0, self._free_s - now_s))
        self._free_s = max(self._free_s, now_s) + size / self._bytes_per_s
