"""A version of one pool into another one, whatever the media: so a fresh node fills its own pool
from a mirror. What arrives is compared with the version's digests before it is stored.

Threads fetch, compare and store side by side, a batch being what one request brings, while the pool
grows: each of these alone takes as long as the network does.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from portus.engine.copying.local import copy, fetch
from portus.engine.copying.segments import Digests, Segments, Sources, Stop, cut
from portus.engine.format.checksum import UNIT
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.plan import Column
from portus.errors import CorruptionError, UsageError
from portus.reach.format.layout import RecordKind
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.versions.buffers import Room, Rooms
from portus.reach.versions.parallel import in_any_order
from portus.reach.versions.parts import shared, sources
from portus.reach.versions.pool_draft import PoolDraft, Reserved

ABREAST: Final = 5
"""Batches that are on their way at once. Each takes 16 MiB of memory, besides what arrives."""

_SMALL: Final = 64 << 10
"""Bytes. Pieces that are smaller than that, on average, are not stored one by one."""


def transferred(
    reader: PoolReader,
    version: int,
    writer: PoolWriter,
    stop: Stop,
    advanced: Callable[[int], None] | None = None,
) -> VersionRecord:
    """Commit a version of ``reader``, by its id, to the pool of ``writer``, as the newest one, with
    the same model, step and token. Blocks. advanced: told of bytes that were stored, by one thread
    at a time.

    Raises ``CorruptionError`` where bytes are not those of the version, ``StaleError`` if it is not
    there (any more), ``StoppedError``, and what the two pools raise. Then nothing changed.
    """
    with reader.pinned(version) as entry:
        record = unchanging(reader.record(entry))
        draft = PoolDraft(writer, record.storages["length"].astype(np.int64))
        try:
            _Move(reader, record, writer, stop, advanced).into(draft)
            labels = Labels(
                model=entry.info.model,
                step=entry.info.step,
                token=entry.info.token,
                layout=bytes(reader.payload(record.layout, RecordKind.LAYOUT)),
                tree=bytes(reader.payload(record.tree, RecordKind.TREE)),
                inexact=entry.info.inexact,
                metrics=entry.info.metrics,
            )
            return draft.commit(labels, None, ()).record
        finally:
            draft.release()


def unchanging(record: VersionRecord) -> VersionRecord:
    """``record``, of a version that stays as it was committed. Raises ``UsageError`` for one with a
    log: what it is now is in its log as well."""
    if record.log is not None:
        info = record.info
        raise UsageError(
            f"model {info.model!r}, step {info.step} changes in place (a shelf); it cannot be "
            "copied to another pool or to a mirror"
        )
    return record


class _Move:
    """Brings the bytes of a version to a draft: requests are under way while what arrived before is
    verified and stored, and while the pool grows."""

    def __init__(
        self,
        reader: PoolReader,
        record: VersionRecord,
        writer: PoolWriter,
        stop: Stop,
        advanced: Callable[[int], None] | None,
    ) -> None:
        self._advanced: Final = advanced
        self._telling: Final = threading.Lock()
        self._reader: Final = reader
        self._info: Final = record.info
        self._writer: Final = writer
        self._stop: Final = stop
        self._rooms: Final = Rooms(UNIT)
        self._lengths: Final = record.storages["length"].astype(np.int64)
        self._every: Final = np.arange(len(self._lengths))
        self._nowhere: Final = np.zeros(len(self._lengths), np.int64)
        group = shared(record, self._every)
        self._expected: Final = group.digests
        self._there, self._found = cut(sources(self._nowhere, self._lengths, group.extents))
        self._room: Final = concurrent.futures.Future[Segments]()
        """Where in the pool the units go, once it has grown."""

    def into(self, draft: PoolDraft) -> None:
        """Fill ``draft``, but for its commit."""
        reserved: list[Reserved] = []

        def reserve() -> None:
            try:
                reserved.append(draft.reserve(self._every, self._nowhere))
                self._room.set_result(cut(reserved[0].target)[0])
            except BaseException as error:
                self._room.set_exception(error)
                raise

        # The first thread to begin has the pool grow; it takes part in the rest then.
        acts: list[Callable[[], None]] = [reserve]
        acts += (partial(self._move, np.unique(each.row)) for each in self._there.batches(UNIT))
        in_any_order(lambda act: act(), acts, ABREAST)
        self._compare(self._found, self._expected)
        draft.note(reserved[0], self._found)

    def _move(self, rows: Column) -> None:
        """Some units: to memory, where they are verified, and from there to where they stay."""
        self._stop.check()
        source = self._there.of_units(rows)
        with self._rooms.lent(source.size) as room:
            found = fetch(self._reader.medium, _laid(source, room), self._stop)
            self._compare(found, self._expected[rows])
            self._store(self._room.result().of_units(rows), room, self._expected[rows])
        self._found[rows] = found
        if self._advanced is not None:
            with self._telling:
                self._advanced(source.size)

    def _store(self, target: Segments, room: Room, expected: Digests) -> None:
        """Store units by calls of the medium: the first touch of a mapped page costs more than the
        copy to it. Many small pieces are copied by the engine."""
        medium, ends = self._writer.medium, np.cumsum(target.length)
        follows = target.offset[1:] == (target.offset + target.length)[:-1]
        first = np.flatnonzero(np.append(True, ~follows))
        if len(first) * _SMALL > target.size:
            self._compare(copy(medium, _laid(target, room), self._stop), expected)
            return
        starts = (ends - target.length)[first]
        runs = zip(starts.tolist(), [*starts[1:].tolist(), target.size], strict=True)
        for offset, (start, end) in zip(target.offset[first].tolist(), runs, strict=True):
            self._stop.check()
            medium.store(offset, room.data[start:end])

    def _compare(self, found: Digests, expected: Digests) -> None:
        bad = np.flatnonzero(np.any(found != expected, axis=1))
        if len(bad):
            info = self._info
            raise CorruptionError(
                f"{self._reader.medium.info.name}: model {info.model!r}, step {info.step}: a unit "
                f"is damaged: expected digest {expected[bad[0]].tobytes().hex()}, found "
                f"{found[bad[0]].tobytes().hex()}"
            )


def _laid(segments: Segments, room: Room) -> Sources:
    place: Column = room.ctypes.data + np.cumsum(segments.length) - segments.length
    return segments.laid(place)
