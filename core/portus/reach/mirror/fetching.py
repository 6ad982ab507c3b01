"""What a mirror has of a model, into a pool that has nothing of its own.

All versions, oldest first, each by an ordinary commit under its token. Whoever is killed in it does
the rest when it is done again, since all that is there is in the mirror too.

Each byte of the files is asked for once, in ranges as they lie there, several at a time, while the
pool grows. Units are compared with the digests of the manifest before they are stored; one of the
bytes around storages waits in memory until all of it is there.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from portus.engine.copying.local import copy, hash_sources
from portus.engine.copying.segments import (
    Column,
    Digests,
    Segments,
    Sources,
    Stop,
    cut,
    memory,
    unit_spans,
)
from portus.engine.format.checksum import UNIT, unit_counts
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionRecord
from portus.reach.mirror.mirror import Mirror, OpenMirrored
from portus.reach.mirror.object_file import ObjectFile
from portus.reach.mirror.objects import Added, State
from portus.reach.versions.buffers import Room, Rooms
from portus.reach.versions.parallel import in_any_order
from portus.reach.versions.pool_draft import PoolDraft, Reservation

_log: Final = logging.getLogger("portus")

Advanced = Callable[[int], None]
"""Told of bytes that are here now, besides those before, by one thread at a time."""

ABREAST: Final = 5
"""Ranges that are on their way at once."""

_RANGE_MAX: Final = UNIT + (1 << 20)
"""Bytes of one of them: a unit, and what is around it."""

_SMALL: Final = 64 << 10
"""Bytes. Pieces that are smaller than that, on average, are not stored one by one."""


def place_of(added: Added) -> tuple[int, int]:
    """Where a version is in the history of its mirror."""
    return added.term, added.commit


def missing(state: State, own: Collection[VersionInfo]) -> list[Added]:
    """What of a mirror a pool with the versions ``own`` lacks, oldest first."""
    tokens = {info.token for info in own}
    return sorted((each for each in state.versions if each.token not in tokens), key=place_of)


def fill(
    mirror: Mirror,
    state: State,
    writer: PoolWriter,
    wanted: Sequence[Added],
    advanced: Advanced | None = None,
) -> list[Added]:
    """Fetch ``wanted``, which is ``missing``; return which versions were fetched. Blocks.

    An older version that is damaged in the mirror is left out, with an error in the log. Raises
    ``CorruptionError`` for the newest one, and what the mirror and the pool raise.
    """
    done = []
    for each in wanted:
        try:
            with mirror.open_version(each) as opened:
                fetch_version(opened, writer, advanced)
            done.append(each)
        except CorruptionError as error:
            if each == state.newest:
                # To resume from an older one would lose steps silently.
                raise
            _log.error("portus: step %d cannot be fetched from the mirror: %s", each.step, error)
    return done


def fetch_version(
    opened: OpenMirrored, writer: PoolWriter, advanced: Advanced | None = None
) -> VersionRecord:
    """Commit a version of a mirror to the pool of ``writer``, as the newest one, with the same
    model, step and token. Blocks.

    Raises ``CorruptionError`` where bytes are not those of the version, ``StaleError`` if it was
    removed meanwhile, and what the store and the pool raise. Then nothing changed.
    """
    version = opened.version
    draft = PoolDraft(writer, version.lengths)
    try:
        _Arrival(opened, writer, advanced).into(draft)
        labels = Labels(
            model=version.info.model,
            step=version.info.step,
            token=version.info.token,
            contents=version.manifest.contents,
            inexact=version.info.inexact,
            metrics=version.info.metrics,
        )
        return draft.commit(labels, None).record
    finally:
        draft.release()


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes of a file that are asked for at once, from its byte ``start`` on: columns of pieces end
    to end. ``row``: of the unit that a piece is; -1 for one around the storages, which goes to
    ``around`` from its byte ``inside`` on."""

    file: ObjectFile
    around: _SurroundingBytes
    start: int
    length: Column
    row: Column
    inside: Column


class _SurroundingBytes:
    """The bytes around the storages of a file, which arrive in any order: each unit is stored once
    all of it is there. Thread-safe."""

    def __init__(self, arrival: _Arrival, storage: int, size: int) -> None:
        """storage: of the version, which they are. size: bytes of all."""
        self._arrival: Final = arrival
        self._storage: Final = storage
        self._size: Final = size
        self._guard: Final = threading.Lock()
        self._units: Final[dict[int, tuple[Room, int]]] = {}
        """Units that are not whole yet, and how many bytes each lacks."""

    def put(self, inside: int, data: Room) -> None:
        """Take bytes from byte ``inside`` on. Raises as ``store_unit``."""
        while len(data):
            unit, at = divmod(inside, UNIT)
            part = data[: UNIT - at]
            with self._guard:
                if unit in self._units:
                    room, lacks = self._units.pop(unit)
                else:
                    lacks = min(UNIT, self._size - unit * UNIT)
                    room = np.empty(lacks, np.uint8)
                room[at : at + len(part)] = part
                lacks -= len(part)
                if lacks:
                    self._units[unit] = room, lacks
            if not lacks:
                self._arrival.store_unit(self._storage, unit, room)
            inside, data = inside + len(part), data[len(part) :]


