"""Verbs on a storage host: its devices, the pools registered there, and one end for each client.

A host has one ``Fabric``, and each connection one ``HostLane``. A lane posts reads and writes of
the client's memory; the client cannot reach the host's memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Final

from portus.engine.copying.segments import Column, Sources
from portus.errors import TransportError, UsageError
from portus.reach.daemon.events import tell
from portus.reach.daemon.pools import HostedPool
from portus.reach.protocol.address import Transport
from portus.reach.transport.one_sided import (
    PinnedPool,
    Rings,
    TransferResult,
    is_pinnable,
    transfer,
)
from portus.reach.transport.stream import Link
from portus.reach.transport.verbs import (
    Domain,
    Endpoint,
    Port,
    QueuePair,
    RegisterError,
    load,
    port_for,
)


class Fabric:
    """The devices of a host. Thread-safe."""

    def __init__(self, wish: Transport = Transport.AUTO) -> None:
        """Raise ``UsageError`` if ``wish`` demands verbs and the host has none."""
        self._wish: Final = wish
        self._guard: Final = threading.RLock()
        self._devices: Final[dict[Port, _Device]] = {}
        if wish is Transport.VERBS:
            try:
                port_for("")
                load()
            except TransportError as error:
                raise UsageError(f"verbs cannot be served: {error}") from error

    def why_not(self, link: Link) -> str:
        """Return why the client at the other end of ``link`` cannot have verbs, or "" if it can."""
        if self._wish is Transport.TCP:
            return "this host serves TCP only (--transport tcp)"
        if link.secret:
            return "this is a TLS connection, and verbs are not encrypted"
        try:
            port_for(link.host)
            load()
        except TransportError as error:
            return str(error)
        return ""

    def lane(self, link: Link, hosted: HostedPool, other: Endpoint) -> HostLane:
        """Return this host's end of a queue pair, connected to the client's end ``other``. Raises
        ``TransportError``."""
        why = self.why_not(link)
        if why:
            raise TransportError(why)
        device = self._device(port_for(link.host))
        pair = device.domain.queue_pair()
        try:
            # The client gets no keys: with a key to the pool, a late write of its could hit
            # another version (decision 0023).
            pair.connect(other, remote=False)
        except BaseException:
            pair.close()
            raise
        return HostLane(link, hosted, pair, device)

    def give_back(self, hosted: HostedPool) -> int:
        """Return the free space of a pool to the file system, and how many bytes that was. Return 0
        while a device has pages of the pool pinned: it would keep using pages that the pool has
        lost."""
        with self._guard:  # no device begins to pin pages meanwhile
            return 0 if self.has_pinned(hosted) else hosted.writer.give_back()

    def has_pinned(self, hosted: HostedPool) -> bool:
        """Return whether a device has pages of a pool pinned."""
        with self._guard:
            return any(device.pools.get(hosted) is not None for device in self._devices.values())

    def close(self) -> None:
        """Release all devices. No lane may be in use any more."""
        with self._guard:
            for device in self._devices.values():
                with contextlib.suppress(TransportError):
                    device.domain.close()
            self._devices.clear()

    def _device(self, port: Port) -> _Device:
        with self._guard:
            found = self._devices.get(port)
            if found is None:
                found = self._devices[port] = _Device(port, self._guard)
            return found


class _Device:
    """One device, with the regions of all pools that are registered with it."""

    def __init__(self, port: Port, guard: contextlib.AbstractContextManager[bool]) -> None:
        """guard: held while ``pools`` is read or changed."""
        self.domain: Final = Domain(port)
        self.rings: Final = Rings(self.domain)
        self.pools: Final[dict[HostedPool, PinnedPool | None]] = {}
        """Pools that are registered; None: one that has to be reached through a ring."""
        self._guard: Final = guard

    def pool(self, hosted: HostedPool) -> PinnedPool | None:
        """Return a pool that is registered, or None if it has to be reached through a ring."""
        medium = hosted.writer.medium
        if medium.is_poisoned:  # it has no addresses any more, but can still be loaded
            return None
        try:
            with self._guard:
                if hosted not in self.pools:
                    self.pools[hosted] = (
                        PinnedPool(self.domain, medium) if is_pinnable(medium) else None
                    )
                found = self.pools[hosted]
            if found is not None:
                found.region(found.start)
            return found
        except RegisterError as error:
            self.give_up(hosted, error)
            return None

    def give_up(self, hosted: HostedPool, why: RegisterError) -> None:
        """Reach a pool through rings from now on."""
        with self._guard:
            self.pools[hosted] = None
        name = hosted.writer.medium.info.name
        tell(
            logging.WARNING,
            "not_pinned",
            f"{name}: {why} (systemd: LimitMEMLOCK=infinity). "
            "Its bytes go through buffers from now on",
            tenant=hosted.tenant,
            place=name,
            why=str(why),
        )


class HostLane:
    """The host's end of the queue pair of one connection."""

    def __init__(self, link: Link, hosted: HostedPool, pair: QueuePair, device: _Device) -> None:
        self._link: Final = link
        self._hosted: Final = hosted
        self.pair: Final = pair
        """Closing it ends all reads and writes; a failed transfer closes it too."""
        self._device: Final = device

    def transfer(self, moved: Sources, key: Column, *, is_pull: bool) -> TransferResult:
        """Move bytes as ``one_sided.transfer`` does. Raise ``ProtocolError`` if the client sends a
        message meanwhile, and ``EndedError`` if it leaves."""
        pinned = self._device.pool(self._hosted)
        if pinned is None:
            with self._device.rings.borrow(self._link, self._hosted.writer.medium) as ring:
                return transfer(self.pair, ring, moved, key, self._link, is_pull=is_pull)
        try:
            return transfer(self.pair, pinned, moved, key, self._link, is_pull=is_pull)
        except RegisterError as error:  # this transfer fails, and the next one takes a ring
            self._device.give_up(self._hosted, error)
            raise
