"""The messages, and their limits. What is not within them is a ``ProtocolError``, never worse.

Columns of numbers travel as bytes: little-endian int64, one after another (``packed_column``).
Digests travel as 16 bytes each, one after another. Fields are encoded by msgpack, as an array in
the order given here.
"""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from portus.errors import TransportError

VERSION: Final = 6
"""Of the protocol."""

VERSIONS: Final = (5, 6)
"""Those that are spoken: this one, and the one before it. A host refuses a greeting of another one,
and names these."""

DIGESTS_SINCE: Final = 6
"""The version from which on each frame carries a digest."""

MAGIC: Final = "portus"
UNIT: Final = 16 << 20
"""Bytes of a storage under one digest; as in the format, which this floor does not know."""
DIGEST_SIZE: Final = 16
HANDLE_SIZE: Final = 16
"""Of one region: its address and its key, as two numbers; zeros where it has none."""

NONCE_SIZE: Final = 16
PROOF_SIZE: Final = 32
TENANT_SIZE_MAX: Final = 64
NAME_SIZE_MAX: Final = 200
TEXT_SIZE_MAX: Final = 4096
STORAGES_MAX: Final = 1 << 20
"""Of one version, or of one message about storages."""
RANGES_MAX: Final = 1 << 21
"""Extents in one message."""
UNITS_MAX: Final = 1 << 22
"""Digests in one message: 64 TiB in units of 16 MiB."""
IDS_MAX: Final = 1 << 16
HOLD_SIZE_MAX: Final = 128 << 10
"""Of one reference file."""
HELD_SIZE_MAX: Final = 4 << 20
LAYOUT_SIZE_MAX: Final = 256 << 20
TREE_SIZE_MAX: Final = 1 << 30
SIZE_MAX: Final = 1 << 62
PAYLOAD_SIZE_MAX: Final = UNIT
"""Bytes behind one header of payload."""


class ProtocolError(TransportError):
    """The other side said what it may not say, or not now. The connection is of no use any more."""


class Kind(enum.IntEnum):
    """What a frame is. From the client below 64, from the host from 64 on."""

    HELLO = 1
    PROOF = 2
    REGISTER = 3
    FORGET = 4
    BEGIN = 5
    OFFER = 6
    DATA = 7
    SHARE = 8
    CONFIRM = 9
    ABANDON = 10
    READ = 11
    CHECK = 12
    PIN = 13
    UNPIN = 14
    ROOM = 15
    RETIRE = 16
    STATUS = 17
    BYE = 18
    CLAIM = 19
    CONNECT = 20
    PUSH = 21
    HOLD = 22
    HOLDS = 23
    GIVE_BACK = 24
    NOTE = 25
    CHALLENGE = 64
    WELCOME = 65
    DONE = 66
    BEGUN = 67
    PULL = 68
    PULLED = 69
    SHARED = 70
    COMMITTED = 71
    MISSING = 72
    ABANDONED = 73
    BYTES = 74
    CHECKED = 75
    STATE = 76
    REFUSED = 77
    CONNECTED = 78
    PUSHED = 79
    HELD = 80

    @property
    def from_client(self) -> bool:
        """True if a client says it."""
        return self < 64


class Fault(enum.Enum):
    """Whose fault a refusal is: the error that the client raises."""

    USAGE = "usage"
    MEDIUM = "medium"
    BUSY = "busy"
    STALE = "stale"
    CORRUPTION = "corruption"
    TRANSPORT = "transport"


