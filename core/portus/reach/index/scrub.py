"""A check that takes its time: rot is told of before a version is needed.

Every byte of the versions that are kept is read and compared, as ``check`` does, a bounded number
in a second, and past what the system keeps of a file in its memory: rot is on the disk. Changes
nothing. A version that is retired meanwhile is passed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from portus.engine.format.checksum import UNIT
from portus.reach.index.check import CheckOptions, Finding, check_file, check_medium
from portus.reach.index.place import Place
from portus.reach.index.reader import PoolReader

Wait = Callable[[float], object]
"""Called with seconds to wait, 0 or more. What it raises ends a scrub."""


def scrub(
    pool: Place | PoolReader, bytes_per_s: int, look: CheckOptions, *, wait: Wait = time.sleep
) -> list[Finding]:
    """Every broken rule of a pool file, a device, or a pool that is open, reading ``bytes_per_s``
    at most, 1 or more. What is open is read as it is: on a storage host, by the host.

    look: its ``batch`` and ``reading`` count for nothing. Blocks for as long as that takes. Raises
    as ``check``, and what ``wait`` raises.
    """
    paced = replace(look, batch=UNIT, reading=Pace(bytes_per_s, wait))
    if isinstance(pool, PoolReader):
        return check_medium(pool.medium, pool.locks, paced)
    return check_file(pool.path, paced, cached=False)


class Pace:
    """Waits so that no more is read in a second than was said. What was not read in time is not
    made up for."""

    def __init__(self, bytes_per_s: int, wait: Wait = time.sleep) -> None:
        self._bytes_per_s: Final = bytes_per_s
        self._wait: Final = wait
        self._free_s = time.monotonic()

    def __call__(self, size: int) -> None:
        now_s = time.monotonic()
        self._wait(max(0.0, self._free_s - now_s))
        self._free_s = max(self._free_s, now_s) + size / self._bytes_per_s
