"""Clients that take all that they can get of a host, and a trainer that saves beside them."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from portus.errors import TransportError
from portus.reach.daemon.places import Places
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import parse
from portus.reach.protocol.messages import pack_column
from portus.reach.transport.dial import Credentials, _greet, dial
from portus.reach.transport.stream import Link
from tests.hosts import Host
from tests.moments import until
from tests.unit.daemon.test_memory import rss

CONNECTIONS = 64
MEMORY = 64 << 20
BESIDE = 48 << 20
"""What the host takes besides: threads, what its allocator keeps, and what needs no share."""

SECRETS = {"evil": "e" * 32, "good": "g" * 32}
MANY = 1 << 17
ATTACKERS = 12
TRAINERS = 16
"""Connections of a trainer, and threads that a host takes for a moment."""

ATTACK_S = 0.25

settled = functools.partial(until, within_s=60)


class Attacked(Host):
    """``rss``: that it had before."""

    rss = 0


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    place = tmp_path_factory.mktemp("attacked")
    secrets = place / "secrets"
    secrets.touch(mode=0o600)
    secrets.write_text("".join(f"{tenant} {secret}\n" for tenant, secret in SECRETS.items()))
    limits = ("--memory", str(MEMORY), "--connections", str(CONNECTIONS), "--quota", "64M")
    options = (*limits, "--secret-file", str(secrets))
    made = Attacked("memory:64M", *options)
    with made:
        come(made).close()
        made.rss = rss(made.process.pid)
        yield made


class Trainer:
    """Saves without pause, of the tenant ``good``, as long as it is entered."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
        secret.touch(mode=0o600)
        secret.write_text(SECRETS["good"])
        monkeypatch.setenv("PORTUS_SECRET_FILE", str(secret))
        self.saved = 0
        self._url = host.url.replace("//", "//good@")
        self._ended = threading.Event()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        assert not self._errors, self._errors

    def _run(self) -> None:
        import torch

        state = {f"layer.{n}": torch.full((64,), float(n)) for n in range(100)}
        try:
            with PoolCheckpointer(self._url, "honest", on_error="raise") as checkpointer:
                while not self._ended.is_set() or not self.saved:
                    checkpointer.save(state, self.saved).wait()
                    self.saved += 1
        except BaseException as error:
            self._errors.append(error)


def come(host: Host, tenant: str = "evil") -> Link:
    link, _ = dial(
        parse(host.url.replace("//", f"//{tenant}@")), Credentials(SECRETS[tenant].encode()), 30
    )
    return link


def come_from(address: str, host: Host) -> Link:
    """One of the tenant ``evil``, from another address as it were."""
    place = ("127.0.0.1", host.port)
    plain = socket.create_connection(place, 60, source_address=(address, 0))
    link = Link(plain, is_client=True, name="host", silence_s=60)
    try:
        url = parse(host.url.replace("//", "//evil@"))
        _greet(link, url, Credentials(SECRETS["evil"].encode()))
    except BaseException:
        link.close()
        raise
    return link


def begins(link: Link) -> None:
    model = os.urandom(8).hex()
    link.ask(said.Claim(model, os.urandom(16)))
    handles = bytes(said.HANDLE_SIZE * MANY)
    began = link.ask(said.Begin(model, 1, os.urandom(16), pack_column([0] * MANY), handles))
    if isinstance(began, said.Done):
        for _ in range(100):
            if not isinstance(link.ask(said.Offer(b"")), said.Hashed):
                return


def confirms(link: Link) -> None:
    """Contents that take many times their bytes, again and again."""
    model = os.urandom(8).hex()
    link.ask(said.Claim(model, os.urandom(16)))
    for count in (20_000, 60_000, 400_000):
        contents = b'{"$files":[' + b",".join([b'{"a":1}'] * count) + b"]}"
        link.ask(said.Begin(model, 1, os.urandom(16), b""))
        link.ask(said.Confirm(b"", contents, b""))


