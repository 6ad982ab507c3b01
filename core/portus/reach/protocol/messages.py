"""The messages, each declared once. A message that breaks its declaration is a ``ProtocolError``,
never worse.

Above each class: its number and name, the states in which it is sent, and the one that follows. The
limits of its fields limit its body.

Columns of numbers travel as bytes: little-endian int64, one after another (``pack_column``).
Digests travel as 16 bytes each, one after another. Fields are encoded by msgpack, as an array in
the order given here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from portus.errors import (
    BusyError,
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
    printable,
)
from portus.reach.protocol.vocabulary import MessageKind, Phase, Vocabulary

VERSION: Final = 10
"""The version of the protocol. A host refuses a greeting of another version, and names this one."""

MAGIC: Final = "portus"
UNIT: Final = 16 << 20
"""Bytes of a storage under one digest; as in the format, which this floor does not know."""
DIGEST_SIZE: Final = 16
TOKEN_SIZE: Final = 16
HANDLE_SIZE: Final = 16
"""Bytes of the handle of a storage: its address and its key, two numbers; zeros if it has none."""

NONCE_SIZE: Final = TOKEN_SIZE
# Of an HMAC with SHA-256.
PROOF_SIZE: Final = 32
TENANT_SIZE_MAX: Final = 64
NAME_SIZE_MAX: Final = 200
METRICS_MAX: Final = 64
"""Metrics of one version, at most."""
METRICS_SIZE_MAX: Final = 64 << 10
KEEP_SIZE_MAX: Final = 1 << 10
TEXT_SIZE_MAX: Final = 4096
STORAGES_MAX: Final = 1 << 20
"""Storages of one version, or of one message about storages, at most."""
RANGES_MAX: Final = 1 << 21
"""Extents in one message."""
UNITS_MAX: Final = 1 << 22
"""Digests in one message: 64 TiB in units of 16 MiB."""
IDS_MAX: Final = 1 << 16
CONTENTS_SIZE_MAX: Final = 1 << 30
SIZE_MAX: Final = 1 << 62
PAYLOAD_SIZE_MAX: Final = UNIT
"""Bytes after one header of payload, at most."""


class ProtocolError(TransportError):
    """The other side sent a wrong message, or one not allowed now. The connection is unusable."""


MESSAGES: Final = Vocabulary()
"""All messages."""


class Fault(enum.Enum):
    """The kind of a refusal, which decides the error that the client raises."""

    BUSY = "busy"
    MEDIUM = "medium"
    USAGE = "usage"
    STALE = "stale"
    CORRUPTION = "corruption"
    TRANSPORT = "transport"
    FULL = "full"

    @classmethod
    def of(cls, error: PortusError) -> Fault:
        """Return the kind of an error of the host."""
        found = (each for each, kind in _ERRORS.items() if isinstance(error, kind))
        return next(found, cls.TRANSPORT)

    def error(self, number: int, text: str) -> PortusError:
        """Return the error that a client raises. number: an errno, which some have."""
        kind = _ERRORS[self]
        return kind(number, text) if issubclass(kind, MediumError) else kind(text)


_ERRORS: Final[dict[Fault, type[PortusError]]] = {
    Fault.BUSY: BusyError,
    Fault.MEDIUM: MediumError,
    Fault.USAGE: UsageError,
    Fault.STALE: StaleError,
    Fault.CORRUPTION: CorruptionError,
    Fault.TRANSPORT: TransportError,
    Fault.FULL: MediumError,  # ``of`` finds MEDIUM first
}

Column = npt.NDArray[np.int64]
Number = Annotated[int, Meta(ge=0, le=SIZE_MAX)]
Token = Annotated[bytes, Meta(min_length=TOKEN_SIZE, max_length=TOKEN_SIZE)]
Proof = Annotated[bytes, Meta(max_length=PROOF_SIZE)]
Text = Annotated[str, Meta(max_length=TEXT_SIZE_MAX)]
Indices = Annotated[bytes, Meta(max_length=8 * STORAGES_MAX)]
Ranges = Annotated[bytes, Meta(max_length=16 * RANGES_MAX)]
Digests = Annotated[bytes, Meta(max_length=DIGEST_SIZE * UNITS_MAX)]
Sums = Annotated[bytes, Meta(max_length=4 * UNITS_MAX)]
Ids = Annotated[bytes, Meta(max_length=8 * IDS_MAX)]
Handles = Annotated[bytes, Meta(max_length=HANDLE_SIZE * STORAGES_MAX)]


@MESSAGES.message(1, "HELLO", {Phase.NEW: Phase.GREETED})
class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a client. Its frame, that of a refusal, and these fields stay the same
    in every version; others may follow them."""

    kind: ClassVar[MessageKind]
    magic: Annotated[str, Meta(max_length=16)]
    version: Number
    tenant: Annotated[str, Meta(min_length=1, max_length=TENANT_SIZE_MAX)]
    nonce: Token


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Any message but the first: no field too many, none missing."""

    kind: ClassVar[MessageKind]


@MESSAGES.message(64, "CHALLENGE", {Phase.GREETED: Phase.CHALLENGED})
class Challenge(Message, frozen=True):
    """The host's challenge. ``secret``: the host wants a proof."""

    nonce: Token
    secret: bool