Column = npt.NDArray[np.int64]
Number = Annotated[int, Meta(ge=0, le=SIZE_MAX)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_SIZE, max_length=NONCE_SIZE)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Proof = Annotated[bytes, Meta(max_length=PROOF_SIZE)]
Text = Annotated[str, Meta(max_length=TEXT_SIZE_MAX)]
Indices = Annotated[bytes, Meta(max_length=8 * STORAGES_MAX)]
Ranges = Annotated[bytes, Meta(max_length=16 * RANGES_MAX)]
Digests = Annotated[bytes, Meta(max_length=DIGEST_SIZE * UNITS_MAX)]
Ids = Annotated[bytes, Meta(max_length=8 * IDS_MAX)]
Handles = Annotated[bytes, Meta(max_length=HANDLE_SIZE * STORAGES_MAX)]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The client's first words; ``magic`` and ``version`` stay where they are in every version.
    ``digest``: of the other fields, since its frame has none; empty in versions without."""

    kind: ClassVar[Kind] = Kind.HELLO
    magic: Annotated[str, Meta(max_length=16)]
    version: Number
    tenant: Annotated[str, Meta(min_length=1, max_length=TENANT_SIZE_MAX)]
    nonce: Nonce
    digest: Annotated[bytes, Meta(max_length=DIGEST_SIZE)] = b""

    @classmethod
    def of(cls, tenant: str, nonce: bytes, version: int = VERSION) -> Hello:
        """The greeting of a client that speaks ``version``."""
        blank = cls(MAGIC, version, tenant, nonce)
        return msgspec.structs.replace(blank, digest=blank.expected())

    def expected(self) -> bytes:
        """What its digest has to be."""
        fields = (self.magic, self.version, self.tenant, self.nonce)
        return xxhash.xxh3_128(_encoder.encode(fields)).digest()


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All but the first words: no field too many, none missing."""

    kind: ClassVar[Kind]


class Challenge(Message, frozen=True):
    """``secret``: the host wants a proof."""

    kind: ClassVar[Kind] = Kind.CHALLENGE
    version: Number
    nonce: Nonce
    secret: bool


class ProofGiven(Message, frozen=True):
    """Empty where no secret is shared."""

    kind: ClassVar[Kind] = Kind.PROOF
    proof: Proof


class Welcome(Message, frozen=True):
    """The host's own proof; the pool of the tenant: its identity, name and bytes. ``verbs``: the
    host reaches memory of this client by itself, if it is connected (``Connect``)."""

    kind: ClassVar[Kind] = Kind.WELCOME
    proof: Proof
    uuid: Token
    name: Text
    volatile: bool
    granularity: Number
    verbs: bool


class _QueuePair(Message, frozen=True):
    """One end of a reliable connection: its number and first packet sequence number, where it is
    (``gid``, and ``lid`` on InfiniBand), the code of its largest path MTU (1 to 5: 256 to 4096
    bytes), and how many reads of the other side it serves at once."""

    number: Annotated[int, Meta(ge=0, lt=1 << 24)]
    sequence: Annotated[int, Meta(ge=0, lt=1 << 24)]
    gid: Token
    lid: Annotated[int, Meta(ge=0, lt=1 << 16)]
    mtu: Annotated[int, Meta(ge=1, le=5)]
    reads: Annotated[int, Meta(ge=0, le=255)]


class Connect(_QueuePair, frozen=True):
    """The client's queue pair for this connection; one before it is gone."""

    kind: ClassVar[Kind] = Kind.CONNECT


class Connected(_QueuePair, frozen=True):
    """The host's, which is ready."""

    kind: ClassVar[Kind] = Kind.CONNECTED


class Claim(Message, frozen=True):
    """This client, who says the same 16 bytes on all its connections, is the one that saves
    ``model``, as long as one of them lives."""

    kind: ClassVar[Kind] = Kind.CLAIM
    model: Annotated[str, Meta(min_length=1, max_length=NAME_SIZE_MAX)]
    client: Token


class Register(Message, frozen=True):
    """Regions of the client's memory, from number ``first`` on: their lengths, and what a transport
    needs to reach them by itself (``handles``, one of each; empty on a stream)."""

    kind: ClassVar[Kind] = Kind.REGISTER
    first: Number
    lengths: Indices
    handles: Handles = b""


class Forget(Message, frozen=True):
    """These regions are revoked, and are not reached any more."""

    kind: ClassVar[Kind] = Kind.FORGET
    regions: Indices


class Begin(Message, frozen=True):
    """A save of storages of these lengths."""

    kind: ClassVar[Kind] = Kind.BEGIN
    model: Annotated[str, Meta(min_length=1, max_length=NAME_SIZE_MAX)]
    step: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    token: Token
    lengths: Indices


class Offer(Message, frozen=True):
    """These storages may be pulled now, from these regions."""

    kind: ClassVar[Kind] = Kind.OFFER
    indices: Indices
    regions: Indices


class Pull(Message, frozen=True):
    """On a stream: send the storages of the offer, end to end. ``size``: bytes of all."""

    kind: ClassVar[Kind] = Kind.PULL
    size: Number


class Pulled(Message, frozen=True):
    """All of the offer is stored; the digests of its units, as the host found them. ``bounced``:
    bytes that did not come straight into the pool, but through a buffer of the host."""

    kind: ClassVar[Kind] = Kind.PULLED
    digests: Digests
    bounced: Number


