"""Versions without roots: what a pool still holds when root slots are lost.

Every record has a magic number, its pool's uuid, its kind and a digest; a version record also has
the name of its model. So a scan finds versions that no root reaches: committed ones, retired ones,
and one that a crash interrupted just before its commit, as long as their records are not
overwritten. Their bytes may be overwritten: call ``is_whole`` before use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
from msgspec import structs

from portus.engine.format.record import Value
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
    for pointer, whole in _intact(medium, uuid, RecordKind.VERSION, everything, chunk):
        with contextlib.suppress(CorruptionError):  # it only looks like a record
            record = decode_version(whole[HEADER.size :])
            owner = cast(bytes, HEADER.unpack(whole)["uuid"])
            found.append(RecoverableVersion(VersionEntry(record.info, pointer), record, owner))
    return sorted(found, key=lambda each: (each.record.info.commit, each.record.info.id))


def is_whole(medium: Medium, record: VersionRecord) -> bool:
    """Return whether a version still has all its bytes, which are read."""
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
    for pointer, _ in _intact(medium, uuid, RecordKind.CATALOGUE, runs, commit=sequence):
        with contextlib.suppress(CorruptionError, UsageError):
            found.append(_follow(medium, known, pointer))
    # Of two, the first was tried before it, and given up.
    return max(found, key=_time_ns_of, default=None)


def _time_ns_of(catalogue: Catalogue) -> int:
    return max((entry.info.time_ns for entry in catalogue.entries()), default=0)


def _follow(medium: Medium, known: Catalogue, pointer: Pointer) -> Catalogue:
    """Return the catalogue at ``pointer``. Raise ``CorruptionError`` if new parts are damaged."""
    root = replace(
        known.root,
        sequence=known.root.sequence + 1,
        size=medium.size - medium.size % PAGE,
        catalogue=pointer,
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


def _intact(
    medium: Medium,
    uuid: bytes | None,
    kind: RecordKind,
    runs: Sequence[Extent],
    chunk: int = CHUNK,
    commit: int | None = None,
) -> list[tuple[Pointer, memoryview]]:
    """Return the intact records of a kind in ``runs``, each once, with pointers that have its copy.
    commit: only those of that commit."""
    found: dict[bytes, tuple[Pointer, memoryview]] = {}
    for run in runs:
        for start in range(run.offset, run.end, chunk):
            data = load(medium, start, min(chunk, run.end - start))
            place = data.find(RECORD_MAGIC)
            while place >= 0:
                if place % _ALIGNMENT == 0:
                    pointer = _pointer(medium, start + place, uuid, kind, commit)
                    with contextlib.suppress(CorruptionError, UsageError):
                        if pointer is not None:
                            whole = read_whole(medium, pointer, kind, pointer.offset)
                            first, _ = found.get(pointer.digest, (pointer, whole))
                            if first != pointer:
                                pointer = structs.replace(first, copy=pointer.offset)
                            found[pointer.digest] = pointer, whole
                place = data.find(RECORD_MAGIC, place + 1)
    return list(found.values())


def _pointer(
    medium: Medium, offset: int, uuid: bytes | None, kind: RecordKind, commit: int | None
) -> Pointer | None:
    """Return the pointer to what looks like a record, or None if it does not."""
    if offset + HEADER.size > medium.size:
        return None
    row = HEADER.unpack(load(medium, offset, HEADER.size))
    expected: dict[str, Value] = {"kind": int(kind), "kind_version": KIND_VERSION, "reserved": 0}
    if uuid is not None:
        expected["uuid"] = uuid
    if commit is not None:
        expected["commit"] = commit
    length = HEADER.size + cast(int, row["length"])
    if length > RECORD_SIZE_MAX or any(row[name] != value for name, value in expected.items()):
        return None
    return Pointer(offset, length, cast(bytes, row["digest"]))
