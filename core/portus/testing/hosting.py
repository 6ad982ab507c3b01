"""A storage host in the process of the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from portus.reach.daemon.counters import Counters
from portus.reach.daemon.mirrors import TenantMirrors
from portus.reach.daemon.places import CONNECTIONS, Places
from portus.reach.daemon.pools import Pools, Quotas
from portus.reach.daemon.replicas import OtherHost
from portus.reach.daemon.secrets import Secrets
from portus.reach.daemon.server import Server, open_listener
from portus.reach.daemon.shared_state import MEMORY, ClientTimeouts, House
from portus.reach.protocol.address import Address, Scheme, parse
from portus.reach.transport.budget import Budget


@contextlib.contextmanager
def serving(
    place: str | Path,
    *,
    secrets: dict[str, bytes] | None = None,
    quota: int | None = None,
    patience: ClientTimeouts | None = None,
    address: Address | None = None,
    memory: int = MEMORY,
    connections: int = CONNECTIONS,
    mirrors: TenantMirrors | None = None,
    replica: str | None = None,
) -> Iterator[Server]:
    """Run a server in this process, on a free port of loopback if no address is given.

    mirrors: the mirrors of its pools, which also fill them at the start.
    replica: the address of the host that it copies to.
    """
    known = Secrets(None if secrets is None else {each: (secrets[each],) for each in secrets})
    other = None if replica is None else OtherHost(parse(replica), known)
    house = House(
        pools=Pools(str(place), Quotas(quota), mirrors, other),
        secrets=known,
        counters=Counters(),
        patience=patience or ClientTimeouts(),
        budget=Budget(memory),
        places=Places(connections),
    )
    listener = open_listener(address or Address(Scheme.TCP, host="127.0.0.1", port=0), None)
    try:
        if mirrors is not None or other is not None:
            house.pools.open_all()
        server = Server([listener], house)
    except BaseException:
        listener.socket.close()
        house.pools.close()
        raise
    server.start()
    try:
        yield server
    finally:
        assert server.stop(), "a connection did not end"


def url(server: Server, tenant: str = "") -> str:
    """Return the URL of the first listener of ``server``."""
    found = server.listeners[0].public_address
    return found.replace("://", f"://{tenant}@", 1) if tenant else found
