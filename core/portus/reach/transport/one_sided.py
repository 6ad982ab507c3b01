"""A pool pulls from and pushes to the memory of a client, one-sided, by verbs.

Theory. A transfer is cut into segments, and these into batches of whole units, 16 MiB at
most. A few batches are under way at once. When all requests of the oldest have completed, the
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
from typing import Final, TypeGuard

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
from portus.reach.transport.verbs import DEPTH, Domain, QueuePair, Region

PIECE: Final = 4 << 20
"""Bytes of one request, at most."""

AHEAD: Final = 4
"""Batches under way at once."""

RINGS_MAX: Final = 8
"""Rings of a domain, of ``AHEAD * UNIT`` bytes each."""

BLOCK: Final = 64 << 20
"""Bytes of a pool that are registered together, on the first use of one of them."""

_PAUSE_MIN_S: Final = 20e-6
_PAUSE_MAX_S: Final = 1e-3


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result of a transfer. ``crcs``: CRC32s of the units that were pulled; zeros after a push.
    ``bounced``: bytes of it that went through a ring. ``wire_s``: seconds from the first request to
    the last completion, including hashing meanwhile."""

    digests: Digests
    crcs: Crcs
    bounced: int
    wire_s: float


def transfer(
    pair: QueuePair, landing: Landing, moved: Sources, key: Column, link: Link, *, is_pull: bool
) -> TransferResult:
    """Fill the extents of ``moved`` from the client's memory, or (not ``is_pull``) write their
    bytes to there. The digests are of what arrived, or was sent.

    moved: storages with their addresses in the client's memory. key: of each there. link: to the
    client. Raises as ``Link.watch``, ``TransportError`` (``WorkError`` if the client's memory
    cannot be reached), and what the medium raises; then ``pair`` is closed.
    """
    segments, digests = cut(moved)
    crcs = np.zeros(len(digests), np.uint32)
    key_of_unit = key[owners(moved.length)]
    window = _Window(pair, landing, link, is_pull=is_pull)
    under_way: deque[tuple[Segments, Column, int]] = deque()

    def finish() -> None:
        batch, place, mark = under_way.popleft()
        window.wait_for(mark)
        if is_pull:
            landing.note(batch, place, digests, crcs)

    try:
        for batch in segments.batches(UNIT):
            # A ring has that many slots: the oldest batch is copied out before its slot is reused.
            while len(under_way) >= AHEAD:
                finish()
            place = landing.place(batch)
            if not is_pull:
                landing.note(batch, place, digests, None)
            columns = (place, batch.address, key_of_unit[batch.row], batch.length)
            for each in zip(*(column.tolist() for column in columns), strict=True):
                window.post(*each)
            under_way.append((batch, place, window.posted))
        while under_way:
            finish()
    except BaseException:
        # First: a request under way may still write to these places (decision 0023).
        pair.close()
        raise
    bounced = moved.size if isinstance(landing, Ring) else 0
    return TransferResult(digests, crcs, bounced, window.wire_s)


class _Window:
    """The requests of a queue pair that are under way. They complete in order."""

    def __init__(self, pair: QueuePair, landing: Landing, link: Link, *, is_pull: bool) -> None:
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


def is_pinnable(medium: Medium) -> TypeGuard[MappedMedium]:
    """Return True if the medium's pages may stay pinned: its own memory, or a DAX device. Pages of
    a file belong to its file system."""
    if not isinstance(medium, MappedMedium):
        return False
    kind = medium.info.kind  # a file system with DAX allows no long pins of its pages
    return kind.is_device or (medium.info.volatile and not kind.is_persistent_memory)


class PinnedPool:
    """A pool that is registered, block by block, on the first use of each. Thread-safe."""

    def __init__(self, domain: Domain, medium: MappedMedium) -> None:
        """Raise ``MediumError`` if the pool is poisoned, and so has no addresses any more."""
        self._domain: Final = domain
        self._medium: Final = medium
        self.start: Final = medium.address(Extent(0, 0))
        self._guard: Final = threading.Lock()
        self._blocks: Final[dict[int, list[Region]]] = {}

    def place(self, batch: Segments) -> Column:
        """Return the address of each segment."""
        self._medium.address(batch.box())  # raises where the medium is poisoned
        return batch.offset + self.start

    def region(self, address: int) -> Region:
        """Return the region that has an address. Raises ``RegisterError``."""
        number = (address - self.start) // BLOCK
        with self._guard:
            regions = self._blocks.setdefault(number, [])
            start = number * BLOCK
            for region in regions:
                if address < region.end:
                    return region
                start += region.length
            # Not registered yet, or the pool has grown since.
            length = min(self._medium.size, (number + 1) * BLOCK) - start
            place = self._medium.address(Extent(start, length))
            made = self._domain.register(place, length, remote=False, writable=True)
            regions.append(made)
            return made

    def note(self, batch: Segments, place: Column, digests: Digests, crcs: Crcs | None) -> None:
        """Note the digests of a batch, and in ``crcs`` its CRC32s, after its pull, or (None) before
        its push."""
        for run in batch.runs() if crcs is not None else ():
            self._medium.wrote(run)
        best_engine().move(replace(batch, address=place), None, digests, Stop(), crcs)


class Ring:
    """Registered memory of ``AHEAD`` slots, through which the bytes of ``medium`` go."""

    medium: Medium

    def __init__(self, domain: Domain) -> None:
        self._memory: Final = mmap.mmap(-1, AHEAD * UNIT)
        start = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._region: Final = domain.register(start, AHEAD * UNIT, remote=False, writable=True)
        self._given = 0

    def place(self, batch: Segments) -> Column:
        """Return an address for each segment, valid until ``AHEAD`` batches later."""
        start = self._region.start + self._given % AHEAD * UNIT
        self._given += 1
        return start + np.cumsum(batch.length) - batch.length

    def region(self, address: int) -> Region:
        """Return the region that has an address."""
        return self._region

    def note(self, batch: Segments, place: Column, digests: Digests, crcs: Crcs | None) -> None:
        """Store a batch after its pull, or (``crcs`` is None) load it before its push, and note its
        digests, and its CRC32s."""
        if crcs is not None:
            store(self.medium, batch, place, digests, crcs, Stop())
        else:
            moved = batch.sources_at(place)
            digests[np.unique(batch.row)] = fetch(self.medium, moved, Stop())


Landing = PinnedPool | Ring
"""The places of a transfer's batches in this process while they are under way."""


class Rings:
    """The rings of a domain, shared by all transfers. Thread-safe."""

    def __init__(self, domain: Domain) -> None:
        self._domain: Final = domain
        self._turns: Final = threading.Semaphore(RINGS_MAX)
        self._free: Final[deque[Ring]] = deque()

    @contextmanager
    def borrow(self, link: Link, medium: Medium) -> Iterator[Ring]:
        """Yield a ring for a transfer of ``medium``, when one is free. Raises ``TransportError``,
        and as ``Link.watch``."""
        since_s = time.monotonic()
        while not self._turns.acquire(timeout=0.1):
            link.watch(since_s)
        try:
            try:
                ring = self._free.pop()  # another thread may take the last one
            except IndexError:
                ring = Ring(self._domain)
            ring.medium = medium
            try:
                yield ring
            finally:
                self._free.append(ring)
        finally:
            self._turns.release()
