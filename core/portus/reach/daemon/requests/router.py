"""The router of requests: what answers each one, and how a refusal is reported.

Answers are grouped by topic, in classes. The names of their methods are those that the messages
declare as their handlers.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from portus.errors import PortusError
from portus.reach.daemon.house import Facts, House, refusal_of
from portus.reach.daemon.pools import HostedPool
from portus.reach.daemon.requests.guest import Guest
from portus.reach.daemon.requests.objects import ObjectRequests
from portus.reach.daemon.requests.pool import PoolRequests
from portus.reach.daemon.requests.reads import ReadRequests
from portus.reach.daemon.requests.saves import SaveRequests
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Fault, Refused, Said
from portus.reach.protocol.vocabulary import MessageKind
from portus.reach.transport.stream import Link


class Requests:
    """The requests of one client that was let in."""

    def __init__(self, link: Link, hosted: HostedPool, house: House) -> None:
        guest = self._guest = Guest(link, hosted, house)
        self._saves: Final = SaveRequests(guest)
        self._reads: Final = ReadRequests(guest)
        self._pool: Final = PoolRequests(guest)
        others = (self._saves, self._reads, self._pool, ObjectRequests(guest))
        self._answering: Final = {type(each): each for each in others}
        self.goodbye = False
        """True once the client said so."""

    @property
    def idle_s(self) -> float:
        """The longest wait for a request. A client that has claimed a model may stay idle: a
        training may save once a day. Keepalive notices a client that vanished."""
        patience = self._guest.patience
        is_claimed = self._saves.claims and not self._saves.saving
        return patience.claimed_s if is_claimed else patience.idle_s

    def answer(self, message: Said) -> None:
        """Do what is asked, and say so; a refusal ends the save that it was part of."""
        owner, method = ANSWERS[message.kind]
        try:
            answer = method(self._answering[owner], message)
        except PortusError as error:
            if self._guest.link.closed:
                raise
            self.refuse(message.kind, error)
            return
        self._guest.link.send(answer)

    def refuse(self, kind: MessageKind, error: PortusError) -> None:
        """Say why not."""
        self._saves.drop("refused")
        self._guest.link.send(self._refuse(kind, error))

    def _refuse(self, kind: MessageKind, error: PortusError) -> Refused:
        refusal = refusal_of(error)
        self._guest.counters.count_failure(refusal.fault)
        failed_here = refusal.fault in (Fault.MEDIUM, Fault.CORRUPTION)  # a busy pool is neither
        self._guest.tell(
            logging.ERROR if failed_here else logging.INFO,
            "refused",
            f"{kind.name} refused: {error}",
            request=kind.name.lower(),
            fault=refusal.fault.name.lower(),
            why=str(error),
        )
        return refusal

    def end(self) -> None:
        """The connection is over: nothing of it stays."""
        if self._guest.lane is not None:
            # First: the card must not write to space that the next line gives back (decision 0023).
            self._guest.lane.close()
        self._saves.drop("the connection ended")
        self._reads.unpin_all()
        if self._saves.disclaim(goodbye=self.goodbye):
            self._pool.give_back_at_the_end()

    def add_facts(self, facts: Facts) -> Facts:
        """Return ``facts`` with this client's claims, pins and save filled in. From any thread."""
        saves = self._saves
        return replace(facts, claims=saves.claims, pins=self._reads.pins, saving=saves.saving)


ANSWERS: Final = said.MESSAGES.handlers(SaveRequests, ReadRequests, PoolRequests, ObjectRequests)
"""What answers each request. One that no method answers fails here, when a host starts."""
