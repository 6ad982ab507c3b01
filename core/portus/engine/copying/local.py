"""Moves bytes between this process and a pool on the same machine, hashing them on the way.

Two engines do the innermost loop: the helper in C (``native``) if it is there, else pure Python.
Both give the same bytes and digests. A call works in batches, so that a mapped medium starts to
write back early, the call notices a ``Stop``, and Python handles signals.

The promise: when a call returns, its digests are of the bytes that it left at their target, also if
a source changed meanwhile, so committed bytes load (V2). The fence and the guard ensure that they
are of one moment. After an error, the extents (``copy``) or the targets (``fetch``) hold anything.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeGuard

import numpy as np
import xxhash
from isal import isal_zlib
from numpy.typing import NDArray

from portus.engine.copying import native
from portus.engine.copying.segments import (
    Column,
    Crcs,
    Digests,
    RemoteMedium,
    Segments,
    Sources,
    Stop,
    bytes_at,
    cut,
)
from portus.engine.copying.segments import memory as _view
from portus.engine.copying.thread import share_work
from portus.engine.media.base import MappedMedium, Medium
from portus.engine.media.file_calls import write_all
from portus.engine.spec import PAGE, Extent
from portus.errors import MediumError

BATCH: Final = 128 << 20
"""Bytes for one call of an engine, at most (at least one unit); then write-back may begin."""

PIECE: Final = 2 << 20
"""Bytes that pure Python copies, and then hashes, in one step. Smaller pieces stay warmer, but each
step takes Python's lock from the training."""

SCRATCH: Final = 4 << 20
"""Bytes of the buffer through which small sources come, many with one load."""

LOAD: Final = 1 << 20
"""Bytes of one load of a big source."""

STORE: Final = 512 << 10
"""Bytes of one store of a big source."""

FIRST: Final = 512
"""Bytes to compare first: for most pieces they show that the file has other bytes."""

TWO_THREADS_MIN: Final = 64 << 20
"""Bytes from which a second thread is worth its start."""


Buffer = NDArray[np.uint8]


class PurePython:
    """The engine that works everywhere: the innermost loop."""

    def move(
        self,
        segments: Segments,
        target: Column | None,
        digests: Digests,
        stop: Stop,
        crcs: Crcs | None = None,
        file: int = -1,
        kept: ctypes.c_int64 | None = None,
    ) -> None:
        """Copy each of ``segments`` (whole units) to its address in ``target`` (None: only hash),
        or, given an open ``file``, to that offset in it. Note the digests of the result in
        ``digests``, and its CRC32s in ``crcs`` if that is given. kept: counts bytes that the file
        has already, which are not written. Counts on ``stop``, and raises ``StoppedError``, and
        ``OSError`` for a write that failed."""
        places = segments.address if target is None else target
        columns = (segments.row, segments.address, places, segments.length)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        buffer = memoryview(bytearray(PIECE if file >= 0 else 0))
        for row, unit in itertools.groupby(rows, key=lambda row: row[0]):
            hasher, crc = xxhash.xxh3_128(), 0
            for _, source_start, target_start, length in unit:
                for start in range(0, length, PIECE):
                    stop.check()
                    step = min(PIECE, length - start)
                    if file >= 0:
                        moved = buffer[:step]  # a copy, which cannot change any more
                        moved[:] = _view(source_start + start, step)
                    else:
                        moved = _view(target_start + start, step)
                        if target is not None:
                            ctypes.memmove(target_start + start, source_start + start, step)
                    # The stored bytes are hashed; the source may have changed since they were
                    # copied (V2).
                    hasher.update(moved)
                    if crcs is not None:
                        crc = isal_zlib.crc32(moved, crc)
                    if kept is not None and _is_there(file, moved, target_start + start):
                        kept.value += step
                    elif file >= 0:
                        write_all(file, moved, target_start + start)
                    stop.add(step)
            digests[row] = np.frombuffer(hasher.digest(), np.uint8)
            if crcs is not None:
                crcs[row] = crc


Engine = PurePython | native.Helper


def copy(
    medium: Medium,
    sources: Sources,
    stop: Stop,
    *,
    engine: Engine | None = None,
    crcs: Crcs | None = None,
) -> Digests:
    """Copy ``sources`` into their extents of ``medium``, and return their digests.

    crcs: a row for each digest, which is filled with the CRC32 of the same bytes. The bytes count
    as stored, not as persisted. Blocks; the helper works in a thread of low priority until
    ``stop.is_awaited``, then here and for big totals in a second one. Raises ``StoppedError``, and
    the errors of the medium. ``engine`` is for tests; by default the best.
    """
    segments, digests = cut(sources.require(addresses=True, extents=True))
    call = _Call(medium, engine or best_engine(), digests, stop, crcs)
    # Several calls of the engine: in between, a mapped medium starts to write back.
    if _is_mapped(medium):
        for batch in segments.batches(BATCH):
            _copy_mapped(call, medium, batch)
    else:
        scratch = _scratch(segments)
        for batch in segments.batches(SCRATCH):
            _copy_stored(call, batch, scratch)
    return digests


