"""The two root slots: which one counts, and how it is replaced.

A slot counts if its digest and its pool's uuid are right; of two, the one with the higher sequence
wins. Commit n goes to slot n mod 2, so the slot of commit n-1 is never touched by it: whatever
tears, one slot stays intact. No width of an atomic store is assumed.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Any, Final, cast

from portus.engine.format.checksum import digest
from portus.engine.format.record import Record, Value
from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError, UsageError
from portus.reach.format.layout import (
    DATA_START,
    FORMAT_VERSION,
    MAGIC,
    ROOT_MAGIC,
    SLOT,
    SLOT_OFFSETS,
    SUPERBLOCK,
    SUPERBLOCK_OFFSETS,
)
from portus.reach.index.records import NOWHERE, Pointer

_log: Final = logging.getLogger("portus")


@dataclass(frozen=True, slots=True)
class Superblock:
    """The identity of a pool. ``writable``: it has no feature that this program cannot write."""

    uuid: bytes
    created_ns: int
    writable: bool = True


@dataclass(frozen=True, slots=True)
class Root:
    """The contents of one slot. ``size``: bytes of the pool that the root may reach."""

    sequence: int
    next_version: int
    size: int
    catalogue: Pointer

    @property
    def is_first(self) -> bool:
        """True until the first commit to the pool."""
        return self.catalogue == NOWHERE

    @property
    def slot(self) -> int:
        """The slot that the root belongs in, 0 or 1."""
        return self.sequence % 2


FIRST_ROOT: Final = Root(sequence=0, next_version=1, size=DATA_START, catalogue=NOWHERE)


def format_superblock(medium: Medium, uuid: bytes | None = None) -> Superblock:
    """Store (not persist) the superblock, twice, and the first root. For a new medium only."""
    block = Superblock(uuid or os.urandom(16), time.time_ns())
    for offset in SUPERBLOCK_OFFSETS:
        store_superblock(medium, block, offset)
    store_root(medium, block.uuid, FIRST_ROOT)
    return block


def store_superblock(medium: Medium, block: Superblock, offset: int) -> Extent:
    """Store one copy of the superblock, and return the extent to persist."""
    body = SUPERBLOCK.pack(
        magic=MAGIC,
        format_version=FORMAT_VERSION,
        page_size=PAGE,
        uuid=block.uuid,
        created_ns=block.created_ns,
    )
    medium.store(offset, _seal(body))
    return Extent(offset, PAGE)


def settle_superblock(medium: Medium) -> None:
    """Restore a damaged copy of the superblock from the other one, with an error in the log;
    durable on return. One is intact. Raises ``MediumError``."""
    whole = [each for each in SUPERBLOCK_OFFSETS if whole_superblock(medium, each) is not None]
    for offset in {*SUPERBLOCK_OFFSETS}.difference(whole):
        _log.error(
            "%s: the superblock at byte %d is damaged; restored from its copy. Look at the disk",
            medium.info.name,
            offset,
        )
        found = memoryview(bytearray(SUPERBLOCK.size))
        medium.load(whole[0], found)
        medium.store(offset, found)
        medium.persist([Extent(offset, PAGE)])


def whole_superblock(medium: Medium, offset: int) -> Superblock | None:
    """Return the copy of the superblock at ``offset``, or None if there is no intact one.

    Raises ``UsageError`` if a newer Portus wrote it.
    """
    data = memoryview(bytearray(SUPERBLOCK.size))
    medium.load(offset, data)
    row = unpack_whole(SUPERBLOCK, data, MAGIC)
    return None if row is None else _superblock(medium.info.name, row)


def read_superblock(medium: Medium) -> Superblock:
    """Return the first intact copy of the superblock.

    Raises ``CorruptionError`` if none is intact or it is no pool, ``UsageError`` if a newer Portus
    wrote the pool.
    """
    if medium.size < DATA_START:
        raise CorruptionError(
            f"{medium.info.name}: expected a pool of at least {DATA_START} bytes, found "
            f"{medium.size}; was it truncated, or is it not a pool?"
        )
    magic = b""
    for offset in SUPERBLOCK_OFFSETS:
        found = whole_superblock(medium, offset)
        if found is not None:
            return found
        head = memoryview(bytearray(16))
        medium.load(offset, head)
        magic = magic or bytes(head)
    if magic != MAGIC:
        hint = ""
        if medium.info.kind.is_device:
            hint = f"; `portus format {medium.info.name}` makes one and erases the device"
        raise CorruptionError(
            f"{medium.info.name} is not a Portus pool: it starts with {magic!r}{hint}"
        )
    raise CorruptionError(
        f"{medium.info.name}: both copies of the superblock are damaged; `portus rescue "
        f"{medium.info.name}` lists what is intact"
    )


def _superblock(name: str, row: dict[str, Value]) -> Superblock:
    unknown = cast(int, row["incompat"])
    if row["format_version"] != FORMAT_VERSION or row["page_size"] != PAGE or unknown:
        raise UsageError(
            f"{name}: written by a newer Portus (format {row['format_version']!r}, page size "
            f"{row['page_size']!r}, unknown features {unknown:#x}); this one knows format "
            f"{FORMAT_VERSION}. Upgrade portus-checkpoint"
        )
    return Superblock(
        cast(bytes, row["uuid"]),
        cast(int, row["created_ns"]),
        not row["read_only_compat"],
    )


def store_root(medium: Medium, uuid: bytes, root: Root) -> Extent:
    """Store a root in its slot, and return the extent to persist for it to count."""
    body = SLOT.pack(
        magic=ROOT_MAGIC,
        sequence=root.sequence,
        next_version=root.next_version,
        size=root.size,
        uuid=uuid,
        catalogue_offset=root.catalogue.offset,
        catalogue_length=root.catalogue.length,
        catalogue_digest=root.catalogue.digest,
        catalogue_copy=root.catalogue.copy,
    )
    offset = SLOT_OFFSETS[root.slot]
    medium.store(offset, _seal(body))
    return Extent(offset, PAGE)


def clear_slot(medium: Medium, slot: int) -> Extent | None:
    """Blank a slot that holds no root, and return the extent to persist, or None if it is blank
    already.

    Where lines of 64 bytes may survive one by one, the rest of a root that was never committed,
    after the first line of another root with the same number, would make that root intact again.
    """
    found = bytearray(SLOT.size)
    medium.load(SLOT_OFFSETS[slot], memoryview(found))
    if not any(found):
        return None
    medium.store(SLOT_OFFSETS[slot], bytes(SLOT.size))
    return Extent(SLOT_OFFSETS[slot], PAGE)


def read_roots(medium: Medium, uuid: bytes) -> list[Root]:
    """Return the intact roots, newest first: none, one or two."""
    roots, start = [], SLOT_OFFSETS[0]
    data = memoryview(bytearray(SLOT_OFFSETS[1] + SLOT.size - start))
    medium.load(start, data)  # both at once: each look at a pool on a storage host begins with them
    for slot, offset in enumerate(SLOT_OFFSETS):
        row = unpack_whole(SLOT, data[offset - start :][: SLOT.size], ROOT_MAGIC)
        if row is None or row["uuid"] != uuid:
            continue
        root = _root(row)
        if root.slot == slot:
            roots.append(root)
    return sorted(roots, key=lambda root: -root.sequence)


def _root(row: dict[str, Any]) -> Root:
    names = ("offset", "length", "digest", "copy")
    catalogue = Pointer(*(row[f"catalogue_{name}"] for name in names))
    return Root(row["sequence"], row["next_version"], row["size"], catalogue)


def find_damaged_slot(medium: Medium, uuid: bytes, root: Root) -> int | None:
    """Return the slot that should hold a root and does not; None if both are right.

    root: the newest one. Slot 1 is blank until the first commit.
    """
    slots = {each.slot for each in read_roots(medium, uuid)}
    if len(slots) == 2:
        return None
    other = 1 - root.slot
    found = bytearray(SLOT.size)
    medium.load(SLOT_OFFSETS[other], memoryview(found))
    return other if not root.is_first or any(found) else None


def _seal(body: bytes) -> bytes:
    """Return a record with its digest in its last 16 bytes, which were zero."""
    return body[:-16] + digest(body[:-16])


def unpack_whole(record: Record, data: bytes | memoryview, magic: bytes) -> dict[str, Value] | None:
    """Return the fields of a superblock or a slot, or None if its magic or its digest is wrong."""
    row = record.unpack(data)
    return row if row["magic"] == magic and row["digest"] == digest(data[:-16]) else None