@MESSAGES.message(2, "PROOF", {Phase.CHALLENGED: Phase.PROVING})
class ClientProof(Message, frozen=True):
    """The client's proof; empty if no secret is shared."""

    proof: Proof


@MESSAGES.message(65, "WELCOME", {Phase.PROVING: Phase.READY})
class Welcome(Message, frozen=True):
    """The host's own proof, and the pool of the tenant: its identity, name and granularity.
    ``verbs``: the host can access memory of this client directly, once connected (``Connect``)."""

    proof: Proof
    uuid: Token
    name: Text
    volatile: bool
    granularity: Number
    verbs: bool


class _QueuePair(Message, frozen=True):
    """One end of a reliable connection: its number and first packet sequence number, its address
    (``gid``, and ``lid`` on InfiniBand), the code of its largest path MTU (1 to 5: 256 to 4096
    bytes), and how many reads of the other side it serves at the same time."""

    number: Annotated[int, Meta(ge=0, lt=1 << 24)]
    sequence: Annotated[int, Meta(ge=0, lt=1 << 24)]
    gid: Token
    lid: Annotated[int, Meta(ge=0, lt=1 << 16)]
    mtu: Annotated[int, Meta(ge=1, le=5)]
    reads: Annotated[int, Meta(ge=0, le=255)]


@MESSAGES.message(20, "CONNECT")
class Connect(_QueuePair, frozen=True):
    """The client's queue pair for this connection, in place of an earlier one."""


@MESSAGES.message(78, "CONNECTED")
class Connected(_QueuePair, frozen=True):
    """The host's queue pair, which is ready."""


@MESSAGES.message(19, "CLAIM")
class Claim(Message, frozen=True):
    """A request to be the only client that saves ``model``, as long as one of its connections
    lives. ``client``: the same 16 bytes on all of them. ``second``: this is the second of two
    hosts: only if a first one has led the model here."""

    model: Annotated[str, Meta(min_length=1, max_length=NAME_SIZE_MAX)]
    client: Token
    second: bool = False


@MESSAGES.message(5, "BEGIN")
class Begin(Message, frozen=True):
    """A save of storages of these lengths. ``handles``: for a transport that accesses them
    directly, one of each, valid as long as the save lives; empty on a stream. ``term``: of a first
    host, which copies the version, the term in which it leads the model, and the ``commit`` of the
    version in its pool; 0: a client with a claim saves."""

    model: Annotated[str, Meta(min_length=1, max_length=NAME_SIZE_MAX)]
    step: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    token: Token
    lengths: Indices
    handles: Handles = b""
    term: Number = 0
    commit: Number = 0


@MESSAGES.message(6, "OFFER")
class Offer(Message, frozen=True):
    """A request to pull these storages. It may be made again if it is refused as ``Fault.FULL``."""

    indices: Indices


@MESSAGES.message(68, "PULL", {Phase.ASKED: Phase.PULLING})
class Pull(Message, frozen=True):
    """The host's request, on a stream, for the offered storages, end to end."""


