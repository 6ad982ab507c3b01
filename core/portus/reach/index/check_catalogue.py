"""The first half of a check: the fixed pages, the root slots, and the catalogues of both roots."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError, PortusError, StaleError
from portus.reach.format.layout import (
    DATA_START,
    HEADER,
    HOLDER_OFFSET,
    HOLDER_SIZE,
    SLOT,
    SLOT_OFFSETS,
    VERSION_ID_MAX,
    RecordKind,
)
from portus.reach.index.catalogue import Catalogue, read_catalogue
from portus.reach.index.findings import Finding, Findings, Severity
from portus.reach.index.records import Pointer, VersionEntry, decode_catalogue, read_whole
from portus.reach.index.roots import Root, Slot, find_uuid, newest_roots, read_slots
from portus.reach.media.pool import Locks

_RETRIES_MAX: Final = 1000
"""Times that something is read again because a writer committed meanwhile, at most."""

_TORN_RETRIES: Final = 3
_TORN_PAUSE_S: Final = 0.002
"""Times and seconds to read a torn slot again: a writer may be storing it."""


@dataclass(frozen=True, slots=True)
class ReachedRun:
    """A run of bytes that is in no storage, such as a record, and the commit that wrote it."""

    extent: Extent
    commit: int
    what: str


def check_fixed_pages(medium: Medium, findings: Findings) -> bytes | None:
    """Check pages 0 to 7, except what the root slots hold. Return the pool's uuid, or None if it is
    unknown.

    Raises ``UsageError`` if a newer Portus wrote the pool, and ``MediumError``.
    """
    if medium.size < DATA_START:
        wanted = f"{DATA_START} bytes or more"
        findings.add(Finding("F1", medium.info.name, wanted, f"{medium.size}"))
        return None
    pages = load(medium, 0, DATA_START)
    holder = pages[HOLDER_OFFSET : HOLDER_OFFSET + HOLDER_SIZE].split(b"\0")[0]
    used = dict.fromkeys(SLOT_OFFSETS, SLOT.size) | {HOLDER_OFFSET: len(holder)}
    for start in range(0, DATA_START, PAGE):
        rest = pages[start + used.get(start, 0) : start + PAGE]
        _check_padding(findings, f"page {start // PAGE}", rest)
    uuid = find_uuid(read_slots(medium))
    for offset in SLOT_OFFSETS if uuid is None else ():
        where = f"root slot at byte {offset}"
        findings.add(Finding("F1", where, "its magic and digest", "something else"))
    return uuid


def _check_padding(findings: Findings, where: str, data: bytes) -> None:
    place = len(data) - len(data.lstrip(b"\0"))
    if place < len(data):
        where = f"{where}, byte {place} of {len(data)} of padding"
        findings.add(Finding("F2", where, "0", f"{data[place]}"))


class ReachableVersions:
    """Everything that the intact roots reach, read while they did not change. ``slots``: the
    contents of all places of slots. ``sizes``: for each version, the least size of a root that
    reaches it. ``runs``: of all records that were looked at."""

    def __init__(self, medium: Medium, locks: Locks, uuid: bytes, findings: Findings) -> None:
        """Read the slots and the catalogues. Raises ``MediumError`` if the slots cannot be read."""
        self.medium: Final = medium
        self.findings = findings
        self._locks: Final = locks
        self.slots = settled_slots(medium)
        self.entries: Final[dict[int, VersionEntry]] = {}
        self.sizes: Final[dict[int, int]] = {}
        self.runs: Final[dict[ReachedRun, None]] = {}
        self._uuid: Final = uuid
        for root in self._check_slots():
            if not root.is_first:
                self._list(root)
        self._there = {*self.entries}

    @contextlib.contextmanager
    def pin(self, version: int) -> Iterator[bool]:
        """Pin a version and yield True, or False if no root reaches it now or its id is wrong."""
        if not 0 < version < VERSION_ID_MAX:
            yield False
            return
        self._locks.pin(version)
        try:
            # After the pin, as in ``PoolReader.pin``: a writer that asked before has released
            # it in a slot by now.
            yield self._is_there(version)
        finally:
            self._locks.unpin(version)

    def _is_there(self, version: int) -> bool:
        for _ in range(_RETRIES_MAX):
            slots = settled_slots(self.medium, self.slots)
            if slots == self.slots:
                return version in self._there
            self._there, self.slots = set(), slots
            for root in newest_roots(slots, self._uuid):
                with contextlib.suppress(CorruptionError):  # damage was reported before
                    self._there |= read_catalogue(self.medium, root).ids()
        raise _too_busy(self.medium)

    def record(
        self, pointer: Pointer, kind: RecordKind, where: str, size: int, commit: int
    ) -> tuple[int, memoryview] | None:
        """Return the commit that wrote the record at ``pointer``, and its payload; None if neither
        it nor a copy is intact. Add findings for damage. size: of the pool. commit: that of the
        pointer."""
        whole: dict[int, tuple[int, memoryview]] = {}
        failed: list[tuple[str, PortusError]] = []
        for at in pointer.extents:
            name = f"{where} at byte {at.offset}"
            if at.offset < DATA_START or at.end > size:
                place = f"bytes {DATA_START} to {size}"
                self.findings.add(Finding("F5", name, place, f"up to {at.end}"))
                continue
            try:
                record = read_whole(self.medium, pointer, kind, at.offset)
                padding = load(self.medium, at.end, min(-at.end % 8, self.medium.size - at.end))
            except PortusError as error:
                failed.append((name, error))
                continue
            header = HEADER.unpack(record)
            uuid, wrote = cast(bytes, header["uuid"]), cast(int, header["commit"])
            self.findings.require(
                uuid == self._uuid and 1 <= wrote <= commit, "F6", name,
                f"pool {self._uuid.hex()}, a commit not after its pointer's",
                f"pool {uuid.hex()}, commit {wrote}",
            )  # fmt: skip
            _check_padding(self.findings, f"{name}, after its end", padding)
            whole[at.offset] = wrote, record[HEADER.size :]
        copy = "".join(f" (its copy at byte {offset} is whole)" for offset in whole)
        for name, why in failed:
            self.findings.add(Finding("F6", name, "a whole record of its kind", f"{why}{copy}"))
        for found in whole.values():
            self.runs.update((ReachedRun(at, found[0], where), None) for at in pointer.extents)
            return found
        return None

    def _check_slots(self) -> list[Root]:
        findings, slots = self.findings, self.slots
        roots = newest_roots(slots, self._uuid)
        for number, (slot, copy) in enumerate(zip(slots, [*slots[2:], *slots[:2]], strict=True)):
            where = f"root slot {number % 2} at byte {SLOT_OFFSETS[number]}"
            if slot is not None:
                good = slot.uuid == self._uuid and slot.root.slot == number % 2
                wanted = f"pool {self._uuid.hex()}, parity {number % 2}"
                found = f"pool {slot.uuid.hex()}, commit {slot.root.sequence}"
                findings.require(good, "F3", where, wanted, found)
                continue
            wanted, severity = "a whole one", Severity.MEND
            found = (
                "a torn one; its copy is whole and nothing is lost: the next process that opens "
                "the pool for writing repairs it, and so does `portus rescue --in-place`"
            )
            if copy is None:
                wanted += " (it may be torn after a crash, until the next commit)"
                found, severity = "a torn one, and so is its copy", Severity.WARNING
            findings.add(Finding("F1", where, wanted, found, severity))
        if all(slots) and slots[:2] != slots[2:]:
            wanted = "equal copies (they may differ after a crash)"
            findings.add(Finding("F1", "root slots", wanted, "others", Severity.WARNING))
        findings.require(bool(roots), "F1", "root slots", "at least one whole one", "none")
        for newer, older in itertools.pairwise(roots):
            follows = newer.sequence == older.sequence + 1 and newer.size >= older.size
            findings.require(
                follows and newer.next_version >= older.next_version, "F4",
                f"roots of commits {older.sequence} and {newer.sequence}",
                f"a root that follows {older}", f"{newer}",
            )  # fmt: skip
        for root in roots:
            where, size = f"root of commit {root.sequence}", self.medium.size
            findings.require(root.size <= size, "F5", where, f"size up to {size}", f"{root.size}")
        return roots

    def _list(self, root: Root) -> None:
        """Add all that a root reaches."""
        findings, name = self.findings, "catalogue"
        read = self.record(root.catalogue, RecordKind.CATALOGUE, name, root.size, root.sequence)
        if read is None:
            return
        commit, payload = read
        entries: Sequence[VersionEntry] = ()
        with findings.note("F7", name, "one that can be read"):
            entries = decode_catalogue(payload)
        for model, own in Catalogue.of(root, entries).models.items():
            numbers = [(each.info.commit, each.info.id) for each in own]
            follows = all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(numbers))
            findings.require(
                follows, "F7", f"{name}, model {model!r}", "ascending commits and ids",
                f"{numbers!r:.200}",
            )  # fmt: skip
        for what in ("id", "token"):
            counts = Counter(getattr(each.info, what) for each in entries)
            twice = [each for each, count in counts.items() if count > 1]
            findings.require(not twice, "F9", name, f"each {what} once", f"{twice!r:.200} twice")
        for entry in entries:
            info = entry.info
            where = f"version {info.id} of {info.model!r}"
            findings.require(
                1 <= info.id < root.next_version and 1 <= info.commit <= commit, "F9", where,
                f"id below {root.next_version}, commit up to {commit}",
                f"id {info.id}, commit {info.commit}",
            )  # fmt: skip
            same = self.entries.setdefault(info.id, entry) == entry
            findings.require(same, "F10", where, "the same in both roots", "two that differ")
            self.sizes[info.id] = root.size  # of the older one last, which is smaller


def check_catalogues(
    medium: Medium, locks: Locks, uuid: bytes, findings: Findings
) -> ReachableVersions:
    """Return all that both roots reach, read again if a writer commits meanwhile.

    Raises ``MediumError`` if the slots cannot be read, ``StaleError`` if commits never pause.
    """
    for _ in range(_RETRIES_MAX):
        standing = ReachableVersions(medium, locks, uuid, Findings())
        if settled_slots(medium, standing.slots) == standing.slots:
            for each in standing.findings.all:
                findings.add(each)
            standing.findings = findings
            return standing
    raise _too_busy(medium)


def _too_busy(medium: Medium) -> StaleError:
    """Return the error for commits that never pause."""
    return StaleError(f"{medium.info.name}: commits came faster than they could be read; try again")


def settled_slots(medium: Medium, seen: Sequence[Slot | None] = ()) -> list[Slot | None]:
    """Return the contents of all places of root slots. Wait for one that is being stored, unless
    they are the same as ``seen``, which was waited for before."""
    for _ in range(_TORN_RETRIES):
        slots = read_slots(medium)
        if (all(slots) and slots[:2] == slots[2:]) or slots == seen:
            break
        time.sleep(_TORN_PAUSE_S)
    return slots


def load(medium: Medium, offset: int, length: int) -> bytes:
    """Return bytes of the medium."""
    data = bytearray(length)
    medium.load(offset, memoryview(data))
    return bytes(data)
