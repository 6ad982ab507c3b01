"""The log of a version: the changes after its commit, an entry for each.

Theory. A version with a log is its storages as committed, and over them, in order, the patches of
the entries that count. An entry has whole pages, and is appended after the last one and persisted.
That is its commit: one persist, where a new version needs two. Its digest tells whether it is
there; nothing else is written for it. So an entry is stored only where none is, and never changes
as long as a root reaches its log or a reader pins a version with it (V1).

In the log of a version, the first ``entries`` ones count, and those after them that name the commit
of that very version. An entry that is stored for a new version names its commit, and is void if
that fails. A patch names bytes of the pool. It applies to the storage that has them, unless that
was born after the commit that the entry names: then the bytes belonged to another one.

The first missing entry ends the log: a crash tore it, or none was written there yet. Only the last
entry can be torn. So a missing one with later entries of the same log after it is damage. A process
that opens the pool for writing blanks the header at the end (``cut``), since a part of the next
entry could make the remains of a torn one intact again. It also blanks entries after that, of a
version that was lost with its root. And it stores the last entry again, with the same bytes: if its
persist failed, its pages look clean, and the medium may not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import xxhash

from portus.engine.format.record import Value
from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError, MediumError
from portus.reach.format.layout import BUNCH, DATA_START, ENTRY_MAGIC, LOG_ENTRY, UNDO
from portus.reach.index.records import VersionLog, VersionRecord
from portus.reach.media.pool import ReadableMedium

_DIGEST: Final = slice(LOG_ENTRY.size - 16, LOG_ENTRY.size)

_ONE_STORE_MAX: Final = 1 << 20
"""Bytes of an entry that is assembled first, and stored in one call."""

_OFFSET_SIZE: Final = 8

_BLOCK: Final = 8 << 20
"""Bytes to search together for headers of entries."""

Column = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


Shape = tuple[int, ...]
"""Two numbers: patches of a bunch, and bytes of each."""


@dataclass(frozen=True, slots=True)
class Bunch:
    """Patches of one length, such as rows of a table: ``offset`` of each in the pool, and ``data``,
    of shape (patches, bytes of each), C-contiguous."""

    offset: Column
    data: Bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, verified. ``contents``: empty if they did not change. ``undo``: the bunches hold
    the bytes before a change; see ``in_place``."""

    extent: Extent
    number: int
    commit: int
    contents: bytes
    bunches: Sequence[Bunch]
    undo: bool = False


def entries(medium: ReadableMedium, record: VersionRecord) -> Iterator[Entry]:
    """Yield the entries of a pinned version's log that count, in order; none if it has no log.

    Raises ``CorruptionError`` if one of them is damaged, ``MediumError``.
    """
    log = record.log
    if log is None:
        return
    if log.extent.end > medium.size:
        raise CorruptionError(
            f"the log of version {record.info.id} ends at byte {log.extent.end}, but "
            f"{medium.info.name} has {medium.size}; was it truncated?"
        )
    position, number = log.extent.offset, 1
    while True:
        found = _entry_at(medium, log, position, number)
        if found is None and (number <= log.entries or _has_later(medium, log, position, number)):
            # A writer may be appending, so that we saw half of this one, and all of the next.
            found = _entry_at(medium, log, position, number)
            if found is None:
                raise CorruptionError(
                    f"entry {number} of the log of version {record.info.id}, at byte {position} of "
                    f"{medium.info.name}, is damaged: expected {max(number, log.entries)} entries "
                    f"or more, found {number - 1}"
                )
        if found is None or not _counts(found, record, log):
            return
        if found.commit > record.info.commit or not _is_inside(found, medium.size):
            raise CorruptionError(
                f"entry {number} of the log of version {record.info.id}, at byte {position} of "
                f"{medium.info.name}: expected patches within its {medium.size} bytes, for commit "
                f"{record.info.commit} or an earlier one, found commit {found.commit}, or others"
            )
        # The contents of a version are those after all entries that it counts from the start.
        yield replace(found, contents=b"") if number <= log.entries else found
        position, number = found.extent.end, number + 1


def _counts(entry: Entry, record: VersionRecord, log: VersionLog) -> bool:
    return entry.number <= log.entries or entry.commit == record.info.commit


def _is_inside(entry: Entry, size: int) -> bool:
    filled = [each for each in entry.bunches if len(each.offset)]
    first = min((int(each.offset.min()) for each in filled), default=DATA_START)
    ends = (int(each.offset.max()) + each.data.shape[1] for each in filled)
    return first >= DATA_START and max(ends, default=0) <= size


