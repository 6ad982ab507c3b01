"""One end of a reliable connection, through pyverbs, for tests of what the hardware does.

Works with pyverbs 44 and with newer ones, whose constants are in another module.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

try:
    import pyverbs.enums as constants
except ImportError:
    import pyverbs.libibverbs_enums as constants

PORT: Final = 1
DEPTH: Final = 16
"""Requests in flight."""

PIECE: Final = 1 << 20
"""Bytes of one request."""

ACCESS: Final = (
    constants.IBV_ACCESS_LOCAL_WRITE
    | constants.IBV_ACCESS_REMOTE_WRITE
    | constants.IBV_ACCESS_REMOTE_READ
)

READ: Final = constants.IBV_WR_RDMA_READ
WRITE: Final = constants.IBV_WR_RDMA_WRITE

_STALL_S_MAX: Final = 60.0
_PAUSE_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class Address:
    """What the other side must know of an end: its queue pair and where it is."""

    number: int
    gid: str


@dataclass(frozen=True, slots=True)
class Remote:
    """Memory of the other side: where it begins, and the key to it."""

    start: int
    key: int


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory of this side."""

    start: int
    length: int
    mr: Any

    @property
    def remote(self) -> Remote:
        """As the other side uses it."""
        return Remote(self.start, self.mr.rkey)


class End:
    """A queue pair on a device, and the memory that is registered for it."""

    def __init__(self, device: str, *, gid_index: int = 1) -> None:
        """gid_index: 1 is the IPv4 address of a device on Ethernet."""
        self._gid_index: Final = gid_index
        self._context: Final = Context(name=device)
        self._domain: Final = PD(self._context)
        self._completions: Final = CQ(self._context, 8 * DEPTH)
        room = QPCap(max_send_wr=2 * DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        made = QPInitAttr(
            qp_type=constants.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=room
        )
        self._pair: Final = QP(self._domain, made)

    @property
    def address(self) -> Address:
        """For the other side."""
        gid = self._context.query_gid(PORT, self._gid_index).gid
        return Address(self._pair.qp_num, str(gid))

    def connect(self, other: Address) -> None:
        """Make the pair ready; both sides do."""
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = ACCESS
        self._pair.to_init(attributes)
        attributes = QPAttr(qp_state=constants.IBV_QPS_RTR, port_num=PORT)
        attributes.path_mtu = self._context.query_port(PORT).active_mtu
        attributes.dest_qp_num = other.number
        attributes.rq_psn = attributes.sq_psn = 0
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = DEPTH
        attributes.min_rnr_timer, attributes.timeout = 12, 18
        attributes.retry_cnt = attributes.rnr_retry = 7
        route = GlobalRoute(dgid=GID(other.gid), sgid_index=self._gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        attributes.qp_access_flags = ACCESS
        self._pair.to_rts(attributes)

    def register(self, start: int, length: int) -> Region:
        """Let this side and the other one use memory of this process."""
        return Region(start, length, MR(self._domain, length, ACCESS, start))

    def move(self, operation: int, local: Region, remote: Remote) -> float:
        """Read or write the whole of ``local``; the seconds it took. Raises ``OSError``."""
        return self.move_all(operation, [local], [remote])

    def move_all(
        self, operation: int, locals_: Sequence[Region], remotes: Sequence[Remote]
    ) -> float:
        """``move`` of many, one after another, without a pause between them."""
        begin_s = time.perf_counter()
        in_flight = 0
        for local, remote in zip(locals_, remotes, strict=True):
            for offset in range(0, local.length, PIECE):
                if in_flight == DEPTH:
                    in_flight -= self._completed()
                self._post(operation, local, remote, offset)
                in_flight += 1
        while in_flight:
            in_flight -= self._completed()
        return time.perf_counter() - begin_s

    def _post(self, operation: int, local: Region, remote: Remote, offset: int) -> None:
        length = min(PIECE, local.length - offset)
        request = SendWR(
            opcode=operation,
            num_sge=1,
            sg=[SGE(local.start + offset, length, local.mr.lkey)],
            send_flags=constants.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(remote.key, remote.start + offset)
        self._pair.post_send(request)

    def close(self) -> None:
        """Let go of the device."""
        self._context.close()

    def _completed(self) -> int:
        """Wait until something is completed; how many: a poll may give several."""
        until_s = time.monotonic() + _STALL_S_MAX
        while True:
            count, found = self._completions.poll(DEPTH)
            for each in found[:count] if count else ():
                if each.status:
                    raise OSError(f"a request failed with status {each.status}")
            if count:
                return int(count)
            if time.monotonic() > until_s:
                raise OSError(f"no completion within {_STALL_S_MAX:.0f} s")
            time.sleep(_PAUSE_S)


def devices() -> list[str]:
    """The names of the RDMA devices."""
    return sorted(each.name.decode() for each in get_device_list())


@contextlib.contextmanager
def pair(device: str) -> Iterator[tuple[End, End]]:
    """Two ends in this process, connected."""
    with contextlib.ExitStack() as stack:
        ends = []
        for _ in range(2):
            end = End(device)
            stack.callback(end.close)
            ends.append(end)
        for end, other in itertools.permutations(ends):
            end.connect(other.address)
        yield ends[0], ends[1]


@contextlib.contextmanager
def mapped(path: str | None, length: int) -> Iterator[int]:
    """The address of ``length`` bytes: of a device, or (None) of fresh memory."""
    if path is None:
        memory = mmap.mmap(-1, length)
    else:
        with open(path, "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), length)
    first = ctypes.c_char.from_buffer(memory)
    try:
        yield ctypes.addressof(first)
    finally:
        del first
        memory.close()
