"""Streams a version of a shelf or of tables, or a part of it, into a torch file, and verifies it on
the way.

``torch.save`` needs the state in memory. This module first outlines the state over memory that is
never touched, and lays it out as any state that Portus saves; then each storage goes from the pool
to its place in the file, a unit (16 MiB) at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np
from isal import isal_zlib

from portus.engine.format.checksum import DIGEST_SIZE, digest
from portus.engine.loading.patterns import Matcher
from portus.engine.state.pickling import pickle_state
from portus.errors import CorruptionError
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.pools import restore
from portus.reach.pools.contents import Storages
from portus.reach.pools.restore import Outline


def write(
    pool: PoolReader,
    entry: VersionEntry,
    target: BinaryIO,
    *,
    keep: Matcher | None = None,
    fits: Callable[[int], None] = lambda size: None,
) -> None:
    """Write the state of a version, or its parts with key paths that match ``keep``, to ``target``,
    which is empty and can be sought in.

    Holds one unit in memory at a time, and the values that are no tensors. Calls ``fits``, which
    may raise, with the size of the file before it writes.

    Raises ``CorruptionError`` and ``MediumError``, after it may have written; ``StaleError``; and
    ``UsageError`` for values that torch cannot write, before it writes.
    """
    with restore.outline_version(pool, entry, keep) as outline:
        storages = Storages(pool, outline.record, outline.logged)
        found = pickle_state(outline.state)
        # The archive's name in torch's files without a name.
        image = found.image("archive")
        fits(image.size)
        digests, crcs = [], []
        for storage, offset in zip(found.storages, image.offset.tolist(), strict=True):
            target.seek(offset)
            crc = 0
            for unit in _read(storages, outline.indices[storage._cdata], outline):
                target.write(unit)
                digests.append(digest(unit))
                crc = isal_zlib.crc32(unit, crc)
            crcs.append(crc)
        units = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_SIZE)
        for literal in image.literals(units, np.array(crcs, np.uint32)):
            target.seek(literal.offset)
            target.write(literal.data)


def _read(storages: Storages, index: int, outline: Outline) -> Iterator[memoryview]:
    length = storages.length(index)
    if not length:
        yield memoryview(b"")  # an empty unit has a digest, too
    try:
        yield from storages.read(index, 0, length)
    except CorruptionError as error:
        raise CorruptionError(f"{outline.name(index)}: {error}") from error
