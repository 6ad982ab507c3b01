"""A reader of a pool that another process may be writing."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Final

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, StaleError
from portus.reach.format.layout import DATA_START
from portus.reach.index.catalogue import (
    Catalogue,
    newest_catalogue,
    read_version,
    version_runs,
)
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.index.roots import read_uuid
from portus.reach.index.space import Runs, alone, extents_runs, merge, page_count
from portus.reach.media.pool import Locks


def spare_pages(records: Runs) -> int:
    """Return the number of pages to spare for the records, and their copies, of a commit that
    retires a version, and some more. records: the pages of the existing records."""
    return 8 + 2 * page_count(records)


class PoolReader:
    """Reads a pool that another process may be writing. Owns medium and locks, and closes them.

    Safe to share between threads.
    """

    def __init__(self, medium: Medium, locks: Locks) -> None:
        self.medium: Final = medium
        self.locks: Final = locks
        self._uuid = read_uuid(medium)

    @property
    def uuid(self) -> bytes:
        """The identity of the pool."""
        return self._uuid

    def catalogue(self) -> Catalogue:
        """Return the catalogue that is committed now. Raise ``CorruptionError``."""
        return newest_catalogue(self.medium, self.uuid)

    def kept_bytes(self, but: Collection[int] = ()) -> int:
        """Return the bytes of pages that the versions reach, except those with the ids in ``but``,
        and of the records that reach them. Reads the record of each."""
        catalogue = self.catalogue()
        kept = [entry for entry in catalogue.entries() if entry.info.id not in but]
        reaches = [self._reach_of(entry) for entry in kept]
        return DATA_START + page_count(merge([*reaches, catalogue.record_runs])) * PAGE

    def spare_bytes(self) -> int:
        """Return the bytes that stay free when a writer returns space, see ``spare_pages``."""
        return spare_pages(self.catalogue().record_runs) * PAGE

    def unique_bytes(self) -> dict[int, int]:
        """Return, for each version by its id, the bytes of the pages that no other version reaches,
        which is what removing it alone would free. Reads the record of each."""
        entries = list(self.catalogue().entries())
        pages = alone([self._reach_of(entry) for entry in entries])
        return {e.info.id: each * PAGE for e, each in zip(entries, pages, strict=True)}

    def _reach_of(self, entry: VersionEntry) -> Runs:
        """Return the pages of a version; if its record is damaged, those of the record."""
        with contextlib.suppress(CorruptionError):
            return version_runs(entry, self.record(entry))
        return extents_runs(entry.pointer.extents)

    @contextlib.contextmanager
    def pin(self, version: int) -> Iterator[VersionEntry]:
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
        """Return the record of a pinned version. Raise ``CorruptionError`` if it is damaged."""
        return read_version(self.medium, entry)

    def close(self) -> None:
        """Close the medium, the lock and the pins."""
        self.locks.close()
        self.medium.close()
