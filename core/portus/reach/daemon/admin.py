"""The operator's way into a running host: a unix socket, for its owner and root alone.

The request and the answer are one line of JSON each. The socket is in the run directory of the
service, or of the user. Its name is the port of the first listener that has one, unless the start
of the host gave a path. Tenants cannot enter here: nothing that they know or say reaches the
socket.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import struct
import threading
from typing import Final, TypeAlias, cast

import msgspec

from portus.errors import PortusError, TransportError, UsageError
from portus.reach.daemon.events import tell
from portus.reach.daemon.options import ServeOptions, reload
from portus.reach.daemon.pools import free_bytes, used_bytes
from portus.reach.daemon.server import Server, is_here, listen_unix
from portus.reach.daemon.shared_state import ConnectionStatus, refusal_of
from portus.reach.protocol.address import Scheme, is_address, parse
from portus.reach.protocol.messages import Fault

LINE_MAX: Final = 16 << 20
"""Bytes of an answer, at most."""

_ASKED_MAX: Final = 64 << 10
_ASKED_S: Final = 5.0
"""Seconds that a request may take to arrive."""

_HOST_AND_PORT: Final = re.compile(r"[^/]+:\d+")

_AT_ONCE_MAX: Final = 8
_PEER: Final = struct.Struct("3i")  # process, user and group
_ROOT: Final = 0


class Look(msgspec.Struct, frozen=True, tag=True):
    """Ask for the ``HostStatus``."""


class Kick(msgspec.Struct, frozen=True, tag=True):
    """End the connections of a tenant, or the one of a peer."""

    who: str


class ReadOnly(msgspec.Struct, frozen=True, tag=True):
    """Stop (``on``) or allow again the saves of a tenant, and the retiring of its versions."""

    tenant: str
    on: bool


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Stop (``on``) or allow again the saves and retirements of all tenants. After a stop, wait
    until no save is under way, ``wait_s`` at most."""

    on: bool
    wait_s: float


class Reload(msgspec.Struct, frozen=True, tag=True):
    """Read secrets, quotas and certificates again."""


Asked: TypeAlias = Look | Kick | ReadOnly | Drain | Reload


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that is open. ``size``, ``on_disk``, ``free``, ``quota``: bytes; a ``quota`` of None:
    unlimited. ``claims``: the models that clients save. ``poisoned``: the pool accepts no more
    writes. ``mirror``: the destination of its copies, None if there is none; ``mirror_missing``:
    how many versions are not there yet, ``mirror_lag_s``: for how many seconds, and
    ``mirror_failure``: why."""

    tenant: str
    size: int
    on_disk: int
    free: int
    quota: int | None
    versions: int
    connections: int
    claims: list[str]
    pins: int
    saves: int
    read_only: bool
    poisoned: bool
    mirror: str | None = None
    mirror_missing: int = 0
    mirror_lag_s: float = 0.0
    mirror_failure: str = ""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True, tag="Standing"):
    """The status of a host: its tenants and its connections."""

    place: str
    addresses: list[str]
    draining: bool
    tenants: list[Tenant]
    connections: list[ConnectionStatus]


class RequestDone(msgspec.Struct, frozen=True, tag="Done"):
    """The host reports that it did what was asked. ``count``: connections that it ended, saves
    still under way, or bytes that it read, depending on the request."""

    count: int = 0


class RequestRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """The host reports that it did not do what was asked."""

    fault: Fault
    text: str


Answer: TypeAlias = HostStatus | RequestDone | RequestRefused


class AdminSocket:
    """The socket at which a host answers its operator, from ``start`` to ``stop``."""

    def __init__(self, path: str, server: Server, options: ServeOptions) -> None:
        """Listen at ``path``. Raise ``MediumError`` if the system refuses."""
        self.path: Final = path
        self._server: Final = server
        self._options: Final = options
        self._ended: Final = threading.Event()
        self._places: Final = threading.Semaphore(_AT_ONCE_MAX)
        self._socket: Final = listen_unix(path, path)

    def start(self) -> None:
        """Answer requests, each on a thread of its own."""
        threading.Thread(target=self._accept, name="portus-admin", daemon=True).start()

    def stop(self) -> None:
        """Stop answering, and remove the socket."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            # Before accept: further requests wait in the backlog, without a thread.
            self._places.acquire()
            try:
                asking, _ = self._socket.accept()
            except OSError:
                self._places.release()
                if self._ended.wait(0.1):  # else it is out of descriptors
                    return
                continue
            threading.Thread(
                target=self._hear, args=(asking,), name="portus-admin", daemon=True
            ).start()

    def _hear(self, asking: socket.socket) -> None:
        try:
            with asking, contextlib.suppress(OSError):
                # A client that sends nothing must not hold one of the few places.
                asking.settimeout(_ASKED_S)
                peer = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                if _PEER.unpack(peer)[1] not in (_ROOT, os.geteuid()):
                    return
                answer = self._answer(_line(asking, _ASKED_MAX))
                asking.sendall(msgspec.json.encode(answer) + b"\n")
        finally:
            self._places.release()

    def _answer(self, line: bytes) -> Answer:
        try:
            asked = msgspec.json.decode(line, type=Asked)
            answer = self._carry_out(asked)
        except msgspec.DecodeError as error:
            return RequestRefused(Fault.USAGE, f"unknown request: {error}")
        except PortusError as error:
            refusal = refusal_of(error)
            return RequestRefused(refusal.fault, refusal.text)
        if not isinstance(asked, Look):
            what = type(asked).__name__.lower()
            tell(logging.WARNING, "admin", f"by the operator: {asked}", request=what)
        return answer

    def _carry_out(self, asked: Asked) -> Answer:
        server, pools = self._server, self._server.house.pools
        if isinstance(asked, Kick):
            return RequestDone(server.kick(asked.who))
        if isinstance(asked, ReadOnly):
            # Who came in before its secret went may be held up all the same.
            if asked.tenant not in {each.tenant for each in pools.all()}:
                server.house.secrets.refuse_unknown([asked.tenant], "read-only")
            pools.hold(asked.tenant, on=asked.on)
            return RequestDone()
        if isinstance(asked, Drain):
            pools.draining = asked.on
            return RequestDone(pools.quiet(asked.wait_s) if asked.on else 0)
        if isinstance(asked, Reload):
            reload(self._options, self._server)
            return RequestDone()
        return self._standing()

    def _standing(self) -> HostStatus:
        server, pools = self._server, self._server.house.pools
        connections = server.status()
        tenants = []
        for hosted in pools.all():
            own = [each for each in connections if each.tenant == hosted.tenant]
            writer, copier = hosted.writer, hosted.copier
            tenant = Tenant(
                tenant=hosted.tenant,
                size=writer.medium.size,
                on_disk=used_bytes(hosted),
                free=free_bytes(hosted),
                quota=writer.max_bytes,
                versions=len(writer.catalogue().ids()),
                connections=len(own),
                claims=sorted({model for each in own for model in each.claims}),
                pins=sum(each.pins for each in own),
                saves=hosted.saves,
                read_only=bool(hosted.standstill),
                poisoned=writer.medium.is_poisoned,
            )
            if copier is not None:
                tenant = msgspec.structs.replace(
                    tenant,
                    mirror=copier.name,
                    mirror_missing=len(copier.missing()),
                    mirror_lag_s=copier.lag_s,
                    mirror_failure=copier.failure,
                )
            tenants.append(tenant)
        return HostStatus(
            place=pools.place,
            addresses=[listener.public_address for listener in server.listeners],
            draining=pools.draining,
            tenants=sorted(tenants, key=lambda each: each.tenant),
            connections=sorted(connections, key=lambda each: (each.tenant, each.peer)),
        )


