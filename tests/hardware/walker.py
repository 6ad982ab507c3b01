"""Both ends of a conversation by verbs, in processes that are forked: to be killed at any state.

A ``Walk`` is a client that goes from state to state of a save, of one that is given up, and of a
restore. ``client`` walks to one and is killed there by its own hand; ``host`` serves until it is
killed.
"""

from __future__ import annotations

import os
import signal
from typing import Final

import numpy as np

from portus.engine.format.checksum import UNIT, digest
from portus.reach.index.records import VersionRecord, decode_version
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import Address, Scheme, parse
from portus.reach.protocol.messages import Said, pack_column, pack_pairs
from portus.reach.transport.dial import Credentials
from portus.reach.transport.host import Links
from portus.reach.transport.stream import Link
from portus.reach.transport.verbs import QueuePair, Region, load
from portus.reach.versions.parts import share, sources
from tests.contents import table
from tests.hardware.states import Bytes, state_of
from tests.hosts import serving
from tests.nursery import Say

MODEL: Final = "walk"
SIZE: Final = (20 << 20) + 12345
"""Of more than one batch: a pull takes half a second at least."""

BEFORE: Final = {
    "claimed": "",
    "connected": "claimed",
    "registered": "connected",
    "begun": "registered",
    "offered": "begun",
    "pulled": "offered",
    "confirming": "pulled",
    "committed": "confirming",
    "abandoning": "pulled",
    "abandoned": "abandoning",
    "pinned": "committed",
    "pushing": "pinned",
    "pushed": "pushing",
}
"""Each state, and the one before it. Those in -ing, and "offered", are behind a word of the client
that the host has not answered yet."""

COMMITTED: Final = ("committed", "pinned", "pushing", "pushed")
"""Where the version must be there; where the client is confirming it may be."""


class Walk:
    """A client. Raises ``TransportError`` when the host is gone."""

    link: Link
    lane: QueuePair
    region: Region
    record: VersionRecord

    def __init__(self, url: str) -> None:
        self.links: Final = Links(parse(url), Credentials(), model=MODEL)
        self.array: Final[Bytes] = state_of(SIZE, 1, step=1)[0]

    def to(self, state: str) -> None:
        """Go there, by way of all states before it."""
        if BEFORE[state]:
            self.to(BEFORE[state])
        self.step(state)

    def step(self, state: str) -> None:
        """Go there from the one before it."""
        getattr(self, f"_{state.replace(' ', '_')}")()

    def hear(self, expected: type[Said]) -> Said:
        answer = self.link.hear()
        assert isinstance(answer, expected), answer
        return answer

    def ask(self, message: Said, expected: type[Said]) -> Said:
        self.link.send(message)
        return self.hear(expected)

    def close(self) -> None:
        """Revoke, and go."""
        self.links.revoke(self.link)
        if hasattr(self, "region"):
            self.region.close()
        self.links.close()

    def register(self, length: int) -> Region:
        """Let the host read and write so much from the beginning of the array."""
        start = self.array.ctypes.data
        return self.lane.domain.register(start, length, remote=True, writable=True)

    def _claimed(self) -> None:
        self.link = self.links.borrow()

    def _connected(self) -> None:
        lane = self.links.lane(self.link)
        assert lane is not None
        self.lane = lane

    def _registered(self) -> None:
        self.region = self.register(SIZE)

    def _begun(self) -> None:
        handle = pack_pairs([self.region.start], [self.region.remote_key])
        self.ask(said.Begin(MODEL, 1, b"t" * 16, pack_column([SIZE]), handle), said.Done)

    def _offered(self) -> None:
        self.link.send(said.Offer(pack_column([0])))

    def _pulled(self) -> None:
        self.hear(said.Hashed)

    def _confirming(self) -> None:
        starts = range(0, SIZE, UNIT)
        digests = b"".join(digest(self.array[start : start + UNIT].tobytes()) for start in starts)
        self.link.send(said.Confirm(digests, table([SIZE]), b""))

    def _committed(self) -> None:
        answer = self.hear(said.Committed)
        assert isinstance(answer, said.Committed)
        self.record = decode_version(memoryview(answer.record))

    def _abandoning(self) -> None:
        self.lane.close()
        self.link.send(said.Abandon())

    def _abandoned(self) -> None:
        self.hear(said.Done)

    def _pinned(self) -> None:
        self.ask(said.Pin(self.record.info.id), said.Done)

    def _pushing(self) -> None:
        extents = share(self.record, np.arange(1)).extents
        moved = sources(np.array([self.region.start]), np.array([SIZE]), extents)
        ranges = np.stack([moved.extent_offset, moved.extent_length], axis=1).reshape(-1)
        handle = pack_pairs([self.region.start], [self.region.remote_key])
        self.array[:] = 0
        self.link.send(said.Push(pack_column([SIZE]), pack_column(ranges), handle))

    def _pushed(self) -> None:
        self.hear(said.Hashed)


def warm_up() -> None:
    """In the nursery: what a child needs is imported."""
    load()


def client(say: Say, url: str, state: str) -> None:
    Walk(url).to(state)
    say("there")
    os.kill(os.getpid(), signal.SIGKILL)


def host(say: Say, place: str, port: int) -> None:
    with serving(place, address=Address(Scheme.TCP, host="127.0.0.1", port=port)) as server:
        say(f"port {server.listeners[0].port}")
        while True:
            signal.pause()
