"""``FileBytes``: the files of a pool's version as verified bytes, for exports and mirrors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from portus.engine.copying.local import fetch
from portus.engine.copying.segments import Column, Digests, Stop, cut, owners, unit_spans
from portus.engine.format.checksum import UNIT, unit_counts
from portus.errors import CorruptionError
from portus.reach.index.file_table import PackedFile
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.versions.parallel import Rooms
from portus.reach.versions.parts import share, sources

_KEPT: Final = 4
"""Units of the bytes around storages to keep, for as many threads."""


class _Part(NamedTuple):
    """Bytes of a unit, from its byte ``start`` on. ``row``: the index of the unit."""

    row: int
    start: int
    length: int


class FileBytes:
    """The bytes of the files of a version. They are in memory of their own: through a mapping, a
    bad sector would be SIGBUS. A few units of the bytes around storages are kept, since these are
    requested in small parts."""

    def __init__(
        self, reader: PoolReader, record: VersionRecord, files: Sequence[PackedFile], stop: Stop
    ) -> None:
        """Prepare to read ``files`` of a version, which the caller keeps pinned."""
        self._reader: Final = reader
        self._record: Final = record
        self._stop: Final = stop
        self.files: Final = files
        self.lengths: Final = record.length
        group = share(record, np.arange(len(self.lengths)))
        nowhere = np.zeros(len(self.lengths), np.int64)
        self._segments, _ = cut(sources(nowhere, self.lengths, group.extents))
        self.digests: Final = group.digests
        counts = unit_counts(self.lengths)
        self._first: Final[Column] = np.append(np.cumsum(counts) - counts, len(self.digests))
        """The first unit of each storage, and the number of all units."""
        self._sizes: Final[list[int]] = unit_spans(nowhere, self.lengths)[1].tolist()
        self._rooms: Final = Rooms(UNIT)
        self._spans: Final = [each.spans() for each in files]
        self._first_around: Final = int(self._first[sum(len(each.length) for each in files)])
        """The first unit of the bytes around storages."""
        self._kept: Final[dict[int, bytes]] = {}
        """The units around storages that were read last, by their rows."""

    def digests_of(self, number: int) -> Digests:
        """Return the digests of the units of the storages of a file."""
        before = sum(len(each.length) for each in self.files[:number])
        return self.digests[
            int(self._first[before]) : int(self._first[before + len(self.files[number].length)])
        ]

    def around(self, number: int, start: int, length: int) -> bytes:
        """Return some of the bytes around the storages of a file. Raises as ``read``."""
        index = sum(len(each.length) for each in self.files) + number
        return b"".join(self._together([*self._parts(index, start, length)]))

    def read(self, number: int, start: int, size: int) -> Iterator[memoryview]:
        """Yield a range of a file in pieces of whole units, ``UNIT`` bytes together at most. Raises
        ``CorruptionError``, ``StoppedError``, and what the medium raises."""
        file = self.files[number]
        before = sum(len(each.length) for each in self.files[:number])
        around = sum(len(each.length) for each in self.files) + number
        parts: list[_Part] = []
        held = 0
        for storage, inside, length in self._spans[number].within(start, size):
            index = around if storage == len(file.length) else before + storage
            for part in self._parts(index, inside, length):
                if held + part.length > UNIT:
                    yield from self._together(parts)
                    parts, held = [], 0
                parts.append(part)
                held += part.length
        yield from self._together(parts)

    def _parts(self, index: int, inside: int, length: int) -> Iterator[_Part]:
        """Yield the parts of units that have some bytes of a storage."""
        while length:
            unit, start = divmod(inside, UNIT)
            taken = min(UNIT - start, length)
            yield _Part(int(self._first[index]) + unit, start, taken)
            inside, length = inside + taken, length - taken

    def _together(self, parts: Sequence[_Part]) -> Iterator[memoryview]:
        """Yield the bytes of parts, with one read for all units that are not around storages."""
        own = [each.row for each in parts if each.row < self._first_around]
        data = memoryview(self._units(own))
        for each in parts:
            if each.row < self._first_around:
                yield data[: each.length]
                data = data[each.length :]
            else:
                yield memoryview(self._kept_unit(each.row))[each.start : each.start + each.length]

    def _kept_unit(self, row: int) -> bytes:
        found = self._kept.get(row)
        if found is None:
            found = self._units([row])
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[row] = found
        return found

    def _units(self, rows: Sequence[int]) -> bytes:
        """Return units end to end, verified; ``UNIT`` bytes together at most."""
        self._stop.check()
        if not rows:
            return b""
        source, expected = self._segments.of_units(np.array(rows)), self.digests[rows]
        with self._rooms.lent(source.size) as room:
            place = room.ctypes.data + np.cumsum(source.length) - source.length
            found = fetch(self._reader.medium, source.sources_at(place), self._stop)
            for bad in np.flatnonzero((found != expected).any(axis=1))[:1].tolist():
                info, row = self._record.info, rows[bad]
                raise CorruptionError(
                    f"{self._reader.medium.info.name}: model {info.model!r}, step {info.step}: a "
                    f"unit is damaged, {self._sizes[row]} bytes of storage "
                    f"{int(owners(self.lengths)[row])}: expected digest "
                    f"{expected[bad].tobytes().hex()}, found {found[bad].tobytes().hex()}"
                )
            return bytes(room.data)