def admin_path(server: Server) -> str:
    """Return the path of the socket that the host uses if the operator names none. Raise
    ``UsageError`` if there is no run directory, or no port to name the socket by."""
    directory = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0] or _of_user()
    if not directory:
        raise UsageError(
            "neither $RUNTIME_DIRECTORY nor $XDG_RUNTIME_DIR is set. Start the host with "
            "--admin PATH, or set one of them"
        )
    port = next((listener.port for listener in server.listeners if listener.port), None)
    if port is None:
        raise UsageError(
            "the host listens at no port to name it by. Start the host with --admin PATH"
        )
    with contextlib.suppress(OSError):
        os.makedirs(directory, 0o700, exist_ok=True)
    return os.path.join(directory, f"{port}.sock")


def ask(where: str, asked: Asked, wait_s: float | None = 60.0) -> Answer:
    """Return the answer of a host of this machine to a request.

    where: its address, also as HOST:PORT, or the path of its socket. wait_s: the longest wait;
    None: unlimited. Raises ``UsageError`` if there is no such host here, ``TransportError`` if it
    does not answer, and the error with which it refuses.
    """
    path = _path_of(where)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.settimeout(wait_s)
            asking.connect(path)
            asking.sendall(msgspec.json.encode(asked) + b"\n")
            line = _line(asking, LINE_MAX)
            answer = cast(Answer, msgspec.json.decode(line, type=Answer))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise UsageError(
                f"{where}: no storage host of this machine listens at {path}; expected its "
                "address, as portus://host:port, portus+tls://host:port or host:port, or the PATH "
                "of its serve --admin"
            ) from error
        except PermissionError as error:
            raise UsageError(f"{path}: only the host's user and root may use it") from error
        except (OSError, msgspec.DecodeError) as error:
            raise TransportError(f"{path}: no answer: {error}") from error
    if isinstance(answer, RequestRefused):
        raise answer.fault.error(errno.EIO, answer.text)
    return answer


def _path_of(where: str) -> str:
    if _HOST_AND_PORT.fullmatch(where) and not os.path.exists(where):
        where = f"{Scheme.TCP.value}://{where}"
    if not is_address(where):
        return where
    address = parse(where)
    if address.scheme is Scheme.UNIX:
        raise UsageError(f"{where}: give the path of its socket for operators (serve --admin PATH)")
    if not is_here(address.host):
        raise UsageError(f"{address}: another machine; run this where the host runs")
    places = ["/run/portus", *filter(None, [_of_user()])]
    names = [os.path.join(place, f"{address.port}.sock") for place in places]
    found = [name for name in names if os.path.exists(name)]
    if not found:
        unset = "" if len(names) > 1 else " ($XDG_RUNTIME_DIR is not set)"
        raise UsageError(
            f"{address}: there is no socket for the operator at {' or '.join(names)}{unset}. Is "
            "the host running, and as which user? If it was started with serve --admin PATH, give "
            "that PATH"
        )
    return found[0]


def _of_user() -> str:
    """Return the run directory of this user, or "" if there is none."""
    place = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(place, "portus") if place else ""


def _line(asking: socket.socket, size_max: int) -> bytes:
    """Return the bytes up to the first end of a line. Raise ``OSError`` if there is none."""
    with asking.makefile("rb") as file:
        found = file.readline(size_max)
    if not found.endswith(b"\n"):
        raise OSError(errno.EPROTO, "no whole line")
    return found
