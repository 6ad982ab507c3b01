"""``ObjectFile``: a file in a store, open for reading by ranges.

The bytes around a file's storages, and small storages between, are read at once and kept. Larger
storages are read ahead, several ranges at a time, once it is known which are wanted. This module
trusts no bytes: readers of ranges compare the digests in the file, and ``write`` compares the
digests of the objects.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

import numpy as np

from portus.engine.copying.local import best_engine
from portus.engine.copying.segments import Column, Digests, Segments, Sources, Stop, cut, memory
from portus.engine.format.checksum import UNIT
from portus.engine.media.base import MediumInfo, MediumKind, ReadOnlyMedium
from portus.engine.media.file_calls import write_all
from portus.errors import CorruptionError, MediumError
from portus.reach.index.file_table import PackedFile
from portus.reach.media.local import naming_call
from portus.reach.mirror.objects import FileObject
from portus.reach.mirror.store import Part
from portus.reach.versions.parallel import abreast, in_any_order
from portus.reach.versions.take_files import ABREAST, FileToTake, digest_of, pack_file

Load = Callable[[str, int, int], Part]
"""Returns a range of an object. Raises the errors of a load."""

_SMALL_ABREAST: Final = 16
"""Requests at once, if they are small: most of their time is the wait for an answer."""

_SMALL: Final = 2 << 20
"""Bytes of a request, on average, below which it counts as small."""

_GAP: Final = 256 << 10
"""Bytes between two ranges, at most, to read with them rather than make two requests."""

_AHEAD: Final = 64
"""Ranges that may be in a file before the first one of them arrived."""

_CHECKED: Final = 4 * UNIT
"""Bytes in memory during a check."""

_WHOLE: Final = 1 << 20
"""Bytes of a file that is read at once."""

_READ_BACK: Final = 1 << 20
"""Bytes of a file to read back at once."""

_Range = tuple[int, int]
"""A range of a file: its first byte, and the first byte after it."""

MIRROR: Final = MediumKind("mirror")


class ObjectFile(ReadOnlyMedium):
    """A file in a store, as an ``OpenFile``. One thread at a time, but for ``read``."""

    number: Final = None

    def __init__(self, where: str, name: str, stored: FileObject, load: Load) -> None:
        """Make no request. where: the store, for messages. stored: the file ``name`` as an
        object."""
        self._where: Final = where
        self._load: Final = load
        self.name: Final = name
        self.stored: Final = stored
        self._bytes: Final[dict[_Range, memoryview]] = {}
        """The bytes of the ranges to read at once, once they were read."""
        self._ahead: _Ahead | None = None

    @cached_property
    def _ranges_around(self) -> list[_Range]:
        """The ranges to read at once: all of a small file; else those around the storages."""
        if self.size <= _WHOLE:
            return [(0, self.size)] if self.size else []
        return self._around(pack_file(FileToTake(self.name, self.size, self.read)))

    @staticmethod
    def _around(file: PackedFile) -> list[_Range]:
        spans = file.spans()
        begin, length = spans.begin[::2], spans.length[::2]  # the others are storages
        is_small = (length > 0) & (length <= UNIT)
        return _join(zip(begin[is_small].tolist(), length[is_small].tolist(), strict=True))

    @property
    def info(self) -> MediumInfo:
        return MediumInfo(MIRROR, self._where, 1, volatile=False, writable=False)

    @property
    def medium(self) -> ObjectFile:
        return self

    @property
    def size(self) -> int:
        return self.stored.size

    def extents(self, offset: Column, length: Column) -> tuple[Column, Column]:
        return offset, length

    def announce(self, offset: Column, length: Column) -> None:
        """Read these ranges ahead, in this order."""
        self.close()
        ranges = zip(offset.tolist(), length.tolist(), strict=True)
        self._ahead = _Ahead(
            self.read,
            [
                (start, min(start + UNIT, begin + size))
                for begin, size in ranges
                if self._range_at(begin) is None
                for start in range(begin, begin + size, UNIT)
            ],
        )

    def load(self, offset: int, target: memoryview) -> None:
        view = target.cast("B")
        while view:
            taken = self._take(offset, view)
            offset, view = offset + taken, view[taken:]

    def read(self, offset: int, length: int) -> memoryview:
        """Return a range, by requests of its own. Thread-safe."""
        return memoryview(self._load(self.stored.name, offset, length) if length else b"")

    def fetch(self, targets: Sources, stop: Stop) -> Digests:
        """See ``RemoteMedium``."""
        segments, digests = cut(targets)
        self._expect(segments)
        self._fill(segments, digests, stop)
        return digests

    def check(self, sources: Sources, stop: Stop) -> Digests:
        """See ``RemoteMedium``. Reads into memory: a store has no digests of its own to use."""
        segments, digests = cut(sources)
        self._expect(segments)
        room = np.empty(min(_CHECKED, segments.size), np.uint8)
        for batch in segments.batches(_CHECKED):
            place = room.ctypes.data + np.cumsum(batch.length) - batch.length
            self._fill(replace(batch, address=place), digests, stop)
        return digests

    def write(self, number: int, path: str, advance: Callable[[int], None]) -> None:
        """Write all of it to the open and empty file ``number``, verified. path: for messages.
        advance: called with counts of bytes. Raises ``CorruptionError`` if an object is damaged."""
        again, there = memoryview(bytearray(_READ_BACK)), 0

        def get(start: int) -> int:
            data = self.read(start, min(UNIT, self.size - start))
            with naming_call("write", path):
                write_all(number, data, start)
            return len(data)

        def get_back(start: int, size: int) -> memoryview:
            nonlocal there
            while there < start + size:
                there += (length := next(arriving))
                advance(length)
            with naming_call("read", path):
                return again[: os.preadv(number, [again[:size]], start)]

        # Far ahead: what arrived is in the file, and one slow request delays no other.
        arriving = abreast(get, range(0, self.size, UNIT), ABREAST, _AHEAD)
        with contextlib.closing(arriving):
            # Read back from the file, so that a failed write shows as well, while more arrives.
            found, stored = digest_of(get_back, 0, self.size), self.stored
        if found != stored.digest:
            raise CorruptionError(
                f"{self._where}: {stored.name}: expected the digest {stored.digest.hex()}, "
                f"found {found.hex()}"
            )

    def close(self) -> None:
        """End the reads ahead. The store's owner closes the store."""
        if self._ahead is not None:
            self._ahead.close()

    def _refusal(self) -> MediumError:
        return MediumError(errno.EROFS, f"{self._where}: a mirror is written by its writer alone")

    def _expect(self, segments: Segments) -> None:
        """Have these segments read ahead, unless they are already."""
        offsets = [each for each in segments.offset.tolist() if self._range_at(each) is None]
        if offsets and (self._ahead is None or not all(map(self._ahead.has, offsets))):
            self.announce(segments.offset, segments.length)

    def _fill(self, segments: Segments, digests: Digests, stop: Stop) -> None:
        """Load segments to their addresses, and hash them there."""
        columns = (segments.address, segments.offset, segments.length)
        for address, offset, length in zip(*(each.tolist() for each in columns), strict=True):
            stop.check()
            self.load(offset, memory(address, length))
        best_engine().move(segments, None, digests, stop)

    def _take(self, offset: int, view: memoryview) -> int:
        """Fill the beginning of ``view`` from ``offset``; return the number of bytes."""
        kept = self._range_at(offset)
        if kept is not None:
            if kept not in self._bytes:
                self._read_around()
            return _copy(self._bytes[kept], offset - kept[0], view)
        arrived = None if self._ahead is None else self._ahead.take(offset)
        if arrived is not None:
            return _copy(arrived, 0, view)
        after = bisect.bisect(self._ranges_around, (offset, offset))
        if after < len(self._ranges_around):
            view = view[: self._ranges_around[after][0] - offset]
        return _copy(self.read(offset, len(view)), 0, view)

    def _range_at(self, offset: int) -> _Range | None:
        """Return the range to read at once that has that byte; None if there is none."""
        before = bisect.bisect(self._ranges_around, (offset, self.size)) - 1
        found = self._ranges_around[before] if before >= 0 else (0, 0)
        return found if offset < found[1] else None

    def _read_around(self) -> None:
        def read(part: _Range) -> None:
            self._bytes[part] = self.read(part[0], part[1] - part[0])

        missing = [part for part in self._ranges_around if part not in self._bytes]
        in_any_order(read, missing, _count(missing))


