"""What a link grants the other side: time, and memory. The clock is the test's."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import xxhash

from portus.errors import PortusError, TransportError
from portus.reach.protocol import messages as said
from portus.reach.protocol.connection import Connection, SkippedMessage
from portus.reach.protocol.vocabulary import Phase
from portus.reach.transport.budget import FREE, Budget, ConnectionBudget
from portus.reach.transport.stream import EndedError, Link, SilentError
from tests.unit.protocol.examples import header

SILENCE_S = 1000.0
LONG_S = 0.9 * SILENCE_S
PIECE = 1 << 20
BODY = 3 * PIECE
"""With its digest."""

HEAD = header(BODY - said.DIGEST_SIZE, said.Begin.kind.number)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("portus.reach.transport.stream.time", made)
    return made


class Asked(ConnectionBudget):
    """One that tells when it asked."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self.asked = threading.Event()

    def take(self, size: int, timeout_s: float) -> bool:
        self.asked.set()
        return super().take(size, timeout_s)


def settled(truth: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not truth():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class Listener:
    """A host's link that takes in one big message in a thread; the client's end is plain."""

    def __init__(self) -> None:
        self.client, here = socket.socketpair()
        self.budget = Budget(4 * BODY)  # a message is there twice, once it was decoded
        self.account = Asked(self.budget)
        self.link = Link(
            here, is_client=False, name="client", silence_s=SILENCE_S, account=self.account
        )
        self.link.connection.state = Phase.READY
        self.errors: list[PortusError | SkippedMessage] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def say(self, data: bytes) -> None:
        """Bytes that have been taken in when this returns, or the link is closed."""
        left = self.link.connection.body_left
        with contextlib.suppress(OSError):
            self.client.sendall(data)
        settled(lambda: self.link.connection.body_left <= left - len(data) or self.link.closed)

    def announce(self) -> None:
        self.client.sendall(HEAD)
        settled(lambda: self.link.connection.body_left == BODY)

    def ended(self) -> PortusError | SkippedMessage:
        """Why, when the client has hung up."""
        self.client.close()
        self._thread.join(60)
        [error] = self.errors
        return error

    def ended_by_itself(self) -> PortusError | SkippedMessage:
        """Why, while the client goes on."""
        settled(lambda: bool(self.errors))
        return self.ended()

    def _listen(self) -> None:
        try:
            event = self.link.receive()
        except PortusError as error:
            self.errors.append(error)
        else:
            self.errors += [event] if isinstance(event, SkippedMessage) else []
        if self.errors:
            self.account.close()


@pytest.fixture
def listener(clock: Clock) -> Iterator[Listener]:
    made = Listener()
    yield made
    made.client.close()
    made.link.close()
    made._thread.join(60)


def test_a_message_that_comes_on_may_take_longer_than_a_silence(
    clock: Clock, listener: Listener
) -> None:
    listener.announce()
    for _ in range(5):
        listener.say(bytes(200_000))
        clock.now_s += 3.0  # 66 kB/s
        listener.link.silence_s = 4.0
    listener.say(bytes(1000))
    assert isinstance(listener.ended(), EndedError), "it was told off"


def test_a_message_that_dribbles_is_ended_as_silence_is(clock: Clock, listener: Listener) -> None:
    listener.announce()
    for _ in range(2):
        listener.say(bytes(10))
        clock.now_s += LONG_S
    listener.say(bytes(10))
    assert isinstance(listener.ended(), SilentError)


@pytest.fixture
def others(listener: Listener) -> tuple[ConnectionBudget, ConnectionBudget]:
    """Two that leave no memory for a third one: one that has passing memory for longest, and one
    that keeps some, of another tenant each."""
    first, second = listener.budget.account(), listener.budget.account()
    first.tenant, second.tenant = "one", "two"
    assert first.take(2 * BODY, 0)
    second.keep(BODY + FREE)
    listener.account.tenant = "two"
    return first, second


def test_the_wait_for_memory_is_not_the_other_sides_doing(
    clock: Clock, listener: Listener, others: tuple[ConnectionBudget, ConnectionBudget]
) -> None:
    listener.announce()
    assert listener.account.asked.wait(60)
    clock.now_s += LONG_S
    others[1].close()
    settled(lambda: listener.account.passing > 0)
    listener.say(bytes(10))
    clock.now_s += LONG_S
    listener.say(bytes(10))
    assert isinstance(listener.ended(), EndedError), "it was told off"


def test_a_message_without_memory_is_taken_in_and_forgotten_for_a_refusal(
    clock: Clock, listener: Listener, others: tuple[ConnectionBudget, ConnectionBudget]
) -> None:
    listener.announce()
    assert listener.account.asked.wait(60)
    clock.now_s += SILENCE_S + 1
    whole = bytes(BODY - said.DIGEST_SIZE)
    whole += xxhash.xxh3_128(HEAD + whole).digest()
    for start in range(0, BODY, PIECE):
        listener.say(whole[start : start + PIECE])
        assert listener.account.passing == 0
    error = listener.ended()
    assert isinstance(error, SkippedMessage)
    assert (error.kind, type(error.why)) == (said.Begin.kind, TransportError)
    assert "those of this tenant" in str(error.why)
    assert listener.link.connection.state is Phase.ASKED, "a refusal may follow"


def test_who_hangs_up_waits_for_memory_no_more(
    listener: Listener, others: tuple[ConnectionBudget, ConnectionBudget]
) -> None:
    listener.announce()
    assert listener.account.asked.wait(60)
    assert isinstance(listener.ended(), EndedError)


def test_who_is_slow_with_memory_that_others_wait_for_is_ended(
    clock: Clock, listener: Listener
) -> None:
    listener.announce()
    settled(lambda: listener.account.passing > 0)
    listener.say(bytes(PIECE + 10))
    clock.now_s += 11.5
    listener.say(bytes(10))
    assert not listener.link.closed, "nobody waits"
    other = listener.budget.account()
    other.keep(BODY + FREE)
    waiting = threading.Thread(target=other.take, args=(PIECE, 60))
    waiting.start()
    assert isinstance(listener.ended_by_itself(), SilentError)
    waiting.join(60)
    assert other.passing == PIECE


def test_a_message_has_memory_for_what_came_and_one_piece_until_it_ends(
    clock: Clock, listener: Listener
) -> None:
    listener.announce()
    settled(lambda: listener.budget.taken_bytes > 0)
    part = PIECE // 3  # one byte of each piece is left over
    for came in range(0, 8 * part, part):
        assert 2 * came <= listener.budget.taken_bytes <= 2 * (came + PIECE)
        listener.say(bytes(part))
    listener.say(bytes(100))
    assert listener.budget.taken_bytes == 2 * BODY, "the last piece is no longer than what is left"
    listener.ended()
    assert listener.budget.taken_bytes == 0


def test_memory_goes_to_what_was_sent_and_the_first_comes_to_its_end() -> None:
    budget = Budget(1000)
    first, second, third = budget.account(), budget.account(), budget.account()
    assert first.take(250, 0)
    assert second.take(150, 0)
    assert not second.take(150, 0), "those that are not first share what the first may not need"
    assert first.take(250, 0), "nobody could go on"
    assert "a connection may have 500 at most" in str(first.excess(1))
    first.give_back()
    assert second.take(350, 0), "it is the first now"
    assert third.take(250, 0)
    assert not third.take(1, 0)
    assert budget.taken_bytes == 750


def test_a_tenant_that_takes_all_that_it_may_leaves_enough_to_the_others() -> None:
    budget = Budget(100 * FREE)
    greedy, honest = [budget.account() for _ in range(4)], budget.account()
    for each in greedy:
        each.tenant = "greedy"
    honest.tenant = "honest"
    assert greedy[0].take(50 * FREE, 0)
    greedy[1].keep(11 * FREE)
    assert greedy[2].take(15 * FREE, 0)
    with pytest.raises(TransportError, match="those of this tenant"):
        greedy[3].keep(2 * FREE)
    assert not greedy[3].take(1, 0)
    assert budget.taken_bytes == budget.tenant_max
    honest.keep(6 * FREE)
    assert honest.take(20 * FREE, 0)
    assert budget.taken_bytes == budget.size
    for each in (*greedy, honest):
        each.close()
    assert budget.taken_bytes == 0


class SlowSocket(socket.socket):
    """The host's end of a pair, which receives ``most`` bytes at once. Each time takes
    ``seconds``."""

    clock: Clock
    most = 1
    seconds = 0.5

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        self.clock.now_s += self.seconds
        return super().recv_into(memoryview(buffer)[: self.most], nbytes, flags)


class SlowLink:
    """A link that receives payload from a plain socket, slowly. A host's, or a client's."""

    def __init__(self, clock: Clock, *, is_client: bool = False) -> None:
        self.other, here = socket.socketpair()
        self.socket = SlowSocket(fileno=here.detach())
        self.socket.clock = clock
        self.link = Link(self.socket, is_client=is_client, name="it", silence_s=SILENCE_S)
        self.link.connection.state = Phase.ASKED if is_client else Phase.PULLING

    def send(self, size: int, frame: int) -> None:
        """Frames of a client that the link has still to receive: few enough for the socket."""
        self.other.sendall((header(frame, said.DATA.number) + bytes(frame)) * (size // frame))


@pytest.fixture
def slow_links(clock: Clock) -> Iterator[Callable[..., SlowLink]]:
    with contextlib.ExitStack() as ways:

        def make(*, is_client: bool = False) -> SlowLink:
            made = SlowLink(clock, is_client=is_client)
            ways.callback(made.other.close)
            ways.callback(made.link.close)
            return made

        yield make


@pytest.mark.parametrize("frame", [1, 3000])
@pytest.mark.parametrize("target", [1, 3000])
def test_payload_that_dribbles_is_ended_in_one_frame_or_in_many(
    slow_links: Callable[..., SlowLink], clock: Clock, frame: int, target: int
) -> None:
    slow = slow_links()
    slow.send(3000, frame)

    def receive() -> None:
        for _ in range(3000 // target):
            slow.link.fill(memoryview(bytearray(target)))

    with pytest.raises(SilentError, match="bytes took"):
        receive()
    assert slow.link.closed
    assert SILENCE_S < clock.now_s < SILENCE_S + 10


def test_payload_that_comes_on_may_take_longer_than_a_silence(
    slow_links: Callable[..., SlowLink], clock: Clock
) -> None:
    slow = slow_links()
    slow.link.silence_s, slow.socket.most, slow.socket.seconds = 0.4, 660, 0.01  # 66 kB/s
    for _ in range(3):
        slow.send(66_000, 66_000)
        slow.link.fill(memoryview(bytearray(66_000)))
        clock.now_s += LONG_S  # until the host has stored it
    assert slow.link.taken == 3 * 66_000


def test_the_payload_after_a_message_has_a_time_of_its_own(
    slow_links: Callable[..., SlowLink],
) -> None:
    slow, client = slow_links(), Connection(is_client=True)
    for _ in range(5):
        slow.send(1600, 1600)
        slow.link.fill(memoryview(bytearray(1600)))
        slow.link.connection.state = client.state = Phase.READY
        slow.other.sendall(client.send(said.Offer(b"")))
        slow.link.receive()
        slow.link.connection.state = Phase.PULLING
    assert slow.link.taken == 5 * 1600


def test_a_client_waits_for_a_host_that_is_slow_and_not_silent(
    slow_links: Callable[..., SlowLink],
) -> None:
    slow = slow_links(is_client=True)
    slow.other.sendall(header(3000, said.BYTES.number) + bytes(3000))
    slow.other.sendall(xxhash.xxh3_128(header(3000, said.BYTES.number) + bytes(3000)).digest())
    slow.link.fill(memoryview(bytearray(3000)))
    assert slow.link.taken == 3000
