"""What a host counts, and how Prometheus reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from portus.errors import MediumError

COUNTED: Final = {
    "connections": "connections that were let in",
    "refused": "connections that were not",
    "saves": "versions that were committed",
    "abandoned": "saves that ended without a version",
    "pulled_bytes": "bytes received into pools",
    "verbs_bytes": "bytes moved by verbs, into pools and out of them",
    "bounced_bytes": "bytes of these that went through a buffer",
    "shared_bytes": "bytes that versions share with earlier ones",
    "read_bytes": "bytes sent to readers",
    "pull_seconds": "time spent receiving, or moving by verbs, and hashing",
    "wire_seconds": "time with requests of verbs under way",
    "commit_seconds": "time spent in commits",
    "failures": "requests that failed here: medium, corruption",
}


class Counters:
    """Numbers that only grow, and one that says how many connections there are."""

    def __init__(self) -> None:
        self._guard: Final = threading.Lock()
        self._counts: Final[dict[str, float]] = dict.fromkeys(COUNTED, 0)

    def add(self, name: str, amount: float = 1) -> None:
        """Count."""
        with self._guard:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._counts[name]

    def items(self) -> Iterator[tuple[str, float]]:
        """Names and counts."""
        yield from list(self._counts.items())


def text_of(counters: Counters, gauges: dict[str, dict[str, float]]) -> str:
    """The counts in the text format of Prometheus. gauges: numbers by name and tenant."""
    lines = []
    for name, values in gauges.items():
        lines.append(f"# TYPE portus_{name} gauge")
        lines += [
            f'portus_{name}{{tenant="{each}"}} {value:.17g}' for each, value in values.items()
        ]
    for name, count in counters.items():
        lines.append(f"# HELP portus_{name}_total {COUNTED[name]}")
        lines.append(f"# TYPE portus_{name}_total counter")
        lines.append(f"portus_{name}_total {count:.17g}")
    return "\n".join(lines) + "\n"


def publish(text: Callable[[], str], port: int, host: str) -> ThreadingHTTPServer:
    """Serve what ``text`` gives at ``/metrics``, on a thread of its own."""

    class Page(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nobody needs to know."""

    try:
        server = ThreadingHTTPServer((host, port), Page)
    except OSError as error:
        raise MediumError(error.errno, f"{host}:{port}: cannot listen: {error.strerror}") from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="portus-metrics", daemon=True).start()
    return server
