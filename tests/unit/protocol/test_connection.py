from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping

import hypothesis
import pytest
from hypothesis import strategies as st

from portus.reach.protocol import messages as said
from portus.reach.protocol.connection import (
    HEADER,
    Connection,
    Event,
    Payload,
)
from portus.reach.protocol.messages import (
    ProtocolError,
    Said,
    pack_column,
)
from portus.reach.protocol.vocabulary import MessageKind, Phase
from tests.unit.protocol.examples import EXAMPLES, LEAST, NEXT, TOKEN, header


def end(state: Phase, *, is_client: bool) -> Connection:
    """One end of a conversation that is in ``state``."""
    connection = Connection(is_client=is_client)
    connection.state = state
    return connection


def frames(
    connection: Connection, kind: MessageKind, examples: Mapping[MessageKind, Said] = EXAMPLES
) -> bytes:
    """What goes over the wire when ``connection`` says an example of ``kind``."""
    payload = b"payload"
    if kind.is_payload:
        head = connection.send_payload(kind, len(payload))
        middle = len(payload) // 2
        assert connection.note_sent(payload[:middle]) == b""
        return head + payload + connection.note_sent(payload[middle:])
    return connection.send(examples[kind])


Heard = Event | bytes


def heard(connection: Connection, data: bytes, splits: Iterator[int]) -> list[Heard]:
    """What ``connection`` makes of ``data``, fed in pieces no longer than ``splits`` says."""
    events: list[Heard] = []
    while data:
        if connection.payload_left:
            taken = min(connection.payload_left, next(splits), len(data))
            connection.took(data[:taken])
            if events and isinstance(events[-1], bytes):
                events[-1] += data[:taken]
            else:
                events.append(data[:taken])
        else:
            taken = min(connection.wanted_bytes, next(splits), len(data))
            assert taken
            event = connection.feed(data[:taken])
            events += [event] if event is not None else []
        data = data[taken:]
    return events


def forever(size: int) -> Iterator[int]:
    while True:
        yield size


def test_an_example_is_what_its_kind_declares() -> None:
    for kind, message in [*EXAMPLES.items(), *LEAST.items()]:
        assert said.decode(kind, said.encode(message)) == message
    assert EXAMPLES[said.Pin.kind] == said.Pin(said.SIZE_MAX)
    assert LEAST[said.Pin.kind] == said.Pin(0)
    assert all(LEAST[kind] != message for kind, message in EXAMPLES.items() if fields(message))


def fields(message: Said) -> tuple[str, ...]:
    return type(message).__struct_fields__


@pytest.mark.parametrize("examples", [EXAMPLES, LEAST], ids=["much", "least"])
@pytest.mark.parametrize(("state", "kind"), NEXT, ids=lambda each: each.name)
def test_both_ends_agree_however_the_bytes_are_cut(
    state: Phase, kind: MessageKind, examples: Mapping[MessageKind, Said]
) -> None:
    speaker = end(state, is_client=kind.from_client)
    data = frames(speaker, kind, examples)
    for size in range(1, len(data) + 1):
        listener = end(state, is_client=not kind.from_client)
        events = heard(listener, data, forever(size))
        if kind.is_payload:
            assert events == [Payload(kind, 7), b"payload"]
        else:
            assert events == [examples[kind]]
        assert listener.state is speaker.state is NEXT[state, kind]


def test_a_frame_is_never_asked_beyond_its_end() -> None:
    """Or payload would be eaten by the buffer, not received where it goes."""
    speaker = end(Phase.ASKED, is_client=False)
    data = frames(speaker, said.BYTES) + frames(speaker, said.BYTES)
    listener = end(Phase.ASKED, is_client=True)
    fed = 0
    while fed < len(data):
        if listener.payload_left:
            payload = data[fed : fed + listener.payload_left]
            fed += len(payload)
            listener.took(payload)
        else:
            wanted = listener.wanted_bytes
            listener.feed(data[fed : fed + wanted])
            fed += wanted
            assert fed % (HEADER.size + 7 + said.DIGEST_SIZE) in (0, HEADER.size)


