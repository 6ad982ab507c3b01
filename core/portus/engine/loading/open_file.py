"""Checkpoint files that are open for reading, and ``DiskFile``: one on a disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np

from portus.engine.copying.local import check, fetch
from portus.engine.copying.segments import Column, Digests, Sources, Stop, ranges
from portus.engine.format.checksum import UNIT, unit_counts
from portus.engine.image.image import Read, StoredFile
from portus.engine.image.integrity import verify_by_format
from portus.engine.media.base import Medium
from portus.engine.media.file_calls import file_error, write_all
from portus.engine.media.process import Descriptor
from portus.engine.media.read_file import ReadFile
from portus.errors import CorruptionError, MediumError, printable


class DiskFile(ReadFile):
    """A file of a file system, as an ``OpenFile``."""

    @property
    def number(self) -> int:
        return self._descriptor.number

    @property
    def medium(self) -> DiskFile:
        return self

    def extents(self, offset: Column, length: Column) -> tuple[Column, Column]:
        return offset, length

    def announce(self, offset: Column, length: Column) -> None:
        """Do nothing: the system reads ahead."""

    def write(self, number: int, path: str, advance: Callable[[int], None]) -> None:
        """Write all of it to the open and empty file ``number``, verified by the digests in it.
        path: for messages. advance: receives the bytes of each piece. Raises ``CorruptionError``,
        ``MediumError``."""
        for start in range(0, self.size, UNIT):
            piece = memoryview(bytearray(min(UNIT, self.size - start)))
            self.load(start, piece)
            try:
                write_all(number, piece, start)
            except OSError as error:
                raise file_error("write", path, error) from error
            advance(len(piece))

        def read(at: int, length: int) -> bytes:
            try:
                return os.pread(number, length, at)
            except OSError as error:
                raise file_error("read", path, error) from error

        # The copy, not the original: the written bytes have to be right.
        verify_by_format(read, self.size, path)


class OpenFile(Protocol):
    """A file of ``size`` bytes. ``number``: its descriptor; None for one that has none."""

    @property
    def size(self) -> int: ...

    @property
    def number(self) -> int | None: ...

    @property
    def medium(self) -> Medium:
        """The medium that has its bytes."""

    def extents(self, offset: Column, length: Column) -> tuple[Column, Column]:
        """Return the places on the medium of the bytes of these ranges, end to end: offsets and
        lengths."""

    def announce(self, offset: Column, length: Column) -> None:
        """Note the ranges to be read next, in their order: a remote file may read ahead."""

    def load(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``; all of it is in the file."""


@contextlib.contextmanager
def open_file(where: str, *, as_torch: bool = True) -> Iterator[DiskFile]:
    """Yield the open file at a path. as_torch: for a missing one, raise the error of torch."""
    try:
        descriptor = Descriptor(where, os.O_RDONLY)
    except OSError as error:
        # Scripts catch what ``torch.load`` raises.
        if as_torch and isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise MediumError(error.errno, f"{printable(where)}: {error.strerror}") from error
    with contextlib.closing(DiskFile(descriptor)) as file:
        yield file


def reads(file: OpenFile) -> Read:
    """Return a function that reads an open file."""

    def read(offset: int, length: int) -> bytes:
        target = memoryview(bytearray(max(0, min(length, file.size - offset))))
        if target:
            file.load(offset, target)
        return bytes(target)

    return read


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
            sources = self._storages(indices, np.zeros_like(indices))
            self._compare(indices, check(self._file.medium, sources, Stop()))

    def fetch(self, indices: Column, address: Column) -> None:
        """Read some storages to memory, verified. Raises ``CorruptionError``, ``MediumError``."""
        self._compare(indices, fetch(self._file.medium, self._storages(indices, address), Stop()))

    def units(self, index: int) -> Iterator[memoryview]:
        """Yield the units of a storage, verified; each is valid until the next. Raises
        ``CorruptionError``, ``MediumError``."""
        for rank, (offset, length, noted) in enumerate(self._stored.units(index)):
            unit = np.empty(length, np.uint8)
            if length:
                columns = (np.array([each]) for each in (offset, length, unit.ctypes.data))
                [found] = fetch(self._file.medium, self._sources(*columns), Stop())
                if noted not in (None, found.tobytes()):
                    raise self._damage(index, rank)
            yield unit.data

    def _storages(self, indices: Column, address: Column) -> Sources:
        return self._sources(self._stored.offset[indices], self._stored.length[indices], address)

    def _sources(self, offset: Column, length: Column, address: Column) -> Sources:
        places, held = self._file.extents(offset, length)
        return Sources(address=address, length=length, extent_offset=places, extent_length=held)

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