class Share(Message, frozen=True):
    """These storages equal those of the version ``before``, a token, by the client's digests."""

    kind: ClassVar[Kind] = Kind.SHARE
    before: Token
    indices: Indices


class Shared(Message, frozen=True):
    """``same``: the host still has those bytes, and the version reaches them."""

    kind: ClassVar[Kind] = Kind.SHARED
    same: bool


class Confirm(Message, frozen=True):
    """All storages are pulled or shared, and their digests, which the client found itself, are
    ``digests``: commit. Layout and tree are those of ``before``, a token, where they are None.
    ``retire``: ids of versions to let go of in the same commit. ``inexact``: the client saw a part
    of it being written by another process while it was pulled."""

    kind: ClassVar[Kind] = Kind.CONFIRM
    digests: Digests
    before: Token
    layout: Annotated[bytes, Meta(max_length=LAYOUT_SIZE_MAX)] | None
    tree: Annotated[bytes, Meta(max_length=TREE_SIZE_MAX)] | None
    retire: Ids
    inexact: bool = False


class Committed(Message, frozen=True):
    """It is durable. ``record``: the payload of its version record."""

    kind: ClassVar[Kind] = Kind.COMMITTED
    record: Annotated[bytes, Meta(max_length=1 << 30)]


class Missing(Message, frozen=True):
    """Version ``before`` of the confirmation is gone: confirm again, with layout and tree."""

    kind: ClassVar[Kind] = Kind.MISSING


class Abandon(Message, frozen=True):
    """The save is given up. Nothing of it is reached any more."""

    kind: ClassVar[Kind] = Kind.ABANDON


class Abandoned(Message, frozen=True):
    """Nothing of it is kept."""

    kind: ClassVar[Kind] = Kind.ABANDONED


class Read(Message, frozen=True):
    """Bytes of the pool, as pairs of offset and length."""

    kind: ClassVar[Kind] = Kind.READ
    ranges: Ranges


class Check(Message, frozen=True):
    """The host is to hash storages of ``lengths`` that lie in ``ranges``, end to end."""

    kind: ClassVar[Kind] = Kind.CHECK
    lengths: Indices
    ranges: Ranges


class Checked(Message, frozen=True):
    """Digests of their units."""

    kind: ClassVar[Kind] = Kind.CHECKED
    digests: Digests


class Push(Message, frozen=True):
    """Write what the ranges hold, storages of these lengths end to end, into the client's memory,
    one handle for each."""

    kind: ClassVar[Kind] = Kind.PUSH
    lengths: Indices
    ranges: Ranges
    handles: Handles


class Pushed(Message, frozen=True):
    """It is written; the digests of its units, as the host found them. ``bounced``: as above."""

    kind: ClassVar[Kind] = Kind.PUSHED
    digests: Digests
    bounced: Number


class Pin(Message, frozen=True):
    """Keep the space of a version from reuse, as long as this connection lives."""

    kind: ClassVar[Kind] = Kind.PIN
    version: Number


class Unpin(Message, frozen=True):
    """Take one pin back."""

    kind: ClassVar[Kind] = Kind.UNPIN
    version: Number


class Room(Message, frozen=True):
    """Make sure that so many bytes can be saved."""

    kind: ClassVar[Kind] = Kind.ROOM
    size: Number


class Retire(Message, frozen=True):
    """Let go of versions, by id."""

    kind: ClassVar[Kind] = Kind.RETIRE
    versions: Ids


class Hold(Message, frozen=True):
    """Keep this reference file, which a file of the same id at the client says too, as long as the
    client does not say that it is gone: by no bytes."""

    kind: ClassVar[Kind] = Kind.HOLD
    id: Token
    reference: Annotated[bytes, Meta(max_length=HOLD_SIZE_MAX)]


class Holds(Message, frozen=True):
    """Which reference files are kept? Those whose id comes after this one."""

    kind: ClassVar[Kind] = Kind.HOLDS
    after: Token


class Held(Message, frozen=True):
    """The next of them, in the order of their ids: ``lengths`` in bytes, and the bytes, one after
    another. Nothing if there are no more."""

    kind: ClassVar[Kind] = Kind.HELD
    lengths: Ids
    references: Annotated[bytes, Meta(max_length=HELD_SIZE_MAX)]


class Status(Message, frozen=True):
    """How is the pool?"""

    kind: ClassVar[Kind] = Kind.STATUS


