"""The order of messages: one table for both ends, made of what each message declares.

Theory. A connection carries one conversation. The client asks and the host answers, one request
at a time; what takes several messages (a save, a read) has states of its own. Both ends walk the
same table, and each knows the other's state but for what is still on its way. Two things may cross:
a client may abandon a save while the host says how far it is, so the host's words are passed over
in ABANDONING; and when the host refuses just then, the abandonment finds it in READY, where it is
answered all the same. What the table does not have is an error of whoever said it.

A save goes SAVING -> OFFERED -> SAVING for each offer, and -> CONFIRMING -> READY. A host that
reaches the regions by itself answers an offer with HASHED; on a stream it first says PULL, and the
client's DATA follows. Only CONFIRM makes a version: a connection that ends before it, however it
ends, leaves nothing.
"""

from __future__ import annotations

from typing import Final

from portus.reach.protocol.messages import MESSAGES
from portus.reach.protocol.vocabulary import MessageKind, Phase

NEXT: Final[dict[tuple[Phase, MessageKind], Phase]] = MESSAGES.order()
"""As each message is declared. What is not in it is an error."""


def table() -> str:
    """The table, as the document has it."""
    lines = ["| state | message | from | state after |", "|---|---|---|---|"]
    lines += [
        f"| {before.value} | {kind.name} | {'client' if kind.from_client else 'host'} "
        f"| {after.value} |"
        for (before, kind), after in NEXT.items()
    ]
    return "\n".join(lines) + "\n"
