"""One connection, from the greeting to its end."""

from __future__ import annotations

import logging
import os
import time
from typing import Final

from portus.errors import (
    PortusError,
    TransportError,
    UsageError,
)
from portus.reach.daemon.events import tell
from portus.reach.daemon.places import ConnectionSlot
from portus.reach.daemon.pools import HostedPool
from portus.reach.daemon.requests.guest import Guest
from portus.reach.daemon.requests.router import ANSWERS
from portus.reach.daemon.shared_state import ConnectionStatus, House, refusal_of, turn_away
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import check_tenant
from portus.reach.protocol.messages import (
    MAGIC,
    NONCE_SIZE,
    VERSION,
    Fault,
    Message,
    ProtocolError,
    Refused,
)
from portus.reach.protocol.proof import proof_of_host
from portus.reach.protocol.vocabulary import MessageKind
from portus.reach.transport.stream import Link, UnreadError

GREETING_S: Final = 10.0
"""Seconds that a stranger may take for each message of the greeting."""


class ServedConnection:
    """The host's end of one connection."""

    def __init__(self, link: Link, place: ConnectionSlot, house: House) -> None:
        self.link: Final = link
        self.place: Final = place
        self._house: Final = house
        self._peer: Final = link.name
        self._start_s: Final = time.perf_counter()
        self._tenant: str | None = None
        self._guest: Guest | None = None

    def status(self) -> ConnectionStatus:
        """Return the facts of this connection as they are now. Any thread may call this."""
        seconds, guest = time.perf_counter() - self._start_s, self._guest
        tenant = self._tenant or ""
        if guest is None:
            return ConnectionStatus(peer=self._peer, tenant=tenant, seconds=seconds)
        return ConnectionStatus(
            peer=self._peer,
            tenant=tenant,
            seconds=seconds,
            claims=list(guest.claims),
            pins=len(guest.pins),
            saving=guest.saving,
        )

    def run(self) -> None:
        """Answer the client until the connection ends, and log the end. Leaves the link open."""
        try:
            self.link.shake_hands(GREETING_S)
        except TransportError as error:
            turn_away(self._house, self._peer, self.place.why or str(error))
            return
        try:
            hosted = self._greet()
            if hosted is not None:
                self._serve(hosted)
                self._log_end("the client said goodbye")
        except (TransportError, UsageError) as error:  # UsageError: the host closed it, at its end
            self._log_end(self.place.why or str(error))

    def _log_end(self, why: str) -> None:
        told = tell if self._tenant is not None else self._house.strangers.tell
        told(
            logging.INFO,
            "disconnected",
            f"{self._peer}: ended: {why}",
            peer=self._peer,
            tenant=self._tenant,
            why=why,
            seconds=time.perf_counter() - self._start_s,
        )

    # The greeting.

    def _greet(self) -> HostedPool | None:
        link, house = self.link, self._house
        link.silence_s = GREETING_S
        hello = link.receive()
        assert isinstance(hello, said.Hello)
        refusal = _why_not(hello)
        if refusal:
            self._turn_away(refusal)
            return None
        # Fresh for each connection, so that a recorded proof proves nothing.
        nonce = os.urandom(NONCE_SIZE)
        link.send(said.Challenge(nonce, house.secrets.is_required))
        given = link.receive()
        assert isinstance(given, said.ClientProof)
        secret = house.secrets.match_proof(hello.tenant, given.proof, hello.nonce, nonce)
        if secret is None:
            why = f"wrong secret for tenant {hello.tenant!r}, or no such tenant"
            self._turn_away(why, hello.tenant)
            return None
        self._tenant = hello.tenant
        link.account.tenant = hello.tenant
        try:
            # After the proof: strangers must not take the places of those who know a secret.
            house.places.prove(self.place, hello.tenant)
            hosted = house.pools.of(hello.tenant)
        except PortusError as error:
            text, why = f"{self._peer}: {error}", str(error)
            who = {"peer": self._peer, "tenant": hello.tenant}
            tell(logging.ERROR, "turned_away", text, **who, why=why)
            link.send(refusal_of(error))
            return None
        proof = proof_of_host(secret, hello.tenant, hello.nonce, nonce) if secret else b""
        info = hosted.writer.medium.info
        uuid = hosted.writer.superblock.uuid
        verbs = not house.fabric.why_not(link)
        link.send(said.Welcome(proof, uuid, info.name, info.volatile, info.granularity, verbs))
        house.counters.add("connections")
        text = f"{self._peer}: tenant {hello.tenant}"
        who = {"peer": self._peer, "tenant": hello.tenant}
        tell(logging.INFO, "connected", text, **who, verbs=verbs)
        return hosted

    def _turn_away(self, why: str, tenant: str | None = None) -> None:
        turn_away(self._house, self._peer, why, tenant)
        self.link.send(Refused(Fault.USAGE, 0, why))

    # Requests.

    def _serve(self, hosted: HostedPool) -> None:
        link, patience = self.link, self._house.patience
        guest = self._guest = Guest(link, hosted, self._house)
        goodbye = False
        try:
            link.silence_s = patience.silent_s
            while not goodbye:
                link.account.give_back()
                self.place.note_answer()
                # A client with a claim may stay idle: a training may save once a day. Keepalive
                # notices a client that vanished.
                is_claimed = guest.claims and guest.draft is None
                try:
                    event = link.receive(patience.claimed_s if is_claimed else patience.idle_s)
                except UnreadError as unread:
                    self._refuse(guest, unread.kind, unread.why)
                    continue
                self.place.waits = False
                if not isinstance(event, Message):
                    raise ProtocolError("payload where a request was expected")
                goodbye = isinstance(event, said.Bye)
                if not goodbye:
                    self._answer(guest, event)
                del event  # it may be big, and the next one may take long to arrive
        finally:
            guest.end(goodbye=goodbye)

    def _answer(self, guest: Guest, message: Message) -> None:
        """Carry out a request and send the answer; a refusal ends the save that it was part of."""
        try:
            answer = ANSWERS[type(message)](guest, message)
        except PortusError as error:
            # No connection is left for a refusal.
            if self.link.closed:
                raise
            self._refuse(guest, message.kind, error)
        else:
            self.link.send(answer)

    def _refuse(self, guest: Guest, kind: MessageKind, error: PortusError) -> None:
        guest.drop("refused")
        refusal = refusal_of(error)
        guest.counters.count_failure(refusal.fault)
        failed_here = refusal.fault in (Fault.MEDIUM, Fault.CORRUPTION)  # a busy pool is neither
        guest.tell(
            logging.ERROR if failed_here else logging.INFO,
            "refused",
            f"{kind.name} refused: {error}",
            request=kind.name.lower(),
            fault=refusal.fault.name.lower(),
            why=str(error),
        )
        self.link.send(refusal)


def _why_not(hello: said.Hello) -> str:
    if hello.magic != MAGIC:
        return f"this is a Portus storage host; {hello.magic!r} is not spoken here"
    if hello.version != VERSION:
        return f"protocol version {hello.version}: this host speaks {VERSION}; upgrade the older"
    try:
        check_tenant(hello.tenant)
    except UsageError as error:
        return str(error)
    return ""
