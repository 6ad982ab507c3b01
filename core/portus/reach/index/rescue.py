"""Versions without roots: what a pool still holds when root slots are lost.

Every record has a magic number, its pool's uuid, its kind and a digest; a version record also has
the name of its model. So a scan finds versions that no root reaches: committed ones, retired ones,
and one that a crash interrupted just before its commit, as long as their records are not
overwritten. Their bytes may be overwritten: call ``is_whole`` before use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.format.layout import (
    DATA_START,
    HEADER,
    KIND_VERSION,
    RECORD_MAGIC,
    RECORD_SIZE_MAX,
    RecordKind,
)
from portus.reach.index.catalogue import Catalogue, read_catalogue, read_version, version_runs
from portus.reach.index.check_catalogue import Subject, load
from portus.reach.index.check_version import Bytes, CheckedVersion
from portus.reach.index.findings import Findings
from portus.reach.index.log import read_log
from portus.reach.index.records import (
    NOWHERE,
    Pointer,
    VersionEntry,
    VersionRecord,
    decode_version,
    read,
    read_whole,
)
from portus.reach.index.roots import read_superblock
from portus.reach.index.space import gaps, merge

CHUNK: Final = 16 << 20
"""Bytes to search together."""

_ALIGNMENT: Final = 8
"""Records begin at multiples of this, and so do chunks: no magic crosses a border."""


@dataclass(frozen=True, slots=True)
class RecoverableVersion:
    """A version whose record is intact. ``uuid``: of its pool, by the record."""

    entry: VersionEntry
    record: VersionRecord
    uuid: bytes


def find_versions(medium: Medium, *, chunk: int = CHUNK) -> list[RecoverableVersion]:
    """Return all intact version records, oldest commit first. Reads the whole medium once.

    chunk: bytes to search together, a multiple of 8.

    Records of other pools, inside of saved bytes, do not count, if a copy of the superblock can
    tell them apart. Raises ``UsageError`` if a newer Portus wrote the pool, and ``MediumError``.
    """
    try:
        uuid = read_superblock(medium).uuid
    except CorruptionError:
        uuid = None
    found: list[RecoverableVersion] = []
    everything = [Extent(DATA_START, max(0, medium.size - DATA_START))]
    for pointer, _ in _pointers(medium, uuid, RecordKind.VERSION, everything, chunk):
        try:
            whole = read_whole(medium, pointer, RecordKind.VERSION)
            record = decode_version(whole[HEADER.size :])
        except (CorruptionError, UsageError):
            continue  # it only looks like a record
        owner = cast(bytes, HEADER.unpack(whole)["uuid"])
        found.append(RecoverableVersion(VersionEntry(record.info, pointer), record, owner))
    return sorted(found, key=lambda each: (each.record.info.commit, each.record.info.id))


def is_whole(medium: Medium, record: VersionRecord) -> bool:
    """Return whether a version still has its contents and all its bytes, which are read."""
    try:
        read(medium, record.contents, RecordKind.CONTENTS)
    except (CorruptionError, MediumError, UsageError):
        return False
    ends = record.extents["offset"] + record.extents["length"]
    if len(ends) and max(int(ends.max()), int(record.extents["offset"].max())) > medium.size:
        return False
    findings = Findings()
    every = np.ones(len(record.storages), np.bool_)
    seen = CheckedVersion(VersionEntry(record.info, NOWHERE), record, None, (), every)
    if record.log is not None and record.log.extent.end > medium.size:
        return False
    with contextlib.suppress(CorruptionError, MediumError):
        if read_log(medium, record).is_left:  # its tables are those of a newer version
            return False
    bytes_of = Bytes(Subject(medium, b"", findings))
    for _ in bytes_of.verify(seen, every):
        continue
    bytes_of.verify_log(seen)
    return not findings.all


def next_catalogue(medium: Medium, uuid: bytes, known: Catalogue) -> Catalogue | None:
    """Return the catalogue of the commit after ``known``, if all of it is intact: then only its
    root slot is damaged. Return None if there is none, or a part of it is lost.

    This may also find a commit that was interrupted just before its root: it is as good, but no
    save reported it. Reads the space that ``known`` leaves free, and every byte of the versions
    found.
    """
    reached = [known.record_runs]
    for entry in known.entries():
        with contextlib.suppress(CorruptionError):
            reached.append(version_runs(entry, read_version(medium, entry)))
    free = gaps(merge(reached), DATA_START // PAGE, medium.size // PAGE)
    runs = [Extent(first * PAGE, (after - first) * PAGE) for first, after in free.tolist()]
    sequence = known.root.sequence + 1
    found: list[Catalogue] = []
    for pointer, commit in _pointers(medium, uuid, RecordKind.MODEL_TABLE, runs, CHUNK):
        if commit == sequence:
            with contextlib.suppress(CorruptionError, UsageError):
                found.append(_follow(medium, known, pointer))
    # Of two, the first was tried before it, and given up.
    return max(found, key=_time_ns_of, default=None)


def _time_ns_of(catalogue: Catalogue) -> int:
    return max((entry.info.time_ns for entry in catalogue.entries()), default=0)


def _follow(medium: Medium, known: Catalogue, table: Pointer) -> Catalogue:
    """Return the catalogue of ``table``. Raise ``CorruptionError`` if new parts are damaged."""
    root = replace(
        known.root,
        sequence=known.root.sequence + 1,
        size=medium.size - medium.size % PAGE,
        table=table,
        copies=NOWHERE,
    )
    found = read_catalogue(medium, root)
    ids = known.ids()
    for entry in found.entries():
        # Only if all of it is intact: then its root may have been stored, and to take it is always
        # safe (decision 0071).
        if entry.info.id not in ids and not is_whole(medium, read_version(medium, entry)):
            raise CorruptionError(f"version {entry.info.id}: some of it is damaged")
    following = max((version + 1 for version in found.ids()), default=1)
    root = replace(root, next_version=max(root.next_version, following))
    return replace(found, root=root)


def _pointers(
    medium: Medium, uuid: bytes | None, kind: RecordKind, runs: Sequence[Extent], chunk: int
) -> Iterator[tuple[Pointer, int]]:
    """Yield pointer and commit of all in ``runs`` that looks like a record of a kind."""
    size = medium.size
    for run in runs:
        for start in range(run.offset, run.end, chunk):
            data = load(medium, start, min(chunk, run.end - start))
            place = data.find(RECORD_MAGIC)
            while place >= 0:
                if place % _ALIGNMENT == 0 and start + place + HEADER.size <= size:
                    found = _pointer(medium, start + place, uuid, kind)
                    if found is not None:
                        yield found
                place = data.find(RECORD_MAGIC, place + 1)


def _pointer(
    medium: Medium, offset: int, uuid: bytes | None, kind: RecordKind
) -> tuple[Pointer, int] | None:
    row = HEADER.unpack(load(medium, offset, HEADER.size))
    length, found, commit = row["length"], row["digest"], row["commit"]
    assert isinstance(length, int)
    assert isinstance(commit, int)
    assert isinstance(found, bytes)
    fits = HEADER.size + length <= min(RECORD_SIZE_MAX, medium.size - offset)
    expected = {"kind": int(kind), "kind_version": KIND_VERSION, "reserved": 0}
    if not fits or any(row[name] != value for name, value in expected.items()):
        return None
    if uuid is not None and row["uuid"] != uuid:
        return None
    return Pointer(offset, HEADER.size + length, found), commit
