"""A pool: one medium with an index on it; one writer, any number of readers.

Commit order (V3): data and records are stored, then persisted; then one root slot is stored, then
persisted. Nothing in a reachable page is stored to in between (V1).

Commits that arrive while another one persists are made as one (``commit_queue``), if they are of
different models: their versions have their own ids, and share one commit number.

Reuse (V1, V10): a page may be reserved when neither root reaches it, no reader pins a version that
holds it, and no reservation holds it. The space of such pages may be returned to the file system
(``give_back``). Then they are holes, and using them again is like growth, but within the pool.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy.typing as npt

from portus.engine.media.base import Medium
from portus.engine.media.file_calls import OUT_OF_SPACE
from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError, MediumError
from portus.reach.format.layout import HOLDER_OFFSET, HOLDER_SIZE
from portus.reach.index.catalogue import (
    Catalogue,
    newest_catalogue,
    read_catalogue,
    read_version,
    version_runs,
)
from portus.reach.index.commit_queue import Line, RoomError
from portus.reach.index.commit_records import Change, CommitRecords, RecordArea
from portus.reach.index.free_space import FreeSpace, SpaceRequest, pages_for_records
from portus.reach.index.reader import PoolReader, spare_pages
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.index.roots import (
    Root,
    read_failure,
    read_holder,
    read_roots,
    read_slots,
    settle_roots,
    store_messages,
    store_root,
)
from portus.reach.index.space import (
    Runs,
    extents_runs,
    merge,
    page_count,
)
from portus.reach.media.pool import Locks, SparseMedium

_log: Final = logging.getLogger("portus")

_GROWTH: Final = 2 << 20
"""Pools grow to a multiple of this many bytes, the size of a huge page."""


class PoolWriter(PoolReader):
    """The one writer of a pool. Any thread may call it; commits happen one after another."""

    def __init__(
        self, medium: Medium, locks: Locks, *, timeout_s: float = 5.0, max_bytes: int | None = None
    ) -> None:
        """Wait up to ``timeout_s`` for the lock. Raise ``BusyError``, ``CorruptionError``, and
        ``UsageError`` for a pool of a newer Portus."""
        # The lock first: a writer that is leaving may still grow the pool, and store a root.
        locks.acquire_writer(timeout_s)
        super().__init__(medium, locks)
        self.max_bytes = max_bytes
        """Bytes to which the pool may grow from now on; None: no limit."""
        self.yields: Final[list[Callable[[], bool]]] = []
        """Asked, where there is no more room, to end what reads a version for long and can begin
        again: it may hold space of one that was retired. True if something ended."""
        # Reentrant: a commit without room settles, which is a commit too.
        self._committing: Final = threading.RLock()
        self._line: Final = Line(self._committing, self.commit_together)
        self.persist_s = 0.0
        """Seconds spent in the persists of commits."""
        self._space: Final = FreeSpace(medium, locks)
        self._slots: Final[dict[int, Root]] = {}
        self._unsure: Final[set[int]] = set()
        """Slots with unknown contents: a store failed."""
        self._cramped = False
        self.changed_by_others = False
        """True once another program has changed the pool, which is poisoned then."""
        self._glanced: Root | None = None
        """The newest root, if the pool was looked at since it was committed."""
        self._recover()

    def catalogue(self) -> Catalogue:
        """Return the committed catalogue, from memory."""
        return self._roots[0]

    @property
    def _roots(self) -> Sequence[Catalogue]:
        """The catalogues of the slots, newest first."""
        return self._space.roots

    def reserve(self, length: int, *, contiguous: bool = False) -> list[Extent]:
        """Return free space for ``length`` bytes, held until ``release`` or a commit that reaches
        it.

        Extents start and end on pages. May grow the pool, which blocks. The last free pages stay
        for records (``contiguous``), if possible: without them nothing could be committed any more.
        Raises ``MediumError`` (ENOSPC) if there is no room; then nothing changes.
        """
        pages = -(-length // PAGE)
        # Data leaves pages to records: without them nothing could be retired to make room.
        wanted = SpaceRequest(pages, contiguous, 0 if contiguous else pages_for_records(pages))
        extents = self._space.take(wanted)
        if extents is None:
            # Growing and settling take turns with commits; while waiting, space may become free.
            with self._committing:
                return self._space.take(wanted) or self._make_room(wanted)
        return extents

    def hold(self, offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> list[Extent]:
        """Keep pages of a committed version from reuse: a save in progress is going to share them.
        Return extents for ``release``."""
        return self._space.hold(offsets, lengths)

    def release(self, extents: Sequence[Extent]) -> None:
        """Release the extents of one ``reserve`` or ``hold``. Pages that a root reaches stay
        taken."""
        self._space.release(extents)

    def give_back(self, at_most: int | None = None) -> int:
        """Return unreached space to the owner of the medium; return how many bytes that was.

        Later saves take it again, as if the pool grew, if there is any then.
        at_most: bytes; None: all but what the next commit needs for its records: else nothing could
        be retired from this pool on a full disk. Settles first (V1): until then, pages that only
        the older root reaches may be needed. Raises ``MediumError``. Does nothing to a poisoned
        pool, nor on a device or in memory, whose space is fixed.
        """
        if not isinstance(self.medium, SparseMedium) or self.medium.is_poisoned:
            return 0
        with self._committing:
            self._settle()
            pages = None if at_most is None else at_most // PAGE
            spared = spare_pages(merge(each.record_runs for each in self._roots))
            return self.medium.discard(self._space.give_back(spared, pages))

    def free_bytes(self) -> int:
        """Return the bytes that can be reserved without growth, holes not included."""
        return page_count(self._space.free()) * PAGE

    def hole_bytes(self) -> int:
        """Return the bytes of free holes: to use them is like growth."""
        return page_count(self._space.free_holes()) * PAGE

    def commit(
        self,
        new: VersionRecord | None,
        data: Sequence[Extent] = (),
        retire: Collection[int] = (),
    ) -> VersionRecord | None:
        """Persist data and records, then the root. After that, ``new`` is in the pool and the
        retired versions are not.

        data: extents stored to for this version; persisted here. Commits that wait for each other
        share their persists.
        Returns the record of ``new``, None if there is none. Raises ``MediumError`` if a persist
        fails: then the pool is poisoned for writing, and earlier commits are intact.
        """
        return self._line.make(Change(new, data, retire))

    def commit_together(self, changes: Sequence[Change]) -> list[VersionRecord | None]:
        """Commit several changes together, each of another model: all or none. Return their
        records, in the order of ``changes``. Raise ``RoomError`` if there is no room; fewer changes
        may fit."""
        with self._committing:
            # Under the lock, since a draft builds on the newest root and takes the next number.
            draft, area, apart = self._draft_commit(changes)
            try:
                # Copies and one root slot, not libpmemobj's undo log: that admits one process only,
                # and no test can record its stores (decision 0001).
                places = [RecordArea(each.offset) for each in (*area, *apart)]
                catalogue = draft.place(places, self.medium.size)
                for place in places:
                    self.medium.store(place.offset, place.data)
                data = [extent for change in changes for extent in change.data]
                self._persist([*data, *area, *apart])  # V3: everything they reach, first
                self._persist_root(catalogue.root)  # V3: then their root
                reach = {entry.info.id: version_runs(entry, made) for entry, made in draft.made}
                # From here on, pages that only the root before the previous one reached are free
                # (V10).
                self._space.advance([catalogue, self._roots[0]], reach)
            finally:
                # On failure too: whatever the slot may say, the medium is poisoned by then.
                self.release(area)
                self.release(apart)
        made = iter(draft.made)
        return [None if change.new is None else next(made)[1] for change in changes]

    def _persist_root(self, root: Root) -> None:
        # The last moment: if another program committed to the pool, this would overwrite its root.
        self._look()
        self._unsure.add(root.slot)  # until the store has returned: it may write only a part
        try:
            stored = store_root(self.medium, self.uuid, root)
        except BaseException:
            # One of its places may have it, and readers may see it: no page of it may be reused.
            self.medium.poison("a root was stored in part")
            raise
        self._slots[root.slot] = root
        self._unsure.discard(root.slot)
        self._persist(stored)

    def look(self) -> None:
        """Raise ``CorruptionError`` unless the pool is as this writer left it: its size, its
        identity and its roots. If it is not, poison it: another program may own it by now.
        Restores a damaged copy of a root. Every commit does this."""
        with self._committing:
            self._look()

    def glance(self, offset: int = 0, expected: bytes = b"") -> None:
        """Check as ``look`` does, for the price of one load in most cases: for commits that store
        no root. ``expected``: the bytes that this writer stored last at ``offset``, if they are
        newer than the root that was looked at before. No other pool has them, nor has an older copy
        of this one."""
        root = self._roots[0].root
        is_known = bool(expected) and root is self._glanced and self.medium.size >= root.size
        if is_known and self._has(offset, expected):
            return
        with self._committing:
            self._look(offset, expected)
        self._glanced = root

    def _has(self, offset: int, expected: bytes) -> bool:
        there = bytearray(len(expected))
        try:
            self.medium.load(offset, memoryview(there))
        except MediumError:  # the file may be shorter now
            return False
        return there == expected

    def _look(self, offset: int = 0, expected: bytes = b"") -> None:
        try:
            self._compare()
            if not self._has(offset, expected):
                raise CorruptionError(
                    f"{self.medium.info.name}: expected what was stored last, at byte {offset}, "
                    "found something else: another program overwrote it while it was being "
                    "written; save to a new pool"
                )
        except CorruptionError:
            self.changed_by_others = True
            # For good: pages that are free to this writer may be in use by the other one.
            self.medium.poison("another program changed it while it was being written")
            raise

    def _compare(self) -> None:
        root, name = self._roots[0].root, self.medium.info.name
        if self.medium.size < root.size:
            raise CorruptionError(
                f"{name}: expected {root.size} bytes or more, found {self.medium.size}: "
                "another program truncated it while it was being written; save to a new pool"
            )
        slots = read_slots(self.medium)
        if not any(slot is not None and slot.uuid == self.uuid for slot in slots):
            raise CorruptionError(
                f"{name}: expected pool {self.uuid.hex()}, found no root of it: another program "
                "overwrote it while it was being written; save to a new pool"
            )
        known = [None if n % 2 in self._unsure else self._slots.get(n % 2) for n in range(4)]
        for there, own in zip(slots, known, strict=True):
            if own is not None and there is not None and there != (self.uuid, own):
                raise CorruptionError(
                    f"{name}: expected commit {root.sequence} to be the newest, found commit "
                    f"{there.root.sequence} of another writer; save to a new pool"
                )
        # One copy is intact, so the other is restored while that is possible.
        if any(own is not None and there is None for there, own in zip(slots, known, strict=True)):
            settle_roots(self.medium, self.uuid, self._slots.values())

    def _persist(self, ranges: Sequence[Extent]) -> None:
        start = time.perf_counter()
        self.medium.persist(ranges)
        self.persist_s += time.perf_counter() - start

    def retire(self, versions: Collection[int]) -> None:
        """Retire versions, by id. Unknown ids are ignored."""
        if not self.catalogue().ids().isdisjoint(versions):
            self.commit(None, retire=versions)

    def let_go(self, tokens: Collection[bytes]) -> None:
        """Retire versions, by their tokens. Unknown tokens are ignored."""
        entries = self.catalogue().entries()
        self.retire({entry.info.id for entry in entries if entry.info.token in tokens})

    def close(self) -> None:
        """Release the writer lock and close the medium. Reservations are forgotten."""
        with self._committing:
            super().close()

    def _recover(self) -> None:
        """Choose the root, make it durable in case it was only in caches, and find out what is
        reached (V2, V10)."""
        current = newest_catalogue(self.medium, self.uuid)
        # Once more: if only the process before died, that root may be in caches alone, and its
        # space must not be reused before it is durable (decision 0002).
        self._slots.update({each.slot: each for each in read_roots(self.medium, self.uuid)})
        settle_roots(self.medium, self.uuid, self._slots.values())  # V2: before space is reused
        # After that: a device with a page of it, and no root, is not blank.
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = f"pid {os.getpid()} on {platform.node()}, since {since}"
        store_messages(self.medium, holder, read_failure(self.medium))
        roots = [current, *self._older(current)]
        entries = {entry.info.id: entry for each in reversed(roots) for entry in each.entries()}
        holes = self.medium.holes() if isinstance(self.medium, SparseMedium) else []
        reach = {version: self._reach_of(entry) for version, entry in entries.items()}
        self._space.start(roots, reach, holes)
        if len(self._roots) == 1:
            # The other slot is torn, or its catalogue is lost. The rest of a root that was never
            # committed could be intact again behind the first line of another of its number.
            self._commit_again()

    def _older(self, current: Catalogue) -> list[Catalogue]:
        """Return the catalogue of the other slot, if intact: its pages are not reused yet."""
        for root in read_roots(self.medium, self.uuid):
            if root.sequence < current.root.sequence:
                with contextlib.suppress(CorruptionError):
                    return [read_catalogue(self.medium, root)]
        return []

    def _reach_of(self, entry: VersionEntry) -> Runs:
        try:
            return version_runs(entry, read_version(self.medium, entry))
        except CorruptionError as error:
            # It can never be loaded again; only its record is kept, for `portus check` to name.
            _log.error("%s: version %d is lost: %s", self.medium.info.name, entry.info.id, error)
            return extents_runs(entry.pointer.extents)

    def announce(self) -> str:
        """Make the name of this writer durable, so that processes on other machines see it, and
        return it. Raise ``MediumError``."""
        self.medium.persist([Extent(HOLDER_OFFSET, HOLDER_SIZE)])
        return read_holder(self.medium)

    def _make_room(self, wanted: SpaceRequest) -> list[Extent]:
        """Make room: by retired versions first, then by growth, and from spared pages last."""
        # Growing first would make a pool larger than its versions need, and one with ``max_bytes``
        # would fail with space to spare.
        self._settle()
        try:
            return self._grow_for(wanted)
        except MediumError as error:
            ended = [each() for each in self.yields]
            extents = self._space.take(wanted) if any(ended) else None
            extents = extents or self._scrape(replace(wanted, spare=0), error)
            if extents is None:
                raise
            return extents

    def _grow_for(self, wanted: SpaceRequest) -> list[Extent]:
        """Reserve space, after growth if that is needed. Raise ``MediumError``."""
        # Ends: another thread may take the added pages, but then it has all that it wanted.
        while (extents := self._space.take(wanted)) is None:
            self._grow(self._space.missing(wanted), contiguous=wanted.contiguous)
        return extents

    def _scrape(self, wanted: SpaceRequest, why: MediumError) -> list[Extent] | None:
        """Return room where the pool cannot grow: from spared pages, or by returning many small
        pieces for one at the end."""
        extents = self._space.take(wanted)
        scattered = extents is None and wanted.contiguous and why.errno in OUT_OF_SPACE
        # A file system may need a few blocks to note what is given back.
        if scattered and self.give_back((wanted.pages + 8) * PAGE):
            with contextlib.suppress(MediumError):
                return self._grow_for(wanted)
        return extents

    def _settle(self) -> None:
        """Commit the same catalogue once more if only the older root reaches some pages, so that
        they can be used."""
        if len(self._roots) == 2 and not self._roots[0].ids() >= self._roots[1].ids():
            self._commit_again()

    def _commit_again(self) -> None:
        """Commit the same catalogue again, so that both slots reach it, and no other."""
        current = self._roots[0]
        root = replace(current.root, sequence=current.root.sequence + 1)
        again = replace(current, root=root)
        self._persist_root(root)
        self._space.advance([again, current], {})

    def _grow(self, pages: int, *, contiguous: bool) -> None:
        """Add pages: first those that were returned, then new ones at the end. Raise
        ``MediumError``."""
        if pages <= 0:
            return
        try:
            self._look()  # truncated bytes would come back as zeros
        except CorruptionError as error:
            raise MediumError(errno.EIO, str(error)) from error
        # Holes first: they are within the size, which ``max_bytes`` bounds.
        pages -= self._fill_holes(pages, contiguous=contiguous)
        if not pages:
            return
        exact = self.medium.size + pages * PAGE
        size = exact + -exact % _GROWTH
        if self.max_bytes is not None:
            size = min(size, self.max_bytes - self.max_bytes % PAGE)
            if size < exact:
                why = f"max_bytes is {self.max_bytes}"
                raise MediumError(errno.ENOSPC, self._full(pages, why, contiguous=contiguous))
        try:
            self.medium.grow(size)
        except MediumError as error:
            if error.errno not in OUT_OF_SPACE or size == exact:
                raise
            # The needed pages may fit even if a whole step does not.
            self.medium.grow(exact)

    def _fill_holes(self, pages: int, *, contiguous: bool) -> int:
        """Fill holes of ``pages`` pages at most; return how many."""
        extents = self._space.choose_holes(pages, contiguous=contiguous)
        if not extents:
            return 0
        assert isinstance(self.medium, SparseMedium)
        try:
            self.medium.fill(extents)
        except MediumError as error:
            if error.errno not in OUT_OF_SPACE:
                raise
            return 0  # there may be less at the end
        self._space.fill(extents)
        return page_count(extents_runs(extents))

    def _full(self, pages: int, why: str, *, contiguous: bool) -> str:
        pinned = self._space.pinned_versions()  # first: a reader that unpins makes room
        free = f"{self.free_bytes()} of {self.medium.size}"
        piece = f" than the {free} that are free"
        if contiguous:
            piece = f" in one piece; {free} are free, in smaller pieces"
        return f"{self.medium.info.name}: {pages * PAGE} more bytes needed{piece}, {why}" + (
            f"; readers hold versions {pinned}" if pinned else ""
        )

    def _draft_commit(
        self, changes: Sequence[Change]
    ) -> tuple[CommitRecords, list[Extent], list[Extent]]:
        """Return a draft on the newest root, room for its records, and room for their copies if
        there is any. Raise ``RoomError``.

        Making room may commit (settle). Then the draft is made again: it would take the number of
        that commit, and bring back what that retired.
        """
        while True:  # ends: each turn but the last freed space that then stays free
            before = self._roots[0]
            draft = CommitRecords(before, self.uuid, changes)
            try:
                area = self.reserve(draft.size, contiguous=True)
            except MediumError as error:
                raise RoomError(error.errno, error.strerror) from error
            if self._roots[0] is before:
                return draft, area, self._apart(draft.size)
            self.release(area)

    def _apart(self, length: int) -> list[Extent]:
        """Return room for copies, if enough is left for the records of later commits."""
        pages = -(-length // PAGE)
        wanted = SpaceRequest(pages, True, pages_for_records(pages), apart=True)
        # Far from the records: one bad block of a disk must not take both.
        extents = None
        with contextlib.suppress(MediumError):
            extents = self._grow_for(wanted)
        if extents is None and not self._cramped:
            _log.warning(
                "%s: no space for copies of records, which survive a damaged page: make room for "
                "the pool",
                self.medium.info.name,
            )
        self._cramped = extents is None
        return extents or []
