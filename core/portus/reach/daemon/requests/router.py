"""The router of requests: the function that answers each one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from portus.reach.daemon.requests import pool, reads, saves
from portus.reach.daemon.requests.guest import Guest
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import MESSAGES, Said

ANSWERS: Final[dict[type[Said], Callable[[Guest, Any], Said]]] = {
    said.Begin: saves.begin,
    said.Offer: saves.offer,
    said.Share: saves.share,
    said.Confirm: saves.confirm,
    said.Abandon: saves.abandon,
    said.Read: reads.read,
    said.Check: reads.check_ranges,
    said.Pin: reads.pin,
    said.Unpin: reads.unpin,
    said.Retire: pool.retire,
    said.Status: pool.status,
    said.Claim: saves.claim,
    said.Connect: saves.connect,
    said.Push: reads.push,
    said.GiveBack: pool.give_back,
    said.Note: pool.note,
    said.Put: pool.put,
    said.Get: pool.get,
    said.List: pool.list_some,
    said.Delete: pool.delete,
    said.Settle: saves.settle,
}

for _kind in MESSAGES:
    # When a host starts, not when the first client asks.
    if _kind.is_request and _kind.type not in ANSWERS:
        raise AssertionError(f"message {_kind.name}: it is a request, and nothing answers it")
