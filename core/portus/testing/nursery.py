"""A warm process that forks children for tests: torch is imported once, a child costs milliseconds.

The test and the nursery talk over a socket; what a child says comes through a pipe of its own. The
nursery has one thread, so a child starts like a fresh program that has its imports behind it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Say = Callable[[str], None]
"""Writes one line; it has left the process when this returns."""

ANSWER_S_MAX = 60.0
_HERE = os.getcwd()
"""A test may be elsewhere by the time a nursery is asked for."""

_PR_SET_PDEATHSIG = 1


class Nursery:
    """Forks children that run functions of ``module``, after that was imported and its ``warm_up``
    was called."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._module = module
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "portus.testing.nursery", module, str(theirs.fileno())],
            cwd=_HERE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def start(self, function: str, *arguments: object) -> Child:
        """A child that runs ``function(say, *arguments)``; the arguments go through JSON. One of
        another module than the nursery's is called ``module:function``.

        It ends at once when the function returns, and as programs do on ``SystemExit``.
        """
        read, write = os.pipe()
        pid = self.ask({"start": function, "arguments": arguments}, write)
        os.close(write)
        return Child(self, pid, read)

    def ask(self, request: dict[str, object], *descriptors: int) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
        answer = self._socket.recv(100)
        assert answer, f"the nursery of {self._module} is gone"
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def nursery(module: str, **environment: str) -> Nursery:
    """The one of this test run for ``module``, which has these variables besides."""
    found = Nursery(module, environment)
    atexit.register(found.close)
    return found


class Child:
    """One child. It is killed and waited for at the end of a ``with``."""

    def __init__(self, nursery: Nursery, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._descriptor = descriptor
        self._buffer = b""
        self._code: int | None = None

    def line(self, timeout_s: float = ANSWER_S_MAX) -> str:
        """The next line it says. ``AssertionError`` if it ended, or says nothing for so long."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._descriptor], [], [], until - time.monotonic())
            assert ready, f"child {self.pid} said nothing for {timeout_s:g} s"
            data = os.read(self._descriptor, 65536)
            assert data, f"child {self.pid} ended with {self.wait()}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def until(self, start: str) -> str:
        """The next line that starts so; those before are passed over."""
        while not (line := self.line()).startswith(start):
            pass
        return line

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> list[str]:
        """SIGKILL; what it had still said before."""
        if self._code is None:
            self.send(signal.SIGKILL)
            self.wait()
        return self.rest()

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        if self._code is None:
            self._code = self._nursery.ask({"wait": self.pid})
        return self._code

    def rest(self) -> list[str]:
        """All that it said before it ended; its own children may still hold the pipe."""
        self.wait()
        os.set_blocking(self._descriptor, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._descriptor, 65536):
                self._buffer += data
        lines = self._buffer.decode().splitlines()
        self._buffer = b""
        return lines

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._descriptor)


def pause_for_ever() -> None:
    """What a child of a child does."""
    while True:
        signal.pause()


# In the nursery.


def _serve(module: str, number: int) -> None:
    functions = importlib.import_module(module)
    functions.warm_up()
    connection = socket.socket(fileno=number)
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 65536, 1)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                function = _named(request["start"], module)
                _run(function, request["arguments"], *descriptors)
            os.close(descriptors[0])
        connection.send(str(answer).encode())


def _named(name: str, module: str) -> Callable[..., None]:
    owner, _, function = name.rpartition(":")
    found: Callable[..., None] = getattr(importlib.import_module(owner or module), function)
    return found


def _run(function: Callable[..., None], arguments: list[Any], descriptor: int) -> None:
    """In the child. Never returns, but may raise ``SystemExit``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(descriptor, 1)
    os.close(descriptor)
    try:
        function(lambda text: os.write(1, text.encode() + b"\n"), *arguments)
    except Exception:  # a process's top: told on stderr, and by the exit code
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
