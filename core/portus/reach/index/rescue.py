"""Versions without roots: what a pool still holds when root slots are lost.

Every record has a magic number, its pool's uuid, its kind and a digest; a version record also has
the name of its model. So a scan finds versions that no root reaches: committed ones, retired ones,
and one that a crash interrupted just before its commit, as long as their records are not
overwritten. Their bytes may be overwritten: call ``is_whole`` before use.

``rebuild`` makes a pool of such versions. Their records and bytes stay in place, or are copied to
the same places of a new medium. The catalogue and roots are written again, after all of them. So
ids, tokens, commits and times stay the same, pointers find the versions again, and versions still
share what they shared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

from msgspec import structs

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError, UsageError
from portus.reach.format.layout import (
    DATA_START,
    HEADER,
    KIND_VERSION,
    RECORD_MAGIC,
    RecordKind,
)
from portus.reach.index.catalogue import require_inside, version_runs
from portus.reach.index.check_catalogue import ReachedRun, load
from portus.reach.index.check_reach import check_reach
from portus.reach.index.check_version import Bytes, CheckedVersion
from portus.reach.index.commit_records import RecordArea
from portus.reach.index.findings import Findings
from portus.reach.index.log import read_log
from portus.reach.index.records import (
    ALIGNMENT,
    Pointer,
    VersionEntry,
    VersionRecord,
    decode_version,
    encode_catalogue,
    frame,
    point,
    read_whole,
)
from portus.reach.index.roots import Root, read_uuid, store_root
from portus.reach.index.space import merge

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


def choose(found: Sequence[RecoverableVersion]) -> list[RecoverableVersion]:
    """Return those of some intact versions that can be in one pool: of the same pool as most, each
    id and token once, no page of two commits.

    Of two that exclude each other the newer stays: the other was retired, or given up. They are in
    the order of their commits.
    """
    uuids = [each.uuid for each in found]
    uuid = max(uuids, key=uuids.count, default=b"")
    kept: list[RecoverableVersion] = []
    own = [each for each in found if each.uuid == uuid]
    for each in sorted(own, key=lambda each: each.record.info.time_ns, reverse=True):
        together, findings = [*kept, each], Findings()
        infos = [one.record.info for one in together]
        if len({info.id for info in infos}) == len({info.token for info in infos}) == len(infos):
            runs = [
                ReachedRun(extent, one.record.info.commit, "record")
                for one in together
                for extent in one.entry.pointer.extents
            ]
            check_reach([one.record for one in together], runs, findings)
            kept = kept if findings.all else together
    return sorted(kept, key=lambda each: (each.record.info.commit, each.record.info.id))


def chunks_of(versions: Sequence[RecoverableVersion], size: int) -> Iterator[Extent]:
    """Yield all pages of ``versions``, on a medium of ``size`` bytes, as extents to copy to the
    same places of another one of the same size."""
    reach = merge(version_runs(each.entry, each.record) for each in versions)
    for first, after in reach.tolist():
        end = min(after * PAGE, size)
        for start in range(first * PAGE, end, CHUNK):
            yield Extent(start, min(CHUNK, end - start))


def rebuild(medium: Medium, versions: Sequence[RecoverableVersion]) -> None:
    """Write the catalogue and both roots for ``versions``, whose bytes and records
    ``medium`` has. Durable on return; all other space is free.

    versions: as ``choose`` returns them, one at least. Raises ``MediumError``; then the medium is
    no more of a pool than it was.
    """
    uuid = versions[0].uuid
    sequence = max(each.record.info.commit for each in versions) + 1
    area = RecordArea(medium.size + -medium.size % PAGE)
    record = frame(
        RecordKind.CATALOGUE, sequence, uuid, encode_catalogue(each.entry for each in versions)
    )
    catalogue = point([area.add(record), area.add(record)], record)
    end = area.offset + len(area.data)
    medium.grow(end + -end % PAGE)
    medium.store(area.offset, area.data)
    # Durable before the header is cleared: until then the pool can be rescued again.
    medium.persist([Extent(DATA_START, medium.size - DATA_START)])
    next_version = max(each.record.info.id for each in versions) + 1
    medium.store(0, bytes(DATA_START))
    # Both slots: a blank one would count as damaged.
    for number in (sequence, sequence + 1):
        store_root(medium, uuid, Root(number, next_version, medium.size, catalogue))
    medium.persist([Extent(0, DATA_START)])
