"""Copies a version from one pool to another: of this process, or of a storage host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import numpy as np

from portus.engine.copying.local import fetch
from portus.engine.copying.segments import Sources, Stop, equal_storages
from portus.engine.format.checksum import UNIT
from portus.engine.pipeline.draft import Draft, Labels
from portus.engine.pipeline.plan import Column, OnDevice
from portus.engine.spec import Extent
from portus.errors import CorruptionError
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.versions.parts import part, share, sources


def copy_version(
    reader: PoolReader,
    record: VersionRecord,
    draft: Draft,
    stop: Stop,
    known: VersionRecord | None,
) -> Labels:
    """Copy all storages of a version, which the caller pins, to ``draft``; return the labels for
    its commit. known: a version in the pool of the draft. What equals that is shared.

    Raises ``CorruptionError`` if the bytes are not those that were saved, and what both pools
    raise.
    """
    lengths = record.length
    left = np.arange(len(lengths))
    if known is not None:
        same = _equal(record, known)
        if len(same) and draft.share(known, same, np.zeros_like(same), stop):
            left = np.setdiff1d(left, same)
    room = np.empty(min(UNIT, int(lengths.sum())), np.uint8)
    for batch in _batches(left, lengths):
        size = lengths[batch]
        if len(batch) == 1 and size[0] > UNIT:
            extents = record.storage_extents(int(batch[0]))
            found = draft.copy_fed(batch, [_StoredFeed(reader, extents, room, stop)], stop)
        else:
            place = room.ctypes.data + np.cumsum(size) - size
            fetch(reader.medium, sources(place, size, share(record, batch).extents), stop)
            found = draft.copy(batch, place, stop)
        if not np.array_equal(found, record.digests(batch)):
            raise CorruptionError(
                f"{reader.medium.info.name}: model {record.info.model!r}, step "
                f"{record.info.step}: the bytes are not those that were saved; it is not copied"
            )
    info = record.info
    return Labels(
        model=info.model,
        step=info.step,
        token=info.token,
        contents=record.contents,
        inexact=info.inexact,
        metrics=dict(info.metrics),
    )


class _StoredFeed:
    """A storage of a pool, fetched a unit at a time."""

    there: Final = OnDevice(0, 0, None)

    def __init__(
        self, reader: PoolReader, extents: tuple[Extent, ...], room: np.ndarray, stop: Stop
    ) -> None:
        self._reader: Final = reader
        self._extents: Final = extents
        self._room: Final = room
        self._stop: Final = stop

    def await_device(self) -> None:
        """Do nothing: there is no device."""

    @contextlib.contextmanager
    def units(self) -> Iterator[Iterator[tuple[int, int]]]:
        yield self._units()

    def _units(self) -> Iterator[tuple[int, int]]:
        size, place = sum(each.length for each in self._extents), self._room.ctypes.data
        for start in range(0, size, UNIT):
            own = part(self._extents, start, min(start + UNIT, size))
            length = sum(each.length for each in own)
            fetch(self._reader.medium, Sources.at([place], [length], own), self._stop)
            yield place, length


def _equal(record: VersionRecord, known: VersionRecord) -> Column:
    """Return the storages that both versions have at the same index, and that may be shared."""
    if len(record.length) != len(known.length):
        return np.empty(0, np.int64)
    fits = (record.length == known.length) & (record.length > 0) & known.may_share
    some = np.flatnonzero(fits)
    digests = record.digests(some), known.digests(some)
    return some[equal_storages(*digests, record.length[some])]


def _batches(indices: Column, lengths: Column) -> Iterator[Column]:
    """Yield the indices in batches of ``UNIT`` bytes at most, or of one larger storage."""
    start, size = 0, 0
    for at, length in enumerate(lengths[indices].tolist()):
        if at > start and size + length > UNIT:
            yield indices[start:at]
            start, size = at, 0
        size += length
    if start < len(indices):
        yield indices[start:]
