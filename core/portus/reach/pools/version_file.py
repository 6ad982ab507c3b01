"""``VersionFile``: a checkpoint file in a version of a pool, open for reading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from portus.engine.copying.local import fetch
from portus.engine.copying.segments import Column, Sources, Stop
from portus.engine.spec import Extent
from portus.errors import CorruptionError
from portus.reach.index.file_table import FileTable, PackedFile, decode_table, overlaps
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.versions.parts import part

_READ_MAX: Final = 16 << 20
"""Bytes around the storages of a file of a version that are read together, and kept."""


class VersionFile:
    """A file of a pinned version, as an ``OpenFile``."""

    number: Final = None

    def __init__(
        self, reader: PoolReader, record: VersionRecord, file: PackedFile, first: int, around: int
    ) -> None:
        """first: the storage of the version that is the first one of the file. around: the one with
        the bytes around its storages."""
        self.medium: Final = reader.medium
        self.size: Final = file.size
        self._record: Final = record
        self._count: Final = len(file.length)
        self._first: Final = first
        self._around: Final = around
        self._spans: Final = file.spans()
        self._size_around: Final = file.around
        self._extents: Final[dict[int, Sequence[Extent]]] = {}
        self._read: bytes | None = None
        """The bytes around the storages, after the first read of some of them."""

    def extents(self, offset: Column, length: Column) -> tuple[Column, Column]:
        spans, rows = self._spans, self._record.extents
        span, inside, length = overlaps(np.append(spans.begin, self.size), offset, length)
        storage = spans.storage[span]
        index = np.where(storage == self._count, self._around, self._first + storage)
        # All storages of the version are end to end in its extents.
        held = self._record.length
        at = (np.cumsum(held) - held)[index] + spans.inside[span] + inside
        ends = np.append(0, np.cumsum(rows["length"].astype(np.int64)))
        extent, inside, length = overlaps(ends, at, length)
        return rows["offset"].astype(np.int64)[extent] + inside, length

    def announce(self, offset: Column, length: Column) -> None:
        """Do nothing: reads from a pool need no preparation."""

    def load(self, offset: int, target: memoryview) -> None:
        for storage, inside, size in self._spans.within(offset, len(target)):
            piece, target = target[:size], target[size:]
            if storage == self._count and self._size_around <= _READ_MAX:
                piece[:] = self._literals()[inside : inside + size]
            else:
                self._load(part(self._extents_of(storage), inside, inside + size), piece)

    def _literals(self) -> bytes:
        """Return the bytes around the storages. They are read together, since each read is a
        request."""
        if self._read is None:
            read = np.empty(self._size_around, np.uint8)
            extents = self._extents_of(self._count)
            target = Sources(
                address=np.array([read.ctypes.data], np.int64),
                length=np.array([len(read)], np.int64),
                extent_offset=np.array([each.offset for each in extents], np.int64),
                extent_length=np.array([each.length for each in extents], np.int64),
            )
            fetch(self.medium, target, Stop())
            self._read = read.tobytes()
        return self._read

    def _load(self, extents: Sequence[Extent], target: memoryview) -> None:
        for extent in extents:
            self.medium.load(extent.offset, target[: extent.length])
            target = target[extent.length :]

    def _extents_of(self, storage: int) -> Sequence[Extent]:
        if storage not in self._extents:
            index = self._around if storage == self._count else self._first + storage
            self._extents[storage] = self._record.storage_extents(index)
        return self._extents[storage]


def table_of(reader: PoolReader, record: VersionRecord) -> FileTable | None:
    """Return the files of a pinned version; None for a version without files. Raises
    ``CorruptionError``, ``MediumError``."""
    table = decode_table(record.contents)
    if table is None:
        return None
    # Both have digests, but offsets of another version would cut these storages wrongly.
    if table.lengths != record.length.tolist():
        info = record.info
        raise CorruptionError(
            f"{reader.medium.info.name}: {info.model}@{info.step}: the files of this version do "
            "not have the storages that it has"
        )
    return table


def table_in(reader: PoolReader, entry: VersionEntry) -> FileTable | None:
    """Return the files of a version; None for a version without files. Raises ``CorruptionError``,
    ``MediumError``, ``StaleError``."""
    with reader.pin(entry.info.id) as current:
        return table_of(reader, reader.record(current))


def file_in(
    reader: PoolReader, record: VersionRecord, files: Sequence[PackedFile], number: int
) -> VersionFile:
    """Return one file of a pinned version, by its number; ``files``: all of its files."""
    first = sum(len(each.length) for each in files[:number])
    around = sum(len(each.length) for each in files) + number
    return VersionFile(reader, record, files[number], first, around)


@contextlib.contextmanager
def files_opened(
    reader: PoolReader, entry: VersionEntry, name: str | None = None
) -> Iterator[dict[str, VersionFile]]:
    """Yield the files of a version by their names, or the file ``name`` alone; none for a version
    without files. The version is pinned inside. Raises ``CorruptionError``, also for a file that it
    lacks, ``MediumError``, ``StaleError``."""
    with reader.pin(entry.info.id) as current:
        record = reader.record(current)
        table = table_of(reader, record)
        if table is None:
            yield {}
            return
        files = table.files
        found = {
            each.name: file_in(reader, record, files, number)
            for number, each in enumerate(files)
            if name in (None, each.name)
        }
        if name is not None and not found:
            info = entry.info
            raise CorruptionError(
                f"{reader.medium.info.name}: {info.model}@{info.step}: expected a file {name!r}, "
                f"found {[each.name for each in files]!r:.200}"
            )
        yield found