class PatchPlaces:
    """The places of patches in a version: the bytes of a storage that each one changes."""

    def __init__(self, record: VersionRecord) -> None:
        counts = record.storages["extents"].astype(np.int64)
        length = record.extents["length"].astype(np.int64)
        offset = record.extents["offset"].astype(np.int64)
        owner = np.repeat(np.arange(len(counts)), counts)
        order = np.argsort(offset, kind="stable")
        self._offset: Final = offset[order]
        self._length: Final = length[order]
        self._owner: Final = owner[order]
        self._within: Final = (np.cumsum(length) - length - record.first_byte[owner])[order]
        self._born: Final = record.storages["born"].astype(np.int64)

    def of(self, entry: Entry) -> Iterator[tuple[int, Column, Bytes]]:
        """Yield the storage, the first byte in it of each patch, and the bytes, of all bunches. A
        bunch may be split in several."""
        for bunch in entry.bunches:
            if not len(self._offset):
                return
            row = np.searchsorted(self._offset, bunch.offset, "right") - 1
            there = row >= 0
            row = np.maximum(row, 0)
            ends = self._offset[row] + self._length[row]
            there &= bunch.offset + bunch.data.shape[1] <= ends
            storage = self._owner[row]
            # Otherwise these bytes were another storage's when the entry was written.
            there &= entry.commit >= self._born[storage]
            start = self._within[row] + bunch.offset - self._offset[row]
            for each in np.unique(storage[there]).tolist():
                chosen = there & (storage == each)
                yield each, start[chosen], bunch.data[chosen]


@dataclass(frozen=True, slots=True)
class LogState:
    """The changes that the log of a version makes to it, at one moment. ``contents``: None if they
    are those of the version. ``changes``: for each storage, the first byte of each patch and its
    bytes, later ones over earlier ones. ``last``: the last entry that counts. ``undo``: the undo
    entries that are pending, the last one first; their bytes must be stored again in this order."""

    contents: bytes | None
    changes: Mapping[int, Sequence[tuple[Column, Bytes]]]
    last: Entry | None = None
    undo: Sequence[Entry] = ()

    @property
    def entries(self) -> int:
        """How many entries count."""
        return 0 if self.last is None else self.last.number

    @property
    def is_left(self) -> bool:
        """True if storages that are changed in place belong to a newer version by now."""
        return bool(self.undo) and not self.undo[0].bunches

    def over(self, storage: int, start: int, target: memoryview) -> None:
        """Apply the changes to ``target``, verified bytes from ``start`` of a storage."""
        for first, data in self.changes.get(storage, ()):
            length, windows = data.shape[1], len(target) - data.shape[1] + 1
            inside = (first >= start) & (first < start + windows)
            inside &= 0 < length < 1 << 31  # numpy has no longer items
            if inside.any():
                # Every byte begins a window; the windows of patches are overwritten as a whole.
                whole = np.ndarray(windows, f"V{length}", target, strides=(1,))
                whole[first[inside] - start] = data[inside].view(f"V{length}")[:, 0]
            partly = ~inside & (first < start + len(target)) & (first + length > start)
            for row in np.flatnonzero(partly).tolist():
                at = int(first[row])
                low, high = max(at, start), min(at + length, start + len(target))
                target[low - start : high - start] = data[row, low - at : high - at].data


def read_log(medium: ReadableMedium, record: VersionRecord) -> LogState:
    """Return all that the log of a pinned version changes, in memory. Raises as ``entries``."""
    if record.log is None:
        return LogState(None, {})
    places, contents, entry = PatchPlaces(record), None, None
    changes: dict[int, _Changes] = {}
    undo: list[Entry] = []
    for entry in entries(medium, record):
        if entry.undo:
            undo.insert(0, entry)
            continue
        # An ordinary entry ends the batch: nothing before it must be undone (decision 0178).
        undo.clear()
        contents = entry.contents or contents
        _add_changes(places, entry, changes)
    for each in undo:  # the oldest bytes last: they are from before the batch
        _add_changes(places, each, changes)
    made = {storage: list(found.values()) for storage, found in changes.items()}
    return LogState(contents, made, entry, undo)


_Changes = dict[tuple[int, int], tuple[Column, Bytes]]
"""Changes in order, by their places: first byte and length of one patch; for several, a number
below 0, and 0."""


