"""A proxy for plain HTTP between a client and a server, on loopback, that fails on purpose.

It knows requests and nothing of what they mean. Each has a number, in the order in which they
came; what becomes of it is said by ``RequestProxy.fault``, which is asked with the request.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from io import BufferedReader
from typing import Final

from portus.errors import UsageError
from tests.simulation.relay import Relay, reset

_CHUNK: Final = 64 << 10
_CONNECT_S: Final = 5.0


class ConnectionCut(enum.Enum):
    """When both connections of a request are reset; in an answer they are closed."""

    BEFORE = "the server does not see the request"
    WITHIN = "the server sees half of the request"
    AFTER = "the server has done it; the client gets no byte of the answer"
    ANSWER = "the server has done it; the client gets a part of the answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFault:
    """What becomes of a request.

    status: the proxy answers with it, and the server does not see the request. code: what an S3
    server would say in that answer. delay_s: waited before the server gets the request, all of
    which was read by then; it gets it whether the client still waits or not. bytes_s: at most so
    many of a body are passed on, in each direction.
    """

    status: int | None = None
    code: str = ""
    delay_s: float = 0.0
    cut: ConnectionCut | None = None
    bytes_s: int | None = None


@dataclass(slots=True)
class Request:
    """What a client asked. target: path and query. length: of its body. status: of the
    answer that it gets; None before that, and if it gets none, or a part of one. answered: bytes
    of the body of that answer."""

    number: int
    method: str
    target: str
    length: int
    head: bytes
    status: int | None = None
    answered: int = 0


Plan = Callable[[Request], RequestFault | None]
"""What becomes of a request; None: it is passed on."""


class RequestProxy(Relay):
    """Passes requests on to ``(host, port)``. Use it as a context manager.

    fault: may be set at any time. requests: all that came, in the order of their numbers.
    """

    def __init__(self, host: str, port: int) -> None:
        self.fault: Plan = _none
        self.requests: Final[list[Request]] = []
        super().__init__(host, port, "portus-proxy")

    @property
    def endpoint(self) -> str:
        """The URL that clients are to use."""
        return f"http://127.0.0.1:{self.port}"

    def fail(
        self, fault: RequestFault, *, times: int = 1, method: str = "", target: str = ""
    ) -> None:
        """Let ``fault`` become of the next ``times`` requests of that method ("": any) that have
        ``target`` in theirs, and pass all others on."""
        left = itertools.count(times, -1)

        def plan(request: Request) -> RequestFault | None:
            is_meant = method in ("", request.method) and target in request.target
            return fault if is_meant and next(left) > 0 else None

        self.fault = plan

    def count(self, method: str) -> int:
        """How many requests of that method came."""
        with self._guard:
            return sum(request.method == method for request in self.requests)

    def _serve(self, client: socket.socket) -> None:
        """All requests of one connection."""
        pair = _Pair(client, self._target)
        with self._guard:
            self._open.add(client)
        try:
            while not self._ended.is_set():
                head = _read_head(pair.from_client)
                if not head:
                    return
                self._pass_on(pair, self._noted(head))
        except _EndError:
            pass  # closed below: what was sent arrives
        except (_CutError, OSError):  # one side is gone, or is to be
            reset(client)
        finally:
            with self._guard:
                self._open.discard(client)
            pair.close()

    def _noted(self, head: bytes) -> Request:
        method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        with self._guard:
            request = Request(len(self.requests), method, target, _length(head) or 0, head)
            self.requests.append(request)
            return request

    def _pass_on(self, pair: _Pair, request: Request) -> None:
        fault = self.fault(request) or RequestFault()
        if fault.cut is ConnectionCut.BEFORE:
            raise _CutError
        if fault.status is not None:
            _read(pair.from_client, request.length)
            self._wait(fault.delay_s)
            request.status = fault.status
            pair.client.sendall(_answer(request.method, fault))
            return
        self._forward(pair, request, fault)
        head = _read_head(pair.from_server)
        if not head:
            raise _CutError
        self._return(pair, request, fault, head)

    def _forward(self, pair: _Pair, request: Request, fault: RequestFault) -> None:
        server = pair.server()
        if fault.cut is ConnectionCut.WITHIN:
            half = request.length // 2
            server.sendall(request.head if half else request.head[:-2])
            server.sendall(_read(pair.from_client, half))
            reset(server)
            raise _CutError
        if fault.delay_s:
            body = _read(pair.from_client, request.length)
            self._wait(fault.delay_s)
            server.sendall(request.head + body)
            return
        server.sendall(request.head)
        self._copy(pair.from_client, server, request.length, fault.bytes_s)

    def _return(self, pair: _Pair, request: Request, fault: RequestFault, head: bytes) -> None:
        status = int(head.split(b" ", 2)[1])
        length = _length(head)
        has_no_body = request.method == "HEAD" or status in (204, 304)
        if fault.cut in (ConnectionCut.AFTER, ConnectionCut.ANSWER):
            body = b"" if has_no_body else _read_body(pair.from_server, head)
            if fault.cut is ConnectionCut.ANSWER:
                pair.client.sendall(head + body[: len(body) // 2] if body else head[:10])
                raise _EndError
            raise _CutError
        body = b""
        if has_no_body:
            length = 0
        elif length is None:
            body = _read_body(pair.from_server, head)
        # Before it is sent: who gets it may look here at once.
        request.status, request.answered = status, length or len(body)
        pair.client.sendall(head + body)
        self._copy(pair.from_server, pair.client, length or 0, fault.bytes_s)

    def _copy(
        self, source: BufferedReader, target: socket.socket, length: int, bytes_s: int | None
    ) -> None:
        while length:
            data = source.read1(min(_CHUNK, length))
            if not data:
                raise _CutError
            if bytes_s is not None:
                self._wait(len(data) / bytes_s)
            target.sendall(data)
            length -= len(data)

    def _wait(self, seconds: float) -> None:
        if seconds and self._ended.wait(seconds):
            raise _CutError


class _CutError(Exception):
    """The connections of a request are to be reset."""


class _EndError(Exception):
    """The connections of a request are to be closed: a reset would discard what is in transit."""


class _Pair:
    """The connection of a client, and that to the server, made when it is needed."""

    def __init__(self, client: socket.socket, target: tuple[str, int]) -> None:
        self.client: Final = client
        self.from_client: Final = client.makefile("rb")
        self._target: Final = target
        self._server: socket.socket | None = None
        self._from_server: BufferedReader | None = None
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def server(self) -> socket.socket:
        if self._server is None:
            self._server = socket.create_connection(self._target, _CONNECT_S)
            self._server.settimeout(None)
            self._server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._from_server = self._server.makefile("rb")
        return self._server

    @property
    def from_server(self) -> BufferedReader:
        assert self._from_server is not None
        return self._from_server

    def close(self) -> None:
        for each in (self.from_client, self._from_server, self.client, self._server):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.close()


def _none(_: Request) -> None:
    return None


def _read_head(source: BufferedReader) -> bytes:
    """Up to the empty line, with it; empty at the end of a connection."""
    lines = []
    while line := source.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _field(head: bytes, name: str) -> str | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.decode("latin-1").partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def _length(head: bytes) -> int | None:
    """Return the length of the body; None if the head does not say it."""
    if _field(head, "transfer-encoding") is not None:
        return None
    text = _field(head, "content-length")
    return None if text is None else int(text)


def _read(source: BufferedReader, length: int) -> bytes:
    data = source.read(length)
    if len(data) < length:
        raise _CutError
    return data


def _read_body(source: BufferedReader, head: bytes) -> bytes:
    """The whole body of an answer, as it came."""
    length = _length(head)
    if length is not None:
        return _read(source, length)
    if _field(head, "transfer-encoding") != "chunked":
        raise UsageError(f"an answer without a length, not in chunks: {head!r}")
    pieces = []
    while True:
        line = source.readline()
        size = int(line.split(b";")[0], 16)
        pieces += [line, _read(source, size + 2)]
        if not size:
            return b"".join(pieces)


def _answer(method: str, fault: RequestFault) -> bytes:
    assert fault.status is not None
    code = fault.code or "Fault"
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
    head = (
        f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}\r\n"
        f"Content-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return (head + ("" if method == "HEAD" else body)).encode()
