"""The bytes of one storage of a version, verified, a unit (16 MiB) at a time. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from portus.engine.copying.local import fetch
from portus.engine.copying.segments import Source, Stop
from portus.engine.format.checksum import UNIT
from portus.errors import CorruptionError
from portus.reach.index.in_place import InPlaceReader
from portus.reach.index.log import LogState
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.versions.parts import part


def read_units(
    reader: PoolReader, record: VersionRecord, logged: LogState, storage: int
) -> Iterator[memoryview]:
    """Yield the units of a storage of a pinned version; each is valid until the next. Raises
    ``CorruptionError`` and ``MediumError``."""
    in_place = InPlaceReader(reader.medium, record, logged)
    if storage in in_place:
        yield from in_place.units(storage)
        return
    extents, first = record.storage_extents(storage), int(record.first_unit[storage])
    length = int(record.length[storage])
    held = np.empty(min(UNIT, length), np.uint8)
    for rank, start in enumerate(range(0, length, UNIT)):
        unit = held[: length - start]
        there = tuple(part(extents, start, start + len(unit)))
        [found] = fetch(reader.medium, [Source(unit.ctypes.data, len(unit), there)], Stop())
        expected = bytes(record.units["digest"][first + rank])
        if found.tobytes() != expected:
            raise CorruptionError(
                f"storage {storage} is damaged within {len(unit)} bytes from byte {start}: "
                f"expected digest {expected.hex()}, found {found.tobytes().hex()}"
            )
        logged.over(storage, start, unit.data)
        yield unit.data
