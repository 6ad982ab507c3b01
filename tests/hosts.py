"""Storage hosts for tests: in this process, and ``portus serve`` in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from portus.reach.daemon.counters import Counters
from portus.reach.daemon.leader import OtherHost
from portus.reach.daemon.mirrors import TenantMirrors
from portus.reach.daemon.places import CONNECTIONS, Places
from portus.reach.daemon.pools import Pools, Quotas
from portus.reach.daemon.secrets import Secrets
from portus.reach.daemon.server import Server, open_listener
from portus.reach.daemon.shared_state import MEMORY, ClientTimeouts, House
from portus.reach.protocol.address import Address, Scheme, parse
from portus.reach.transport.budget import Budget

START_S_MAX = 120.0
ROOT = Path(__file__).resolve().parents[1]


_SIDE_BY_SIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PORTS = itertools.count(
    os.getpid() // _SIDE_BY_SIDE * _SIDE_BY_SIDE * 64
    + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")),
    _SIDE_BY_SIDE,
)
"""Processes of one run never count the same, so none takes the port of another's host that is to
start again."""


def free_port() -> int:
    """A port for a server that is about to start, or starts again: not one of those that the
    system gives to connections meanwhile, nor to another process of the tests."""
    for number in _PORTS:
        port = 10_000 + number % 20_000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no end")


def connect_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process do not pause between two tries to reach a host."""
    monkeypatch.setattr("portus.reach.transport.host._PAUSE_MIN_S", 0.001)
    monkeypatch.setattr("portus.reach.transport.host._PAUSE_MAX_S", 0.001)


@contextlib.contextmanager
def serving(
    place: str | Path,
    *,
    secrets: dict[str, bytes] | None = None,
    quota: int | None = None,
    patience: ClientTimeouts | None = None,
    address: Address | None = None,
    memory: int = MEMORY,
    connections: int = CONNECTIONS,
    mirrors: TenantMirrors | None = None,
    replica: str | None = None,
) -> Iterator[Server]:
    """Run a server in this process, on a free port of loopback if no address is given.

    mirrors: the mirrors of its pools, which also fill them at the start.
    replica: the address of the host that it copies to.
    """
    known = Secrets(None if secrets is None else {each: (secrets[each],) for each in secrets})
    other = None if replica is None else OtherHost(parse(replica), known)
    house = House(
        pools=Pools(str(place), Quotas(quota), mirrors, other),
        secrets=known,
        counters=Counters(),
        patience=patience or ClientTimeouts(),
        budget=Budget(memory),
        places=Places(connections),
    )
    listener = open_listener(address or Address(Scheme.TCP, host="127.0.0.1", port=0), None)
    try:
        if mirrors is not None or other is not None:
            house.pools.open_all()
        server = Server([listener], house)
    except BaseException:
        listener.socket.close()
        house.pools.close()
        raise
    server.start()
    try:
        yield server
    finally:
        assert server.stop(), "a connection did not end"


def url(server: Server, tenant: str = "") -> str:
    """Return the URL of the first listener of ``server``."""
    found = server.listeners[0].public_address
    return found.replace("://", f"://{tenant}@", 1) if tenant else found


class Host:
    """``portus serve`` as users run it. It may be killed and started again, at the same port, which
    stays its own meanwhile."""

    def __init__(self, place: str | Path, *options: str, under: Sequence[str] = ()) -> None:
        """under: the command that runs it, with less than all rights, say."""
        self.place = str(place)
        self._options = options
        self._under = under
        self.port = free_port()
        self.log = ""
        self.start()

    @property
    def url(self) -> str:
        return f"portus://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [*self._under, sys.executable, "-m", "portus.cli.main", "serve", self.place]
        # A file, not a pipe: nobody reads while the host runs, and a pipe that is full stops it.
        reading, path = tempfile.mkstemp(prefix="portus-host-")
        writing = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.unlink(path)
        self._errors = os.fdopen(reading)
        self.process = subprocess.Popen(
            [*command, "--listen", f"127.0.0.1:{self.port}", *self._options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=writing,
        )
        os.close(writing)
        assert f"://127.0.0.1:{self.port}" in self.until("serving")

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.ended()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.resume()
            self.kill()
        self._errors.close()

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(timeout=START_S_MAX)
        self.log += self._errors.read()
        self._errors.close()
        return code

    def until(self, word: str) -> str:
        """What it said up to the end of a line, once ``word`` is in it."""
        until, text = time.monotonic() + START_S_MAX, ""
        while word not in text or not text.endswith("\n"):
            assert time.monotonic() < until, f"the host did not start: {text}"
            ended = self.process.poll() is not None
            text += self._errors.read()
            assert word in text or not ended, f"the host ended: {text}"
            time.sleep(0.005)
        self.log += text
        return text
