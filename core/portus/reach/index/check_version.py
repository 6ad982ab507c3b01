"""The second half of a check: the record and contents of one version, and then its bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.engine.copying.local import check as digests_of
from portus.engine.copying.segments import Digests, Sources, Stop
from portus.engine.format.checksum import UNIT, digest, unit_counts
from portus.engine.media.read_file import Pace
from portus.engine.spec import Extent
from portus.errors import BusyError, CorruptionError, MediumError
from portus.reach.format.layout import DATA_START, UNIT_DIGEST, RecordKind
from portus.reach.index.check_catalogue import (
    Bounds,
    FramedRecord,
    ReachableVersions,
    ReachedRun,
    Subject,
    frame,
)
from portus.reach.index.check_contents import Contents, check_contents, read_contents
from portus.reach.index.findings import Severity
from portus.reach.index.in_place import InPlaceReader
from portus.reach.index.log import Entry, entries, read_log
from portus.reach.index.records import (
    Rows,
    VersionEntry,
    VersionRecord,
    decode_version,
)

Column = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

Damage = tuple[int, str, str]
"""A damaged unit: the index of its storage, its place, and what was found there."""

BATCH: Final = 64 << 20
"""Bytes to read together, and so between two reports of progress."""

DAMAGED_MAX: Final = 20
"""Damaged units of one version that are named one by one."""


@dataclass(frozen=True, slots=True)
class CheckedVersion:
    """A version whose record could be read.

    ``contents``: None if they are not valid. ``runs``: those of its record and its log.
    ``sound``: for each storage, whether all its extents are within bounds.
    """

    entry: VersionEntry
    record: VersionRecord
    contents: Contents | None
    runs: Sequence[ReachedRun]
    sound: Flags

    @property
    def name(self) -> str:
        """The version's id, model and step in words, for findings."""
        info = self.entry.info
        return f"version {info.id} of {info.model!r} (step {info.step})"

    def storage_name(self, index: int) -> str:
        """Return the name of a storage, for people: its index, and the tensors in it."""
        named = () if self.contents is None else self.contents.needed
        names = dict.fromkeys(name for name, storage, _ in named if storage == index)
        return f"storage {index} ({' = '.join(names)})"


