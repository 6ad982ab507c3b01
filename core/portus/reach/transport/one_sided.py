"""A pool pulls from and pushes to the memory of a client, one-sided, by verbs.

Theory. A transfer is cut into segments (``base``), and these into batches of whole units, 16 MiB at
most. Each batch takes as few requests as possible: neighbours with the same gap on both sides
become one. A few batches are under way at once. When all requests of the oldest have completed, the
processor of this machine hashes it while the others continue.

The bytes go straight to the pool where it can be registered: a DAX device, or memory. The pages of
a file cannot stay pinned, since its file system must be able to move or write them. So its bytes go
through a *ring*: registered memory of ``AHEAD`` slots, each for one batch, which is copied out and
hashed in one pass. The number of rings is limited; a transfer without one waits. ``bounced`` counts
the bytes that went through a ring.

An error leaves no request under way: the queue pair is closed before the error is raised. Only then
may places in the pool be reused.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from portus.engine.copying.local import best_engine, fetch
from portus.engine.copying.segments import (
    Column,
    Crcs,
    Digests,
    Segments,
    Sources,
    Stop,
    cut,
    owners,
)
from portus.engine.format.checksum import UNIT
from portus.engine.media.base import MappedMedium, Medium
from portus.engine.spec import Extent
from portus.reach.transport.stream import Link, store
from portus.reach.transport.verbs import DEPTH, Domain, Region

PIECE: Final = 4 << 20
"""Bytes of one request, at most."""

AHEAD: Final = 4
"""Batches under way at once."""

RINGS_MAX: Final = 8
"""Rings of a domain, of ``AHEAD * UNIT`` bytes each."""

BLOCK: Final = 64 << 20
"""Bytes of a pool that are registered together, on the first use of one of them."""

ALIGNMENT: Final = 64
"""Small storages begin at multiples of this in pools, and in the memory that clients gather them
in."""

_PAUSE_MIN_S: Final = 20e-6
_PAUSE_MAX_S: Final = 1e-3


class Pair(Protocol):
    """The operations of a ``QueuePair`` that a transfer uses."""

    def read(self, target: int, local_key: int, source: int, remote_key: int, length: int) -> None:
        """Post a request that fetches to here."""

    def write(self, target: int, remote_key: int, source: int, local_key: int, length: int) -> None:
        """Post a request that writes to there."""

    def poll(self) -> int:
        """Return the number of further requests that completed, in order. Raises ``WorkError``."""

    def close(self) -> None:
        """Return when no byte is read or written on the pair's behalf any more."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result of a transfer. ``crcs``: CRC32s of the units that were pulled; zeros after a push.
    ``bounced``: bytes of it that went through a ring. ``wire_s``: seconds from the first request to
    the last completion, including hashing meanwhile."""

    digests: Digests
    crcs: Crcs
    bounced: int
    wire_s: float


class Landing(Protocol):
    """The places of one transfer's batches in this process while they are under way."""

    def place(self, batch: Segments) -> Column:
        """Return an address for each segment, valid until ``AHEAD`` batches later."""

    def region(self, address: int) -> Region:
        """Return the region that has an address."""

    def is_bounced(self) -> bool:
        """Return True if the place is not the pool itself."""

    def note_arrival(self, batch: Segments, place: Column, digests: Digests, crcs: Crcs) -> None:
        """Store a batch that was pulled to its place, and note its digests and CRC32s."""

    def fill(self, batch: Segments, place: Column, digests: Digests) -> None:
        """Put the bytes of a batch at its place before it is pushed, and note their digests."""


