"""Versions of a mirror as a pool that can be read: whatever reads a pool reads a mirror.

The records are made here, of the manifests. The medium has the files of all versions: a load reads
the ranges of their objects that it needs, several at a time. Nothing is believed: whoever reads a
pool compares digests, and those are the manifests'.
"""

from __future__ import annotations

import bisect
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from portus.engine.copying.local import best_engine
from portus.engine.copying.segments import (
    Column,
    Digests,
    Segments,
    Sources,
    Stop,
    cut,
    memory,
)
from portus.engine.format.checksum import UNIT, digest
from portus.engine.media.base import MediumInfo, MediumKind, ReadOnlyMedium
from portus.engine.spec import PAGE, VersionInfo
from portus.errors import MediumError
from portus.reach.format.layout import EXTENT, RecordKind
from portus.reach.index.catalogue import Catalogue, Model
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import NOWHERE, Pointer, Rows, VersionEntry, VersionRecord
from portus.reach.index.roots import Root, Superblock
from portus.reach.media.lock import ProcessLocks
from portus.reach.mirror.pieces import Mirrored
from portus.reach.versions.buffers import Rooms
from portus.reach.versions.parallel import in_any_order
from portus.reach.versions.parts import StorageRows, rows_of

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


class MirroredPool(PoolReader):
    """See the module."""

    def __init__(self, name: str, versions: Sequence[Mirrored], load: Load) -> None:
        """A pool of ``versions``, oldest first, whose bytes ``load`` reads. Asks nothing. name: for
        messages."""
        uuid = digest(b"".join(each.manifest.token for each in versions))
        objects = _Objects(name, load)
        super().__init__(objects, ProcessLocks(), Superblock(uuid, 0, writable=False))
        self._payloads: Final[dict[Pointer, bytes]] = {}
        self._records: Final[list[VersionRecord]] = []
        models: dict[str, list[VersionEntry]] = {}
        for each in versions:
            record = self._record_of(each, objects.lay(each))
            self._records.append(record)
            models.setdefault(record.info.model, []).append(VersionEntry(record.info, NOWHERE))
        count = len(versions)
        self._catalogue: Final = Catalogue(
            Root(count, count + 1, objects.size, NOWHERE),
            {name: Model(NOWHERE, tuple(entries)) for name, entries in models.items()},
        )

    def catalogue(self) -> Catalogue:
        """All versions."""
        return self._catalogue

    def record(self, entry: VersionEntry) -> VersionRecord:
        """The record of a version."""
        return self._records[entry.info.id - 1]

    def payload(self, pointer: Pointer, kind: RecordKind) -> memoryview:
        """A layout or a tree of a version."""
        return memoryview(self._payloads[pointer])

    def _record_of(self, version: Mirrored, begins: Sequence[int]) -> VersionRecord:
        """begins: where its files begin."""
        said, lengths, number = version.manifest, version.lengths, len(self._records) + 1
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
        layout, tree = self._stored(said.layout), self._stored(said.tree)
        return VersionRecord(info, layout, tree, *rows_of([group], lengths))

    def _stored(self, payload: bytes) -> Pointer:
        pointer = Pointer(0, len(payload), digest(payload))
        self._payloads[pointer] = payload
        return pointer


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


class _Objects(ReadOnlyMedium):
    """The medium: the objects of a file lie end to end, each file on pages of its own."""

    def __init__(self, name: str, load: Load) -> None:
        self._name: Final = name
        self._load: Final = load
        self._rooms: Final = Rooms(UNIT)
        self._size = 0
        self._names: Final[list[str]] = []
        self._starts: Final[list[int]] = []
        self._ends: Final[list[int]] = []

    def lay(self, version: Mirrored) -> list[int]:
        """Add the files of a version; where each begins."""
        begins = []
        for file in version.manifest.files:
            begins.append(self._size)
            for each in file:
                self._names.append(each.name)
                self._starts.append(self._size)
                self._size += each.size
                self._ends.append(self._size)
            self._size += -self._size % PAGE
        return begins

    @property
    def info(self) -> MediumInfo:
        return MediumInfo(MediumKind.MIRROR, self._name, 1, volatile=False, writable=False)

    @property
    def size(self) -> int:
        return self._size

    @property
    def poisoned(self) -> bool:
        """False: nobody stores to it."""
        return False

    def load(self, offset: int, target: memoryview) -> None:
        within = target.cast("B")
        for index, at, start, taken in self._parts(offset, target.nbytes):
            self._load(self._names[index], at, within[start : start + taken])

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

    def close(self) -> None:
        """The store is its owner's."""

    def _parts(self, offset: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """What of each object lies in a range: its index, the offset in it, the offset from the
        start of the range, the length."""
        before = bisect.bisect_right(self._starts, offset) - 1
        for index in range(before, len(self._starts)):
            start = self._starts[index]
            if start >= offset + length:
                break
            first, end = max(start, offset), min(self._ends[index], offset + length)
            if first < end:
                yield index, first - start, first - offset, end - first

    def _fill(self, segments: Segments, stop: Stop) -> None:
        """Load each segment to its address."""
        columns = (segments.address, segments.offset, segments.length)
        rows = zip(*(each.tolist() for each in columns), strict=True)
        runs = _runs(
            (index, at, address + start, taken)
            for address, offset, length in rows
            for index, at, start, taken in self._parts(offset, length)
        )

        def load(run: _Run) -> None:
            stop.check()
            run.load(self._names[run.index], self._load, self._rooms)

        in_any_order(load, [run for run in runs if run.size >= _GAP], ABREAST)
        in_any_order(load, [run for run in runs if run.size < _GAP], _SMALL_ABREAST)

    def _refused(self) -> MediumError:
        return MediumError(errno.EROFS, f"{self._name}: a mirror is written by its writer alone")


@dataclass(slots=True)
class _Run:
    """Parts of an object that are loaded at once: (offset in the object, address, length)."""

    index: int
    start: int
    end: int
    parts: list[tuple[int, int, int]]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start

    def load(self, name: str, load: Load, rooms: Rooms) -> None:
        """Straight to where they go if they are neighbours there too."""
        if self._are_neighbours():
            load(name, self.start, memory(self.parts[0][1], self.size))
            return
        with rooms.lent(self.size) as room:
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
