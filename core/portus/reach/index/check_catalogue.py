"""The first half of a check: the fixed pages, the root slots, and the catalogues of both roots."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError, MediumError, PortusError, StaleError
from portus.reach.format.layout import (
    DATA_START,
    HEADER,
    HOLDER_OFFSET,
    HOLDER_SIZE,
    RECORD_MAGIC,
    SLOT,
    SLOT_OFFSETS,
    RecordKind,
)
from portus.reach.index.findings import Findings
from portus.reach.index.records import Pointer, VersionEntry, decode_catalogue, read_whole
from portus.reach.index.roots import (
    Root,
    Slot,
    load_slots,
    newest_roots,
    read_slots,
    unpack_slots,
)

_RETRIES_MAX: Final = 1000
"""Times that the catalogues are read again because a writer committed meanwhile, at most."""

_TORN_RETRIES: Final = 3
_TORN_PAUSE_S: Final = 0.002
"""Times and seconds to read a torn slot again: a writer may be storing it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The pool that is checked, and its findings so far."""

    medium: Medium
    uuid: bytes
    findings: Findings


@dataclass(frozen=True, slots=True)
class ReachedRun:
    """A run of bytes that a record or a version reaches, and the commit that wrote it."""

    extent: Extent
    commit: int
    what: str


@dataclass(frozen=True, slots=True)
class FramedRecord:
    """A record of which one place at least is intact: the commit that wrote it, its payload, and
    its places."""

    commit: int
    payload: memoryview
    runs: Sequence[ReachedRun]


@dataclass(slots=True)
class ReachableVersions:
    """Everything that the intact roots reach, read while they did not change.

    ``places``: the bytes of all places of slots. ``bounds``: for each version, the least size of a
    root that reaches it.
    """

    places: list[bytes]
    roots: list[Root] = field(default_factory=list)
    entries: dict[int, VersionEntry] = field(default_factory=dict)
    bounds: dict[int, int] = field(default_factory=dict)
    runs: dict[Extent, ReachedRun] = field(default_factory=dict)


def check_fixed_pages(medium: Medium, findings: Findings) -> bytes | None:
    """Check pages 0 to 7, except what the root slots hold. Return the pool's uuid, or None if it is
    unknown.

    Raises ``UsageError`` if a newer Portus wrote the pool, and ``MediumError``.
    """
    if medium.size < DATA_START:
        findings.error("F1", medium.info.name, f"{DATA_START} bytes or more", f"{medium.size}")
        return None
    pages = load(medium, 0, DATA_START)
    _check_padding(pages, findings)
    found = read_slots(medium)
    for slot in filter(None, found):
        return slot.uuid
    for offset in SLOT_OFFSETS:
        findings.error(
            "F1", f"root slot at byte {offset}", "its magic and digest", "something else"
        )
    return None


def _check_padding(pages: bytes, findings: Findings) -> None:
    for offset in SLOT_OFFSETS:
        zeros(findings, f"page {offset // PAGE}", pages[offset + SLOT.size : offset + PAGE])
    holder = pages[HOLDER_OFFSET : HOLDER_OFFSET + PAGE]
    text = holder[:HOLDER_SIZE].split(b"\0")[0]
    zeros(findings, f"page {HOLDER_OFFSET // PAGE}, after the text", holder[len(text) :])
    used = {offset // PAGE for offset in (*SLOT_OFFSETS, HOLDER_OFFSET)}
    for page in {*range(DATA_START // PAGE)} - used:
        zeros(findings, f"page {page}", pages[page * PAGE : (page + 1) * PAGE])


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
        standing = ReachableVersions(settled_slots(medium))
        _check_slots(Subject(medium, uuid, fresh), standing)
        for root in standing.roots:
            _Listing(Subject(medium, uuid, fresh), standing, root).read()
        if settled_slots(medium, standing.places) == standing.places:
            findings.extend(fresh)
            return standing
    raise StaleError(f"{medium.info.name}: commits came faster than they could be read; try again")


def settled_slots(medium: Medium, seen: Sequence[bytes] = ()) -> list[bytes]:
    """Return all places of root slots. Wait for one that is being stored, unless they are the same
    as ``seen``, which was waited for before."""
    for _ in range(_TORN_RETRIES):
        places = load_slots(medium)
        whole = all(unpack_slots(medium.info.name, places)) and places[:2] == places[2:]
        if whole or places == seen:
            break
        time.sleep(_TORN_PAUSE_S)
    return places


def _check_slots(subject: Subject, standing: ReachableVersions) -> None:
    findings, size = subject.findings, subject.medium.size
    slots = unpack_slots(subject.medium.info.name, standing.places)
    standing.roots = newest_roots(slots, subject.uuid)
    for number, found in enumerate(slots):
        other = slots[(number + 2) % 4]
        where = f"root slot {number % 2} at byte {SLOT_OFFSETS[number]}"
        if found is None and other is None:
            findings.warning(
                "F1", where, "a whole one (it may be torn after a crash, until the next commit)",
                "a torn one, and so is its copy",
            )  # fmt: skip
        elif found is None:
            findings.mend(
                "F1", where, "a whole one",
                "a torn one; its copy is whole and nothing is lost: the next process that opens "
                "the pool for writing repairs it, and so does `portus rescue --in-place`",
            )  # fmt: skip
        else:
            _check_slot(subject, where, number % 2, found)
    if all(slots) and standing.places[:2] != standing.places[2:]:
        findings.warning(
            "F1", "root slots", "equal copies (they may differ after a crash)", "others"
        )
    findings.require(bool(standing.roots), "F1", "root slots", "at least one whole one", "none")
    if len(standing.roots) == 2:
        _check_order(findings, *standing.roots)
    for root in standing.roots:
        where = f"root of commit {root.sequence}"
        findings.require(root.size <= size, "F5", where, f"size up to {size}", f"{root.size}")


def _check_slot(subject: Subject, where: str, number: int, found: Slot) -> None:
    (uuid, root), findings = found, subject.findings
    findings.require(
        uuid == subject.uuid, "F3", where, f"pool {subject.uuid.hex()}", f"pool {uuid.hex()}"
    )
    findings.require(
        root.slot == number, "F3", where, f"parity {number}", f"commit {root.sequence}"
    )


def _check_order(findings: Findings, newer: Root, older: Root) -> None:
    where = f"roots of commits {older.sequence} and {newer.sequence}"
    findings.require(
        newer.sequence == older.sequence + 1, "F4", where, "sequences that differ by 1", "others"
    )
    for what in ("next_version", "size"):
        before, after = getattr(older, what), getattr(newer, what)
        findings.require(after >= before, "F4", where, f"{what} from {before} up", f"{after}")


class _Listing:
    """The catalogue of one root."""

    def __init__(self, subject: Subject, standing: ReachableVersions, root: Root) -> None:
        self._subject: Final = subject
        self._findings: Final = subject.findings
        self._standing: Final = standing
        self._root: Final = root
        self._unique: Final[set[tuple[str, int | str]]] = set()

    def read(self) -> None:
        """Add all that the root reaches to the standing."""
        root = self._root
        if root.is_first:
            return
        bounds = Bounds(root.size, root.sequence)
        found = frame(self._subject, root.catalogue, RecordKind.CATALOGUE, "catalogue", bounds)
        if found is None:
            return
        for run in found.runs:
            self._standing.runs.setdefault(run.extent, run)
        try:
            entries = decode_catalogue(found.payload)
        except CorruptionError as error:
            self._findings.error("F7", "catalogue", "one that can be read", str(error))
            return
        for name in {entry.info.model for entry in entries}:
            own = [entry for entry in entries if entry.info.model == name]
            self._check_order(f"catalogue, model {name!r}", own, found.commit)
        for entry in entries:
            self._add(entry)

    def _check_order(self, where: str, entries: Sequence[VersionEntry], commit: int) -> None:
        commits = [entry.info.commit for entry in entries]
        ids = [entry.info.id for entry in entries]
        for what, numbers in (("commits", commits), ("ids", ids)):
            ascending = numbers == sorted(set(numbers))
            self._findings.require(ascending, "F7", where, f"ascending {what}", f"{numbers!r:.200}")
        if max(commits) > commit:
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


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a record: bytes of the pool, and the commit of the pointer to it."""

    size: int
    commit: int


