"""``portus serve``: from options to a host that runs until it is told to end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import Final

from portus.errors import MediumError, PortusError, UsageError, mask
from portus.reach.daemon.admin import AdminSocket, admin_path
from portus.reach.daemon.counters import Counters
from portus.reach.daemon.events import tell
from portus.reach.daemon.fabric import Fabric
from portus.reach.daemon.leader import OtherHost
from portus.reach.daemon.mirrors import TenantMirrors
from portus.reach.daemon.options import HostFiles, ServeOptions, reload
from portus.reach.daemon.places import CONNECTIONS, Places
from portus.reach.daemon.pools import Pools, parse_rate, parse_size
from portus.reach.daemon.scrubber import Scrubber
from portus.reach.daemon.secrets import Secrets
from portus.reach.daemon.server import Listener, Server, is_here, open_listener, shut
from portus.reach.daemon.shared_state import MEMORY, ClientTimeouts, House
from portus.reach.mirror.address import parse as parse_store
from portus.reach.protocol.address import TENANT, Address, Scheme, Transport, is_address, parse
from portus.reach.transport.budget import Budget

MEMORY_MIN: Final = 16 << 20
"""The smallest memory, in bytes, that a host may be given for its clients: saves need as much."""

CONNECTIONS_MIN: Final = 8
"""The smallest limit of connections that a host may be given: enough for two trainers."""

_FILES: Final = 2048
"""Descriptors beside those of connections: two for each tenant."""

_M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
_M_ARENA_MAX: Final = -8
_BLOCK: Final = 256 << 10
_ARENAS: Final = 2

_ENDS: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_SIGNALS: Final = _ENDS | {signal.SIGHUP}


def serve(options: ServeOptions) -> bool:
    """Serve until SIGTERM or SIGINT; return False if the end was not clean.

    Raises, if the host cannot start: ``UsageError``, ``MediumError``, ``BusyError``,
    ``CorruptionError``.
    """
    rate = parse_rate(options.scrub) if options.scrub else None
    os.umask(0o077)  # only for this user: pools are 0600, directories 0700
    _give_back_what_is_freed()
    server = prepare(options)
    scrubber = None if rate is None else Scrubber(server.house.pools, server.house.counters, rate)
    signals = _signal_socket()
    admin, why_not = _admin_socket(options, server)
    server.start()
    for listener in server.listeners:
        address = listener.public_address
        tell(
            logging.INFO,
            "serving",
            f"serving {options.place} on {address}{why_not and f'; {why_not}'}",
            place=options.place,
            address=address,
            **({"no_admin": why_not} if why_not else {}),
        )
    notify("READY=1")
    if scrubber is not None:
        scrubber.start()
    while (number := signals.recv(1)[0]) not in _ENDS:
        if number == signal.SIGHUP:
            notify("RELOADING=1")
            with contextlib.suppress(PortusError):  # it is in the log
                reload(options, server)
            notify("READY=1")
    for number in _SIGNALS:
        # Python's own end would restore the default, and a second signal would end the process.
        signal.signal(number, signal.SIG_IGN)
    notify("STOPPING=1")
    tell(logging.INFO, "ending", "ending")
    if admin is not None:
        admin.stop()
    if scrubber is not None:
        scrubber.stop()
    return server.stop()


def _may_open(places: Places) -> None:
    """Raise the limit on open descriptors to what ``places`` needs, as far as the system allows."""
    import resource  # not there on every system that imports this

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = places.count + places.strangers_max + _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _give_back_what_is_freed() -> None:
    """Have glibc return big blocks to the system as soon as they are freed. Its default keeps them,
    for each arena: the host would hold what many clients once took at the same time."""
    with contextlib.suppress(AttributeError, OSError):  # another C library, without mallopt
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _BLOCK)
        library.mallopt(_M_ARENA_MAX, _ARENAS)


def _admin_socket(options: ServeOptions, server: Server) -> tuple[AdminSocket | None, str]:
    """Return the socket of the operator, or None and the reason. Without ``--admin`` the socket is
    optional."""
    try:
        path = options.admin_path or admin_path(server)
    except UsageError as error:
        return None, f"no socket for `portus admin`: {error}"
    try:
        admin = AdminSocket(path, server, options)
    except MediumError as error:
        if options.admin_path is not None:
            server.stop()
            raise
        tell(logging.WARNING, "log", f"cannot listen for the operator: {error.strerror}")
        return None, ""
    admin.start()
    return admin, ""


def _signal_socket() -> socket.socket:
    """Return a socket that receives the number of each signal from now on, a byte each.

    An event that a handler sets is not enough. Python runs handlers only in the main thread, and
    nothing wakes that thread if the system delivers the signal to another one, or just before the
    wait begins.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    return reading


