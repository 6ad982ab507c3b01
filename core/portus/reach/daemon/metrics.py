"""The counts of a host as Prometheus reads them: the one module that knows prometheus_client."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from portus.reach.daemon.counters import BOUNDS_S, COUNTED, TIMED
from portus.reach.daemon.pools import HostedPool, free_bytes, room_bytes
from portus.reach.daemon.server import Server, listening

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_SILENCE_S: Final = 10
"""Seconds that a reader may stay silent in the middle of a request."""

Family = type[CounterMetricFamily | GaugeMetricFamily]

Numbers = Mapping[str, tuple[str, Callable[[HostedPool], float]]]
"""The help of each number, and the function that returns it for a pool."""

_GAUGES: Final[Numbers] = {
    "pool_bytes": ("size of the pool", lambda each: each.writer.medium.size),
    "free_bytes": ("free in the pool, without growth", free_bytes),
    "room_bytes": ("free in the pool, and what it may still grow by", room_bytes),
    "versions": ("versions in the pool", lambda each: len(each.writer.catalogue().ids())),
    "saves_in_flight": ("saves under way", lambda each: each.saves),
}

_TOTALS: Final[Numbers] = {
    "commits": (
        "commits of the pool since it was made; several saves may share one",
        lambda each: each.writer.catalogue().root.sequence - 1,
    ),
    "persist_seconds": (
        "time that commits spent in persists",
        lambda each: each.writer.persist_s,
    ),
}


class HostCollector(Collector):
    """Collects all numbers of a host at the time of each request."""

    def __init__(self, server: Server) -> None:
        self._server: Final = server
        self._house: Final = server.house

    def collect(self) -> Iterator[Metric]:
        counted = self._house.counters.now()
        for name, count in counted.counts.items():
            yield CounterMetricFamily(f"portus_{name}", COUNTED[name], value=count)
        text = "requests that were refused, by fault"
        yield _by_label(CounterMetricFamily, "failures", text, counted.failures, "fault")
        text = "damaged places that the last scrub found"
        yield _by_label(GaugeMetricFamily, "rot", text, counted.rot)
        text = "1: the pool accepts no more writes, after an error of its medium"
        poisoned = self._house.pools.poisoned_pools()
        yield _by_label(GaugeMetricFamily, "poisoned", text, poisoned)
        bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
        for name, buckets in counted.buckets.items():
            yield HistogramMetricFamily(
                f"portus_{name}_duration_seconds",
                TIMED[name],
                buckets=list(zip(bounds, accumulate(buckets), strict=True)),
                sum_value=counted.seconds[name],
            )
        hosted = self._house.pools.all()
        copied = {each.tenant: each.copier for each in hosted if each.copier is not None}
        if copied:
            lag = {tenant: copier.lag_s for tenant, copier in copied.items()}
            text = "seconds since the first version was saved that its mirror or replica lacks"
            yield _by_label(GaugeMetricFamily, "mirror_lag_seconds", text, lag)
            missing = {tenant: len(copier.missing()) for tenant, copier in copied.items()}
            text = "versions not in the mirror or replica"
            yield _by_label(GaugeMetricFamily, "mirror_missing", text, missing)
        for kind, numbers in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _TOTALS)):
            for name, (text, value) in numbers.items():
                yield _by_label(kind, name, text, {each.tenant: value(each) for each in hosted})
        yield GaugeMetricFamily(
            "portus_connections_open", "connections there are", value=self._server.connections()
        )


def _by_label(
    kind: Family, name: str, text: str, values: Mapping[str, float], label: str = "tenant"
) -> Metric:
    """Return a metric with a number for each value of its label."""
    family = kind(f"portus_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def application(server: Server) -> WSGIApplication:
    """Return the application that answers ``/healthz``, and the numbers at any other path."""
    registry = CollectorRegistry()
    registry.register(HostCollector(server))
    numbers: WSGIApplication = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/healthz":
            return numbers(environ, start)
        ill = [tenant for tenant, is_ill in server.house.pools.poisoned_pools().items() if is_ill]
        lines = [f"{tenant}: accepts no more writes\n" for tenant in ill] or ["ok\n"]
        status = "503 Service Unavailable" if ill else "200 OK"
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return ["".join(lines).encode()]

    return answer


def publish(server: Server, port: int, host: str) -> None:
    """Serve the numbers of ``server`` at ``http://host:port/metrics``, on a thread of its own.
    ``/healthz`` answers 200 if all pools accept writes, else 503.

    Raises ``MediumError`` if nothing can listen there.
    """
    pages = _Pages6 if ":" in host else _Pages
    with listening(f"{host}:{port}"):
        page = make_server(host, port, application(server), pages, _QuietHandler)
    threading.Thread(target=page.serve_forever, name="portus-metrics", daemon=True).start()


class _Pages(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a reader who hung up
            raise


class _Pages6(_Pages):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: requests for metrics are not news."""
