"""``SpaceMedium``: a medium whose bytes are loaded and stored one by one, like memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from portus.engine.media.base import MediumInfo
from portus.engine.spec import Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.pool import bounds, spans

WORD: Final = 8
"""Bytes that a processor stores atomically."""


class Space(Protocol):
    """The bytes of a medium, as a process sees them: a store is in caches at first."""

    @property
    def size(self) -> int:
        """Bytes of the whole space."""

    def store(self, offset: int, data: memoryview) -> None:
        """Store ``data`` at ``offset``."""

    def load(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on."""

    def flush(self, offset: int, length: int) -> None:
        """Begin to write back these bytes."""

    def drain(self) -> None:
        """Wait until the bytes that this thread flushed survive power loss."""

    def close(self) -> None:
        """Release the space. A second call does nothing."""


class AddressedSpace(Space, Protocol):
    """A space that is mapped into this process."""

    @property
    def start(self) -> int:
        """The address of the first byte. Raises ``UsageError`` if closed, or in a fork."""


class SpaceMedium:
    """A medium over a space, or over the first part of it. Owns the space."""

    def __init__(self, space: Space, info: MediumInfo, size: int | None = None) -> None:
        """size: bytes to use, which ``grow`` increases; None: all of them."""
        self._info: Final = info
        self._space: Final = space
        self._size = space.size if size is None else size
        self._growing: Final = threading.Lock()
        self._poison = ""
        self._closed = False

    @property
    def info(self) -> MediumInfo:
        """The medium's ``MediumInfo``; its granularity is a word of the processor."""
        return self._info

    @property
    def size(self) -> int:
        """Bytes in use."""
        return self._size

    @property
    def is_poisoned(self) -> bool:
        """True after a persist has failed, and after ``poison``."""
        return bool(self._poison)

    def poison(self, reason: str) -> None:
        """Poison the medium, see ``Medium``."""
        self._poison = self._poison or f"{self._info.name}: accepts no more writes: {reason}"

    def grow(self, size: int) -> None:
        """Use more of the space, cleared first. Raise ``MediumError`` (ENOSPC) beyond its end."""
        self._check_writable()
        with self._growing:
            if size > self._size:
                self._extend(self._size, size)
                self._size = size

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Store through the mapping; other threads run meanwhile."""
        self._check_writable()
        view = memoryview(data)
        self._check_range(offset, view.nbytes)
        if not view.c_contiguous:
            raise UsageError(f"{self._info.name}: store from memory that has gaps")
        if view.nbytes:
            self._space.store(offset, view.cast("B"))

    def load(self, offset: int, target: memoryview) -> None:
        """Load through the mapping. A line that the memory lost ends the process (SIGBUS)."""
        self._check_open()
        self._check_range(offset, target.nbytes)
        if target.readonly or not target.c_contiguous:
            raise UsageError(f"{self._info.name}: load into memory that is read-only or has gaps")
        if target.nbytes:
            self._space.load(offset, target.cast("B"))

    def persist(self, ranges: Sequence[Extent]) -> None:
        """Write back every line of ``ranges``, and wait."""
        self._check_writable()
        for extent in bounds(ranges):
            self._check_range(extent.offset, extent.length)
        self._write_back(ranges)

    def close(self) -> None:
        """Close the medium and its mapping. No address may be used any more."""
        self._closed = True
        self._space.close()

    def _extend(self, before: int, size: int) -> None:
        if size > self._space.size:
            raise MediumError(
                errno.ENOSPC,
                f"{self._info.name}: cannot grow from {before} to {size} bytes: the device has "
                f"{self._space.size}; keep fewer versions, or take a larger one",
            )
        # A device still has its old bytes, but a medium that grew must read as zeros.
        zeros = memoryview(bytes(min(size - before, 1 << 20)))
        for offset in range(before, size, len(zeros)):
            self._space.store(offset, zeros[: size - offset])
        self._write_back([Extent(before, size - before)])

    def _write_back(self, ranges: Sequence[Extent]) -> None:
        some = spans(ranges)
        if not some:
            return
        try:
            for offset, length in some:
                self._space.flush(offset, length)
            # By the thread that flushed: a fence waits only for the flushes of its own thread.
            self._space.drain()
        except OSError as error:
            self._poison = (
                f"{self._info.name}: accepts no more writes: persist failed "
                f"({error.strerror}), so bytes stored since the previous persist may be lost; "
                "older bytes can still be loaded; see the kernel's log, then open it again"
            )
            raise MediumError(error.errno, self._poison) from error

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self._info.name}: used after it was closed")

    def _check(self) -> None:
        self._check_open()
        if self._poison:
            raise MediumError(errno.EIO, self._poison)

    def _check_writable(self) -> None:
        if not self._info.writable:
            raise UsageError(f"{self._info.name}: opened for reading; open it with writable=True")
        self._check()

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > self._size:
            raise UsageError(
                f"{self._info.name}: bytes {offset} to {offset + length} are outside the "
                f"{self._size} bytes of it"
            )


class AddressedMedium(SpaceMedium):
    """A medium whose space is mapped into this process."""

    def __init__(self, space: AddressedSpace, info: MediumInfo, size: int | None = None) -> None:
        """size: as in ``SpaceMedium``."""
        super().__init__(space, info, size)
        self._addressed: Final = space

    def address(self, extent: Extent) -> int:
        """Return the address of an extent, which is writable if the medium is."""
        self._check()
        self._check_range(extent.offset, extent.length)
        return self._addressed.start + extent.offset

    def expect(self, extent: Extent) -> None:
        """Check the extent. Its pages are present already."""
        self._check_writable()
        self._check_range(extent.offset, extent.length)

    def wrote(self, extent: Extent) -> None:
        """Check the extent. Only ``persist`` writes its bytes back."""
        self._check_writable()
        self._check_range(extent.offset, extent.length)


def pointer(view: memoryview) -> int:
    """Return the address of the first byte of ``view``, which is not empty."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
