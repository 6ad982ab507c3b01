"""The sockets of a storage host, and a thread for each connection.

``stop`` ends the host: it lets no client in, closes every connection, and finishes the commits
under way. A save without confirmation leaves nothing, so there is nothing else to wait for.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from portus.errors import MediumError, UsageError
from portus.reach.daemon.events import tell
from portus.reach.daemon.session import GREETING_S, ServedConnection
from portus.reach.daemon.shared_state import ConnectionStatus, House, turn_away
from portus.reach.protocol.address import Address, Scheme
from portus.reach.transport.stream import Link

STOP_S: Final = 10.0
"""Seconds that a clean end takes at most."""

_BACKLOG: Final = 128
_SWEEP_S: Final = 1.0
"""Seconds between two looks at strangers, while no client connects."""


@dataclass(slots=True)
class Listener:
    """A listening socket. ``context``: for TLS, of new connections."""

    address: Address
    socket: socket.socket
    context: ssl.SSLContext | None = None

    @property
    def port(self) -> int:
        """The port that the system chose, where 0 was asked for; 0 for a unix socket."""
        if self.address.scheme is Scheme.UNIX:
            return 0
        port: int = self.socket.getsockname()[1]
        return port

    @property
    def public_address(self) -> str:
        """The address that clients use."""
        if self.address.scheme is Scheme.UNIX:
            return str(self.address)
        address = self.address
        return str(Address(address.scheme, address.tenant, address.host, self.port))


def is_private(address: Address) -> bool:
    """Return whether only this machine reaches an address: a unix socket, or loopback."""
    if address.scheme is Scheme.UNIX or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def is_here(host: str) -> bool:
    """Return whether a host name is an address of this machine: only there can a process listen."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as plain:
            plain.bind(address)
            return True
    return False


def open_listener(address: Address, context: ssl.SSLContext | None) -> Listener:
    """Listen at an address. Raise ``MediumError`` if the system refuses."""
    if address.scheme is Scheme.UNIX:
        return Listener(address, listen_unix(address.path, str(address)))
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    place = (address.host, address.port)
    with listening(str(address)):
        plain = socket.create_server(place, family=family, backlog=_BACKLOG)
    return Listener(address, plain, context)


@contextlib.contextmanager
def listening(where: str) -> Iterator[None]:
    """Raise ``MediumError`` if the system refuses to listen inside. where: for the error."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)  # Python has no errno for a path that is too long
        raise MediumError(error.errno or errno.EINVAL, f"{where}: cannot listen: {why}") from error


def tls_context(cert_path: str, key_path: str) -> ssl.SSLContext:
    """Return the TLS context of a certificate and its key. Raise ``UsageError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_path, key_path)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{cert_path}, {key_path}: {error}") from error
    return context


