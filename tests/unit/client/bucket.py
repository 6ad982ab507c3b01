"""A bucket on loopback that speaks as much of S3 as a mirror asks for, and may refuse writes."""

from __future__ import annotations

import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final

import pytest

_LISTED: Final = (
    "<Contents><Key>{}</Key><Size>{}</Size><ETag>x</ETag>"
    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
)


class SmallBucket:
    """Use it as a context manager. Its pages have no end.

    is_read_only: PUT and POST are answered with 403 AccessDenied; may be set at any time. objects:
    by name, below the bucket. asked: the methods of all requests, a list as ``LIST``.
    """

    def __init__(self) -> None:
        self.is_read_only = False
        self.objects: Final[dict[str, bytes]] = {}
        self.asked: Final[list[str]] = []
        self._guard: Final = threading.Lock()
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                bucket._get(self)

            def do_PUT(self) -> None:
                bucket._put(self)

            def do_POST(self) -> None:
                bucket._put(self)

            def log_message(self, *_: object) -> None: ...

        self._server: Final = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread: Final = threading.Thread(target=self._server.serve_forever)

    def lead(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """The URL of a mirror there; the environment leads to it from now on."""
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}",
        }.items():
            monkeypatch.setenv(name, value)
        return "s3://bucket/runs"

    def count(self, method: str) -> int:
        """How many requests of that kind came."""
        with self._guard:
            return self.asked.count(method)

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        path, _, query = handler.path.partition("?")
        said = urllib.parse.parse_qs(query)
        name = urllib.parse.unquote(path).removeprefix("/bucket").lstrip("/")
        with self._guard:
            self.asked.append("LIST" if "list-type" in said else "GET")
            found = self.objects.get(name)
            listed = sorted(self.objects.items())
        if "list-type" in said:
            prefix, after = said.get("prefix", [""])[0], said.get("start-after", [""])[0]
            lines = [
                _LISTED.format(each, len(data))
                for each, data in listed
                if each.startswith(prefix) and each > after
            ]
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(lines)}"
            _answer(handler, 200, f"{text}</ListBucketResult>".encode())
        elif found is None:
            _answer(handler, 404, _error("NoSuchKey"))
        elif (part := handler.headers["range"]) is not None:
            first, last = map(int, part.removeprefix("bytes=").split("-"))
            span = f"bytes {first}-{last}/{len(found)}"
            _answer(handler, 206, found[first : last + 1], {"Content-Range": span})
        else:
            _answer(handler, 200, found)

    def _put(self, handler: BaseHTTPRequestHandler) -> None:
        data = handler.rfile.read(int(handler.headers["content-length"] or 0))
        name = urllib.parse.unquote(handler.path.partition("?")[0]).removeprefix("/bucket/")
        with self._guard:
            self.asked.append("PUT")
            is_there = handler.headers["if-none-match"] == "*" and name in self.objects
            if not self.is_read_only and not is_there:
                self.objects[name] = data
        if self.is_read_only:
            _answer(handler, 403, _error("AccessDenied"))
        elif is_there:
            _answer(handler, 412, _error("PreconditionFailed"))
        else:
            _answer(handler, 200, b"")

    def __enter__(self) -> SmallBucket:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _answer(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, more: dict[str, Any] | None = None
) -> None:
    handler.send_response(status)
    headers = {
        "ETag": '"x"',
        "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        "Content-Length": str(len(body)),
        **(more or {}),
    }
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
