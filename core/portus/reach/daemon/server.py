"""The sockets of a storage host, and a thread for each connection.

``stop`` ends it: nobody is let in any more, every connection is closed, and commits that are under
way are finished. A save that was not confirmed leaves nothing, so there is nothing to wait for.
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
from dataclasses import dataclass
from typing import Final

from portus.errors import BusyError, MediumError, UsageError
from portus.reach.daemon.events import tell
from portus.reach.daemon.house import Facts, House, turn_away
from portus.reach.daemon.places import ConnectionSlot
from portus.reach.daemon.pools import HostedPool
from portus.reach.daemon.session import GREETING_S, ServedConnection
from portus.reach.protocol.address import Address, Scheme
from portus.reach.transport.stream import Link

STOP_S: Final = 10.0
"""The longest that a clean end takes."""

_BACKLOG: Final = 128
_SWEEP_S: Final = 1.0
"""Between two looks at strangers, while nobody comes."""


@dataclass(slots=True)
class Listener:
    """A listening socket. ``context``: for TLS, of those who come from now on."""

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
        """The address that clients name."""
        if self.address.scheme is Scheme.UNIX:
            return str(self.address)
        address = self.address
        return str(Address(address.scheme, address.tenant, address.host, self.port))


def is_private(address: Address) -> bool:
    """True if only this machine reaches it: a unix socket, or loopback by number or name."""
    if address.scheme is Scheme.UNIX or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def open_listener(address: Address, context: ssl.SSLContext | None) -> Listener:
    """Listen. Raises ``MediumError`` if the system refuses."""
    try:
        if address.scheme is Scheme.UNIX:
            return Listener(address, listen_unix(address.path))
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        place = (address.host, address.port)
        listening = socket.create_server(place, family=family, backlog=_BACKLOG)
        return Listener(address, listening, context)
    except OSError as error:
        why = error.strerror or str(error)  # of a path that is too long Python has no number
        raise MediumError(
            error.errno or errno.EINVAL, f"{address}: cannot listen: {why}"
        ) from error


def tls_context(cert_path: str, key_path: str) -> ssl.SSLContext:
    """What TLS needs. Raises ``UsageError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_path, key_path)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{cert_path}, {key_path}: {error}") from error
    return context


