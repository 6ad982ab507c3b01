"""``PoolDraft``: a version in the making in a pool, until the commit or ``release``.

The pool is open in this process. A storage host uses the same class, and moves the bytes to the
room of ``reserve`` itself.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.local import check, copy, read_stored
from portus.engine.copying.segments import Crcs, Digests, Sources, Stop
from portus.engine.format.checksum import unit_counts
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.plan import Column, Feed, Previous
from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import EXTENT
from portus.reach.index.commit_records import Change, new_version
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import Rows, VersionRecord, overlaps
from portus.reach.versions.parts import (
    StorageRows,
    offsets_in,
    part,
    rows_of,
    share,
    sources,
)

ALIGNED_SIZE: Final = 16 * PAGE
"""Storages of at least this many bytes start on a page; smaller ones share pages, 64-aligned."""

_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room in a pool for some storages of a draft, and the place of each of them in it."""

    indices: Column
    target: Sources
    extents: Rows
    counts: Column


class PoolDraft:
    """A draft in a pool of this process."""

    def __init__(self, writer: PoolWriter, lengths: Column) -> None:
        """lengths: bytes of each storage of the version."""
        self._writer: Final = writer
        self._lengths: Final = lengths
        self._groups: list[StorageRows] = []
        self._held: list[list[Extent]] = []
        self._copied: list[Extent] = []
        self.retired = 0
        """The number of versions that the commit removed."""

    @property
    def name(self) -> str:
        return self._writer.medium.info.name

    @property
    def bounced_bytes(self) -> int:
        """Zero: this process copies."""
        return 0

    @property
    def kept_bytes(self) -> int:
        """Zero: equal storages are shared."""
        return 0

    def copy(
        self, indices: Column, address: Column, stop: Stop, crcs: Crcs | None = None
    ) -> Digests:
        """Copy storages into the pool, see ``Draft``. crcs: a row for each unit, filled with the
        CRC32 of the stored bytes."""
        reserved = self.reserve(indices, address)
        digests = copy(self._writer.medium, reserved.target, stop, crcs=crcs)
        self.note(reserved, digests)
        return digests

    def copy_fed(
        self, indices: Column, feeds: Sequence[Feed], stop: Stop, crcs: Crcs | None = None
    ) -> Digests:
        """Copy storages that have no addresses, likewise."""
        reserved = self.reserve(indices, np.zeros(len(indices), np.int64))
        places = reserved.target.extents
        count = int(unit_counts(reserved.target.length).sum())
        sums = np.zeros(count, np.uint32) if crcs is None else crcs
        found: list[Digests] = []
        done = 0
        for feed in feeds:
            with feed.units() as units:
                for address, length in units:
                    own = part(places, done, done + length)
                    done += length
                    source = Sources.at([address], [length], own)
                    row = sums[len(found) : len(found) + 1]
                    found.append(copy(self._writer.medium, source, stop, crcs=row))
        digests = np.concatenate(found)
        self.note(reserved, digests)
        return digests

    def reserve(self, indices: Column, address: Column) -> Reservation:
        """Reserve room for storages, which the caller fills and then passes to ``note``. Blocks
        while the pool grows."""
        lengths = self._lengths[indices]
        offsets, size = pack(lengths)
        room = self._writer.reserve(size)
        self._held.append(room)
        self._copied += room
        extents, counts = place(offsets, lengths, room)
        return Reservation(indices, sources(address, lengths, extents), extents, counts)

    def note(self, reserved: Reservation, digests: Digests) -> None:
        """Note that ``reserved`` was filled. digests: of the stored bytes."""
        born = np.zeros(len(reserved.indices), np.int64)
        self._groups.append(
            StorageRows(reserved.indices, reserved.extents, reserved.counts, digests, born)
        )

    def share(self, before: Previous, indices: Column, address: Column, stop: Stop) -> bool:
        assert isinstance(before, VersionRecord), "a pool shares with its own versions"
        group = share(before, indices)
        # Held first: if the version is still there after this, its pages stay.
        self._held.append(self._writer.hold(group.extents["offset"], group.extents["length"]))
        if before.info.id not in self._writer.catalogue().ids():
            return False  # it was retired just before
        # The bytes of the pool are hashed, not those at ``address``: they may have rotted.
        moved = sources(np.ones_like(indices), self._lengths[indices], group.extents)
        if not np.array_equal(check(self._writer.medium, moved, stop), group.digests):
            return False
        self._groups.append(group)
        return True

    def read_back(self, storage: Column, offset: Column, length: Column) -> NDArray[np.uint8]:
        return read_stored(self._writer.medium, offsets_in(self._groups, storage, offset), length)

    def commit(self, labels: Labels) -> VersionRecord:
        return self.commit_rows(self.rows(), labels)

    def rows(self) -> tuple[Rows, Rows, Rows]:
        """Return storage, extent and unit rows of the version, once all storages are placed."""
        return rows_of(self._groups, self._lengths)

    def commit_rows(
        self, rows: tuple[Rows, Rows, Rows], labels: Labels, gone: Collection[int] = ()
    ) -> VersionRecord:
        """Commit, and release all that is held. gone: ids of more versions to retire with it."""
        change = self.change(rows, labels)
        retire = {*change.retire, *gone}
        self.retired = len(retire)
        record = self._writer.commit(change.new, change.data, retire)
        assert record is not None
        self.release()
        return record

    def change(self, rows: tuple[Rows, Rows, Rows], labels: Labels) -> Change:
        """Return the request to the commit of this version."""
        return Change(new_version(labels, rows), self._copied, self._surplus(labels))

    def _surplus(self, labels: Labels) -> set[int]:
        """Return the ids of the versions that go once this one is committed."""
        model = self._writer.catalogue().models.get(labels.model)
        if model is None or labels.keep is None:
            return set()
        infos = [entry.info for entry in model]
        # A step is in the pool once: its newer version replaces it in the same commit (V5).
        others = [info for info in infos if info.step != labels.step]
        # ``keep`` counts the version that is about to be committed, with its metrics.
        made = replace(
            infos[-1], id=0, step=labels.step, time_ns=time.time_ns(), metrics=labels.metrics
        )
        staying = {info.id for info in labels.keep.staying([*others, made])}
        return {info.id for info in infos} - staying

    def release(self) -> None:
        held, self._held = self._held, []
        for extents in held:
            self._writer.release(extents)


