"""One connection, from the greeting to the end."""

from __future__ import annotations

import errno
import logging
import os
import time
from typing import Final

from portus.errors import BusyError, PortusError, TransportError, UsageError
from portus.reach.daemon.events import tell
from portus.reach.daemon.house import Facts, House, refusal_of, turn_away
from portus.reach.daemon.places import ConnectionSlot
from portus.reach.daemon.pools import HostedPool
from portus.reach.daemon.requests.router import Requests
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import check_tenant
from portus.reach.protocol.connection import Payload
from portus.reach.protocol.messages import (
    MAGIC,
    NONCE_SIZE,
    VERSION,
    Fault,
    ProtocolError,
    Refused,
)
from portus.reach.protocol.proof import proof_of_host
from portus.reach.transport.stream import Link, UnreadError

GREETING_S: Final = 10.0
"""The longest that a stranger may take for each word of the greeting."""


class ServedConnection:
    """The host's end of one connection."""

    def __init__(self, link: Link, house: House, peer: str, place: ConnectionSlot) -> None:
        self._place: Final = place
        self._link: Final = link
        self._house: Final = house
        self._peer: Final = peer
        self._start_s: Final = time.perf_counter()
        self._tenant: str | None = None
        self._requests: Requests | None = None
        self.hosted: HostedPool | None = None
        """The pool that it uses; None until it is let in."""

    def facts(self) -> Facts:
        """Return the facts of this connection as they are now. From any thread."""
        seconds = time.perf_counter() - self._start_s
        facts = Facts(peer=self._peer, tenant=self._tenant, seconds=seconds)
        return facts if self._requests is None else self._requests.add_facts(facts)

    def run(self) -> None:
        """Talk until the end. What goes wrong with the connection is logged, and ends it."""
        try:
            hosted = self._greet()
            if hosted is not None:
                self._serve(hosted)
                self._log_end("the client said goodbye")
        except (TransportError, UsageError) as error:  # UsageError: the host closed it, at its end
            self._log_end(self._place.why or str(error))
        finally:
            self._link.close()

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
        link, house = self._link, self._house
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
        if link.account is not None:
            link.account.tenant = hello.tenant
        try:
            # After the proof: strangers must not take the places of those who know a secret.
            house.places.prove(self._place, hello.tenant)
            hosted = self.hosted = house.pools.of(hello.tenant)
            # A reopening that began before ``self.hosted`` was set did not wait for this
            # connection.
            if house.pools.of(hello.tenant) is not hosted:
                raise BusyError(errno.EAGAIN, "the pool is being opened again; try again")
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
        self._link.send(Refused(Fault.USAGE, 0, why))

    # Requests.

    def _serve(self, hosted: HostedPool) -> None:
        requests = self._requests = Requests(self._link, hosted, self._house)
        try:
            self._link.silence_s = self._house.patience.silent_s
            while True:
                self._link.give_back()
                self._place.note_answer()
                try:
                    event = self._link.receive(requests.idle_s)
                except UnreadError as unread:
                    requests.refuse(unread.kind, unread.why)
                    continue
                self._place.works()
                if isinstance(event, Payload):
                    raise ProtocolError("payload where a request was expected")
                if isinstance(event, said.Bye):
                    requests.goodbye = True
                    return
                requests.answer(event)
                del event  # it may be big, and the next one may be long in coming
        finally:
            requests.end()


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
