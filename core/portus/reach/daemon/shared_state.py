"""The state that all connections of a host share, and the facts about each connection."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Final

import msgspec

from portus.errors import PortusError
from portus.reach.daemon.counters import Counters
from portus.reach.daemon.events import RateLimitedLog, tell
from portus.reach.daemon.fabric import Fabric
from portus.reach.daemon.places import Places
from portus.reach.daemon.pools import HASHERS, Pools
from portus.reach.daemon.secrets import Secrets
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Fault, Refused
from portus.reach.transport.budget import Budget

MEMORY: Final = 1 << 30
"""Bytes of memory that all clients together may make a host hold, unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeouts:
    """The longest waits for a client, in seconds. ``idle_s``: between requests; ``claimed_s``: the
    same, for a client that has claimed a model; ``silent_s``: within a request, payload included;
    ``claim_s``: for a model that another client saves."""

    idle_s: float = 900.0
    claimed_s: float = 2 * 86400.0
    silent_s: float = 60.0
    claim_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """The state that all sessions of a host share."""

    pools: Pools
    secrets: Secrets
    counters: Counters
    patience: ClientTimeouts
    fabric: Fabric = field(default_factory=Fabric)
    strangers: RateLimitedLog = field(default_factory=RateLimitedLog)
    """Logs the clients that were turned away."""
    budget: Budget = field(default_factory=lambda: Budget(MEMORY))
    places: Places = field(default_factory=Places)
    hashing: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(HASHERS))
    """Held while a pool is hashed for a client."""


def turn_away(
    house: House, peer: str, why: str, tenant: str | None = None, *, is_known: bool = False
) -> None:
    """Count and log a client that is not let in. is_known: it has proved the secret of
    ``tenant``."""
    house.counters.add("refused")
    level, told = logging.WARNING, house.strangers.tell
    if is_known:
        level, told = logging.ERROR, tell
    told(level, "turned_away", f"{peer}: turned away: {why}", peer=peer, tenant=tenant, why=why)


class ConnectionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a connection. ``tenant``: empty until the client is let in. ``seconds``: since
    it connected. ``claims``: the models that it saves; ``pins``: how many versions it holds;
    ``saving``: MODEL@STEP, or empty."""

    peer: str
    tenant: str
    seconds: float
    claims: list[str] = []
    pins: int = 0
    saving: str = ""


def refusal_of(error: PortusError) -> Refused:
    """Return the message that reports an error to a client."""
    number = error.errno if isinstance(error, OSError) else None
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return Refused(Fault.of(error), number or 0, text[: said.TEXT_SIZE_MAX // 4])
