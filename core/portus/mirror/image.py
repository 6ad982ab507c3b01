"""Versions of a mirror as a pool that can be read: whatever reads a pool reads a mirror.

The records are made here, of the manifests, and are in memory. Behind them are the files of all
versions: a load reads the ranges of their objects that it needs, several at a time. Nothing is
believed: whoever reads a pool compares digests, and those are the manifests'.
"""

from __future__ import annotations

import bisect
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from portus.copying.local import best_engine
from portus.copying.segments import (
    Column,
    Digests,
    Segments,
    Sources,
    Stop,
    cut,
    memory,
)
from portus.errors import MediumError, UsageError
from portus.format.checksum import UNIT, digest
from portus.format.layout import DATA_START, EXTENT, SUPERBLOCK_OFFSETS, RecordKind
from portus.index.reader import PoolReader
from portus.index.records import (
    Pointer,
    Rows,
    VersionEntry,
    VersionRecord,
    encode_index,
    encode_table,
    encode_version,
    frame,
    point,
)
from portus.index.roots import Root, Superblock, store_root, store_superblock
from portus.media.base import MediumInfo, MediumKind, ReadOnlyMedium
from portus.media.lock import ProcessLocks
from portus.media.memory import Memory
from portus.mirror.pieces import Mirrored
from portus.spec import PAGE, VersionInfo
from portus.versions.buffers import Rooms
from portus.versions.parallel import in_any_order
from portus.versions.parts import StorageRows, rows_of

Load = Callable[[str, int, memoryview], None]
"""Fills memory from a byte of an object on. Raises what a load raises."""

ABREAST: Final = 4
"""Ranges that are read at once."""

_SMALL_ABREAST: Final = 16
"""Of those of less than ``_GAP`` bytes: an answer is waited for, not its bytes."""

_GAP: Final = 256 << 10
"""Bytes between two parts of an object that are read and thrown away, rather than ask twice."""

_CHECKED: Final = 4 * UNIT
"""Bytes in memory while they are only compared."""


def image(name: str, versions: Sequence[Mirrored], load: Load) -> PoolReader:
    """A pool of ``versions``, oldest first, whose bytes ``load`` reads. Asks nothing.

    name: for messages.
    """
    head, objects = _Head(versions), _Objects()
    for each in versions:
        head.add(each, objects.lay(each))
    medium = _Image(name, head.memory(objects.end), objects, load)
    return PoolReader(medium, ProcessLocks())


