"""A pool: one medium with an index on it; one writer, any number of readers.

Commit order (V3): data and records are stored, then persisted; then one root slot is stored, then
persisted. Nothing in a reachable page is stored to in between (V1).

Commits that come while another one persists are made as one (``line``), if they are of different
models: their versions have ids of their own, and one commit number.

Reuse (V1, V10): a page may be reserved when neither root reaches it, nobody pins a version that
holds it, and no reservation in progress holds it. Space of such pages may be given back to the file
system (``give_back``): then they are holes, and to use them again is to grow, but within the pool.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from portus.errors import CorruptionError, MediumError, StaleError, UsageError
from portus.format.layout import (
    BUNCHES,
    COPY,
    DATA_START,
    HEADER,
    HOLDER_OFFSET,
    HOLDER_SIZE,
    IN_PLACE,
    LOGS,
    SUPERBLOCK_OFFSETS,
    VERSION_ID_MAX,
    RecordKind,
)
from portus.index.catalogue import (
    Catalogue,
    Model,
    newest_catalogue,
    read_catalogue,
    read_copies,
    read_version,
    version_runs,
)
from portus.index.line import Line, RoomError
from portus.index.records import (
    NOWHERE,
    Copy,
    Pointer,
    Rows,
    VersionEntry,
    VersionLog,
    VersionRecord,
    encode_copies,
    encode_index,
    encode_metrics,
    encode_table,
    encode_version,
    frame,
    metrics_size,
    point,
    read_copied,
    read_whole,
)
from portus.index.rescue import next_catalogue
from portus.index.roots import (
    Root,
    Superblock,
    clear_slot,
    damaged_slot,
    format_superblock,
    read_roots,
    read_superblock,
    settle_superblock,
    store_root,
    whole_superblock,
)
from portus.index.space import (
    EMPTY,
    Runs,
    alone,
    choose,
    extents_runs,
    gaps,
    last,
    merged,
    page_count,
    runs_of,
    without,
)
from portus.media.base import Locks, Medium, SparseMedium
from portus.media.warm import warm
from portus.spec import PAGE, Extent, VersionInfo

_log: Final = logging.getLogger("portus")

_TOUCHED: Final = 2 << 20
"""Bytes of which it is remembered together whether they were touched."""

REFRESH_COMMITS: Final = 64
"""What versions share is written afresh after so many commits, so that rot cannot hide in all."""

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a medium says that cannot grow, or fill its holes."""

_COPIES_MAX: Final = 16 << 20
"""Bytes of records of earlier commits that one commit copies; the rest is left to the next."""

_GROWTH: Final = 2 << 20
"""A pool grows to a multiple of this many bytes: the size of a huge page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A version about to be committed; its bytes are stored already.

    ``layout`` is a pointer to a layout record that a version in the catalogue uses, or the
    payload of a new one; so is ``tree``. Rows as in the format; ``born`` 0 stands for this commit.
    ``inexact``, ``metrics``: see ``VersionInfo``. ``log``: pages of its own that are reserved, or
    the log of the version before it;
    ``has_bunches``: its entries may have bunches.
    """

    model: str
    step: int
    token: bytes
    layout: Pointer | bytes
    tree: Pointer | bytes
    storages: Rows
    extents: Rows
    units: Rows
    inexact: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    log: VersionLog | None = None
    has_bunches: bool = False

    @property
    def features(self) -> int:
        """The incompat bits that it needs."""
        if self.log is None:
            return 0
        bunches = BUNCHES if self.has_bunches else 0
        return LOGS | bunches | (IN_PLACE if self.log.in_place else 0)


@dataclass(frozen=True, slots=True)
class Change:
    """What one commit is asked for: a ``new`` version, if any, whose bytes are in the extents
    ``data``; versions to ``retire``, by id."""

    new: NewVersion | None
    data: Sequence[Extent] = ()
    retire: Collection[int] = ()


def format_pool(medium: Medium, uuid: bytes | None = None, after: Root | None = None) -> None:
    """Make an empty pool of a new medium of at least ``DATA_START`` bytes, durable on return.
    uuid, after: see ``format_superblock``."""
    format_superblock(medium, uuid, after)
    medium.persist([Extent(0, DATA_START)])


def read_holder(medium: Medium) -> str:
    """Who opened the pool for writing last, in words; empty if nobody did."""
    return _messages(medium)[0]


def read_failure(medium: Medium) -> str:
    """Which save to the pool failed last, when and why, in words; empty if none did."""
    return _messages(medium)[1]


def store_failure(medium: Medium, text: str) -> None:
    """Say which save failed. Takes no space, and is not persisted: a message, and no more."""
    _store_messages(medium, read_holder(medium), text)


def _messages(medium: Medium) -> tuple[str, str]:
    data = memoryview(bytearray(HOLDER_SIZE))
    medium.load(HOLDER_OFFSET, data)
    text = bytes(data).split(b"\0")[0].decode("utf-8", "replace")
    holder, _, failure = text.partition("\n")
    return holder, failure


def _store_messages(medium: Medium, holder: str, failure: str) -> None:
    """Each is one line, and the second is cut off where there is no more room."""
    text = "\n".join(" ".join(each.split()) for each in (holder, failure) if each)
    data = text.encode()[: HOLDER_SIZE - 1].decode("utf-8", "ignore").encode()
    medium.store(HOLDER_OFFSET, data.ljust(HOLDER_SIZE, b"\0"))


