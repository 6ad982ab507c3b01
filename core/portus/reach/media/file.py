"""Files as media: ``PlainFile`` writes with pwrite, ``MappedFile`` also has addresses.
``UncachedFile`` is only read from.

Theory. Each file has one descriptor, opened before the first store and kept: the kernel reports
a failed write-back once, to descriptors that were open when it happened. Loads use preadv, so a
bad sector or a truncated file is an error, not a signal; stores use pwrite for the same reason.
Only bytes that go through an address can be hit by SIGBUS, and for those every block was
allocated by ``grow``, or when the file was opened. Pages of the mapping and of pwrite are the
same pages, so both see each other at once. Persist is fdatasync of the whole file; write-back
begins during the copy.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from typing import ClassVar, Final

from portus.engine.media import linux
from portus.engine.media.addresses import AddressRange
from portus.engine.media.base import PLAIN_FILE, MediumInfo, MediumKind
from portus.engine.media.file_calls import (
    FileSystemTraits,
    Sync,
    advice,
    allocate,
    data_sync,
    file_error,
    fill_holes,
    free_bytes,
    write_all,
)
from portus.engine.media.process import Descriptor
from portus.engine.media.read_file import SECTOR, ReadFile
from portus.engine.spec import Extent
from portus.errors import MediumError
from portus.reach.media.space import WritableMedium, blocks_of

MAPPED_FILE: Final = MediumKind("file, mapped")

WRITEBACK_MIN: Final = 16 << 20
"""Bytes stored before their write-back starts: fewer calls, and longer runs on the disk."""

UNCACHED: Final = 1 << 20
"""Bytes to read together past the page cache."""

_BLOCK: Final = 4096
"""Such reads begin and end at multiples of this, in memory too: no disk requires more."""


class PlainFile(WritableMedium, ReadFile):
    """A regular file, stored to with pwrite. Owns its descriptor."""

    kind: ClassVar[MediumKind] = PLAIN_FILE
    granularity: ClassVar[int] = SECTOR
    _check_range = ReadFile._check_range

    def __init__(
        self,
        descriptor: Descriptor,
        file_system: FileSystemTraits,
        *,
        writable: bool,
        sync: Sync = data_sync,
    ) -> None:
        """sync: called by ``persist``; tests pass one that fails."""
        self._file_system: Final = file_system
        self._writable: Final = writable
        self._sync: Final = sync
        self._growing: Final = threading.Lock()
        self._begin = self._end = self._stored = 0
        super().__init__(descriptor)

    def path_now(self) -> str:
        """Return a current name of the file, which may have been renamed, or a directory above it.
        Return the name by which it was opened if it has none any more, or if this platform does not
        report one."""
        if self.is_at(self.path):
            return self.path
        try:
            now = os.readlink(f"/proc/self/fd/{self._descriptor.number}")
        except OSError:
            return self.path
        return now if self.is_at(now) else self.path

    def is_at(self, path: str) -> bool:
        """Return whether ``path`` is this file now."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor.number))
        except OSError:
            return False

    @property
    def info(self) -> MediumInfo:
        volatile = self._file_system.volatile
        return MediumInfo(self.kind, self.path, self.granularity, volatile, self._writable)

    def grow(self, size: int) -> None:
        """Grow the file. Lack of space undoes it, and does not poison; a failed sync does."""
        self._check_writable()
        with self._growing:
            before = self.size
            if size <= before:
                return
            self._allocate(before, size)
            try:
                os.fsync(self._descriptor.number)
            except OSError as error:
                raise self._poison_after("sync of a growth", error) from error
            try:
                self._reach(size)
            except MediumError:
                self._shrink(before)
                raise

    def _put(self, offset: int, data: memoryview) -> None:
        self._check_length(offset + len(data))
        try:
            write_all(self._descriptor.number, data, offset)
        except OSError as error:
            raise file_error("store", self.path, error, f"{len(data)} bytes at {offset}") from error
        self._write_early(offset, len(data))

    def _write_back(self, ranges: Sequence[Extent]) -> None:
        # Never retried: after a failed sync the kernel may call lost pages clean, and the next one
        # would succeed (decision 0002).
        self._sync(self._descriptor.number)
        # The sync of a file without a name succeeds, but its bytes are lost with this process.
        if self._is_gone():
            raise OSError(errno.ENOENT, "the file was deleted")

    def discard(self, ranges: Sequence[Extent]) -> int:
        """Punch holes; the size stays. Return 0 if the file system has no holes."""
        before = self._status().st_blocks
        self._change_blocks(ranges, give_back=True)
        return max(0, before - self._status().st_blocks) * 512

    def fill(self, ranges: Sequence[Extent]) -> None:
        """Allocate space with fallocate(2). Does nothing on a file system without holes."""
        self._change_blocks(ranges, give_back=False)

    def _change_blocks(self, ranges: Sequence[Extent], *, give_back: bool) -> None:
        self._check_writable()
        for extent in ranges:
            self._check_range(extent.offset, extent.length)
        change = linux.punch if give_back else linux.allocate
        for extent in ranges:
            try:
                change(self._descriptor.number, extent.offset, extent.length)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                    return
                what = f"{extent.length} bytes at {extent.offset}"
                verb = "give back" if give_back else "find space for"
                raise file_error(verb, self.path, error, what) from error

    def holes(self) -> list[Extent]:
        """Return the holes. Space that was allocated and never stored to may be listed too."""
        try:
            found = linux.holes(self._descriptor.number, self.size)
        except OSError as error:
            raise file_error("look for holes of", self.path, error) from error
        return [Extent(offset, length) for offset, length in found]

    def _is_gone(self) -> bool:
        """Return whether the file has no name any more, so that it ends with this process."""
        status = os.fstat(self._descriptor.number)
        if status.st_nlink > 0:
            return False
        try:  # some file systems count no links
            return not os.path.samestat(status, os.stat(self.path))
        except OSError:
            return True

    def _check_open(self) -> None:
        _ = self._descriptor.number  # Raises when closed, and in a forked child.

    def _check_length(self, end: int) -> None:
        """Raise if the file is shorter than ``end``: a store there would be SIGBUS, or a hole."""
        if end > self._status().st_size:
            raise self._truncation(end)

    def _reach(self, size: int) -> None:
        """Allow access to the bytes below ``size`` from now on."""
        self._known = size

    def _allocate(self, before: int, size: int) -> None:
        number = self._descriptor.number
        try:
            allocate(number, before, size - before)
        except OSError as error:
            free = free_bytes(number)
            self._shrink(before)
            raise MediumError(
                error.errno,
                f"{self.path}: cannot grow from {before} to {size} bytes: {error.strerror}; "
                f"needed {size - before}, free {free}; {advice(error)}",
            ) from error

    def _shrink(self, size: int) -> None:
        """Undo a failed growth, also if the size is the same but blocks were added."""
        try:
            os.ftruncate(self._descriptor.number, size)
        except OSError as error:
            raise self._poison_after("undoing a failed growth", error) from error

    def _write_early(self, offset: int, length: int) -> None:
        """Count stored bytes, and start write-back of the range that covers all stores since the
        last time. Clean pages in between cost nothing."""
        if not self._file_system.early:
            return
        with self._lock:
            self._begin = min(self._begin, offset) if self._stored else offset
            self._end = max(self._end, offset + length)
            self._stored += length
            if self._stored < WRITEBACK_MIN:
                return
            begin, end = self._begin, self._end
            self._begin = self._end = self._stored = 0
        # Not under the lock: this may block while the queue of the disk is full.
        self._start_writeback(Extent(begin, end - begin))

    def _start_writeback(self, extent: Extent) -> None:
        linux.start_writeback(self._descriptor.number, extent.offset, extent.length)


