"""A client that was let in: what the answers to all of its requests share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Final

from portus.engine.copying.segments import Column, Sources, Stop
from portus.errors import UsageError
from portus.reach.daemon.events import tell
from portus.reach.daemon.fabric import HostLane
from portus.reach.daemon.house import House
from portus.reach.daemon.pools import HostedPool
from portus.reach.index.records import VersionEntry
from portus.reach.transport.one_sided import RemoteStorages, TransferResult
from portus.reach.transport.stream import Link
from portus.reach.transport.verbs import WorkError

STORAGE_MOVED: Final = 256
"""Bytes of memory that a storage takes at most while it is moved or hashed; measured."""
_TURN_S: Final = 0.1


class Guest:
    """The client of one connection. ``lane``: the way to its memory, if it is reached by verbs."""

    def __init__(self, link: Link, hosted: HostedPool, house: House) -> None:
        self.link: Final = link
        self.hosted: Final = hosted
        self.writer: Final = hosted.writer
        self.counters: Final = house.counters
        self.patience: Final = house.patience
        self.fabric: Final = house.fabric
        self.lane: HostLane | None = None
        self._turns: Final = house.hashing

    def tell(self, level: int, event: str, text: str, **fields: str | float | None) -> None:
        """Log what this client did, with its name and its tenant."""
        peer, tenant = self.link.name, self.hosted.tenant
        tell(level, event, f"{tenant}: {text}", peer=peer, tenant=tenant, **fields)

    @contextlib.contextmanager
    def keep_memory(self, size: int) -> Iterator[None]:
        """Memory that stays for what is made in here."""
        self.link.keep(size)
        try:
            yield
        except BaseException:
            self.link.keep(-size)
            raise

    @contextlib.contextmanager
    def hashing(self) -> Iterator[Stop]:
        """A turn in which the pool is hashed for this client, as long as it is there."""
        with contextlib.ExitStack() as turns, self.link.working() as stop:
            for turn in (self.hosted.hashing, self._turns):
                # In short waits: a client that has hung up must not keep waiting for a turn.
                while not turn.acquire(timeout=_TURN_S):
                    stop.check()
                turns.callback(turn.release)
            yield stop

    def transfer(
        self,
        move: Callable[[RemoteStorages, Sources], TransferResult],
        remote: RemoteStorages,
        moved: Sources,
    ) -> TransferResult:
        """Move bytes by verbs with ``move``, and count them and the time on the wire."""
        try:
            done = move(remote, moved)
        except WorkError as error:
            if error.denied:
                raise UsageError(f"a region cannot be reached: {error}") from error
            raise
        self.counters.add("verbs_bytes", moved.size)
        self.counters.add("bounced_bytes", done.bounced)
        self.counters.add("wire_seconds", done.wire_s)
        return done

    def find(self, token: bytes) -> VersionEntry | None:
        """The version of that token, if it is in the pool."""
        return self.writer.catalogue().of_token(token)

    def note_change(self, models: Collection[str]) -> None:
        """Tell the mirror and the replica that these models changed."""
        self.hosted.replica.note_change(models)
        if self.hosted.mirror is not None:
            self.hosted.mirror.note_change(models)


def is_reached(remote: RemoteStorages, lengths: Column) -> bool:
    """True if each storage that has bytes has a handle."""
    has_one = (remote.address > 0) | (remote.key > 0)  # a dmabuf begins at the address 0
    return bool((has_one | (lengths == 0)).all())
