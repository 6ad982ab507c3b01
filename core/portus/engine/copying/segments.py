"""The objects of a copy: sources, the segments that they are cut into, and the signal to stop.

Theory. All sources of one call, put end to end, are a *stream* of bytes; so are all their extents.
Cutting the stream wherever a source, a unit (16 MiB of one source) or an extent begins gives
*segments*: runs that are contiguous on both sides and within one unit. An engine then needs only
columns of addresses and lengths, so 10,000 small sources cost one call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from portus.engine.format.checksum import DIGEST_SIZE, UNIT, digest, unit_counts
from portus.engine.spec import PAGE, Extent
from portus.errors import AbandonedError, UsageError

Column = NDArray[np.int64]
"""(n,) int64."""

Digests = NDArray[np.uint8]
"""(units, 16) uint8: the units of all sources, one after another. A source has
``unit_count(length)`` rows, so an empty one has one row, the digest of no bytes."""

Crcs = NDArray[np.uint32]
"""(units,) uint32: the CRC32 of each unit, as zip files have it."""

PROBE: Final = 64
"""Bytes of a source that an audit compares, in one piece. Pieces begin at multiples of it from the
start of the source, so none crosses an extent."""

PROBE_EACH: Final = 64 << 10
"""Bytes of a source from one piece to the next; one more piece is at its end."""


class StoppedError(AbandonedError):
    """The ``Stop`` of a call was set before the call ended. The bytes written are of no use."""


class Stop:
    """Asks a running call to end, from any thread, and counts its progress.

    Several calls may share it; ``bytes_done`` then counts the bytes of all of them. ``is_awaited``:
    a thread waits for the call, so it may take processors from others; it may be set and cleared
    while the call runs.
    """

    def __init__(self, *, awaited: bool = True) -> None:
        self._shared = (ctypes.c_int64 * 3)(0, 0, awaited)
        self._lock = threading.Lock()  # for ``add``, in pure Python; the helper adds atomically

    def set(self) -> None:
        """Ask for the end. Calls with this stop raise ``StoppedError`` within milliseconds."""
        self._shared[0] = 1

    def is_set(self) -> bool:
        return self._shared[0] != 0

    def check(self) -> None:
        """Raise ``StoppedError`` if the stop is set."""
        if self.is_set():
            raise StoppedError(f"stopped by request after {self.bytes_done} bytes")

    @property
    def is_awaited(self) -> bool:
        """True if a thread waits for the call."""
        return self._shared[2] != 0

    @is_awaited.setter
    def is_awaited(self, awaited: bool) -> None:
        self._shared[2] = awaited

    @property
    def bytes_done(self) -> int:
        """Bytes copied, hashed or compared so far."""
        return self._shared[1]

    def add(self, length: int) -> None:
        """Count ``length`` more bytes as done."""
        with self._lock:
            self._shared[1] += length

    @property
    def flags_address(self) -> int:
        """The address of three int64, (asked, bytes done, awaited), for a helper in C."""
        return ctypes.addressof(self._shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Storages in this process, and their places in the pool, as columns: no object for each.

    ``address`` and ``length``: one row for each source; the address is 0 where the length is 0, or
    nothing is moved. The caller keeps the memory alive during a call. ``extent_offset`` and
    ``extent_length``: the extents of all sources, in order. Only their total length must equal that
    of the sources, so one extent may hold many small sources side by side. Empty: no pool is
    needed.
    """

    address: Column
    length: Column
    extent_offset: Column
    extent_length: Column

    def __post_init__(self) -> None:
        columns = (self.address, self.length, self.extent_offset, self.extent_length)
        if any(column.dtype != np.int64 or column.ndim != 1 for column in columns):
            raise UsageError("columns of sources: expected one-dimensional int64")
        if len(self.address) != len(self.length):
            raise UsageError(
                f"columns of sources: {len(self.address)} addresses, {len(self.length)} lengths"
            )
        if len(self.extent_offset) != len(self.extent_length):
            raise UsageError(
                f"columns of sources: {len(self.extent_offset)} extent offsets, "
                f"{len(self.extent_length)} extent lengths"
            )
        if any(len(column) and int(column.min()) < 0 for column in columns):
            raise UsageError("columns of sources: found a negative number")
        held = int(self.extent_length.sum())
        if len(self.extent_length) and held != self.size:
            raise UsageError(f"extents of sources: expected {self.size} bytes, found {held}")

    @property
    def size(self) -> int:
        return int(self.length.sum())

    @property
    def extents(self) -> list[Extent]:
        """The extents of all sources, in order."""
        return list(map(Extent, self.extent_offset.tolist(), self.extent_length.tolist()))

    def require(self, *, addresses: bool, extents: bool) -> Sources:
        """Return these sources. Raise ``UsageError`` if they lack required addresses or extents."""
        if addresses and bool(np.any((self.address == 0) & (self.length > 0))):
            raise UsageError("sources: expected an address for each, found 0")
        if extents and self.size and not len(self.extent_length):
            raise UsageError("sources: expected extents, found none")
        return self

    @classmethod
    def in_memory(cls, address: Column, length: Column) -> Sources:
        """Return sources without extents."""
        nowhere = np.empty(0, np.int64)
        return cls(address=address, length=length, extent_offset=nowhere, extent_length=nowhere)

    @classmethod
    def at(
        cls, address: Sequence[int], length: Sequence[int], extents: Iterable[Extent]
    ) -> Sources:
        """Return sources from numbers. extents: of all of them, in order."""
        rows = np.array([(each.offset, each.length) for each in extents], np.int64).reshape(-1, 2)
        return cls(
            address=np.array(address, np.int64),
            length=np.array(length, np.int64),
            extent_offset=rows[:, 0].copy(),
            extent_length=rows[:, 1].copy(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """The sources of one call, cut. Segments of one unit follow each other, in order.

    ``address``: in this process. ``offset``: in the pool, -1 where no pool is needed. ``length``:
    bytes, over 0, at most ``UNIT``. ``row``: of the unit in the digests; it never falls.
    """

    address: Column
    offset: Column
    length: Column
    row: Column

    def __len__(self) -> int:
        return len(self.length)

    @property
    def size(self) -> int:
        return int(self.length.sum())

    def part(self, which: slice | Column | NDArray[np.bool_]) -> Segments:
        """Return some segments, by places or a mask, with their rows; views if by a slice."""
        return Segments(
            address=self.address[which],
            offset=self.offset[which],
            length=self.length[which],
            row=self.row[which],
        )

    def pieces(self, size_max: int) -> Segments:
        """Return the same bytes in segments of ``size_max`` at most, each a unit of its own."""
        count = -(-self.length // size_max)
        owner = np.repeat(np.arange(len(self)), count)
        start = (np.arange(len(owner)) - (np.cumsum(count) - count)[owner]) * size_max
        return Segments(
            address=self.address[owner] + start,
            offset=self.offset[owner] + start,
            length=np.minimum(self.length[owner] - start, size_max),
            row=np.arange(len(owner)),
        )

    def batches(self, size_max: int, *, gap: int = 0) -> Iterator[Segments]:
        """Yield runs of whole units, ``size_max`` bytes at most, or else one unit.

        ``gap`` bytes are counted on top of each segment.
        """
        if not len(self):
            return
        if self.size + gap * len(self) <= size_max:
            yield self
            return
        ends = np.flatnonzero(np.diff(self.row, append=-1)) + 1
        bytes_before = np.cumsum(self.length + gap)[ends - 1]
        start = unit = done = 0
        while start < len(self):
            unit = max(unit + 1, int(np.searchsorted(bytes_before, done + size_max, "right")))
            yield self.part(slice(start, int(ends[unit - 1])))
            start, done = int(ends[unit - 1]), int(bytes_before[unit - 1])

    def sources_at(self, place: Column) -> Sources:
        """Return the segments at ``place`` as sources that go to their extents: a source for each
        unit. The segments of one unit are end to end there."""
        first = np.flatnonzero(np.diff(self.row, prepend=-1))
        return Sources(
            address=place[first],
            length=np.add.reduceat(self.length, first),
            extent_offset=self.offset,
            extent_length=self.length,
        )

    def box(self) -> Extent:
        """Return the smallest extent of the pool that holds all segments."""
        start = int(self.offset.min())
        return Extent(start, int((self.offset + self.length).max()) - start)

    def runs(self, gap: int = PAGE) -> list[Extent]:
        """Return their places in the pool, in order of offset, joined if less than ``gap`` apart.

        Bytes between two of them less than a page apart are in pages that they touch, and
        reservations are whole pages: the owner of the two owns these bytes too.
        """
        order = np.argsort(self.offset, kind="stable")
        starts = self.offset[order]
        ends = np.maximum.accumulate(starts + self.length[order])
        first = np.flatnonzero(np.append(True, starts[1:] - ends[:-1] >= gap))
        last = np.append(first[1:], len(starts)) - 1
        return [
            Extent(start, end - start)
            for start, end in zip(starts[first].tolist(), ends[last].tolist(), strict=True)
        ]


def owners(lengths: Column) -> Column:
    """Return the source of each unit of sources of these lengths."""
    counts = unit_counts(lengths)
    return np.repeat(np.arange(len(counts)), counts)


def equal_storages(left: Digests, right: Digests, lengths: Column) -> Column:
    """Return the positions of the storages all of whose unit digests are equal on both sides."""
    equal = np.ones(len(lengths), np.bool_)
    equal[owners(lengths)[np.any(left != right, axis=1)]] = False
    return np.flatnonzero(equal)


def unit_spans(offset: Column, length: Column) -> tuple[Column, Column]:
    """Return the offset and the length of each unit of runs of bytes, in order."""
    counts = unit_counts(length)
    rank = ranges(np.zeros_like(counts), counts)
    begin = np.repeat(offset, counts) + rank * UNIT
    return begin, np.minimum(UNIT, np.repeat(length, counts) - rank * UNIT)


def ranges(first: Column, counts: Column) -> Column:
    """Return first[0], first[0] + 1, ... (counts[0] of them), first[1], ..."""
    before = np.cumsum(counts) - counts
    ranges: Column = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
    return ranges


def cut(sources: Sources) -> tuple[Segments, Digests]:
    """Return the segments of ``sources``, and digests: set for empty sources, the rest zero."""
    if _are_segments(sources):
        segments = Segments(
            address=sources.address,
            offset=sources.extent_offset,
            length=sources.length,
            row=np.arange(len(sources.length)),
        )
        return segments, np.zeros((len(segments), DIGEST_SIZE), np.uint8)
    units, owner = unit_counts(sources.length), owners(sources.length)
    rank = np.arange(len(owner)) - (np.cumsum(units) - units)[owner]
    source_start = np.cumsum(sources.length) - sources.length
    unit_start = source_start[owner] + rank * UNIT
    extent_start = np.cumsum(sources.extent_length) - sources.extent_length
    digests = np.zeros((len(owner), DIGEST_SIZE), np.uint8)
    digests[sources.length[owner] == 0] = np.frombuffer(digest(b""), np.uint8)

    cuts = np.sort(np.concatenate([unit_start, extent_start]))
    kept = cuts < sources.size
    kept[1:] &= cuts[1:] > cuts[:-1]
    cuts = cuts[kept]
    # An empty source or extent begins where the next one does; "right" finds that next one.
    row = np.searchsorted(unit_start, cuts, "right") - 1
    offset = np.full(len(cuts), -1, np.int64)
    if len(extent_start):
        extent = np.searchsorted(extent_start, cuts, "right") - 1
        offset = sources.extent_offset[extent] + cuts - extent_start[extent]
    segments = Segments(
        address=sources.address[owner[row]] + cuts - source_start[owner[row]],
        offset=offset,
        length=np.diff(cuts, append=sources.size),
        row=row,
    )
    return segments, digests


def _are_segments(sources: Sources) -> bool:
    """Return True if each source is one unit in one extent, as most storages of most states are."""
    length = sources.length
    return (
        len(length) > 0
        and np.array_equal(length, sources.extent_length)
        and int(length.min()) > 0
        and int(length.max()) <= UNIT
    )


@runtime_checkable
class RemoteMedium(Protocol):
    """A medium on another machine, with a transport of its own, which hashes there."""

    def fetch(self, targets: Sources, stop: Stop) -> Digests:
        """Fill ``targets`` from their extents, and return the digests, as ``local.fetch`` does."""

    def check(self, sources: Sources, stop: Stop) -> Digests:
        """Return the digests of the bytes in the extents of ``sources``, as ``local.check`` does.
        The bytes stay where they are, if the other machine can hash them."""


def memory(address: int, length: int) -> memoryview:
    """Return the ``length`` bytes at ``address``; the caller keeps them alive, and writes if it
    may."""
    view: memoryview = _memory_view(address, length, _WRITABLE)
    return view


def bytes_at(address: Column, length: Column) -> NDArray[np.uint8]:
    """Return short pieces of memory, end to end; the caller keeps them alive. Fast where pieces of
    one length follow each other. No length is 0."""
    found = [np.empty(0, np.uint8)]
    for run in np.split(np.arange(len(length)), np.flatnonzero(np.diff(length)) + 1):
        if len(run):
            at, size = address[run], int(length[run[0]])
            start, count = int(at.min()), int(np.ptp(at)) + 1
            # Every byte begins a piece: nothing is copied before the right ones are taken.
            every = np.ndarray(count, f"V{size}", memory(start, count + size - 1), strides=(1,))
            found.append(every[at - start].view(np.uint8))
    return np.concatenate(found)


_WRITABLE: Final = 0x200  # PyBUF_WRITE, of CPython's object.h

# PYFUNCTYPE keeps Python's lock, which a call that makes an object needs.
_memory_view: Final = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