class _Arrival:
    """Brings the bytes of a version to a draft: requests are under way while what arrived before is
    verified and stored, and while the pool grows."""

    def __init__(self, opened: OpenMirrored, writer: PoolWriter, advanced: Advanced | None) -> None:
        version = opened.version
        self._advanced: Final = advanced
        self._telling: Final = threading.Lock()
        self._info: Final = version.info
        self._writer: Final = writer
        self._stop: Final = Stop()
        self._files: Final = opened.parts
        self._rooms: Final = Rooms(_RANGE_MAX)
        self._lengths: Final = version.lengths
        self._expected: Final = version.digests
        counts = unit_counts(version.lengths)
        self._first: Final = np.cumsum(counts) - counts
        """The first unit of each storage."""
        self._room: Final = concurrent.futures.Future[Segments]()
        """Where in the pool the units go, once it has grown."""

    def into(self, draft: PoolDraft) -> None:
        """Fill ``draft``, but for its commit."""
        reserved: list[Reservation] = []
        nowhere = np.zeros(len(self._lengths), np.int64)
        _, found = cut(Sources.in_memory(nowhere, self._lengths))
        is_empty = found.any(axis=1)
        self._compare(np.flatnonzero(is_empty), found[is_empty])

        def reserve() -> None:
            try:
                reserved.append(draft.reserve(np.arange(len(self._lengths)), nowhere))
                self._room.set_result(cut(reserved[0].target)[0])
            except BaseException as error:
                self._room.set_exception(error)
                raise

        last = len(self._lengths) - len(self._files)
        # The first thread to begin has the pool grow; it takes part in the rest then.
        acts: list[Callable[[], None]] = [reserve]
        for number, each in enumerate(self._files):
            around = _SurroundingBytes(self, last + number, each.file.around)
            acts += (partial(self._move, part) for part in self._ranges(number, around))
        in_any_order(lambda act: act(), acts, ABREAST)
        draft.note(reserved[0], self._expected)

    def _ranges(self, number: int, around: _SurroundingBytes) -> Iterator[_Range]:
        """All of a file, in order."""
        file = self._files[number].file
        before = sum(len(each.file.length) for each in self._files[:number])
        spans = file.spans()
        begin, length = unit_spans(spans.begin, spans.length)
        counts = unit_counts(spans.length)
        span = np.repeat(np.arange(len(counts)), counts)
        is_around = spans.storage[span] == len(file.length)
        inside = begin - spans.begin[span]
        owner = np.where(is_around, 0, before + spans.storage[span])
        row = np.where(is_around, -1, self._first[owner] + inside // UNIT)
        pieces = np.stack([begin, length, row, spans.inside[span] + inside])[:, length > 0]
        first = size = 0
        for at, more in enumerate(pieces[1].tolist()):
            # A unit is never split over two requests: it is verified as a whole.
            if size and size + more > _RANGE_MAX:
                yield _range_of(self._files[number], around, pieces[:, first:at])
                first, size = at, 0
            size += more
        if size:
            yield _range_of(self._files[number], around, pieces[:, first:])

    def _move(self, part: _Range) -> None:
        """A range: to memory, where its units are verified, and from there to where they stay."""
        self._stop.check()
        ends = np.cumsum(part.length)
        size, starts, is_around = int(ends[-1]), ends - part.length, part.row < 0
        with self._rooms.lent(size) as room:
            part.file.read(part.start, room.data)
            columns = (starts[is_around], part.inside[is_around], part.length[is_around])
            for start, inside, length in zip(*(each.tolist() for each in columns), strict=True):
                part.around.put(inside, room[start : start + length])
            units = ~is_around
            if units.any():
                place = room.ctypes.data + starts[units]
                self._store(part.row[units], place, part.length[units])
        if self._advanced is not None:
            with self._telling:
                self._advanced(size)

    def store_unit(self, index: int, unit: int, room: Room) -> None:
        """Store a unit of a storage, from memory."""
        rows, place = self._first[index] + np.array([unit]), np.array([room.ctypes.data])
        self._store(rows, place, np.array([len(room)]))

    def _store(self, rows: Column, address: Column, length: Column) -> None:
        """Verify units in memory, and store them by calls of the medium: the first touch of a
        mapped page costs more than the copy to it. Many small pieces are copied by the engine."""
        # Verified in memory that nobody else has, so only right bytes get into the pool (V4).
        self._compare(rows, hash_sources(Sources.in_memory(address, length), self._stop))
        medium, target = self._writer.medium, self._room.result().of_units(rows)
        first = np.cumsum(length) - length
        place = address[target.row] + np.cumsum(target.length) - target.length - first[target.row]
        # A call of the medium for each small piece would cost more than to copy them together.
        if len(target) * _SMALL > target.size:
            self._compare(rows, copy(medium, target.sources_at(place), self._stop))
            return
        columns = (target.offset, place, target.length)
        for offset, at, size in zip(*(each.tolist() for each in columns), strict=True):
            self._stop.check()
            medium.store(offset, memory(at, size))

    def _compare(self, rows: Column, found: Digests) -> None:
        expected = self._expected[rows]
        bad = np.flatnonzero(np.any(found != expected, axis=1))
        if len(bad):
            raise CorruptionError(
                f"{self._files[0].info.name}: model {self._info.model!r}, step {self._info.step}: "
                f"a unit is damaged: expected digest {expected[bad[0]].tobytes().hex()}, found "
                f"{found[bad[0]].tobytes().hex()}"
            )


def _range_of(file: ObjectFile, around: _SurroundingBytes, pieces: Column) -> _Range:
    begin, length, row, inside = pieces
    return _Range(file, around, int(begin[0]), length, row, inside)