@MESSAGES.message(69, "HASHED", {Phase.ASKED: Phase.READY, Phase.PULLING: Phase.READY})
class Hashed(Message, frozen=True):
    """A report that all of an offer is stored, or all is pushed, or checked, with the digests of
    its units, as the host found them. ``bounced``: bytes that went through a buffer of the host,
    not straight between the pool and the client. ``crcs``: of an offer, the CRC32s of the units,
    which the client needs for the directory of a zip; 4 bytes each."""

    digests: Digests
    bounced: Number = 0
    crcs: Sums = b""


@MESSAGES.message(8, "SHARE")
class Share(Message, frozen=True):
    """A request to reuse these storages of the version ``before``, a token, which by their digests
    are the same."""

    before: Token
    indices: Indices


@MESSAGES.message(9, "CONFIRM")
class Confirm(Message, frozen=True):
    """The request to commit: all storages are pulled or shared, and ``digests`` are those that the
    client computed itself.
    ``keep``: which versions of the model stay; the same commit removes the others, and an older one
    of the same step (``pack_map``;
    empty: all stay). ``inexact``: another process wrote to the state meanwhile. ``metrics``: the
    scores of the version (``pack_map``). ``gone``: tokens, 16 bytes each, of more versions that the
    same commit removes."""

    digests: Digests
    contents: Annotated[bytes, Meta(max_length=CONTENTS_SIZE_MAX)]
    keep: Annotated[bytes, Meta(max_length=KEEP_SIZE_MAX)]
    inexact: bool = False
    # Bytes: a name in a body of this size could take four times as much memory as the body.
    metrics: Annotated[bytes, Meta(max_length=METRICS_SIZE_MAX)] = b""
    gone: Annotated[bytes, Meta(max_length=16 * IDS_MAX)] = b""


@MESSAGES.message(71, "COMMITTED")
class Committed(Message, frozen=True):
    """A report that the version is durable. ``record``: the payload of its record."""

    record: Annotated[bytes, Meta(max_length=2 << 30)]


@MESSAGES.message(10, "ABANDON")
class Abandon(Message, frozen=True):
    """The end of the save under way, if there is one, without a version."""


@MESSAGES.message(11, "READ")
class Read(Message, frozen=True):
    """A request for bytes of the pool, as pairs of offset and length."""

    ranges: Ranges


@MESSAGES.message(12, "CHECK")
class Check(Message, frozen=True):
    """A request for the digests of storages of ``lengths`` that lie in ``ranges``, end to end."""

    lengths: Indices
    ranges: Ranges


@MESSAGES.message(21, "PUSH")
class Push(Message, frozen=True):
    """A request to write storages of these lengths, end to end in the ranges, into the client's
    memory, with one handle for each."""

    lengths: Indices
    ranges: Ranges
    handles: Handles


@MESSAGES.message(13, "PIN")
class Pin(Message, frozen=True):
    """A request to keep the space of a version from reuse, as long as this connection lives."""

    version: Number


@MESSAGES.message(14, "UNPIN")
class Unpin(Message, frozen=True):
    """A request to take one pin back."""

    version: Number


@MESSAGES.message(16, "RETIRE")
class Retire(Message, frozen=True):
    """A request to retire versions, by their tokens, 16 bytes each. ``term``: of a first host, the
    term in which it leads ``model``; 0: of a client."""

    tokens: Annotated[bytes, Meta(max_length=16 * IDS_MAX)]
    model: Annotated[str, Meta(max_length=NAME_SIZE_MAX)] = ""
    term: Number = 0


@MESSAGES.message(17, "STATUS")
class Status(Message, frozen=True):
    """A request for the state of the pool."""


@MESSAGES.message(24, "GIVE_BACK")
class GiveBack(Message, frozen=True):
    """A request to return unreached space of the pool to the file system."""


@MESSAGES.message(25, "NOTE")
class Note(Message, frozen=True):
    """A request to record which save failed last, when and why, in words."""

    text: Text


@MESSAGES.message(31, "SETTLE")
class Settle(Message, frozen=True):
    """A request to answer once the replica has the version of this token too; zeros: once the host
    leads the model."""

    model: Annotated[str, Meta(min_length=1, max_length=NAME_SIZE_MAX)]
    token: Token