class Versions:
    """Checks versions one after another."""

    def __init__(self, subject: Subject, standing: ReachableVersions) -> None:
        self._subject: Final = subject
        self._findings: Final = subject.findings
        self._standing: Final = standing

    def look(self, entry: VersionEntry) -> CheckedVersion | None:
        """Check all but the bytes of a pinned version. Return None if its record is lost."""
        info = entry.info
        where = f"version {info.id} of {info.model!r}"
        bounds = Bounds(self._standing.bounds[info.id], info.commit)
        found = frame(
            self._subject, entry.pointer, RecordKind.VERSION, f"record of {where}", bounds
        )
        if found is None:
            return None
        try:
            record = decode_version(found.payload)
        except CorruptionError as error:
            self._findings.error("F11", where, "rows that fit together", str(error))
            return None
        self._check_head(where, entry, record, found)
        self._check_rows(where, record)
        # A truncated pool is smaller than its root says.
        size = min(bounds.size, self._subject.medium.size)
        sound = self._check_places(where, record, size)
        contents = read_contents(self._findings, f"contents of {where}", record.contents)
        if contents is not None:
            check_contents(self._findings, where, contents, record.storages)
        runs = [*found.runs, *self._check_log(where, record, size)]
        return CheckedVersion(entry, record, contents, runs, sound)

    def _check_head(
        self, where: str, entry: VersionEntry, record: VersionRecord, found: FramedRecord
    ) -> None:
        same = record.info == entry.info and found.commit == entry.info.commit
        self._findings.require(same, "F10", where, f"{entry.info}", f"{record.info}")

    def _check_rows(self, where: str, record: VersionRecord) -> None:
        findings, storages = self._findings, record.storages
        size = int(storages["length"].sum())
        findings.require(
            size == record.info.size, "F11", where, f"size {record.info.size}", f"{size}"
        )
        empty = int((record.extents["length"] == 0).sum())
        findings.require(not empty, "F11", where, "no empty extent", f"{empty}")
        born = storages["born"].astype(np.int64)
        good = bool(np.all((born >= 1) & (born <= record.info.commit)))
        findings.require(good, "F11", where, f"born from 1 to {record.info.commit}", "others")
        distinct = len(np.unique(record.extents))
        findings.require(
            distinct == len(record.extents), "F13", where, "each extent once",
            f"{len(record.extents) - distinct} again",
        )  # fmt: skip

    def _check_places(self, where: str, record: VersionRecord, size: int) -> Flags:
        offset, length = record.extents["offset"], record.extents["length"]
        inside = (offset >= DATA_START) & (offset <= size) & (offset + length <= size)
        if not inside.all():
            row = record.extents[np.flatnonzero(~inside)[0]]
            self._findings.error(
                "F5", f"{where}, extent at byte {row['offset']}",
                f"bytes {DATA_START} to {size}", f"{row['length']} bytes from there",
            )  # fmt: skip
        outside = np.zeros(len(record.storages), np.int64)
        np.add.at(outside, owners(record.storages["extents"]), ~inside)
        sound: Flags = outside == 0
        return sound

    def _check_log(self, where: str, record: VersionRecord, size: int) -> list[ReachedRun]:
        log = record.log
        if log is None:
            return []
        good = 1 <= log.born <= record.info.commit and log.extent.length > 0
        self._findings.require(
            good, "F8", where, f"a log born from 1 to {record.info.commit}, with pages", f"{log}"
        )
        if log.extent.offset < DATA_START or log.extent.end > size:
            place = f"bytes {DATA_START} to {size}"
            self._findings.error("F5", f"log of {where}", place, f"{log.extent}")
        return [ReachedRun(log.extent, log.born, f"log of {where}")]


def owners(counts: Rows) -> Column:
    """Return index 0 as often as the first count says, then index 1, and so on."""
    column: Column = np.repeat(np.arange(len(counts)), counts.astype(np.int64))
    return column