def prepare(options: ServeOptions) -> Server:
    """Return a server that listens and has not started."""
    read = HostFiles.of(options)
    context = read.context
    memory = parse_size(options.memory) if options.memory else MEMORY
    if memory < MEMORY_MIN:
        raise UsageError(f"--memory {options.memory}: expected {MEMORY_MIN >> 20}M or more")
    if options.connections is not None and options.connections < CONNECTIONS_MIN:
        raise UsageError(f"--connections {options.connections}: expected {CONNECTIONS_MIN} or more")
    if options.mirror_keep < 0:
        raise UsageError(f"--mirror-keep {options.mirror_keep}: expected 0 or more")
    places = Places(options.connections or CONNECTIONS)
    _may_open(places)
    addresses = [
        parse_listen(text, tls=context is not None) for text in options.listen or ("127.0.0.1",)
    ]
    fabric = Fabric(Transport.of(options.transport, "--transport"))
    mirrors = None
    if options.mirror:
        mirrors = TenantMirrors(parse_store(options.mirror, "--mirror"), options.mirror_keep)
    other = (
        None
        if options.replica is None
        else _other(options, options.replica, addresses, read.secrets)
    )
    pools = Pools(options.place, read.quotas, mirrors, other, options.mirror_wait)
    house = House(
        pools=pools,
        secrets=read.secrets,
        counters=Counters(),
        patience=ClientTimeouts(),
        fabric=fabric,
        budget=Budget(memory),
        places=places,
    )
    listeners: list[Listener] = []
    try:
        # Before any client is let in: the mirror would lose versions that the pool lacks.
        if mirrors is not None or other is not None:
            pools.open_all()
        for address in addresses:
            tls = context if address.scheme is Scheme.TLS else None
            listeners.append(open_listener(address, tls))
        server = Server(listeners, house)
        if options.metrics:
            host, _, port = options.metrics.rpartition(":")
            from portus.reach.daemon.metrics import (
                publish,  # what it needs is installed for it alone
            )

            publish(server, _number(port, options.metrics), host.strip("[]") or "127.0.0.1")
    except BaseException:
        for listener in listeners:
            shut(listener)
        pools.close()
        raise
    return server


def _other(
    options: ServeOptions, text: str, addresses: Sequence[Address], secrets: Secrets
) -> OtherHost:
    """Return the host that takes over if this one is lost. Raise ``UsageError`` if it cannot."""
    if options.mirror:
        raise UsageError("--mirror and --replica: what is saved is copied to one of them")
    if not is_address(text):
        raise UsageError(
            f"--replica {mask(text, is_address=True)!r}: expected a storage host, portus://host:7117"
        )
    address = parse(text)
    other = OtherHost(address, secrets)
    ports = {each.port for each in addresses if each.scheme is not Scheme.UNIX}
    paths = {each.path for each in addresses if each.scheme is Scheme.UNIX}
    is_unix = address.scheme is Scheme.UNIX
    if address.path in paths if is_unix else address.port in ports and is_here(address.host):
        shown = mask(text, is_address=True)
        raise UsageError(f"--replica {shown}: this is the host itself; expected another one")
    for tenant in secrets.tenants() or [TENANT]:
        other.check(tenant)
    return other


def parse_listen(text: str, *, tls: bool) -> Address:
    """Return the address at which to listen: ``HOST[:PORT]``, ``unix:PATH``, or an address. Raise
    ``UsageError`` for any other text."""
    if is_address(text):
        return parse(text)
    if text.startswith("unix:"):
        return parse(f"{Scheme.UNIX.value}://{os.path.abspath(text[5:])}")
    if "@" in text or "%40" in text or "://" in text:
        raise UsageError(
            f"{mask(text, is_address=True)}: expected HOST[:PORT], unix:PATH or an address that "
            "begins with portus"
        )
    scheme = Scheme.TLS if tls else Scheme.TCP
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"  # IPv6, and nothing else
    if text.startswith(":"):
        text = f"0.0.0.0{text}"
    return parse(f"{scheme.value}://{text}")


def notify(state: str) -> None:
    """Report ``state`` to systemd, if it started this process (``Type=notify``)."""
    place = os.environ.get("NOTIFY_SOCKET")
    if not place:
        return
    if place.startswith("@"):  # systemd writes an abstract socket so
        place = "\0" + place[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        try:
            channel.connect(place)
            channel.sendall(state.encode())
        except OSError as error:
            tell(logging.WARNING, "systemd", f"cannot tell systemd: {error}", why=str(error))


def _number(port: str, text: str) -> int:
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"--metrics {mask(text, is_address=True)!r}: expected a port, or an address of this "
            "machine and a port"
        )
    return int(port)
