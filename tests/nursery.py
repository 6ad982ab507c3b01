"""A warm process that forks children for tests: torch is imported once, a child costs milliseconds.

The test and the nursery talk over a socket. Each child reports lines through a pipe of its own. The
nursery has one thread, so a child starts like a fresh program that has finished its imports.

If a child hangs, the test fails with the stacks of all threads of all children of the nursery: the
child that waits is seldom the one to blame.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
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
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
"""Writes one line; it has left the process when this returns."""

ANSWER_S_MAX = 60.0
"""Seconds after which a child that neither says anything nor ends counts as hanging."""

_TOLD_S_MAX = 10.0
"""Seconds that a process may take to write the stacks of its threads."""

_HERE = os.getcwd()
"""The working directory of nurseries: a test may have changed its own."""

_PR_SET_PDEATHSIG = 1


class Nursery:
    """A process that imported ``module``, called its ``warm_up``, and forks children that run its
    functions."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._module = module
        self.children: weakref.WeakSet[Child] = weakref.WeakSet()
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nursery", module, str(theirs.fileno())],
            cwd=_HERE,
            # One thread, since a fork copies none but its caller.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def start(self, function: str, *arguments: object) -> Child:
        """Start a child that runs ``function(say, *arguments)``; the arguments go through JSON. A
        function of another module than the nursery's is called ``module:function``.

        The child ends at once when the function returns, and as programs do on ``SystemExit``.
        """
        read, write = os.pipe()
        stacks = os.memfd_create("stacks")
        pid = self.ask({"start": function, "arguments": arguments}, write, stacks)
        os.close(write)
        child = Child(self, pid, read, stacks)
        self.children.add(child)
        return child

    def ask(self, request: dict[str, object], *descriptors: int) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
        answer = self._socket.recv(100)
        assert answer, f"the nursery of {self._module} is gone"
        return int(answer)

    def hang_error(self, what: str) -> AssertionError:
        """End all children and theirs, and return an error that begins with ``what`` and says what
        each of them did."""
        children = sorted(self.children, key=lambda child: child.pid)
        for each in children:  # so that none sees another one end
            each.stop()
        return AssertionError("\n\n".join([what, *(each.abort() for each in children)]))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def nursery(module: str, **environment: str) -> Nursery:
    """Return the nursery of this test run for ``module``, with these variables in addition."""
    found = Nursery(module, environment)
    atexit.register(found.close)
    return found


class Child:
    """One child. The end of its ``with`` kills it and waits for it."""

    def __init__(self, nursery: Nursery, pid: int, descriptor: int, stacks: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._descriptor = descriptor
        self._stacks = stacks
        self._end = os.pidfd_open(pid)
        self._buffer = b""
        self._has_closed = False
        self._code: int | None = None

    def line(self, timeout_s: float = ANSWER_S_MAX) -> str:
        """Return the next line that the child says. Raise ``AssertionError`` if it ended, or says
        nothing for ``timeout_s``. If that is ``ANSWER_S_MAX`` or more, the child hangs, and all
        children of the nursery are ended."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            assert not self._has_closed, f"child {self.pid} ended with {self.wait()}"
            if not self._hears([self._descriptor], until - time.monotonic()):
                silent = f"child {self.pid} said nothing for {timeout_s:g} s"
                is_short = timeout_s < ANSWER_S_MAX
                raise AssertionError(silent) if is_short else self._nursery.hang_error(silent)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def until(self, start: str) -> str:
        """Return the next line that begins with ``start``, and skip those before it."""
        while not (line := self.line()).startswith(start):
            pass
        return line

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> list[str]:
        """Send SIGKILL, wait for the end, and return the lines that were not read yet."""
        if self._code is None:
            self.send(signal.SIGKILL)
            self.wait()
        return self.rest()

    def wait(self, silence_s: float = ANSWER_S_MAX) -> int:
        """Wait for the end; return the exit code, or minus the signal that ended the child. A child
        that says nothing for ``silence_s``, and does not end, hangs: then all children of its
        nursery are ended, and an ``AssertionError`` says what they did."""
        while not self._has_ended():
            watched = [self._end] if self._has_closed else [self._end, self._descriptor]
            if not self._hears(watched, silence_s):
                raise self._nursery.hang_error(
                    f"child {self.pid} said nothing for {silence_s:g} s, and goes on"
                )
        if self._code is None:
            self._code = self._nursery.ask({"wait": self.pid})
        return self._code

    def rest(self) -> list[str]:
        """Wait for the end, and return the lines that were not read yet. The child's own children
        may still hold the pipe."""
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
        self._nursery.children.discard(self)
        for each in (self._descriptor, self._stacks, self._end):
            os.close(each)

    def stop(self) -> None:
        """Stop the child and its descendants."""
        for each in () if self._has_ended() else _tree(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)

    def abort(self) -> str:
        """End the child and its descendants, and return the Python stacks of their threads."""
        if self._has_ended():
            return f"child {self.pid} ended with {self.wait()}\n"
        for each in _tree(self.pid):
            os.write(self._stacks, f"\nprocess {each}\n".encode())
            with contextlib.suppress(ProcessLookupError):
                end = os.pidfd_open(each)
                os.kill(each, signal.SIGABRT)
                os.kill(each, signal.SIGCONT)
                select.select([end], [], [], _TOLD_S_MAX)
                os.close(end)
        size = os.lseek(self._stacks, 0, os.SEEK_END)
        stacks = os.pread(self._stacks, size, 0).decode(errors="replace")
        return f"child {self.pid}\n{stacks}"

    def _has_ended(self) -> bool:
        return self._code is not None or bool(select.select([self._end], [], [], 0)[0])

    def _hears(self, descriptors: list[int], within_s: float) -> bool:
        """Wait for one of ``descriptors``, and read what the child says. Return False if nothing
        came."""
        ready, _, _ = select.select(descriptors, [], [], max(0.0, within_s))
        if self._descriptor in ready:
            data = os.read(self._descriptor, 65536)
            self._has_closed = not data
            self._buffer += data
        return bool(ready)


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants, except those whose parents have ended."""
    found = [pid]
    for parent in found:  # grows meanwhile
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, path.read_text().split())
    return found


# What runs in the nursery.


def _serve(module: str, number: int) -> None:
    functions = importlib.import_module(module)
    functions.warm_up()
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # else each child's first optimizer does, for 2 s
    connection = socket.socket(fileno=number)
    gc.collect()
    # Children share these pages; a collection would touch, and so copy, them.
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 65536, 2)
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
                owner, _, name = request["start"].rpartition(":")
                function = getattr(importlib.import_module(owner or module), name)
                _run(function, request["arguments"], *descriptors)
            for each in descriptors:
                os.close(each)
        connection.send(str(answer).encode())


def _run(function: Callable[..., None], arguments: list[Any], descriptor: int, stacks: int) -> None:
    """Run ``function`` in the child. Never returns, but may raise ``SystemExit``."""
    import resource  # other systems lack it, and import this module

    # A child must not outlive the nursery.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The SIGABRT of ``Child.abort`` would leave a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(stacks)  # ``Child.abort`` sends SIGABRT
    os.dup2(descriptor, 1)
    os.close(descriptor)
    try:
        function(lambda text: os.write(1, text.encode() + b"\n"), *arguments)
    except Exception:  # a process's top: reported on stderr, and by the exit code
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
