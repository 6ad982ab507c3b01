"""``python -m tests.hardware.two_hosts ROLE ADDRESS``: a trainer host, or a storage host with pmem.

The trainer registers memory and says where it is. The storage host reads it, one-sided, into its
DAX device, and persists nothing: what is shown here is that the bytes arrive. Then it writes them
back into the trainer's memory, which was cleared. Both compare digests.
"""

from __future__ import annotations

import ctypes
import json
import random
import socket
import sys
import time
from typing import Any, Final

import xxhash

from tests.hardware import verbs
from tests.hardware.conftest import DEVDAX

SIZE: Final = 64 << 20
PORT: Final = 7117
DEVICE: Final = "rxe_eth0"
_WAIT_S_MAX: Final = 120.0


class Talk:
    """Lines of JSON over a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_WAIT_S_MAX)
        self._file: Final = connection.makefile("rw", encoding="utf-8")

    def say(self, **message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        line = self._file.readline()
        assert line, "the other host is gone"
        heard = json.loads(line)
        assert isinstance(heard, dict)
        return heard

    def connect(self, end: verbs.End) -> None:
        mine = end.address
        self.say(number=mine.number, gid=mine.gid)
        end.connect(verbs.Address(**self.hear()))
        self.say(ready=True)
        self.hear()


def trainer(address: str) -> None:
    """Offer memory; it is read, then written."""
    talk = Talk(_connected(address))
    end = verbs.End(DEVICE)
    data = random.Random(7).randbytes(SIZE)
    with verbs.mapped(None, SIZE) as start:
        ctypes.memmove(start, data, SIZE)
        region = end.register(start, SIZE)  # its memory is revoked when it is let go of
        remote = region.remote
        talk.connect(end)
        talk.say(start=remote.start, key=remote.key, digest=xxhash.xxh3_128_hexdigest(data))
        assert talk.hear() == {"saved": True}
        ctypes.memset(start, 0, SIZE)
        talk.say(cleared=True)
        assert talk.hear() == {"restored": True}
        restored = ctypes.string_at(start, SIZE) == data
        talk.say(verified=restored)
        assert restored, "what was written into the trainer's memory is not what was read from it"
        end.close()
    print("trainer: verified")


def storage(address: str) -> None:
    """Pull into the device, check, push back."""
    with socket.create_server((address, PORT)) as server:
        server.settimeout(_WAIT_S_MAX)
        talk = Talk(server.accept()[0])
    end = verbs.End(DEVICE)
    with verbs.mapped(DEVDAX, SIZE) as start:
        local = end.register(start, SIZE)
        talk.connect(end)
        offer = talk.hear()
        remote = verbs.Remote(offer["start"], offer["key"])
        saved_s = end.move(verbs.READ, local, remote)
        found = xxhash.xxh3_128_hexdigest(ctypes.string_at(start, SIZE))
        assert found == offer["digest"], f"pulled {found}, expected {offer['digest']}"
        talk.say(saved=True)
        assert talk.hear() == {"cleared": True}
        restored_s = end.move(verbs.WRITE, local, remote)
        talk.say(restored=True)
        assert talk.hear() == {"verified": True}
        end.close()
    mib = SIZE >> 20
    print(f"storage: READ {mib / saved_s:.0f} MiB/s, WRITE {mib / restored_s:.0f} MiB/s")


def _connected(address: str) -> socket.socket:
    until_s = time.monotonic() + _WAIT_S_MAX
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=5)
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    {"trainer": trainer, "storage": storage}[sys.argv[1]](sys.argv[2])
