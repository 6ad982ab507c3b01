"""The client's side of verbs: its registered memory, and its end of each queue pair.

Theory. Registering pins the pages that memory has at that moment, and costs time, so all saves of
the same storages share one registration. From then on the address alone proves nothing: memory that
was freed and allocated again at the same address has other pages, and the host would pull the old
ones. So a region holds its *owner*, the object that keeps the memory alive: while the region holds
it, no other allocation gets that memory. A region is used again only for the same owner, address
and length. One case remains, an owner whose memory was exchanged under it; the digests catch that:
the client hashes what its processor sees, the host what its network card brought.

Small storages are not registered one by one: they are gathered in memory that a connection has for
this, hashed on the way, and the host fetches many with one request.

The memory of a CUDA device is registered as a dmabuf. If that fails, it is registered by its
address, which needs the driver nvidia_peermem. If that fails too, it is *staged*: not registered,
but fetched to this processor's memory and sent over the socket. A way that fails once for a device
is not tried again for it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.local import BATCH, best_engine
from portus.engine.copying.segments import (
    Column,
    Digests,
    Segments,
    Sources,
    Stop,
    cut,
    owners,
)
from portus.errors import TransportError
from portus.reach.transport.cuda import Driver, driver
from portus.reach.transport.one_sided import ALIGNMENT
from portus.reach.transport.verbs import Domain, QueuePair, Region, RegisterError

_log: Final = logging.getLogger("portus")

SMALL: Final = 16 << 10
"""Bytes of a storage below which it is gathered."""

GATHERED_MAX: Final = 64 << 20
"""Bytes to gather on one connection, at most; small storages beyond that are registered."""

HERE: Final = -1
"""Stands in the place of a device's number: memory of this processor."""

Flags = NDArray[np.bool_]


class StagedError(RegisterError):
    """Memory of a device that cannot be registered. The device is among the staged ones now."""


class DeviceAccess(enum.Enum):
    """The ways in which the other side reaches the memory of a device, in the order of the
    attempts."""

    DMABUF = "dmabuf"
    PEER = "peer memory"
    STAGED = "staged"


@dataclass(eq=False, slots=True)
class RegisteredRegion:
    """A region that is registered. ``users``: the number of saves that use it now. ``lasting``: it
    stays registered when they have ended."""

    owner: object
    region: Region
    users: int = 0
    lasting: bool = True


_Key = tuple[int, int, int]


class Regions:
    """The regions that a client has registered for one host. Thread-safe."""

    def __init__(self, domain: Domain, cuda: Callable[[], Driver] = driver) -> None:
        """cuda: returns the driver of the devices; called when memory is on one."""
        self.domain: Final = domain
        self._cuda: Final = cuda
        self._guard: Final = threading.Lock()
        self._known: Final[dict[_Key, RegisteredRegion]] = {}
        self._refused: Final[dict[int, list[str]]] = {}
        self._unsteady: Final[set[int]] = set()

    def __len__(self) -> int:
        return len(self._known)

    def way(self, device: int) -> DeviceAccess:
        """Return the way to the memory of a device that has not failed yet."""
        return list(DeviceAccess)[len(self._refused.get(device, ()))]

    def staged_devices(self) -> list[int]:
        """Return the devices whose memory cannot be registered."""
        return [device for device in list(self._refused) if self.way(device) is DeviceAccess.STAGED]

    def distrust(self, devices: Collection[int], why: str) -> None:
        """Stage these devices from now on, since bytes arrived damaged."""
        with self._guard:
            for device in devices:
                while self.way(device) is not DeviceAccess.STAGED:
                    self._refuse(device, why)

    def avoid(self, addresses: Collection[int]) -> None:
        """Do not register memory at these addresses from now on, since it changed while it was
        pulled."""
        with self._guard:
            self._unsteady.update(addresses)

    def unsteady(self) -> list[int]:
        """Return the addresses of memory that is not to be registered."""
        with self._guard:
            return list(self._unsteady)

    def take(
        self,
        owners: Sequence[object],
        address: Column,
        length: Column,
        lasting: Flags,
        device: Column | None = None,
    ) -> list[RegisteredRegion]:
        """Return a region for each storage, registered now if it is not yet. One save uses them,
        and gives them back. Regions that no save uses, and that this call does not name, are
        released. device: the number of each storage's device, or HERE; all are HERE by default.

        Raises ``RegisterError`` if the system refuses, ``StagedError`` for memory of a device; then
        nothing was taken.
        """
        taken: list[RegisteredRegion] = []
        wanted: set[_Key] = set()
        where = np.full(len(owners), HERE) if device is None else device
        columns = (address.tolist(), length.tolist(), lasting.tolist(), where.tolist())
        with self._guard:
            try:
                for owner, start, size, lasts, number in zip(owners, *columns, strict=True):
                    # With the owner: memory that was freed and allocated again there has other
                    # pages.
                    key = (start, size, id(owner))
                    known = self._known.get(key)
                    if known is None:
                        region = self._register(number, start, size)
                        known = self._known[key] = RegisteredRegion(owner, region)
                    known.lasting = lasts
                    known.users += 1
                    taken.append(known)
                    wanted.add(key)
            except BaseException:
                self._let_go(taken)
                raise
            for key in self._known.keys() - wanted:
                # This save does not use it: the training has other tensors now.
                self._known[key].lasting = False
            self._sweep()
            return taken

    def give_back(self, taken: Sequence[RegisteredRegion]) -> None:
        """Note that a save no longer uses its regions."""
        with self._guard:
            self._let_go(taken)

    def forget(self) -> None:
        """Keep no region for later saves, after one of them has failed."""
        with self._guard:
            for known in self._known.values():
                known.lasting = False
            self._sweep()

    def _register(self, device: int, start: int, size: int) -> Region:
        if device == HERE:
            return self.domain.register(start, size, remote=True, writable=False)
        while (way := self.way(device)) is not DeviceAccess.STAGED:
            try:
                if way is DeviceAccess.PEER:
                    return self.domain.register(start, size, remote=True, writable=False)
                return self._from_dmabuf(device, start, size)
            except RegisterError as error:  # whose own text is about limits and files, not devices
                self._refuse(device, str(error.__cause__ or error))
            except TransportError as error:
                self._refuse(device, str(error))
        raise StagedError(f"the memory of device {device} is staged")

    def _from_dmabuf(self, device: int, start: int, size: int) -> Region:
        descriptor, offset = self._cuda().export(device, start, size)
        try:
            return self.domain.register_dmabuf(descriptor, offset, size)
        finally:
            os.close(descriptor)  # the region holds what it needs

    def _refuse(self, device: int, why: str) -> None:
        """Note that the way to a device's memory has failed, so that the next way is tried."""
        said = self._refused.setdefault(device, [])
        said.append(f"{self.way(device).value}: {why}")
        if self.way(device) is DeviceAccess.STAGED:
            _log.warning(
                "device %d: its memory goes through pinned memory and over the socket (%s)",
                device,
                "; ".join(said),
            )

    def _let_go(self, taken: Sequence[RegisteredRegion]) -> None:
        for known in taken:
            known.users -= 1
        self._sweep()

    def _sweep(self) -> None:
        for key, known in list(self._known.items()):
            if not known.users and not known.lasting:
                del self._known[key]
                with contextlib.suppress(TransportError):
                    known.region.close()