def _add_changes(places: PatchPlaces, entry: Entry, changes: dict[int, _Changes]) -> None:
    """Add the changes of an entry. A patch at the same place replaces the one before: a dense part
    that each batch writes takes memory once."""
    for storage, starts, rows in places.of(entry):
        own = changes.setdefault(storage, {})
        place = (int(starts[0]), rows.shape[1]) if len(starts) == 1 else (~len(own), 0)
        own.pop(place, None)
        own[place] = starts, rows


def entry_size(contents_length: int, bunches: Iterable[Shape]) -> int:
    """Return the bytes of an entry with contents and bunches of these sizes."""
    size = LOG_ENTRY.size + contents_length
    for count, length in bunches:
        size += BUNCH.size + count * (_OFFSET_SIZE + length)
    return size + -size % PAGE


class LogWriter:
    """Appends to the log of a model's newest version. One thread at a time."""

    def __init__(
        self,
        medium: Medium,
        log: VersionLog,
        last: Entry | None = None,
        look: Callable[[int, bytes], None] = lambda _offset, _expected: None,
    ) -> None:
        """last: the last entry that counts; ``cut`` blanks what is after it. look: called before
        each store with the place and bytes of the last one; raises if another program changed them.
        """
        self.log = log
        """The log in the record of the newest version."""
        self._medium: Final = medium
        self._last = None if last is None else last.extent
        self._tail = log.extent.offset if last is None else last.extent.end
        self.count = 0 if last is None else last.number
        """Entries that count."""
        self._look: Final = look
        self._last_header = self._stored_header = b""

    @property
    def room(self) -> int:
        """Bytes that an entry can have."""
        return self.log.extent.end - self._tail

    @property
    def used_extent(self) -> Extent:
        """The pages with entries."""
        return Extent(self.log.extent.offset, self._tail - self.log.extent.offset)

    def cut(self) -> None:
        """Make the entries that count durable, and remove any remains after them, durably too.
        Raises ``CorruptionError`` and ``MediumError``."""
        done = [self.used_extent] if self.used_extent.length else []
        if self._last is not None:  # those before it were persisted before it was stored
            self._store_again(self._last)
        if self.room:
            behind = [at for at, _ in _headers(self._medium, self.log, self._tail + PAGE)]
            for at in behind:
                self._medium.store(at, bytes(PAGE))
            if behind:  # before the one at the end: without that they would be damage
                self._medium.persist([Extent(at, PAGE) for at in behind])
            head = memoryview(bytearray(LOG_ENTRY.size))
            self._medium.load(self._tail, head)
            if any(head):
                # Remains of a torn entry; lines that arrive later could make it whole
                # (decision 0149).
                self._medium.store(self._tail, bytes(PAGE))
            done.append(Extent(self._tail, PAGE))
        self._medium.persist(done)

    def _store_again(self, entry: Extent) -> None:
        data = memoryview(bytearray(entry.length))
        self._medium.load(entry.offset, data)
        if not _is_whole(data):  # it was in caches only, which dropped it after it was read
            raise CorruptionError(
                f"{self._medium.info.name}: the last entry of the log, at byte {entry.offset}, "
                "changed while it was opened; open it again"
            )
        # The same bytes: if persisting them failed, the kernel may call their pages clean.
        self._medium.store(entry.offset, data)
        self._last_header = bytes(data[: LOG_ENTRY.size])

    def look(self) -> None:
        """Raise ``CorruptionError``, and poison the pool, if another program changed it. Each
        ``store`` does this."""
        self._look(0 if self._last is None else self._last.offset, self._last_header)

    def store(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> Extent:
        """Store the next entry, for which there is room. Return the extent to persist, and then to
        pass to ``advance``. Raises ``MediumError``, and as ``look``."""
        self.look()
        shapes = [each.data.shape for each in bunches]
        size = entry_size(len(contents), shapes)
        assert size <= self.room, "an entry outgrew its log"
        start = LOG_ENTRY.row(
            ENTRY_MAGIC,
            UNDO if undo else 0,
            self.count + 1,
            commit,
            size,
            len(contents),
            self.log.name,
            len(bunches),
            bytes(16),
        )[: _DIGEST.start]
        rows = [BUNCH.pack(length=length, patches=count) for count, length in shapes]
        places = [each.offset.astype("<i8", copy=False).tobytes() for each in bunches]
        rest = b"".join([*rows, contents, *places])
        data = [each.data.reshape(-1).data for each in bunches]
        used = LOG_ENTRY.size + len(rest) + sum(map(len, data))
        parts: list[bytes | memoryview] = [rest, *data, bytes(size - used)]
        hasher = xxhash.xxh3_128(start)
        for part in parts:
            hasher.update(part)
        self._stored_header = start + hasher.digest()
        parts[0] = self._stored_header + rest
        if size <= _ONE_STORE_MAX:
            parts = [b"".join(parts)]
        position = self._tail
        for part in parts:
            try:
                self._medium.store(position, part)
            except MediumError:
                self._look(0, b"")  # the file may have been cut
                raise
            position += len(part)
        return Extent(self._tail, size)

    def advance(self, stored: Extent) -> None:
        """Count the entry that was stored, which is durable now."""
        assert stored.offset == self._tail
        self._last, self._last_header = stored, self._stored_header
        self._tail = stored.end
        self.count += 1

    def append(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> None:
        """Store an entry for the version of ``commit``, and persist it, which commits it; or the
        bytes that are about to be changed in place, as ``undo``. Raises as ``store``."""
        stored = self.store(bunches, contents, commit, undo=undo)
        self._medium.persist([stored])
        self.advance(stored)


def _entry_at(medium: ReadableMedium, log: VersionLog, position: int, number: int) -> Entry | None:
    """Return the intact entry with a number, or None if it is not there."""
    header = _header_at(medium, log, position)
    if header is None or header["number"] != number:
        return None
    data = memoryview(bytearray(cast(int, header["length"])))
    medium.load(position, data)
    if not _is_whole(data):
        return None
    return _parse(data, Extent(position, len(data)), medium.info.name)


def _header_at(medium: ReadableMedium, log: VersionLog, position: int) -> dict[str, Value] | None:
    """Return the header of an entry of this log at a page, or None if there is none."""
    if position + PAGE > log.extent.end:
        return None
    head = memoryview(bytearray(LOG_ENTRY.size))
    medium.load(position, head)
    header = LOG_ENTRY.unpack(head)
    length = cast(int, header["length"])
    # Pages are reused: remains of an older log there do not count.
    if header["magic"] != ENTRY_MAGIC or header["name"] != log.name:
        return None
    return header if PAGE <= length <= log.extent.end - position and length % PAGE == 0 else None


def _is_whole(entry: memoryview) -> bool:
    hasher = xxhash.xxh3_128(entry[: _DIGEST.start])
    hasher.update(entry[_DIGEST.stop :])
    return hasher.digest() == entry[_DIGEST]


def _parse(data: memoryview, extent: Extent, name: str) -> Entry:
    header = LOG_ENTRY.unpack(data)
    numbers = ("number", "commit", "contents_length", "bunches", "flags")
    number, commit, contents_length, count, flags = (cast(int, header[each]) for each in numbers)
    rows = BUNCH.array(data, LOG_ENTRY.size, count)
    shapes = list(zip(rows["patches"].tolist(), rows["length"].tolist(), strict=True))
    if entry_size(contents_length, shapes) != extent.length:
        raise CorruptionError(
            f"log entry at byte {extent.offset} of {name}: its patches are not its "
            f"{extent.length} bytes"
        )
    at = LOG_ENTRY.size + BUNCH.size * count
    contents = bytes(data[at : at + contents_length])
    at += contents_length
    patches = sum(many for many, _ in shapes)
    offset = np.frombuffer(data, "<i8", patches, at).astype(np.int64)
    at += patches * _OFFSET_SIZE
    bunches = []
    for many, length in shapes:
        own = np.frombuffer(data, np.uint8, many * length, at).reshape(many, length)
        bunches.append(Bunch(offset[:many], own))
        offset, at = offset[many:], at + many * length
    return Entry(extent, number, commit, contents, bunches, bool(flags & UNDO))


def _has_later(medium: ReadableMedium, log: VersionLog, position: int, number: int) -> bool:
    """Return whether an intact entry with a higher number is after ``position``."""
    found = ((at, cast(int, each["number"])) for at, each in _headers(medium, log, position))
    return any(_entry_at(medium, log, at, each) for at, each in found if each > number)


def _headers(
    medium: ReadableMedium, log: VersionLog, position: int
) -> Iterator[tuple[int, dict[str, Value]]]:
    """Yield place and header of all that looks like an entry of this log from ``position`` on."""
    for start in range(position, log.extent.end, _BLOCK):
        block = memoryview(bytearray(min(_BLOCK, log.extent.end - start)))
        medium.load(start, block)
        heads = np.frombuffer(block, np.uint8).reshape(-1, PAGE)[:, :4]
        for page in np.flatnonzero((heads == np.frombuffer(ENTRY_MAGIC, np.uint8)).all(axis=1)):
            header = _header_at(medium, log, start + int(page) * PAGE)
            if header is not None:
                yield start + int(page) * PAGE, header