def frame(
    subject: Subject, pointer: Pointer, kind: RecordKind, where: str, bounds: Bounds
) -> FramedRecord | None:
    """Return the record at ``pointer``, or None if neither it nor a copy is intact. Add findings
    for damage."""
    records = [
        _frame_at(subject, pointer, kind, f"{where} at byte {each.offset}", each, bounds)
        for each in pointer.extents
    ]
    for record in filter(None, records):
        commit = cast(int, HEADER.unpack(record)["commit"])
        runs = [ReachedRun(each, commit, where) for each in pointer.extents]
        return FramedRecord(commit, record[HEADER.size :], runs)
    return None


def _frame_at(
    subject: Subject, pointer: Pointer, kind: RecordKind, where: str, at: Extent, bounds: Bounds
) -> memoryview | None:
    """Return the record at one of its places, or None if it is not intact."""
    medium, findings = subject.medium, subject.findings
    if at.offset < DATA_START or at.end > bounds.size:
        findings.error("F5", where, f"bytes {DATA_START} to {bounds.size}", f"up to {at.end}")
        return None
    findings.require(at.offset % 8 == 0, "F6", where, "a multiple of 8", "none")
    try:
        record = read_whole(medium, pointer, kind, at.offset)
        padding = load(medium, at.end, min(-at.end % 8, medium.size - at.end))
    except PortusError as error:
        unread = isinstance(error, MediumError)
        wanted = "bytes that can be read" if unread else "a whole record of its kind"
        findings.error("F6", where, wanted, f"{error}{_describe_copy(medium, pointer, kind, at)}")
        return None
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
    return record


def _describe_copy(medium: Medium, pointer: Pointer, kind: RecordKind, at: Extent) -> str:
    """Return words for the other place of a damaged record, if the record is intact there."""
    for other in pointer.extents:
        if other != at:
            with contextlib.suppress(PortusError):
                read_whole(medium, pointer, kind, other.offset)
                return f" (its copy at byte {other.offset} is whole)"
    return ""


def load(medium: Medium, offset: int, length: int) -> bytes:
    """Return bytes of the medium."""
    data = bytearray(length)
    medium.load(offset, memoryview(data))
    return bytes(data)
