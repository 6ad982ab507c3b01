"""Address ranges that do not move while the memory mapped into them grows."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from portus.engine.media import linux
from portus.engine.media.process import leave_in_child, no_fork, not_here
from portus.engine.spec import Extent
from portus.errors import MediumError

with suppress(ImportError):  # Windows has none
    import resource

RANGE_MAX: Final = 4 << 40
"""Bytes of addresses reserved for one medium. They cost nothing; a process has 128 TiB."""

_LIMITED_SHARE: Final = 8
"""Under ``ulimit -v`` reserved addresses count as used: take at most this part of the limit."""


class AddressRange:
    """Addresses of this process, filled from the front with a file or with fresh memory.

    They are absent in forked children, where every use raises ``UsageError``.
    """

    def __init__(self, name: str, size: int, *, alignment: int = mmap.PAGESIZE) -> None:
        """Reserve addresses for ``size`` bytes and for as much growth as possible.

        name: of the medium, for messages. alignment: of the first address, a power of two. Raises
        ``MediumError`` if not even ``size`` fits.
        """
        self.name: Final = name
        self.mapped = 0
        self._process: Final = os.getpid()
        self._length = 0
        self._start = self._reserve(_pages(max(size, 1)) + alignment - mmap.PAGESIZE)
        self._align(alignment)
        leave_in_child(self)

    @property
    def start(self) -> int:
        if self._start == 0:
            raise not_here(self.name, self._process)
        return self._start

    def map(
        self,
        size: int,
        descriptor: int = -1,
        *,
        huge: bool = False,
        writable: bool = True,
        synchronous: bool = False,
    ) -> None:
        """Make the first ``size`` bytes usable: those of the file, or (-1) zeros.

        Existing mappings stay as they are. huge: ask for huge pages. synchronous: MAP_SYNC. Raises
        ``MediumError``; then nothing more can be mapped.
        """
        start, length = self.start, _pages(size) - self.mapped
        if length <= 0:
            return
        if self.mapped + length > self._length:
            raise self._error(size, OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
        shared = linux.MAP_SHARED if descriptor >= 0 else linux.MAP_PRIVATE | linux.MAP_ANONYMOUS
        if synchronous:
            shared = linux.MAP_SHARED_VALIDATE | linux.MAP_SYNC
        place = (descriptor, self.mapped if descriptor >= 0 else 0)
        # Otherwise a child forked before MADV_DONTFORK would inherit the pages.
        with no_fork():
            try:
                linux.map_pages(
                    start + self.mapped,
                    length,
                    linux.PROT_READ | (linux.PROT_WRITE if writable else 0),
                    shared | linux.MAP_FIXED,
                    place,
                )
            except OSError as error:
                # The failed call may have left a hole, and others may map something there:
                # never touch those addresses again.
                self._length = self.mapped
                raise self._error(size, error) from error
            linux.advise_pages(start + self.mapped, length, linux.MADV_DONTFORK)
        if huge:
            with suppress(OSError):  # The kernel may have none; then pages are small.
                linux.advise_pages(start + self.mapped, length, linux.MADV_HUGEPAGE)
        self.mapped += length

    def populate(self, extent: Extent) -> None:
        """Map the pages of ``extent`` writable, in one call, if the kernel can (5.14)."""
        start, end = self._pages_of(extent)
        with suppress(OSError):
            linux.advise_pages(start, end - start, linux.MADV_POPULATE_WRITE)

    def release(self, extent: Extent) -> None:
        """Unmap the pages of a file in ``extent``, in one call; the next use maps them again, with
        the stored bytes. Call it before write-back: the kernel takes a dirty page from all its
        mappings, and would do so one by one, each with an interrupt to the processors that run this
        process."""
        start, end = self._pages_of(extent)
        with suppress(OSError):  # of pages that are locked; then they stay
            linux.advise_pages(start, end - start, linux.MADV_DONTNEED)

    def close(self) -> None:
        """Return the addresses to the system. A second call does nothing."""
        start, self._start = self._start, 0
        if start and self._length:
            linux.unmap_pages(start, self._length)  # all that was reserved, mapped or not

    def close_but(self, kept: Sequence[Extent]) -> None:
        """Return the addresses, except those of ``kept``, which begin at pages: they have private
        copies of their bytes from now on, for as long as the process runs.

        Raises ``MediumError`` if there is no memory for that; then all stays mapped for ever.
        """
        start, self._start = self.start, 0
        parts = [(start + each.offset, _pages(each.length)) for each in kept]
        try:
            copies = [_private_copy(address, length) for address, length in parts]
        except OSError as error:
            raise MediumError(
                error.errno,
                f"{self.name}: cannot copy {sum(length for _, length in parts)} bytes that are "
                f"still in use ({error.strerror}); they are the bytes of {self.name} until this "
                "process ends: write nothing there",
            ) from error
        # All at once: a mapping of a device cannot be cut into parts.
        flags = linux.MAP_PRIVATE | linux.MAP_ANONYMOUS | linux.MAP_NORESERVE | linux.MAP_FIXED
        linux.map_pages(start, self._length, linux.PROT_NONE, flags, (-1, 0))
        for copy, (address, length) in zip(copies, parts, strict=True):
            linux.move_pages(copy, length, address)

    def leave(self) -> None:
        """Forget the addresses, in a forked child."""
        # Nothing is mapped here in the child (MADV_DONTFORK): others may have the addresses.
        self._start = 0

    def _pages_of(self, extent: Extent) -> tuple[int, int]:
        """Return the addresses of the first page of ``extent``, and of the end of the last."""
        first = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
        return self.start + first, self.start + min(_pages(extent.end), self.mapped)

    def _reserve(self, needed: int) -> int:
        """Reserve what the system allows, ``RANGE_MAX`` to ``needed`` bytes; return the size."""
        wanted = max(needed, min(max(RANGE_MAX, 4 * needed), _limit() // _LIMITED_SHARE))
        # Addresses without memory: later mappings go over them, and nothing has to move.
        flags = linux.MAP_PRIVATE | linux.MAP_ANONYMOUS | linux.MAP_NORESERVE
        while True:
            wanted = _pages(wanted)
            with no_fork():
                try:
                    start = linux.map_pages(0, wanted, linux.PROT_NONE, flags, (-1, 0))
                except OSError as error:
                    if wanted <= needed:
                        raise self._error(needed, error) from error
                    wanted = max(needed, wanted // 4)
                    continue
                linux.advise_pages(start, wanted, linux.MADV_DONTFORK)
            self._length = wanted
            return start

    def _align(self, alignment: int) -> None:
        """Unmap the addresses before the first aligned one, and as many at the end."""
        head = -self._start % alignment
        tail = alignment - mmap.PAGESIZE - head
        end = self._start + self._length
        for start, length in ((self._start, head), (end - tail, tail)):
            if length:
                linux.unmap_pages(start, length)
        self._start += head
        self._length -= head + tail

    def _error(self, size: int, cause: OSError) -> MediumError:
        return MediumError(
            cause.errno,
            f"{self.name}: cannot map {size} bytes ({cause.strerror}); {self.mapped} are "
            f"mapped, {self._length} were reserved: raise `ulimit -v`, or free memory, and "
            "open it again",
        )


def _private_copy(address: int, length: int) -> int:
    """Return the address of fresh memory with these bytes. Raises ``OSError``."""
    flags = linux.MAP_PRIVATE | linux.MAP_ANONYMOUS
    copy = linux.map_pages(0, length, linux.PROT_READ | linux.PROT_WRITE, flags, (-1, 0))
    ctypes.memmove(copy, address, length)
    return copy


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _limit() -> int:
    """Return the limit of this process for the bytes of its addresses."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_AS)
    return 1 << 62 if soft == resource.RLIM_INFINITY else soft