class GiveBack(Message, frozen=True):
    """Give the space of the pool that nothing reaches back to the file system."""

    kind: ClassVar[Kind] = Kind.GIVE_BACK


class Note(Message, frozen=True):
    """Put on record which save failed last, when and why, in words."""

    kind: ClassVar[Kind] = Kind.NOTE
    text: Text


class Standing(Message, frozen=True):
    """Bytes of the pool, those free, and how many saves are under way. ``holes``: bytes besides
    that are free, but were given back to the file system. ``taken``: bytes that the pool takes of
    it, 0 if it is on none."""

    kind: ClassVar[Kind] = Kind.STATE
    size: Number
    free: Number
    saves: Number
    holes: Number
    taken: Number


class Done(Message, frozen=True):
    """It is done."""

    kind: ClassVar[Kind] = Kind.DONE


class Begun(Message, frozen=True):
    """Offers may come."""

    kind: ClassVar[Kind] = Kind.BEGUN


class Refused(Message, frozen=True):
    """The request was refused, and with it the save that it was part of."""

    kind: ClassVar[Kind] = Kind.REFUSED
    fault: Fault
    errno: Number
    text: Text


class Bye(Message, frozen=True):
    """The client has nothing more to say."""

    kind: ClassVar[Kind] = Kind.BYE


Said = Hello | Message

_TYPES: Final[dict[Kind, type[Said]]] = {
    each.kind: each
    for each in (
        *(Hello, ProofGiven, Register, Forget, Begin, Offer, Share, Confirm, Abandon, Read, Check),
        *(
            Claim,
            Pin,
            Unpin,
            Room,
            Retire,
            Status,
            Bye,
            Challenge,
            Welcome,
            Done,
            Begun,
            Pull,
            Pulled,
        ),
        *(Shared, Committed, Missing, Abandoned, Checked, Standing, Refused),
        *(Connect, Connected, Push, Pushed, Hold, Holds, Held, GiveBack, Note),
    )
}

PAYLOADS: Final = frozenset({Kind.DATA, Kind.BYTES})
"""Kinds whose frames carry plain bytes."""

DAMAGED: Final = "its digest is another: bytes changed on the way"

_SMALL: Final = 8 << 10

_BODY_SIZE_MAX: Final[dict[Kind, int]] = {
    Kind.HELLO: 512,
    Kind.PROOF: 64,
    Kind.REGISTER: (8 + HANDLE_SIZE) * STORAGES_MAX + _SMALL,
    Kind.FORGET: 8 * STORAGES_MAX + _SMALL,
    Kind.BEGIN: 8 * STORAGES_MAX + _SMALL,
    Kind.OFFER: 16 * STORAGES_MAX + _SMALL,
    Kind.SHARE: 8 * STORAGES_MAX + _SMALL,
    Kind.CONFIRM: DIGEST_SIZE * UNITS_MAX + LAYOUT_SIZE_MAX + TREE_SIZE_MAX + 8 * IDS_MAX + _SMALL,
    Kind.READ: 16 * RANGES_MAX + _SMALL,
    Kind.CHECK: 16 * RANGES_MAX + 8 * STORAGES_MAX + _SMALL,
    Kind.RETIRE: 8 * IDS_MAX + _SMALL,
    Kind.HOLD: HOLD_SIZE_MAX + _SMALL,
    Kind.NOTE: 5 * TEXT_SIZE_MAX,
    Kind.HELD: HELD_SIZE_MAX + 8 * IDS_MAX + _SMALL,
    Kind.PUSH: 16 * RANGES_MAX + (8 + HANDLE_SIZE) * STORAGES_MAX + _SMALL,
    Kind.PUSHED: DIGEST_SIZE * UNITS_MAX + _SMALL,
    Kind.PULLED: DIGEST_SIZE * UNITS_MAX + _SMALL,
    Kind.CHECKED: DIGEST_SIZE * UNITS_MAX + _SMALL,
    Kind.COMMITTED: (1 << 30) + _SMALL,
    Kind.WELCOME: 5 * TEXT_SIZE_MAX,
    Kind.REFUSED: 5 * TEXT_SIZE_MAX,
    Kind.DATA: PAYLOAD_SIZE_MAX,
    Kind.BYTES: PAYLOAD_SIZE_MAX,
}

SINCE: Final = {Kind.NOTE: 6}
"""What not all versions have that are spoken: the first that has it."""

