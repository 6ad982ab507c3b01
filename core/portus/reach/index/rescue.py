"""Versions without roots: what a pool still holds when root slots are lost.

Every record has a magic number, its pool's uuid, its kind and a digest; a version record also has
the name of its model. So a scan finds versions that no root reaches: committed ones, retired ones,
and one that a crash interrupted just before its commit, as long as their records are not
overwritten. Their bytes may be overwritten: call ``is_whole`` before use.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from msgspec import structs

from portus.engine.media.base import Medium
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.format.layout import (
    DATA_START,
    HEADER,
    KIND_VERSION,
    RECORD_MAGIC,
    RECORD_SIZE_MAX,
    RecordKind,
)
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
from portus.reach.index.roots import read_uuid

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

    Records of other pools, inside of saved bytes, do not count, if a root slot can tell them apart.
    Raises ``UsageError`` if a newer Portus wrote the pool, and ``MediumError``.
    """
    try:
        uuid = read_uuid(medium)
    except CorruptionError:
        uuid = None
    found: dict[bytes, RecoverableVersion] = {}
    for start in range(DATA_START, medium.size, chunk):
        data = load(medium, start, min(chunk, medium.size - start))
        place = data.find(RECORD_MAGIC)
        while place >= 0:
            pointer = None if place % _ALIGNMENT else _pointer(medium, start + place, uuid)
            if pointer is not None:
                with contextlib.suppress(CorruptionError, UsageError):  # it may only look like one
                    _add(medium, pointer, found)
            place = data.find(RECORD_MAGIC, place + 1)
    return sorted(found.values(), key=lambda each: (each.record.info.commit, each.record.info.id))


def _add(medium: Medium, pointer: Pointer, found: dict[bytes, RecoverableVersion]) -> None:
    """Add the version at ``pointer``, or the place of its copy if it was found before. Raises as
    ``read_whole`` and ``decode_version``."""
    whole = read_whole(medium, pointer, RecordKind.VERSION, pointer.offset)
    record, owner = decode_version(whole[HEADER.size :]), cast(bytes, HEADER.unpack(whole)["uuid"])
    first = found.get(pointer.digest)
    if first is not None:
        pointer = structs.replace(first.entry.pointer, copy=pointer.offset)
    found[pointer.digest] = RecoverableVersion(VersionEntry(record.info, pointer), record, owner)


def _pointer(medium: Medium, offset: int, uuid: bytes | None) -> Pointer | None:
    """Return the pointer to what looks like the record of a version, or None if it does not."""
    if offset + HEADER.size > medium.size:
        return None
    row = HEADER.unpack(load(medium, offset, HEADER.size))
    kind, length = (row["kind"], row["kind_version"]), HEADER.size + cast(int, row["length"])
    if kind != (RecordKind.VERSION, KIND_VERSION) or length > RECORD_SIZE_MAX:
        return None
    if uuid is not None and row["uuid"] != uuid:
        return None
    return Pointer(offset, length, cast(bytes, row["digest"]))


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
