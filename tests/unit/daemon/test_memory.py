"""A host that runs for months: what it keeps does not grow with what was done."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from portus.engine.format.checksum import digest
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import pack_column, pack_map
from portus.reach.versions.host import HostPool
from tests.contents import table
from tests.hosts import Host

SAVES = 10_000
WARMUPS = 800
CLIENTS = 4
SIZE = 16 << 10
GROWTH_MAX = 4 << 20


def rss(process: int) -> int:
    """Bytes of memory of its own that a process has: of a pool that is mapped, none."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * int(fields["RssAnon"].split()[0])


def save_many(url: str, model: str, count: int, first: int) -> None:
    """Saves by the words of the protocol: quicker than a whole client, the same for the host."""
    pool = HostPool(url, model)
    lengths, alone = pack_column([SIZE]), pack_column([0])
    newest = pack_map({"last": 1})
    try:
        with pool.links.lend() as link:
            for step in range(first, first + count):
                data = (model.encode() + step.to_bytes(8, "little")).ljust(SIZE, b"x")
                token = (model.encode() + step.to_bytes(8, "little")).ljust(16, b"\0")
                link.ask(said.Begin(model, step, token, lengths))
                link.ask(said.Offer(alone))
                link.send_payload(said.DATA, memoryview(data))
                assert isinstance(link.hear(), said.Hashed)
                confirm = said.Confirm(digest(data), table([SIZE]), newest)
                assert isinstance(link.ask(confirm), said.Committed)
    finally:
        pool.close()


def together(url: str, saves: int, first: int) -> None:
    threads = [
        threading.Thread(target=save_many, args=(url, f"m{n}", saves // CLIENTS, first))
        for n in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.long
def test_the_memory_of_a_host_is_flat_over_ten_thousand_saves(tmp_path: Path) -> None:
    with Host(tmp_path / "pools") as host:
        for turn in (0, 1):  # twice: allocators keep something for each thread that there was
            together(host.url, WARMUPS, turn * WARMUPS)
        before = rss(host.process.pid)
        together(host.url, SAVES, 2 * WARMUPS)
        after = rss(host.process.pid)
        print(f"{before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after {SAVES} saves")
        with_versions = HostPool(host.url)
        assert len(with_versions.catalogue().ids()) == CLIENTS, "of each model the newest"
        with_versions.close()
        assert host.stop() == 0
    assert after - before < GROWTH_MAX
