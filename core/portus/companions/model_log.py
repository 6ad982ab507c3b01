"""The newest version of one model in a pool, and the log over it, whose entries are changes.

A commit is an entry of the log, if there is room for it and it is a change of bytes; else it is a
new version, which keeps the log or has another one. Shelves and tables are both such a model.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import ClassVar, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from portus.engine.spec import PAGE
from portus.errors import UsageError
from portus.reach.index.commit_records import NewVersion
from portus.reach.index.log import Bunch, Entry, LogWriter, entries, entry_size
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry, VersionLog, VersionRecord
from portus.reach.versions.parts import StorageRows, rows_of

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

    def _open(self) -> None:
        """Read the newest version and its log, and make its valid entries durable. Raises
        ``CorruptionError``, ``MediumError``; ``UsageError`` if the pool holds other data."""
        newest = self.newest
        if newest is None:
            others = sorted(self.pool.catalogue().models.keys() - {*self._beside})
            if others:
                raise self._other_data(others)
            return
        with self.pool.pin(newest.info.id) as entry:
            record = self.pool.record(entry)
            if record.log is None:
                raise self._other_data([self.model])
            contents = record.contents
            self._begin(record, contents)
            last: Entry | None = None
            for last in entries(self.pool.medium, record):
                self._replay(last)
                contents = last.contents or contents
        self._record, self._contents = record, contents
        if isinstance(self.pool, PoolWriter):
            self._log = LogWriter(self.pool.medium, record.log, last, self.pool.glance)
            # Makes its entries durable: the process that wrote them may have been killed.
            self._log.cut()
        self._open_end = last is not None and bool(last.bunches or last.contents)

    def _begin(self, record: VersionRecord, contents: bytes) -> None:
        """Read a version, as it was at its commit."""

    def _replay(self, entry: Entry) -> None:
        """Apply an entry of the log to what was read."""

    def _other_data(self, models: Sequence[str]) -> UsageError:
        return UsageError(
            f"{self.pool.medium.info.name}: expected {self._kind}, found checkpoints of "
            f"{', '.join(models)[:200]}; use a separate pool for {self._kind}"
        )


def version_of(
    model: str,
    step: int,
    contents: bytes,
    groups: list[StorageRows],
    lengths: NDArray[np.int64],
    log: VersionLog | None,
    *,
    token: bytes | None = None,
) -> NewVersion:
    """Return a version of storages of ``lengths``, each in one group, to be committed."""
    storages, extents, units = rows_of(groups, lengths)
    return NewVersion(
        model=model,
        step=step,
        token=os.urandom(16) if token is None else token,
        contents=contents,
        storages=storages,
        extents=extents,
        units=units,
        log=log,
    )
