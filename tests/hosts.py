"""Storage hosts for tests: ``portus serve`` in a process of its own; a server in this one is in
``portus.testing.hosting``."""

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
from collections.abc import Sequence
from pathlib import Path

import pytest

from portus.testing.hosting import serving as serving
from portus.testing.hosting import url as url

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