class UncachedFile(ReadFile):
    """A file that is only read, past the page cache: it returns the bytes of the disk, and
    displaces no other pages. Its descriptor is opened with ``O_DIRECT``."""

    def __init__(self, descriptor: Descriptor) -> None:
        """Raise ``OSError`` if the file system cannot read this way."""
        super().__init__(descriptor)
        # A mapping begins at a page, as O_DIRECT needs.
        self._buffer: Final = memoryview(mmap.mmap(-1, UNCACHED))
        # Try it now, while the caller can still open the file in another way.
        os.preadv(descriptor.number, [self._buffer[:_BLOCK]], 0)

    def _read(self, offset: int, target: memoryview) -> int:
        done = 0
        with self._lock:
            while done < len(target):
                start = (offset + done) // _BLOCK * _BLOCK
                skip = offset + done - start
                wanted = min(UNCACHED, skip + len(target) - done + _BLOCK - 1) // _BLOCK * _BLOCK
                found = os.preadv(self._descriptor.number, [self._buffer[:wanted]], start)
                length = min(found - skip, len(target) - done)
                if length <= 0:
                    break
                target[done : done + length] = self._buffer[skip : skip + length]
                done += length
        return done


class MappedFile(PlainFile):
    """A file of a local file system, opened for writing, whose bytes also have addresses.

    Only for file systems where a store to an allocated block never needs a new one: there a store
    through an address cannot run out of space.
    """

    kind: ClassVar[MediumKind] = MAPPED_FILE

    def __init__(
        self, descriptor: Descriptor, file_system: FileSystemTraits, *, sync: Sync = data_sync
    ) -> None:
        """Raise ``MediumError`` if the file cannot be mapped, or has holes that cannot be filled;
        ``descriptor`` stays open."""
        try:
            size = os.fstat(descriptor.number).st_size
            # A pool that was copied has holes; a store through an address into one may be SIGBUS.
            fill_holes(descriptor.number, size, every_block_counts=file_system.volatile)
        except OSError as error:
            raise file_error("fill holes of", descriptor.path, error) from error
        self._addresses: Final = AddressRange(descriptor.path, size)
        self._has_holes = False
        self._present: Final = set[int]()
        """Blocks of pages that were mapped."""
        try:
            self._map(size, descriptor, file_system)
        except MediumError:
            self._addresses.close()
            raise
        super().__init__(descriptor, file_system, writable=True, sync=sync)

    @property
    def size(self) -> int:
        """Bytes of the file that are mapped too."""
        return min(super().size, self._addresses.mapped)

    def address(self, extent: Extent) -> int:
        """Return the address of an extent. Check once that the file was not truncated; a store
        there after a later truncation is SIGBUS."""
        self._check_writable()
        self._check_range(extent.offset, extent.length)
        self._check_length(extent.end)
        return self._addresses.start + extent.offset

    def expect(self, extent: Extent) -> None:
        """Map pages that are new, or were released for write-back, in one call: with a fault for
        each, 288 MiB of new pages on tmpfs took 0.60 s of a processor in place of 0.12."""
        self._check_writable()
        self._check_range(extent.offset, extent.length)
        blocks = blocks_of(extent)
        if self._file_system.early or not self._present.issuperset(blocks):
            self._addresses.populate(extent)
            self._present.update(blocks)

    def wrote(self, extent: Extent) -> None:
        """Start write-back when enough has been written; may block while the disk is busy."""
        self._check_writable()
        self._check_range(extent.offset, extent.length)
        self._write_early(extent.offset, extent.length)

    def discard(self, ranges: Sequence[Extent]) -> int:
        """Punch holes. Until filled, a store by address there is SIGBUS on a full disk."""
        self._has_holes = True
        self._present.clear()
        return super().discard(ranges)

    def holes(self) -> list[Extent]:
        """Return the holes; none before the first ``discard``."""
        return super().holes() if self._has_holes else []

    def close(self) -> None:
        """Close the file and its mapping. No address may be used any more."""
        self._addresses.close()
        super().close()

    def _start_writeback(self, extent: Extent) -> None:
        self._addresses.release(extent)
        super()._start_writeback(extent)

    def _reach(self, size: int) -> None:
        self._map(size, self._descriptor, self._file_system)
        super()._reach(size)

    def _map(self, size: int, descriptor: Descriptor, file_system: FileSystemTraits) -> None:
        self._addresses.map(size, descriptor.number, huge=file_system.volatile)