class Bytes:
    """Verifies the bytes of versions, each storage once, however many versions share it. A damaged
    one is read again for each of them, so that the findings name all."""

    def __init__(self, subject: Subject, batch: int = BATCH, pace: Pace | None = None) -> None:
        """batch: bytes to read together, one unit at least. pace: a limit of the rate; None: no
        limit."""
        self._medium: Final = subject.medium
        self._findings: Final = subject.findings
        self._batch: Final = batch
        self._pace: Final = pace
        self._known: Final[set[bytes]] = set()
        self._bad: Final[set[bytes]] = set()
        self._holders: Final[dict[int, int]] = {}
        """The newest version of each storage that is changed in place, by its first byte."""

    def note(self, versions: Iterable[CheckedVersion]) -> None:
        """Record all versions before any is read. Of those with the same storage that is changed in
        place, only the newest can be read; the others are lost."""
        for each in versions:
            for offset in _places(each.record).values():
                before = self._holders.get(offset, 0)
                self._holders[offset] = max(before, each.record.info.id)

    def verify_log(self, seen: CheckedVersion) -> None:
        """Check the entries of a pinned version's log: they follow each other, and each patches
        bytes of the pool that belonged to a storage."""
        log = seen.record.log
        if log is None:
            return
        where = f"log of {seen.name}"
        self._reading(log.extent.length)
        contents = b""
        try:
            for entry in entries(self._medium, seen.record):
                contents = entry.contents or contents
                outside = [
                    each
                    for each in _extents_of_entry(entry)
                    if each.offset < DATA_START or each.end > self._medium.size
                ]
                self._findings.require(
                    not outside and entry.commit <= seen.record.info.commit, "F8",
                    f"{where}, entry {entry.number}", "patches of what was committed before",
                    f"commit {entry.commit}, {outside[:1]}",
                )  # fmt: skip
        except (CorruptionError, MediumError) as error:
            self._findings.error("V4", where, "the entries that were committed", str(error))
        read = read_contents(self._findings, where, contents) if contents else None
        if read is not None:
            check_contents(self._findings, where, read, seen.record.storages)

    def unknown(self, seen: CheckedVersion) -> Flags:
        """Return the storages that are sound and were in no version before, and remember them."""
        keys = _keys(seen.record)
        unknown = _flags(key not in self._known for key in keys) & seen.sound
        self._known.update(keys)
        return unknown

    def verify(self, seen: CheckedVersion, some: Flags) -> Iterator[int]:
        """Read the storages ``some`` of a pinned version, and those that were damaged in others.
        Yield the bytes of ``some`` as they are done."""
        keys = _keys(seen.record)
        bad_before = _flags(key in self._bad for key in keys) & seen.sound & ~some
        places = _places(seen.record)
        placed = _flags(index in places for index in range(len(some)))
        held = [i for i, at in places.items() if self._holders.get(at, 0) <= seen.record.info.id]
        damaged: list[Damage] = []
        yield from self._read(_Stream(seen, some & ~placed), damaged)
        for _ in self._read(_Stream(seen, bad_before & ~placed), damaged):
            continue
        damaged += self._read_in_place(seen, [i for i in held if seen.sound[i]])
        yield int(seen.record.storages["length"][some & placed].sum())
        self._bad.update(keys[index] for index, _, _ in damaged)
        for _, where, what in damaged[:DAMAGED_MAX]:
            self._findings.error("V4", f"{seen.name}, {where}", "the bytes that were saved", what)
        if len(damaged) > DAMAGED_MAX:
            more = f"{len(damaged) - DAMAGED_MAX} more damaged units"
            self._findings.error("V4", seen.name, "the bytes that were saved", more)

    def _read(self, stream: _Stream, damaged: list[Damage]) -> Iterator[int]:
        for first, after in stream.batches(self._batch):
            size = int(stream.lengths[first:after].sum())
            self._reading(size)
            damaged += self._find_damage(stream, first, after)
            yield size

    def _reading(self, size: int) -> None:
        if self._pace is not None:
            self._pace.take(size)

    def _read_in_place(self, seen: CheckedVersion, storages: list[int]) -> list[Damage]:
        """Read storages that are changed in place, with the help of the log."""
        damaged: list[Damage] = []
        for index in storages:
            try:
                there = InPlaceReader(
                    self._medium, seen.record, read_log(self._medium, seen.record)
                )
                for unit in there.units(index):
                    self._reading(len(unit))
            except BusyError:
                errors = (each for each in self._findings.all if each.severity is Severity.ERROR)
                if not any(errors):  # else the version that has them now may be lost
                    raise
            except (CorruptionError, MediumError) as error:
                damaged.append((index, seen.storage_name(index), str(error)))
        return damaged

    def _find_damage(self, stream: _Stream, first: int, after: int) -> list[Damage]:
        try:
            found = digests_of(self._medium, stream.part(first, after), Stop())
        except MediumError as error:
            if after - first > 1:
                middle = (first + after) // 2
                return self._find_damage(stream, first, middle) + self._find_damage(
                    stream, middle, after
                )
            return [(*stream.where(first), f"bytes that cannot be read: {error}")]
        bad = np.flatnonzero(np.any(found != stream.digests[first:after], axis=1))
        return [(*stream.where(first + index), "others") for index in bad.tolist()]


def _places(record: VersionRecord) -> dict[int, int]:
    """Return the storages that are changed in place, each with its first byte in the pool."""
    placed = () if record.log is None else record.log.in_place
    return {each.storage: record.storage_extents(each.storage)[0].offset for each in placed}


def _extents_of_entry(entry: Entry) -> list[Extent]:
    """Return the extents of the first and the last patch of each bunch."""
    found = []
    for bunch in entry.bunches:
        if len(bunch.offset):
            ends = (int(bunch.offset.min()), int(bunch.offset.max()))
            found += [Extent(offset, bunch.data.shape[1]) for offset in ends]
    return found


