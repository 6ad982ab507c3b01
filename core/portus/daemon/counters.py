"""What a host counts, and how Prometheus reads it."""

from __future__ import annotations

import bisect
import itertools
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from portus.errors import MediumError
from portus.protocol.messages import Fault

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
    "hash_seconds": "time spent hashing what came through a socket, a part of pull_seconds",
    "wire_seconds": "time with requests of verbs under way",
    "commit_seconds": "time spent in commits, the wait for each other included",
}

TIMED: Final = {
    "save": "from the begin of a save to its commit",
    "pull": "from an offer of storages until they were received and hashed",
    "commit": "from a confirmation to the commit",
    "read": "from a request to read to its last byte sent",
}

BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets of a histogram, in seconds; above the last there is one more."""


class Counters:
    """Numbers that only grow, failures by fault, and histograms of how long things took."""

    def __init__(self) -> None:
        self._guard: Final = threading.Lock()
        self._counts: Final[dict[str, float]] = dict.fromkeys(COUNTED, 0)
        self._failures: Final = {fault.name.lower(): 0 for fault in Fault}
        self._buckets: Final = {name: [0] * (len(BOUNDS_S) + 1) for name in TIMED}
        self._seconds: Final = dict.fromkeys(TIMED, 0.0)

    def add(self, name: str, amount: float = 1) -> None:
        """Count."""
        with self._guard:
            self._counts[name] += amount

    def failed(self, fault: Fault) -> None:
        """Count a request that was refused."""
        with self._guard:
            self._failures[fault.name.lower()] += 1

    def took(self, name: str, seconds: float) -> None:
        """Count one more of what is in ``TIMED``."""
        with self._guard:
            self._buckets[name][bisect.bisect_left(BOUNDS_S, seconds)] += 1
            self._seconds[name] += seconds

    def __getitem__(self, name: str) -> float:
        return self._counts[name]

    def metrics(self) -> Iterator[Metric]:
        """All of them, as they are at one moment."""
        with self._guard:
            counts, failures = dict(self._counts), dict(self._failures)
            buckets = {name: list(each) for name, each in self._buckets.items()}
            seconds = dict(self._seconds)
        for name, count in counts.items():
            yield Metric(f"{name}_total", "counter", COUNTED[name], [Sample(count)])
        faults = [Sample(count, {"fault": fault}) for fault, count in failures.items()]
        yield Metric("failures_total", "counter", "requests that were refused, by fault", faults)
        for name, own in buckets.items():
            yield _histogram(name, own, seconds[name])


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of a metric. ``suffix``: of the name, where a metric has several series."""

    value: float
    labels: Mapping[str, str] | None = None
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """``name`` without the prefix; ``kind``: counter, gauge or histogram."""

    name: str
    kind: str
    help: str
    samples: Sequence[Sample]


def text_of(metrics: Iterable[Metric]) -> str:
    """Metrics in the text format of Prometheus."""
    lines = []
    for metric in metrics:
        name = f"portus_{metric.name}"
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        for sample in metric.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in (sample.labels or {}).items())
            where = f"{{{labels}}}" if labels else ""
            lines.append(f"{name}{sample.suffix}{where} {sample.value:.17g}")
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

    class Pages(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: object, client_address: object) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # a reader who hung up
                raise

    try:
        server = Pages((host, port), Page)
    except OSError as error:
        raise MediumError(error.errno, f"{host}:{port}: cannot listen: {error.strerror}") from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="portus-metrics", daemon=True).start()
    return server


def _histogram(name: str, buckets: Sequence[int], seconds: float) -> Metric:
    totals = list(itertools.accumulate(buckets))
    bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    samples = [
        Sample(total, {"le": bound}, "_bucket") for bound, total in zip(bounds, totals, strict=True)
    ]
    samples += [Sample(seconds, suffix="_sum"), Sample(totals[-1], suffix="_count")]
    return Metric(f"{name}_duration_seconds", "histogram", TIMED[name], samples)
