"""One end of a conversation, without I/O: bytes in, messages out; messages in, bytes out.

A frame is a header of 8 bytes (length of the body, uint32; kind, uint8; a check of these two), a
body, and a digest of both (``DATA`` has none). ``wanted_bytes`` says how many bytes to feed next,
never more than belong to this frame. So a reader can receive payload straight into its destination,
past this object, which is only shown the bytes (``took``).

Digests of tensors do not cover messages: one changed byte on plain tcp made a learning rate 0.925
instead of 0.125, and the version was committed, loaded and verified. So every message has a digest.

After a ``ProtocolError`` the connection is unusable, and every call says so.

The order of messages. A connection carries one conversation. The client asks and the host answers,
one request at a time, so each end always knows the state of the other. Payload belongs to a
request: a read is answered by BYTES, and an offer on a stream by PULL, after which the client sends
DATA. A message that is not allowed in a state is an error of its sender.

A save is several requests, and the host knows which one is under way. Only CONFIRM makes a version:
a connection that ends before it, however it ends, leaves nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from portus.errors import PortusError
from portus.reach.protocol.messages import (
    DIGEST_SIZE,
    MESSAGES,
    ProtocolError,
    Said,
    decode,
    encode,
)
from portus.reach.protocol.vocabulary import MessageKind, Phase

HEADER: Final = struct.Struct("<IB3s")
_START: Final = struct.Struct("<IB")
_FEED_MAX: Final = 1 << 20
"""Bytes to ask for at a time: memory is taken when bytes arrive, not when announced."""


@dataclass(frozen=True, slots=True)
class Payload:
    """An event: ``length`` plain bytes follow."""

    kind: MessageKind
    length: int


@dataclass(frozen=True, slots=True)
class SkippedMessage:
    """An event: a message was received and discarded, for the reason ``why``
    (``Connection.forget``)."""

    kind: MessageKind
    why: PortusError


Event = Said | Payload | SkippedMessage


class Connection:
    """One end of a connection: that of the client if ``is_client``."""

    def __init__(self, *, is_client: bool) -> None:
        self.state = Phase.NEW
        self._is_client: Final = is_client
        self._buffer = bytearray()
        self._kind: MessageKind | None = None
        self._length = 0
        self.payload_left = 0
        """Bytes of payload that are still to be received."""
        self._forgotten = 0
        self._why: PortusError | None = None
        self._owed = 0
        self._owes_digest = False
        self._broken = ""
        self._came = xxhash.xxh3_128()
        self._went = xxhash.xxh3_128()

    @property
    def wanted_bytes(self) -> int:
        """Bytes to feed next, at most; over 0, unless payload is due."""
        if self.payload_left:
            return 0
        whole = HEADER.size if self._kind is None else self._length
        return min(whole - self._fed_bytes, _FEED_MAX)

    @property
    def digest_due(self) -> bool:
        """True when payload was received, and its digest must be fed before it counts."""
        return self._kind is not None and self._kind.is_payload and not self.payload_left

    @property
    def body_left(self) -> int:
        """Bytes of a message after its header that are still to be fed."""
        return 0 if self._kind is None else self._length - self._fed_bytes

    @property
    def _fed_bytes(self) -> int:
        return len(self._buffer) + self._forgotten

    def send(self, message: Said) -> bytes:
        """Return the bytes of ``message``. One that the table does not allow is our mistake."""
        body = encode(message)
        assert len(body) <= message.kind.body_size_max, f"{message.kind.name}: {len(body)} bytes"
        self._step_local(message.kind)
        header = self._begin_frame(message.kind, len(body))
        self._went.update(body)
        return header + body + self._went.digest()

    def send_payload(self, kind: MessageKind, length: int) -> bytes:
        """Return the header for ``length`` plain bytes, which the caller sends next."""
        assert kind.is_payload
        assert 0 < length <= kind.body_size_max
        self._step_local(kind)
        self._owed, self._owes_digest = length, kind.has_digest
        return self._begin_frame(kind, length)

    def note_sent(self, data: bytes | memoryview) -> bytes:
        """Note that these bytes of payload were sent, and return the bytes to send after them."""
        assert len(data) <= self._owed
        self._owed -= len(data)
        if not self._owes_digest:
            return b""
        self._went.update(data)
        return b"" if self._owed else self._went.digest()

    def forget(self, why: PortusError) -> None:
        """Discard the message that is being fed, unchecked, since there is no memory for it. A
        ``SkippedMessage`` ends it, which is answered as the message would have been."""
        assert self.body_left, "only in the middle of a body"
        self._why, self._forgotten, self._buffer = why, len(self._buffer), bytearray()

    def feed(self, data: bytes | memoryview) -> Event | None:
        """Take at most ``wanted_bytes`` bytes; return the event that they complete. Raise
        ``ProtocolError`` if they are wrong."""
        if self._broken:
            raise ProtocolError(self._broken)
        assert len(data) <= self.wanted_bytes
        if self._why is None:
            self._buffer += data
        else:
            self._forgotten += len(data)
        try:
            return self._complete()
        except ProtocolError as error:
            # After an error the start of the next frame is unknown.
            self._broken = str(error)
            raise

    def took(self, data: bytes | memoryview) -> None:
        """Note that these bytes of payload were received. A digest may follow the last."""
        assert len(data) <= self.payload_left
        self.payload_left -= len(data)
        if self._kind is not None:
            self._came.update(data)

    def _complete(self) -> Event | None:
        if self._kind is None:
            if len(self._buffer) < HEADER.size:
                return None
            kind, length = self._open()
            self._kind, self._length = kind, length + DIGEST_SIZE
            if kind.is_payload:
                self.payload_left, self._length = length, DIGEST_SIZE
                self._kind = kind if kind.has_digest else None
                self._step(kind)
                return Payload(kind, length)
        if self._fed_bytes < self._length:
            return None
        kind, body, self._kind, self._buffer = self._kind, self._buffer, None, bytearray()
        why, self._why, self._forgotten = self._why, None, 0
        if why is not None:
            self._step(kind)
            return SkippedMessage(kind, why)
        digest = body[-DIGEST_SIZE:]
        del body[-DIGEST_SIZE:]
        self._came.update(body)
        if digest != self._came.digest():
            raise ProtocolError(f"{kind.name}: its digest does not match: bytes changed on the way")
        if kind.is_payload:
            return None
        message = decode(kind, body)
        self._step(kind)
        return message

    def _open(self) -> tuple[MessageKind, int]:
        """Check a whole header before a byte of the body is taken: its message must be allowed
        now."""
        header, self._buffer = bytes(self._buffer), bytearray()
        length, number, check = HEADER.unpack(header)
        expected = _check(header[: _START.size])
        if check != expected:
            raise ProtocolError(
                f"a header: expected {expected.hex()} at its end, found {check.hex()}: bytes "
                "changed on the way, or the other side speaks another version"
            )
        kind = MESSAGES.get(number)
        if kind is None:
            raise ProtocolError(f"a frame of unknown kind {number}")
        if kind.from_client == self._is_client:
            raise ProtocolError(f"{kind.name}: only this side sends it")
        if self.state not in kind.moves:
            raise ProtocolError(f"{kind.name} in state {self.state.value!r}")
        if not 1 <= length <= kind.body_size_max:
            raise ProtocolError(
                f"{kind.name}: expected 1 to {kind.body_size_max} bytes, found {length}"
            )
        # The digest covers the header too: a body cannot pass for that of another kind.
        self._came = xxhash.xxh3_128(header)
        return kind, length

    def _begin_frame(self, kind: MessageKind, length: int) -> bytes:
        """Return the header of a frame to send."""
        start = _START.pack(length, kind.number)
        header = start + _check(start)
        self._went = xxhash.xxh3_128(header)
        return header

    def _step(self, kind: MessageKind) -> None:
        self.state = kind.moves[self.state]

    def _step_local(self, kind: MessageKind) -> None:
        assert not self._owed, f"{kind.name}: {self._owed} bytes of payload are owed first"
        assert kind.from_client == self._is_client, f"{kind.name}: only the other side sends it"
        assert self.state in kind.moves, f"{kind.name} in state {self.state.value!r}"
        self._step(kind)


def _check(start: bytes) -> bytes:
    """Return three bytes that reveal a damaged length or kind at once; never zeros."""
    found = xxhash.xxh3_64(start).digest()
    # Odd, so a header of zeros, or of a version that had no checks, is refused at once.
    return bytes((found[0] | 1, found[1], found[2]))
