"""A client that was let in, the things it holds here, and helpers to answer its requests."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final

import numpy as np

from portus.engine.copying.segments import Column, Sources, Stop
from portus.engine.spec import VersionInfo
from portus.errors import PortusError, UsageError
from portus.reach.daemon.events import tell
from portus.reach.daemon.fabric import HostLane
from portus.reach.daemon.pools import HostedPool
from portus.reach.daemon.shared_state import House
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import digest_rows
from portus.reach.transport.one_sided import TransferResult
from portus.reach.transport.stream import Link
from portus.reach.transport.verbs import WorkError
from portus.reach.versions.pool_draft import PoolDraft

STORAGE_MOVED: Final = 256
"""Bytes of memory that a storage takes at most while it is moved or hashed; measured."""
_TURN_S: Final = 0.1


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


class Guest:
    """The client of one connection. ``lane``: the way to its memory, if verbs reach it. ``claims``:
    the models that it saves. ``pins``: how often it pinned each version. ``draft``: the save under
    way. Any thread may read these."""

    def __init__(self, link: Link, hosted: HostedPool, house: House) -> None:
        self.link: Final = link
        self.hosted: Final = hosted
        self.writer: Final = hosted.writer
        self.counters: Final = house.counters
        self.patience: Final = house.patience
        self.fabric: Final = house.fabric
        self.lane: HostLane | None = None
        self.claims: Final[list[str]] = []
        self.pins: Final[Counter[int]] = Counter()
        self.draft: Draft | None = None
        self._turns: Final = house.hashing

    @property
    def saving(self) -> str:
        """MODEL@STEP while a save is under way, else empty."""
        draft = self.draft
        return "" if draft is None else f"{draft.begin.model}@{draft.begin.step}"

    def tell(self, level: int, event: str, text: str, **fields: str | float | None) -> None:
        """Log an event of this client, with its name and its tenant."""
        peer, tenant = self.link.name, self.hosted.tenant
        tell(level, event, f"{tenant}: {text}", peer=peer, tenant=tenant, **fields)

    @contextlib.contextmanager
    def keep_memory(self, size: int) -> Iterator[None]:
        """Reserve memory for what the block makes, unless the block raises."""
        self.link.account.keep(size)
        try:
            yield
        except BaseException:
            self.link.account.keep(-size)
            raise

    @contextlib.contextmanager
    def hashing(self) -> Iterator[Stop]:
        """Take a turn to hash the pool. Yields a stop that notices when the client leaves."""
        with contextlib.ExitStack() as turns, self.link.working() as stop:
            for turn in (self.hosted.hashing, self._turns):
                # In short waits: a client that has hung up must not keep waiting for a turn.
                while not turn.acquire(timeout=_TURN_S):
                    stop.check()
                turns.callback(turn.release)
            yield stop

    def transfer(self, moved: Sources, key: Column, *, is_pull: bool) -> TransferResult | None:
        """Move storages by verbs, and count them; see ``one_sided.transfer``. Return None if the
        client is not connected by verbs, or gave no place for one of them."""
        lane = self.lane
        has_place = (moved.address > 0) | (key > 0)  # a dmabuf begins at the address 0
        if lane is None or lane.pair.closed or not (has_place | (moved.length == 0)).all():
            return None
        try:
            done = lane.transfer(moved, key, is_pull=is_pull)
        except WorkError as error:
            if error.denied:
                raise UsageError(f"a region cannot be reached: {error}") from error
            raise
        self.counters.add("verbs_bytes", moved.size)
        self.counters.add("bounced_bytes", done.bounced)
        self.counters.add("wire_seconds", done.wire_s)
        return done

    def find_all(self, tokens: bytes) -> list[VersionInfo]:
        """Return the versions of tokens that are in the pool."""
        wanted = {row.tobytes() for row in digest_rows(tokens, "tokens")}
        entries = self.writer.catalogue().entries() if wanted else ()
        return [each.info for each in entries if each.info.token in wanted]

    def drop(self, why: str) -> None:
        """End the save that is under way, without a version."""
        draft, self.draft = self.draft, None
        if draft is None:
            return
        draft.pool.release()
        self.link.account.keep(-draft.size)
        self.hosted.end_save()
        self.counters.add("abandoned")
        model, step = draft.begin.model, draft.begin.step
        self.tell(
            logging.INFO,
            "abandoned",
            f"model {model!r} step {step}: no version: {why}",
            model=model,
            step=step,
            why=why,
            bytes=int(draft.lengths.sum()),
            seconds=time.perf_counter() - draft.begun_s,
        )

    def give_back(self) -> None:
        """Return the free space of the pool to its file system."""
        freed = self.fabric.give_back(self.hosted)
        self.tell(logging.INFO, "gave_back", f"{freed} bytes returned", bytes=freed)

    def end(self, *, goodbye: bool) -> None:
        """Release all that the client holds. goodbye: the client ended in order."""
        if self.lane is not None:
            # First: the card must not write to space that the next line frees (decision 0023).
            self.lane.pair.close()
        self.drop("the connection ended")
        for version in self.pins.elements():
            self.writer.locks.unpin(version)
        self.pins.clear()
        was_last = False
        while self.claims:
            model = self.claims.pop()
            self.hosted.replica.release(model)
            was_last = self.hosted.disclaim(model, goodbye=goodbye)
        if was_last:  # until another trainer comes, the space is not needed
            try:
                self.give_back()
            except PortusError as error:
                text = f"its free space could not be returned: {error}"
                self.tell(logging.WARNING, "log", text)

    def note_change(self, models: Collection[str]) -> None:
        """Tell the mirror and the replica that these models changed."""
        self.hosted.replica.note_change(models)
        if self.hosted.mirror is not None:
            self.hosted.mirror.note_change(models)
