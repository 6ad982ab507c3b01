"""Requests about a pool: bytes of it, their digests, and pins of versions meanwhile; its space,
retired versions and noted failures."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Final

import numpy as np

from portus.engine.copying.local import check
from portus.engine.copying.segments import Column, Sources
from portus.errors import UsageError
from portus.reach.daemon.pools import free_bytes, hole_bytes, used_bytes
from portus.reach.daemon.requests.guest import STORAGE_MOVED, Guest
from portus.reach.index.directory import note_failure
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Said, column, handles, ranges
from portus.reach.transport.stream import give_from

PINS_MAX: Final = said.IDS_MAX
_PIN: Final = 256
_RANGE_MOVED: Final = 64
"""Bytes of memory that a pin and a range take at most; measured."""


def read(guest: Guest, message: said.Read) -> Said:
    """Send bytes of the pool."""
    start = time.perf_counter()
    offsets, lengths = _ranges_inside(guest, message.ranges)
    give_from(guest.link, guest.writer.medium, offsets, lengths)
    guest.counters.add("read_bytes", int(lengths.sum()))
    guest.counters.took("read", time.perf_counter() - start)
    return said.Done()


def check_ranges(guest: Guest, message: said.Check) -> Said:
    """Return the digests of storages in the pool."""
    moved = _sources(guest, message)
    with guest.hashing() as stop:
        return said.Hashed(check(guest.writer.medium, moved, stop).tobytes())


def push(guest: Guest, message: said.Push) -> Said:
    """Write storages of the pool into the client's memory."""
    start, moved = time.perf_counter(), _sources(guest, message)
    address, key = handles(message.handles, len(moved.length), "push")
    done = guest.transfer(replace(moved, address=address), key, is_pull=False)
    if done is None:
        raise UsageError("push: not connected by verbs, or storages without a handle")
    guest.counters.add("read_bytes", moved.size)
    guest.counters.took("read", time.perf_counter() - start)
    return said.Hashed(done.digests.tobytes(), done.bounced)


def pin(guest: Guest, message: said.Pin) -> Said:
    """Keep the space of a version from reuse, as long as the connection lives."""
    if len(guest.pins) >= PINS_MAX:
        raise UsageError(f"more than {PINS_MAX} versions are pinned")
    with guest.keep_memory(_PIN if message.version not in guest.pins else 0):
        guest.writer.locks.pin(message.version)
        guest.pins[message.version] += 1
    return said.Done()


def unpin(guest: Guest, message: said.Unpin) -> Said:
    """Take one pin of a version back."""
    if not guest.pins[message.version]:
        raise UsageError(f"version {message.version} is not pinned")
    guest.writer.locks.unpin(message.version)
    guest.pins[message.version] -= 1
    if not guest.pins[message.version]:
        del guest.pins[message.version]
        guest.link.account.keep(-_PIN)
    return said.Done()


def retire(guest: Guest, message: said.Retire) -> Said:
    """Retire versions, by their tokens."""
    guest.hosted.refuse()
    guest.hosted.look()
    with guest.hosted.replica.committing(message.model, message.term):
        gone = guest.find_all(message.tokens)
        guest.writer.retire({info.id for info in gone})
    guest.note_change({info.model for info in gone})
    guest.tell(logging.INFO, "retired", f"{len(gone)} versions", versions=len(gone))
    return said.Done()


def give_back(guest: Guest, message: said.GiveBack) -> Said:
    """Return free space to the file system."""
    guest.give_back()
    return said.Done()


def note(guest: Guest, message: said.Note) -> Said:
    """Record a failed save in the pool's journal."""
    guest.hosted.look()  # or it would be noted in another pool
    note_failure(guest.writer, message.text, guest.hosted.path)
    return said.Done()


def status(guest: Guest, message: said.Status) -> Said:
    """Return the bytes of the pool, and how many saves are under way."""
    hosted, size = guest.hosted, guest.writer.medium.size
    free, holes, taken = free_bytes(hosted), hole_bytes(hosted), used_bytes(hosted)
    return said.Standing(size, free, hosted.saves, holes, taken)


def _ranges_inside(guest: Guest, data: bytes) -> tuple[Column, Column]:
    """Return offsets and lengths of ranges. Raise ``UsageError`` if one is outside of the pool."""
    offsets, lengths = ranges(data, "ranges")
    size = guest.writer.medium.size
    if len(offsets) and int((offsets + lengths).max()) > size:
        raise UsageError(f"ranges: the pool has {size} bytes")
    return offsets, lengths


def _sources(guest: Guest, message: said.Check | said.Push) -> Sources:
    """Return the storages that a request names, once there is memory to process them. Raise
    ``UsageError`` if they are not in the pool."""
    lengths = column(message.lengths, "lengths")
    offsets, sizes = _ranges_inside(guest, message.ranges)
    if (size := int(lengths.sum())) > guest.writer.medium.size:
        raise UsageError(f"{size} bytes, of a pool of {guest.writer.medium.size}")
    guest.link.room(STORAGE_MOVED * len(lengths) + _RANGE_MOVED * len(sizes))
    nowhere = np.ones(len(lengths), np.int64)
    return Sources(address=nowhere, length=lengths, extent_offset=offsets, extent_length=sizes)
