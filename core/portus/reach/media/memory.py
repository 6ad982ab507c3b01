"""Plain memory as a medium: for tests, and for pools that need not outlive their process."""

from __future__ import annotations

from typing import Final

from portus.engine.media.addresses import AddressRange
from portus.engine.media.base import MediumInfo, MediumKind
from portus.reach.media.space import WORD, AddressedMedium, MappedSpace, NoCache

MEMORY: Final = MediumKind("memory")


class Memory(AddressedMedium):
    """Fresh memory of this process, zeroed, with addresses that stay put. Lost at ``close``.

    The system gives pages as they are touched: unlike a file, memory that was granted by ``grow``
    may still run out (the kernel then ends a process).
    """

    def __init__(self, size: int = 0, *, name: str = "memory") -> None:
        self.space: Final = MappedSpace(AddressRange(name, size), size, NoCache())
        info = MediumInfo(MEMORY, name, WORD, volatile=True, writable=True)
        super().__init__(self.space, info, 0)
        self.grow(size)

    def _extend(self, before: int, size: int) -> None:
        self._addresses.map(size)