def test_what_the_table_does_not_have_is_refused_by_the_listener() -> None:
    tried = 0
    for state in Phase:
        for kind in said.MESSAGES:
            if (state, kind) in NEXT:
                continue
            body = b"x" if kind.is_payload else said.encode(EXAMPLES[kind])
            listener = end(state, is_client=not kind.from_client)
            with pytest.raises(ProtocolError, match=kind.name):
                heard(listener, header(len(body), kind.number) + body, forever(1 << 20))
            assert listener.state is state
            with pytest.raises(ProtocolError):
                listener.feed(b"")  # of no use any more
            tried += 1
    assert tried > 220


def test_what_the_table_does_not_have_cannot_be_said() -> None:
    for state in Phase:
        for kind in said.MESSAGES:
            speaker = end(state, is_client=kind.from_client)
            if (state, kind) not in NEXT:
                with pytest.raises(AssertionError):
                    frames(speaker, kind)


def test_words_of_the_wrong_side_are_refused() -> None:
    for (state, kind), _ in NEXT.items():
        speaker = end(state, is_client=kind.from_client)
        listener = end(state, is_client=kind.from_client)
        with pytest.raises(ProtocolError, match="only this side"):
            heard(listener, frames(speaker, kind), forever(1 << 20))


@pytest.mark.parametrize("kind", list(said.MESSAGES), ids=lambda kind: kind.name)
def test_a_length_out_of_range_is_refused_before_a_byte_of_the_body(kind: MessageKind) -> None:
    state = next(before for before, each in NEXT if each is kind)
    for length in (0, kind.body_size_max + 1, 0xFFFFFFFF):
        listener = end(state, is_client=not kind.from_client)
        with pytest.raises(ProtocolError, match=r"bytes, found|in state"):
            listener.feed(header(length, kind.number))


def test_what_is_longer_than_its_kind_may_be_cannot_be_said() -> None:
    proof = said.ClientProof(bytes(said.ClientProof.kind.body_size_max))
    with pytest.raises(AssertionError):
        end(Phase.CHALLENGED, is_client=True).send(proof)
    for length in (0, said.DATA.body_size_max + 1):
        with pytest.raises(AssertionError):
            end(Phase.PULLING, is_client=True).send_payload(said.DATA, length)
    end(Phase.PULLING, is_client=True).send_payload(said.DATA, said.DATA.body_size_max)


def test_a_stranger_can_make_the_host_take_little_memory() -> None:
    for kind in (said.Hello.kind, said.ClientProof.kind):
        assert kind.body_size_max <= 512
    listener = end(Phase.READY, is_client=False)
    listener.feed(header(said.Begin.kind.body_size_max, said.Begin.kind.number))
    assert listener.wanted_bytes <= 1 << 20  # memory is taken as bytes arrive


