"""A pool on a device. A device has no file names, so only its bytes tell whether a pool is there.

Theory. A pool file gets its name when it is complete. A device exists before, with any bytes on it.
So a pool's first copy of the superblock is written there last. The second copy is written first,
and says whose the rest is. Each step is persisted before the next one:

1. the header is cleared: its first page, then the others, then that of the second copy, which until
then says whose they are (a device of zeros needs no clearing);
2. the second copy of the superblock;
3. the first root;
4. the first copy of the superblock.

A device is *blank* if its header is zero, or if the making of a pool was interrupted: then the
first copy is not intact, and nothing was ever committed. A pool that lost its first copy has a root
with the uuid of its second one, unless the pool is empty. Anything else is a pool, or other data,
and is left alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import UsageError
from portus.reach.format.layout import DATA_START, SUPERBLOCK, SUPERBLOCK_OFFSETS
from portus.reach.index.roots import (
    FIRST_ROOT,
    Superblock,
    read_roots,
    store_root,
    store_superblock,
    whole_superblock,
)

_FIRST, _SECOND = SUPERBLOCK_OFFSETS
_SECOND_END: Final = _SECOND + SUPERBLOCK.size


def is_blank(medium: Medium) -> bool:
    """Return whether a pool may be made on a device, with no loss. Raise ``UsageError`` if the
    device is too small."""
    if medium.size < DATA_START:
        raise UsageError(
            f"{medium.info.name}: a pool needs at least {DATA_START} bytes, found {medium.size}"
        )
    first, second = (whole_superblock(medium, offset) for offset in SUPERBLOCK_OFFSETS)
    if first is not None:
        return False
    if second is not None:
        return all(root.is_first for root in read_roots(medium, second.uuid))
    header = bytearray(DATA_START)
    medium.load(0, memoryview(header))
    header[_SECOND:_SECOND_END] = bytes(SUPERBLOCK.size)  # may be torn
    return not any(header)


def make_pool(medium: Medium) -> None:
    """Make an empty pool over whatever the device holds, durable on return.

    No other process may have it open. If the making is interrupted, the earlier contents are still
    a pool, or the device is blank, or it holds no pool.
    """
    # First: an interruption after this leaves no pool, rather than half of an old one.
    _clear(medium, [Extent(_FIRST, PAGE)])
    behind = Extent(_SECOND + PAGE, DATA_START - _SECOND - PAGE)
    _clear(medium, [Extent(_FIRST + PAGE, _SECOND - PAGE), behind])
    _clear(medium, [Extent(_SECOND, PAGE)])
    block = Superblock(os.urandom(16), time.time_ns())
    medium.persist([store_superblock(medium, block, _SECOND)])
    medium.persist([store_root(medium, block.uuid, FIRST_ROOT)])
    # This one makes it a pool, so everything else must be durable before.
    medium.persist([store_superblock(medium, block, _FIRST)])


def make_durable(medium: Medium) -> None:
    """Make the superblock of an existing pool durable, before the first commit. Its maker may have
    been killed, and left it in caches only."""
    medium.persist([Extent(offset, PAGE) for offset in SUPERBLOCK_OFFSETS])


def _clear(medium: Medium, extents: Sequence[Extent]) -> None:
    for extent in extents:
        content = bytearray(extent.length)
        medium.load(extent.offset, memoryview(content))
        if any(content):
            medium.store(extent.offset, bytes(extent.length))
    medium.persist(extents)  # zeros in caches only would not survive