class Server:
    """Serves a house through its listeners, from ``start`` to ``stop``."""

    def __init__(self, listeners: list[Listener], house: House) -> None:
        """Raises ``UsageError`` if a listener that others reach has no secret behind it."""
        for listener in listeners:
            if not is_private(listener.address) and not house.secrets.is_required:
                raise UsageError(
                    f"{listener.address} can be reached from other machines: give a --secret-file "
                    f"(openssl rand -hex 32), or listen on 127.0.0.1 or a unix socket"
                )
        self.listeners: Final = listeners
        self._house: Final = house
        self._guard: Final = threading.Lock()
        self._links: Final[dict[threading.Thread, Link]] = {}
        self._sessions: Final[dict[threading.Thread, ServedConnection]] = {}
        self._acceptors: list[threading.Thread] = []
        self._ending: Final = threading.Event()

    @property
    def house(self) -> House:
        """Return what is served."""
        return self._house

    def facts(self) -> list[Facts]:
        """Return the facts of every connection that is served."""
        with self._guard:
            return [session.facts() for session in self._sessions.values()]

    def kick(self, who: str) -> int:
        """End the connections of ``who``, a tenant or a peer; how many. They may come again."""
        with self._guard:
            facts = [(each, said.facts()) for each, said in self._sessions.items()]
            links = [self._links[each] for each, of in facts if who in (of.tenant, of.peer)]
        for link in links:
            link.close()
        return len(links)

    def end_use(self, hosted: HostedPool) -> None:
        """End all connections that use a pool, and wait until they have. Raises ``BusyError`` if
        one hangs, or if a device has pages of the pool pinned."""
        until_s = time.monotonic() + STOP_S
        with self._guard:
            threads = [each for each, said in self._sessions.items() if said.hosted is hosted]
            for thread in threads:
                self._links[thread].close()
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise BusyError(
                errno.EAGAIN, f"tenant {hosted.tenant!r}: a connection hangs; try again"
            )
        if self._house.fabric.has_pinned(hosted):
            raise BusyError(
                errno.EAGAIN,
                f"tenant {hosted.tenant!r}: a device of RDMA has pages of the pool pinned; start "
                "this host again instead",
            )

    def start(self) -> None:
        """Let clients in."""
        for listener in self.listeners:
            listener.socket.settimeout(_SWEEP_S)
            thread = threading.Thread(
                target=self._accept, args=(listener,), name="portus-listener", daemon=True
            )
            self._acceptors.append(thread)
            thread.start()

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """End all connections and let go of the pools. False if something hung; then the pools
        stay as they are, which is no worse than a crash."""
        until_s = time.monotonic() + timeout_s
        with self._guard:
            self._ending.set()
            threads = dict(self._links)
        for listener in self.listeners:
            shut(listener)
        for link in threads.values():
            link.close()
        for thread in (*self._acceptors, *threads):
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            tell(logging.ERROR, "hung", f"connections did not end within {timeout_s:g} s")
            return False
        # By now no session uses a queue pair or a pool.
        self._house.fabric.close()
        self._house.pools.close()
        self._house.strangers.end()
        return True

    def connections(self) -> int:
        """How many there are."""
        with self._guard:
            return len(self._links)

    def _accept(self, listener: Listener) -> None:
        while not self._ending.is_set():
            try:
                plain, peer = listener.socket.accept()
            except TimeoutError:
                self._house.places.sweep()
                continue
            except OSError as error:
                if not self._ending.wait(0.1):  # out of descriptors: others have to end first
                    why = str(error.strerror)
                    text = f"{listener.address}: accept: {why}"
                    told = self._house.strangers.tell
                    told(logging.WARNING, "accept", text, address=str(listener.address), why=why)
                continue
            place = self._house.places.come(_peer_address(peer), plain)
            self._welcome(listener, plain, _peer_name(listener, peer), place)

    def _welcome(
        self, listener: Listener, plain: socket.socket, peer: str, place: ConnectionSlot
    ) -> None:
        with self._guard:
            if self._ending.is_set():
                self._turn_away(plain, peer, "this host ends")
                return
            thread = threading.Thread(
                target=self._talk,
                args=(listener, plain, peer, place),
                name="portus-session",
                daemon=True,
            )
            link = self._link(plain, peer)
            self._links[thread] = link
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more; whoever is in stays
            with self._guard:
                del self._links[thread]
            self._house.places.leave(place)
            self._turn_away(plain, peer, str(error))

    def _turn_away(self, plain: socket.socket, peer: str, why: str) -> None:
        turn_away(self._house, peer, why)
        plain.close()

    def _talk(
        self, listener: Listener, plain: socket.socket, peer: str, place: ConnectionSlot
    ) -> None:
        thread = threading.current_thread()
        try:
            link = self._links[thread]
            if listener.context is not None:
                link = self._secure(listener.context, plain, peer, thread, place)
            session = ServedConnection(link, self._house, peer, place)
            with self._guard:
                self._sessions[thread] = session
            session.run()
        except OSError as error:  # TLS that did not come about
            turn_away(self._house, peer, place.why or str(error))
        finally:
            self._house.places.leave(place)
            with self._guard:
                self._sessions.pop(thread, None)
                link = self._links.pop(thread)
                link.close()
            if link.account is not None:
                link.account.close()

    def _link(self, connected: socket.socket, peer: str) -> Link:
        account = self._house.budget.account()
        return Link(connected, is_client=False, name=peer, silence_s=GREETING_S, account=account)

    def _secure(
        self,
        context: ssl.SSLContext,
        plain: socket.socket,
        peer: str,
        thread: threading.Thread,
        place: ConnectionSlot,
    ) -> Link:
        plain.settimeout(GREETING_S)
        wrapped = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        # Before the handshake, so that its place ends a stranger that hangs in it.
        place.replace_socket(wrapped)
        try:
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        link = self._link(wrapped, peer)
        with self._guard:
            self._links[thread] = link
            if self._ending.is_set():
                link.close()
        return link


def listen_unix(path: str) -> socket.socket:
    """A socket at ``path`` for its owner alone. One that a dead host left is replaced; nothing else
    is."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # From the bind on: with a chmod afterwards, others could connect for a moment.
    before = os.umask(0o177)
    try:
        if _is_socket(path) and not _answers(path):
            os.unlink(path)
        listening.bind(path)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True


def shut(listener: Listener) -> None:
    """Stop listening at one address."""
    with contextlib.suppress(OSError):
        listener.socket.shutdown(socket.SHUT_RDWR)  # wakes accept
    listener.socket.close()
    if listener.address.scheme is Scheme.UNIX:
        with contextlib.suppress(OSError):
            os.unlink(listener.address.path)


def _peer_address(peer: object) -> str:
    """Return the address that a peer's place counts for: an IPv4 address, or an IPv6 network; ""
    for a unix socket."""
    if not isinstance(peer, tuple):
        return ""
    found = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    # Whoever has an IPv6 address has 2^64 of them, and would get as many places.
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


def _peer_name(listener: Listener, peer: object) -> str:
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"{peer[0]}:{peer[1]}"
    return f"{listener.address.path}"
