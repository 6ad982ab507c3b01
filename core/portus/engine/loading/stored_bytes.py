"""``StoredBytes``: the storages of an open file, read and compared with their digests."""

from __future__ import annotations

from typing import Final

import numpy as np

from portus.engine.copying.local import check, fetch
from portus.engine.copying.segments import Column, Digests, Sources, Stop, ranges
from portus.engine.format.checksum import unit_counts
from portus.engine.image.stored_file import StoredFile
from portus.engine.loading.open_file import OpenFile
from portus.errors import CorruptionError


class StoredBytes:
    """The bytes of the storages of ``found``, in ``file``, which the caller has open."""

    def __init__(self, file: OpenFile, found: StoredFile) -> None:
        self._file: Final = file
        self._stored: Final = found
        self._units: Final = unit_counts(found.length)
        self._first: Final = np.cumsum(self._units) - self._units

    def check_all(self) -> None:
        """Compare all storages with their digests. Raises ``CorruptionError``, ``MediumError``."""
        self.check(np.flatnonzero(self._stored.length > 0))

    def check(self, indices: Column) -> None:
        """Compare some storages with their digests. Raises ``CorruptionError``, ``MediumError``."""
        if self._stored.digests is not None:
            sources = self._sources(indices, np.zeros_like(indices))
            self._compare(indices, check(self._file.medium, sources, Stop()))

    def fetch(self, indices: Column, address: Column) -> None:
        """Read some storages to memory, verified. Raises ``CorruptionError``, ``MediumError``."""
        self._compare(indices, fetch(self._file.medium, self._sources(indices, address), Stop()))

    def _sources(self, indices: Column, address: Column) -> Sources:
        length = self._stored.length[indices]
        offset, held = self._file.extents(self._stored.offset[indices], length)
        return Sources(address=address, length=length, extent_offset=offset, extent_length=held)

    def _compare(self, indices: Column, stored: Digests) -> None:
        """Raise ``CorruptionError`` if the units of some storages differ from the saved ones."""
        if self._stored.digests is None:
            return
        rows = ranges(self._first[indices], self._units[indices])
        wrong = rows[(stored != self._stored.digests[rows]).any(axis=1)]
        if len(wrong):
            index = int(np.searchsorted(self._first, wrong[0], "right")) - 1
            raise self._damage(index, int(wrong[0] - self._first[index]))

    def _damage(self, index: int, unit: int) -> CorruptionError:
        found = self._stored
        offset, length, _ = list(found.units(index))[unit]
        places = found.places_of(found.keys[index])
        return CorruptionError(
            f"{found.name}: {' = '.join(places[:3])}: {length} bytes at "
            f"{offset} are not those that were saved. Load another checkpoint, and check the disk"
        )
