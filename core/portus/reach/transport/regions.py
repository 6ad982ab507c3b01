"""The memory that a client has registered, for a storage host to reach.

Theory. Registering pins the pages that memory has at that moment, and costs time, so all saves of
the same storages share one registration. From then on the address alone proves nothing: memory that
was freed and allocated again at the same address has other pages, and the host would pull the old
ones. So a region holds its *owner*, the object that keeps the memory alive: while the region holds
it, no other allocation gets that memory. A region is used again only for the same owner, address
and length. One case remains, an owner whose memory was exchanged under it; the digests catch that:
the client hashes what its processor sees, the host what its network card brought.

Small storages are not registered: they go over the socket, many together.

The memory of a CUDA device is registered as a dmabuf. If that fails, it is registered by its
address, which needs the driver nvidia_peermem. If that fails too, it is *staged*: not registered,
but fetched to this processor's memory and sent over the socket. A way that fails once for a device
is not tried again for it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.segments import Column
from portus.errors import TransportError
from portus.reach.transport.cuda import Driver, driver
from portus.reach.transport.verbs import Domain, Region, RegisterError

_log: Final = logging.getLogger("portus")

SMALL: Final = 16 << 10
"""Bytes of a storage below which it is not registered."""

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