class ClientLane:
    """The client's end of the queue pair of one connection, and memory to gather in. It posts no
    requests. For one thread; but any thread may call ``close``."""

    def __init__(self, domain: Domain, pair: QueuePair) -> None:
        self._domain: Final = domain
        self._pair: Final = pair
        self._memory: mmap.mmap | None = None
        self._region: Region | None = None

    @property
    def closed(self) -> bool:
        """True once the host reaches no memory through the lane any more."""
        return self._pair.closed

    def room(self, size: int) -> Region:
        """Return registered memory of at least ``size`` bytes, the same as before if it is large
        enough. Its content lasts until the next call. Raises ``RegisterError``."""
        if self._region is None or self._region.length < size:
            self._drop()
            length = max(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)
            self._memory = mmap.mmap(-1, length)
            start = np.frombuffer(self._memory, np.uint8).ctypes.data
            self._region = self._domain.register(start, length, remote=True, writable=True)
        return self._region

    def register(self, address: int, length: int) -> Region:
        """Let the host write to this memory, until the region is closed. Raises
        ``RegisterError``."""
        return self._domain.register(address, length, remote=True, writable=True)

    def close(self) -> None:
        """Revoke access: when this returns, the host reaches no memory through the lane. Raises
        nothing."""
        self._pair.close()
        self._drop()

    def _drop(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            with contextlib.suppress(TransportError):
                region.close()
        self._memory = None


def gather(lengths: Column, here: Flags, first: Flags) -> tuple[Flags, Column, int]:
    """Return which storages to gather, the offset of each (0 for the others), and the bytes of all.

    here: those that have an address. first: those to place first, since they travel together.
    """
    small = here & (lengths > 0) & (lengths < SMALL)
    order = np.flatnonzero(small)[np.argsort(~first[small], kind="stable")]
    room = -(-lengths[order] // ALIGNMENT) * ALIGNMENT
    ends = np.cumsum(room)
    order, room, ends = (each[ends <= GATHERED_MAX] for each in (order, room, ends))
    offsets = np.zeros(len(lengths), np.int64)
    offsets[order] = ends - room
    chosen = np.zeros(len(lengths), np.bool_)
    chosen[order] = True
    return chosen, offsets, int(ends[-1]) if len(ends) else 0


@dataclass(frozen=True, slots=True)
class Parts:
    """The segments of some sources, gathered and other ones apart, and the digests of all."""

    small: Segments
    place: Column
    big: Segments
    digests: Digests

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered segments."""
        return self.small.size

    @classmethod
    def of(cls, sources: Sources, is_small: Flags, place: Column) -> Parts:
        """Return the parts of sources. is_small: True for each source to gather. place: the address
        where each source is gathered."""
        segments, digests = cut(sources)
        owner = owners(sources.length)[segments.row]
        chosen = is_small[owner]
        small, big = segments.part(chosen), segments.part(~chosen)
        return cls(small, place[owner][chosen], big, digests)

    def gather(self, stop: Stop) -> None:
        """Copy the small segments to their places, and note their digests. Raises
        ``StoppedError``."""
        if len(self.small):
            best_engine().move(self.small, self.place, self.digests, stop)

    def scatter(self, stop: Stop) -> None:
        """Copy the small segments from their places to their targets, and note their digests."""
        if len(self.small):
            there = replace(self.small, address=self.place)
            best_engine().move(there, self.small.address, self.digests, stop)

    def hash_big(self, stop: Stop) -> None:
        """Note the digests of the other segments. Raises ``StoppedError``."""
        for batch in self.big.batches(BATCH):
            best_engine().move(batch, None, self.digests, stop)