@pytest.mark.parametrize(("state", "kind"), NEXT, ids=lambda each: each.name)
def test_every_bit_that_flips_is_seen_within_its_frame(state: Phase, kind: MessageKind) -> None:
    data = frames(end(state, is_client=kind.from_client), kind)
    # Both ends compare the digests of what DATA brings.
    guarded = data if kind.has_digest else data[: HEADER.size]
    for number in range(8 * len(guarded)):
        damaged = bytearray(data)
        damaged[number // 8] ^= 1 << number % 8
        listener = end(state, is_client=not kind.from_client)
        with pytest.raises(ProtocolError, match="changed on the way"):
            heard(listener, bytes(damaged), forever(1 << 20))


def test_a_damaged_length_is_seen_before_it_is_waited_for() -> None:
    data = frames(end(Phase.READY, is_client=True), said.Pin.kind)
    for number in range(8 * HEADER.size):
        damaged = bytearray(data[: HEADER.size])
        damaged[number // 8] ^= 1 << number % 8
        with pytest.raises(ProtocolError, match="changed on the way"):
            end(Phase.READY, is_client=False).feed(bytes(damaged))


LIMITS: list[tuple[type[Said], tuple[object, ...]]] = [
    (said.Hello, ("portus", 1, "", TOKEN)),
    (said.Hello, ("portus", 1, "t" * 65, TOKEN)),
    (said.Hello, ("portus", 1, "t", TOKEN + b"x")),
    (said.Hello, ("portus", -1, "t", TOKEN)),
    (said.Begin, ("", 0, TOKEN, b"")),
    (said.Begin, ("m" * 201, 0, TOKEN, b"")),
    (said.Begin, ("m", 1 << 63, TOKEN, b"")),
    (said.Begin, ("m", 0, b"short", b"")),
    # A text of this size, say, with one character of four bytes, would take four times as much.
    (said.Confirm, (b"", TOKEN, b"", b"", False, bytes(said.METRICS_SIZE_MAX + 1))),
    (said.Confirm, (b"", TOKEN, b"", b"", False, {"loss": 0.5})),
    (said.Pin, (-1,)),
    (said.Pin, (1 << 63,)),
    (said.Done, (2,)),
    (said.Refused, ("nobody's", 0, "")),
    (said.Done, (True, 1)),
    (said.Pin, ()),
]


@pytest.mark.parametrize(("kind", "fields"), LIMITS)
def test_a_field_out_of_range_is_refused(kind: type[Said], fields: tuple[object, ...]) -> None:
    import msgspec

    with pytest.raises(ProtocolError, match=kind.kind.name):
        said.decode(kind.kind, msgspec.msgpack.encode(fields))


def test_a_greeting_of_a_later_version_can_be_read() -> None:
    import msgspec

    version = said.VERSION + 1
    later = msgspec.msgpack.encode(("portus", version, "tenant", TOKEN, {"more": 1}))
    hello = said.decode(said.Hello.kind, later)
    assert isinstance(hello, said.Hello)
    assert hello.version == version


@pytest.mark.parametrize("numbers", [[-1], [1 << 63], [(1 << 62) + 1], [1 << 61, 1 << 61, 1 << 61]])
def test_numbers_out_of_range_are_refused(numbers: list[int]) -> None:
    data = b"".join((n & (1 << 64) - 1).to_bytes(8, "little") for n in numbers)
    with pytest.raises(ProtocolError, match=r"range|too large"):
        said.column(data, "numbers")


@pytest.mark.parametrize(
    "pairs", [[-1, 0], [1 << 62, 0], [0, 1 << 62], [0, 1 << 60, 1, 1 << 60] * 4]
)
def test_ranges_whose_ends_or_sum_would_wrap_around_are_refused(pairs: list[int]) -> None:
    with pytest.raises(ProtocolError, match=r"range|too large"):
        said.ranges(pack_column(pairs), "ranges")


@pytest.mark.parametrize("data", [b"x", b"x" * 9])
def test_bytes_that_are_no_column_are_refused(data: bytes) -> None:
    for read in (said.column, said.ranges, said.digest_rows):
        with pytest.raises(ProtocolError):
            read(data, "what")


@hypothesis.given(data=st.binary(max_size=400), state=st.sampled_from(Phase), client=st.booleans())
def test_any_bytes_are_messages_or_a_protocol_error(
    data: bytes, state: Phase, client: bool
) -> None:
    listener = end(state, is_client=client)
    try:
        heard(listener, data, forever(7))
    except ProtocolError:
        with pytest.raises(ProtocolError):
            listener.feed(b"")


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.name)
def test_a_damaged_message_is_a_message_or_a_protocol_error(kind: MessageKind, seed: int) -> None:
    state = next(before for before, each in NEXT if each is kind)
    data = frames(end(state, is_client=kind.from_client), kind)
    chance = random.Random(seed)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        damaged = damaged[: chance.randint(1, len(damaged))]
        listener = end(state, is_client=not kind.from_client)
        try:
            check(heard(listener, bytes(damaged), forever(64)))
        except ProtocolError:
            refused += 1
    assert refused


def check(events: Iterable[Heard]) -> None:
    """Columns are looked at by whoever uses them: they too are right or refused."""
    for event in events:
        for name in ("lengths", "indices"):
            if isinstance(value := getattr(event, name, None), bytes):
                said.column(value, name)
        if isinstance(value := getattr(event, "ranges", None), bytes):
            said.ranges(value, "ranges")
