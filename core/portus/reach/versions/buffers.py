"""Memory that several threads use in turn.

The system clears fresh memory page by page, and a machine that is virtual may have to ask for it
first: that costs more than what is copied into it. So what was used is used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

Room = npt.NDArray[np.uint8]


class Rooms:
    """Rooms of one size, as many as are lent at once. Their memory goes with this object."""

    def __init__(self, size: int) -> None:
        """size: bytes of each. What of one was never touched takes no memory."""
        self._size: Final = size
        self._free: Final[list[Room]] = []

    @contextlib.contextmanager
    def lent(self, length: int) -> Iterator[Room]:
        """``length`` bytes, at most ``size``, which hold anything. After an error they are not lent
        again: whoever failed may still look at them."""
        assert length <= self._size
        try:
            room = self._free.pop()
        except IndexError:
            room = np.empty(self._size, np.uint8)
        # Not in a ``finally``: the room of a failed request is not lent again.
        yield room[:length]
        self._free.append(room)