def transfer(
    pair: Pair, landing: Landing, moved: Sources, key: Column, link: Link, *, is_pull: bool
) -> TransferResult:
    """Fill the extents of ``moved`` from the client's memory, or (not ``is_pull``) write their
    bytes to there. The digests are of what arrived, or was sent.

    moved: storages with their addresses in the client's memory. key: of each there. link: to the
    client. Raises as ``Link.watch``, ``TransportError`` (``WorkError`` if the client's memory
    cannot be reached), and what the medium raises; then ``pair`` is closed.
    """
    segments, digests = cut(moved)
    crcs = np.zeros(len(digests), np.uint32)
    keys = key[owners(moved.length)[segments.row]]
    window = _Window(pair, landing, link, is_pull=is_pull)
    under_way: deque[tuple[Segments, Column, int]] = deque()

    def finish() -> None:
        batch, place, mark = under_way.popleft()
        window.wait_for(mark)
        if is_pull:
            landing.note_arrival(batch, place, digests, crcs)

    try:
        done = 0
        for batch in segments.batches(UNIT, gap=ALIGNMENT):
            # A ring has that many slots: the oldest batch is copied out before its slot is reused.
            while len(under_way) >= AHEAD:
                finish()
            place = landing.place(batch)
            if not is_pull:
                landing.fill(batch, place, digests)
            for run in _runs(place, batch, keys[done : done + len(batch)]):
                window.post(*run)
            under_way.append((batch, place, window.posted))
            done += len(batch)
        while under_way:
            finish()
    except BaseException:
        # First: a request under way may still write to these places (decision 0023).
        pair.close()
        raise
    bounced = moved.size if landing.is_bounced() else 0
    return TransferResult(digests, crcs, bounced, window.wire_s)