class _Objects:
    """Where the objects of all versions are laid: those of a file end to end, each file on pages of
    its own."""

    def __init__(self) -> None:
        self.end = _START
        self.names: Final[list[str]] = []
        self.starts: Final[list[int]] = []
        self._ends: Final[list[int]] = []

    def lay(self, version: Mirrored) -> list[int]:
        """Where each file begins."""
        begins = []
        for file in version.manifest.files:
            begins.append(self.end)
            for each in file:
                self.names.append(each.name)
                self.starts.append(self.end)
                self.end += each.size
                self._ends.append(self.end)
            self.end += -self.end % PAGE
        return begins

    def parts(self, offset: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """What of each object lies in a range: its index, the offset in it, the offset from the
        start of the range, the length."""
        before = bisect.bisect_right(self.starts, offset) - 1
        for row in range(max(before, 0), len(self.starts)):
            start = self.starts[row]
            if start >= offset + length:
                break
            first, end = max(start, offset), min(self._ends[row], offset + length)
            if first < end:
                yield row, first - start, first - offset, end - first


class _Head:
    """What leads to the bytes: superblock, roots and records."""

    def __init__(self, versions: Sequence[Mirrored]) -> None:
        self._uuid: Final = digest(b"".join(each.manifest.token for each in versions))
        self._data = bytearray()
        self._entries: Final[list[VersionEntry]] = []

    def add(self, version: Mirrored, begins: Sequence[int]) -> None:
        """A version, whose files begin there."""
        number = len(self._entries) + 1
        self._data += bytes(-len(self._data) % PAGE)  # no page has bytes of two commits (V1)
        layout = self._store(RecordKind.LAYOUT, number, version.manifest.layout)
        tree = self._store(RecordKind.TREE, number, version.manifest.tree)
        record = _record(version, number, begins, layout, tree)
        pointer = self._store(RecordKind.VERSION, number, encode_version(record))
        self._entries.append(VersionEntry(record.info, pointer))

    def memory(self, size: int) -> Memory:
        """All of it, as the start of a pool of so many bytes."""
        commit = len(self._entries)
        models: dict[str, list[VersionEntry]] = {}
        for entry in self._entries:
            models.setdefault(entry.info.model, []).append(entry)
        rows = [
            (name, self._store(RecordKind.MODEL_INDEX, commit, encode_index(name, entries)))
            for name, entries in models.items()
        ]
        table = self._store(RecordKind.MODEL_TABLE, commit, encode_table(rows))
        medium = Memory(DATA_START + len(self._data))
        medium.store(DATA_START, bytes(self._data))
        for number in (commit, commit + 1):  # a slot that is blank would be taken for damaged
            store_root(medium, self._uuid, Root(number, commit + 1, size, table))
        for offset in SUPERBLOCK_OFFSETS:
            store_superblock(medium, Superblock(self._uuid, 0, writable=False), offset)
        return medium

    def _store(self, kind: RecordKind, commit: int, payload: bytes) -> Pointer:
        record = frame(kind, commit, self._uuid, payload)
        pointer = point(DATA_START + len(self._data), record)
        self._data += record + bytes(-len(record) % 8)
        return pointer


def _record(
    version: Mirrored, number: int, begins: Sequence[int], layout: Pointer, tree: Pointer
) -> VersionRecord:
    said, lengths = version.manifest, version.lengths
    info = VersionInfo(
        model=said.model,
        id=number,
        commit=number,
        step=said.step,
        token=said.token,
        time_ns=said.time_ns,
        size=said.size,
        inexact=said.inexact,
        metrics=said.metrics,
    )
    extents, counts = _extents(version, begins)
    every = np.arange(len(lengths))
    born = np.full(len(lengths), number)
    group = StorageRows(every, extents, counts, version.digests, born)
    return VersionRecord(info, layout, tree, *rows_of([group], lengths))


def _extents(version: Mirrored, begins: Sequence[int]) -> tuple[Rows, Column]:
    """The extents of all storages, and how many each has. What is around the storages of a file has
    one for each gap between them."""
    files = list(zip(begins, version.files, strict=True))
    places = [(begin + file.offset, file.length) for begin, file in files]
    counts = [(file.length > 0).astype(np.int64) for _, file in files]
    if sum(map(len, counts)) < len(version.lengths):  # else it is of no files
        for begin, file in files:
            spans = file.spans()
            gaps = spans.storage == len(file.length)
            places.append((begin + spans.begin[gaps], spans.length[gaps]))
            counts.append(np.array([np.count_nonzero(spans.length[gaps])], np.int64))
    offset, length = (np.concatenate(column) for column in zip(*places, strict=True))
    some = length > 0
    extents = np.zeros(int(some.sum()), EXTENT.dtype)
    extents["offset"], extents["length"] = offset[some], length[some]
    return extents, np.concatenate(counts)


class _Image(ReadOnlyMedium):
    """The medium: a head in memory, and objects. Read-only."""

    def __init__(self, name: str, head: Memory, objects: _Objects, load: Load) -> None:
        self._name: Final = name
        self._head: Final = head
        self._objects: Final = objects
        self._load: Final = load
        self._rooms: Final = Rooms(UNIT)

    @property
    def info(self) -> MediumInfo:
        return MediumInfo(MediumKind.MIRROR, self._name, 1, volatile=False, writable=False)

    @property
    def size(self) -> int:
        return self._objects.end

    @property
    def poisoned(self) -> bool:
        """False: nobody stores to it."""
        return False

    def load(self, offset: int, target: memoryview) -> None:
        """What lies between storages reads as zero."""
        length = target.nbytes
        if offset < 0 or offset + length > self.size:
            raise UsageError(
                f"{self._name}: bytes {offset} to {offset + length} are outside of its {self.size}"
            )
        within = target.cast("B")
        within[:] = bytes(length)
        here = min(max(self._head.size - offset, 0), length)
        self._head.load(offset if here else 0, within[:here])
        for index, at, start, taken in self._objects.parts(offset, length):
            self._load(self._objects.names[index], at, within[start : start + taken])

    def fetch(self, targets: Sources, stop: Stop) -> Digests:
        """Straight into the targets, several ranges at a time."""
        segments, digests = cut(targets)
        self._fill(segments, stop)
        best_engine().move(segments, None, digests, stop)
        return digests

    def check(self, sources: Sources, stop: Stop) -> Digests:
        """Hash ``sources`` through memory here: a store has no digests of its own to rely on."""
        segments, digests = cut(sources)
        room = np.empty(min(max(_CHECKED, UNIT), segments.size), np.uint8)
        for batch in segments.batches(_CHECKED):
            place = room.ctypes.data + np.cumsum(batch.length) - batch.length
            here = replace(batch, address=place)
            self._fill(here, stop)
            best_engine().move(here, None, digests, stop)
        return digests

    def together(self, offset: Column, length: Column) -> list[Column]:
        """Neighbours in an object, as a load of all of them would ask for them."""
        found: list[list[int]] = []
        last, size = -1, 0
        for index in np.argsort(offset, kind="stable").tolist():
            owner = bisect.bisect_right(self._objects.starts, int(offset[index]))
            size += int(length[index])
            if owner != last or size > UNIT:
                found.append([])
                last, size = owner, int(length[index])
            found[-1].append(index)
        return [np.array(each, np.int64) for each in found]

    def close(self) -> None:
        self._head.close()

    def _fill(self, segments: Segments, stop: Stop) -> None:
        """Load each segment to its address."""
        runs = _runs(self._parts(segments))

        def load(run: _Run) -> None:
            stop.check()
            run.load(self._objects.names[run.index], self._load, self._rooms)

        large = [run for run in runs if run.end - run.start >= _GAP]
        small = [run for run in runs if run.end - run.start < _GAP]
        in_any_order(load, large, ABREAST)
        in_any_order(load, small, _SMALL_ABREAST)

    def _parts(self, segments: Segments) -> Iterator[tuple[int, int, int, int]]:
        columns = (segments.address, segments.offset, segments.length)
        for address, offset, length in zip(*(each.tolist() for each in columns), strict=True):
            for index, at, start, taken in self._objects.parts(offset, length):
                yield index, at, address + start, taken

    def _refused(self) -> MediumError:
        return MediumError(errno.EROFS, f"{self._name}: a mirror is written by its writer alone")


@dataclass(slots=True)
class _Run:
    """Parts of an object that are loaded at once: (offset in the object, address, length)."""

    index: int
    start: int
    end: int
    parts: list[tuple[int, int, int]]

    def load(self, name: str, load: Load, rooms: Rooms) -> None:
        """Straight to where they go if they are neighbours there too."""
        if self._are_neighbours():
            load(name, self.start, memory(self.parts[0][1], self.end - self.start))
            return
        with rooms.lent(self.end - self.start) as room:
            load(name, self.start, room.data)
            for at, address, length in self.parts:
                memory(address, length)[:] = room.data[at - self.start : at - self.start + length]

    def _are_neighbours(self) -> bool:
        pairs = zip(self.parts, self.parts[1:], strict=False)
        return all(
            (at + length, address + length) == after[:2] for (at, address, length), after in pairs
        )


def _runs(parts: Iterable[tuple[int, int, int, int]]) -> list[_Run]:
    """Parts (index of the object, offset there, address, length) that are near each other,
    together."""
    runs: list[_Run] = []
    for index, at, address, length in sorted(parts):
        last = runs[-1] if runs else None
        if (
            last is None
            or last.index != index
            or at > last.end + _GAP
            or at + length > last.start + UNIT
        ):
            last = _Run(index, at, at, [])
            runs.append(last)
        last.end = max(last.end, at + length)
        last.parts.append((at, address, length))
    return runs


_START: Final = 1 << 50
"""Where the bytes of storages begin: records are in memory, and end long before."""
