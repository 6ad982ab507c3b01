"""Whether a version is the state at the call: stored bytes are compared with those of then (V7).

The fence keeps known writers out while a storage is read late. Against unknown ones, an audit notes
facts of every late storage at the call, and compares them with the stored bytes once the copy has
ended and before the fence opens:

- its digests (``DigestAudit``): exact, on every system;
- the kernel's record of writes to its pages (``WatchAudit``): exact too, and nearly free where
  pages are huge;
- 64 bytes of each 64 KiB, and torch's counts of changes (``ProbeAudit``): sees storages that are
  swapped, clamped, or have noise added, and misses a single row.

``Auditor`` chooses by price.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from portus.engine.copying.local import hash_sources
from portus.engine.copying.segments import (
    PROBE,
    PROBE_EACH,
    Digests,
    Sources,
    Stop,
    bytes_at,
    equal_storages,
    memory,
    ranges,
)
from portus.engine.format.checksum import UNIT, unit_counts
from portus.engine.media import write_watch
from portus.engine.pipeline.draft import Draft
from portus.engine.pipeline.plan import Column, Flags

Guard = Literal["auto", "exact", "probe"]


PRICE_S: Final = 5e-3
"""Seconds that an exact audit may cost training, or else ``SHARE`` of the time between saves."""

SHARE: Final = 0.01

HUGE_PAGES_S: Final = 0.1
"""Seconds that the worker asks for huge pages after a save."""

WATCHED_MIN: Final = 1 << 20
"""Bytes of a storage from which the kernel watches it."""

_UNKNOWN_S_PER_BYTE: Final = 1e-10
"""The assumed cost of watching until it was timed: as with pages of 4 KiB."""

_TIMED_MIN: Final = 4 << 20
"""Bytes from which their time is a measure for others."""


class AuditMethod(str, enum.Enum):
    """The method of a save's audit."""

    KERNEL = "kernel"
    HASH = "hash"
    PROBE = "probe"


def no_changes() -> Column:
    """Return no counts of changes."""
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class LateStorages:
    """The late storages of a save that have an address here, a row for each. ``changes``: a count
    for each, which grows with every write that torch counts; empty if there are no counts."""

    address: Column
    length: Column
    changes: Callable[[], Column] = no_changes

    @property
    def size(self) -> int:
        return int(self.length.sum())

    def part(self, rows: Column) -> LateStorages:
        """Return some of the storages, without their counts."""
        return LateStorages(self.address[rows], self.length[rows])


@dataclass(frozen=True, slots=True)
class StoredStorages:
    """The bytes that ``draft`` stored of the late storages ``index``, and their units' digests."""

    index: Column
    digests: Digests
    draft: Draft

    def bytes_of(self, row: Column, offset: Column, length: Column) -> NDArray[np.uint8] | None:
        """Return bytes at ``offset`` of some storages, end to end, or None if out of reach."""
        return self.draft.read_back(self.index[row], offset, length)


class Audit(Protocol):
    """The facts noted at the call."""

    way: ClassVar[AuditMethod]

    def torn(self, stored: StoredStorages) -> Flags:
        """Return which storages were not stored as they were at the call. Blocks."""

    def close(self) -> None:
        """Stop noting. A second call does nothing."""
        return


class DigestAudit(Audit):
    """Digests at the call."""

    way = AuditMethod.HASH

    def __init__(self, late: LateStorages, stop: Stop) -> None:
        self._lengths: Final = late.length
        nowhere = Sources.in_memory(late.address, late.length)
        self._at_call: Final = hash_sources(nowhere, stop)

    def torn(self, stored: StoredStorages) -> Flags:
        return self.differ(stored.digests)

    def differ(self, stored: Digests) -> Flags:
        """Return which storages have other digests than at the call."""
        differs = np.ones(len(self._lengths), np.bool_)
        differs[equal_storages(self._at_call, stored, self._lengths)] = False
        return differs


