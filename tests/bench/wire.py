"""The far end of a copy over a socket: receives so many bytes, says that it has them, again.

python -m tests.bench.wire plain|link SIZE FILE ADDRESS     (ADDRESS: a path, or a tcp port)

plain: into memory that was touched before, as fast as a socket goes. link: into the mapping of a
pool's medium at FILE, by what a storage host receives with, but without hashes. No torch in here.
"""

from __future__ import annotations

import socket
import sys

import numpy as np

from portus.engine.copying.segments import memory
from portus.engine.media.base import MappedMedium
from portus.engine.spec import Extent
from portus.reach.media.local import LocalFiles
from portus.reach.protocol import messages as said
from portus.reach.protocol.vocabulary import Phase
from portus.reach.transport.stream import Link

GOT = b"\1"


def receive_plain(connected: socket.socket, size: int) -> None:
    target = np.ones(size, np.uint8).data
    while True:
        done = 0
        while done < size:
            count = connected.recv_into(target[done:], 0, socket.MSG_WAITALL)
            if not count:
                return
            done += count
        connected.sendall(GOT)


def receive_by_link(connected: socket.socket, size: int, file: str) -> None:
    medium = LocalFiles().create(file, size)
    assert isinstance(medium, MappedMedium)
    whole = Extent(0, size)
    target = memory(medium.address(whole), size)
    np.frombuffer(target, np.uint8)[:] = 1
    link = Link(connected, is_client=False, name="bench", silence_s=60)
    while True:
        link.connection.state = Phase.PULLING
        link.fill(target)
        medium.wrote(whole)
        link.send(said.Hashed(GOT * 16, size))


def give_plain(connected: socket.socket, views: list[memoryview]) -> None:
    """The near end of ``receive_plain``."""
    for view in views:
        connected.sendall(view)
    assert connected.recv(1) == GOT


def give_by_link(link: Link, views: list[memoryview], frame: int) -> None:
    """The near end of ``receive_by_link``. frame: bytes of one, at most."""
    link.connection.state = Phase.PULLING
    for view in views:
        for start in range(0, len(view), frame):
            link.send_payload(said.DATA, view[start : start + frame])
    assert isinstance(link.hear(), said.Hashed)


def main() -> None:
    kind, size, file, address = sys.argv[1:]
    if address.isdecimal():
        listener = socket.create_server(("127.0.0.1", int(address)))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
    print("ready", listener.getsockname()[1] if address.isdecimal() else address, flush=True)
    connected, _ = listener.accept()
    listener.close()
    if kind == "plain":
        receive_plain(connected, int(size))
    else:
        receive_by_link(connected, int(size), file)


if __name__ == "__main__":
    main()