class Server:
    """Serves a house through its listeners, from ``start`` to ``stop``."""

    def __init__(self, listeners: list[Listener], house: House) -> None:
        """Raise ``UsageError`` if other machines reach a listener and no secret is required."""
        for listener in listeners:
            if not is_private(listener.address) and not house.secrets.is_required:
                raise UsageError(
                    f"{listener.address} can be reached from other machines: give a --secret-file "
                    f"(openssl rand -hex 32), or listen on 127.0.0.1 or a unix socket"
                )
        self.listeners: Final = listeners
        self.house: Final = house
        self._guard: Final = threading.Lock()
        self._served: Final[dict[ServedConnection, threading.Thread]] = {}
        self._acceptors: list[threading.Thread] = []
        self._ending: Final = threading.Event()

    def status(self) -> list[ConnectionStatus]:
        """Return the status of each connection."""
        with self._guard:
            return [served.status() for served in self._served]

    def kick(self, who: str) -> int:
        """End the connections of a tenant or a peer; return how many. They may come again."""
        with self._guard:
            served = list(self._served)
        found = [each.link for each in served if who in (each.status().tenant, each.link.name)]
        for link in found:
            link.close()
        return len(found)

    def start(self) -> None:
        """Let clients in."""
        for listener in self.listeners:
            # So that the thread wakes to end strangers that stayed too long.
            listener.socket.settimeout(_SWEEP_S)
            thread = threading.Thread(
                target=self._accept, args=(listener,), name="portus-listener", daemon=True
            )
            self._acceptors.append(thread)
            thread.start()

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """End all connections and close the pools. Return False if something hangs; then the pools
        stay as they are, which is no worse than a crash."""
        until_s = time.monotonic() + timeout_s
        with self._guard:
            # Under the guard: no connection may be added after the copy of ``_served``.
            self._ending.set()
            served = dict(self._served)
        for listener in self.listeners:
            shut(listener)
        for each in served:
            each.link.close()
        for thread in (*self._acceptors, *served.values()):
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in served.values()):
            tell(logging.ERROR, "hung", f"connections did not end within {timeout_s:g} s")
            return False
        # By now no session uses a queue pair or a pool.
        self.house.fabric.close()
        self.house.pools.close()
        self.house.strangers.end()
        return True

    def connections(self) -> int:
        """Return how many connections there are."""
        with self._guard:
            return len(self._served)

    def _accept(self, listener: Listener) -> None:
        while not self._ending.is_set():
            try:
                plain, peer = listener.socket.accept()
            except TimeoutError:
                self.house.places.sweep()
                continue
            except OSError as error:
                if not self._ending.wait(0.1):  # out of descriptors: others have to end first
                    why = str(error.strerror)
                    text = f"{listener.address}: accept: {why}"
                    told = self.house.strangers.tell
                    told(logging.WARNING, "accept", text, address=str(listener.address), why=why)
                continue
            self._welcome(listener, plain, peer)

    def _welcome(self, listener: Listener, plain: socket.socket, peer: object) -> None:
        name = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else listener.address.path
        try:
            connected = plain
            if listener.context is not None:
                # Its own thread does the handshake: a slow client must not hold up others.
                connected = listener.context.wrap_socket(
                    plain, server_side=True, do_handshake_on_connect=False
                )
            account = self.house.budget.account()
            link = Link(
                connected, is_client=False, name=name, silence_s=GREETING_S, account=account
            )
        except OSError as error:  # it is gone already
            turn_away(self.house, name, str(error))
            plain.close()
            return
        place = self.house.places.come(_peer_address(peer), connected)
        served = ServedConnection(link, place, self.house)

        def talk() -> None:
            try:
                served.run()
            finally:
                self._end(served)

        thread = threading.Thread(target=talk, name="portus-session", daemon=True)
        try:
            with self._guard:
                if self._ending.is_set():
                    raise RuntimeError("this host ends")
                thread.start()
                self._served[served] = thread
        except RuntimeError as error:  # or no more threads are allowed; other connections stay
            turn_away(self.house, name, str(error))
            self._end(served)

    def _end(self, served: ServedConnection) -> None:
        served.link.close()
        self.house.places.leave(served.place)
        with self._guard:
            self._served.pop(served, None)
        served.link.account.close()


def listen_unix(path: str, where: str) -> socket.socket:
    """Return a listening socket at ``path``, for its owner alone. A socket that a dead host left
    there is replaced, and nothing else is. Raise ``MediumError`` if the system refuses. where: for
    the error."""
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # From the bind on: with a chmod afterwards, others could connect for a moment.
    before = os.umask(0o177)
    try:
        with listening(where):
            if _is_dead_socket(path):
                os.unlink(path)
            plain.bind(path)
            plain.listen(_BACKLOG)
    except BaseException:
        plain.close()
        raise
    finally:
        os.umask(before)
    return plain


def _is_dead_socket(path: str) -> bool:
    """Return whether there is a socket at ``path`` at which nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False


def shut(listener: Listener) -> None:
    """Stop listening at one address."""
    with contextlib.suppress(OSError):
        listener.socket.shutdown(socket.SHUT_RDWR)  # wakes accept
    listener.socket.close()
    if listener.address.scheme is Scheme.UNIX:
        with contextlib.suppress(OSError):
            os.unlink(listener.address.path)


def _peer_address(peer: object) -> str:
    """Return the address under which a peer's slot is counted: an IPv4 address, or an IPv6 network;
    "" for a unix socket."""
    if not isinstance(peer, tuple):
        return ""
    found = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    # The owner of an IPv6 address has 2^64 of them, and would get as many places.
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