class PoolReader:
    """Looks at a pool that somebody may be writing. Owns medium and locks, and closes them.

    Safe to share between threads.
    """

    def __init__(self, medium: Medium, locks: Locks) -> None:
        self.medium: Final = medium
        self.locks: Final = locks
        self._superblock = read_superblock(medium)
        self._searched: tuple[Root, Catalogue] | None = None

    @property
    def superblock(self) -> Superblock:
        """Who the pool is."""
        return self._superblock

    def catalogue(self) -> Catalogue:
        """What is committed now. Raises ``CorruptionError``.

        Where a root slot is damaged, the commit that it may have led to is searched for, once: all
        that is free is read.
        """
        return self._ahead(newest_catalogue(self.medium, self.superblock.uuid))

    def may_have(self, token: bytes) -> bool:
        """True if readers may find the version of that token, though its commit failed: its root
        is in a slot, durable or not. Reads the pool anew. Raises ``MediumError``."""
        try:
            there = newest_catalogue(self.medium, self.superblock.uuid)
        except CorruptionError:
            return False  # nobody finds anything there
        return any(entry.info.token == token for entry in there.entries())

    def _ahead(self, found: Catalogue) -> Catalogue:
        """The catalogue that a damaged slot led to, if all of it is whole; else ``found``. A slot
        that is torn since a crash in a commit looks like one that rotted."""
        slot = damaged_slot(self.medium, self.superblock.uuid, found.root)
        if slot is None or self._is_being_written():
            return found
        if self._searched is None or self._searched[0] != found.root:
            name = self.medium.info.name
            _log.warning(
                "%s: root slot %d is damaged; searching for the commit that it led to", name, slot
            )
            ahead = next_catalogue(self.medium, self.superblock.uuid, found)
            if ahead is not None:
                _log.error(
                    "%s: root slot %d is damaged, but commit %d, to which it led, is intact: "
                    "that is the newest",
                    name,
                    slot,
                    ahead.root.sequence,
                )
            self._searched = found.root, ahead or found
        return self._searched[1]

    def _is_being_written(self) -> bool:
        """True if somebody may be storing a slot just now."""
        return self.locks.has_writer()

    def kept_bytes(self, but: Collection[int] = ()) -> int:
        """Bytes of pages that the versions reach, all ``but`` some by their ids, and what leads to
        them. Reads the record of each."""
        catalogue = self.catalogue()
        kept = [entry for entry in catalogue.entries() if entry.info.id not in but]
        whole = replace(catalogue, copies=read_copies(self.medium, catalogue.root))
        reaches = [self._reach_of(entry) for entry in kept]
        return DATA_START + page_count(merged([*reaches, whole.record_runs])) * PAGE

    def unique_bytes(self) -> dict[int, int]:
        """For each version, by its id: bytes of the pages that no other version reaches, which is
        what removing it alone would free. Reads the record of each."""
        entries = list(self.catalogue().entries())
        pages = alone([self._reach_of(entry) for entry in entries])
        return {e.info.id: each * PAGE for e, each in zip(entries, pages, strict=True)}

    def _reach_of(self, entry: VersionEntry) -> Runs:
        """The pages of a version; of one whose record is damaged, those of the record."""
        with contextlib.suppress(CorruptionError):
            return version_runs(entry, self.record(entry))
        return extents_runs([entry.pointer.extent])

    @contextlib.contextmanager
    def pinned(self, version: int) -> Iterator[VersionEntry]:
        """Hold a version while it is read: its space is not reused before this ends (V1).

        Raises ``StaleError`` if it is not in the pool (any more).
        """
        self.locks.pin(version)
        try:
            # After the pin: a writer that asked for pins before it saw no version of this id
            # in its own roots, so if the root still has it, the writer has to see our pin.
            entry = self.catalogue().find(version)
            if entry is None:
                raise StaleError(
                    f"version {version} is not in {self.medium.info.name} any more; load the "
                    "newest again"
                )
            yield entry
        finally:
            self.locks.unpin(version)

    def record(self, entry: VersionEntry) -> VersionRecord:
        """The record of a pinned version. Raises ``CorruptionError``."""
        return read_version(self.medium, entry)

    def payload(self, pointer: Pointer, kind: RecordKind) -> memoryview:
        """A layout or a tree of a pinned version, or its copy. Raises ``CorruptionError``."""
        return read_copied(self.medium, pointer, kind, self._copies)

    def _copies(self) -> Sequence[Copy]:
        return read_copies(self.medium, self.catalogue().root)

    def close(self) -> None:
        """Let go of the medium, the lock and the pins."""
        self.locks.close()
        self.medium.close()


