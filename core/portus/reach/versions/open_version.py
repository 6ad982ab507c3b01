"""``OpenVersion``: a pinned version of a pool, whose bytes are verified as they are read, and
``VersionFile``: a checkpoint file in it, open for reading. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from portus.engine.copying.local import check, fetch
from portus.engine.copying.segments import Column, Digests, Sources, Stop, memory, ranges
from portus.engine.format.checksum import UNIT, unit_counts
from portus.engine.image.key_paths import storage_places
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError
from portus.reach.format.items import StoredArray, decode
from portus.reach.format.layout import UNIT_DIGEST
from portus.reach.index.file_table import FileTable, decode_table
from portus.reach.index.in_place import InPlaceReader
from portus.reach.index.log import LogState, read_log
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry, VersionRecord, overlaps
from portus.reach.media.local import naming_call

_KEPT: Final = 4
"""Units of the bytes around storages to keep, for as many threads."""


class _Part(NamedTuple):
    """Bytes of a storage of the version, within a unit."""

    storage: int
    start: int
    length: int


class OpenVersion:
    """A pinned version, open for reading. ``table``: of its files; None if it has none, as those of
    a shelf and of tables."""

    def __init__(self, reader: PoolReader, record: VersionRecord, stop: Stop | None = None) -> None:
        """Raises ``CorruptionError``, ``MediumError``. record: of a version that the caller keeps
        pinned. stop: ends reads."""
        self.reader: Final = reader
        self.record: Final = record
        self._stop: Final = Stop() if stop is None else stop
        self.table: Final = self._read_table()
        self.lengths: Final = record.length

    @cached_property
    def log_state(self) -> LogState:
        """The changes by the log of the version, as of their first use."""
        return read_log(self.reader.medium, self.record)

    @cached_property
    def _in_place(self) -> InPlaceReader:
        return InPlaceReader(self.reader.medium, self.record, self.log_state)

    @property
    def contents(self) -> bytes:
        """The contents, as of the log."""
        return self.log_state.contents or self.record.contents

    @property
    def where(self) -> str:
        """The name of the version, for errors."""
        return f"{self.reader.medium.info.name}: {describe(self.record.info)}"

    @cached_property
    def files(self) -> Mapping[str, VersionFile]:
        """The files by their names; none if the version has no table of files."""
        files = [] if self.table is None else self.table.files
        return {each.name: VersionFile(self, number) for number, each in enumerate(files)}

    def file(self, name: str) -> VersionFile:
        """Return the file of that name. Raise ``CorruptionError`` if there is none."""
        if name not in self.files:
            raise CorruptionError(
                f"{self.where}: expected a file {name!r}, found {[*self.files]!r:.200}"
            )
        return self.files[name]

    def read(
        self,
        storage: Column,
        start: Column,
        length: Column,
        address: Column | None,
        *,
        verify: bool = True,
    ) -> Digests:
        """Copy whole units of storages, from byte ``start`` of each, to memory, as of the log.
        Return their digests at the commit. address: None copies nothing, and only verifies.

        verify: False compares no digests, but of storages that are changed in place. Raises
        ``CorruptionError``, ``MediumError``, ``BusyError``, ``StoppedError``."""
        record, counts = self.record, unit_counts(length)
        first = record.first_unit[storage] + start // UNIT
        units = np.ascontiguousarray(record.units[ranges(first, counts)])
        expected: Digests = units.view(np.uint8).reshape(-1, UNIT_DIGEST.size)
        placed = np.isin(storage, self._in_place.storages)
        for number in np.flatnonzero(placed).tolist():
            at = None if address is None else int(address[number])
            self._read_in_place(int(storage[number]), int(start[number]), int(length[number]), at)
        plain = np.flatnonzero(~placed)
        columns = (storage[plain], start[plain], length[plain])
        offset, held = record.places(*columns)
        moved = Sources(
            address=np.zeros(len(plain), np.int64) if address is None else address[plain],
            length=columns[2],
            extent_offset=offset,
            extent_length=held,
        )
        found = (check if address is None else fetch)(self.reader.medium, moved, self._stop)
        committed = expected[~np.repeat(placed, counts)]
        wrong = (found != committed).any(axis=1)
        for bad in np.flatnonzero(wrong if verify else ())[:1].tolist():
            owner = np.repeat(plain, counts[plain])
            rank = bad - int(np.flatnonzero(owner == owner[bad])[0])
            begin = int(start[owner[bad]]) + rank * UNIT
            raise CorruptionError(
                f"{self.where}: {self.name(int(storage[owner[bad]]))} is damaged within 16 MiB "
                f"from byte {begin} of its storage: expected digest "
                f"{committed[bad].tobytes().hex()}, found {found[bad].tobytes().hex()}"
            )
        # After the comparison: the digests are those of the bytes as they were committed.
        if address is not None and self.log_state.changes:
            rows = (*columns, moved.address)
            for index, begin, size, at in zip(*(each.tolist() for each in rows), strict=True):
                self.log_state.over(index, begin, memory(at, size))
        return expected

    def check(self, storages: Column) -> None:
        """Compare storages with their digests. Raises as ``read``."""
        self.read(storages, np.zeros_like(storages), self.lengths[storages], None)

    def units(self, rows: Sequence[_Part]) -> memoryview:
        """Return whole units, end to end: ``UNIT`` bytes together at most. Raises as ``read``."""
        self._stop.check()
        if not rows:
            return memoryview(b"")
        storage, start, length = np.array(rows, np.int64).T
        found = np.empty(int(length.sum()), np.uint8)
        self.read(storage, start, length, found.ctypes.data + np.cumsum(length) - length)
        return found.data

    def name(self, index: int) -> str:
        """Return the name of a storage, for errors. Reads no storage: one may be damaged."""
        names: list[str] = []
        if self.table is None and is_pickle(self.contents):
            places = storage_places(self.contents)
            names = [each.subscript for each in places if each.storage == str(index)]
        elif self.table is None:
            arrays: list[StoredArray] = []
            with contextlib.suppress(CorruptionError):
                decode(self.contents, arrays.append)
            names = [each.name for each in arrays if each.storage == index]
        return " = ".join(names[:3]) or f"storage {index}"

    def _read_in_place(self, index: int, start: int, length: int, address: int | None) -> None:
        room = memoryview(bytearray(0 if address is not None else min(length, UNIT)))
        try:
            for at in range(0, length, UNIT):
                size = min(UNIT, length - at)
                unit = room[:size] if address is None else memory(address + at, size)
                self._in_place.read(index, (start + at) // UNIT, unit)
        except CorruptionError as error:
            raise CorruptionError(f"{self.where}: {self.name(index)}: {error}") from error

    def _read_table(self) -> FileTable | None:
        table = decode_table(self.record.contents)
        # Both have digests, but offsets of another version would cut these storages wrongly.
        if table is not None and table.lengths != self.record.length.tolist():
            raise CorruptionError(
                f"{self.where}: the files of this version do not have the storages that it has"
            )
        return table


class VersionFile:
    """A file of a pinned version, as an ``OpenFile``, whose storages are verified by the digests in
    the file; ``read`` compares all bytes with those of the pool. The bytes around storages are read
    by units, of which a few are kept, since they are requested in small parts."""

    number: Final = None

    def __init__(self, version: OpenVersion, number: int) -> None:
        """number: of the file in the version."""
        assert version.table is not None
        files = version.table.files
        self.packed: Final = files[number]
        self.medium: Final = version.reader.medium
        self._version: Final = version
        self._spans: Final = self.packed.spans()
        self._first: Final = sum(len(each.length) for each in files[:number])
        self._around: Final = sum(len(each.length) for each in files) + number
        """The storage with the bytes around those of the file."""
        self._kept: Final[dict[int, memoryview]] = {}
        """The units around storages that were read last, by their first bytes."""

    @property
    def size(self) -> int:
        return self.packed.size

    def extents(self, offset: Column, length: Column) -> tuple[Column, Column]:
        spans = self._spans
        span, inside, length = overlaps(np.append(spans.begin, self.size), offset, length)
        storage = spans.storage[span]
        own = np.where(storage == len(self.packed.length), self._around, self._first + storage)
        return self._version.record.places(own, spans.inside[span] + inside, length)

    def announce(self, offset: Column, length: Column) -> None:
        """Do nothing: reads from a pool need no preparation."""

    def load(self, offset: int, target: memoryview) -> None:
        for part in self._parts(offset, len(target)):
            piece, target = target[: part.length], target[part.length :]
            if part.storage == self._around:
                piece[:] = self._kept_part(part)
                continue
            for at, held in zip(
                *self._version.record.places(*(np.array([each]) for each in part)), strict=True
            ):
                self.medium.load(int(at), piece[:held])
                piece = piece[held:]

    def read(self, start: int, size: int) -> Iterator[memoryview]:
        """Yield a range of whole units of storages, and of bytes around them, verified, in pieces
        of ``UNIT`` bytes together at most. They are in memory of their own: through a mapping, a
        bad sector would be SIGBUS. Raises as ``OpenVersion.read``."""
        parts: list[_Part] = []
        held = 0
        for part in self._parts(start, size):
            if held + part.length > UNIT:
                yield from self._together(parts)
                parts, held = [], 0
            parts.append(part)
            held += part.length
        yield from self._together(parts)

    def write(self, number: int, path: str, advance: Callable[[int], None]) -> None:
        """Write the file to the open and empty file ``number``, verified. One unit (16 MiB) is in
        memory at a time, and a few units of the bytes around storages. path: for messages. advance:
        receives the bytes of each piece."""
        try:
            with naming_call("write", path), open(number, "wb", closefd=False) as out:
                for piece in self.read(0, self.size):
                    out.write(piece)
                    advance(len(piece))
        except CorruptionError as error:
            raise CorruptionError(f"{self.packed.name}: {error}") from error

    def _parts(self, start: int, size: int) -> Iterator[_Part]:
        """Yield the parts of units that are a range of the file."""
        for storage, inside, length in self._spans.within(start, size):
            is_around = storage == len(self.packed.length)
            index = self._around if is_around else self._first + storage
            yield from _units_of(index, inside, length)

    def _together(self, parts: Sequence[_Part]) -> Iterator[memoryview]:
        """Yield the bytes of parts, with one read for all units that are not around storages."""
        own = [each for each in parts if each.storage != self._around]
        data = self._version.units(own)
        for each in parts:
            if each.storage == self._around:
                yield self._kept_part(each)
            else:
                yield data[: each.length]
                data = data[each.length :]

    def _kept_part(self, part: _Part) -> memoryview:
        begin = part.start - part.start % UNIT
        found = self._kept.get(begin)
        if found is None:
            size = min(UNIT, self.packed.around - begin)
            found = self._version.units([_Part(self._around, begin, size)])
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[begin] = found
        return found[part.start - begin :][: part.length]


@contextlib.contextmanager
def open_version(reader: PoolReader, entry: VersionEntry) -> Iterator[OpenVersion]:
    """Yield a version that is pinned meanwhile. Raises ``CorruptionError``, ``MediumError``,
    ``StaleError``."""
    with reader.pin(entry.info.id) as current:
        yield OpenVersion(reader, reader.record(current))


def is_pickle(contents: bytes) -> bool:
    """Return True for contents of tables, False for those of a shelf."""
    return contents[:1] == b"\x80"


def describe(info: VersionInfo) -> str:
    """Return the name of a version, for errors."""
    return f"model {info.model!r}, step {info.step} (version {info.id})"


def _units_of(storage: int, inside: int, length: int) -> Iterator[_Part]:
    """Yield the parts of units that have some bytes of a storage."""
    while length:
        taken = min(UNIT - inside % UNIT, length)
        yield _Part(storage, inside, taken)
        inside, length = inside + taken, length - taken