def hash_sources(sources: Sources, stop: Stop, *, engine: Engine | None = None) -> Digests:
    """Return the digests of ``sources``, without extents. Blocks. Raises ``StoppedError``."""
    engine = engine or best_engine()
    segments, digests = cut(sources.require(addresses=True, extents=False))
    for batch in segments.batches(BATCH):
        engine.move(batch, None, digests, stop)
    return digests


def read_stored(medium: Medium, offset: Column, length: Column) -> NDArray[np.uint8]:
    """Return bytes that were just stored, a short piece at each offset, end to end, through a
    mapping if the medium has one. Blocks. Raises the errors of the medium."""
    if _is_mapped(medium) and len(offset):
        start, end = int(offset.min()), int((offset + length).max())
        return bytes_at(medium.address(Extent(start, end - start)) + offset - start, length)
    ends = np.cumsum(length)
    found = np.empty(int(length.sum()), np.uint8)
    for start, end, at in zip(
        (ends - length).tolist(), ends.tolist(), offset.tolist(), strict=True
    ):
        medium.load(at, found.data[start:end])
    return found


def fetch(medium: Medium, targets: Sources, stop: Stop, *, engine: Engine | None = None) -> Digests:
    """Fill ``targets`` (writable addresses) from their extents; return the digests of what arrived.

    Blocks; takes a second thread for big totals. Raises ``StoppedError`` and the medium's errors.
    """
    return _arrive(medium, targets, stop, engine, keep=True)


def check(medium: Medium, sources: Sources, stop: Stop, *, engine: Engine | None = None) -> Digests:
    """Return the digests of the extents of ``sources``, without addresses. Blocks as ``fetch``."""
    return _arrive(medium, sources, stop, engine, keep=False)


def best_engine() -> Engine:
    """Return the helper if it can be used, else pure Python."""
    return native.helper() or PurePython()