class PoolWriter(PoolReader):
    """The one writer of a pool. ``reserve`` and ``release`` may be called from any thread,
    as may the rest, but commits happen one after another."""

    def __init__(
        self, medium: Medium, locks: Locks, *, timeout_s: float = 5.0, max_bytes: int | None = None
    ) -> None:
        """Waits up to ``timeout_s`` for the lock. Raises ``BusyError``, ``CorruptionError``,
        ``UsageError`` for a pool this program may not write."""
        locks.acquire_writer(timeout_s)
        super().__init__(medium, locks)
        if not self.superblock.writable:
            raise UsageError(f"{medium.info.name}: a newer Portus wrote it; upgrade to write it")
        self._superblock = settle_superblock(medium, self.superblock)
        self.max_bytes = max_bytes
        """The longest that the pool grows to, from now on; None: as it likes."""
        self.deleted: Callable[[], Collection[int]] = lambda: ()
        """Asked for versions whose reference files are gone, when space is short."""
        self.advice: Callable[[], str] = str
        """Asked for the end of the message when there is none even so."""
        self.yields: Callable[[], bool] = lambda: False
        """Asked, where there is no more room, to end what reads a version for long and can begin
        again: it may hold space of one that was retired. True if something ended."""
        self._committing: Final = threading.RLock()
        self._line: Final = Line(self._committing, self.commit_together, _model_of)
        self.persist_s = 0.0
        """Seconds spent in the persists of commits."""
        self._reclaiming = False
        self._touched: Final = bytearray()
        self._guard: Final = threading.Lock()
        self._held: Final[list[Runs]] = []
        self._holes: Runs = EMPTY
        """Pages that may have no space: they are filled before they are reserved."""
        self._reach: Final[dict[int, Runs]] = {}
        self._shapes: Final[dict[int, tuple[Pointer | bytes, Pointer | bytes]]] = {}
        self._slots: Final[dict[int, Root]] = {}
        self._unsure: Final[set[int]] = set()
        """Slots of which it is not known what is in them: a store failed."""
        self._damaged: Final[set[Pointer]] = set()
        self._cramped = False
        self.changed_by_others = False
        """True once somebody else was found to have changed the pool; it is poisoned then."""
        self._glanced: Root | None = None
        """The newest root, if the pool was looked at since it was committed."""
        self._strangers: set[int] = set()
        self._strange: Runs = EMPTY
        self._recover()
        if isinstance(medium, SparseMedium):
            self._holes = extents_runs(medium.holes())

    def catalogue(self) -> Catalogue:
        """What is committed now, from memory."""
        return self._roots[0]

    def _is_being_written(self) -> bool:
        return False  # by this one alone

    def _copies(self) -> Sequence[Copy]:
        return self.catalogue().copies

    def is_sound(self, pointer: Pointer, kind: RecordKind) -> bool:
        """True if the next commit may rely on a record of an earlier one: it and its copies are
        whole, and it is not so old that it should be written afresh. Damage is an error in the
        log, and what is damaged is copied anew by the next commit, from what is whole."""
        places = [pointer, *(copy.pointer for copy in self.catalogue().copies_of(pointer))]
        commit = None
        for place in places:
            try:
                header = HEADER.unpack(read_whole(self.medium, place, kind))
            except (CorruptionError, MediumError) as error:
                self._damaged.add(place)
                _log.error("%s; it is written anew", error)
            else:
                commit = cast(int, header["commit"])
        if commit is None or not self._damaged.isdisjoint(places):
            return False
        return commit + REFRESH_COMMITS > self.catalogue().root.sequence

    def reserve(self, length: int, *, contiguous: bool = False) -> list[Extent]:
        """Free space for ``length`` bytes, held until ``release`` or a commit that reaches it.

        Extents start and end on pages. May grow the pool, which blocks. The last free pages are
        left to records (``contiguous``), if there is any other way: with none, nothing could be
        committed any more, not even that deleted versions give their space back.
        Raises ``MediumError`` (ENOSPC) when there is no room; nothing changes then.
        """
        pages = -(-length // PAGE)
        wanted = _Wanted(pages, contiguous, 0 if contiguous else _left_to_records(pages))
        extents = self._take(wanted)
        if extents is None:
            with self._committing:
                extents = self._take(wanted)
                if extents is None:
                    extents = self._make_room(wanted)
        return extents

    def hold(self, offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> list[Extent]:
        """Keep what a committed version reaches from reuse until ``release`` of what this gives:
        a save in progress is going to share it."""
        runs = runs_of(offsets, lengths)
        with self._guard:
            self._held.append(runs)
        return _extents(runs)

    def release(self, extents: Sequence[Extent]) -> None:
        """Give back what ``reserve`` gave, or ``hold`` held, once. What a root reaches stays
        taken all the same."""
        runs = extents_runs(extents)
        with self._guard:
            for index, held in enumerate(self._held):
                if held.shape == runs.shape and bool((held == runs).all()):
                    del self._held[index]
                    return
        assert not len(runs), f"{extents} was not reserved"

    def ensure(self, free: int) -> list[Extent]:
        """Make room until ``free`` bytes can be reserved; what the pool grew by. As for a
        reservation, it grows last.

        Raises ``MediumError``.
        """
        with self._committing:
            pages = -(-free // PAGE)
            wanted = _Wanted(pages, False, _left_to_records(pages))
            missing = self._missing(wanted)
            for free_more in (self._settle, self._retire_deleted):
                if missing > 0 and free_more():
                    missing = self._missing(wanted)
            try:
                return self._grow(missing)
            except MediumError:
                if not self.yields():
                    raise
            return self._grow(self._missing(wanted))

    def touch(self, extents: Sequence[Extent], wanted: Callable[[], bool]) -> None:
        """Have the pages of reserved space present, where this writer has not stored yet: one call
        for many pages, where a store would fault for each. Changes no byte; ends early when
        ``wanted`` is False. Raises ``MediumError`` as stores do."""
        for extent in extents:
            for fresh in self._fresh(extent):
                done = warm(self.medium, fresh, wanted)
                first, after = fresh.offset // _TOUCHED, -(-(fresh.offset + done) // _TOUCHED)
                with self._guard:
                    self._touched[first:after] = b"\1" * (after - first)

    def _fresh(self, extent: Extent) -> list[Extent]:
        """The parts of ``extent`` that were not touched yet."""
        first, after = extent.offset // _TOUCHED, -(-extent.end // _TOUCHED)
        found = []
        with self._guard:
            self._touched.extend(bytes(max(0, after - len(self._touched))))
            while (first := self._touched.find(0, first, after)) >= 0:
                end = self._touched.find(1, first, after)
                end = after if end < 0 else end
                start = max(first * _TOUCHED, extent.offset)
                found.append(Extent(start, min(end * _TOUCHED, extent.end) - start))
                first = end
        return found

    def give_back(self, at_most: int | None = None) -> int:
        """Give the space that nothing reaches back to whatever holds the medium; bytes that came
        back. What is saved later takes it again, as if the pool grew, if there is any then.

        at_most: bytes; None: all but what the next commit needs for its records, or nothing could
        be retired from this pool on a disk that is full.
        Settles first (V1): what only the older root reaches may be needed until then. Raises
        ``MediumError``. A poisoned pool stays as it is, and so does one whose medium has all its
        space for good: a device, memory.
        """
        if not isinstance(self.medium, SparseMedium) or self.medium.poisoned:
            return 0
        with self._committing:
            self._settle()
            with self._guard:
                free = self._free_now()
                if at_most is None:
                    kept = choose(free, min(page_count(free), self._record_pages())) or []
                    given = without(self._unreached(), extents_runs(kept))
                else:
                    given = extents_runs(choose(free, min(page_count(free), at_most // PAGE)) or [])
                self._holes = merged([self._holes, given])
                self._forget_touched(given)
            return self.medium.discard(_extents(given))

    def _record_pages(self) -> int:
        """For the records, and their copies, of a commit that retires something, and some more."""
        return 8 + 2 * page_count(merged(each.record_runs for each in self._roots))

    def _forget_touched(self, given: Runs) -> None:
        for first, after in given.tolist():
            first, after = first * PAGE // _TOUCHED, -(-after * PAGE // _TOUCHED)
            known = len(self._touched[first:after])
            self._touched[first : first + known] = bytes(known)

    def free_bytes(self) -> int:
        """Bytes that can be reserved without growing, and without space that was given back."""
        return page_count(self._free()) * PAGE

    def hole_bytes(self) -> int:
        """Bytes that are free, and were given back: to use them is to grow."""
        with self._guard:
            return page_count(self._free_holes()) * PAGE

    def commit(
        self,
        new: NewVersion | None,
        data: Sequence[Extent] = (),
        retire: Collection[int] = (),
    ) -> VersionRecord | None:
        """Persist data and records, then the root: ``new`` is in the pool, the retired are not.

        data: extents stored to for this version; persisted here. Commits that wait for each other
        share their persists.
        Returns what was committed, None if ``new`` is None. Raises ``MediumError`` when a persist
        fails: the pool is then poisoned for writing, and what was committed before is intact.
        """
        return self._line.make(Change(new, data, retire))

    def commit_together(self, changes: Sequence[Change]) -> list[VersionRecord | None]:
        """As ``commit``, for several at once, each of another model: all are committed, or none.
        What was committed is in the order of ``changes``. ``RoomError``: fewer may fit."""
        with self._committing:
            for change in changes:
                self._declare(0 if change.new is None else change.new.features)
            draft, area, apart = self._drafted(changes)
            try:
                draft.place(area[0].offset, apart[0].offset if apart else None, self.medium.size)
                self.medium.store(area[0].offset, draft.records())
                if apart:
                    self.medium.store(apart[0].offset, draft.copies())
                data = [extent for change in changes for extent in change.data]
                self._persist([*data, *area, *apart])  # V3: everything they reach, first
                self._persist_root(draft.catalogue.root)  # V3: then their root
                self._advance(draft)
            finally:
                # On failure too: whatever the slot may say, the medium is poisoned by then.
                self.release(area)
                self.release(apart)
        made = iter(draft.made)
        return [None if change.new is None else next(made)[1] for change in changes]

    def _declare(self, features: int) -> None:
        """Have programs that do not know incompat features refuse the pool from now on."""
        if features & ~self.superblock.incompat:
            self._look()
            block = replace(self.superblock, incompat=self.superblock.incompat | features)
            self._superblock = settle_superblock(self.medium, block)

    def _persist_root(self, root: Root) -> None:
        self._look()
        self._unsure.add(root.slot)  # until the store has returned: it may do a part of it
        stored = store_root(self.medium, self.superblock.uuid, root)
        self._slots[root.slot] = root
        self._unsure.discard(root.slot)
        self._persist([stored])

    def look(self) -> None:
        """Raise ``CorruptionError`` unless the pool is as this writer left it, by its size, its
        superblock and its newest root. If it is not, it is poisoned: it may be somebody else's by
        now. A damaged copy of the superblock is restored. Every commit does it."""
        with self._committing:
            self._look()

    def glance(self, offset: int = 0, expected: bytes = b"") -> None:
        """As ``look``, for the price of one load in most cases: for commits that store no root.
        ``expected``: what this writer stored last at ``offset``, if it is newer than the root that
        was looked at before: no other pool has it, nor has an older copy of this one."""
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
            self.medium.poison("another program changed it while it was being written")
            raise

    def _compare(self) -> None:
        root, name = self._roots[0].root, self.medium.info.name
        if self.medium.size < root.size:
            raise CorruptionError(
                f"{name}: expected {root.size} bytes or more, found {self.medium.size}: "
                "another program truncated it while it was being written; save to a new pool"
            )
        fixed = [whole_superblock(self.medium, offset) for offset in SUPERBLOCK_OFFSETS]
        if not any(block is not None and block.uuid == self.superblock.uuid for block in fixed):
            raise CorruptionError(
                f"{name}: expected pool {self.superblock.uuid.hex()}, found no superblock of "
                "it: another program overwrote it while it was being written; save to a new "
                "pool"
            )
        if fixed != [self.superblock] * len(fixed):
            settle_superblock(self.medium, self.superblock)
        for there in read_roots(self.medium, self.superblock.uuid):
            if there.slot not in self._unsure and there != self._slots.get(there.slot):
                raise CorruptionError(
                    f"{name}: expected commit {root.sequence} to be the newest, found commit "
                    f"{there.sequence} of another writer; save to a new pool"
                )

    def _persist(self, ranges: Sequence[Extent]) -> None:
        start = time.perf_counter()
        self.medium.persist(ranges)
        self.persist_s += time.perf_counter() - start

    def retire(self, versions: Collection[int]) -> None:
        """Let go of versions, by id; those that are not there are ignored."""
        if not self.catalogue().ids().isdisjoint(versions):
            self.commit(None, retire=versions)

    def close(self) -> None:
        """Release the writer lock and let go of the medium. Reservations are forgotten."""
        with self._committing:
            super().close()

    def _recover(self) -> None:
        """Choose the root, make sure that it is on the medium and not only in caches, and find
        out what is reached (V2, V10)."""
        newest = newest_catalogue(self.medium, self.superblock.uuid)
        current = self._with_copies(self._ahead(newest))
        if (
            current.root.sequence > newest.root.sequence
        ):  # it may be in caches only, or a part of it
            everything = Extent(DATA_START, self.medium.size - DATA_START)
            self.medium.persist([everything])
        slot = store_root(self.medium, self.superblock.uuid, current.root)
        self._store_holder()
        declared = SUPERBLOCK_OFFSETS if self.superblock.incompat else ()
        # V2: before any space is reused. A bit that old programs must see may be in caches only.
        self.medium.persist([slot, *(Extent(offset, PAGE) for offset in declared)])
        self._slots.update({r.slot: r for r in read_roots(self.medium, self.superblock.uuid)})
        self._roots: list[Catalogue] = [current, *self._older(current)]
        for catalogue in self._roots:
            for entry in catalogue.entries():
                if entry.info.id not in self._reach:
                    self._reach[entry.info.id] = self._reach_of(entry)
        # Read on after the writer before us retired them: where they are is not known (V1).
        self._strangers = self.locks.pins() - self._reach.keys()
        self._strange = runs_of([DATA_START], [self.medium.size - DATA_START])
        if len(self._roots) == 1 and not current.root.is_first:
            # The other slot is torn. If only caches say so (its writer was killed in the middle
            # of the store), then on the medium it may still reach an older catalogue (V1).
            self._commit_again()
        elif len(self._roots) == 1:  # nothing was ever committed, only tried
            blanked = clear_slot(self.medium, 1 - current.root.slot)
            if blanked is not None:
                self.medium.persist([blanked])

    def _older(self, current: Catalogue) -> list[Catalogue]:
        """The catalogue of the other slot, if it is whole: what it reaches is not reused yet."""
        for root in read_roots(self.medium, self.superblock.uuid):
            if root.sequence < current.root.sequence:
                with contextlib.suppress(CorruptionError):
                    return [self._with_copies(read_catalogue(self.medium, root))]
        return []

    def _with_copies(self, catalogue: Catalogue) -> Catalogue:
        return replace(catalogue, copies=read_copies(self.medium, catalogue.root))

    def _reach_of(self, entry: VersionEntry) -> Runs:
        try:
            record = read_version(self.medium, entry)
            self._shapes[entry.info.id] = record.layout, record.tree
            return version_runs(entry, record)
        except CorruptionError as error:
            # It can never be loaded again; only its record is kept, for `portus check` to name.
            _log.error("%s: version %d is lost: %s", self.medium.info.name, entry.info.id, error)
            return extents_runs([entry.pointer.extent])

    def announce(self) -> str:
        """What others find in the pool that says who has it open, in words; it is durable, so that
        they find it on other machines too. Raises ``MediumError``."""
        self.medium.persist([Extent(HOLDER_OFFSET, HOLDER_SIZE)])
        return read_holder(self.medium)

    def _store_holder(self) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = f"pid {os.getpid()} on {platform.node()}, since {since}"
        _store_messages(self.medium, holder, read_failure(self.medium))

    def _free(self) -> Runs:
        with self._guard:
            return self._free_now()

    def _free_now(self) -> Runs:
        return without(self._unreached(), self._holes)

    def _free_holes(self) -> Runs:
        unreached = self._unreached()
        return without(unreached, without(unreached, self._holes))

    def _unreached(self) -> Runs:
        """What nobody needs, holes too; under the guard."""
        alive = frozenset().union(*(catalogue.ids() for catalogue in self._roots))
        for version in [each for each in self._reach if each not in alive]:
            if not self.locks.pinned(version):
                del self._reach[version]
                self._shapes.pop(version, None)
        self._strangers = {each for each in self._strangers if self.locks.pinned(each)}
        strange = [self._strange] if self._strangers else []
        records = [catalogue.record_runs for catalogue in self._roots]
        reached = np.concatenate([EMPTY, *self._reach.values(), *records, *self._held, *strange])
        return gaps(reached, DATA_START // PAGE, self.medium.size // PAGE)

    def _take(self, wanted: _Wanted) -> list[Extent] | None:
        with self._guard:
            free = self._free_now()
            extents = (last if wanted.apart else choose)(free, wanted.pages)
            if extents is None or (wanted.contiguous and len(extents) > 1):
                return None
            if page_count(free) < wanted.pages + wanted.spare:
                return None
            self._held.append(extents_runs(extents))
            return extents

    def _make_room(self, wanted: _Wanted) -> list[Extent]:
        """Retired versions first, deleted ones next, growth, and what was to be spared last."""
        for free_more in (self._settle, self._retire_deleted):
            if free_more():
                extents = self._take(wanted)
                if extents is not None:
                    return extents
        while True:  # ends: who takes what is added here needs no turn, but has what it wanted then
            try:
                self._grow(self._missing(wanted), contiguous=wanted.contiguous)
            except MediumError as error:
                extents = self._take(wanted) if self.yields() else None
                extents = extents or self._scrape(replace(wanted, spare=0), error)
                if extents is None:
                    raise
                return extents
            extents = self._take(wanted)
            if extents is not None:
                return extents

    def _scrape(self, wanted: _Wanted, why: MediumError) -> list[Extent] | None:
        """Room where the pool cannot grow any more: what was to be spared; many small pieces, given
        back for one at the end; copies of records, last."""
        extents = self._take(wanted)
        scattered = extents is None and wanted.contiguous and why.errno in NO_SPACE
        if scattered and self.give_back(wanted.pages * PAGE):
            with contextlib.suppress(MediumError):
                self._grow(wanted.pages, contiguous=True)
                extents = self._take(wanted)
        if extents is None and self._drop_copies(wanted.pages):
            extents = self._take(wanted)
        return extents

    def _missing(self, wanted: _Wanted) -> int:
        """By how many pages the pool would have to grow."""
        pages = wanted.pages + wanted.spare
        return pages if wanted.contiguous else pages - page_count(self._free())

    def _settle(self) -> bool:
        """Commit the same catalogue once more if the older root alone reaches something, so that
        its space can be used. False if that frees nothing."""
        if len(self._roots) < 2 or self._roots[0].ids() >= self._roots[1].ids():
            return False
        self._commit_again()
        return True

    def _commit_again(self, *, copies: bool = True) -> None:
        """Commit the same catalogue, which both slots reach then, and no other.

        copies: keep them.
        """
        current = self._roots[0]
        root = replace(current.root, sequence=current.root.sequence + 1)
        again = replace(current, root=root)
        if not copies:
            again = replace(current, root=replace(root, copies=NOWHERE), copies=())
        self._persist_root(again.root)
        with self._guard:
            self._roots = [again, current]

    def _drop_copies(self, pages: int) -> bool:
        """Copies yield to data: without other room for ``pages``, no root reaches any until there
        is some. False if that would not help."""
        copies = [copy.pointer.extent for each in self._roots for copy in each.copies]
        held = page_count(extents_runs(copies))
        if not held or page_count(self._free()) + held < pages:
            return False
        self._commit_again(copies=False)
        self._commit_again(copies=False)
        return True

    def _retire_deleted(self) -> bool:
        if self._reclaiming:  # its own records need room: they get it by growth
            return False
        gone = self.catalogue().ids().intersection(self.deleted())
        if not gone:
            return False
        _log.info(
            "%s: retiring versions %s, whose files were deleted, to free space",
            self.medium.info.name,
            sorted(gone),
        )
        self._reclaiming = True
        try:
            self.commit_together([Change(None, retire=gone)])  # not those that wait: they need room
        finally:
            self._reclaiming = False
        return self._settle()

    def _grow(self, pages: int, *, contiguous: bool = False) -> list[Extent]:
        """Have so many pages more: those that were given back first, then new ones at the end. What
        was added. Raises ``MediumError``."""
        if pages <= 0:
            return []
        try:
            self._look()  # what was cut off would come back as zeros
        except CorruptionError as error:
            raise MediumError(errno.EIO, str(error)) from error
        filled = self._fill_holes(pages, contiguous=contiguous)
        pages -= page_count(extents_runs(filled))
        if not pages:
            return filled
        before = self.medium.size
        exact = before + pages * PAGE
        size = exact + -exact % _GROWTH
        if self.max_bytes is not None:
            size = min(size, self.max_bytes - self.max_bytes % PAGE)
            if size < exact:
                raise MediumError(
                    errno.ENOSPC,
                    self._full(pages, f"max_bytes is {self.max_bytes}") + self.advice(),
                )
        self._grow_to(size, exact)
        return [*filled, Extent(before, self.medium.size - before)]

    def _grow_to(self, size: int, at_least: int) -> None:
        try:
            try:
                self.medium.grow(size)
            except MediumError as error:
                if error.errno not in NO_SPACE or size == at_least:
                    raise
                self.medium.grow(at_least)
        except MediumError as error:
            if error.errno not in NO_SPACE:
                raise
            raise MediumError(error.errno, f"{error.strerror}{self.advice()}") from error

    def _fill_holes(self, pages: int, *, contiguous: bool) -> list[Extent]:
        """Have space again where it was given back, for so many pages at most; where."""
        with self._guard:
            holes = self._free_holes()
            count = min(pages, page_count(holes))
            extents = choose(holes, count) or []
        if not extents or (contiguous and (count < pages or len(extents) > 1)):
            return []
        assert isinstance(self.medium, SparseMedium)
        try:
            self.medium.fill(extents)
        except MediumError as error:
            if error.errno not in NO_SPACE:
                raise
            return []  # there may be less at the end
        with self._guard:
            self._holes = without(self._holes, extents_runs(extents))
        return extents

    def _full(self, pages: int, why: str) -> str:
        versions = list(self._reach)  # at once: a reservation in another thread forgets some
        pinned = [version for version in versions if self.locks.pinned(version)]
        return (
            f"{self.medium.info.name}: {pages * PAGE} more bytes needed, "
            f"{self.free_bytes()} of {self.medium.size} free, {why}"
            + (f"; readers hold versions {pinned}" if pinned else "")
        )

    def _drafted(self, changes: Sequence[Change]) -> tuple[_Draft, list[Extent], list[Extent]]:
        """A draft on the newest root, room for its records, and for their copies if there is any.
        Raises ``RoomError``.

        Making room may commit (retire deleted versions, settle): then the draft is made again,
        or it would take the number of that commit, and bring back what it retired.
        """
        while True:  # ends: each turn but the last freed space that then stays free
            before = self._roots[0]
            draft = _Draft(before, self.superblock.uuid, changes, self._kept(before, changes))
            try:
                area = self.reserve(draft.size, contiguous=True)
            except MediumError as error:
                raise RoomError(error.errno, error.strerror) from error
            if self._roots[0] is before:
                return draft, area, self._apart(draft.copies_size)
            self.release(area)

    def _apart(self, length: int) -> list[Extent]:
        """Room for copies, if they leave enough to the records of later commits."""
        pages = -(-length // PAGE)
        wanted = _Wanted(pages, True, _left_to_records(pages), apart=True)
        extents = self._take(wanted)
        if extents is None:
            with contextlib.suppress(MediumError):
                self._grow(wanted.pages + wanted.spare, contiguous=True)
                extents = self._take(wanted)
        if extents is None and not self._cramped:
            _log.warning("%s: no space for copies of records", self.medium.info.name)
        self._cramped = extents is None
        return extents or []

    def _kept(self, before: Catalogue, changes: Sequence[Change]) -> _Kept:
        """What a commit keeps of the catalogue before it, and what it writes afresh."""
        retire = set[int]().union(*(change.retire for change in changes))
        new = [change.new for change in changes if change.new is not None]
        models = {
            name: [entry for entry in model.versions if entry.info.id not in retire]
            for name, model in before.models.items()
        }
        changed = {each.model for each in new}
        indices = {
            name: model.pointer
            for name, model in before.models.items()
            if name not in changed
            and models[name] == list(model.versions)
            and self.is_sound(model.pointer, RecordKind.MODEL_INDEX)
        }
        ids = [entry.info.id for entries in models.values() for entry in entries]
        shapes = [self._shapes[version] for version in ids if version in self._shapes]
        shapes += [(each.layout, each.tree) for each in new]
        wanted = dict.fromkeys(indices.values(), RecordKind.MODEL_INDEX)
        for layout, tree in shapes:
            for each, kind in ((layout, RecordKind.LAYOUT), (tree, RecordKind.TREE)):
                if isinstance(each, Pointer):
                    wanted[each] = kind
        return self._copied(before, models, indices, wanted)

    def _copied(
        self,
        before: Catalogue,
        models: Mapping[str, list[VersionEntry]],
        indices: Mapping[str, Pointer],
        wanted: Mapping[Pointer, RecordKind],
    ) -> _Kept:
        """With what there is, and is to be, of copies of the records ``wanted``."""
        damaged, room = frozenset(self._damaged), _COPIES_MAX
        copies: dict[Copy, None] = {}
        again: list[tuple[RecordKind, bytes]] = []
        for pointer, kind in wanted.items():
            there = [copy for copy in before.copies_of(pointer) if copy.pointer not in damaged]
            copies.update(dict.fromkeys(there))
            missing = (2 if pointer in damaged else 1) - len(there)
            if missing > 0 and pointer.length * missing <= room:
                room -= pointer.length * missing
                again += [(kind, record) for record in self._whole(pointer, kind)] * missing
        return _Kept(models, indices, tuple(copies), again, damaged)

    def _whole(self, pointer: Pointer, kind: RecordKind) -> list[bytes]:
        """A record, or a copy of it; none if all are damaged."""
        for place in (pointer, *(copy.pointer for copy in self.catalogue().copies_of(pointer))):
            with contextlib.suppress(CorruptionError, MediumError):
                return [bytes(read_whole(self.medium, place, kind))]
        return []

    def _advance(self, draft: _Draft) -> None:
        with self._guard:
            self._roots = [draft.catalogue, self._roots[0]]
            for entry, record in draft.made:
                self._reach[entry.info.id] = version_runs(entry, record)
                self._shapes[entry.info.id] = record.layout, record.tree
            self._damaged.difference_update(draft.kept.damaged)


def _extents(runs: Runs) -> list[Extent]:
    return [Extent(first * PAGE, (after - first) * PAGE) for first, after in runs.tolist()]


def _model_of(change: Change) -> str | None:
    return None if change.new is None else change.new.model


def _left_to_records(pages: int) -> int:
    """Free pages that data leaves to records when it takes ``pages``."""
    return 1 + pages // 64 if pages else 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Free pages to be taken, as one extent or as several, and how many are to be left besides.
    ``apart``: far from what was taken before."""

    pages: int
    contiguous: bool
    spare: int
    apart: bool = False


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a commit has of the one before: the entries of each model, the indices that stay as they
    are, and the copies that there are. ``again``: records that are to be copied once more, since
    there is no copy of them, or it, or they, are ``damaged``."""

    models: Mapping[str, list[VersionEntry]]
    indices: Mapping[str, Pointer]
    copies: Sequence[Copy]
    again: Sequence[tuple[RecordKind, bytes]]
    damaged: frozenset[Pointer]


_COPIED: Final = (
    RecordKind.MODEL_TABLE,
    RecordKind.MODEL_INDEX,
    RecordKind.LAYOUT,
    RecordKind.TREE,
)
"""What more than one version depends on, and so is kept twice. A version's own record is not: one
byte of it costs what one byte of the version's storages costs."""


class _Draft:
    """The records of one commit: sized first, then placed, then encoded."""

    def __init__(
        self, before: Catalogue, uuid: bytes, changes: Sequence[Change], kept: _Kept
    ) -> None:
        self._before: Final = before
        self._uuid: Final = uuid
        self._new: Final = [change.new for change in changes if change.new is not None]
        self._commit: Final = before.root.sequence + 1
        self.kept: Final = kept
        self.made: Final[list[tuple[VersionEntry, VersionRecord]]] = []
        """The new versions, once they have their place."""
        self._parts: list[bytes] = []
        self._copied: Final[list[tuple[RecordKind, bytes]]] = list(kept.again)
        self.size, self.copies_size = self._measure()

    def place(self, offset: int, apart: int | None, pool_size: int) -> None:
        """Give every record its place from ``offset`` on, and make the new catalogue.

        apart: where the copies go; None: there is no room for any.
        pool_size: bytes of the pool, now that there is room for the records in it.
        """
        self._start = self._next = offset
        kept, models = dict(self.kept.models), {}
        for new in self._new:
            kept[new.model] = [*kept.get(new.model, ()), self._add_version(new)]
        for name, entries in kept.items():
            if name in self.kept.indices:
                models[name] = self._before.models[name]
            elif entries:
                pointer = self._add(RecordKind.MODEL_INDEX, encode_index(name, entries))
                models[name] = Model(pointer, tuple(entries))
        table = self._add(
            RecordKind.MODEL_TABLE,
            encode_table([(name, model.pointer) for name, model in models.items()]),
        )
        copies = tuple(self._placed_copies(apart))
        root = replace(
            self._before.root,
            sequence=self._commit,
            size=pool_size,
            next_version=self._before.root.next_version + len(self.made),
            table=table,
            copies=self._add(RecordKind.COPIES, encode_copies(copies)) if copies else NOWHERE,
        )
        self.catalogue = Catalogue(root, models, copies)

    def records(self) -> bytes:
        """All records, as they stand from the offset of ``place`` on."""
        return b"".join(self._parts)

    def copies(self) -> bytes:
        """All copies, as they stand from ``apart`` on."""
        return b"".join(_padded(record) for _, record in self._copied)

    def _placed_copies(self, apart: int | None) -> Iterator[Copy]:
        yield from self.kept.copies
        if apart is not None:
            for kind, record in self._copied:
                yield Copy(point(apart, record), self._commit, kind)
                apart += len(_padded(record))

    def _add(self, kind: RecordKind, payload: bytes) -> Pointer:
        record = frame(kind, self._commit, self._uuid, payload)
        pointer = point(self._next, record)
        self._parts.append(_padded(record))
        self._next += len(self._parts[-1])
        assert self._next - self._start <= self.size, "records outgrew their measure"
        if kind in _COPIED:
            self._copied.append((kind, record))
        return pointer

    def _add_version(self, new: NewVersion) -> VersionEntry:
        layout, tree = new.layout, new.tree
        if isinstance(layout, bytes):
            layout = self._add(RecordKind.LAYOUT, layout)
        if isinstance(tree, bytes):
            tree = self._add(RecordKind.TREE, tree)
        storages = new.storages.copy()
        storages["born"][storages["born"] == 0] = self._commit
        version = self._before.root.next_version + len(self.made)
        assert version < VERSION_ID_MAX
        info = VersionInfo(
            model=new.model,
            id=version,
            commit=self._commit,
            step=new.step,
            token=new.token,
            time_ns=time.time_ns(),
            size=int(storages["length"].sum()),
            inexact=new.inexact,
            metrics=new.metrics,
        )
        log = new.log
        if log is not None and not log.born:
            log = replace(log, born=self._commit)
        record = VersionRecord(info, layout, tree, storages, new.extents, new.units, log)
        entry = VersionEntry(info, self._add(RecordKind.VERSION, encode_version(record)))
        self.made.append((entry, record))
        return entry

    def _measure(self) -> tuple[int, int]:
        """At least the bytes of all records, and of all copies that are to be written: model
        indices and table as if none were dropped."""
        names = list(self._before.models)
        copied = [
            96 * (len(entries) + 1) + 4 * len(name) + 24 + len(encode_metrics(entries))
            for name, entries in self.kept.models.items()
        ]
        alone = []
        for new in self._new:
            names.append(new.model)
            copied += [len(blob) for blob in (new.layout, new.tree) if isinstance(blob, bytes)]
            arrays = new.storages.nbytes + new.extents.nbytes + new.units.nbytes
            log = 0 if new.log is None else new.log.size + 8
            alone.append(152 + arrays + 4 * len(new.model) + log)
            entry = 96 + 4 * len(new.model) + 24  # in an index that may be new
            copied.append(entry + metrics_size(new.metrics))
        copied.append(8 + sum(48 + 4 * len(name) for name in names))
        again = [len(record) for _, record in self.kept.again]
        alone.append(8 + COPY.size * (len(self.kept.copies) + len(copied) + len(again)))
        framing = HEADER.size + 8
        records = sum(copied) + sum(alone) + framing * (len(copied) + len(alone))
        return records, sum(copied) + framing * len(copied) + sum(again) + 8 * len(again)


def _padded(record: bytes) -> bytes:
    return record + bytes(-len(record) % 8)
