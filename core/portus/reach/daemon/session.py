"""One connection, from the greeting to its end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from portus.errors import (
    PortusError,
    TransportError,
    UsageError,
)
from portus.reach.daemon.events import tell
from portus.reach.daemon.places import ConnectionSlot
from portus.reach.daemon.pools import HostedPool
from portus.reach.daemon.requests import pool, saves
from portus.reach.daemon.requests.guest import Guest
from portus.reach.daemon.shared_state import ConnectionStatus, House, refusal_of, turn_away
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import check_tenant
from portus.reach.protocol.connection import SkippedMessage
from portus.reach.protocol.messages import (
    MAGIC,
    MESSAGES,
    NONCE_SIZE,
    VERSION,
    Fault,
    Message,
    ProtocolError,
    Said,
)
from portus.reach.protocol.proof import prove
from portus.reach.protocol.vocabulary import MessageKind
from portus.reach.transport.stream import Link

GREETING_S: Final = 10.0
"""Seconds that a stranger may take for each message of the greeting."""

ANSWERS: Final[dict[type[Said], Callable[[Guest, Any], Said]]] = {
    said.Begin: saves.begin,
    said.Offer: saves.offer,
    said.Share: saves.share,
    said.Confirm: saves.confirm,
    said.Abandon: saves.abandon,
    said.Read: pool.read,
    said.Check: pool.check_ranges,
    said.Pin: pool.pin,
    said.Unpin: pool.unpin,
    said.Retire: pool.retire,
    said.Status: pool.status,
    said.Claim: saves.claim,
    said.Connect: saves.connect,
    said.Push: pool.push,
    said.GiveBack: pool.give_back,
    said.Note: pool.note,
    said.Settle: saves.settle,
    said.Lead: saves.lead,
}

for _kind in MESSAGES:
    # When a host starts, not when the first client asks.
    if _kind.is_request and _kind.type not in ANSWERS:
        raise AssertionError(f"message {_kind.name}: it is a request, and nothing answers it")


class ServedConnection:
    """The host's end of one connection."""

    def __init__(self, link: Link, place: ConnectionSlot, house: House) -> None:
        self.link: Final = link
        self.place: Final = place
        self._house: Final = house
        self._start_s: Final = time.perf_counter()
        self._tenant: str | None = None
        """The tenant that the client named. Once it is proved, its account has it too."""
        self._guest: Guest | None = None

    def status(self) -> ConnectionStatus:
        """Return the facts of this connection as they are now. Any thread may call this."""
        guest, seconds = self._guest, time.perf_counter() - self._start_s
        status = ConnectionStatus(
            peer=self.link.name, tenant=self.link.account.tenant, seconds=seconds
        )
        if guest is None:
            return status
        return msgspec.structs.replace(
            status, claims=list(guest.claims), pins=len(guest.pins), saving=guest.saving
        )

    def run(self) -> None:
        """Answer the client until the connection ends, and log the end. Leaves the link open."""
        link = self.link
        try:
            link.shake_hands(GREETING_S)
        except TransportError as error:
            turn_away(self._house, link.name, self.place.why or str(error))
            return
        try:
            link.silence_s = GREETING_S
            try:
                hosted = self._greet()
            except PortusError as error:
                if link.closed:
                    raise
                known = bool(link.account.tenant)
                turn_away(self._house, link.name, str(error), self._tenant, is_known=known)
                link.send(refusal_of(error))
                return
            self._serve(hosted)
            self._log_end("the client said goodbye")
        except PortusError as error:  # also the answer to a client that the host turned out
            self._log_end(self.place.why or str(error))

    def _log_end(self, why: str) -> None:
        tenant = self.link.account.tenant or None
        told = self._house.strangers.tell if tenant is None else tell
        told(
            logging.INFO,
            "disconnected",
            f"{self.link.name}: ended: {why}",
            peer=self.link.name,
            tenant=tenant,
            why=why,
            seconds=time.perf_counter() - self._start_s,
        )

    def _greet(self) -> HostedPool:
        """Let the client in, and return its pool. Raise what it is refused with."""
        link, house = self.link, self._house
        hello = link.receive()
        assert isinstance(hello, said.Hello)
        tenant = self._tenant = _check_hello(hello)
        # Fresh for each connection, so that a recorded proof proves nothing.
        nonce = os.urandom(NONCE_SIZE)
        link.send(said.Challenge(nonce, house.secrets.is_required))
        given = link.receive()
        assert isinstance(given, said.ClientProof)
        secret = house.secrets.match_proof(tenant, given.proof, hello.nonce, nonce)
        if secret is None:
            raise UsageError(f"wrong secret for tenant {tenant!r}, or no such tenant")
        link.account.tenant = tenant
        # After the proof: strangers must not take the places of those who know a secret.
        house.places.prove(self.place, tenant)
        hosted = house.pools.of(tenant)
        proof = prove("host", secret, tenant, hello.nonce, nonce) if secret else b""
        info, uuid = hosted.writer.medium.info, hosted.writer.uuid
        verbs = not house.fabric.why_not(link)
        link.send(said.Welcome(proof, uuid, info.name, info.volatile, info.granularity, verbs))
        house.counters.add("connections")
        text = f"{link.name}: tenant {tenant}"
        tell(logging.INFO, "connected", text, peer=link.name, tenant=tenant, verbs=verbs)
        return hosted

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
                event = link.receive(patience.claimed_s if is_claimed else patience.idle_s)
                if isinstance(event, SkippedMessage):
                    self._refuse(guest, event.kind, event.why)
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


def _check_hello(hello: said.Hello) -> str:
    """Return the tenant of a client. Raise ``UsageError`` if it is not to be asked for a proof."""
    if hello.magic != MAGIC:
        raise UsageError(f"this is a Portus storage host; {hello.magic!r} is not spoken here")
    if hello.version != VERSION:
        raise UsageError(
            f"protocol version {hello.version}: this host speaks {VERSION}; upgrade the older"
        )
    return check_tenant(hello.tenant)