class WatchAudit(Audit):
    """The kernel's record of writes for big storages, digests for the others.

    Other storages may have bytes in the first and the last page of a storage. Its own bytes there
    are kept, so if such a page was written, its digest at the call can still be computed.
    """

    way = AuditMethod.KERNEL

    def __init__(
        self, late: LateStorages, stop: Stop, watch: write_watch.WriteWatch, big: Column
    ) -> None:
        """watch: of the storages in the rows ``big``, begun before this constructor."""
        self._watch: Final = watch
        self._big: Final = big
        self._start: Final = late.address[big]
        self._end: Final = self._start + late.length[big]
        self._inner_start: Final = -(-self._start // write_watch.PAGE) * write_watch.PAGE
        self._inner_end: Final = self._end // write_watch.PAGE * write_watch.PAGE
        self._heads: Final = _copy_runs(self._start, self._inner_start)
        self._tails: Final = _copy_runs(self._inner_end, self._end)
        self._units: Final = unit_counts(late.length)
        self._small: Final = np.setdiff1d(np.arange(len(late.length)), big)
        self._rest: Final = DigestAudit(late.part(self._small), stop)

    def torn(self, stored: StoredStorages) -> Flags:
        digests, runs = stored.digests, self._watch.written_runs()
        torn = np.zeros(len(self._units), np.bool_)
        torn[self._small] = self._rest.differ(digests[self._rows_of(self._small)])
        inside = write_watch.meet(runs, self._inner_start, self._inner_end)
        torn[self._big[inside]] = True
        for number in np.flatnonzero(
            write_watch.meet(runs, self._start, self._end) & ~inside
        ).tolist():
            row = self._big[number : number + 1]
            torn[row] = not self._is_unchanged(number, digests[self._rows_of(row)])
        return torn

    def close(self) -> None:
        self._watch.close()

    def _rows_of(self, storages: Column) -> Column:
        return ranges((np.cumsum(self._units) - self._units)[storages], self._units[storages])

    def _is_unchanged(self, number: int, stored: Digests) -> bool:
        """Return True if the units at the ends of a big storage were stored as they were. Its pages
        inside are unchanged."""
        start, end = int(self._start[number]), int(self._end[number])
        inner_start, inner_end = int(self._inner_start[number]), int(self._inner_end[number])
        for unit in {0, (inner_end - start) // UNIT, len(stored) - 1} & set(range(len(stored))):
            low, high = start + unit * UNIT, min(start + (unit + 1) * UNIT, end)
            hasher = xxhash.xxh3_128(self._heads[number][low - start : high - start])
            if (middle := max(low, inner_start)) < min(high, inner_end):
                hasher.update(memory(middle, min(high, inner_end) - middle))
            tail = slice(max(low - inner_end, 0), max(high - inner_end, 0))
            hasher.update(self._tails[number][tail])
            if hasher.digest() != stored[unit].tobytes():
                return False
        return True


class ProbeAudit(Audit):
    """Some bytes of each storage, and its count of changes, at the call."""

    way = AuditMethod.PROBE

    def __init__(self, late: LateStorages) -> None:
        self._late: Final = late
        count = -(-late.length // PROBE_EACH)
        row = np.repeat(np.arange(len(count)), count)
        each = (np.arange(len(row)) - (np.cumsum(count) - count)[row]) * PROBE_EACH
        last = (late.length - 1) // PROBE * PROBE  # to the end: the tear may be only there
        rows = np.concatenate([row, np.arange(len(count))])
        offset = np.concatenate([each, last])
        length = np.minimum(PROBE, late.length[rows] - offset)
        # ``bytes_at`` is fast where pieces of one length follow each other.
        order = np.argsort(length, kind="stable")
        self._row: Final = rows[order]
        self._offset: Final = offset[order]
        self._length: Final = length[order]
        self._at_call: Final = self._now()
        self._changes: Final = late.changes()

    def torn(self, stored: StoredStorages) -> Flags:
        """Return which storages were torn. On a storage host, the present bytes count as stored."""
        found = stored.bytes_of(self._row, self._offset, self._length)
        different = (self._now() if found is None else found) != self._at_call
        torn = np.zeros(len(self._late.length), np.bool_)
        torn[np.repeat(self._row, self._length)[different]] = True
        # Not enough alone: a step with ``fused=True`` leaves torch's counts unchanged.
        if len(self._changes):
            torn |= self._late.changes() != self._changes
        return torn

    def _now(self) -> NDArray[np.uint8]:
        return bytes_at(self._late.address[self._row] + self._offset, self._length)


class Auditor:
    """Audits the saves of one run, at the price that ``guard`` allows. For one thread at a time,
    except that ``use_huge_pages`` and ``close`` of an audit run on another."""

    def __init__(self, guard: Guard) -> None:
        self._guard: Final = guard
        self._last_s = time.monotonic()
        self._bytes_per_s = 8e9  # until it was timed
        self._watch_s_per_byte = _UNKNOWN_S_PER_BYTE
        self._dear: LateStorages | None = None
        self._made_huge = b""

    def begin(self, late: LateStorages, stop: Stop) -> Audit:
        """Note the present state of the storages. Raises ``StoppedError``."""
        now_s = time.monotonic()
        since_s, self._last_s = now_s - self._last_s, now_s
        if self._guard == "probe":
            return ProbeAudit(late)
        limit_s = math.inf if self._guard == "exact" else max(PRICE_S, SHARE * since_s)
        # Per GiB, a watch takes 0.07 ms with huge pages and 31 to 50 ms without; digests take 26
        # (decision 0051). So each save compares the two.
        big = np.flatnonzero(late.length >= WATCHED_MIN)
        hash_s, big_size = late.size / self._bytes_per_s, late.part(big).size
        watch_s = (late.size - big_size) / self._bytes_per_s + big_size * self._watch_s_per_byte
        if len(big) and watch_s <= min(hash_s, limit_s):
            watched = self._watch(late, stop, big)
            if watched is not None:
                return watched
        if hash_s <= limit_s:
            return self._hash(late, stop)
        self._make_huge_soon(late.part(big))
        return ProbeAudit(late)

    def use_huge_pages(self) -> Iterator[None]:
        """Ask for huge pages where watching is expensive, one with each step, for ``HUGE_PAGES_S``
        at most. Later audits then cost less. Blocks."""
        late, until_s = self._dear, time.monotonic() + HUGE_PAGES_S
        if late is None:
            return
        for _ in write_watch.make_huge(late.address, late.length):
            if time.monotonic() >= until_s:
                return
            yield
        self._dear, self._watch_s_per_byte = None, 0.0

    def _watch(self, late: LateStorages, stop: Stop, big: Column) -> WatchAudit | None:
        part = late.part(big)
        start = time.perf_counter()
        watch = write_watch.watch(part.address, part.length)
        if watch is None:
            return None
        took_s = 2 * (time.perf_counter() - start)  # its end costs as much
        self._watch_s_per_byte = took_s / part.size
        if took_s > PRICE_S / 2:
            self._make_huge_soon(part)
        return WatchAudit(late, stop, watch, big)

    def _make_huge_soon(self, part: LateStorages) -> None:
        """Let ``use_huge_pages`` ask for huge pages there, once."""
        known = part.address.tobytes()
        if known != self._made_huge and write_watch.can_watch():
            self._made_huge, self._dear = known, part

    def _hash(self, late: LateStorages, stop: Stop) -> DigestAudit:
        start = time.perf_counter()
        audit = DigestAudit(late, stop)
        if late.size >= _TIMED_MIN:
            rate = late.size / (time.perf_counter() - start)
            self._bytes_per_s = (self._bytes_per_s + rate) / 2
        return audit


def _copy_runs(start: Column, end: Column) -> list[bytes]:
    """Return copies of the bytes between each two addresses."""
    return [
        bytes(memory(*each)) for each in zip(start.tolist(), (end - start).tolist(), strict=True)
    ]
