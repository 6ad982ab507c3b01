"""Versions of a mirror as a pool that can be read: whatever reads a pool reads a mirror.

The records are made here, of the manifests, and are in memory. The bytes of storages are in packs:
a load reads the ranges of those that it needs, several at a time. Nothing is believed: whoever
reads a pool compares digests, and those are the manifests'.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from portus.copying.local import best_engine
from portus.copying.segments import Column, Digests, Segments, Sources, Stop, cut, memory
from portus.errors import CorruptionError, MediumError, UsageError
from portus.format.checksum import DIGEST_SIZE, UNIT, digest, unit_counts
from portus.format.layout import DATA_START, EXTENT, SUPERBLOCK_OFFSETS, RecordKind
from portus.index.reader import PoolReader
from portus.index.records import (
    Pointer,
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
from portus.mirror.units import Mirrored, unit_lengths
from portus.spec import PAGE, VersionInfo
from portus.versions.buffers import Rooms
from portus.versions.parallel import in_any_order
from portus.versions.parts import StorageRows, rows_of

Load = Callable[[str, int, memoryview], None]
"""Fills memory from a byte of a pack on. Raises what a load raises."""

ABREAST: Final = 4
"""Ranges that are read at once."""

_GAP: Final = 256 << 10
"""Bytes between two pieces of a pack that are read and thrown away, rather than ask twice."""

_CHECKED: Final = 4 * UNIT
"""Bytes in memory while they are only compared."""


def image(name: str, versions: Sequence[Mirrored], load: Load) -> PoolReader:
    """A pool of ``versions``, oldest first, whose bytes ``load`` reads. Reads layouts and trees.

    name: for messages. Raises ``CorruptionError`` where a manifest does not fit together, or a
    layout or a tree is damaged, and what ``load`` raises.
    """
    head, units = _Head(versions), _Units()
    for each in versions:
        payloads = [_read_whole(each, len(each.lengths) - 2 + at, load) for at in range(2)]
        head.add(each, payloads, units.lay(each))
    medium = _Image(name, head.memory(units.end), units, load)
    return PoolReader(medium, ProcessLocks())


def _read_whole(version: Mirrored, storage: int, load: Load) -> bytes:
    """All of one storage, verified."""
    lengths = unit_lengths(version.lengths)
    first = int(unit_counts(version.lengths[:storage]).sum())
    found = bytearray(int(version.lengths[storage]))
    for unit in range(first, first + -(-len(found) // UNIT)):
        start, length = (unit - first) * UNIT, int(lengths[unit])
        part = memoryview(found)[start : start + length]
        pack, offset = version.manifest.packs[int(version.pack[unit])], int(version.offset[unit])
        load(pack, offset, part)
        expected, arrived = version.keys[unit][0], digest(part)
        if arrived != expected:
            raise CorruptionError(
                f"pack {pack} of step {version.manifest.step} of model {version.manifest.model!r}: "
                f"{length} bytes from byte {offset} are damaged: expected digest "
                f"{expected.hex()}, found {arrived.hex()}"
            )
    return bytes(found)


class _Units:
    """Where the units of all versions are laid: storages one after another, each on pages."""

    def __init__(self) -> None:
        self.end = _START
        self.packs: Final[list[str]] = []
        self._rows: Final[list[tuple[Column, Column, Column, Column]]] = []

    def lay(self, version: Mirrored) -> Column:
        """Where each storage begins."""
        lengths = version.lengths[:-2]
        room = -(-lengths // PAGE) * PAGE
        starts: Column = self.end + np.cumsum(room) - room
        self.end += int(room.sum())
        counts, length = unit_counts(lengths), unit_lengths(lengths)
        rank = np.arange(len(length)) - np.repeat(np.cumsum(counts) - counts, counts)
        some = length > 0
        start = np.repeat(starts, counts) + rank * UNIT
        pack = version.pack[: len(length)] + len(self.packs)
        offset = version.offset[: len(length)]
        self._rows.append((start[some], length[some], pack[some], offset[some]))
        self.packs.extend(version.manifest.packs)
        return starts

    @cached_property
    def columns(self) -> tuple[Column, Column, Column, Column]:
        """Start here, length, index of the pack and offset in the pack, for all units."""
        start, length, pack, offset = (
            np.concatenate([_NONE, *column]) for column in zip(*self._rows, strict=True)
        )
        return start, length, pack, offset

    def pieces(self, offset: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """What of each unit lies in a range: index of the pack, offset in it, offset from the
        start of the range, length."""
        starts, lengths, packs, offsets = self.columns
        row = max(int(np.searchsorted(starts, offset, "right")) - 1, 0)
        while row < len(starts) and int(starts[row]) < offset + length:
            start = int(starts[row])
            first = max(start, offset)
            end = min(start + int(lengths[row]), offset + length)
            if first < end:
                at = int(offsets[row]) + first - start
                yield int(packs[row]), at, first - offset, end - first
            row += 1


class _Head:
    """What leads to the bytes: superblock, roots and records."""

    def __init__(self, versions: Sequence[Mirrored]) -> None:
        self._uuid: Final = digest(b"".join(each.manifest.token for each in versions))
        self._data = bytearray()
        self._entries: Final[list[VersionEntry]] = []

    def add(self, version: Mirrored, payloads: Sequence[bytes], starts: Column) -> None:
        """A version, with its layout and its tree, whose storages begin at ``starts``."""
        number = len(self._entries) + 1
        self._data += bytes(-len(self._data) % PAGE)  # no page has bytes of two commits (V1)
        layout = self._store(RecordKind.LAYOUT, number, payloads[0])
        tree = self._store(RecordKind.TREE, number, payloads[1])
        record = _record(version, number, starts, layout, tree)
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
    version: Mirrored, number: int, starts: Column, layout: Pointer, tree: Pointer
) -> VersionRecord:
    said, lengths = version.manifest, version.lengths[:-2]
    if said.size != int(lengths.sum()):
        raise CorruptionError(
            f"the manifest of step {said.step} of model {said.model!r}: expected storages of "
            f"{said.size} bytes together, found {int(lengths.sum())}"
        )
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
    some = lengths > 0
    extents = np.zeros(int(some.sum()), EXTENT.dtype)
    extents["offset"], extents["length"] = starts[some], lengths[some]
    count = int(unit_counts(lengths).sum())
    digests = np.frombuffer(said.digests, np.uint8)[: count * DIGEST_SIZE].reshape(-1, DIGEST_SIZE)
    every = np.arange(len(lengths))
    group = StorageRows(
        every, extents, some.astype(np.int64), digests, np.full(len(lengths), number)
    )
    return VersionRecord(info, layout, tree, *rows_of([group], lengths))


class _Image(ReadOnlyMedium):
    """The medium: a head in memory, and units in packs. Read-only."""

    def __init__(self, name: str, head: Memory, units: _Units, load: Load) -> None:
        self._name: Final = name
        self._head: Final = head
        self._units: Final = units
        self._load: Final = load
        self._rooms: Final = Rooms(UNIT)

    @property
    def info(self) -> MediumInfo:
        return MediumInfo(MediumKind.MIRROR, self._name, 1, volatile=False, writable=False)

    @property
    def size(self) -> int:
        return self._units.end

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
        for pack, at, start, taken in self._units.pieces(offset, length):
            self._load(self._units.packs[pack], at, within[start : start + taken])

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
        """Neighbours in a pack, as a load of all of them would ask for them."""
        starts, _, packs, offsets = self._units.columns
        row = np.searchsorted(starts, offset, "right") - 1
        pack, at = packs[row], offsets[row] + offset - starts[row]
        rows = zip(pack.tolist(), at.tolist(), range(len(row)), length.tolist(), strict=True)
        found: list[list[int]] = []
        for run in _runs(rows):
            size = UNIT
            for _, index, taken in run.pieces:
                size += taken
                if size > UNIT:  # equal units are one place in a pack: a run may bring more
                    size = taken
                    found.append([])
                found[-1].append(index)
        return [np.array(each, np.int64) for each in found]

    def close(self) -> None:
        self._head.close()

    def _fill(self, segments: Segments, stop: Stop) -> None:
        """Load each segment to its address."""
        runs = _runs(self._pieces(segments))

        def load(run: _Run) -> None:
            stop.check()
            run.load(self._units.packs[run.pack], self._load, self._rooms)

        in_any_order(load, runs, ABREAST)

    def _pieces(self, segments: Segments) -> Iterator[tuple[int, int, int, int]]:
        columns = (segments.address, segments.offset, segments.length)
        for address, offset, length in zip(*(each.tolist() for each in columns), strict=True):
            for pack, at, start, taken in self._units.pieces(offset, length):
                yield pack, at, address + start, taken

    def _refused(self) -> MediumError:
        return MediumError(errno.EROFS, f"{self._name}: a mirror is written by its writer alone")


@dataclass(slots=True)
class _Run:
    """Pieces of a pack that are loaded at once: (offset in the pack, address, length)."""

    pack: int
    start: int
    end: int
    pieces: list[tuple[int, int, int]]

    def load(self, name: str, load: Load, rooms: Rooms) -> None:
        """Straight to where they go if they are neighbours there too."""
        if self._are_neighbours():
            load(name, self.start, memory(self.pieces[0][1], self.end - self.start))
            return
        with rooms.lent(self.end - self.start) as room:
            load(name, self.start, room.data)
            for at, address, length in self.pieces:
                memory(address, length)[:] = room.data[at - self.start : at - self.start + length]

    def _are_neighbours(self) -> bool:
        pairs = zip(self.pieces, self.pieces[1:], strict=False)
        return all(
            (at + length, address + length) == after[:2] for (at, address, length), after in pairs
        )


def _runs(pieces: Iterable[tuple[int, int, int, int]]) -> list[_Run]:
    """Pieces (pack, offset there, address, length) that are near each other, together."""
    runs: list[_Run] = []
    for pack, at, address, length in sorted(pieces):
        last = runs[-1] if runs else None
        if (
            last is None
            or last.pack != pack
            or at > last.end + _GAP
            or at + length > last.start + UNIT
        ):
            last = _Run(pack, at, at, [])
            runs.append(last)
        last.end = max(last.end, at + length)
        last.pieces.append((at, address, length))
    return runs


_NONE: Final = np.empty(0, np.int64)

_START: Final = 1 << 50
"""Where the bytes of storages begin: records are in memory, and end long before."""
