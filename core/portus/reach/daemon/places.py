"""Places of a host: how many connections there may be, and which one ends where another is due.

A stranger, who did not prove yet that he knows a secret, has one of a few places that are for
strangers alone, and not for long. Where these are taken the oldest of the address that has most of
them makes room. Who proved it needs a place among the others: of these a tenant may have three
quarters, an address half. Where there is none, one that nobody uses is ended, of whoever has more
than the one who came: of the tenant that has most, and of its address that has most.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from typing import Final

from portus.errors import TransportError

CONNECTIONS: Final = 1024
"""Connections that prove that they know a secret, at most, if the host is not told otherwise."""

STRANGER_S: Final = 10.0
"""The longest for a stranger, whatever he says."""

UNUSED_S: Final = 60.0
"""A connection without a request for so long may be ended for another one."""


class ConnectionSlot:
    """The place of one connection. ``address``: of the other side; "" for a unix socket."""

    def __init__(self, address: str, connected: socket.socket) -> None:
        self.address: Final = address
        self.tenant: str | None = None
        self.since_s = time.monotonic()
        """Since when it has been waiting for a request; before the proof, since it came."""
        self.waits = True
        """False while a request is under way."""
        self.why = ""
        """Why it was ended."""
        self._socket: Final = connected

    def end(self, why: str) -> None:
        """Wake whoever talks there: it is over."""
        self.why = why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def note_answer(self) -> None:
        """The request is answered."""
        self.since_s, self.waits = time.monotonic(), True


class Places:
    """The places of all connections. ``count``: for those that proved their secret. Thread-safe."""

    def __init__(self, count: int = CONNECTIONS) -> None:
        self.count: Final = count
        self.tenant_max: Final = max(1, count - count // 4)
        self.address_max: Final = max(1, count // 2)
        self.strangers_max: Final = max(4, count // 8)
        self._guard: Final = threading.Lock()
        self._taken: Final[dict[ConnectionSlot, None]] = {}

    def come(self, address: str, connected: socket.socket) -> ConnectionSlot:
        """A place for a stranger."""
        place = ConnectionSlot(address, connected)
        with self._guard:
            strangers = self._strangers_left()
            if len(strangers) >= self.strangers_max:
                of_address = Counter(each.address for each in strangers)
                # Of the address that has most, so whoever floods the host displaces himself first.
                most = max(of_address.values())
                oldest = next(each for each in strangers if of_address[each.address] == most)
                self._end(oldest, "others needed its place, and it had not proved its secret")
            self._taken[place] = None
        return place

    def sweep(self) -> None:
        """End strangers that have been there for too long."""
        with self._guard:
            self._strangers_left()

    def prove(self, place: ConnectionSlot, tenant: str) -> None:
        """Move a stranger to the places of ``tenant``, ending an unused connection if needed.
        Raises ``TransportError`` if there is no place for it."""
        with self._guard:
            proven = [each for each in self._taken if each.tenant is not None]
            limits = [
                (self.tenant_max, "of this tenant", [e for e in proven if e.tenant == tenant]),
                (self.count, "in all", proven),
            ]
            if place.address:
                near = [each for each in proven if each.address == place.address]
                limits.insert(0, (self.address_max, "from this address", near))
            for most, which, others in limits:
                if len(others) >= most and not self._make_room(place.address, tenant, others):
                    raise TransportError(
                        f"no place for another connection: {len(others)} {which} are the most, "
                        "and all are in use. Close some, or raise `portus serve --connections`"
                    )
            place.tenant, place.waits = tenant, False

    def leave(self, place: ConnectionSlot) -> None:
        """Free the place of a connection that has ended."""
        with self._guard:
            self._taken.pop(place, None)

    def _make_room(self, address: str, tenant: str, others: list[ConnectionSlot]) -> bool:
        """End one of the others that nobody uses, of who has more places than a newcomer, or of the
        same owner as that."""
        proven = [each for each in self._taken if each.tenant is not None]
        of_tenant = Counter(each.tenant for each in proven)
        of_both = Counter((each.tenant, each.address) for each in proven)

        def share(tenant: str | None, address: str) -> tuple[int, int]:
            return of_tenant[tenant], of_both[tenant, address]

        before_s, mine = time.monotonic() - UNUSED_S, share(tenant, address)
        unused = [
            each
            for each in others
            if (each.waits and each.since_s <= before_s and each in self._taken)
            and (
                (each.tenant, each.address) == (tenant, address)
                or share(each.tenant, each.address) > mine
            )
        ]
        if not unused:
            return False
        # Of whoever has most, the one unused for longest; a trainer reconnects at its next save.
        found = max(unused, key=lambda each: (share(each.tenant, each.address), -each.since_s))
        self._end(found, "others needed its place, and it was not used")
        return True

    def _strangers_left(self) -> list[ConnectionSlot]:
        """The strangers, oldest first, without those that were there for too long."""
        strangers = [each for each in self._taken if each.tenant is None]
        before_s = time.monotonic() - STRANGER_S
        while strangers and strangers[0].since_s < before_s:
            self._end(strangers.pop(0), f"it did not prove its secret within {STRANGER_S:g} s")
        return strangers

    def _end(self, place: ConnectionSlot, why: str) -> None:
        del self._taken[place]
        place.end(why)