def pack(lengths: Column) -> tuple[Column, int]:
    """Return offsets at which storages of ``lengths`` lie side by side, and the bytes that they
    take.

    Big ones first, each on pages of its own; the small ones after them, 64-aligned.
    """
    # Small ones share pages only with others of the same save (V1).
    big = lengths >= ALIGNED_SIZE
    room = np.where(big, -(-lengths // PAGE) * PAGE, -(-lengths // _ALIGNMENT) * _ALIGNMENT)
    order = np.argsort(~big, kind="stable")
    ends = np.cumsum(room[order])
    offsets = np.empty(len(lengths), np.int64)
    offsets[order] = ends - room[order]
    return offsets, int(ends[-1]) if len(ends) else 0


def place(offsets: Column, lengths: Column, room: list[Extent]) -> tuple[Rows, Column]:
    """Return extent rows of storages at ``offsets`` of the reserved ``room`` (its extents end to
    end), and how many rows each storage has."""
    edges = np.cumsum([0] + [extent.length for extent in room])
    piece, inside, length = overlaps(edges, offsets, lengths)
    rows = np.zeros(len(piece), EXTENT.dtype)
    rows["offset"] = np.array([extent.offset for extent in room], np.int64)[piece] + inside
    rows["length"] = length
    some, counts = np.flatnonzero(lengths), np.zeros(len(lengths), np.int64)
    first = np.searchsorted(edges, offsets[some], "right") - 1
    counts[some] = np.searchsorted(edges, offsets[some] + lengths[some], "left") - first
    return rows, counts
