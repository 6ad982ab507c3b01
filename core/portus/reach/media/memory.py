"""Plain memory as a medium: for tests, and for pools that need not outlive their process."""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from portus.engine.media.addresses import AddressRange
from portus.engine.media.base import MediumInfo, MediumKind
from portus.engine.spec import Extent
from portus.errors import MediumError, UsageError

MEMORY: Final = MediumKind("memory")

WORD: Final = 8
"""Bytes that a processor stores as one."""


def _nothing() -> None:
    """The sync of memory."""


class Memory:
    """Fresh memory of this process, zeroed, with addresses that stay put. Lost at ``close``.

    The system gives pages as they are touched: unlike a file, memory that was granted by ``grow``
    may still run out (the kernel then ends a process).
    """

    def __init__(
        self, size: int = 0, *, name: str = "memory", sync: Callable[[], None] = _nothing
    ) -> None:
        """sync: called by ``persist``; tests pass one that raises ``OSError``."""
        self.name: Final = name
        self._sync: Final = sync
        self._growing: Final = threading.Lock()
        self._poison = ""
        self._size = 0
        self._addresses: Final = AddressRange(name, size)
        self.grow(size)

    @property
    def info(self) -> MediumInfo:
        """The medium's ``MediumInfo``; its granularity is a word of the processor."""
        return MediumInfo(MEMORY, self.name, WORD, volatile=True, writable=True)

    @property
    def size(self) -> int:
        """Bytes that can be addressed now."""
        return self._size

    @property
    def is_poisoned(self) -> bool:
        """True since a persist failed, or since ``poison``."""
        return bool(self._poison)

    def poison(self, reason: str) -> None:
        """See ``Medium``."""
        self._poison = self._poison or f"{self.name}: accepts no more writes: {reason}"

    def grow(self, size: int) -> None:
        """``MediumError`` if the system refuses; that does not poison."""
        self._check()
        with self._growing:
            if size > self._size:
                self._addresses.map(size)
                self._size = size

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Copy in; other threads run meanwhile."""
        self._check()
        view = memoryview(data)
        self._check_range(offset, view.nbytes)
        if not view.c_contiguous:
            raise UsageError(f"{self.name}: store from memory that has gaps")
        if view.nbytes:
            ctypes.memmove(self._addresses.start + offset, _pointer(view), view.nbytes)

    def load(self, offset: int, target: memoryview) -> None:
        """Copy out; other threads run meanwhile."""
        start = self._addresses.start
        self._check_range(offset, target.nbytes)
        if target.readonly or not target.c_contiguous:
            raise UsageError(f"{self.name}: load into memory that is read-only or has gaps")
        if target.nbytes:
            ctypes.memmove(_pointer(target), start + offset, target.nbytes)

    def persist(self, ranges: Sequence[Extent]) -> None:
        """Calls ``sync``, if there is anything in ``ranges``."""
        self._check()
        for extent in ranges:
            self._check_range(extent.offset, extent.length)
        if not any(extent.length for extent in ranges):
            return
        try:
            self._sync()
        except OSError as error:
            self._poison = (
                f"{self.name}: accepts no more writes: persist failed ({error.strerror}); "
                "older bytes can still be loaded"
            )
            raise MediumError(error.errno, self._poison) from error

    def address(self, extent: Extent) -> int:
        """Writable."""
        self._check()
        self._check_range(extent.offset, extent.length)
        return self._addresses.start + extent.offset

    def expect(self, extent: Extent) -> None:
        """Checks the extent; pages that are there stay, and the others come one by one."""
        self._check()
        self._check_range(extent.offset, extent.length)

    def wrote(self, extent: Extent) -> None:
        """Checks the extent; there is nothing to write back."""
        self._check()
        self._check_range(extent.offset, extent.length)

    def close(self) -> None:
        """Give the memory back: nobody may use an address any more."""
        self._addresses.close()

    def _check(self) -> None:
        _ = self._addresses.start  # Raises when closed, and in a forked child.
        if self._poison:
            raise MediumError(errno.EIO, self._poison)

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > self._size:
            raise UsageError(
                f"{self.name}: bytes {offset} to {offset + length} "
                f"are outside the {self._size} bytes of it"
            )


def _pointer(view: memoryview) -> int:
    """The address of the first byte; ``view`` is not empty."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
