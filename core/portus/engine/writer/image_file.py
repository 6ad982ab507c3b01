"""``ImageFile``: the file of an image while it is written.

Each byte of a storage is loaded once, and copied, hashed and summed in one pass. There are two ways
to the medium (``cached``, ``staged``); ``ways`` says which one is faster for such a file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from portus.engine.copying.local import best_engine
from portus.engine.copying.segments import (
    Column,
    Crcs,
    Digests,
    Sources,
    Stop,
    cut,
    ranges,
    unit_spans,
)
from portus.engine.format.checksum import DIGEST_SIZE, unit_counts
from portus.engine.image.image import Image, Literal
from portus.engine.media import linux
from portus.engine.media.file_calls import advice, file_system_of
from portus.engine.writer.cached_way import CachedWay, MappedWay
from portus.engine.writer.ring import StagingRing
from portus.engine.writer.staged_way import StagedWay, set_direct
from portus.engine.writer.ways import Kind, Way, Ways
from portus.errors import MediumError

_NO_BLOCKS_AHEAD: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_CANNOT_MAP: Final = _NO_BLOCKS_AHEAD | {errno.ENOMEM, errno.ENODEV}
"""Why a spare is written by calls: no blocks ahead (ext2), no addresses (``ulimit -v``)."""


class ImageFile:
    """Writes an image to one file. One thread at a time; ``close`` by any.

    Nothing is allocated before the first call. All raise ``MediumError`` with the path and advice.
    A later call reports a write that failed, ``finish`` at the latest.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        image: Image,
        *,
        is_spare: bool,
        ring: StagingRing,
        ways: Ways,
    ) -> None:
        """fd: of an open file, readable and writable, the caller's. path: for messages. is_spare:
        the file has old bytes, and blocks. ways: chooses the way, and receives the time it took."""
        self._fd: Final = fd
        self._path: Final = path
        self.image: Final = image
        self._is_spare: Final = is_spare
        self._ring: Final = ring
        self._ways: Final = ways
        self._spent_s = 0.0
        self.kept_bytes = 0
        """Bytes of storages that the spare had already, and that were not written again."""
        with self._translate_errors():
            self._kind: Final = Kind(os.fstat(fd).st_dev, is_spare)
        self._way: CachedWay | StagedWay | None = None
        units = unit_counts(image.length)
        self._first: Final = np.cumsum(units) - units
        self._units: Final = units
        self._digests: Final = np.zeros((int(units.sum()), DIGEST_SIZE), np.uint8)
        self._crcs: Final = np.zeros(int(units.sum()), np.uint32)

    def open(self) -> None:
        """Allocate the blocks now, so that a full disk is noticed before anything is copied. May be
        called again once there is room. After it has succeeded this does nothing."""
        with self._translate_errors():
            self._open_way()

    def copy(self, indices: Column, address: Column, stop: Stop) -> Digests:
        """Copy storages from their addresses, and return the digests of the stored bytes. Returns
        when the sources are not needed any more. Raises ``StoppedError``."""
        with self._translate_errors():
            length, offset = self.image.length[indices], self.image.offset[indices]
            digests, crcs = self._copy(np.ascontiguousarray(address), length, offset, stop)
            self._note(indices, digests, crcs)
            return digests

    def copy_units(self, index: int, units: Iterable[tuple[int, int]], stop: Stop) -> Digests:
        """Copy a storage that comes as the addresses and lengths of its units, each valid until the
        next is taken."""
        with self._translate_errors():
            offset, parts = int(self.image.offset[index]), []
            for address, length in units:
                source, size, place = np.array([[address], [length], [offset]], np.int64)
                parts.append(self._copy(source, size, place, stop))
                offset += length
            digests, crcs = (np.concatenate(column) for column in zip(*parts, strict=True))
            self._note(np.array([index]), digests, crcs)
            return digests

    def read_back(
        self, storage: Column, offset: Column, length: Column
    ) -> NDArray[np.uint8] | None:
        """Return short pieces of the stored bytes, end to end; None if they cannot be read back."""
        with self._translate_errors():
            return self._open_way().bytes_at(self.image.offset[storage] + offset, length)

    def finish(self) -> None:
        """Write the rest of the image; return when all of it is on the medium."""
        # Only now: they contain the digests and CRCs of what was stored.
        literals = self.image.literals(self._digests, join_crcs(self._crcs, self.image.length))
        with self._translate_errors():
            way = self._open_way()
            for literal in (*literals, *self._zeros(literals)):
                way.put(literal)
            way.finish()
        # Timed until it is durable: the time until the fence opens would not count what a direct
        # write saves of the processor (decision 0202).
        self._ways.took(self._kind, way.kind, self.image.size, self._spent_s, self.kept_bytes)

    def close(self) -> None:
        """Release its buffers of the ring, and its addresses; the file stays open. Returns when no
        write is in flight. A second call does nothing."""
        way, self._way = self._way, None
        if way is not None:
            way.close()

    def _copy(
        self, address: Column, length: Column, offset: Column, stop: Stop
    ) -> tuple[Digests, Crcs]:
        """Copy storages to their offsets, and return the digests and the CRCs of their units."""
        way, (begin, size) = self._open_way(), unit_spans(offset, length)
        places, lengths = way.cut(begin[size > 0], size[size > 0])
        segments, digests = cut(
            Sources(address=address, length=length, extent_offset=places, extent_length=lengths)
        )
        crcs = np.zeros(len(digests), np.uint32)
        way.move(best_engine(), segments, digests, crcs, stop)
        self.kept_bytes = way.kept_bytes
        return digests, crcs

    def _note(self, indices: Column, digests: Digests, crcs: Crcs) -> None:
        row = ranges(self._first[indices], self._units[indices])
        self._digests[row] = digests
        self._crcs[row] = crcs

    def _open_way(self) -> CachedWay | StagedWay:
        if self._way is None:
            self._way = self._choose_way()
        return self._way

    def _choose_way(self) -> CachedWay | StagedWay:
        """Return the way for this file."""
        traits, is_in_place = file_system_of(self._fd, self._path)
        if not self._is_spare:  # a spare has its blocks
            self._allocate()
        if not traits.volatile and self._ways.choose(self._kind, self.image.size) is Way.DIRECT:
            if set_direct(self._fd, on=True):
                return StagedWay(self._fd, self.image, self._ring)
            self._ways.note_refusal(self._kind.device)  # O_DIRECT is not tried there again
        # Two threads that write to one file wait for each other; stores to its pages do not. Where
        # blocks are copied on write, a store may find no block, and end in SIGBUS.
        if self._is_spare and is_in_place and not traits.volatile:
            try:
                return MappedWay(self._fd, self._path, self.image, self._ring)
            except OSError as error:
                if error.errno not in _CANNOT_MAP:
                    raise
        return CachedWay(
            self._fd, self.image, self._ring, volatile=traits.volatile, is_spare=self._is_spare
        )

    def _allocate(self) -> None:
        try:
            linux.allocate(self._fd, 0, self.image.size)
        except OSError as error:
            if error.errno not in _NO_BLOCKS_AHEAD:
                raise

    def _zeros(self, literals: Iterable[Literal]) -> Iterator[Literal]:
        """Yield zeros for all gaps, where a spare has old bytes."""
        if not self._is_spare:
            return
        image = self.image
        spans = [(each.offset, each.end) for each in literals]
        spans += zip(image.offset.tolist(), (image.offset + image.length).tolist(), strict=True)
        reached = 0
        for start, stop in sorted(spans):
            # The digest of all else covers these bytes, and a spare has old ones there.
            if start > reached:
                yield Literal(reached, bytes(start - reached))
            reached = max(reached, stop)
        if reached < image.size:
            yield Literal(reached, bytes(image.size - reached))

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except OSError as error:
            if isinstance(error, MediumError):
                raise
            raise MediumError(
                error.errno,
                f"{self._path}: cannot be written: {error.strerror or error}; {advice(error)}",
            ) from error
        finally:
            self._spent_s += time.perf_counter() - start


def join_crcs(crcs: Crcs, length: Column) -> Crcs:
    """Return the CRC32 of each storage of ``length`` bytes, from those of its units."""
    _, sizes = unit_spans(np.zeros_like(length), length)
    units = zip(crcs.tolist(), sizes.tolist(), strict=True)
    joined = np.zeros(len(length), np.uint32)
    for row, count in enumerate(unit_counts(length).tolist()):
        for crc, size in itertools.islice(units, count):
            joined[row] = isal_zlib.crc32_combine(int(joined[row]), crc, size)
    return joined
