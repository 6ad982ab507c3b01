"""``RequestProxy``: what it says of requests, and what becomes of them."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.simulation.proxy import ConnectionCut, RequestFault, RequestProxy

BODY = b"0123456789" * 10_000


class Server(ThreadingHTTPServer):
    """Keeps what is put; gets come in chunks where the name says so."""

    daemon_threads = True

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, *_: Any) -> None:
        """Connections are cut here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if len(data) == int(self.headers["Content-Length"]):
            self.server.kept[self.path] = data
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def do_GET(self) -> None:
        data = self.server.kept.get(self.path, b"")
        self.send_response(200 if data else 404)
        if "chunks" in self.path:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (data[:10], data[10:], b""):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxy(server: Server) -> Iterator[RequestProxy]:
    with RequestProxy("127.0.0.1", server.server_port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: RequestProxy) -> Iterator[http.client.HTTPConnection]:
    host, port = proxy.endpoint.removeprefix("http://").split(":")
    client = http.client.HTTPConnection(host, int(port), timeout=10)
    yield client
    client.close()


def ask(
    client: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes]:
    client.request(method, path, body)
    answer = client.getresponse()
    return answer.status, answer.read()


def test_what_is_passed_on_is_unchanged_and_counted(
    server: Server, proxy: RequestProxy, client: http.client.HTTPConnection
) -> None:
    assert ask(client, "PUT", "/a", BODY) == (200, b"")
    assert ask(client, "GET", "/a") == (200, BODY)
    server.kept["/chunks"] = BODY
    assert ask(client, "GET", "/chunks") == (200, BODY)
    assert ask(client, "GET", "/none") == (404, b"")
    assert [(r.number, r.method, r.target, r.length, r.status) for r in proxy.requests] == [
        (0, "PUT", "/a", len(BODY), 200),
        (1, "GET", "/a", 0, 200),
        (2, "GET", "/chunks", 0, 200),
        (3, "GET", "/none", 0, 404),
    ]
    assert proxy.requests[1].answered == len(BODY)
    assert (proxy.count("GET"), proxy.count("PUT")) == (3, 1)


def test_a_status_is_answered_without_the_server_and_so_many_times(
    server: Server, proxy: RequestProxy, client: http.client.HTTPConnection
) -> None:
    proxy.fail(RequestFault(status=503, code="SlowDown"), times=2, method="PUT", target="a")
    assert ask(client, "PUT", "/b", b"1")[0] == 200
    for _ in range(2):
        status, body = ask(client, "PUT", "/a", BODY)
        assert status == 503
        assert b"<Code>SlowDown</Code>" in body
    assert "/a" not in server.kept
    assert ask(client, "PUT", "/a", BODY)[0] == 200


@pytest.mark.parametrize(
    ("cut", "is_done"), [*zip(ConnectionCut, (False, False, True, True), strict=True)]
)
def test_a_cut_is_before_within_or_after_what_the_server_does(
    server: Server,
    proxy: RequestProxy,
    client: http.client.HTTPConnection,
    cut: ConnectionCut,
    is_done: bool,
) -> None:
    proxy.fail(RequestFault(cut=cut))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask(client, "PUT", "/a", BODY)
    client.close()
    assert ("/a" in server.kept) == is_done
    assert proxy.requests[0].status is None
    assert ask(client, "PUT", "/a", b"again")[0] == 200
    assert ask(client, "GET", "/a") == (200, b"again")


def test_half_of_an_answer_arrives(
    server: Server, proxy: RequestProxy, client: http.client.HTTPConnection
) -> None:
    server.kept["/a"] = BODY
    proxy.fail(RequestFault(cut=ConnectionCut.ANSWER))
    client.request("GET", "/a")
    answer = client.getresponse()
    with pytest.raises((ConnectionError, http.client.IncompleteRead)):
        answer.read()


def test_a_late_request_is_done_though_nobody_waits_for_it(
    server: Server, proxy: RequestProxy, client: http.client.HTTPConnection
) -> None:
    proxy.fail(RequestFault(delay_s=0.2))
    client.request("PUT", "/a", BODY)
    client.close()
    until = time.monotonic() + 10
    while "/a" not in server.kept and time.monotonic() < until:
        time.sleep(0.01)
    assert server.kept["/a"] == BODY


def test_a_slow_body_takes_its_time(
    proxy: RequestProxy, client: http.client.HTTPConnection
) -> None:
    proxy.fail(RequestFault(bytes_s=len(BODY) * 5))
    begun = time.monotonic()
    assert ask(client, "PUT", "/a", BODY)[0] == 200
    assert time.monotonic() - begun >= 0.2
