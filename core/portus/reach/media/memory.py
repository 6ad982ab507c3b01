"""Plain memory as a medium: for tests, and for pools that need not outlive their process."""

from __future__ import annotations

import ctypes
from typing import Final

from portus.engine.media.addresses import AddressRange
from portus.engine.media.base import MediumInfo, MediumKind
from portus.reach.media.space import WORD, AddressedMedium, pointer

MEMORY: Final = MediumKind("memory")


class Memory(AddressedMedium):
    """Fresh memory of this process, zeroed, with addresses that stay put. Lost at ``close``.

    The system gives pages as they are touched: unlike a file, memory that was granted by ``grow``
    may still run out (the kernel then ends a process).
    """

    def __init__(self, size: int = 0, *, name: str = "memory") -> None:
        self.space: Final = _MemorySpace(name, size)
        info = MediumInfo(MEMORY, name, WORD, volatile=True, writable=True)
        super().__init__(self.space, info, 0)
        self.grow(size)

    def _extend(self, before: int, size: int) -> None:
        self.space.addresses.map(size)


class _MemorySpace:
    """Memory of this process."""

    def __init__(self, name: str, size: int) -> None:
        self.addresses: Final = AddressRange(name, size)
        self.size: Final = size

    @property
    def start(self) -> int:
        return self.addresses.start

    def store(self, offset: int, data: memoryview) -> None:
        ctypes.memmove(self.start + offset, pointer(data), data.nbytes)

    def load(self, offset: int, target: memoryview) -> None:
        ctypes.memmove(pointer(target), self.start + offset, target.nbytes)

    def flush(self, offset: int, length: int) -> None:
        """Do nothing: no cache has to be written back."""

    def drain(self) -> None:
        _ = self.start  # raises when closed, and in a forked child

    def close(self) -> None:
        self.addresses.close()
