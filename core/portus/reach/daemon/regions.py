"""The regions of memory that a client registered on one connection: columns, no object for each."""

from __future__ import annotations

from typing import Final

import numpy as np

from portus.engine.copying.segments import Column
from portus.errors import UsageError

ROW: Final = 32
"""Bytes of a region."""

WORK: Final = 4 * ROW
"""Bytes for each, while some come or go."""


class RegionTable:
    """Numbers, and of each the length, the address and the key. One thread at a time."""

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self._numbers = np.zeros(0, np.int64)
        """In order."""
        self._rows = np.zeros((0, 3), np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, first: int, lengths: Column, addresses: Column, keys: Column) -> None:
        """Regions from number ``first`` on. Raises ``UsageError``, and then nothing changed."""
        if len(self) + len(lengths) > self._most:
            raise UsageError(f"more than {self._most} regions")
        start, end = np.searchsorted(self._numbers, [first, first + len(lengths)])
        if start != end:
            raise UsageError(f"region {self._numbers[start]} is registered already")
        numbers = np.arange(first, first + len(lengths))
        self._numbers = np.insert(self._numbers, start, numbers)
        self._rows = np.insert(self._rows, start, np.stack([lengths, addresses, keys], 1), axis=0)

    def remove(self, numbers: Column) -> None:
        """Remove the regions with these numbers. Raises ``UsageError`` if one is not registered or
        comes twice; then nothing has changed."""
        gone = np.unique(numbers)
        place = np.searchsorted(self._numbers, gone)
        known = place < len(self)
        known[known] = self._numbers[place[known]] == gone[known]
        if not known.all() or len(gone) != len(numbers):
            missing = gone[~known][0] if not known.all() else "that comes twice"
            raise UsageError(f"region {missing} is not registered")
        self._numbers = np.delete(self._numbers, place)
        self._rows = np.delete(self._rows, place, axis=0)

    def of(self, numbers: Column) -> tuple[Column, Column, Column]:
        """Lengths, addresses and keys; a length of -1 where there is no such region."""
        place = np.minimum(np.searchsorted(self._numbers, numbers), max(0, len(self) - 1))
        found = np.full((len(numbers), 3), (-1, 0, 0), np.int64)
        if len(self):
            known = self._numbers[place] == numbers
            found[known] = self._rows[place[known]]
        lengths, addresses, keys = np.ascontiguousarray(found.T)
        return lengths, addresses, keys
