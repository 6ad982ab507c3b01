"""A version of a shelf or of tables, or a part of it, as a torch file: streamed, and verified on
the way.

``torch.save`` wants the state in memory. Here the state is outlined first, over memory that nobody
touches, and laid out as any state that Portus saves; then each storage goes from the pool to its
place in the file, a unit (16 MiB) at a time.
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
    """Write the state of a version to ``target``, which is empty and can be sought in; or what of
    it has key paths to ``keep``.

    One unit is in memory at a time, and what of the state is no tensor. ``fits`` gets the size of
    the file before anything is written, and may raise.

    Raises ``CorruptionError`` and ``MediumError``: then something was written; ``StaleError``; and
    ``UsageError`` for what torch cannot write, and before anything is written.
    """
    with restore.outline_version(pool, entry, keep) as outline:
        storages = Storages(pool, outline.record, outline.logged)
        found = pickle_state(outline.state)
        # The name of the archive in a file of torch's that has no name.
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
        yield memoryview(b"")  # it has a digest, as every unit
    try:
        yield from storages.read(index, 0, length)
    except CorruptionError as error:
        raise CorruptionError(f"{outline.name(index)}: {error}") from error
