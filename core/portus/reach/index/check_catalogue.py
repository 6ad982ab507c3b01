"""The first half of a check: the fixed pages, the root slots, and the catalogues of both roots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np

from portus.engine.format.checksum import digest
from portus.engine.format.record import Record
from portus.engine.media.base import Medium
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, MediumError, PortusError, StaleError
from portus.reach.format.layout import (
    COPY,
    DATA_START,
    HEADER,
    HOLDER_OFFSET,
    HOLDER_SIZE,
    INDEX_ENTRY,
    INEXACT,
    MAGIC,
    RECORD_MAGIC,
    ROOT_MAGIC,
    SLOT,
    SLOT_OFFSETS,
    SUPERBLOCK,
    SUPERBLOCK_OFFSETS,
    TABLE_ENTRY,
    RecordKind,
)
from portus.reach.index.findings import Findings
from portus.reach.index.records import (
    NOWHERE,
    Copy,
    Pointer,
    VersionEntry,
    decode_copies,
    decode_index,
    decode_table,
    encode_metrics,
    read_whole,
)
from portus.reach.index.roots import Root, read_roots, read_superblock, whole_superblock

_RETRIES_MAX: Final = 1000
"""Times that the catalogues are read again because a writer committed meanwhile, at most."""

_TORN_RETRIES: Final = 3
_TORN_PAUSE_S: Final = 0.002
"""Times and seconds to read a torn slot again: a writer may be storing it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The pool that is checked, and its findings so far. ``copies``: intact copies of records, by
    digest."""

    medium: Medium
    uuid: bytes
    findings: Findings
    copies: dict[bytes, Pointer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FramedRecord:
    """An intact record: the commit that wrote it, and its payload."""

    commit: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class ReachedRun:
    """A run of bytes that a record or a version reaches, and the commit that wrote it."""

    offset: int
    length: int
    commit: int
    what: str


@dataclass(slots=True)
class ReachableVersions:
    """Everything that the intact roots reach, read while they did not change.

    ``bounds``: for each version, the least size of a root that reaches it.
    """

    slots: bytes
    roots: list[Root] = field(default_factory=list)
    entries: dict[int, VersionEntry] = field(default_factory=dict)
    bounds: dict[int, int] = field(default_factory=dict)
    records: dict[Pointer, ReachedRun] = field(default_factory=dict)
    copies: dict[bytes, Pointer] = field(default_factory=dict)


def check_fixed_pages(medium: Medium, findings: Findings) -> bytes | None:
    """Check pages 0 to 7, except the root slots. Return the pool's uuid, or None if it is unknown.

    Raises ``UsageError`` if a newer Portus wrote the pool, and ``MediumError``.
    """
    if medium.size < DATA_START:
        findings.error("F1", medium.info.name, f"{DATA_START} bytes or more", f"{medium.size}")
        return None
    pages = load(medium, 0, DATA_START)
    copies = [pages[offset : offset + SUPERBLOCK.size] for offset in SUPERBLOCK_OFFSETS]
    whole = [_is_whole(SUPERBLOCK, copy, MAGIC) for copy in copies]
    for offset, good in zip(SUPERBLOCK_OFFSETS, whole, strict=True):
        if not good:
            say = findings.mend if any(whole) else findings.error
            say("F1", f"superblock at byte {offset}", "its magic and digest", "something else")
    if all(whole) and copies[0] != copies[1]:
        _report_difference(medium, findings)
    _check_padding(pages, findings)
    if not any(whole):
        return None
    if any(SUPERBLOCK.unpack(copies[whole.index(True)])["reserved"]):  # type: ignore[arg-type]
        findings.error("F2", "superblock", "reserved bytes of zero", "others")
    return read_superblock(medium).uuid


def _report_difference(medium: Medium, findings: Findings) -> None:
    """Report a difference between two intact copies. A writer changes feature bits in one after the
    other."""
    first, second = (whole_superblock(medium, offset) for offset in SUPERBLOCK_OFFSETS)
    assert first is not None
    assert second is not None
    if (first.uuid, first.created_ns) == (second.uuid, second.created_ns):
        found = "two with different feature bits, as after a crash; the next writer repairs it"
        findings.mend("F1", "superblock", "two equal copies", found)
    else:
        findings.error("F1", "superblock", "two equal copies", "two that differ")


def _check_padding(pages: bytes, findings: Findings) -> None:
    for offset in SUPERBLOCK_OFFSETS:
        zeros(findings, f"page {offset // PAGE}", pages[offset + SUPERBLOCK.size : offset + PAGE])
    for offset in SLOT_OFFSETS:
        zeros(findings, f"page {offset // PAGE}", pages[offset + SLOT.size : offset + PAGE])
    holder = pages[HOLDER_OFFSET : HOLDER_OFFSET + PAGE]
    text = holder[:HOLDER_SIZE].split(b"\0")[0]
    zeros(findings, f"page {HOLDER_OFFSET // PAGE}, after the text", holder[len(text) :])
    last = max(*SUPERBLOCK_OFFSETS, *SLOT_OFFSETS, HOLDER_OFFSET) + PAGE
    zeros(findings, f"pages {last // PAGE} to {DATA_START // PAGE - 1}", pages[last:DATA_START])


def zeros(findings: Findings, where: str, data: bytes | memoryview) -> None:
    """Add a finding unless ``data`` is all zero."""
    raw = bytes(data)
    if raw.strip(b"\0"):
        place = next(index for index, byte in enumerate(raw) if byte)
        findings.error(
            "F2", f"{where}, byte {place} of {len(raw)} of padding", "0", f"{raw[place]}"
        )


def check_catalogues(medium: Medium, uuid: bytes, findings: Findings) -> ReachableVersions:
    """Return all that both roots reach, read again if a writer commits meanwhile.

    Raises ``MediumError`` if the slots cannot be read, ``StaleError`` if commits never pause.
    """
    for _ in range(_RETRIES_MAX):
        fresh = Findings()
        standing = ReachableVersions(load_slots(medium))
        _check_slots(Subject(medium, uuid, fresh), standing)
        for root in standing.roots:
            _Listing(Subject(medium, uuid, fresh, standing.copies), standing, root).read()
        if load_slots(medium, standing.slots) == standing.slots:
            findings.extend(fresh)
            return standing
    raise StaleError(f"{medium.info.name}: commits came faster than they could be read; try again")


def check_root(subject: Subject, standing: ReachableVersions, root: Root) -> None:
    """Add all that another root reaches, which no slot holds."""
    standing.roots.append(root)
    _Listing(subject, standing, root).read()


def load_slots(medium: Medium, seen: bytes | None = None) -> bytes:
    """Return both root slots. Wait for one that is being stored, unless they are the same as
    ``seen``, which was waited for before."""
    for _ in range(_TORN_RETRIES):
        slots = b"".join(load(medium, offset, SLOT.size) for offset in SLOT_OFFSETS)
        if slots == seen:
            break
        if all(_is_whole(SLOT, slot, ROOT_MAGIC) or not any(slot) for slot in _split(slots)):
            break
        time.sleep(_TORN_PAUSE_S)
    return slots


def _split(slots: bytes) -> tuple[bytes, bytes]:
    return slots[: SLOT.size], slots[SLOT.size :]


def _check_slots(subject: Subject, standing: ReachableVersions) -> None:
    findings = subject.findings
    torn = [_check_slot(subject, index, slot) for index, slot in enumerate(_split(standing.slots))]
    standing.roots = read_roots(subject.medium, subject.uuid)
    first_commit_to_come = [root.is_first for root in standing.roots] == [True]
    if all(torn) and not standing.roots:
        findings.error("F3", "root slots", "at least one whole one", "both torn")
        return
    for index, (bad, slot) in enumerate(zip(torn, _split(standing.slots), strict=True)):
        if bad and not (index == 1 and first_commit_to_come and not any(slot)):
            findings.warning(
                "F3",
                f"root slot {index} at byte {SLOT_OFFSETS[index]}",
                "a whole one (it may be torn after a crash, until the next commit)",
                "a torn one" if any(slot) else "zeros",
            )
    if len(standing.roots) == 2:
        _check_order(findings, *standing.roots)
    for root in standing.roots:
        size = subject.medium.size
        where = f"root of commit {root.sequence}"
        findings.require(root.size <= size, "F5", where, f"size up to {size}", f"{root.size}")


def _check_slot(subject: Subject, index: int, slot: bytes) -> bool:
    """Return whether a slot is torn, and add a finding if it is intact and wrong."""
    if not _is_whole(SLOT, slot, ROOT_MAGIC):
        return True
    row = SLOT.unpack(slot)
    where = f"root slot {index} at byte {SLOT_OFFSETS[index]}"
    uuid, sequence = cast(bytes, row["uuid"]), cast(int, row["sequence"])
    findings = subject.findings
    findings.require(
        uuid == subject.uuid, "F3", where, f"pool {subject.uuid.hex()}", f"pool {uuid.hex()}"
    )
    findings.require(sequence % 2 == index, "F3", where, f"parity {index}", f"commit {sequence}")
    zeros(findings, where, cast(bytes, row["reserved"]))
    return False


def _check_order(findings: Findings, newer: Root, older: Root) -> None:
    where = f"roots of commits {older.sequence} and {newer.sequence}"
    findings.require(
        newer.sequence == older.sequence + 1, "F4", where, "sequences that differ by 1", "others"
    )
    for what in ("next_version", "size"):
        before, after = getattr(older, what), getattr(newer, what)
        findings.require(after >= before, "F4", where, f"{what} from {before} up", f"{after}")


class _Listing:
    """The model table and the model indices of one root."""

    def __init__(self, subject: Subject, standing: ReachableVersions, root: Root) -> None:
        self._subject: Final = subject
        self._findings: Final = subject.findings
        self._standing: Final = standing
        self._root: Final = root
        self._unique: Final[set[tuple[str, int | str]]] = set()

    def read(self) -> None:
        """Add all that the root reaches to the standing."""
        if self._root.copies != NOWHERE:
            self._read_copies()
        if self._root.table == NOWHERE:
            return
        where = "model table"
        table = self._frame(self._root.table, RecordKind.MODEL_TABLE, where, self._root.sequence)
        if table is None:
            return
        try:
            rows = decode_table(table.payload)
        except CorruptionError as error:
            self._findings.error("F7", where, "a table that can be read", str(error))
            return
        self._check_names(where, table.payload, [name for name, _ in rows])
        for name, pointer in rows:
            self._read_index(name, pointer, table.commit)

    def _read_copies(self) -> None:
        where, pointer = "copies record", self._root.copies
        found = self._frame(pointer, RecordKind.COPIES, where, self._root.sequence)
        if found is None:
            return
        try:
            copies = decode_copies(found.payload)
        except CorruptionError as error:
            self._findings.error("F16", where, "entries that can be read", str(error))
            return
        left = len(found.payload) - 8 - len(copies) * COPY.size
        self._findings.require(
            left == 0, "F16", where, "nothing behind the entries", f"{left} bytes"
        )
        for copy in copies:
            self._look_at_copy(copy, found.commit)

    def _look_at_copy(self, copy: Copy, commit: int) -> None:
        if copy.pointer in self._standing.records:
            return
        where = f"copy of a {copy.kind.name.lower().replace('_', ' ')}"
        good = 1 <= copy.commit <= commit
        self._findings.require(good, "F16", where, f"a commit up to {commit}", f"{copy.commit}")
        bounds = Bounds(self._root.size, copy.commit)
        if frame(self._subject, copy.pointer, copy.kind, where, bounds) is not None:
            place = copy.pointer
            self._standing.copies[place.digest] = place
            reached = ReachedRun(place.offset, place.length, copy.commit, where)
            self._standing.records[place] = reached

    def _check_names(self, where: str, payload: memoryview, names: list[str]) -> None:
        raw = [name.encode() for name in names]
        sorted_once = raw == sorted(set(raw))
        self._findings.require(sorted_once, "F7", where, "sorted, unique names", f"{names!r:.200}")
        start = 8 + len(names) * TABLE_ENTRY.size
        expected, found = b"".join(raw), bytes(payload[start:])
        self._findings.require(
            expected == found, "F7", where, "names end to end", "gaps, or bytes left over"
        )

    def _read_index(self, name: str, pointer: Pointer, commit: int) -> None:
        where = f"model index of {name!r}"
        index = self._frame(pointer, RecordKind.MODEL_INDEX, where, commit)
        if index is None:
            return
        try:
            entries = decode_index(index.payload)
        except CorruptionError as error:
            self._findings.error("F8", where, "an index that can be read", str(error))
            return
        _check_index_payload(self._findings, where, name, index.payload, entries)
        self._check_entries(where, entries, index.commit)
        for entry in entries:
            self._add(entry)

    def _check_entries(self, where: str, entries: Sequence[VersionEntry], commit: int) -> None:
        commits = [entry.info.commit for entry in entries]
        ids = [entry.info.id for entry in entries]
        self._findings.require(bool(entries), "F8", where, "one version at least", "none")
        for what, numbers in (("commits", commits), ("ids", ids)):
            ascending = numbers == sorted(set(numbers))
            self._findings.require(ascending, "F8", where, f"ascending {what}", f"{numbers!r:.200}")
        if commits and max(commits) > commit:
            self._findings.error("F6", where, f"versions up to commit {commit}", f"{max(commits)}")

    def _add(self, entry: VersionEntry) -> None:
        info, root = entry.info, self._root
        where = f"version {info.id} of {info.model!r}"
        good = 1 <= info.id < root.next_version
        self._findings.require(good, "F9", where, f"id below {root.next_version}", f"{info.id}")
        self._findings.require(
            1 <= info.commit <= root.sequence, "F9", where, f"commit up to {root.sequence}",
            f"{info.commit}",
        )  # fmt: skip
        for what, value in (("id", info.id), ("token", info.token.hex())):
            again = (what, value) in self._unique
            self._findings.require(not again, "F9", where, f"a {what} of its own", f"{value} twice")
            self._unique.add((what, value))
        known = self._standing.entries.setdefault(info.id, entry)
        if known != entry:
            self._findings.error("F10", where, "the same in both roots", "two that differ")
        bound = self._standing.bounds.get(info.id, root.size)
        self._standing.bounds[info.id] = min(bound, root.size)

    def _frame(
        self, pointer: Pointer, kind: RecordKind, where: str, commit: int
    ) -> FramedRecord | None:
        found = frame(self._subject, pointer, kind, where, Bounds(self._root.size, commit))
        if found is not None:
            reached = ReachedRun(pointer.offset, pointer.length, found.commit, where)
            self._standing.records.setdefault(pointer, reached)
        return found


def _check_index_payload(
    findings: Findings,
    where: str,
    name: str,
    payload: memoryview,
    entries: Sequence[VersionEntry],
) -> None:
    length = int.from_bytes(payload[:8], "little")
    count = int.from_bytes(payload[8:16], "little")
    found = str(payload[16 : 16 + length], "utf-8")
    findings.require(found == name, "F8", where, f"name {name!r}", f"{found!r}")
    start = 16 + length + -length % 8
    zeros(findings, f"{where}, name", payload[16 + length : start])
    rows = INDEX_ENTRY.array(payload, start, count)
    unknown = int(np.bitwise_or.reduce(rows["flags"], initial=0)) & ~INEXACT
    findings.require(not unknown, "F2", f"{where}, entries", "no unknown flag", f"{unknown}")
    behind = bytes(payload[start + count * INDEX_ENTRY.size :])
    findings.require(
        behind == encode_metrics(entries),
        "F8",
        where,
        "metrics of its versions behind the entries, or nothing",
        f"{len(behind)} other bytes",
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a record: bytes of the pool, and the commit of the pointer to it."""

    size: int
    commit: int