@MESSAGES.message(27, "LEAD")
class Lead(Message, frozen=True):
    """A request of a first host: let ``pool`` lead the model in a new term, if its last term is
    ``term``, and its newest version here that of the token ``newest`` (zeros: there is none).
    ``commit``: that of the newest version there which is copied here. ``who``: for messages; empty
    for a client, which has a pool of zeros: that only asks."""

    model: Annotated[str, Meta(min_length=1, max_length=NAME_SIZE_MAX)]
    pool: Token
    commit: Number
    who: Annotated[str, Meta(max_length=NAME_SIZE_MAX)]
    term: Number
    newest: Token


@MESSAGES.message(81, "LED")
class Led(Message, frozen=True):
    """The answer to ``Lead``: who leads the model now, and whether that was ``granted`` by this
    request. ``term``: 0 if no host has led it. ``commit``: that of the newest version
    that was copied from the leader's pool, there."""

    granted: bool
    pool: Token
    commit: Number
    who: Annotated[str, Meta(max_length=NAME_SIZE_MAX)]
    term: Number
    newest: Token


@MESSAGES.message(76, "STATE")
class Standing(Message, frozen=True):
    """The state of the pool: its bytes, the free ones, and how many saves are under way. ``holes``:
    more bytes that are free, but were returned to the file system. ``taken``: bytes that the pool
    takes of it, 0 if it is on none."""

    size: Number
    free: Number
    saves: Number
    holes: Number
    taken: Number


@MESSAGES.message(66, "DONE")
class Done(Message, frozen=True):
    """A report that the request is done. ``granted``: False if a ``Share`` cannot reuse the
    bytes."""

    granted: bool = True


@MESSAGES.message(
    77,
    "REFUSED",
    {
        Phase.GREETED: Phase.CLOSED,
        Phase.PROVING: Phase.CLOSED,
        Phase.ASKED: Phase.READY,
        Phase.PULLING: Phase.READY,
    },
)
class Refused(Message, frozen=True):
    """A refusal of the request. It ends the save under way, unless it is one of an offer for which
    there is no room (``Fault.FULL``)."""

    fault: Fault
    errno: Number
    text: Text


@MESSAGES.message(18, "BYE", {Phase.READY: Phase.CLOSED})
class Bye(Message, frozen=True):
    """The end of the conversation: the client has no more requests."""


Said = Hello | Message
Expected = TypeVar("Expected", bound=Message)

DATA: Final = MESSAGES.payload(
    7, "DATA", {Phase.PULLING: Phase.PULLING}, PAYLOAD_SIZE_MAX, has_digest=False
)
"""The bytes of an offer, which the client sends on a stream. Both ends compare the digests of their
units before they count: a digest of the frame would hash each byte twice."""
BYTES: Final = MESSAGES.payload(
    74, "BYTES", {Phase.ASKED: Phase.ASKED}, PAYLOAD_SIZE_MAX, has_digest=True
)
"""The bytes of a read."""

_encoder: Final = msgspec.msgpack.Encoder()
_map_decoders: Final[dict[str, msgspec.msgpack.Decoder[dict[str, Any]]]] = {
    "metrics": msgspec.msgpack.Decoder(Annotated[dict[str, float], Meta(max_length=METRICS_MAX)]),
    "keep": msgspec.msgpack.Decoder(dict[str, Any]),
}
_decoders: Final = {
    kind: msgspec.msgpack.Decoder(kind.type) for kind in MESSAGES if kind.type is not None
}


def expect(answer: Said, kind: type[Expected], at: str = "") -> Expected:
    """Return ``answer`` if it is of that kind. Raise the error of ``error_of`` for any other."""
    if not isinstance(answer, kind):
        raise error_of(answer, at)
    return answer


def error_of(answer: Said, at: str = "") -> PortusError:
    """Return the error that a refusal stands for; for any other message, that it was not expected.
    at: the beginning of the error's text.

    Any process that listens there may refuse a greeting, without any proof. So its text is made
    ``printable``.
    """
    if not isinstance(answer, Refused):
        return ProtocolError(f"{answer.kind.name} was not expected")
    text = f"{at}the storage host says: {printable(answer.text)}"
    return answer.fault.error(answer.errno, text)