def _is_there(file: int, data: memoryview, offset: int) -> bool:
    """Return True if the file has these bytes at the offset."""
    first = data[:FIRST].tobytes()
    try:
        return os.pread(file, len(first), offset) == first and (
            os.pread(file, len(data), offset) == data.tobytes()
        )
    except OSError:  # unreadable bytes are written
        return False


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one call."""

    medium: Medium
    engine: Engine
    digests: Digests
    stop: Stop
    crcs: Crcs | None = None


def _is_mapped(medium: Medium) -> TypeGuard[MappedMedium]:
    """Return True if the medium is mapped. ``isinstance`` would read all members of the protocol,
    and take longer than a copy of 100 small storages."""
    return getattr(medium, "address", None) is not None


def _addresses_in(medium: MappedMedium, segments: Segments) -> Column:
    """Return the address of each segment, by one lookup: a mapping is one range and never moves."""
    box = segments.box()
    return segments.offset + (medium.address(box) - box.offset)


def _copy_mapped(call: _Call, medium: MappedMedium, batch: Segments) -> None:
    place, runs = _addresses_in(medium, batch), batch.runs()
    for run in runs:
        medium.expect(run)
    try:
        call.engine.move(batch, place, call.digests, call.stop, call.crcs)
    finally:  # also after an error: changed bytes count as stored
        for run in runs:
            medium.wrote(run)


def _scratch(segments: Segments) -> Buffer:
    """Return room for any batch of ``segments``: they may be up to a page apart. Not more than
    needed: a host has many threads, and an allocator keeps for each what it once had."""
    return np.empty(min(SCRATCH, segments.size + PAGE * len(segments)), np.uint8)


def _copy_stored(call: _Call, batch: Segments, scratch: Buffer) -> None:
    """Store a big unit piece by piece; gather small ones first, for few stores."""
    if batch.size > SCRATCH:
        _store_unit(call, batch, scratch)
        return
    runs = batch.runs(gap=1)
    call.engine.move(batch, _places(batch, runs, scratch), call.digests, call.stop, call.crcs)
    for run, place in _lay_out(runs, scratch):
        call.stop.check()
        call.medium.store(run.offset, place)


def _store_unit(call: _Call, unit: Segments, scratch: Buffer) -> None:
    """Store one big unit, from a buffer where it cannot change any more."""
    hasher, crc = xxhash.xxh3_128(), 0
    for address, offset, length in _rows(unit.pieces(STORE)):
        call.stop.check()
        # Copied once: the hash and the store are of the same bytes, whatever the source does (V2).
        ctypes.memmove(scratch.ctypes.data, address, length)
        hasher.update(scratch.data[:length])
        if call.crcs is not None:
            crc = isal_zlib.crc32(scratch.data[:length], crc)
        call.medium.store(offset, scratch.data[:length])
        call.stop.add(length)
    call.digests[unit.row[0]] = np.frombuffer(hasher.digest(), np.uint8)
    if call.crcs is not None:
        call.crcs[unit.row[0]] = crc


def _arrive(
    medium: Medium, sources: Sources, stop: Stop, engine: Engine | None, *, keep: bool
) -> Digests:
    """Load all sources and hash them; ``keep``: leave them at their addresses."""
    sources.require(addresses=keep, extents=True)
    if isinstance(medium, RemoteMedium):
        return medium.fetch(sources, stop) if keep else medium.check(sources, stop)
    segments, digests = cut(sources)
    call = _Call(medium, engine or best_engine(), digests, stop)
    if len(segments) and _is_memory(medium, segments):
        # One call of the engine: each ends with a wait for its second thread, of low priority.
        _move_arrived(call, segments, _addresses_in(medium, segments), keep=keep)
        return digests

    def work(batches: Iterator[Segments]) -> None:
        scratch = _scratch(segments)
        for batch in batches:
            if batch.size + PAGE * len(batch) > SCRATCH:
                _arrive_unit(call, batch, scratch, keep=keep)
            else:
                place = _load(medium, batch, scratch, stop)
                _move_arrived(call, batch, place, keep=keep)

    batches = segments.batches(SCRATCH, gap=PAGE)
    # Of small segments in pure Python, two threads would compete for its lock.
    is_shared = segments.size > LOAD * len(segments) or not isinstance(call.engine, PurePython)
    if is_shared and segments.size >= TWO_THREADS_MIN:
        share_work(work, batches, 2, "portus-copying")
    else:
        work(batches)
    return digests


def _is_memory(medium: Medium, segments: Segments) -> TypeGuard[MappedMedium]:
    """Return True if the bytes are memory, tmpfs or plain: there are no bad sectors under them."""
    if not _is_mapped(medium) or not medium.info.volatile:
        return False
    try:
        _addresses_in(medium, segments)
    except MediumError:  # poisoned for writing; loads still work
        return False
    return True


def _arrive_unit(call: _Call, unit: Segments, scratch: Buffer, *, keep: bool) -> None:
    """Load one big unit straight to its target, and hash it there while it is warm."""
    hasher = xxhash.xxh3_128()
    for address, offset, length in _rows(unit.pieces(LOAD)):
        call.stop.check()
        place = _view(address, length) if keep else scratch.data[:length]
        call.medium.load(offset, place)
        hasher.update(place)
        call.stop.add(length)
    call.digests[unit.row[0]] = np.frombuffer(hasher.digest(), np.uint8)


def _move_arrived(call: _Call, batch: Segments, place: Column, *, keep: bool) -> None:
    """Hash the bytes at ``place``, and copy them to their target in the same pass."""
    arrived = replace(batch, address=place)
    call.engine.move(arrived, batch.address if keep else None, call.digests, call.stop)


def _load(medium: Medium, batch: Segments, scratch: Buffer, stop: Stop) -> Column:
    """Load ``batch`` into ``scratch``, neighbours together; return each segment's address there."""
    runs = batch.runs()
    for run, place in _lay_out(runs, scratch):
        stop.check()
        medium.load(run.offset, place)
    return _places(batch, runs, scratch)


def _lay_out(runs: list[Extent], scratch: Buffer) -> Iterator[tuple[Extent, memoryview]]:
    """Yield each run with its place, when all are put into ``scratch`` end to end."""
    start = 0
    for run in runs:
        assert start + run.length <= len(scratch)
        yield run, scratch.data[start : start + run.length]
        start += run.length


def _places(batch: Segments, runs: list[Extent], scratch: Buffer) -> Column:
    """Return each segment's address when ``runs``, which hold them, are put into ``scratch``."""
    run_start = np.array([run.offset for run in runs], np.int64)
    run_length = np.array([run.length for run in runs], np.int64)
    run_of = np.searchsorted(run_start, batch.offset, "right") - 1
    place = np.cumsum(run_length) - run_length - run_start
    return scratch.ctypes.data + place[run_of] + batch.offset


def _rows(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """Yield (address, offset, length) of each segment."""
    columns = (segments.address, segments.offset, segments.length)
    return zip(*(column.tolist() for column in columns), strict=True)