def frame(
    subject: Subject, pointer: Pointer, kind: RecordKind, where: str, bounds: Bounds
) -> FramedRecord | None:
    """Return the intact record at ``pointer``, or None. Add findings for damage."""
    medium, findings = subject.medium, subject.findings
    where = f"{where} at byte {pointer.offset}"
    end = pointer.offset + pointer.length
    if pointer.offset < DATA_START or end > bounds.size:
        findings.error("F5", where, f"bytes {DATA_START} to {bounds.size}", f"up to {end}")
        return None
    findings.require(pointer.offset % 8 == 0, "F6", where, "a multiple of 8", "none")
    try:
        record = read_whole(medium, pointer, kind)
        padding = load(medium, end, min(-end % 8, medium.size - end))
    except PortusError as error:
        unread = isinstance(error, MediumError)
        wanted = "bytes that can be read" if unread else "a whole record of its kind"
        copied = _find_copy(subject, pointer, kind)
        saved = "" if copied is None else f" (its copy at byte {copied[0]} is whole)"
        findings.error("F6", where, wanted, f"{error}{saved}")
        return None if copied is None else copied[1]
    header, payload = HEADER.unpack(record), record[HEADER.size :]
    expected = {"magic": RECORD_MAGIC, "uuid": subject.uuid, "length": len(payload)}
    for name, value in expected.items():
        findings.require(
            header[name] == value, "F6", where, f"{name} {value!r}", f"{header[name]!r}"
        )
    commit = cast(int, header["commit"])
    good = 1 <= commit <= bounds.commit
    findings.require(good, "F6", where, "a commit not after what points at it", f"{commit}")
    findings.require(header["reserved"] == 0, "F2", where, "reserved 0", f"{header['reserved']!r}")
    zeros(findings, f"{where}, after its end", padding)
    return FramedRecord(commit, payload)


def _find_copy(
    subject: Subject, pointer: Pointer, kind: RecordKind
) -> tuple[int, FramedRecord] | None:
    """Return the copy of a damaged record: its offset, and its payload."""
    copy = subject.copies.get(pointer.digest)
    if copy is None or copy == pointer:
        return None
    try:
        record = read_whole(subject.medium, copy, kind)
    except PortusError:
        return None  # overwritten meanwhile
    header = HEADER.unpack(record)
    return copy.offset, FramedRecord(cast(int, header["commit"]), record[HEADER.size :])


def load(medium: Medium, offset: int, length: int) -> bytes:
    """Return bytes of the medium."""
    data = bytearray(length)
    medium.load(offset, memoryview(data))
    return bytes(data)


def _is_whole(record: Record, data: bytes, magic: bytes) -> bool:
    row = record.unpack(data)
    return row["magic"] == magic and row["digest"] == digest(data[:-16])