class _Ahead:
    """Ranges of a file that are read before they are requested, in their order. A reader that takes
    them in another order gets nothing for some, and reads these otherwise."""

    def __init__(self, read: Callable[[int, int], memoryview], ranges: Sequence[_Range]) -> None:
        self._numbers: Final = {start: number for number, (start, _) in enumerate(ranges)}
        self._count = 0
        """The number of ranges that arrived, or failed."""
        self._arriving: Final = abreast(
            lambda part: read(part[0], part[1] - part[0]), ranges, _count(ranges)
        )

    def has(self, offset: int) -> bool:
        """Return whether a range begins there, and is still to be taken."""
        return self._numbers.get(offset, -1) >= self._count

    def take(self, offset: int) -> memoryview | None:
        """Return the range that begins there; None if it was not announced or is gone."""
        arrived = None
        if self.has(offset):
            while self._count <= self._numbers[offset]:
                self._count += 1
                # None after a range failed, and its error was raised.
                arrived = next(self._arriving, None)
        return arrived

    def close(self) -> None:
        """Make no more requests, and wait for the running ones."""
        self._arriving.close()


def _join(parts: Iterable[tuple[int, int]]) -> list[_Range]:
    """Return ranges that hold all parts (begin, length), which are in order: parts near each other
    together, unless that is more than a unit."""
    found: list[_Range] = []
    for begin, length in parts:
        start, end = found[-1] if found else (0, -_GAP - 1)
        if begin <= end + _GAP and begin + length <= start + UNIT:
            found[-1] = start, begin + length
        else:
            found.append((begin, begin + length))
    return found


def _count(ranges: Sequence[_Range]) -> int:
    """Return how many of these ranges to read at once."""
    size = sum(end - start for start, end in ranges)
    return ABREAST if size >= _SMALL * len(ranges) else _SMALL_ABREAST


def _copy(data: memoryview, start: int, view: memoryview) -> int:
    """Fill the beginning of ``view`` from byte ``start`` of ``data``; return the byte count."""
    part = np.frombuffer(data[start : start + len(view)], np.uint8)
    np.frombuffer(view[: len(part)], np.uint8)[:] = part  # by numpy: it lets other threads run
    return len(part)
