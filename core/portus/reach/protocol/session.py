"""The order of messages: one table for both ends, made of the declarations of the messages.

Theory. A connection carries one conversation. The client asks and the host answers, one request at
a time; a request of several messages (a save, a read) has states of its own. Both ends walk the
same table, and each knows the other's state, except for messages on their way. Two of these may
cross. A client may abandon a save while the host reports its progress, so the host's messages are
ignored in ABANDONING. And if the host refuses just then, the abandonment finds it in READY, where
it is answered too. A message that the table does not have is an error of its sender.

A save goes SAVING -> OFFERED -> SAVING for each offer, and -> CONFIRMING -> READY. A host that
accesses the regions directly answers an offer with HASHED; on a stream it first sends PULL, and the
client's DATA follows. Only CONFIRM makes a version: a connection that ends before it, however it
ends, leaves nothing.
"""

from __future__ import annotations

from typing import Final

from portus.reach.protocol.messages import MESSAGES
from portus.reach.protocol.vocabulary import MessageKind, Phase

NEXT: Final[dict[tuple[Phase, MessageKind], Phase]] = MESSAGES.order()
"""The table, by the declarations of the messages. A missing entry is an error."""


def table() -> str:
    """Return the table, as the document has it."""
    lines = ["| state | message | from | state after |", "|---|---|---|---|"]
    lines += [
        f"| {before.value} | {kind.name} | {'client' if kind.from_client else 'host'} "
        f"| {after.value} |"
        for (before, kind), after in NEXT.items()
    ]
    return "\n".join(lines) + "\n"
