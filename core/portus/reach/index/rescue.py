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

from msgspec import structs

from portus.engine.media.base import Medium
from portus.errors import CorruptionError, UsageError
from portus.reach.format.layout import (
    DATA_START,
    HEADER,
    KIND_VERSION,
    RECORD_MAGIC,
    RecordKind,
)
from portus.reach.index.catalogue import require_inside
from portus.reach.index.check_catalogue import load
from portus.reach.index.check_version import Bytes, CheckedVersion
from portus.reach.index.findings import Findings
from portus.reach.index.log import read_log
from portus.reach.index.records import (
    ALIGNMENT,
    Pointer,
    VersionEntry,
    VersionRecord,
    decode_version,
    read_whole,
)
from portus.reach.index.roots import read_uuid

CHUNK: Final = 16 << 20
"""Bytes to search together."""


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
            offset = start + place
            if offset % ALIGNMENT == 0 and offset + HEADER.size <= medium.size:
                with contextlib.suppress(CorruptionError, UsageError):  # it may only look like one
                    _add(medium, offset, uuid, found)
            place = data.find(RECORD_MAGIC, place + 1)
    return sorted(found.values(), key=lambda each: (each.record.info.commit, each.record.info.id))


def _add(
    medium: Medium, offset: int, uuid: bytes | None, found: dict[bytes, RecoverableVersion]
) -> None:
    """Add the version at ``offset``, or the place of its copy if it was found before. Raises as
    ``read_whole`` and ``decode_version``."""
    header = HEADER.unpack(load(medium, offset, HEADER.size))
    kind, owner = (header["kind"], header["kind_version"]), cast(bytes, header["uuid"])
    if kind != (RecordKind.VERSION, KIND_VERSION) or uuid not in (None, owner):
        return
    length, digest = HEADER.size + cast(int, header["length"]), cast(bytes, header["digest"])
    pointer = Pointer(offset, length, digest)
    record = decode_version(read_whole(medium, pointer, RecordKind.VERSION, offset)[HEADER.size :])
    if (first := found.get(digest)) is not None:
        pointer = structs.replace(first.entry.pointer, copy=offset)
    found[digest] = RecoverableVersion(VersionEntry(record.info, pointer), record, owner)


def is_whole(medium: Medium, record: VersionRecord) -> bool:
    """Return whether a version still has all its bytes, which are read."""
    findings, seen = Findings(), CheckedVersion(record)
    with findings.note("F5", record.name, "bytes in the pool"):
        require_inside(medium, record, medium.size)
        if read_log(medium, record).is_left:  # its tables are those of a newer version
            return False
    if not findings.all:
        verifier = Bytes(medium, findings)
        for _ in verifier.verify(seen):
            continue
        verifier.verify_log(seen)
    return not findings.all
