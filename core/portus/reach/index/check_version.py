"""The second half of a check: the record and contents of one version, and then its bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from portus.engine.copying.local import check as digests_of
from portus.engine.copying.segments import Column, Sources, Stop, unit_spans
from portus.engine.format.checksum import UNIT, unit_counts
from portus.engine.media.base import Medium
from portus.engine.media.read_file import Pace
from portus.errors import BusyError, CorruptionError, MediumError
from portus.reach.format.layout import EXTENT, UNIT_DIGEST, RecordKind
from portus.reach.index.catalogue import require_inside
from portus.reach.index.check_catalogue import ReachableVersions
from portus.reach.index.check_contents import NamedTensor, check_contents
from portus.reach.index.findings import Finding, Findings, Severity
from portus.reach.index.in_place import InPlaceReader
from portus.reach.index.log import entries, read_log
from portus.reach.index.records import VersionEntry, VersionRecord, decode_version

Damage = tuple[str, str]
"""The place of a damaged unit, and what was found there."""

_BATCH: Final = 64 << 20
"""Bytes to read together, and so between two reports of progress; with a pace a unit."""

DAMAGED_MAX: Final = 20
"""Damaged units of one version that are named one by one."""


@dataclass(frozen=True, slots=True)
class CheckedVersion:
    """A version whose record could be read. ``tensors``: those that its contents name."""

    record: VersionRecord
    tensors: Sequence[NamedTensor] = ()

    def storage_name(self, index: int) -> str:
        """Return the name of a storage, for people: its index, and the tensors in it."""
        names = dict.fromkeys(each.name for each in self.tensors if each.storage == index)
        return f"storage {index} ({' = '.join(names)})"


def check_version(standing: ReachableVersions, entry: VersionEntry) -> CheckedVersion | None:
    """Check all but the bytes of a pinned version. Return None if its record is lost, or reaches
    out of the pool."""
    info, findings, medium = entry.info, standing.findings, standing.medium
    where, size = f"version {info.id} of {info.model!r}", standing.sizes[info.id]
    name = f"record of {where}"
    read = standing.record(entry.pointer, RecordKind.VERSION, name, size, info.commit)
    if read is None:
        return None
    commit, payload = read
    try:
        record = decode_version(payload)
    except CorruptionError as error:
        findings.add(Finding("F11", where, "rows that fit together", str(error)))
        return None
    same = record.info == info and commit == info.commit
    wanted, found = f"{info}, by {info.commit}", f"{record.info}, by {commit}"
    findings.require(same, "F10", where, wanted, found)
    try:
        # A truncated pool is smaller than its root says.
        require_inside(medium, record, min(size, medium.size))
    except CorruptionError as error:
        findings.add(Finding("F5", where, "bytes that its root may reach", str(error)))
        return None
    tensors: Sequence[NamedTensor] = ()
    with findings.note("F14", f"contents of {where}", "those of its storages"):
        tensors = check_contents(record.contents, record.length.tolist())
    return CheckedVersion(record, tensors) if same else None


class Bytes:
    """Verifies the bytes of versions, each storage once, however many versions share it. The
    findings name a damaged one for each of them."""

    def __init__(self, medium: Medium, findings: Findings, pace: Pace | None = None) -> None:
        """pace: a limit of the rate; None: no limit."""
        self._medium: Final = medium
        self._findings: Final = findings
        self._pace: Final = pace
        self._read: Final[dict[bytes, list[Damage]]] = {}
        """The storages that were read, and their damage."""
        self._holders: Final[dict[int, int]] = {}
        """The newest version of each storage that is changed in place, by its first byte."""

    def plan(self, versions: Iterable[VersionRecord]) -> int:
        """Return the bytes to read, of all versions, before any is read. Of those with the same
        storage that is changed in place, only the newest can be read; the others are lost."""
        sizes: dict[bytes, int] = {}
        for each in versions:
            sizes.update(zip(_keys(each), each.length.tolist(), strict=True))
            for offset in _in_place(each).values():
                self._holders[offset] = max(self._holders.get(offset, 0), each.info.id)
        return sum(sizes.values())

    def verify(self, seen: CheckedVersion) -> Iterator[int]:
        """Read what was not read before of a pinned version. Yield the bytes as they are done."""
        record, keys, placed = seen.record, _keys(seen.record), _in_place(seen.record)
        fresh = list[int]()
        for index, key in enumerate(keys):
            if key not in self._read:
                self._read[key] = []
                fresh.append(index)
        units = _Units(self._medium, record, [i for i in fresh if i not in placed])
        for batch in units.batches(_BATCH if self._pace is None else UNIT):
            size = int(units.length[batch].sum())
            self._wait(size)
            for index, damage in units.damage(batch):
                self._read[keys[index]].append(damage)
            yield size
        yield sum(int(record.length[i]) for i in fresh if i in placed)
        damaged = [(i, each) for i, key in enumerate(keys) for each in self._read[key]]
        for index, offset in placed.items():
            if self._holders.get(offset, 0) <= record.info.id:
                damaged += [(index, ("", why)) for why in self._read_in_place(seen, index)]
        for index, (place, why) in damaged[:DAMAGED_MAX]:
            where = f"{record.name}, {seen.storage_name(index)}{place}"
            self._findings.add(Finding("V4", where, "the bytes that were saved", why))
        if len(damaged) > DAMAGED_MAX:
            more = f"{len(damaged) - DAMAGED_MAX} more damaged units"
            self._findings.add(Finding("V4", record.name, "the bytes that were saved", more))

    def verify_log(self, seen: CheckedVersion) -> None:
        """Check the entries of a pinned version's log, and the contents in them."""
        record, contents = seen.record, b""
        if record.log is None:
            return
        where = f"log of {record.name}"
        self._wait(record.log.extent.length)
        with self._findings.note("F8", where, "the entries that were committed"):
            for entry in entries(self._medium, record):
                contents = entry.contents or contents
        if contents:
            with self._findings.note("F14", f"contents of {where}", "those of its storages"):
                check_contents(contents, record.length.tolist())

    def _wait(self, size: int) -> None:
        if self._pace is not None:
            self._pace.take(size)

    def _read_in_place(self, seen: CheckedVersion, index: int) -> Iterator[str]:
        """Read a storage that is changed in place, with the help of the log. Yield the damage."""
        medium, record = self._medium, seen.record
        try:
            for unit in InPlaceReader(medium, record, read_log(medium, record)).units(index):
                self._wait(len(unit))
        except BusyError:
            # If there is an error, the version that has it now may be lost.
            if all(each.severity is not Severity.ERROR for each in self._findings.all):
                raise
        except (CorruptionError, MediumError) as error:
            yield str(error)