def spread(batch: Segments, start: int) -> Column:
    """Return addresses from ``start`` on for the segments: units aligned, each of them end to
    end."""
    first = np.flatnonzero(np.diff(batch.row, prepend=-1))
    room = -(-np.add.reduceat(batch.length, first) // ALIGNMENT) * ALIGNMENT
    stream = np.cumsum(batch.length) - batch.length
    unit = np.repeat(np.arange(len(first)), np.diff(first, append=len(batch)))
    places: Column = start + (np.cumsum(room) - room)[unit] + stream - stream[first][unit]
    return places


def _runs(place: Column, batch: Segments, key: Column) -> Iterator[tuple[int, int, int, int]]:
    """Yield (address here, there, key, length) of each single move: neighbours with the same small
    gap on both sides. The gap is moved too: it is room of the same storages' pages."""
    gap = np.diff(place) - batch.length[:-1]
    alike = np.diff(batch.address) == np.diff(place)
    alike &= (np.diff(key) == 0) & (gap >= 0) & (gap < ALIGNMENT)
    first = np.flatnonzero(np.append(True, ~alike))
    last = np.append(first[1:], len(place)) - 1
    size = place[last] + batch.length[last] - place[first]
    columns = (place[first], batch.address[first], key[first], size)
    return zip(*(column.tolist() for column in columns), strict=True)


class _Window:
    """The requests of a queue pair that are under way. They complete in order."""

    def __init__(self, pair: Pair, landing: Landing, link: Link, *, is_pull: bool) -> None:
        self.posted = 0
        self._pair: Final = pair
        self._landing: Final = landing
        self._is_pull: Final = is_pull
        self._done = 0
        self._link: Final = link
        self._begin_s = self._since_s = time.monotonic()

    @property
    def wire_s(self) -> float:
        """Seconds from the beginning to the last completion."""
        return self._since_s - self._begin_s

    def post(self, local: int, distant: int, key: int, length: int) -> None:
        """Post as many requests as needed: none is longer than a piece, or leaves its region."""
        while length:
            region = self._landing.region(local)
            step = min(length, PIECE, region.end - local)
            # A queue pair holds only this many requests.
            self.wait_for(self.posted - DEPTH + 1)
            if self._is_pull:
                self._pair.read(local, region.local_key, distant, key, step)
            else:
                self._pair.write(distant, key, local, region.local_key, step)
            self.posted += 1
            local, distant, length = local + step, distant + step, length - step

    def wait_for(self, count: int) -> None:
        """Return when the first ``count`` requests have completed."""
        pause_s = _PAUSE_MIN_S
        while self._done < count:
            found = self._pair.poll()
            if found:
                self._done += found
                self._since_s = time.monotonic()
                pause_s = _PAUSE_MIN_S
                continue
            self._link.watch(self._since_s)
            # Polled, since pyverbs holds Python's lock while it waits (decision 0023).
            time.sleep(pause_s)
            pause_s = min(_PAUSE_MAX_S, 2 * pause_s)


# Straight into and out of the pool.


def is_pinnable(medium: Medium) -> bool:
    """Return True if the medium's pages may stay pinned: its own memory, or a DAX device. Pages of
    a file belong to its file system."""
    if not isinstance(medium, MappedMedium):
        return False
    kind = medium.info.kind  # a file system with DAX allows no long pins of its pages
    return kind.is_device or (medium.info.volatile and not kind.is_persistent_memory)


class PoolRegions:
    """The registered blocks of a pool; each is registered on its first use. Thread-safe."""

    def __init__(self, domain: Domain, medium: MappedMedium) -> None:
        self.medium: Final = medium
        self._domain: Final = domain
        self._guard: Final = threading.Lock()
        self._blocks: Final[dict[int, list[Region]]] = {}

    def of(self, offset: int) -> Region:
        """Return the region that has the byte at ``offset``. Raises ``RegisterError``."""
        number = offset // BLOCK
        with self._guard:
            regions = self._blocks.setdefault(number, [])
            start = number * BLOCK
            for region in regions:
                if offset < start + region.length:
                    return region
                start += region.length
            # Not registered yet, or the pool has grown since.
            length = min(self.medium.size, (number + 1) * BLOCK) - start
            address = self.medium.address(Extent(start, length))
            made = self._domain.register(address, length, remote=False, writable=True)
            regions.append(made)
            return made


class DirectLanding:
    """The pool itself. See ``Landing``."""

    def __init__(self, regions: PoolRegions) -> None:
        """Raise ``RegisterError`` if the pool cannot be registered, ``MediumError`` if it has no
        addresses any more."""
        self._regions: Final = regions
        self._medium: Final = regions.medium
        self._start: Final = self._medium.address(Extent(0, 0))
        regions.of(0)

    def place(self, batch: Segments) -> Column:
        self._medium.address(batch.box())  # raises where the medium is poisoned
        return batch.offset + self._start

    def region(self, address: int) -> Region:
        return self._regions.of(address - self._start)

    def is_bounced(self) -> bool:
        return False

    def note_arrival(self, batch: Segments, place: Column, digests: Digests, crcs: Crcs) -> None:
        for run in batch.runs():
            self._medium.wrote(run)
        self._hash(batch, place, digests, crcs)

    def fill(self, batch: Segments, place: Column, digests: Digests) -> None:
        self._hash(batch, place, digests)

    def _hash(
        self, batch: Segments, place: Column, digests: Digests, crcs: Crcs | None = None
    ) -> None:
        best_engine().move(replace(batch, address=place), None, digests, Stop(), crcs)


# Through a ring.


class Ring:
    """Registered memory of ``AHEAD`` slots."""

    def __init__(self, domain: Domain) -> None:
        self.memory: Final = mmap.mmap(-1, AHEAD * UNIT)
        start = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.region: Final = domain.register(start, AHEAD * UNIT, remote=False, writable=True)


class Rings:
    """The rings of a domain, shared by all transfers. Thread-safe."""

    def __init__(self, domain: Domain) -> None:
        self._domain: Final = domain
        self._changed: Final = threading.Condition()
        self._free: list[Ring] = []
        self._made = 0

    @contextmanager
    def borrow(self, link: Link) -> Iterator[Ring]:
        """Yield a ring, when one is free. Raises ``TransportError``, and as ``Link.watch``."""
        ring = self._take(link)
        try:
            yield ring
        finally:
            with self._changed:
                self._free.append(ring)
                self._changed.notify()

    def _take(self, link: Link) -> Ring:
        since_s = time.monotonic()
        with self._changed:
            while not self._free and self._made >= RINGS_MAX:
                self._changed.wait(0.1)
                link.watch(since_s)
            if self._free:
                return self._free.pop()
            ring = Ring(self._domain)
            self._made += 1
            return ring


class RingLanding:
    """The slots of a ring, one after another. See ``Landing``."""

    def __init__(self, medium: Medium, ring: Ring) -> None:
        self._medium: Final = medium
        self._ring: Final = ring
        self._given = 0

    def place(self, batch: Segments) -> Column:
        slot = self._given % AHEAD
        self._given += 1
        return spread(batch, self._ring.region.start + slot * UNIT)

    def region(self, address: int) -> Region:
        return self._ring.region

    def is_bounced(self) -> bool:
        return True

    def note_arrival(self, batch: Segments, place: Column, digests: Digests, crcs: Crcs) -> None:
        store(self._medium, batch, place, digests, crcs, Stop())

    def fill(self, batch: Segments, place: Column, digests: Digests) -> None:
        digests[np.unique(batch.row)] = fetch(self._medium, batch.sources_at(place), Stop())
