"""A link that fails on purpose: a relay between a client and a host, on loopback.

Its attributes say what it does to the bytes, and may change at any time. It does not interpret
what it carries.
"""

from __future__ import annotations

import socket
from typing import Final

from tests.simulation.relay import Relay, reset

_CHUNK: Final = 64 << 10
_STEP_S: Final = 0.02


class LossyLink(Relay):
    """Relays tcp connections to ``(host, port)``. Use it as a context manager.

    cut_after: relay exactly this many bytes (both directions of all connections together), then
        reset every connection and refuse new ones, until it is set again. With ``once`` it becomes
        None then, and the link works again. ``cuts`` counts.
    damage_at: the byte with this number, counted like ``relayed``, arrives with a bit flipped.
    stalled: while True nothing is relayed, and nothing is lost.
    bytes_s: the most bytes in a second for each connection and direction; None: no limit.
    """

    def __init__(self, host: str, port: int) -> None:
        self.cut_after: int | None = None
        self.once = False
        self.cuts = 0
        self.damage_at: int | None = None
        self.stalled = False
        self.bytes_s: int | None = None
        self.relayed = 0
        super().__init__(host, port, "portus-lossy")

    def _serve(self, client: socket.socket) -> None:
        if self._is_spent():
            reset(client)
            return
        try:
            far = socket.create_connection(self._target, 5)
        except OSError:
            reset(client)
            return
        far.settimeout(None)
        for each in (client, far):  # small messages must not wait for more
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._guard:
            self._open.update((client, far))
        if self._ended.is_set():  # and what was open then is reset already
            self.cut()
        self._start(self._relay, far, client)
        self._relay(client, far)

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(_CHUNK):
                while self.stalled and not self._ended.wait(_STEP_S):
                    pass
                if self.bytes_s is not None:
                    self._ended.wait(len(data) / self.bytes_s)
                data = self._allowed(data)
                target.sendall(data)
                if self._is_spent():
                    self._break()
                    return
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one side is gone; the other one is to hear of it
            reset(source)
            reset(target)

    def _allowed(self, data: bytes) -> bytes:
        with self._guard:
            if self.cut_after is not None:
                data = data[: max(0, self.cut_after - self.relayed)]
            start, self.relayed = self.relayed, self.relayed + len(data)
            if self.damage_at is not None and start <= self.damage_at < self.relayed:
                place = self.damage_at - start
                data = data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]
            return data

    def _break(self) -> None:
        self.cuts += 1
        self.cut()
        if self.once:
            self.cut_after = None

    def _is_spent(self) -> bool:
        return self.cut_after is not None and self.relayed >= self.cut_after