def _flags(values: Iterable[bool]) -> Flags:
    return np.fromiter(values, np.bool_)


class _Stream:
    """The units of some storages of a version, end to end."""

    def __init__(self, seen: CheckedVersion, some: Flags) -> None:
        record, storages = seen.record, seen.record.storages
        self._seen: Final = seen
        length = storages["length"].astype(np.int64)
        counts = np.maximum(1, -(-length // UNIT))
        owner = np.repeat(np.arange(len(storages)), counts)
        rank = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
        chosen = some[owner]
        self._owner: Final = owner[chosen]
        self._rank: Final = rank[chosen]
        self.lengths: Final[Column] = np.minimum(length[owner] - rank * UNIT, UNIT)[chosen]
        units = np.ascontiguousarray(record.units[chosen])
        self.digests: Final[Digests] = units.view(np.uint8).reshape(-1, UNIT_DIGEST.size)
        extents = record.extents[some[owners(storages["extents"])]]
        self._offset: Final[Column] = extents["offset"].astype(np.int64)
        self._length: Final[Column] = extents["length"].astype(np.int64)
        self._extent_end: Final[Column] = np.cumsum(self._length)
        self._unit_end: Final[Column] = np.cumsum(self.lengths)

    def batches(self, size: int) -> Iterator[tuple[int, int]]:
        """Return runs of units of about ``size`` bytes: the first, and the one after the last."""
        cuts = np.flatnonzero(np.diff((self._unit_end - self.lengths) // size)) + 1
        places = [0, *cuts.tolist(), len(self.lengths)]
        return itertools.pairwise(places) if len(self.lengths) else iter(())

    def part(self, first: int, after: int) -> Sources:
        """Return units ``first`` to before ``after``, each as a source of its own."""
        start = int(self._unit_end[first] - self.lengths[first])
        end = int(self._unit_end[after - 1])
        low = int(np.searchsorted(self._extent_end, start, "right"))
        high = int(np.searchsorted(self._extent_end - self._length, end, "left"))
        begin = np.maximum(self._extent_end[low:high] - self._length[low:high], start)
        stop = np.minimum(self._extent_end[low:high], end)
        shift = self._offset[low:high] - (self._extent_end - self._length)[low:high]
        return Sources(
            address=np.zeros(after - first, np.int64),
            length=self.lengths[first:after],
            extent_offset=begin + shift,
            extent_length=stop - begin,
        )

    def where(self, unit: int) -> tuple[int, str]:
        """Return the index of the storage of a unit, and a description of its place, for people."""
        index, start = int(self._owner[unit]), int(self._rank[unit]) * UNIT
        sources = self.part(unit, unit + 1)
        place = f", at byte {sources.extent_offset[0]}" if len(sources.extent_offset) else ""
        end = start + int(self.lengths[unit])
        return index, f"{self._seen.storage_name(index)}, its bytes {start} to {end}{place}"


def _keys(record: VersionRecord) -> list[bytes]:
    """Return a key for each storage: the place of its bytes and their digest."""
    storages, extents = record.storages, record.extents
    first = record.first_extent
    counts = storages["extents"].astype(np.int64)
    keys = np.zeros(len(storages), [("place", "V16"), ("digest", "V16")])
    keys["digest"] = record.units["digest"][record.first_unit]
    units = unit_counts(record.length)
    for index in np.flatnonzero(units > 1).tolist():
        keys["digest"][index] = np.void(digest(record.digests(np.array([index])).tobytes()))
    raw = np.ascontiguousarray(extents).view("V16").reshape(-1)
    single = counts == 1
    keys["place"][single] = raw[first[single]]
    for index in np.flatnonzero(counts > 1).tolist():
        own = extents[first[index] : first[index] + counts[index]]
        keys["place"][index] = np.void(digest(own.tobytes()))
    found: list[bytes] = keys.view("V32").tolist()
    return found
