"""The two root slots: which pool this is, which root counts, and how it is replaced.

A root counts if its digest is right; of two, the one with the higher sequence wins. Commit n goes
to slot n mod 2, so the slot of commit n-1 is never touched by it: whatever tears, one slot stays
intact. No width of an atomic store is assumed. Each slot has two places, in pages that are far
apart: one of them may rot. A pool that was just made has both roots already, of no versions.

A device has no file names, so only its bytes tell whether a pool is there. It is *blank* if its
header is zero, or if the making of a pool was interrupted in the copies of the slots, which are
stored first. Anything else is a pool, or other data, and is left alone.

A page between the slots has messages: which process has the pool open for writing, and which save
to it failed last.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from portus.engine.format.checksum import DIGEST_SIZE, digest
from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError, MediumError, UsageError, printable
from portus.reach.format.layout import (
    DATA_START,
    FORMAT_VERSION,
    HOLDER_OFFSET,
    HOLDER_SIZE,
    MAGIC,
    SLOT,
    SLOT_OFFSETS,
)
from portus.reach.index.records import NOWHERE, Pointer

_log: Final = logging.getLogger("portus")


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


class Slot(NamedTuple):
    """One intact place of a slot: the identity of the pool, and the root."""

    uuid: bytes
    root: Root


def format_pool(medium: Medium) -> None:
    """Make an empty pool over whatever the medium holds, durable on return.

    No other process may have it open. If the making is interrupted, the earlier contents are still
    a pool, or the medium is blank, or it holds no pool.
    """
    copies, end = SLOT_OFFSETS[2], SLOT_OFFSETS[3] + PAGE
    # The copies last, and then first, so that they say whose the rest is, see ``is_blank``.
    for extents in (
        [Extent(0, copies), Extent(end, DATA_START - end)],
        [Extent(copies, end - copies)],
    ):
        for extent in extents:
            medium.store(extent.offset, bytes(extent.length))
        medium.persist(extents)
    uuid = os.urandom(16)
    roots = [Root(sequence, 1, DATA_START, NOWHERE) for sequence in (0, 1)]
    for places in ((2, 3), (0, 1)):
        medium.persist([each for root in roots for each in store_root(medium, uuid, root, places)])


def is_blank(medium: Medium) -> bool:
    """Return whether a pool may be made on a device, with no loss. Raise ``UsageError`` if the
    device is too small."""
    if medium.size < DATA_START:
        raise UsageError(
            f"{medium.info.name}: a pool needs at least {DATA_START} bytes, found {medium.size}"
        )
    first, second, *copies = read_slots(medium)
    if first or second:
        return False
    header = bytearray(DATA_START)
    medium.load(0, memoryview(header))
    is_begun = any(any(header[offset : offset + SLOT.size]) for offset in SLOT_OFFSETS[:2])
    for offset in SLOT_OFFSETS:
        header[offset : offset + SLOT.size] = bytes(SLOT.size)  # may be torn
    if any(header):
        return False
    # The copies were durable before the slots were begun, and may be torn before that.
    return all(copy.root.is_first if copy is not None else not is_begun for copy in copies)


def store_root(
    medium: Medium, uuid: bytes, root: Root, places: Collection[int] = range(4)
) -> list[Extent]:
    """Store a root in its slot, and return the extents to persist for it to count. places: the
    numbers of the places that are stored to."""
    body = SLOT.pack(
        magic=MAGIC,
        format_version=FORMAT_VERSION,
        uuid=uuid,
        sequence=root.sequence,
        next_version=root.next_version,
        size=root.size,
        catalogue_offset=root.catalogue.offset,
        catalogue_length=root.catalogue.length,
        catalogue_digest=root.catalogue.digest,
        catalogue_copy=root.catalogue.copy,
    )[:-DIGEST_SIZE]
    offsets = [SLOT_OFFSETS[number] for number in places if number % 2 == root.slot]
    for offset in offsets:
        medium.store(offset, body + digest(body))
    return [Extent(offset, PAGE) for offset in offsets]


def read_slots(medium: Medium) -> list[Slot | None]:
    """Return the contents of each place of a slot, None if it is not intact.

    Raises ``UsageError`` if a newer Portus wrote the pool.
    """
    return [_unpack(medium.info.name, each) for each in _load_slots(medium)]


def _load_slots(medium: Medium) -> list[bytes]:
    # All at once: each look at a pool on a storage host begins with them.
    data = memoryview(bytearray(SLOT_OFFSETS[-1] + SLOT.size))
    try:
        medium.load(0, data)
    except MediumError:
        # A sector that cannot be read may be that of one place, or of none.
        found = [_load_slot(medium, offset) for offset in SLOT_OFFSETS]
        if not any(map(any, found)):
            raise
        return found
    return [bytes(data[offset : offset + SLOT.size]) for offset in SLOT_OFFSETS]


def _load_slot(medium: Medium, offset: int) -> bytes:
    data = bytearray(SLOT.size)
    with contextlib.suppress(MediumError):
        medium.load(offset, memoryview(data))
    return bytes(data)


def _unpack(name: str, data: bytes) -> Slot | None:
    row: dict[str, Any] = SLOT.unpack(data)
    if row["magic"] != MAGIC or row["digest"] != digest(data[:-DIGEST_SIZE]):
        return None
    if row["format_version"] != FORMAT_VERSION:
        raise UsageError(
            f"{name}: written by a newer Portus (format {row['format_version']}); this one knows "
            f"format {FORMAT_VERSION}. Upgrade portus-checkpoint"
        )
    names = ("offset", "length", "digest", "copy")
    catalogue = Pointer(*(row[f"catalogue_{name}"] for name in names))
    return Slot(row["uuid"], Root(row["sequence"], row["next_version"], row["size"], catalogue))


def read_uuid(medium: Medium) -> bytes:
    """Return the identity of the pool.

    Raises ``CorruptionError`` if no slot is intact or it is no pool, ``UsageError`` if a newer
    Portus wrote the pool.
    """
    if medium.size < DATA_START:
        raise CorruptionError(
            f"{medium.info.name}: expected a pool of at least {DATA_START} bytes, found "
            f"{medium.size}; was it truncated, or is it not a pool?"
        )
    uuid = find_uuid(read_slots(medium))
    if uuid is not None:
        return uuid
    places = _load_slots(medium)
    if not any(each.startswith(MAGIC) for each in places):
        hint = f"if it was one, `portus rescue {medium.info.name}` lists what is intact"
        if medium.info.kind.is_device:
            hint += f"; `portus format {medium.info.name}` makes one and erases the device"
        raise CorruptionError(
            f"{medium.info.name} is not a Portus pool: it starts with {places[0][:16]!r}; {hint}"
        )
    raise lost_roots(medium)


def find_uuid(slots: Sequence[Slot | None]) -> bytes | None:
    """Return the identity of the pool that most places of slots name, or None if none is intact:
    one may have a root that was meant for another pool."""
    found = [each.uuid for each in slots if each is not None]
    return max(found, key=found.count, default=None)


def lost_roots(medium: Medium) -> CorruptionError:
    """Return the error of a pool of which no root is intact."""
    return CorruptionError(
        f"{medium.info.name}: both root slots are damaged, and their copies; `portus rescue "
        f"{medium.info.name}` lists what is intact"
    )


def read_roots(medium: Medium, uuid: bytes) -> list[Root]:
    """Return the intact roots, the newest of each slot, newest first: none, one or two."""
    return newest_roots(read_slots(medium), uuid)


def newest_roots(slots: Sequence[Slot | None], uuid: bytes) -> list[Root]:
    """Return the roots among the contents of all places, as ``read_roots`` does."""
    found = [
        each.root
        for number, each in enumerate(slots)
        if each is not None and each.uuid == uuid and each.root.slot == number % 2
    ]
    found.sort(key=lambda root: root.sequence)
    return sorted({root.slot: root for root in found}.values(), key=lambda root: -root.sequence)


def settle_roots(medium: Medium, uuid: bytes, roots: Collection[Root]) -> None:
    """Store roots in all their places, with an error in the log for each that is damaged; durable
    on return. Raises ``MediumError``."""
    for offset, found in zip(SLOT_OFFSETS, read_slots(medium), strict=True):
        if found is None:
            _log.error(
                "%s: the root slot at byte %d is damaged; restored from its copy. Look at the disk",
                *(medium.info.name, offset),
            )
    medium.persist([each for root in roots for each in store_root(medium, uuid, root)])


def read_holder(medium: Medium) -> str:
    """Return which process opened the pool for writing last, in words; empty if none did."""
    return _messages(medium)[0]


def read_failure(medium: Medium) -> str:
    """Return which save to the pool failed last, when and why, in words; empty if none did."""
    return _messages(medium)[1]


def store_failure(medium: Medium, text: str) -> None:
    """Store which save failed. A message takes no space, and is not persisted."""
    store_messages(medium, read_holder(medium), text)


def _messages(medium: Medium) -> tuple[str, str]:
    data = memoryview(bytearray(HOLDER_SIZE))
    medium.load(HOLDER_OFFSET, data)
    text = bytes(data).split(b"\0")[0].decode("utf-8", "replace")
    holder, _, failure = text.partition("\n")
    return holder, failure


def store_messages(medium: Medium, holder: str, failure: str) -> None:
    """Store both messages, not durably. Each is one line; the second is cut if there is no room."""
    # The text may be from a client of a host: a zero byte in it would end the page's text.
    text = "\n".join(printable(" ".join(each.split())) for each in (holder, failure) if each)
    data = text.encode()[: HOLDER_SIZE - 1].decode("utf-8", "ignore").encode()
    medium.store(HOLDER_OFFSET, data.ljust(HOLDER_SIZE, b"\0"))
