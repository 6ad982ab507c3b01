"""A conversation of the protocol, recorded: ``python -m tests.golden.conversation``.

It writes ``protocol-N.json`` beside this file, for version N: what each side said, in turns, as
bytes. The client says the same each time, so both ends can be held to it: run this when the
protocol is meant to change, and not to make a test pass.
"""

from __future__ import annotations

import itertools
import json
import socket
import tempfile
import threading
from pathlib import Path
from typing import Final

import numpy as np

from portus.engine.format.checksum import digest
from portus.reach.index.file_table import FileTable, PackedFile, encode_table
from portus.reach.index.records import decode_version
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Fault, Said, error_of, pack_column, pack_map
from portus.reach.transport.stream import Link
from tests.hosts import serving

HERE: Final = Path(__file__).resolve().parent

NONCE: Final = b"n" * 16
CLIENT: Final = b"c" * 16
FIRST, SECOND, GIVEN_UP = b"1" * 16, b"2" * 16, b"3" * 16
DATA: Final = [bytes(range(256)) * 4, b"", b"\7" * 60]
LENGTHS: Final = pack_column([len(each) for each in DATA])
ALL: Final = pack_column([0, 1, 2])
DIGESTS: Final = b"".join(digest(each) for each in DATA)
CONTENTS: Final = encode_table(
    FileTable([PackedFile("a.pt", 1084, np.array([60, 0]), np.array([1024, 0]))])
)

Turn = tuple[str, bytes]
"""Who speaks, and all that it says until the other one does."""


def talk(link: Link) -> None:
    """Say everything that a client may say, but what needs verbs, and look at the answers."""

    def ask(message: Said, expected: type[Said] = said.Done) -> Said:
        answer = link.ask(message)
        if not isinstance(answer, expected):
            raise error_of(answer)
        return answer

    def send() -> None:
        link.send_payload(said.DATA, memoryview(b"".join(DATA)))
        answer = link.hear()
        if not isinstance(answer, said.Hashed) or answer.digests != DIGESTS:
            raise error_of(answer)

    ask(said.Hello(said.MAGIC, said.VERSION, "default", NONCE), said.Challenge)
    ask(said.ClientProof(b""), said.Welcome)
    ask(said.Claim("model", CLIENT))
    ask(said.Begin("model", 10, FIRST, LENGTHS), said.Done)
    ask(said.Offer(ALL), said.Pull)
    send()
    keep, metrics = pack_map({"last": 2, "best": ("loss", "min", 1)}), pack_map({"loss": 0.5})
    confirm = said.Confirm(DIGESTS, CONTENTS, keep, metrics=metrics)
    first = committed(ask(confirm, said.Committed))
    ask(said.Begin("model", 11, SECOND, LENGTHS), said.Done)
    assert ask(said.Share(FIRST, pack_column([0, 1])), said.Done) == said.Done()
    ask(said.Offer(pack_column([2])), said.Pull)
    link.send_payload(said.DATA, memoryview(DATA[2]))
    assert isinstance(link.hear(), said.Hashed)
    committed(ask(said.Confirm(DIGESTS, CONTENTS, b"", True), said.Committed))
    ask(said.Begin("model", 12, GIVEN_UP, LENGTHS), said.Done)
    ask(said.Abandon(), said.Done)
    refused = ask(said.Begin("model", 12, FIRST, LENGTHS), said.Refused)
    assert isinstance(refused, said.Refused)
    assert refused.fault is Fault.USAGE
    ask(said.Pin(first))
    link.send(said.Read(pack_column([0, 1000, 4096, 500])))
    page = bytearray(1500)
    link.fill(memoryview(page))
    assert any(page)
    assert link.receive() == said.Done()
    ask(said.Check(pack_column([0]), b""), said.Hashed)
    ask(said.Unpin(first))
    ask(said.Retire(FIRST))
    ask(said.Note("a save failed"))
    ask(said.Settle("model", bytes(16)), said.Refused)
    pool = bytes(16)
    asked = ask(said.Lead("model", pool, 0, "", 0, pool), said.Led)
    assert asked == said.Led(False, pool, 0, "", 0, SECOND)
    refused = ask(said.Lead("model", CLIENT, 7, "a host", 0, SECOND), said.Refused)
    assert isinstance(refused, said.Refused)
    assert refused.fault is Fault.BUSY
    # Asked first: the same host may have been told all this before.
    lead = ask(said.Lead("other", pool, 0, "", 0, pool), said.Led)
    assert isinstance(lead, said.Led)
    granted = ask(said.Lead("other", CLIENT, 7, "a host", lead.term, pool), said.Led)
    assert granted == said.Led(True, CLIENT, 7, "a host", lead.term + 1, pool)
    ask(said.GiveBack())
    ask(said.Status(), said.Standing)
    link.send(said.Bye())


def committed(answer: Said) -> int:
    """The id of the version that an answer tells of."""
    assert isinstance(answer, said.Committed)
    return decode_version(memoryview(answer.record)).info.id


class Recorder:
    """A relay between a client and a host that notes what each says."""

    def __init__(self, port: int) -> None:
        self.said: list[Turn] = []
        self.near, here = socket.socketpair()
        there = socket.create_connection(("127.0.0.1", port))
        self._guard = threading.Lock()
        self._threads = [
            threading.Thread(target=self._relay, args=each, daemon=True)
            for each in (("client", here, there), ("host", there, here))
        ]
        for thread in self._threads:
            thread.start()

    def turns(self) -> list[Turn]:
        """All of it, when both have hung up."""
        for thread in self._threads:
            thread.join()
        turns = itertools.groupby(self.said, lambda each: each[0])
        return [(who, b"".join(data for _, data in said)) for who, said in turns]

    def _relay(self, who: str, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            with self._guard:
                self.said.append((who, data))
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def recorded(port: int) -> list[Turn]:
    """What is said while a client talks with the host at ``port``."""
    recorder = Recorder(port)
    link = Link(recorder.near, is_client=True, name="host", silence_s=10)
    talk(link)
    link.close()
    return recorder.turns()


def main() -> None:
    """Record the protocol of the day."""
    with tempfile.TemporaryDirectory() as place, serving(place) as server:
        turns = recorded(server.listeners[0].port)
    lines = ",\n".join(json.dumps([who, data.hex()]) for who, data in turns)
    (HERE / f"protocol-{said.VERSION}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
