"""Verbs on a storage host: its devices, the pools registered there, and one end for each client.

A host has one ``Fabric``, and each connection one ``HostLane``. A lane posts reads and writes of
the client's memory; the client cannot reach the host's memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Final

from portus.engine.copying.segments import Column, Sources
from portus.engine.media.base import MappedMedium
from portus.errors import MediumError, TransportError, UsageError
from portus.reach.daemon.events import tell
from portus.reach.daemon.pools import HostedPool
from portus.reach.protocol.address import Transport
from portus.reach.transport.one_sided import (
    DirectLanding,
    Landing,
    PoolRegions,
    RingLanding,
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
        self.pools: Final[dict[HostedPool, PoolRegions | None]] = {}
        """What is registered of a pool; None if it has to be reached through a ring."""
        self._guard: Final = guard

    def regions(self, hosted: HostedPool) -> PoolRegions | None:
        """Return the regions of a pool, or None if it has to be reached through a ring."""
        medium = hosted.writer.medium
        with self._guard:
            if hosted not in self.pools:
                self.pools[hosted] = None
                if is_pinnable(medium):
                    assert isinstance(medium, MappedMedium)
                    self.pools[hosted] = PoolRegions(self.domain, medium)
            return self.pools[hosted]

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
        self._pair: Final = pair
        self._device: Final = device

    @property
    def endpoint(self) -> Endpoint:
        """The address of this end, which the client needs to connect its own."""
        return self._pair.endpoint

    @property
    def closed(self) -> bool:
        """True once a transfer has failed, which makes the lane useless."""
        return self._pair.closed

    def transfer(self, moved: Sources, key: Column, *, is_pull: bool) -> TransferResult:
        """Move bytes as ``one_sided.transfer`` does. Raise ``UnexpectedMessageError`` if the client
        sends a message meanwhile, and ``EndedError`` if it leaves."""
        with self._landing() as landing:
            return transfer(self._pair, landing, moved, key, self._link, is_pull=is_pull)

    def close(self) -> None:
        """End all reads and writes."""
        self._pair.close()

    @contextlib.contextmanager
    def _landing(self) -> Iterator[Landing]:
        straight = self._straight()
        if straight is not None:
            try:
                yield straight
            except RegisterError as error:  # this transfer fails, and the next one takes a ring
                self._device.give_up(self._hosted, error)
                raise
            return
        with self._device.rings.borrow(self._link) as ring:
            yield RingLanding(self._hosted.writer.medium, ring)

    def _straight(self) -> DirectLanding | None:
        """Return a landing that is the pool itself, or None if the pool cannot be registered."""
        regions = self._device.regions(self._hosted)
        if regions is None:
            return None
        try:
            return DirectLanding(regions)
        except MediumError:  # poisoned: it has no addresses any more, but can still be loaded
            return None
        except RegisterError as error:
            self._device.give_up(self._hosted, error)
            return None
