"""RDMA by verbs: the device, queue pairs, registered memory. The one module that knows pyverbs.

Theory. A *domain* is one device, opened. Memory is registered in it (a *region*: its pages are
pinned, and have a key), and each connection has a *queue pair* of it. The storage host posts reads
and writes; the client posts nothing, and its processor takes no part. The pages of a region are
settled when it is registered: memory mapped later under its address is not in it. On-demand paging
would help there, and is never used: Soft-RoCE in kernels to 7.2 puts such data at the wrong place
within a page, and reports success.

Closing a queue pair ends access: when ``close`` has returned, no byte is read or written on its
behalf any more, whatever was under way.

pyverbs is Debian's ``python3-pyverbs`` or the one of PyPI; their constants are in modules of
different names. It is imported on first use, and only where there is a device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import ipaddress
import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from portus.errors import TransportError

DEVICE_VARIABLE: Final = "PORTUS_RDMA_DEVICE"
"""Names the device to use, where the one with the connection's address is not the right one."""

DEPTH: Final = 128
"""Requests in flight on one queue pair, at most."""

READS_MAX: Final = 16
"""The most reads that one end serves at once, and that the other requests; devices may allow
fewer."""

_SYS: Final = "/sys/class/infiniband"
_TIMEOUT: Final = 18  # 4.096 us * 2^18 = 1.1 s without an answer, then again
_RETRIES: Final = 7


class WorkError(TransportError):
    """A request failed. ``denied``: the other side refuses access to its memory."""

    def __init__(self, text: str, *, denied: bool) -> None:
        super().__init__(text)
        self.denied: Final = denied


class RegisterError(TransportError):
    """Memory cannot be pinned: there is too much of it, or its kind does not allow it."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device, and the one of its addresses to use. ``gid``: 16 bytes."""

    device: str
    number: int
    gid_index: int
    gid: bytes


class Limits(NamedTuple):
    """The limits of a device. ``regions``: their number, of ``region_size`` bytes each at most."""

    regions: int
    region_size: int


class Endpoint(NamedTuple):
    """One end of a connection, as the other one must know it: the fields of the messages."""

    number: int
    sequence: int
    gid: bytes
    lid: int
    mtu: int
    reads: int


def port_for(host: str) -> Port:
    """Return the active port that has the address ``host`` of this machine; "" stands for this
    machine.

    Raises ``TransportError`` that says why there is none.
    """
    named = os.environ.get(DEVICE_VARIABLE, "")
    known = _FOUND.get((named, host))
    if known is None or not _is_there(known):
        known = _FOUND[named, host] = _port_for(named, host)
    return known


def ports() -> list[Port]:
    """Return every active port of this machine, with the address that is used first."""
    found: dict[tuple[str, int], Port] = {}
    for name in _devices():
        for port in _ports(name):
            found.setdefault((port.device, port.number), port)
    return list(found.values())


def load() -> Any:
    """Return pyverbs. Raise ``TransportError`` with the reason if there is none, and what to
    install."""
    try:
        return _load()
    except ImportError as error:
        raise TransportError(
            f"pyverbs cannot be imported ({error}): install python3-pyverbs (Debian, Ubuntu; for "
            "the system's Python) or pyverbs from PyPI"
        ) from error


class Region:
    """Registered memory: ``length`` bytes from ``start``, which is their address in requests.
    ``local_key`` is for requests posted here, ``remote_key`` for the other side. The caller keeps
    the memory until ``close``."""

    def __init__(self, start: int, length: int, memory: Any) -> None:
        self.start: Final = start
        self.length: Final = length
        self.local_key: Final[int] = memory.lkey
        self.remote_key: Final[int] = memory.rkey
        self._memory: Final = memory

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.start + self.length

    def close(self) -> None:
        """End all access to the region, and release its pages. A second call does nothing."""
        with _as_transport_error(f"release {self.length} registered bytes"):
            self._memory.close()


