"""The order of messages: one table for both ends.

Theory. A connection carries one conversation. The client asks and the host answers, one request
at a time; what takes several messages (a save, a read) has states of its own. Both ends walk the
same table, and each knows the other's state but for what is still on its way. Two things may cross:
a client may abandon a save while the host says how far it is, so the host's words are passed over
in ABANDONING; and when the host refuses just then, the abandonment finds it in READY, where it is
answered all the same. What the table does not have is an error of whoever said it.

A save goes SAVING -> OFFERED -> SAVING for each offer, and -> CONFIRMING -> READY. A host that
reaches the regions by itself answers an offer with PULLED; on a stream it first says PULL, and the
client's DATA follows. Only CONFIRM makes a version: a connection that ends before it, however it
ends, leaves nothing.
"""

from __future__ import annotations

import enum
from typing import Final

from portus.protocol.messages import Kind


class State(enum.Enum):
    """Where a conversation is."""

    NEW = "new"
    GREETED = "greeted"
    CHALLENGED = "challenged"
    PROVING = "proving"
    READY = "ready"
    ASKED = "asked"
    LOOKING = "looking"
    LISTING = "listing"
    READING = "reading"
    CHECKING = "checking"
    CONNECTING = "connecting"
    PUSHING = "pushing"
    BEGINNING = "beginning"
    SAVING = "saving"
    OFFERED = "offered"
    PULLING = "pulling"
    SHARING = "sharing"
    CONFIRMING = "confirming"
    ABANDONING = "abandoning"
    CLOSED = "closed"


NEXT: Final[dict[tuple[State, Kind], State]] = {
    (State.NEW, Kind.HELLO): State.GREETED,
    (State.GREETED, Kind.CHALLENGE): State.CHALLENGED,
    (State.GREETED, Kind.REFUSED): State.CLOSED,
    (State.CHALLENGED, Kind.PROOF): State.PROVING,
    (State.PROVING, Kind.WELCOME): State.READY,
    (State.PROVING, Kind.REFUSED): State.CLOSED,
    (State.READY, Kind.CLAIM): State.ASKED,
    (State.READY, Kind.REGISTER): State.ASKED,
    (State.READY, Kind.FORGET): State.ASKED,
    (State.READY, Kind.PIN): State.ASKED,
    (State.READY, Kind.UNPIN): State.ASKED,
    (State.READY, Kind.ROOM): State.ASKED,
    (State.READY, Kind.RETIRE): State.ASKED,
    (State.READY, Kind.HOLD): State.ASKED,
    (State.READY, Kind.GIVE_BACK): State.ASKED,
    (State.READY, Kind.NOTE): State.ASKED,
    (State.ASKED, Kind.DONE): State.READY,
    (State.ASKED, Kind.REFUSED): State.READY,
    (State.READY, Kind.STATUS): State.LOOKING,
    (State.LOOKING, Kind.STATE): State.READY,
    (State.LOOKING, Kind.REFUSED): State.READY,
    (State.READY, Kind.HOLDS): State.LISTING,
    (State.LISTING, Kind.HELD): State.READY,
    (State.LISTING, Kind.REFUSED): State.READY,
    (State.READY, Kind.READ): State.READING,
    (State.READING, Kind.BYTES): State.READING,
    (State.READING, Kind.DONE): State.READY,
    (State.READING, Kind.REFUSED): State.READY,
    (State.READY, Kind.CHECK): State.CHECKING,
    (State.CHECKING, Kind.CHECKED): State.READY,
    (State.CHECKING, Kind.REFUSED): State.READY,
    (State.READY, Kind.CONNECT): State.CONNECTING,
    (State.CONNECTING, Kind.CONNECTED): State.READY,
    (State.CONNECTING, Kind.REFUSED): State.READY,
    (State.READY, Kind.PUSH): State.PUSHING,
    (State.PUSHING, Kind.PUSHED): State.READY,
    (State.PUSHING, Kind.REFUSED): State.READY,
    (State.READY, Kind.BEGIN): State.BEGINNING,
    (State.BEGINNING, Kind.BEGUN): State.SAVING,
    (State.BEGINNING, Kind.REFUSED): State.READY,
    (State.SAVING, Kind.OFFER): State.OFFERED,
    (State.OFFERED, Kind.PULL): State.PULLING,
    (State.OFFERED, Kind.PULLED): State.SAVING,
    (State.OFFERED, Kind.REFUSED): State.READY,
    (State.PULLING, Kind.DATA): State.PULLING,
    (State.PULLING, Kind.PULLED): State.SAVING,
    (State.PULLING, Kind.REFUSED): State.READY,
    (State.SAVING, Kind.SHARE): State.SHARING,
    (State.SHARING, Kind.SHARED): State.SAVING,
    (State.SHARING, Kind.REFUSED): State.READY,
    (State.SAVING, Kind.CONFIRM): State.CONFIRMING,
    (State.CONFIRMING, Kind.COMMITTED): State.READY,
    (State.CONFIRMING, Kind.MISSING): State.SAVING,
    (State.CONFIRMING, Kind.REFUSED): State.READY,
    (State.SAVING, Kind.ABANDON): State.ABANDONING,
    (State.OFFERED, Kind.ABANDON): State.ABANDONING,
    (State.PULLING, Kind.ABANDON): State.ABANDONING,
    (State.READY, Kind.ABANDON): State.ABANDONING,
    (State.ABANDONING, Kind.PULL): State.ABANDONING,
    (State.ABANDONING, Kind.PULLED): State.ABANDONING,
    (State.ABANDONING, Kind.REFUSED): State.ABANDONING,
    (State.ABANDONING, Kind.ABANDONED): State.READY,
    (State.READY, Kind.BYE): State.CLOSED,
}
"""What is not in it is an error."""


def table() -> str:
    """The table, as the document has it."""
    lines = ["| state | message | from | state after |", "|---|---|---|---|"]
    lines += [
        f"| {before.value} | {kind.name} | {'client' if kind.from_client else 'host'} "
        f"| {after.value} |"
        for (before, kind), after in NEXT.items()
    ]
    return "\n".join(lines) + "\n"
