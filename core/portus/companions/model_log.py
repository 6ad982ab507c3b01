"""The newest version of one model in a pool, and the log over it, whose entries are changes.

A commit is an entry of the log, if there is room for it and it is a change of bytes; else it is a
new version, which keeps the log or has another one. Shelves and tables are both such a model. A new
version keeps the extents of unchanged storages; others are stored to new extents in ``Pieces``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final, Generic, TypeVar

import numpy as np

from portus.engine.copying.local import copy
from portus.engine.copying.segments import Column, Digests, Sources, Stop
from portus.engine.format.checksum import UNIT
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import PAGE, Extent
from portus.errors import UsageError
from portus.reach.index.commit_records import new_version
from portus.reach.index.log import (
    Bunch,
    Bytes,
    LogState,
    LogWriter,
    entry_size,
    read_log,
)
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.versions.parts import StorageRows, part, rows_of

Pool = TypeVar("Pool", bound=PoolReader)


class ModelWithLog(Generic[Pool]):
    """The committed state of one model. One thread at a time."""

    model: ClassVar[str]
    _beside: ClassVar[Collection[str]] = ()
    """Other models that the pool may have."""
    _kind: ClassVar[str]
    """The name of what the pool holds, for errors."""
    _log_min: ClassVar[int]
    _log_share: ClassVar[int]
    """The share of all storages that the size of a log has, and its least size."""
    _spare: ClassVar[int] = 0
    """Bytes of a log that ``_append`` does not take."""

    def __init__(self, pool: Pool, log_bytes: int | None) -> None:
        """log_bytes: the size of the log; None: a sensible one."""
        self.pool: Final = pool
        self._log_bytes: Final = log_bytes
        self._record: VersionRecord | None = None
        self._log: LogWriter | None = None
        self._contents = b""
        self._open_end = False
        """True if nothing comes after the last entry of the log."""

    @property
    def newest(self) -> VersionEntry | None:
        """The version with the newest commit, and its log; None in a new pool."""
        model = self.pool.catalogue().models.get(self.model)
        return None if model is None else model[-1]

    def seal(self) -> None:
        """Append an entry that shows that the last one was not torn: from now on damage to that is
        found. Raises ``MediumError``."""
        log, record = self._log, self._record
        if log is not None and record is not None and self._open_end and log.room >= PAGE:
            log.append([], b"", record.info.commit)
            self._open_end = False

    def _append_entry(self, bunches: Sequence[Bunch], contents: bytes) -> int:
        """Commit by an entry of the log, with ``contents`` if they are others than before. Return
        its size; 0 if there is no room for it."""
        log, record = self._log, self._record
        assert log is not None
        assert record is not None
        said = b"" if contents == self._contents else contents
        size = entry_size(len(said), [each.data.shape for each in bunches])
        if size > log.room - self._spare:
            return 0
        log.append(bunches, said, record.info.commit)
        self._open_end, self._contents = True, contents
        return size

    def _commit_version(
        self,
        step: int,
        contents: bytes,
        groups: list[StorageRows],
        lengths: Column,
        log: LogWriter,
        stored: Sequence[Extent] = (),
        entries: int | None = None,
    ) -> VersionRecord:
        """Commit by a version of storages of ``lengths``, each in one group, with a log of so many
        entries; None: all that it has. Make the extents ``stored`` durable. Return its record."""
        assert isinstance(self.pool, PoolWriter), "a pool for reading was committed to"
        now = replace(log.log, entries=log.count if entries is None else entries)
        labels = Labels(model=self.model, step=step, token=os.urandom(16), contents=contents)
        new = new_version(labels, rows_of(groups, lengths), now)
        record = self.pool.commit(new, stored, self._superseded_versions())
        assert record is not None
        assert record.log is not None
        self._record, self._contents, self._log = record, contents, log
        log.log, self._open_end = record.log, False
        return record

    def _superseded_versions(self) -> list[int]:
        """Return the ids of the versions that the next one replaces: more after a rescue."""
        model = self.pool.catalogue().models.get(self.model)
        return [] if model is None else [entry.info.id for entry in model]

    def _log_length(self, size: int) -> int:
        """Return the size of the log of storages of ``size`` bytes together."""
        wanted = self._log_bytes
        if wanted is None:
            wanted = max(self._log_min, size // self._log_share)
        return wanted + -wanted % PAGE

    def _open(self) -> LogState:
        """Read the newest version, and return what its log changes, whose entries are durable then.
        Raises ``CorruptionError``, ``MediumError``; ``UsageError`` if the pool holds other data."""
        newest = self.newest
        if newest is None:
            others = sorted(self.pool.catalogue().models.keys() - {*self._beside})
            if others:
                raise self._other_data(others)
            return LogState(None, {})
        with self.pool.pin(newest.info.id) as entry:
            record = self.pool.record(entry)
            if record.log is None:
                raise self._other_data([self.model])
            logged = read_log(self.pool.medium, record)
            self._record, self._contents = record, logged.contents or record.contents
            self._read_version(record, logged)
        last = logged.last
        if isinstance(self.pool, PoolWriter):
            self._log = LogWriter(self.pool.medium, record.log, last, self.pool.glance)
            # Makes its entries durable: the process that wrote them may have been killed.
            self._log.cut()
        self._open_end = last is not None and bool(last.bunches or last.contents)
        return logged

    def _read_version(self, record: VersionRecord, logged: LogState) -> None:
        """Read the bytes of a version, which is pinned."""

    def _other_data(self, models: Sequence[str]) -> UsageError:
        return UsageError(
            f"{self.pool.medium.info.name}: expected {self._kind}, found checkpoints of "
            f"{', '.join(models)[:200]}; use a separate pool for {self._kind}"
        )


PIECE: Final = UNIT
"""Bytes to copy and persist together, and so the longest that a batch may have to wait for."""


class Pieces:
    """Storages on their way into new extents, in pieces. One thread at a time."""

    def __init__(
        self, pool: PoolWriter, indices: Column, data: Sequence[Bytes], piece: int = PIECE
    ) -> None:
        """Reserve room for the storages ``indices``, whose bytes are ``data``. piece: the bytes of
        a piece, which may be larger if it is of a single storage. Raises ``MediumError``; then
        nothing is held."""
        self._pool: Final = pool
        self._data: Final = data
        self.indices: Final = indices
        self._held: Final[list[list[Extent]]] = []
        lengths = [len(each) for each in data]
        try:
            for each in lengths:
                self._held.append(pool.reserve(each) if each else [])
        except BaseException:
            self.release()
            raise
        self.extents: Final = [
            part(extents, 0, each) for extents, each in zip(self._held, lengths, strict=True)
        ]
        """The new extents of each storage."""
        self._pieces: Final = list(_cut(data, self.extents, piece))
        self._digests: Final[list[Digests]] = []
        self.size: Final = int(sum(lengths))
        """Bytes of all storages."""
        self.done = 0
        """Bytes that are stored."""

    @property
    def is_whole(self) -> bool:
        """True once all pieces are stored."""
        return len(self._digests) == len(self._pieces)

    def store(self, stop: Stop) -> list[Extent]:
        """Store the next piece, and return its extents, which are not durable yet. ``stop``: says
        whether something waits. Raises ``MediumError``."""
        piece = self._pieces[len(self._digests)]
        self._digests.append(copy(self._pool.medium, piece, stop))
        self.done += piece.size
        return piece.extents

    def go_on(self, stop: Stop, others: Sequence[Extent] = ()) -> None:
        """Store the next piece; it and ``others``, which were stored before, are durable on return.
        Raises as ``store``."""
        self._pool.medium.persist([*others, *self.store(stop)])

    def rows(self, born: int = 0) -> StorageRows:
        """Return the rows of the storages once all are stored. born: the commit before which no
        version had their extents; 0: the next one."""
        units = np.concatenate([np.empty((0, 16), np.uint8), *self._digests])
        return StorageRows.over(self.indices, self.extents, units, born)

    def release(self) -> None:
        """Release the reserved room. All that was not committed becomes free."""
        for each in self._held:
            self._pool.release(each)
        self._held.clear()


def _cut(
    data: Sequence[Bytes], extents: Sequence[Sequence[Extent]], most: int
) -> Iterator[Sources]:
    """Yield all storages as pieces: units of long ones, and short ones together, up to ``most``
    bytes. Each source has one digest."""
    address, length, inside, size = list[int](), list[int](), list[Extent](), 0
    for each, own in zip(data, extents, strict=True):
        for start in range(0, max(1, len(each)), UNIT):
            step = min(UNIT, len(each) - start)
            if length and size + step > most:
                yield Sources.at(address, length, inside)
                address, length, inside, size = [], [], [], 0
            address.append(each.ctypes.data + start if step else 0)
            length.append(step)
            inside += part(own, start, start + step)
            size += step
    if length:
        yield Sources.at(address, length, inside)
