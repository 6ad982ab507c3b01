"""A save under way: its version, and which of its storages have a place."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from portus.engine.copying.segments import Column
from portus.errors import UsageError
from portus.reach.protocol import messages as said
from portus.reach.versions.pool_draft import PoolDraft


class Draft:
    """A save from its ``begin`` to its commit."""

    def __init__(
        self,
        pool: PoolDraft,
        lengths: Column,
        handles: tuple[Column, Column],
        begin: said.Begin,
        size: int,
    ) -> None:
        """handles: address and key of each storage in the client's memory. size: bytes of memory
        reserved for the save."""
        self.size = size
        self.pool: Final = pool
        self.lengths: Final = lengths
        self.address, self.key = handles
        self.begin: Final = begin
        self.claimed: Final = np.zeros(len(lengths), np.bool_)
        self.shared_bytes = 0
        self.begun_s: Final = time.perf_counter()

    def may_claim(self, indices: Column) -> bool:
        """Return whether ``indices`` are distinct storages of the version without a place."""
        if len(indices) and int(indices.max()) >= len(self.lengths):
            return False
        return len(np.unique(indices)) == len(indices) and not self.claimed[indices].any()

    def claim(self, indices: Column) -> None:
        """Mark storages as having a place. Raise ``UsageError`` if they may not have one."""
        if not self.may_claim(indices):
            raise UsageError("storages that are not there, come twice, or have a place already")
        self.claimed[indices] = True
