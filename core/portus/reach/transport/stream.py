"""A conversation over a socket (tcp, TLS, unix), with payload straight from memory to memory.

A ``Link`` belongs to one thread at a time. It waits in short steps: between them it checks whether
the caller's ``Stop`` is set, and whether the other side has been silent for too long. An error, or
a stop in the middle of a frame, ends the link, and the unfinished message is void for both sides.

Payload is hashed piece by piece, before it is sent and after it arrived, while the cache has it. A
copy is sent, since the source may change meanwhile: what was hashed is what is sent.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import ssl
import struct
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, cast

import numpy as np
import xxhash
from isal import isal_zlib

from portus.engine.copying.local import best_engine, copy
from portus.engine.copying.segments import (
    Column,
    Crcs,
    Digests,
    Segments,
    Sources,
    Stop,
    StoppedError,
    memory,
)
from portus.engine.media.base import MappedMedium, Medium
from portus.engine.spec import Extent
from portus.errors import PortusError, TransportError
from portus.reach.protocol.connection import Connection, Event
from portus.reach.protocol.messages import (
    BYTES,
    DATA,
    PAYLOAD_SIZE_MAX,
    ProtocolError,
    Said,
    error_of,
)
from portus.reach.protocol.vocabulary import MessageKind
from portus.reach.transport.budget import FREE, UNLIMITED, Budget, ConnectionBudget

PIECE: Final = 1 << 20
"""Bytes of payload for one system call, and between two checks of the stop."""

GATHER: Final = 4 << 20
"""Bytes to receive, or to read, before they are moved on, at most."""

_BYTES_S_MIN: Final = 64e3
"""The lowest average rate, in bytes a second, of a message that has begun, of a sent piece of
payload, and of all payload that a host receives between two messages. A side that sends a byte now
and then counts as silent."""

_WANTED_BYTES_S_MIN: Final = 1e6
_WANTED_S: Final = 10.0
"""The same rate while others wait for memory that the sender has, and the seconds before it
counts."""

_POLL_S: Final = 0.2
_KEEPALIVE: Final = {
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 20,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 80_000,  # ms; nothing is asked while something sent is not acknowledged
}
"""These options notice a vanished peer within 80 s."""


class SilentError(TransportError):
    """The other side sent nothing, or accepted nothing, for too long."""


class EndedError(TransportError):
    """The other side has closed the connection."""


class Link:
    """One end of a conversation. ``silence_s``: the longest wait for the other side; it may be
    changed at any time. ``name``: of the other side, for messages. ``taken``: bytes of payload
    received. ``hash_s``: seconds spent hashing payload, and copying it
    on in the same pass. ``account``: see the constructor."""

    def __init__(
        self,
        link: socket.socket,
        *,
        is_client: bool,
        name: str,
        silence_s: float,
        account: ConnectionBudget | None = None,
    ) -> None:
        """account: for the memory that the other side makes this one hold; None: no limit."""
        self.connection: Final = Connection(is_client=is_client)
        self.name: Final = name
        self.silence_s = silence_s
        self.taken = 0
        self.hash_s = 0.0
        self._socket: Final = link
        self.account: Final = account or Budget(UNLIMITED).account()
        self._is_client: Final = is_client
        self._began_s = math.inf
        self._came = 0
        self._payload_s = 0.0
        """Seconds spent waiting for payload since the last message."""
        self._payload_came = 0
        self._stop: Stop | None = None
        self._work: Stop | None = None
        self.closed = False
        """True when the link can no longer be used."""
        self.silence: SilentError | None = None
        """The error that ended the link, if that was the silence of the other side."""
        _prepare(link)
        _ALL.add(self)

    @contextlib.contextmanager
    def under(self, stop: Stop) -> Iterator[None]:
        """End waits of this link when ``stop`` is set, inside the block; the link is closed
        then."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    @contextlib.contextmanager
    def working(self) -> Iterator[Stop]:
        """Yield a stop for work without messages, set when the link is closed or the other side
        hangs up. Raise ``EndedError`` if it ended the work."""
        self._work = stop = _Work(self)
        try:
            if self.closed:
                stop.set()
            yield stop
        except StoppedError as error:
            self.close()
            raise EndedError(f"{self.name}: the connection was closed") from error
        finally:
            self._work = None

    def shake_hands(self, timeout_s: float) -> None:
        """Begin TLS as a host, on a TLS link; raises as ``send``."""
        if isinstance(self._socket, ssl.SSLSocket):
            with self._or_end():
                self._socket.settimeout(timeout_s)
                self._socket.do_handshake()
                _wait_shortly(self._socket)

    @property
    def has_hung_up(self) -> bool:
        """True once the other side will send nothing more. Consumes no data."""
        number = self._socket.fileno()
        if number < 0:
            return True
        asking = select.poll()
        asking.register(number, getattr(select, "POLLRDHUP", 0))  # poll reports other ends unasked
        return bool(asking.poll(0))

    def send(self, message: Said) -> None:
        """Send a message. Raises ``TransportError``, and then the link is closed; ``StoppedError``
        likewise."""
        with self._or_end():
            self._put(memoryview(self.connection.send(message)))

    def receive(self, idle_s: float | None = None) -> Event:
        """Return the next message, or that payload follows, or on a host that there was no memory
        for a message: it is answered with a refusal, and the conversation continues. Raises as
        ``send``, and ``ProtocolError``.

        idle_s: the longest wait for the first byte; None: ``silence_s``, as for the others.
        """
        with self._or_end():
            data = self._get(self.connection.wanted_bytes, idle_s)
            self._began_s, self._came, room = time.monotonic(), len(data), 0
            why: PortusError | None = None
            while (event := self.connection.feed(data)) is None:
                wanted, left = self.connection.wanted_bytes, self.connection.body_left
                if why is None and room < wanted and left > FREE:
                    # As it arrives: a header that announces much takes no memory yet. Twice:
                    # decoding copies it.
                    why = self.account.excess(2 * (left - room)) or self._take(2 * (wanted - room))
                    room = wanted
                    if why is not None:
                        # Read and discarded, so that the refusal can be sent; a cut connection
                        # would explain nothing.
                        self.connection.forget(why)
                        self.account.give_back()
                data = self._get(self.connection.wanted_bytes)
                room = max(0, room - len(data))
                self._came += len(data)
                self._check_message_pace()
            self._began_s = math.inf
        if isinstance(event, Said):
            self._payload_s, self._payload_came = 0.0, 0
        return event

    def ask(self, message: Said, silence_s: float | None = None) -> Said:
        """Send a message, and return the answer. silence_s: for an answer that may take longer."""
        self.send(message)
        return self.hear(silence_s)

    def hear(self, silence_s: float | None = None) -> Said:
        """Return the next message, where no payload is due. silence_s: as in ``ask``."""
        usual_s = self.silence_s
        self.silence_s = silence_s or usual_s
        try:
            event = self.receive()
        finally:
            self.silence_s = usual_s
        if not isinstance(event, Said):
            self.close()
            raise ProtocolError(f"{self.name}: payload came in place of an answer")
        return event

    def send_payload(self, kind: MessageKind, data: memoryview) -> None:
        """Send one frame of plain bytes, which do not change meanwhile."""
        with self._or_end():
            self._put(memoryview(self.connection.send_payload(kind, len(data))))
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE]
                self._put(piece)
                self._put(memoryview(self.connection.note_sent(piece)))

    def fill(self, target: memoryview) -> None:
        """Fill ``target`` with payload, from as many frames as it takes.

        Raises a refusal that comes in its place as an error; the link can still be used then.
        """
        # The work of this side between two calls is not the other side's doing.
        done, began_s = 0, time.monotonic() - self._payload_s
        while done < len(target):
            if not self.connection.payload_left:
                event = self.receive()
                if isinstance(event, Said):
                    raise error_of(event)
            length = min(self.connection.payload_left, len(target) - done, PIECE)
            piece, came = target[done : done + length], 0
            with self._or_end():
                while came < length:
                    # One call fills as much as arrives before the short wait ends.
                    count = self._receive_some(piece[came:], socket.MSG_WAITALL)
                    came += count
                    self._payload_came += count
                    self._payload_s = time.monotonic() - began_s
                    if not self._is_client:  # it trusts its host, which may be slow
                        self._check_pace(self._payload_s, self._payload_came)
                self.connection.took(piece)
                while self.connection.digest_due:
                    self.connection.feed(self._get(self.connection.wanted_bytes))
            self.taken += length
            done += length

    def close(self) -> None:
        """Close the socket, and wake a thread that waits in a call of this link. A second call does
        nothing."""
        self.closed = True
        work = self._work
        if work is not None:
            work.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()

    def leave(self) -> None:
        """Close this process's descriptor, in a forked child. The conversation continues in the
        parent."""
        self.closed = True
        os.close(self._socket.detach())

    @property
    def host(self) -> str:
        """The address of this end, such as 10.0.0.1; "" for a unix socket."""
        name = self._socket.getsockname()
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def secret(self) -> bool:
        """True if nobody on the way can read the messages: TLS."""
        return isinstance(self._socket, ssl.SSLSocket)

    def has_word(self, timeout_s: float = 0.0) -> bool:
        """Return True if the other side sent something, or hung up. Consumes no data."""
        with self._or_end():
            number = self._socket.fileno()
            if number < 0:
                raise EndedError(f"{self.name}: the connection was closed")
            asking = select.poll()
            asking.register(number, select.POLLIN)
            return bool(asking.poll(timeout_s * 1000))

    def is_silent(self, limit_s: float) -> bool:
        """Return True if the other side sends nothing for ``limit_s``. Consumes no data. Raises as
        ``send``."""
        since_s = time.monotonic()
        while not self.has_word(_POLL_S):
            if time.monotonic() - since_s > limit_s:
                return True
            with self._or_end():
                self.pause(since_s, math.inf)
        return False

    def is_alive(self) -> bool:
        """Return False if the other side has hung up. Only while nothing is due from it."""
        if self.closed:
            return False
        try:
            # A peer that keeps to the protocol sends nothing now: any byte ends the link.
            self._socket.setblocking(False)
            self._socket.recv(1)
            return False
        except (BlockingIOError, ssl.SSLWantReadError):
            _wait_shortly(self._socket)
            return True
        except OSError:
            return False

    @contextlib.contextmanager
    def _or_end(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            if isinstance(error, SilentError):
                self.silence = error
            if isinstance(error, TransportError):
                raise
            raise EndedError(f"{self.name}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _get(self, length: int, limit_s: float | None = None) -> memoryview:
        data = memoryview(bytearray(length))
        return data[: self._receive_some(data, 0, limit_s)]

    def _receive_some(self, target: memoryview, flags: int, limit_s: float | None = None) -> int:
        since_s = time.monotonic()
        while True:
            try:
                if isinstance(self._socket, ssl.SSLSocket):
                    # Python's TLS sockets accept no flags.
                    count = self._socket.recv_into(target)
                else:
                    count = self._socket.recv_into(target, 0, flags)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                self.pause(since_s, limit_s)
                continue
            if count == 0:
                raise EndedError(f"{self.name}: the connection ended")
            return count

    def _put(self, data: memoryview) -> None:
        done, began_s = 0, time.monotonic()
        since_s = began_s
        while done < len(data):
            try:
                count = self._socket.send(data[done:])
            except (BlockingIOError, TimeoutError, ssl.SSLWantWriteError):
                self.pause(since_s)
                continue
            done += count
            since_s = time.monotonic()
            took_s = since_s - began_s
            # On average: a byte now and then must not count as progress for ever.
            if took_s > self.silence_s + done / _BYTES_S_MIN:
                raise SilentError(f"{self.name}: it took {done} bytes in {took_s:.0f} s")

    def room(self, size: int) -> None:
        """Take memory for work on the last message received, until ``give_back``. Raises as
        ``send``, ``TransportError`` if none became free for long, and ``UsageError`` if it exceeds
        the limit; then the link can still be used."""
        why = self._take(size) if size > FREE else None
        if why is not None:
            raise why

    def scratch(self, size: int) -> int:
        """Return the bytes to use for a buffer of payload: ``size`` if memory is free at once, else
        a few."""
        if size <= FREE or (self.account.excess(size) is None and self.account.take(size, 0)):
            return size
        return FREE

    def _take(self, size: int) -> PortusError | None:
        """Take passing memory; return the error if there is none."""
        since_s, began_s = time.monotonic(), self._began_s
        self._began_s = math.inf  # the other side does not cause this wait
        why: PortusError | None = self.account.excess(size)
        while why is None and not self.account.take(size, _POLL_S):
            with self._or_end():
                self.pause(since_s, math.inf)
                if self.has_hung_up:
                    raise EndedError(f"{self.name}: the connection ended")
            if time.monotonic() - since_s > self.silence_s:
                why = self.account.busy(size)
        self._began_s = began_s + time.monotonic() - since_s
        return why

    def _check_message_pace(self) -> None:
        self._check_pace(time.monotonic() - self._began_s, self._came)

    def _check_pace(self, took_s: float, came: int) -> None:
        """Raise ``SilentError`` if the other side is too slow: ``came`` bytes took ``took_s``."""
        if took_s > self.silence_s + came / _BYTES_S_MIN:
            raise SilentError(f"{self.name}: {came} bytes took {took_s:.0f} s")
        if took_s > _WANTED_S + came / _WANTED_BYTES_S_MIN and self.account.is_wanted:
            raise SilentError(
                f"{self.name}: {came} bytes took {took_s:.0f} s, and others wait for the memory"
            )

    def pause(self, since_s: float, limit_s: float | None = None) -> None:
        """Raise between two short waits if the wait has to end. limit_s: None: ``silence_s``."""
        if self._stop is not None:
            self._stop.check()
        if self.closed:
            raise EndedError(f"{self.name}: the connection was closed")
        if self._began_s != math.inf:
            self._check_message_pace()
        waited_s = time.monotonic() - since_s
        if waited_s > (self.silence_s if limit_s is None else limit_s):
            raise SilentError(f"{self.name}: no progress for {waited_s:.0f} s")

    def watch(self, since_s: float) -> None:
        """Raise as ``pause`` does, and if the client has hung up, or says something, which it may
        not now: ``EndedError``, ``ProtocolError``."""
        self.pause(since_s)
        if self.has_word():
            try:
                self.hear()
            except EndedError as error:
                raise EndedError(f"{self.name}: the client is gone: {error}") from error


_ALL: Final[weakref.WeakSet[Link]] = weakref.WeakSet()


def _leave_all() -> None:
    # A loader worker that kept them would hide from the host that its trainer was killed.
    for link in list(_ALL):
        if not link.closed:
            link.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


class _Work(Stop):
    """The stop of work for the other side of a link, set when that side has hung up."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link: Final = link

    def check(self) -> None:
        if self._link.has_hung_up:
            self.set()
        super().check()


def give(link: Link, sources: Sources, stop: Stop) -> Digests:
    """Send sources of this process as DATA, end to end. Return the digests of what was sent."""
    whole = (np.zeros(1, np.int64), np.array([sources.size]))
    placed = replace(sources, extent_offset=whole[0], extent_length=whole[1])
    return copy(cast(Medium, _Outgoing(link)), placed, stop)


class _Outgoing:
    """A link as the place of a copy, which is stored from its beginning to its end."""

    def __init__(self, link: Link) -> None:
        self._link: Final = link

    def store(self, offset: int, data: memoryview) -> None:
        """Send the next bytes: a copy, which is what was hashed (V2)."""
        self._link.send_payload(DATA, data)


def take(
    link: Link,
    segments: Segments,
    digests: Digests,
    stop: Stop,
    medium: Medium | None = None,
    crcs: Crcs | None = None,
) -> None:
    """Fill segments with payload, and note the digests of what arrived there, and in ``crcs`` its
    CRC32s: segments of this process, or of ``medium``, a pool, straight where it has addresses.
    """
    scratch = np.empty(link.scratch(min(GATHER, segments.size)), np.uint8)
    for batch in segments.batches(len(scratch)):
        stop.check()
        if batch.size > len(scratch):
            _take_unit(link, batch, digests, scratch.data, medium, crcs)
            stop.add(batch.size)
            continue
        link.fill(scratch.data[: batch.size])
        start_s = time.perf_counter()
        place = scratch.ctypes.data + np.cumsum(batch.length) - batch.length
        if medium is None:
            best_engine().move(replace(batch, address=place), batch.address, digests, stop, crcs)
        else:
            store(medium, batch, place, digests, crcs, stop)
        link.hash_s += time.perf_counter() - start_s


def store(
    medium: Medium,
    batch: Segments,
    place: Column,
    digests: Digests,
    crcs: Crcs | None,
    stop: Stop,
) -> None:
    """Copy segments, which are at ``place``, to their offsets in a pool, and note the digests and
    CRC32s of their units."""
    rows = np.unique(batch.row)
    sums = np.zeros(len(rows), np.uint32)
    digests[rows] = copy(medium, batch.sources_at(place), stop, crcs=sums)
    if crcs is not None:
        crcs[rows] = sums


def _take_unit(
    link: Link,
    unit: Segments,
    digests: Digests,
    scratch: memoryview,
    medium: Medium | None,
    crcs: Crcs | None,
) -> None:
    """Receive one big unit piece by piece, and hash each while the cache has it."""
    hasher, crc, pieces = xxhash.xxh3_128(), 0, unit.pieces(min(PIECE, len(scratch)))
    mapped = medium if isinstance(medium, MappedMedium) else None
    columns = (pieces.address, pieces.offset, pieces.length)
    for address, offset, length in zip(*(each.tolist() for each in columns), strict=True):
        target = scratch[:length]
        if mapped is not None:
            target = memory(mapped.address(Extent(offset, length)), length)
        elif medium is None:
            target = memory(address, length)
        try:
            link.fill(target)
        finally:
            if mapped is not None:
                mapped.wrote(Extent(offset, length))
        start_s = time.perf_counter()
        hasher.update(target)
        if crcs is not None:
            crc = isal_zlib.crc32(target, crc)
        link.hash_s += time.perf_counter() - start_s
        if medium is not None and mapped is None:
            medium.store(offset, target)
    digests[unit.row[0]] = np.frombuffer(hasher.digest(), np.uint8)
    if crcs is not None:
        crcs[unit.row[0]] = crc


def give_from(link: Link, medium: Medium, offsets: Column, lengths: Column) -> None:
    """Send bytes of a pool as BYTES. They are loaded, never read through a mapping: so a bad sector
    raises an error, and does not end the process."""
    longest = int(lengths.max()) if len(lengths) else 0
    scratch = memoryview(bytearray(link.scratch(min(GATHER, longest))))
    for row in np.flatnonzero(lengths).tolist():
        offset, length = int(offsets[row]), int(lengths[row])
        for start in range(0, length, len(scratch)):
            piece = scratch[: length - start]
            medium.load(offset + start, piece)
            link.send_payload(BYTES, piece)


def drain(link: Link, size: int) -> None:
    """Receive ``size`` bytes of payload, and discard them."""
    scratch = memoryview(bytearray(min(size, PIECE)))
    while size:
        piece = scratch[:size]
        link.fill(piece)
        size -= len(piece)


def _wait_shortly(link: socket.socket) -> None:
    if isinstance(link, ssl.SSLSocket):
        link.settimeout(_POLL_S)
        return
    # Not settimeout: the socket stays a blocking one, so that one call can fill a whole piece.
    link.settimeout(None)
    interval = struct.pack("@ll", 0, int(_POLL_S * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)


def _prepare(link: socket.socket) -> None:
    """Set short waits, immediate sending of small messages, and keepalive."""
    _wait_shortly(link)
    if link.family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not every system has them all
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL):
            raise


assert PIECE <= PAYLOAD_SIZE_MAX
