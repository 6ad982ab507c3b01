"""A small pool in memory, for tests of the index: versions are given as plain bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from portus.engine.format.checksum import UNIT, digest
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import Extent
from portus.reach.format.layout import DATA_START, EXTENT, STORAGE, UNIT_DIGEST
from portus.reach.index.commit_records import new_version
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.index.roots import format_pool
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.space import Memory
from tests.contents import table


def writer(size: int = DATA_START, **options: int) -> PoolWriter:
    """A writer of a fresh pool in memory."""
    medium = Memory(size)
    format_pool(medium)
    return PoolWriter(medium, ProcessLocks(), **options)


def reader_of(pool: PoolReader) -> PoolReader:
    """A reader of the same medium, with locks of its own."""
    return PoolReader(pool.medium, ProcessLocks())


def save(
    pool: PoolWriter,
    storages: Sequence[bytes],
    *,
    model: str = "model",
    step: int = 0,
    retire: Sequence[int] = (),
) -> VersionRecord:
    """Commit a version of these storages."""
    room = pool.reserve(sum(map(len, storages)))
    rows: list[tuple[object, ...]] = []
    extents: list[tuple[int, int]] = []
    units: list[tuple[object]] = []
    places = _Room(room)
    for data in storages:
        parts = [data[start : start + UNIT] for start in range(0, len(data), UNIT)] or [b""]
        digests = [digest(part) for part in parts]
        first = len(extents)
        done = 0
        for offset, length in places.take(len(data)):
            pool.medium.store(offset, data[done : done + length])
            extents.append((offset, length))
            done += length
        rows.append((len(data), len(extents) - first, 0))
        units += [(np.void(each),) for each in digests]
    record = pool.commit(
        new_version(
            Labels(
                model=model,
                step=step,
                token=os.urandom(16),
                contents=table([len(each) for each in storages]) if storages else b"{}",
            ),
            (
                np.array(rows, STORAGE.dtype),
                np.array(extents, EXTENT.dtype),
                np.array(units, UNIT_DIGEST.dtype),
            ),
        ),
        room,
        retire,
    )
    pool.release(room)
    assert record is not None
    return record


def stored(pool: PoolReader, record: VersionRecord) -> list[bytes]:
    """The bytes of a version's storages, as the medium holds them."""
    found = []
    for index in range(len(record.storages)):
        parts = []
        for extent in record.storage_extents(index):
            data = memoryview(bytearray(extent.length))
            pool.medium.load(extent.offset, data)
            parts.append(bytes(data))
        found.append(b"".join(parts))
    return found


class _Room:
    """Hands out the bytes of reserved extents one after another."""

    def __init__(self, room: Sequence[Extent]) -> None:
        self._left = [[extent.offset, extent.length] for extent in room]

    def take(self, length: int) -> list[tuple[int, int]]:
        """(offset, length) of the next ``length`` bytes."""
        pieces = []
        while length:
            run = self._left[0]
            taken = min(length, run[1])
            pieces.append((run[0], taken))
            run[0], run[1], length = run[0] + taken, run[1] - taken, length - taken
            if not run[1]:
                self._left.pop(0)
        return pieces
