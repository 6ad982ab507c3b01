"""A link that fails on purpose: a relay between a client and a host, on loopback.

What it does to the bytes is said by its attributes, which may change at any time. It knows
nothing of what it carries.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Final

_CHUNK: Final = 64 << 10
_STEP_S: Final = 0.02


class LossyLink:
    """Relays tcp connections to ``(host, port)``. Use it as a context manager.

    cut_after: so many bytes (both directions of all connections together) are relayed exactly;
        then every connection is reset, and new ones are refused, until it is set again; with
        ``once`` it is None then, and the link is well. ``cuts`` counts.
    damage_at: the byte of this number, counted like ``relayed``, arrives with a bit flipped.
    stalled: while True nothing is relayed, and nothing is lost.
    bytes_s: relayed for each connection and direction, at most; None: no limit.
    """

    def __init__(self, host: str, port: int) -> None:
        self.cut_after: int | None = None
        self.once = False
        self.cuts = 0
        self.damage_at: int | None = None
        self.stalled = False
        self.bytes_s: int | None = None
        self.relayed = 0
        self._target: Final = (host, port)
        self._guard: Final = threading.Lock()
        self._listening: Final = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._ended: Final = threading.Event()
        self._start(self._accept)

    @property
    def port(self) -> int:
        """Where clients connect."""
        port: int = self._listening.getsockname()[1]
        return port

    def cut(self) -> None:
        """Reset every connection now."""
        with self._guard:
            ending, self._open = self._open, []
        for each in ending:
            _reset(each)

    def close(self) -> None:
        """Reset all, and end."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> LossyLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            if self._is_spent():
                _reset(near)
                continue
            try:
                far = socket.create_connection(self._target, 5)
            except OSError:
                _reset(near)
                continue
            far.settimeout(None)
            for each in (near, far):  # what is small is not to wait for more
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._guard:
                self._open += [near, far]
            self._start(self._relay, near, far)
            self._start(self._relay, far, near)

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
            _reset(source)
            _reset(target)

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

    def _start(self, work: object, *arguments: socket.socket) -> None:
        assert callable(work)
        thread = threading.Thread(target=work, args=arguments, name="portus-lossy", daemon=True)
        self._threads.append(thread)
        thread.start()


def _reset(connection: socket.socket) -> None:
    """End it at once, for both sides: what is under way is lost."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
