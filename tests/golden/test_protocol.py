"""Both ends talk as a recorded host and a recorded client of an older version did."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import portus
from portus.errors import UsageError
from portus.reach.daemon.server import Server
from portus.reach.index.check import check
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import Address, Scheme
from portus.reach.protocol.connection import HEADER
from portus.reach.protocol.vocabulary import MessageKind
from portus.reach.transport.dial import Credentials, dial
from portus.reach.transport.host import Links
from portus.reach.transport.stream import Link
from tests.golden.conversation import DATA, Turn, talk
from tests.hosts import serving, url

HERE = Path(__file__).resolve().parent
OLDER = said.VERSIONS[0]
WAIT_S = 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "pools") as made:
        yield made


def turns(name: str, version: int = OLDER) -> list[Turn]:
    found = json.loads((HERE / f"protocol-{version}.json").read_text())[name]
    return [(who, bytes.fromhex(data)) for who, data in found]


def kinds(data: bytes) -> list[MessageKind]:
    """Of the whole frames in it, of a version without digests."""
    found = []
    while len(data) >= HEADER.size:
        length, number, _ = HEADER.unpack(data[: HEADER.size])
        if len(data) < HEADER.size + length:
            break
        kind = said.MESSAGES.get(number)
        assert kind is not None
        found.append(kind)
        data = data[HEADER.size + length :]
    return found


def test_this_version_has_a_recording_of_the_one_before() -> None:
    assert (HERE / f"protocol-{said.VERSION - 1}.json").is_file()
    heard = {kind for who, data in turns("conversation") for kind in kinds(data)}
    by_verbs = {said.Connect.kind, said.Connected.kind, said.Push.kind, said.Pushed.kind}
    later = {kind for kind in said.MESSAGES if kind.since > OLDER}
    assert heard == set(said.MESSAGES) - by_verbs - later, "all that the version has was recorded"


def test_a_recorded_client_is_served_as_it_was(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.doors[0].port), WAIT_S) as plain:
        for who, data in turns("conversation"):
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

    def __init__(self, *conversations: Sequence[Turn]) -> None:
        self.heard: list[list[Turn]] = []
        self._conversations = conversations
        self._open: list[socket.socket] = []
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
        for each in (self._door, *self._open):
            each.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            for said_all in self._conversations:
                heard: list[Turn] = []
                self.heard.append(heard)
                plain = self._door.accept()[0]
                plain.settimeout(WAIT_S)
                self._open.append(plain)
                for who, data in said_all:
                    if who == "host":
                        plain.sendall(data)
                        continue
                    came = b""
                    while len(kinds(came)) < len(kinds(data)) and (more := plain.recv(1 << 16)):
                        came += more
                    heard.append((who, came))


def test_a_client_says_to_a_recorded_host_what_was_recorded() -> None:
    conversation = turns("conversation")
    with Recorded(conversation) as host:
        plain = socket.create_connection((host.address.host, host.address.port), WAIT_S)
        link = Link(plain, is_client=True, name="host", silence_s=WAIT_S)
        talk(link, OLDER)
        link.close()
    expected = [data for who, data in conversation if who == "client"]
    found = [data for _, data in host.heard[0]]
    assert kinds(found[0]) == kinds(expected[0]) == [said.Hello.kind]  # which may have more fields
    assert found[1:] == expected[1:]


def test_an_older_host_is_spoken_to_in_its_version_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal, greeting = turns("refusal"), turns("conversation")[:4]
    with (
        Recorded(refusal, greeting, refusal, greeting) as host,
        caplog.at_level(logging.WARNING, "portus"),
        contextlib.closing(Links(host.address, Credentials())) as links,
    ):
        for link in (links.borrow(), links.borrow()):
            assert not link.connection.has_digests
            links.give_back(link)
    assert caplog.text.count("older version of the protocol") == 1
    greeted = [said.decode(said.Hello.kind, each[0][1][HEADER.size :]) for each in host.heard]
    assert [each.version for each in greeted if isinstance(each, said.Hello)] == [
        *(said.VERSION, OLDER),
        *(said.VERSION, OLDER),
    ]


def test_a_host_that_is_too_old_is_named() -> None:
    text = f"protocol version {said.VERSION}: this host speaks 4; upgrade the older"
    body = said.encode(said.Refused(said.Fault.USAGE, 0, text))
    refusal = HEADER.pack(len(body), said.Refused.kind.number, bytes(3)) + body
    turn = turns("refusal")[0]
    with (
        Recorded([turn, ("host", refusal)]) as host,
        pytest.raises(UsageError, match="this host speaks 4; upgrade the older"),
    ):
        dial(host.address, Credentials(), WAIT_S)


def test_a_training_saves_to_a_host_in_the_older_version(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.transport.dial.VERSION", OLDER)
    with PoolCheckpointer(url(server)) as checkpointer:
        for step in range(3):
            checkpointer.save({"x": torch.full((1000,), float(step)), "lr": 0.125}, step).wait()
    with portus.open(url(server)) as pool:
        loaded = pool.load()
        assert isinstance(loaded, dict)
        assert loaded["lr"] == 0.125
        assert torch.equal(loaded["x"], torch.full((1000,), 2.0))
