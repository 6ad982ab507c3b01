"""Versions without roots: what a pool still holds when both root slots are lost.

Every record says that it is one, of which pool and of which kind, and carries a digest; a version
record carries the name of its model. So a scan finds versions that no root reaches: those that
were committed, and also retired ones and one that a crash cut off just before its commit, as long
as their records have not been written over. Their bytes may have been: ask ``is_whole`` before use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from portus.errors import CorruptionError, MediumError, UsageError
from portus.format.layout import (
    DATA_START,
    HEADER,
    KIND_VERSION,
    RECORD_MAGIC,
    RECORD_SIZE_MAX,
    Kind,
)
from portus.index.check_catalogue import Subject, load
from portus.index.check_version import Bytes, Seen
from portus.index.findings import Findings
from portus.index.records import (
    NOWHERE,
    Pointer,
    VersionEntry,
    VersionRecord,
    decode_layout,
    decode_version,
    read,
)
from portus.index.roots import read_superblock
from portus.media.base import Medium

CHUNK: Final = 16 << 20
"""Bytes that are looked at at once."""

_ALIGNMENT: Final = 8
"""Records begin at multiples of this, and so do chunks: no magic lies across two."""


def find_versions(medium: Medium, *, chunk: int = CHUNK) -> list[VersionRecord]:
    """Every version record that is whole, oldest commit first. Reads the whole medium once.

    chunk: bytes that are looked at at once, a multiple of 8.

    Records of other pools, inside of saved bytes, do not count, if a copy of the superblock is
    left to tell. Raises ``UsageError`` if a newer Portus wrote the pool, and ``MediumError``.
    """
    try:
        uuid = read_superblock(medium).uuid
    except CorruptionError:
        uuid = None
    records: list[VersionRecord] = []
    for pointer in _pointers(medium, uuid, chunk):
        try:
            records.append(decode_version(read(medium, pointer, Kind.VERSION)))
        except (CorruptionError, UsageError):
            continue  # it looks like a record, and is none
    return sorted(records, key=lambda record: (record.info.commit, record.info.id))


def is_whole(medium: Medium, record: VersionRecord) -> bool:
    """True if a version has its layout, its tree and all its bytes still. Reads them."""
    try:
        decode_layout(read(medium, record.layout, Kind.LAYOUT))
        read(medium, record.tree, Kind.TREE)
    except (CorruptionError, MediumError, UsageError):
        return False
    ends = record.extents["offset"] + record.extents["length"]
    if len(ends) and max(int(ends.max()), int(record.extents["offset"].max())) > medium.size:
        return False
    findings = Findings()
    every = np.ones(len(record.storages), np.bool_)
    seen = Seen(VersionEntry(record.info, NOWHERE), record, (), (), every)
    Bytes(Subject(medium, b"", findings)).verify(seen, every, lambda length: None)
    return not findings.all


def _pointers(medium: Medium, uuid: bytes | None, chunk: int) -> Iterator[Pointer]:
    """What looks like a version record, wherever it lies."""
    size = medium.size
    for start in range(DATA_START, size, chunk):
        data = load(medium, start, min(chunk, size - start))
        place = data.find(RECORD_MAGIC)
        while place >= 0:
            if place % _ALIGNMENT == 0 and start + place + HEADER.size <= size:
                pointer = _pointer(medium, start + place, uuid)
                if pointer is not None:
                    yield pointer
            place = data.find(RECORD_MAGIC, place + 1)


def _pointer(medium: Medium, offset: int, uuid: bytes | None) -> Pointer | None:
    row = HEADER.unpack(load(medium, offset, HEADER.size))
    length, found = row["length"], row["digest"]
    assert isinstance(length, int)
    assert isinstance(found, bytes)
    fits = HEADER.size + length <= min(RECORD_SIZE_MAX, medium.size - offset)
    expected = {"kind": int(Kind.VERSION), "kind_version": KIND_VERSION, "reserved": 0}
    if not fits or any(row[name] != value for name, value in expected.items()):
        return None
    if uuid is not None and row["uuid"] != uuid:
        return None
    return Pointer(offset, HEADER.size + length, found)
