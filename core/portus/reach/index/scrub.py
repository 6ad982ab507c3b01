"""A check at a limited rate, which reports rot before a version is needed.

It reads and compares every byte of all versions, as ``check`` does, a limited number a second. It
bypasses the system's page cache, since rot is on the disk. It changes nothing, and skips a version
that is retired meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import replace

from portus.engine.format.checksum import UNIT
from portus.engine.media.pace import Pace, Wait
from portus.reach.index.check import CheckOptions, Finding, check_file, check_medium
from portus.reach.index.place import Place
from portus.reach.index.reader import PoolReader


def scrub(
    pool: Place | PoolReader, bytes_per_s: int, look: CheckOptions, *, wait: Wait = time.sleep
) -> list[Finding]:
    """Return every broken rule of a pool file, a device, or an open pool, reading ``bytes_per_s``
    at most, 1 or more.

    look: its ``batch`` and ``pace`` are ignored. An open pool is read through its reader: on a
    storage host, the host reads it. Blocks until the end. Raises as ``check``, and what ``wait``
    raises.
    """
    paced = replace(look, batch=UNIT, pace=Pace(bytes_per_s, wait))
    if isinstance(pool, PoolReader):
        return check_medium(pool.medium, pool.locks, paced)
    return check_file(pool.path, paced, cached=False)
