"""What a link grants the other side: time, and memory. The clock is the test's."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from portus.errors import PortusError
from portus.protocol.connection import HEADER
from portus.protocol.messages import Kind
from portus.protocol.session import State
from portus.transport.stream import BIG, Budget, EndedError, Link, SilentError

SILENCE_S = 1000.0
LONG_S = 0.9 * SILENCE_S
BODY = 3 * BIG


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
    monkeypatch.setattr("portus.transport.stream.time", made)
    return made


class Asked(Budget):
    """A budget that tells when it was asked."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.asked = threading.Event()

    def take(self, who: object, size: int, timeout_s: float) -> bool:
        self.asked.set()
        return super().take(who, size, timeout_s)


def settled(truth: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not truth():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class Listener:
    """A host's link that takes in one big message in a thread; the client's end is plain."""

    def __init__(self) -> None:
        self.client, here = socket.socketpair()
        self.budget = Asked(BODY)
        self.link = Link(
            here, is_client=False, name="client", silence_s=SILENCE_S, budget=self.budget
        )
        self.link.connection.state = State.READY
        self.errors: list[PortusError] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def say(self, data: bytes) -> None:
        """Bytes that have been taken in when this returns, or the link is closed."""
        left = self.link.connection.body_left
        with contextlib.suppress(OSError):
            self.client.sendall(data)
        settled(lambda: self.link.connection.body_left <= left - len(data) or self.link.closed)

    def announce(self) -> None:
        self.client.sendall(HEADER.pack(BODY, Kind.REGISTER, bytes(3)))
        settled(lambda: self.link.connection.body_left == BODY)

    def ended(self) -> PortusError:
        """Why, when the client has hung up."""
        self.client.close()
        self._thread.join(60)
        [error] = self.errors
        return error

    def _listen(self) -> None:
        try:
            self.link.receive()
        except PortusError as error:
            self.errors.append(error)


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


def test_the_wait_for_memory_is_not_the_other_sides_doing(clock: Clock, listener: Listener) -> None:
    assert listener.budget.take("somebody", BODY, 0)
    listener.budget.asked.clear()
    listener.announce()
    assert listener.budget.asked.wait(60)
    clock.now_s += LONG_S
    listener.budget.give_back("somebody")
    settled(lambda: listener.budget.taken > 0)
    listener.say(bytes(10))
    clock.now_s += LONG_S
    listener.say(bytes(10))
    assert isinstance(listener.ended(), EndedError), "it was told off"


def test_a_message_has_memory_for_what_came_and_one_piece_until_it_ends(
    clock: Clock, listener: Listener
) -> None:
    listener.announce()
    settled(lambda: listener.budget.taken > 0)
    part = BIG // 3  # one byte of each BIG is left over
    for came in range(0, 8 * part, part):
        assert came <= listener.budget.taken <= came + BIG
        listener.say(bytes(part))
    listener.say(bytes(100))
    assert listener.budget.taken == BODY, "the last piece is no longer than what is left"
    listener.ended()
    assert listener.budget.taken == 0
