"""One end of a conversation, without I/O: bytes in, messages out; messages in, bytes out.

A frame is a header of 8 bytes (length of the body, uint32; kind, uint8; three zero bytes) and a
body. ``wanted`` says how many bytes to feed next, never more than belong to this frame: payload
can so be received by its reader straight into where it goes, past this object, which is only told
how much it was (``took``).

After a ``ProtocolError`` the connection is of no use, and says so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from portus.protocol.messages import (
    PAYLOADS,
    Kind,
    ProtocolError,
    Said,
    body_size_max,
    decode,
    encode,
)
from portus.protocol.session import NEXT, State

HEADER: Final = struct.Struct("<IB3s")
_FEED_MAX: Final = 1 << 20
"""Bytes asked for at once: memory is taken as bytes arrive, not because a header announces them."""


@dataclass(frozen=True, slots=True)
class Payload:
    """So many plain bytes follow."""

    kind: Kind
    length: int


Event = Said | Payload


class Connection:
    """One end. ``is_client``: which."""

    def __init__(self, *, is_client: bool) -> None:
        self.state = State.NEW
        self._is_client: Final = is_client
        self._buffer = bytearray()
        self._kind: Kind | None = None
        self._length = 0
        self._payload_left = 0
        self._owed = 0
        self._broken = ""

    @property
    def wanted(self) -> int:
        """Bytes to feed next, at most; over 0, unless payload is due."""
        if self._payload_left:
            return 0
        whole = HEADER.size if self._kind is None else self._length
        return min(whole - len(self._buffer), _FEED_MAX)

    @property
    def payload_left(self) -> int:
        """Bytes of payload that are still to be received."""
        return self._payload_left

    @property
    def body_left(self) -> int:
        """Bytes of the body of a message that are still to be fed."""
        return 0 if self._kind is None else self._length - len(self._buffer)

    def send(self, message: Said) -> bytes:
        """The bytes of ``message``. An order that the table does not have is our mistake."""
        body = encode(message)
        assert len(body) <= body_size_max(message.kind), f"{message.kind.name}: {len(body)} bytes"
        self._step_local(message.kind)
        return HEADER.pack(len(body), message.kind, bytes(3)) + body

    def send_payload(self, kind: Kind, length: int) -> bytes:
        """The header for ``length`` plain bytes, which the caller sends next."""
        assert kind in PAYLOADS
        assert 0 < length <= body_size_max(kind)
        self._step_local(kind)
        self._owed = length
        return HEADER.pack(length, kind, bytes(3))

    def sent(self, length: int) -> None:
        """So many bytes of payload were sent."""
        assert length <= self._owed
        self._owed -= length

    def feed(self, data: bytes | memoryview) -> Event | None:
        """Take at most ``wanted`` bytes; what they complete. Raises ``ProtocolError``."""
        if self._broken:
            raise ProtocolError(self._broken)
        assert len(data) <= self.wanted
        self._buffer += data
        try:
            return self._complete()
        except ProtocolError as error:
            self._broken = str(error)
            raise

    def took(self, length: int) -> None:
        """So many bytes of payload were received."""
        assert length <= self._payload_left
        self._payload_left -= length

    def _complete(self) -> Event | None:
        if self._kind is None:
            if len(self._buffer) < HEADER.size:
                return None
            kind = self._kind = self._open()
            if kind in PAYLOADS:
                self._kind, self._payload_left = None, self._length
                self._step(kind)
                return Payload(kind, self._length)
        if len(self._buffer) < self._length:
            return None
        kind, body, self._kind, self._buffer = self._kind, self._buffer, None, bytearray()
        message = decode(kind, body)
        self._step(kind)
        return message

    def _open(self) -> Kind:
        """Look at a whole header: before a byte of the body is taken, it has to be one that may
        come now."""
        length, number, zeros = HEADER.unpack(self._buffer)
        self._buffer = bytearray()
        try:
            kind = Kind(number)
        except ValueError as error:
            raise ProtocolError(f"a frame of unknown kind {number}") from error
        if any(zeros):
            raise ProtocolError(f"{kind.name}: expected zeros in the header, found {zeros.hex()}")
        if kind.from_client == self._is_client:
            raise ProtocolError(f"{kind.name}: only this side says it")
        if (self.state, kind) not in NEXT:
            raise ProtocolError(f"{kind.name} in state {self.state.value!r}")
        least = 1
        if not least <= length <= body_size_max(kind):
            raise ProtocolError(
                f"{kind.name}: expected {least} to {body_size_max(kind)} bytes, found {length}"
            )
        self._length = length
        return kind

    def _step(self, kind: Kind) -> None:
        self.state = NEXT[self.state, kind]

    def _step_local(self, kind: Kind) -> None:
        assert not self._owed, f"{kind.name}: {self._owed} bytes of payload are owed first"
        assert kind.from_client == self._is_client, f"{kind.name}: only the other side says it"
        assert (self.state, kind) in NEXT, f"{kind.name} in state {self.state.value!r}"
        self._step(kind)
