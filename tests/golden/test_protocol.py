"""Both ends talk as a recorded host and a recorded client did."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from portus.reach.daemon.server import Server
from portus.reach.index.check import check
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import Address, Scheme
from portus.reach.protocol.connection import HEADER
from portus.reach.protocol.vocabulary import MessageKind
from portus.reach.transport.stream import Link
from tests.golden.conversation import DATA, Turn, talk
from tests.hosts import serving

HERE = Path(__file__).resolve().parent
WAIT_S = 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "pools") as made:
        yield made


def turns() -> list[Turn]:
    found = json.loads((HERE / f"protocol-{said.VERSION}.json").read_text())
    return [(who, bytes.fromhex(data)) for who, data in found]


def kinds(data: bytes) -> list[MessageKind]:
    """Of the whole frames in it."""
    found = []
    while len(data) >= HEADER.size:
        length, number, _ = HEADER.unpack(data[: HEADER.size])
        kind = said.MESSAGES.get(number)
        assert kind is not None
        size = HEADER.size + length + (said.DIGEST_SIZE if kind.has_digest else 0)
        if len(data) < size:
            break
        found.append(kind)
        data = data[size:]
    return found


def test_all_that_may_be_said_was_recorded() -> None:
    heard = {kind for who, data in turns() for kind in kinds(data)}
    by_verbs = {said.Connect.kind, said.Connected.kind, said.Push.kind}
    assert heard == set(said.MESSAGES) - by_verbs


def test_a_recorded_client_is_served_as_it_was(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.listeners[0].port), WAIT_S) as plain:
        for who, data in turns():
            if who == "client":
                plain.sendall(data)
                continue
            expected, answer = kinds(data), b""
            while len(kinds(answer)) < len(expected):
                answer += plain.recv(1 << 16)
            assert kinds(answer) == expected
    writer = server.house.pools.of("default").writer
    [entry] = writer.catalogue().entries()
    assert (entry.info.model, entry.info.step, entry.info.inexact) == ("model", 11, True)
    assert entry.info.size == sum(map(len, DATA))
    assert check(writer) == []


class Recorded:
    """A host that says what one said once, whatever it hears; and what it heard."""

    def __init__(self, conversation: Sequence[Turn]) -> None:
        self.heard: list[bytes] = []
        self._conversation = conversation
        self._door = socket.create_server(("127.0.0.1", 0))
        self._door.settimeout(WAIT_S)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        return Address(Scheme.TCP, host="127.0.0.1", port=self._door.getsockname()[1])

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT_S)
        self._door.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError), self._door.accept()[0] as plain:
            plain.settimeout(WAIT_S)
            for who, data in self._conversation:
                if who == "host":
                    plain.sendall(data)
                    continue
                came = b""
                while len(kinds(came)) < len(kinds(data)) and (more := plain.recv(1 << 16)):
                    came += more
                self.heard.append(came)


def test_a_client_says_to_a_recorded_host_what_was_recorded() -> None:
    conversation = turns()
    with Recorded(conversation) as host:
        plain = socket.create_connection((host.address.host, host.address.port), WAIT_S)
        link = Link(plain, is_client=True, name="host", silence_s=WAIT_S)
        talk(link)
        link.close()
    expected = [data for who, data in conversation if who == "client"]
    assert host.heard == expected