class _Units:
    """The units of some storages of a version, in columns."""

    def __init__(self, medium: Medium, record: VersionRecord, storages: list[int]) -> None:
        chosen = np.array(storages, np.int64)
        start, self.length = unit_spans(np.zeros_like(chosen), record.length[chosen])
        self._medium: Final = medium
        self._record: Final = record
        self._digests: Final = record.digests(chosen)
        storage = np.repeat(chosen, unit_counts(record.length[chosen]))
        self._columns: Final = (storage, start, self.length)

    def batches(self, size: int) -> list[Column]:
        """Return the units in batches of about ``size`` bytes."""
        begin = np.cumsum(self.length) - self.length
        cuts = np.flatnonzero(np.diff(begin // size)) + 1
        return [each for each in np.split(np.arange(len(begin)), cuts) if len(each)]

    def damage(self, units: Column) -> Iterator[tuple[int, Damage]]:
        """Read some units; yield the storage and the damage of each one that is damaged."""
        offset, held = self._record.places(*(each[units] for each in self._columns))
        sources = Sources(
            address=np.zeros_like(units),
            length=self.length[units],
            extent_offset=offset,
            extent_length=held,
        )
        bad, why = units, "others"
        try:
            found = digests_of(self._medium, sources, Stop())
            bad = units[(found != self._digests[units]).any(axis=1)]
        except MediumError as error:
            if len(units) > 1:
                for half in np.array_split(units, 2):
                    yield from self.damage(half)
                return
            why = f"bytes that cannot be read: {error}"
        for unit in bad.tolist():
            storage, start, length = (int(each[unit]) for each in self._columns)
            at, _ = self._record.places(*(each[[unit]] for each in self._columns))
            place = "".join(f", at byte {each}" for each in at[:1])
            yield storage, (f", its bytes {start} to {start + length}{place}", why)


def _in_place(record: VersionRecord) -> dict[int, int]:
    """Return the storages that are changed in place, each with its first byte in the pool."""
    placed = () if record.log is None else record.log.in_place
    return {each.storage: record.storage_extents(each.storage)[0].offset for each in placed}


def _keys(record: VersionRecord) -> list[bytes]:
    """Return a key for each storage: the places of its bytes, and their digests."""
    extents, units = record.extents.tobytes(), record.units.tobytes()
    ends = np.append(record.first_extent, len(record.extents)) * EXTENT.size
    unit_ends = np.append(record.first_unit, len(record.units)) * UNIT_DIGEST.size
    return [
        extents[first:end] + units[unit:unit_end]
        for (first, end), (unit, unit_end) in zip(
            itertools.pairwise(ends.tolist()), itertools.pairwise(unit_ends.tolist()), strict=True
        )
    ]
