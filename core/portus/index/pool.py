"""A pool: one medium with an index on it; one writer, any number of readers.

Commit order (V3): data and records are stored, then persisted; then one root slot is stored, then
persisted. Nothing in a reachable page is stored to in between (V1).

Commits that come while another one persists are made as one (``line``), if they are of different
models: their versions have ids of their own, and one commit number.

Reuse (V1, V10): a page may be reserved when neither root reaches it, nobody pins a version that
holds it, and no reservation in progress holds it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy.typing as npt

from portus.errors import CorruptionError, MediumError, StaleError, UsageError
from portus.format.layout import (
    DATA_START,
    HEADER,
    HOLDER_OFFSET,
    HOLDER_SIZE,
    VERSION_ID_MAX,
    Kind,
)
from portus.index.catalogue import (
    Catalogue,
    Model,
    newest_catalogue,
    read_catalogue,
    read_version,
    version_runs,
)
from portus.index.line import Line, RoomError
from portus.index.records import (
    Pointer,
    Rows,
    VersionEntry,
    VersionRecord,
    encode_index,
    encode_table,
    encode_version,
    frame,
    point,
    read,
)
from portus.index.roots import (
    Root,
    Superblock,
    clear_slot,
    format_superblock,
    read_roots,
    read_superblock,
    store_root,
)
from portus.index.space import (
    EMPTY,
    Runs,
    choose,
    extents_runs,
    gaps,
    merged,
    page_count,
    runs_of,
)
from portus.media.base import Locks, Medium, SparseMedium
from portus.media.warm import warm
from portus.spec import PAGE, Extent, VersionInfo

_log: Final = logging.getLogger("portus")

_TOUCHED: Final = 2 << 20
"""Bytes of which it is remembered together whether they were touched."""

_GROWTH: Final = 2 << 20
"""A pool grows to a multiple of this many bytes: the size of a huge page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A version about to be committed; its bytes are stored already.

    ``layout`` is a pointer to a layout record that a version in the catalogue uses, or the
    payload of a new one; so is ``tree``. Rows as in the format; ``born`` 0 stands for this commit.
    """

    model: str
    step: int
    token: bytes
    layout: Pointer | bytes
    tree: Pointer | bytes
    storages: Rows
    extents: Rows
    units: Rows


@dataclass(frozen=True, slots=True)
class Change:
    """What one commit is asked for: a ``new`` version, if any, whose bytes are in the extents
    ``data``; versions to ``retire``, by id."""

    new: NewVersion | None
    data: Sequence[Extent] = ()
    retire: Collection[int] = ()


def format_pool(medium: Medium, after: Root | None = None) -> None:
    """Make an empty pool of a new medium of at least ``DATA_START`` bytes, durable on return.
    after: see ``format_superblock``."""
    format_superblock(medium, after=after)
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

    @property
    def superblock(self) -> Superblock:
        """Who the pool is."""
        return self._superblock

    def catalogue(self) -> Catalogue:
        """What is committed now. Raises ``CorruptionError``."""
        return newest_catalogue(self.medium, self.superblock.uuid)

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
                    f"version {version} is not in {self.medium.info.name} any more; "
                    f"ask for the newest again"
                )
            yield entry
        finally:
            self.locks.unpin(version)

    def record(self, entry: VersionEntry) -> VersionRecord:
        """The record of a pinned version. Raises ``CorruptionError``."""
        return read_version(self.medium, entry)

    def payload(self, pointer: Pointer, kind: Kind) -> memoryview:
        """A layout or a tree of a pinned version. Raises ``CorruptionError``."""
        return read(self.medium, pointer, kind)

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
        self.max_bytes: Final = max_bytes
        self.deleted: Callable[[], Collection[int]] = lambda: ()
        """Asked for versions whose reference files are gone, when space is short."""
        self.advice: Callable[[], str] = str
        """Asked for the end of the message when there is none even so."""
        self._committing: Final = threading.RLock()
        self._line: Final = Line(self._committing, self.commit_together, _model_of)
        self.persist_s = 0.0
        """Seconds spent in the persists of commits."""
        self._reclaiming = False
        self._touched: Final = bytearray()
        self._guard: Final = threading.Lock()
        self._held: Final[list[Runs]] = []
        self._reach: Final[dict[int, Runs]] = {}
        self._strangers: set[int] = set()
        self._strange: Runs = EMPTY
        self._recover()

    def catalogue(self) -> Catalogue:
        """What is committed now, from memory."""
        return self._roots[0]

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
        return [Extent(first * PAGE, (after - first) * PAGE) for first, after in runs.tolist()]

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

    def ensure(self, free: int) -> Extent:
        """Make room until ``free`` bytes can be reserved; what the pool grew by. As for a
        reservation, it grows last.

        Raises ``MediumError``.
        """
        with self._committing:
            before = self.medium.size
            pages = -(-free // PAGE)
            pages += _left_to_records(pages)
            missing = pages - page_count(self._free())
            for free_more in (self._settle, self._retire_deleted):
                if missing > 0 and free_more():
                    missing = pages - page_count(self._free())
            if missing > 0:
                self._grow(missing)
            return Extent(before, self.medium.size - before)

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

    def give_back(self) -> int:
        """Give the space that nothing reaches back to whatever holds the medium; bytes that came
        back. Call it last: nothing may be stored before the pool was opened anew.

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
                self._held.append(free)  # so that nobody reserves it
            return self.medium.discard(
                [Extent(first * PAGE, (after - first) * PAGE) for first, after in free.tolist()]
            )

    def free_bytes(self) -> int:
        """Bytes that can be reserved without growing."""
        return page_count(self._free()) * PAGE

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
            draft, area = self._drafted(changes)
            try:
                draft.place(area[0].offset, self.medium.size)
                self.medium.store(area[0].offset, draft.records())
                data = [extent for change in changes for extent in change.data]
                self._persist([*data, *area])  # V3: everything they reach, first
                slot = store_root(self.medium, self.superblock.uuid, draft.catalogue.root)
                self._persist([slot])  # V3: then their root
                self._advance(draft)
            finally:
                # On failure too: whatever the slot may say, the medium is poisoned by then.
                self.release(area)
        made = iter(draft.made)
        return [None if change.new is None else next(made)[1] for change in changes]

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
        current = newest_catalogue(self.medium, self.superblock.uuid)
        slot = store_root(self.medium, self.superblock.uuid, current.root)
        self._store_holder()
        self.medium.persist([slot])  # V2: before any space is reused
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
                    return [read_catalogue(self.medium, root)]
        return []

    def _reach_of(self, entry: VersionEntry) -> Runs:
        try:
            return version_runs(entry, read_version(self.medium, entry))
        except CorruptionError as error:
            # It can never be loaded again; only its record is kept, for `portus check` to name.
            _log.error("%s: version %d is lost: %s", self.medium.info.name, entry.info.id, error)
            return extents_runs([entry.pointer.extent])

    def _store_holder(self) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = f"pid {os.getpid()} on {platform.node()}, since {since}"
        _store_messages(self.medium, holder, read_failure(self.medium))

    def _free(self) -> Runs:
        with self._guard:
            return self._free_now()

    def _free_now(self) -> Runs:
        alive = frozenset().union(*(catalogue.ids() for catalogue in self._roots))
        for version in [each for each in self._reach if each not in alive]:
            if not self.locks.pinned(version):
                del self._reach[version]
        self._strangers = {each for each in self._strangers if self.locks.pinned(each)}
        strange = [self._strange] if self._strangers else []
        records = [catalogue.record_runs for catalogue in self._roots]
        reached = merged([*self._reach.values(), *records, *self._held, *strange])
        return gaps(reached, DATA_START // PAGE, self.medium.size // PAGE)

    def _take(self, wanted: _Wanted) -> list[Extent] | None:
        with self._guard:
            free = self._free_now()
            extents = choose(free, wanted.pages)
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
                self._grow(wanted.pages + wanted.spare)
            except MediumError:
                extents = self._take(replace(wanted, spare=0))
                if extents is None:
                    raise
                return extents
            extents = self._take(wanted)
            if extents is not None:
                return extents

    def _settle(self) -> bool:
        """Commit the same catalogue once more if the older root alone reaches something, so that
        its space can be used. False if that frees nothing."""
        if len(self._roots) < 2 or self._roots[0].ids() >= self._roots[1].ids():
            return False
        self._commit_again()
        return True

    def _commit_again(self) -> None:
        """Commit the same catalogue, which both slots reach then, and no other."""
        current = self._roots[0]
        root = replace(current.root, sequence=current.root.sequence + 1)
        slot = store_root(self.medium, self.superblock.uuid, root)
        self.medium.persist([slot])
        with self._guard:
            self._roots = [replace(current, root=root), current]

    def _retire_deleted(self) -> bool:
        if self._reclaiming:  # its own records need room: they get it by growth
            return False
        gone = self.catalogue().ids().intersection(self.deleted())
        if not gone:
            return False
        _log.info("%s: retiring deleted versions %s for space", self.medium.info.name, sorted(gone))
        self._reclaiming = True
        try:
            self.commit_together([Change(None, retire=gone)])  # not those that wait: they need room
        finally:
            self._reclaiming = False
        return self._settle()

    def _grow(self, pages: int) -> None:
        size = self.medium.size + pages * PAGE
        size += -size % _GROWTH
        if self.max_bytes is not None:
            size = min(size, self.max_bytes - self.max_bytes % PAGE)
            if size < self.medium.size + pages * PAGE:
                raise MediumError(
                    errno.ENOSPC,
                    self._full(pages, f"max_bytes is {self.max_bytes}") + self.advice(),
                )
        try:
            self.medium.grow(size)
        except MediumError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise MediumError(error.errno, f"{error.strerror}{self.advice()}") from error

    def _full(self, pages: int, why: str) -> str:
        versions = list(self._reach)  # at once: a reservation in another thread forgets some
        pinned = [version for version in versions if self.locks.pinned(version)]
        return (
            f"{self.medium.info.name}: {pages * PAGE} more bytes needed, "
            f"{self.free_bytes()} of {self.medium.size} free, {why}"
            + (f"; readers hold versions {pinned}" if pinned else "")
        )

    def _drafted(self, changes: Sequence[Change]) -> tuple[_Draft, list[Extent]]:
        """A draft on the newest root, and room for its records. Raises ``RoomError``.

        Making room may commit (retire deleted versions, settle): then the draft is made again,
        or it would take the number of that commit, and bring back what it retired.
        """
        while True:  # ends: each turn but the last freed space that then stays free
            before = self._roots[0]
            draft = _Draft(before, self.superblock.uuid, changes)
            try:
                area = self.reserve(draft.size, contiguous=True)
            except MediumError as error:
                raise RoomError(error.errno, error.strerror) from error
            if self._roots[0] is before:
                return draft, area
            self.release(area)

    def _advance(self, draft: _Draft) -> None:
        with self._guard:
            self._roots = [draft.catalogue, self._roots[0]]
            for entry, record in draft.made:
                self._reach[entry.info.id] = version_runs(entry, record)


def _model_of(change: Change) -> str | None:
    return None if change.new is None else change.new.model


def _left_to_records(pages: int) -> int:
    """Free pages that data leaves to records when it takes ``pages``."""
    return 1 + pages // 64 if pages else 0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Free pages to be taken, as one extent or as several, and how many are to be left besides."""

    pages: int
    contiguous: bool
    spare: int


class _Draft:
    """The records of one commit: sized first, then placed, then encoded."""

    def __init__(self, before: Catalogue, uuid: bytes, changes: Sequence[Change]) -> None:
        self._before: Final = before
        self._uuid: Final = uuid
        self._new: Final = [change.new for change in changes if change.new is not None]
        self._commit: Final = before.root.sequence + 1
        retire = set[int]().union(*(change.retire for change in changes))
        self._kept: Final = {
            name: [entry for entry in model.versions if entry.info.id not in retire]
            for name, model in before.models.items()
        }
        self.made: Final[list[tuple[VersionEntry, VersionRecord]]] = []
        """The new versions, once they have their place."""
        self._parts: list[bytes] = []
        self.size: Final = self._measure()

    def place(self, offset: int, pool_size: int) -> None:
        """Give every record its place from ``offset`` on, and make the new catalogue.

        pool_size: bytes of the pool, now that there is room for the records in it.
        """
        self._start = self._next = offset
        kept, models = dict(self._kept), {}
        for new in self._new:
            kept[new.model] = [*kept.get(new.model, ()), self._add_version(new)]
        for name, entries in kept.items():
            before = self._before.models.get(name)
            if before is not None and list(before.versions) == entries:
                models[name] = before
            elif entries:
                pointer = self._add(Kind.MODEL_INDEX, encode_index(name, entries))
                models[name] = Model(pointer, tuple(entries))
        table = encode_table([(name, model.pointer) for name, model in models.items()])
        root = replace(
            self._before.root,
            sequence=self._commit,
            size=pool_size,
            next_version=self._before.root.next_version + len(self.made),
            table=self._add(Kind.MODEL_TABLE, table),
        )
        self.catalogue = Catalogue(root, models)

    def records(self) -> bytes:
        """All records, as they stand from the offset of ``place`` on."""
        return b"".join(self._parts)

    def _add(self, kind: Kind, payload: bytes) -> Pointer:
        record = frame(kind, self._commit, self._uuid, payload)
        pointer = point(self._next, record)
        self._parts.append(record + bytes(-len(record) % 8))
        self._next += len(self._parts[-1])
        assert self._next - self._start <= self.size, "records outgrew their measure"
        return pointer

    def _add_version(self, new: NewVersion) -> VersionEntry:
        layout, tree = new.layout, new.tree
        if isinstance(layout, bytes):
            layout = self._add(Kind.LAYOUT, layout)
        if isinstance(tree, bytes):
            tree = self._add(Kind.TREE, tree)
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
        )
        record = VersionRecord(info, layout, tree, storages, new.extents, new.units)
        entry = VersionEntry(info, self._add(Kind.VERSION, encode_version(record)))
        self.made.append((entry, record))
        return entry

    def _measure(self) -> int:
        """At least the bytes of all records: model indices and table as if none were dropped."""
        names = list(self._before.models)
        sizes = [
            96 * (len(entries) + 1) + 4 * len(name) + 24 for name, entries in self._kept.items()
        ]
        for new in self._new:
            names.append(new.model)
            blobs = [each for each in (new.layout, new.tree) if isinstance(each, bytes)]
            arrays = new.storages.nbytes + new.extents.nbytes + new.units.nbytes
            sizes += [len(blob) for blob in blobs]
            # The record of the version; its entry, in an index that may be new.
            sizes += [152 + arrays + 4 * len(new.model), 96 + 4 * len(new.model) + 24]
        sizes.append(8 + sum(48 + 4 * len(name) for name in names))
        return sum(sizes) + (HEADER.size + 8) * len(sizes)
