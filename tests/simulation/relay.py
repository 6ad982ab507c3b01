"""What accepts connections on loopback, and passes on what comes: the base of links and proxies
that fail on purpose."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Self


class Relay(ABC):
    """Accepts connections for ``(host, port)``. Use it as a context manager.

    A subclass sets its own attributes before it calls ``__init__``, which starts to accept.
    """

    def __init__(self, host: str, port: int, name: str) -> None:
        """name: of the threads."""
        self._target: Final = (host, port)
        self._name: Final = name
        self._guard: Final = threading.Lock()
        self._ended: Final = threading.Event()
        self._open: Final[set[socket.socket]] = set()
        self._threads: Final[list[threading.Thread]] = []
        self._listening: Final = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)

    @property
    def port(self) -> int:
        """Where clients connect."""
        port: int = self._listening.getsockname()[1]
        return port

    def cut(self) -> None:
        """Reset every connection now."""
        with self._guard:
            ending = list(self._open)
            self._open.clear()
        for each in ending:
            reset(each)

    def close(self) -> None:
        """Reset all connections, and end. Blocks until all threads have ended."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _serve(self, client: socket.socket) -> None:
        """Serve a client that has connected, in a thread of its own."""

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()


def reset(connection: socket.socket) -> None:
    """End it at once, for both sides: what is under way is lost."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()
