"""What a sharded save asks of the ``Checkpointer`` of a rank's part, beyond saving."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from portus.client.files.headroom import Headroom
from portus.client.files.opened import RunPool
from portus.client.loading.view import Sign
from portus.index.pool import PoolWriter
from portus.media import calls
from portus.spec import VersionInfo


class RankPart:
    """A run as a part of groups, which other ranks have a say about."""

    def __init__(self, pool: RunPool, headroom: Headroom) -> None:
        self.surplus: Callable[[Sequence[VersionInfo]], Collection[int]] | None = None
        """Replaces ``keep``: returns the ids of the versions that the next commit retires, unless
        a reference file holds them. Runs on the worker."""
        self.is_heard_of = False
        """True if the caller raises a failed save in the next save, on all ranks. Then ``save``
        does not raise it on one rank alone."""
        self.on_commit: Callable[[VersionInfo], None] | None = None
        """Called with each committed version, on the worker. Must not raise."""
        self._pool: Final = pool
        self._headroom: Final = headroom

    def announce(self) -> Sign:
        """A sign by which others tell this open pool from any copy of it. Creates the pool if it
        does not exist. Raises the errors of ``Checkpointer``, and ``MediumError``."""
        if self._pool.writer is None:
            if calls.is_nested():
                raise calls.refused(f"creation of {self._pool.home.path}")
            self._headroom.prepare(0)
        writer = self._pool.writer
        assert writer is not None
        holder = writer.announce() if isinstance(writer, PoolWriter) else ""
        return Sign(writer.superblock.uuid, holder)

    @calls.entry
    def let_go(self, versions: Collection[int]) -> None:
        """Retire the versions with these ids, except those that a reference file leads to. Raises
        ``PortusError``."""
        self._pool.check_usable()
        writer, keeper = self._pool.writer, self._pool.keeper
        if writer is not None and keeper is not None:
            keeper.deleted()
            held = keeper.held(writer.catalogue()) | self._pool.surplus.held_in_older()
            writer.retire(sorted(set(versions) - held))
            keeper.deleted()  # forgets the links of what is gone

    def cut_off(self, tokens: Collection[bytes]) -> None:
        """Put aside the files that refer to these versions. They are parts of saves that were never
        completed, but look like checkpoints. Call it on the worker."""
        if tokens and self._pool.keeper is not None:
            self._pool.keeper.cut_off(tokens)