class Domain:
    """A device, opened for one purpose: regions of one domain cannot be reached through another.

    Thread-safe. Forked children close their copy of it.
    """

    def __init__(self, port: Port) -> None:
        """Open the device. Raises ``TransportError``."""
        self._verbs: Final = load()
        self.port: Final = port
        # pyverbs does not report its descriptors, and forked children have to close them.
        before = _descriptors()
        with _as_transport_error(f"open the RDMA device {port.device}"):
            self._context: Final = self._verbs.Context(name=port.device)
            # A descriptor that was closed meanwhile may have passed its number to ours.
            self.descriptors: Final = (
                _descriptors() - before
            ) or _descriptors() - _open_descriptors()
            self._domain: Final = self._verbs.PD(self._context)
            facts = self._context.query_device()
        self.serves: Final = min(READS_MAX, int(facts.max_qp_rd_atom))
        self.asks: Final = min(READS_MAX, int(facts.max_qp_init_rd_atom))
        self.limits: Final = Limits(int(facts.max_mr), int(facts.max_mr_size))
        _ALL.add(self)

    def register(self, start: int, length: int, *, remote: bool, writable: bool) -> Region:
        """Pin memory of this process. remote: for the other side, which may read it; otherwise for
        requests posted here. writable: bytes will arrive in it.

        Raises ``RegisterError`` if the system refuses: too much, or memory that cannot be pinned.
        """
        e = self._verbs.constants
        access = e.IBV_ACCESS_LOCAL_WRITE if writable else 0
        if remote:
            access |= e.IBV_ACCESS_REMOTE_READ
            access |= e.IBV_ACCESS_REMOTE_WRITE if writable else 0
        try:
            with _as_transport_error(f"register {length} bytes with {self.port.device}"):
                return Region(start, length, self._verbs.MR(self._domain, length, access, start))
        except TransportError as error:
            hint = "`ulimit -l` limits how much; pages of a file cannot be pinned"
            raise RegisterError(f"{error}; {hint}") from error

    def register_dmabuf(self, descriptor: int, offset: int, length: int) -> Region:
        """Let the other side read ``length`` bytes from ``offset`` on of a dmabuf. The caller may
        close its descriptor afterwards. pyverbs has them begin at the address ``offset``.

        Raises ``RegisterError`` if the system refuses: the device, or its driver, takes none.
        """
        access = self._verbs.constants.IBV_ACCESS_REMOTE_READ
        try:
            with _as_transport_error(f"register a dmabuf with {self.port.device}"):
                memory = self._verbs.DmaBufMR(self._domain, length, access, descriptor, offset)
                return Region(offset, length, memory)
        except TransportError as error:
            raise RegisterError(str(error)) from error

    def queue_pair(self) -> QueuePair:
        """Return a new queue pair, not connected. Raises ``TransportError``."""
        return QueuePair(self, self._verbs, self._context, self._domain)

    def close(self) -> None:
        """Close the device, with everything in it. A second call does nothing."""
        _ALL.discard(self)  # first: other files may get its descriptors
        with _as_transport_error(f"close the RDMA device {self.port.device}"):
            self._context.close()

    def leave(self) -> None:
        """Close the device's descriptors, in a forked child. Otherwise they would keep the parent's
        regions and queue pairs alive after it; and destroying an object here would take it from the
        parent."""
        for number in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(number)


