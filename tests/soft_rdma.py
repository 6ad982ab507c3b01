"""An RDMA device in this process alone: requests copy its memory at once, as the keys allow it."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Final

import pytest

from portus.errors import TransportError
from portus.reach.transport.verbs import (
    Domain,
    Endpoint,
    Port,
    QueuePair,
    Region,
    RegisterError,
    WorkError,
)

_KEYS: Final = itertools.count(1)
_LIVE: Final[dict[int, tuple[int, int, bool]]] = {}
"""Start, length, and whether the other side may write: of each key."""

PORT: Final = Port("soft0", 1, 0, bytes(16))


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hosts and clients of this process find the device, and use nothing else."""
    monkeypatch.setenv("PORTUS_TRANSPORT", "verbs")
    for module in ("transport.host", "daemon.fabric"):
        monkeypatch.setattr(f"portus.reach.{module}.Domain", SoftDomain)
        monkeypatch.setattr(f"portus.reach.{module}.port_for", lambda host: PORT)
    monkeypatch.setattr("portus.reach.daemon.fabric.load", lambda: None)


class SoftDomain(Domain):
    """``refused``: the lengths that cannot be registered."""

    refused: frozenset[int] = frozenset()

    def __init__(self, port: Port) -> None:
        self.port = port  # type: ignore[misc]

    def register(
        self, start: int, length: int, *, remote: bool, writable: bool, on_demand: bool = False
    ) -> Region:
        if length in self.refused:
            raise RegisterError(f"cannot register {length} bytes")
        key = next(_KEYS)
        _LIVE[key] = start, length, remote and writable
        memory = SimpleNamespace(lkey=key, rkey=key, close=lambda: _LIVE.pop(key, None))
        return Region(start, length, memory)

    def register_dmabuf(self, descriptor: int, offset: int, length: int) -> Region:
        raise RegisterError("no dmabufs here")

    def queue_pair(self) -> QueuePair:
        return SoftPair(self)

    def close(self) -> None:
        """It holds nothing."""


class SoftPair(QueuePair):
    def __init__(self, domain: Domain) -> None:
        self.domain = domain  # type: ignore[misc]
        self.closed = False
        self.endpoint = Endpoint(1, 2, bytes(16), 0, 5, 16)  # type: ignore[misc]
        self._done = 0

    def connect(self, other: Endpoint, *, remote: bool) -> None:
        assert other == self.endpoint

    def read(self, target: int, local_key: int, source: int, remote_key: int, length: int) -> None:
        self._move(target, local_key, source, remote_key, length, is_read=True)

    def write(self, target: int, remote_key: int, source: int, local_key: int, length: int) -> None:
        self._move(source, local_key, target, remote_key, length, is_read=False)

    def poll(self) -> int:
        if self.closed:
            raise TransportError("the queue pair is closed")
        done, self._done = self._done, 0
        return done

    def close(self) -> None:
        self.closed = True

    def _move(
        self,
        local: int,
        local_key: int,
        remote: int,
        remote_key: int,
        length: int,
        *,
        is_read: bool,
    ) -> None:
        for at, key, is_remote in ((local, local_key, False), (remote, remote_key, True)):
            start, size, writable = _LIVE.get(key, (0, 0, False))
            if not start <= at <= at + length <= start + size or (
                is_remote and not is_read and not writable
            ):
                raise WorkError("the other side refuses access to this memory", denied=True)
        ends = (local, remote) if is_read else (remote, local)
        ctypes.memmove(*ends, length)
        self._done += 1
