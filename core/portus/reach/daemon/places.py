"""Slots for the connections of a host: how many there may be, and which one ends for a new one.

A stranger, a client that has not yet proved its secret, gets one of a few slots that are for
strangers only, for a short time. If all are taken, the oldest stranger makes room, of the address
that has most of them. A client that has proved its secret needs one of the other slots: a tenant
may have three quarters of them, an address half. If none is free, the host ends an unused
connection whose owner has more than the newcomer: of the tenant that has most, and of its address
that has most.
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
"""Connections with a proved secret, at most, unless the host is told otherwise."""

STRANGER_S: Final = 10.0
"""Seconds that a stranger may stay, whatever it sends."""

UNUSED_S: Final = 60.0
"""Seconds without a request after which a connection may be ended for another one."""


class ConnectionSlot:
    """The slot of one connection. ``address``: of the client; "" for a unix socket."""

    def __init__(self, address: str, connected: socket.socket) -> None:
        self.address: Final = address
        self.tenant: str | None = None
        self.since_s = time.monotonic()
        """Start of its wait for a request; before the proof, the time at which it connected."""
        self.waits = True
        """False while a request is under way."""
        self.why = ""
        """The reason for its end."""
        self._socket: Final = connected

    def end(self, why: str) -> None:
        """Shut the connection down, for the reason ``why``, so that its thread wakes."""
        self.why = why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def note_answer(self) -> None:
        """Record that the request is answered."""
        self.since_s, self.waits = time.monotonic(), True


class Places:
    """The slots of all connections. ``count``: for those with a proved secret. Thread-safe."""

    def __init__(self, count: int = CONNECTIONS) -> None:
        self.count: Final = count
        self.tenant_max: Final = max(1, count - count // 4)
        self.address_max: Final = max(1, count // 2)
        self.strangers_max: Final = max(4, count // 8)
        self._guard: Final = threading.Lock()
        self._taken: Final[dict[ConnectionSlot, None]] = {}

    def come(self, address: str, connected: socket.socket) -> ConnectionSlot:
        """Return a slot for a stranger, ending another stranger's if needed."""
        place = ConnectionSlot(address, connected)
        with self._guard:
            strangers = self._strangers_left()
            if len(strangers) >= self.strangers_max:
                of_address = Counter(each.address for each in strangers)
                # Of the address with most, so that a client that floods the host displaces itself.
                most = max(of_address.values())
                oldest = next(each for each in strangers if of_address[each.address] == most)
                self._end(oldest, "others needed its place, and it had not proved its secret")
            self._taken[place] = None
        return place

    def sweep(self) -> None:
        """End strangers that have stayed too long."""
        with self._guard:
            self._strangers_left()

    def prove(self, place: ConnectionSlot, tenant: str) -> None:
        """Move a stranger to the slots of ``tenant``, ending an unused connection if needed. Raise
        ``TransportError`` if there is no slot."""
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
        """Free the slot of a connection that has ended."""
        with self._guard:
            self._taken.pop(place, None)

    def _make_room(self, address: str, tenant: str, others: list[ConnectionSlot]) -> bool:
        """End an unused connection among ``others``, of an owner that has more slots than the
        newcomer, or of the newcomer itself. Return False if there is none."""
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
        # Of the owner with most, the one unused for longest; a trainer reconnects at its next save.
        found = max(unused, key=lambda each: (share(each.tenant, each.address), -each.since_s))
        self._end(found, "others needed its place, and it was not used")
        return True

    def _strangers_left(self) -> list[ConnectionSlot]:
        """Return the strangers, oldest first, after ending those that stayed too long."""
        strangers = [each for each in self._taken if each.tenant is None]
        before_s = time.monotonic() - STRANGER_S
        while strangers and strangers[0].since_s < before_s:
            self._end(strangers.pop(0), f"it did not prove its secret within {STRANGER_S:g} s")
        return strangers

    def _end(self, place: ConnectionSlot, why: str) -> None:
        del self._taken[place]
        place.end(why)