_encoder: Final = msgspec.msgpack.Encoder()
_decoders: Final = {kind: msgspec.msgpack.Decoder(each) for kind, each in _TYPES.items()}


def body_size_max(kind: Kind) -> int:
    """Bytes of a body of this kind, at most."""
    return _BODY_SIZE_MAX.get(kind, _SMALL)


def encode(message: Said) -> bytes:
    """The body of a frame."""
    return _encoder.encode(message)


def decode(kind: Kind, body: bytes | bytearray) -> Said:
    """The message of a body. Raises ``ProtocolError``."""
    try:
        found = _decoders[kind].decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"{kind.name} of {len(body)} bytes: {error}") from error
    if isinstance(found, Hello) and found.magic == MAGIC and found.version in VERSIONS:
        wanted = found.expected() if found.digest or found.version >= DIGESTS_SINCE else b""
        if found.digest != wanted:
            raise ProtocolError(f"{kind.name}: {DAMAGED}")
    return found


def table() -> str:
    """The messages, as the document has them."""
    lines = ["| number | message | from | fields | bytes at most |", "|---|---|---|---|---|"]
    for kind in Kind:
        fields = "plain bytes"
        if kind not in PAYLOADS:
            fields = ", ".join(_TYPES[kind].__struct_fields__) or "none"
        side = "client" if kind.from_client else "host"
        lines.append(f"| {kind.value} | {kind.name} | {side} | {fields} | {body_size_max(kind)} |")
    return "\n".join(lines) + "\n"


def packed_column(numbers: npt.ArrayLike) -> bytes:
    """Numbers for the wire."""
    return np.asarray(numbers, "<i8").tobytes()


def column(data: bytes, what: str) -> Column:
    """Numbers from the wire, none negative or too big. Raises ``ProtocolError``."""
    if len(data) % 8:
        raise ProtocolError(f"{what}: {len(data)} bytes are no column of numbers")
    numbers = np.frombuffer(data, "<i8").astype(np.int64)
    if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) > SIZE_MAX):
        raise ProtocolError(f"{what}: found a number out of range")
    # Sums are made of what is checked here, and must not wrap around.
    if float(numbers.sum(dtype=np.float64)) > SIZE_MAX:
        raise ProtocolError(f"{what}: the numbers add up to too much")
    return numbers


def ranges(data: bytes, what: str) -> tuple[Column, Column]:
    """Offsets and lengths from the wire. Raises ``ProtocolError``."""
    if len(data) % 16:
        raise ProtocolError(f"{what}: {len(data)} bytes are no pairs of numbers")
    numbers = np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 2)
    offsets, lengths = np.ascontiguousarray(numbers[:, 0]), np.ascontiguousarray(numbers[:, 1])
    for part in (offsets, lengths):
        if len(part) and (int(part.min()) < 0 or int(part.max()) > SIZE_MAX // 2):
            raise ProtocolError(f"{what}: found a number out of range")
    if float(lengths.sum(dtype=np.float64)) > SIZE_MAX:
        raise ProtocolError(f"{what}: the lengths add up to too much")
    return offsets, lengths


def packed_handles(address: npt.ArrayLike, key: npt.ArrayLike) -> bytes:
    """Handles for the wire, of regions with these addresses and keys."""
    return np.stack([np.asarray(address, "<i8"), np.asarray(key, "<i8")], axis=1).tobytes()


def handles(data: bytes, count: int, what: str) -> tuple[Column, Column]:
    """Addresses and keys of ``count`` regions from the wire; all zero if ``data`` is empty. Raises
    ``ProtocolError``."""
    if not data:
        return np.zeros(count, np.int64), np.zeros(count, np.int64)
    if len(data) != HANDLE_SIZE * count:
        raise ProtocolError(f"{what}: {len(data)} bytes are not {count} handles")
    addresses, keys = ranges(data, what)
    if len(keys) and int(keys.max()) >= 1 << 32:
        raise ProtocolError(f"{what}: found a key out of range")
    return addresses, keys


def digest_rows(data: bytes, what: str) -> npt.NDArray[np.uint8]:
    """Digests from the wire, (n, 16). Raises ``ProtocolError``."""
    if len(data) % DIGEST_SIZE:
        raise ProtocolError(f"{what}: {len(data)} bytes are no digests")
    return np.frombuffer(data, np.uint8).reshape(-1, DIGEST_SIZE)
