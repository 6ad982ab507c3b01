"""Storages of a version that are changed in place: their digests, and how they are read.

Theory. Tables larger than memory are trained in the pool's own pages, on memory that persists (V1
names this exception). Such a storage is one extent, cut into cells. Before a cell is changed, its
bytes go to the version's log, in an entry flagged as undo, and become durable there. Then the cell
is changed, any number of times, and made durable. Then an entry without that flag is appended: it
says that the change counts, with everything that belongs to it. So undo entries that no other entry
follows belong to a change that did not finish. Copied over the storage, the last one first, they
restore the bytes before the change. A reader does that in memory; a process that opens the pool for
writing does it in the pool. It may repeat that, since the bytes are the same each time.

The digest of a unit is the sum of the digests of its cells, each seeded with its number. So a
change of a few cells changes the sum by their old and new digests. The sum is right only if every
change started from the bytes that it covers: a rotten cell that is overwritten is still found.
These digests change with each commit, so they are in a storage of their own, which the log changes
like any other.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final

import numpy as np
import xxhash

from portus.engine.format.checksum import DIGEST_SIZE, UNIT, digest
from portus.errors import BusyError, CorruptionError
from portus.reach.index.log import Bytes, Column, LogState, entries
from portus.reach.index.records import CELLS, InPlaceStorage, VersionRecord
from portus.reach.media.pool import ReadableMedium

# Sums of digests wrap around, to have the size of a digest.
_MODULUS: Final = 1 << 8 * DIGEST_SIZE

_AT_ONCE: Final = 1 << 20
"""Bytes of cells to hash together."""

_ROW_MIN: Final = 64
"""Shorter rows may share a cell with their neighbours: the processor writes lines of its caches
back as a whole."""


def cell_size(length: int, row: int) -> int:
    """Return the bytes of a cell, for a storage of ``length`` bytes with rows of ``row`` bytes: a
    divisor of the storage, about the size of a row."""
    most = max(_ROW_MIN, row)
    return max(each for each in CELLS if length % each == 0 and each <= most)


def cells_of(rows: Column, row: int, cell: int) -> Column:
    """Return the distinct numbers of the cells that hold rows of ``row`` bytes, in order. ``rows``:
    distinct numbers, in order."""
    first, last = rows * row // cell, ((rows + 1) * row - 1) // cell
    count = last - first + 1
    start = np.repeat(first - (np.cumsum(count) - count), count)
    found: Column = np.unique(start + np.arange(len(start)))
    return found


def cell_digests(number: Column, data: Bytes) -> list[int]:
    """Return the digests of the cells ``data``, of shape (cells, bytes of each), seeded with
    ``number``, their numbers in their storage."""
    cells = np.ascontiguousarray(data).view(f"V{data.shape[1]}")[:, 0].tolist()
    return list(map(xxhash.xxh3_128_intdigest, cells, number.tolist()))


def unit_sum(data: memoryview, cell: int, rank: int) -> int:
    """Return the digest of unit ``rank`` of a storage, as a number."""
    total, first = 0, rank * UNIT // cell
    for start in range(0, len(data), _AT_ONCE):
        part = np.frombuffer(data[start : start + _AT_ONCE], np.uint8).reshape(-1, cell)
        total += sum(cell_digests(np.arange(first, first + len(part)), part))
        first += len(part)
    return total % _MODULUS


def update_sum(before: int, old: list[int], new: list[int]) -> int:
    """Return the digest of a unit after cells with the digests ``old`` became ``new``."""
    # By differences, not from the bytes there: rot elsewhere in the unit stays visible
    # (decision 0178).
    return (before - sum(old) + sum(new)) % _MODULUS


def encode_sums(sums: list[int]) -> bytes:
    """Return the bytes of digests of units, as a storage holds them."""
    return b"".join(each.to_bytes(DIGEST_SIZE, "big") for each in sums)


def decode_sums(data: bytes) -> list[int]:
    """Return the digests that ``encode_sums`` encoded."""
    starts = range(0, len(data), DIGEST_SIZE)
    return [int.from_bytes(data[start : start + DIGEST_SIZE], "big") for start in starts]


class InPlaceReader:
    """Reads storages of a pinned version that are changed in place. ``logged``: its log."""

    def __init__(self, medium: ReadableMedium, record: VersionRecord, logged: LogState) -> None:
        self._medium: Final = medium
        self._record: Final = record
        self._logged: Final = logged
        placed = () if record.log is None else record.log.in_place
        self._placed: Final[dict[int, InPlaceStorage]] = {each.storage: each for each in placed}
        self._sums: Final[dict[int, list[int]]] = {}

    def __contains__(self, storage: int) -> bool:
        return storage in self._placed

    @property
    def storages(self) -> list[int]:
        """The indices of the storages that are changed in place, sorted."""
        return sorted(self._placed)

    def sums(self, storage: int) -> list[int]:
        """Return the digests of a storage's units, as of the log. Raises as ``read``."""
        if storage not in self._sums:
            self._sums[storage] = decode_sums(self.content(self._placed[storage].digests))
        return self._sums[storage]

    def read(self, storage: int, rank: int, target: memoryview) -> None:
        """Fill ``target`` with unit ``rank`` of a storage, verified.

        Raises ``CorruptionError``, ``MediumError``; ``BusyError`` if the storage is being changed,
        so that the bytes belong to no single moment.
        """
        [extent] = self._record.storage_extents(storage)
        self._medium.load(extent.offset + rank * UNIT, target)
        self._logged.over(storage, rank * UNIT, target)
        expected = self.sums(storage)[rank]
        found = unit_sum(target, self._placed[storage].cell, rank)
        if found != expected:
            # Perhaps no damage: a batch may have changed cells while they were read.
            self._require_still()
            raise CorruptionError(
                f"storage {storage} is damaged within {len(target)} bytes from byte {rank * UNIT}: "
                f"expected digest {encode_sums([expected]).hex()}, found "
                f"{encode_sums([found]).hex()}"
            )

    def units(self, storage: int) -> Iterator[memoryview]:
        """Yield all units of a storage, verified; each is valid until the next. Raises as
        ``read``."""
        length = int(self._record.storages["length"][storage])
        held = memoryview(bytearray(min(length, UNIT)))
        for rank, start in enumerate(range(0, length, UNIT)):
            target = held[: min(UNIT, length - start)]
            self.read(storage, rank, target)
            yield target

    def content(self, index: int) -> bytes:
        """Return verified bytes of a storage that is not changed in place, as of the log."""
        data = bytearray()
        for extent in self._record.storage_extents(index):
            piece = memoryview(bytearray(extent.length))
            self._medium.load(extent.offset, piece)
            data += piece
        first = int(self._record.first_unit[index])
        for rank, start in enumerate(range(0, len(data), UNIT)):
            expected = bytes(self._record.units["digest"][first + rank])
            if digest(memoryview(data)[start : start + UNIT]) != expected:
                raise CorruptionError(
                    f"storage {index}, of digests, is damaged: expected digest {expected.hex()}"
                )
        self._logged.over(index, 0, memoryview(data))
        return bytes(data)

    def _require_still(self) -> None:
        """Raise ``BusyError`` if the log has grown, or says that a newer version has the storages:
        then they were changed meanwhile."""
        last = 0
        for entry in entries(self._medium, self._record):
            last = entry.number
        if self._logged.is_left or last != self._logged.entries:
            raise BusyError(
                errno.EBUSY,
                f"{self._medium.info.name}: version {self._record.info.id} is being changed in "
                "place: it can be read whole while no training runs; a mark (a state_dict that was "
                "asked for) can be read at any time",
            )
