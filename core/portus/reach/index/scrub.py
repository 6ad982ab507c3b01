"""A check that takes its time: rot is told of before a version is needed.

Every byte of the versions that are kept is read and compared, as ``check`` does, a bounded number
in a second, and past what the system keeps of a file in its memory: rot is on the disk. Changes
nothing. A version that is retired meanwhile is passed over.
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
    """Every broken rule of a pool file, a device, or a pool that is open, reading ``bytes_per_s``
    at most, 1 or more. What is open is read as it is: on a storage host, by the host.

    look: its ``batch`` and ``pace`` count for nothing. Blocks for as long as that takes. Raises
    as ``check``, and what ``wait`` raises.
    """
    paced = replace(look, batch=UNIT, pace=Pace(bytes_per_s, wait))
    if isinstance(pool, PoolReader):
        return check_medium(pool.medium, pool.locks, paced)
    return check_file(pool.path, paced, cached=False)