def announces(link: Link) -> None:
    """A message of which all but the end comes."""
    model = os.urandom(8).hex()
    link.ask(said.Claim(model, os.urandom(16)))
    link.ask(said.Begin(model, 1, os.urandom(16), b""))
    link._socket.sendall(link.connection._begin_frame(said.Confirm.kind, 12 << 20))
    link._socket.sendall(bytes(11 << 20))


def pins(link: Link) -> None:
    for version in range(1, 1000):
        link.ask(said.Pin(1 << 20 | version))


def checks(link: Link) -> None:
    while True:
        link.ask(said.Check(pack_column([0] * (MANY // 2)), b""))


def reads(link: Link) -> None:
    """Many ranges, and takes nothing of them."""
    link.send(said.Read(pack_column([0, 4096] * (4 * MANY))))


ATTACKS: list[Callable[[Link], None]] = [
    begins,
    confirms,
    announces,
    checks,
    reads,
    pins,
]


@pytest.mark.long
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.__name__)
def test_a_host_holds_no_more_than_it_was_told_to_and_others_save(
    host: Attacked,
    attack: Callable[[Link], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    settled(lambda: counted(host, "task") < 8)  # nobody of the attack before is left
    links = [come(host) for _ in range(ATTACKERS)]
    highest = 0

    def strike(link: Link) -> None:
        with contextlib.suppress(OSError):  # of a socket that is full, or was closed
            attack(link)

    with Trainer(host, monkeypatch, tmp_path / "secret") as trainer:
        threads = [threading.Thread(target=strike, args=(link,)) for link in links]
        for thread in threads:
            thread.start()
        until_s, first = time.monotonic() + ATTACK_S, trainer.saved
        while time.monotonic() < until_s or trainer.saved < first + 2:
            highest = max(highest, rss(host.process.pid))
            time.sleep(0.001)
        for link in links:
            link.close()
        for thread in threads:
            thread.join()
    print(f"{host.rss / 2**20:.0f} MiB once, {highest / 2**20:.0f} MiB, {trainer.saved} saves")
    assert highest < host.rss + MEMORY + BESIDE


def counted(host: Host, what: str) -> int:
    """Threads (``task``) or descriptors (``fd``) that it has."""
    return len(os.listdir(f"/proc/{host.process.pid}/{what}"))


@pytest.mark.long
def test_strangers_have_a_few_places_and_those_of_who_proves_a_secret_stay(
    host: Attacked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settled(lambda: counted(host, "task") < 8)
    threads, files = counted(host, "task"), counted(host, "fd")
    places, strangers = Places(CONNECTIONS), []
    port = host.port
    with contextlib.ExitStack() as stack, Trainer(host, monkeypatch, tmp_path / "secret") as good:
        for number in range(3 * CONNECTIONS):  # each from another address as it were
            near = (f"127.0.1.{number % 4}", 0)
            each = socket.create_connection(("127.0.0.1", port), 60, source_address=near)
            strangers.append(stack.enter_context(each))
        first = good.saved
        settled(lambda: good.saved > first + 3)
        # Some may still wait to be accepted, or have just been told to end.
        settled(lambda: sum(map(is_open, strangers)) <= places.strangers_max)
        settled(lambda: counted(host, "task") <= threads + places.strangers_max + TRAINERS)
        settled(lambda: counted(host, "fd") <= files + places.strangers_max + TRAINERS)


def is_open(stranger: socket.socket) -> bool:
    stranger.setblocking(False)
    try:
        return bool(stranger.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_a_tenant_has_its_share_of_places_is_told_so_and_the_others_come_in(
    host: Attacked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settled(lambda: counted(host, "task") < 8)
    share = Places(CONNECTIONS).tenant_max
    with contextlib.ExitStack() as stack:
        for number in range(share):
            link = come_from(f"127.0.2.{number % 2}", host)
            stack.callback(link.close)
            assert link.ask(said.Claim(f"idle {number}", os.urandom(16))) == said.Done()
        with pytest.raises(TransportError, match=f"{share} of this tenant are the most"):
            come_from("127.0.2.3", host)
        with Trainer(host, monkeypatch, tmp_path / "secret") as good:
            settled(lambda: good.saved > 3)