def encode(message: Said) -> bytes:
    """Return the body of a frame."""
    return _encoder.encode(message)


def decode(kind: MessageKind, body: bytes | bytearray) -> Said:
    """Return the message of a body. Raise ``ProtocolError`` if it is wrong."""
    try:
        found: Said = _decoders[kind].decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"{kind.name} of {len(body)} bytes: {error}") from error
    return found


def pack_column(numbers: npt.ArrayLike) -> bytes:
    """Return numbers for the wire."""
    return np.asarray(numbers, "<i8").tobytes()


def column(data: bytes, what: str) -> Column:
    """Return numbers from the wire, none negative or too big. Raise ``ProtocolError``."""
    [numbers] = _columns(data, 1, what)
    return numbers


def ranges(data: bytes, what: str) -> tuple[Column, Column]:
    """Return offsets and lengths from the wire. Raise ``ProtocolError`` if they are wrong."""
    offsets, lengths = _columns(data, 2, what)
    return offsets, lengths


def _columns(data: bytes, count: int, what: str) -> list[Column]:
    """Return ``count`` columns, the last of which can be summed."""
    if len(data) % (8 * count):
        raise ProtocolError(f"{what}: {len(data)} bytes are not a column of numbers, or {count}")
    rows = np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, count)
    found = [np.ascontiguousarray(each) for each in rows.T]
    # Half of the limit, so that an offset plus a length stays below it.
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) > SIZE_MAX // 2):
        raise ProtocolError(f"{what}: found a number out of range")
    # Callers sum these numbers, and the sums must not wrap around.
    if float(found[-1].sum(dtype=np.float64)) > SIZE_MAX:
        raise ProtocolError(f"{what}: the sum of the numbers is too large")
    return found


def pack_pairs(left: npt.ArrayLike, right: npt.ArrayLike) -> bytes:
    """Return two columns for the wire, row by row: ranges of these offsets and lengths, or handles
    with these addresses and keys."""
    return np.stack([np.asarray(left, "<i8"), np.asarray(right, "<i8")], axis=1).tobytes()


def handles(data: bytes, count: int, what: str) -> tuple[Column, Column]:
    """Return addresses and keys of ``count`` storages from the wire; all zero if ``data`` is empty.
    Raise ``ProtocolError`` if they are wrong."""
    if not data:
        return np.zeros(count, np.int64), np.zeros(count, np.int64)
    if len(data) != HANDLE_SIZE * count:
        raise ProtocolError(f"{what}: {len(data)} bytes are not {count} handles")
    addresses, keys = ranges(data, what)
    if len(keys) and int(keys.max()) >= 1 << 32:
        raise ProtocolError(f"{what}: found a key out of range")
    return addresses, keys


def pack_map(values: Mapping[str, object]) -> bytes:
    """Return a map for the wire: in msgpack, or nothing if it is empty."""
    return _encoder.encode(dict(values)) if values else b""


def unpack_map(data: bytes, what: str) -> dict[str, Any]:
    """Return ``metrics``, or the fields of a ``keep``, from the wire. Raise ``ProtocolError``."""
    try:
        return _map_decoders[what].decode(data) if data else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"{what} of {len(data)} bytes: {error}") from error


def digest_rows(data: bytes, what: str) -> npt.NDArray[np.uint8]:
    """Return digests from the wire, (n, 16). Raise ``ProtocolError`` if they are wrong."""
    if len(data) % DIGEST_SIZE:
        raise ProtocolError(f"{what}: {len(data)} bytes are not digests")
    return np.frombuffer(data, np.uint8).reshape(-1, DIGEST_SIZE)


def sum_rows(data: bytes, count: int) -> npt.NDArray[np.uint32]:
    """Return ``count`` CRC32s from the wire. Raise ``ProtocolError`` if there are not as many."""
    if len(data) != 4 * count:
        raise ProtocolError(f"pulled: {len(data)} bytes are not {count} CRC32s")
    return np.frombuffer(data, "<u4").astype(np.uint32)
