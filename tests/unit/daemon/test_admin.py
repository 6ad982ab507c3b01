"""What the operator of a running host sees, and may do."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
import torch

import portus
from portus.errors import BusyError, MediumError, TransportError, UsageError
from portus.reach.daemon.admin import AdminSocket, Kick, Look, ask
from portus.reach.daemon.main import _admin_socket, prepare
from portus.reach.daemon.metrics import application
from portus.reach.daemon.options import ServeOptions
from portus.reach.daemon.server import Server
from portus.reach.protocol import messages as said
from tests.hosts import Host, connect_again_at_once, free_port, url
from tests.moments import until
from tests.unit.cli.scene import portus as command
from tests.unit.cli.scene import portus_json
from tests.unit.daemon.test_session import DATA, LENGTHS, client, confirm, offered

STATE = {"x": torch.arange(100_000)}


@contextlib.contextmanager
def started(options: ServeOptions, path: str) -> Iterator[Server]:
    server = prepare(options)
    desk = AdminSocket(path, server, options)
    server.start()
    desk.start()
    try:
        yield server
    finally:
        desk.stop()
        assert server.stop()


@pytest.fixture
def desk(tmp_path: Path) -> str:
    return str(tmp_path / "desk.sock")


@pytest.fixture
def server(tmp_path: Path, desk: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    connect_again_at_once(monkeypatch)
    monkeypatch.chdir(tmp_path)
    options = ServeOptions(place=str(tmp_path / "pools"), listen=["127.0.0.1:0"], quota="64M")
    with started(options, desk) as made:
        yield made


def test_tenants_and_connections_are_shown(server: Server, desk: str) -> None:
    with portus.PoolCheckpointer(url(server, "one"), "run") as run, client(server, "two") as link:
        run.save(STATE, 1).wait()
        link.ask(said.Pin(5))
        link.ask(said.Begin("m", 7, b"t" * 16, LENGTHS))
        found = portus_json("admin", desk)
        assert found["place"] == server.house.pools.place
        assert found["addresses"] == [url(server)]
        one, two = found["tenants"]
        assert (one["tenant"], one["quota"], one["versions"]) == ("one", 64 << 20, 1)
        assert one["size"] >= one["free"] > 0 < one["on_disk"]
        assert (one["claims"], one["saves"], one["poisoned"]) == (["run"], 0, False)
        assert (two["pins"], two["saves"], two["claims"]) == (1, 1, ["m"])
        [raw] = [each for each in found["connections"] if each["tenant"] == "two"]
        assert raw.items() >= {"saving": "m@7", "pins": 1, "claims": ["m"]}.items()
        assert 0 <= raw["seconds"] < 60
        assert two["connections"] == 1
        told = command("admin", "show", desk)
        assert told.code == 0
        assert "64.0 MiB" in told.out
        assert "m@7" in told.out
        assert raw["peer"] in told.out


def test_a_tenant_is_kicked_and_no_other(server: Server, desk: str) -> None:
    with portus.PoolCheckpointer(url(server, "one"), keep=None, on_error="raise") as run:
        run.save(STATE, 1).wait()
        with client(server, "two") as link:
            assert portus_json("admin", "kick", desk, "one")["ended"] >= 1
            until(lambda: [each.tenant for each in server.status()] == ["two"])
            link.ask(said.Status())
            run.save(STATE, 2).wait()
            peer = next(each.peer for each in server.status() if each.tenant == "two")
            assert portus_json("admin", "kick", desk, peer)["ended"] == 1
            with pytest.raises(TransportError):
                link.ask(said.Status())
    assert portus_json("admin", "kick", desk, "nobody")["ended"] == 0


def test_of_a_read_only_tenant_nothing_is_saved_or_removed_and_all_is_read(
    server: Server, desk: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "portus.daemon")
    portus_json("admin", "read-only", desk, "later")
    with portus.PoolCheckpointer(url(server), keep=None, on_error="raise") as run:
        run.save(STATE, 1).wait()
        assert portus_json("admin", "read-only", desk, "default")["read_only"]
        with pytest.raises(BusyError, match="made tenant 'default' read-only"):
            run.save(STATE, 2).wait()
        with client(server) as link:
            answer = link.ask(said.Retire(run.versions()[0].token))
            assert isinstance(answer, said.Refused), "removed"
        with portus.PoolCheckpointer(url(server, "other"), on_error="raise") as other:
            other.save(STATE, 1).wait()
        with (
            portus.PoolCheckpointer(url(server, "later"), on_error="raise") as later,
            pytest.raises(BusyError, match="'later' read-only"),
        ):
            later.save(STATE, 1).wait()
        shown = {
            each["tenant"]: each["read_only"] for each in portus_json("admin", desk)["tenants"]
        }
        assert shown == {"default": True, "later": True, "other": False}
        assert torch.equal(run.load(1)["x"], STATE["x"])
        portus_json("admin", "read-only", desk, "default", "--off")
        run.save(STATE, 3).wait()
        with portus.open(url(server)) as pool:
            assert pool.steps() == [1, 3]
    refused = [each for each in caplog.records if " refused: " in each.getMessage()]
    assert {each.levelno for each in refused} == {logging.INFO}, "no error of the host"
    assert command("admin", "read-only", desk, "no/name").code == 2


def test_who_has_no_secret_and_is_not_there_is_made_read_only_by_mistake(
    tmp_path: Path, desk: str
) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("trainer 0123456789abcdef\n")
    secrets.chmod(0o600)
    options = ServeOptions(
        place=str(tmp_path / "pools"), listen=["127.0.0.1:0"], secret_path=str(secrets)
    )
    with started(options, desk) as server:
        for more in ([], ["--off"]):
            refused = command("admin", "read-only", desk, "trianer", *more)
            assert refused.code == 2
            assert "expected a tenant that has a secret, such as trainer, found 'trianer'" in (
                refused.err
            )
            assert command("admin", "read-only", desk, "trainer", *more).code == 0
        server.house.pools.of("gone")  # it came in when it had a secret
        assert command("admin", "read-only", desk, "gone").code == 0
        assert server.house.pools.of("gone").standstill


def test_a_drain_waits_for_saves_under_way_and_lets_none_begin(server: Server, desk: str) -> None:
    with client(server) as link, client(server, model="other") as second:
        offered(link)
        drained = command("admin", "drain", desk, "--wait", "0.05", "--json")
        assert (drained.code, json.loads(drained.out)["saves"]) == (75, 1)
        answer = second.ask(said.Begin("other", 1, b"o" * 16, LENGTHS))
        assert isinstance(answer, said.Refused)
        assert "is draining this storage host" in answer.text
        waiting = threading.Thread(target=command, args=("admin", "drain", desk), daemon=True)
        waiting.start()
        link.send_payload(said.DATA, memoryview(b"".join(DATA)))
        assert isinstance(link.hear(), said.Hashed)
        confirm(link)
        waiting.join(30)
        assert not waiting.is_alive()
        assert portus_json("admin", "drain", desk) == {"draining": True, "saves": 0}
        assert portus_json("admin", desk)["draining"]
        assert portus_json("admin", "drain", desk, "--off") == {"draining": False, "saves": 0}
        answer = second.ask(said.Begin("other", 1, b"o" * 16, LENGTHS))
        assert isinstance(answer, said.Done)


def page(server: Server, path: str) -> tuple[str, str]:
    """What a reader of the metrics gets: status and text."""
    told: list[str] = []
    environ: dict[str, Any] = {"PATH_INFO": path}
    setup_testing_defaults(environ)
    answer = application(server)

    def start(status: str, *_: object) -> Any:
        told.append(status)

    text = b"".join(answer(environ, start)).decode()
    return told[0], text


def gauge(server: Server) -> float:
    lines = page(server, "/metrics")[1].splitlines()
    [line] = [each for each in lines if each.startswith('portus_poisoned{tenant="default"}')]
    return float(line.split()[1])


def test_after_an_error_of_the_disk_a_pool_takes_no_saves_until_the_host_starts_again(
    tmp_path: Path, desk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "pools"
    options = ServeOptions(place=str(place), listen=["127.0.0.1:0"])
    ill = ("503 Service Unavailable", "default: accepts no more writes\n")

    def fails(number: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def save(run: portus.PoolCheckpointer, step: int) -> None:
        run.save({"x": STATE["x"] + step}, step).wait()

    with started(options, desk) as server, saver(server) as run:
        save(run, 1)
        assert (gauge(server), page(server, "/healthz")) == (0, ("200 OK", "ok\n"))
        monkeypatch.setattr(server.house.pools.of("default").writer.medium, "_sync", fails)
        with pytest.raises(MediumError):
            save(run, 2)
        assert (gauge(server), page(server, "/healthz")) == (1, ill)
        assert portus_json("admin", desk)["tenants"][0]["poisoned"]
        assert "start the host again" in command("admin", desk).out
        assert command("verify", place, "--rate", "1G/s").code == 0
    with started(options, desk) as server, saver(server) as run:
        save(run, 3)
        assert (gauge(server), page(server, "/healthz")) == (0, ("200 OK", "ok\n"))
        assert run.steps() == [1, 3]
    assert portus.check(place / "default.portus") == []


def saver(server: Server) -> portus.PoolCheckpointer:
    return portus.PoolCheckpointer(url(server), keep=None, on_error="raise")


def test_the_socket_is_the_operators_alone_and_what_is_not_known_is_refused(
    server: Server, desk: str, tmp_path: Path
) -> None:
    assert stat.S_IMODE(os.stat(desk).st_mode) == 0o600
    for line in (b"{}\n", b'{"type":"Format"}\n', b"\xff\n"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.connect(desk)
            asking.sendall(line)
            assert b'"fault":"usage"' in asking.recv(1000)
    with pytest.raises(UsageError, match="no storage host of this machine"):
        ask(str(tmp_path / "nobody.sock"), Look())
    with pytest.raises(UsageError, match="another machine"):
        ask("portus://192.0.2.1:7117", Kick("all"))
    with pytest.raises(UsageError, match=r"serve --admin PATH"):
        ask(f"portus://127.0.0.1:{free_port()}", Look())


def test_a_host_is_found_by_its_address_and_reads_again_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with Host("memory:1M") as host:
        assert portus_json("admin", host.url)["place"] == "memory:1M"
        assert command("admin", "reload", host.url).code == 0
        host.until("by the operator: Reload()")
        path = tmp_path / "portus" / f"{host.port}.sock"
        assert path.exists()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert host.stop() == 0
        assert not path.exists()


def test_an_address_needs_no_scheme(server: Server, tmp_path: Path) -> None:
    port = server.listeners[0].port
    with pytest.raises(UsageError, match=f"no socket for the operator at .*/{port}.sock"):
        ask(f"127.0.0.1:{port}", Look())
    with pytest.raises(UsageError, match="another machine"):
        ask("192.0.2.1:7117", Look())
    with pytest.raises(UsageError, match=r"portus\+tls://host:port or host:port"):
        ask("127.0.0.1", Look())
    (tmp_path / "desk:1").touch()
    with pytest.raises(UsageError, match="listens at desk:1; expected its address"):
        ask("desk:1", Look())


def test_the_places_that_are_told_are_those_that_were_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    one = f"at /run/portus/{port}.sock ($XDG_RUNTIME_DIR is not set). "
    assert one in command("admin", f"portus+tls://127.0.0.1:{port}").err
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/user")
    two = f"at /run/portus/{port}.sock or /user/portus/{port}.sock. "
    assert two in command("admin", f"portus+tls://127.0.0.1:{port}").err


@pytest.mark.parametrize(("variable", "why"), [("", "neither $"), ("XDG_RUNTIME_DIR", "no port")])
def test_a_host_without_a_socket_for_its_operator_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, why: str
) -> None:
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    options = ServeOptions(place="memory:1M", listen=[f"unix:{tmp_path}/listener"])
    server = prepare(options)
    try:
        desk, line = _admin_socket(options, server)
    finally:
        server.stop()
    assert desk is None
    assert line.startswith("no socket for `portus admin`: ")
    assert why in line
    assert "--admin PATH" in line