class QueuePair:
    """One end of a reliable connection. For one thread; but any thread may call ``close``."""

    def __init__(self, domain: Domain, verbs: Any, context: Any, protection: Any) -> None:
        self._verbs: Final = verbs
        self.domain: Final = domain
        e = verbs.constants
        self.closed = False
        with _as_transport_error("make a queue pair"):
            state = context.query_port(domain.port.number)
            self._completions: Final = verbs.CQ(context, DEPTH + 1)
            room = verbs.QPCap(max_send_wr=DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
            made = verbs.QPInitAttr(
                qp_type=e.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=room
            )
            self._pair: Final = verbs.QP(protection, made)
            self.endpoint: Final = Endpoint(
                number=int(self._pair.qp_num),
                sequence=int.from_bytes(os.urandom(3), "little"),
                gid=domain.port.gid,
                lid=int(state.lid),
                mtu=int(state.active_mtu),
                reads=domain.serves,
            )

    def connect(self, other: Endpoint, *, remote: bool) -> None:
        """Connect to the other end. remote: the other side may reach the regions of this one.

        Raises ``TransportError``.
        """
        e, port = self._verbs.constants, self.domain.port
        access = e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE if remote else 0
        with _as_transport_error(f"connect queue pair {self.endpoint.number} to {other.number}"):
            attributes = self._verbs.QPAttr(port_num=port.number)
            attributes.qp_access_flags = access
            self._pair.to_init(attributes)
            attributes = self._verbs.QPAttr(qp_state=e.IBV_QPS_RTR, port_num=port.number)
            attributes.path_mtu = min(self.endpoint.mtu, other.mtu)
            attributes.dest_qp_num = other.number
            attributes.rq_psn, attributes.sq_psn = other.sequence, self.endpoint.sequence
            attributes.max_dest_rd_atomic = self.endpoint.reads
            # More reads at once than the other end serves would end the connection.
            attributes.max_rd_atomic = min(self.domain.asks, other.reads)
            attributes.min_rnr_timer, attributes.timeout = 12, _TIMEOUT
            attributes.retry_cnt = attributes.rnr_retry = _RETRIES
            route = self._verbs.GlobalRoute(
                dgid=self._verbs.GID(_gid_text(other.gid)), sgid_index=port.gid_index, hop_limit=64
            )
            attributes.ah_attr = self._verbs.AHAttr(
                gr=route, is_global=1, port_num=port.number, dlid=other.lid
            )
            attributes.qp_access_flags = access
            self._pair.to_rts(attributes)

    def read(self, target: int, local_key: int, source: int, remote_key: int, length: int) -> None:
        """Post a request that fetches ``length`` bytes at ``source`` there to ``target`` here."""
        operation = self._verbs.constants.IBV_WR_RDMA_READ
        self._post(operation, target, local_key, length, source, remote_key)

    def write(self, target: int, remote_key: int, source: int, local_key: int, length: int) -> None:
        """Post a request that writes ``length`` bytes at ``source`` here to ``target`` there."""
        operation = self._verbs.constants.IBV_WR_RDMA_WRITE
        self._post(operation, source, local_key, length, target, remote_key)

    def poll(self) -> int:
        """Return the number of requests that completed since the last call, in order. Raises
        ``WorkError`` if one failed: those after it failed too, and the pair cannot be used any
        more."""
        if self.closed:
            raise TransportError("the queue pair is closed")
        with _as_transport_error("look for completions"):
            count, found = self._completions.poll(DEPTH)
        for each in found[:count] if count else ():
            if each.status:
                raise self._work_error(int(each.status))
        return int(count)

    def close(self) -> None:
        """Return when no byte is read or written on the pair's behalf any more. A second call does
        nothing; raises nothing."""
        if not self.closed:
            self.closed = True
            # In this order: a completion queue that a pair uses cannot be closed.
            for each in (self._pair, self._completions):
                with contextlib.suppress(TransportError), _as_transport_error("close"):
                    each.close()

    def _post(
        self, operation: int, local: int, local_key: int, length: int, remote: int, remote_key: int
    ) -> None:
        if self.closed:
            raise TransportError("the queue pair is closed")
        request = self._verbs.SendWR(
            opcode=operation,
            num_sge=1,
            sg=[self._verbs.SGE(local, length, local_key)],
            send_flags=self._verbs.constants.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(remote_key, remote)
        with _as_transport_error("post a request"):
            self._pair.post_send(request)

    def _work_error(self, status: int) -> WorkError:
        e = self._verbs.constants
        words = {
            e.IBV_WC_REM_ACCESS_ERR: "the other side refuses access to this memory: it is not "
            "registered there, or with another length or key",
            e.IBV_WC_REM_INV_REQ_ERR: "the other side does not accept such a request",
            e.IBV_WC_REM_OP_ERR: "the other side could not carry it out",
            e.IBV_WC_RETRY_EXC_ERR: "the other side no longer answers",
        }
        denied = status in (e.IBV_WC_REM_ACCESS_ERR, e.IBV_WC_REM_INV_REQ_ERR)
        text = words.get(status, "see ibv_wc_status")
        return WorkError(f"a request of verbs failed with status {status}: {text}", denied=denied)


_ALL: Final[weakref.WeakSet[Domain]] = weakref.WeakSet()


def _leave_all() -> None:
    for domain in list(_ALL):
        domain.leave()


def _open_descriptors() -> set[int]:
    """Return the descriptors of all open domains."""
    return {number for domain in list(_ALL) for number in domain.descriptors}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


_PYVERBS: Final = {
    "addr": ("GID", "AHAttr", "GlobalRoute"),
    "cq": ("CQ",),
    "device": ("Context",),
    "mr": ("MR", "DmaBufMR"),
    "pd": ("PD",),
    "pyverbs_error": ("PyverbsError",),
    "qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
    "wr": ("SGE", "SendWR"),
}
"""The names that are used of each module of pyverbs."""


@functools.cache
def _load() -> SimpleNamespace:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        found = {
            name: getattr(importlib.import_module(f"pyverbs.{module}"), name)
            for module, names in _PYVERBS.items()
            for name in names
        }
        try:
            found["constants"] = importlib.import_module("pyverbs.enums")
        except ImportError:
            found["constants"] = importlib.import_module("pyverbs.libibverbs_enums")
    finally:
        # pyverbs configures logging for the whole process, which is the user's to do.
        for each in [each for each in root.handlers if each not in before]:
            root.removeHandler(each)
        root.setLevel(level)
    return SimpleNamespace(**found)


@contextlib.contextmanager
def _as_transport_error(what: str) -> Iterator[None]:
    try:
        yield
    except _load().PyverbsError as error:
        number = int(getattr(error, "error_code", 0) or 0)
        why = os.strerror(number) if number else str(error)
        raise TransportError(f"cannot {what}: {why} (errno {number})") from error


_FOUND: Final[dict[tuple[str, str], Port]] = {}
"""The ports found before: a port may have a thousand addresses, each of them a file."""


def _port_for(named: str, host: str) -> Port:
    names = _devices()
    if not names:
        raise TransportError("this machine has no RDMA device")
    if named and named not in names:
        raise TransportError(
            f"{DEVICE_VARIABLE}={named}: there is no such RDMA device, but {', '.join(names)}"
        )
    ports = [port for name in names if named in ("", name) for port in _ports(name)]
    wanted = _gid_of(host)
    for port in ports:
        if port.gid == wanted:
            return port
    if ports and (named or not host):
        return ports[0]
    for port in ports:
        if _text(_place(port.device, port.number), "link_layer") == "InfiniBand":
            return port
    raise TransportError(
        f"no RDMA device of {', '.join(names)} has an active port with the address {host}; "
        f"{DEVICE_VARIABLE} names another one"
    )


def _devices() -> list[str]:
    return sorted(os.listdir(_SYS)) if os.path.isdir(_SYS) else []


def _ports(device: str) -> list[Port]:
    """Return the active ports of a device, once for each address: RoCE v2 and IPv4 first."""
    found: list[tuple[bool, bool, Port]] = []
    for number in sorted(map(int, os.listdir(f"{_SYS}/{device}/ports"))):
        place = _place(device, number)
        for index in sorted(map(int, os.listdir(f"{place}/gids"))) if _is_active(place) else ():
            gid = _gid_at(place, index)
            if any(gid):
                kind = _text(place, f"gid_attrs/types/{index}")
                port = Port(device, number, index, gid)
                found.append(("v2" not in kind, gid[:12] != _MAPPED, port))
    return [port for _, _, port in sorted(found, key=lambda each: each[:2])]


def _is_there(port: Port) -> bool:
    place = _place(port.device, port.number)
    return _is_active(place) and _gid_at(place, port.gid_index) == port.gid


def _is_active(place: str) -> bool:
    return _text(place, "state").startswith("4")


def _gid_at(place: str, index: int) -> bytes:
    return bytes.fromhex(_text(place, f"gids/{index}").replace(":", ""))


def _place(device: str, number: int) -> str:
    return f"{_SYS}/{device}/ports/{number}"


_MAPPED: Final = bytes(10) + b"\xff\xff"


def _gid_of(host: str) -> bytes:
    """Return the IP address ``host`` as a GID of RoCE v2; empty if it is no IP address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return b""
    return address.packed if address.version == 6 else _MAPPED + address.packed


def _gid_text(gid: bytes) -> str:
    return ":".join(gid[start : start + 2].hex() for start in range(0, 16, 2))


def _text(place: str, name: str) -> str:
    try:
        with open(f"{place}/{name}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # reading an empty entry fails
        return ""


def _descriptors() -> set[int]:
    """Return this process's descriptors that refer to an RDMA device, or to its events."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            place = os.readlink(f"/proc/self/fd/{number}")
            if "/infiniband/" in place or "[infinibandevent]" in place:
                found.add(int(number))
    return found
