"""Memory that several threads use in turn.

The system clears fresh memory page by page, and a virtual machine may have to ask for it first:
that costs more than the copy into it. So used memory is used again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

Room = npt.NDArray[np.uint8]


class Rooms:
    """Rooms of one size, as many as are lent at the same time. Freed with this object."""

    def __init__(self, size: int) -> None:
        """size: bytes of each. Untouched parts of a room take no memory."""
        self._size: Final = size
        self._free: Final[list[Room]] = []

    @contextlib.contextmanager
    def lent(self, length: int) -> Iterator[Room]:
        """Lend ``length`` bytes, at most ``size``, with arbitrary contents. After an error they are
        not lent again: the failed code may still use them."""
        room = self._take(length)
        # Not in a ``finally``: the room of a failed request is not lent again.
        yield room[:length]
        self._free.append(room)

    def give(self, length: int) -> memoryview:
        """Return the same, lent again once nobody has it, or a part of it, any more."""
        room = self._take(length)
        # An array of its own: all views of its bytes keep it, and none of them keeps the others.
        part = room[:length]
        weakref.finalize(part, self._free.append, room)
        return part.data

    def _take(self, length: int) -> Room:
        assert length <= self._size
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(self._size, np.uint8)
