"""A host that reads its files again: nobody is cut off, and no save is lost."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import portus
from portus.errors import MediumError, UsageError
from portus.reach.daemon.main import prepare
from portus.reach.daemon.options import ServeOptions, reload
from portus.reach.daemon.pools import Pools, Quotas, read_quotas
from portus.reach.daemon.secrets import SECRETS_MAX, Secrets, read_secrets
from portus.reach.daemon.server import Server
from portus.reach.protocol.proof import prove
from tests.hosts import Host, connect_again_at_once, url
from tests.unit.daemon.test_main import certificate

OLD, NEW = "o" * 32, "n" * 32
STATE = {"x": torch.arange(1000)}


def write(path: Path, *lines: str) -> str:
    path.touch(mode=0o600)
    path.write_text("\n".join(lines))
    return str(path)


@contextlib.contextmanager
def started(options: ServeOptions) -> Iterator[Server]:
    server = prepare(options)
    server.start()
    try:
        yield server
    finally:
        assert server.stop()


@pytest.mark.long
def test_every_save_survives_a_change_of_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_again_at_once(monkeypatch)
    here, there = tmp_path / "here", tmp_path / "there"
    monkeypatch.setenv("PORTUS_SECRET_FILE", write(here, OLD))
    with (
        Host(tmp_path / "pools", "--secret-file", write(there, OLD)) as host,
        portus.PoolCheckpointer(host.url, keep=None, on_error="raise") as run,
    ):

        def read_again(*secrets: str) -> None:
            write(there, *secrets)
            host.process.send_signal(signal.SIGHUP)
            host.until("reloaded")

        run.save(STATE, 1).wait()
        read_again(OLD, NEW)
        run.save(STATE, 2).wait()
        write(here, NEW)
        read_again(NEW)
        run.save(STATE, 3).wait()  # over connections that are there
        assert host.stop() == 0
        host.start()
        for step in (4, 5):
            run.save(STATE, step).wait()  # what the trainer knew is refused, and it reads again
        with portus.open(host.url) as pool:
            assert pool.steps() == [1, 2, 3, 4, 5]
        write(here, OLD)
        with pytest.raises(UsageError, match="wrong secret"):
            portus.PoolCheckpointer(host.url)


def test_of_two_secrets_each_is_as_good_and_the_host_proves_the_same() -> None:
    def proof(secret: str, tenant: str = "a") -> bytes:
        return prove("client", secret.encode(), tenant, b"c", b"h")

    secrets = Secrets({"a": (OLD.encode(), NEW.encode()), "b": (OLD.encode(),)})
    assert secrets.match_proof("a", proof(OLD), b"c", b"h") == OLD.encode()
    assert secrets.match_proof("a", proof(NEW), b"c", b"h") == NEW.encode()
    assert secrets.match_proof("b", proof(NEW, "b"), b"c", b"h") is None
    assert secrets.match_proof("c", proof(OLD, "c"), b"c", b"h") is None
    assert Secrets(None).match_proof("c", b"", b"c", b"h") == b""


def test_a_tenant_has_so_many_secrets_at_most(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", *(f"a {each * 32}" for each in "123"))
    with pytest.raises(UsageError, match=f"'a' has more than {SECRETS_MAX} secrets"):
        read_secrets(path)


def test_new_connections_see_the_new_certificate(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    options = ServeOptions(place="memory:1M", listen=["127.0.0.1:0"], cert_path=cert, key_path=key)
    with started(options) as server:
        place = ("127.0.0.1", server.listeners[0].port)
        assert ssl.get_server_certificate(place) == Path(cert).read_text()
        before = Path(cert).read_text()
        certificate(tmp_path)
        assert ssl.get_server_certificate(place) == before
        reload(options, server)
        assert ssl.get_server_certificate(place) == Path(cert).read_text() != before


def test_what_cannot_be_read_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas, secret = tmp_path / "quotas", tmp_path / "secret"
    monkeypatch.setenv("PORTUS_SECRET_FILE", write(secret, OLD))
    options = ServeOptions(
        place="memory:8M",
        listen=["127.0.0.1:0"],
        secret_path=write(tmp_path / "there", OLD),
        quota_path=write(quotas, "default 1M"),
    )
    with started(options) as server:
        hosted = server.house.pools.of("default")
        write(tmp_path / "there", NEW)
        wrongs = ("default much", "default 1M 2M", "default 1M\ndefault 2M", "/ 1M", "nobody 1M")
        for wrong in wrongs:
            write(quotas, wrong)
            with pytest.raises(UsageError):
                reload(options, server)
        write(quotas, "default 2M")
        write(tmp_path / "there", "short")
        with pytest.raises(UsageError, match="expected a secret of"):
            reload(options, server)
        assert hosted.writer.max_bytes == 1 << 20
        portus.PoolCheckpointer(url(server)).close()
    assert caplog.text.count("the old ones stay") == 1 + len(wrongs)


def test_a_quota_of_a_tenant_that_has_no_secret_is_refused_where_secrets_are_asked_for(
    tmp_path: Path,
) -> None:
    quotas = write(tmp_path / "quotas", "trainer 1M", "trianer 2M")
    secrets = write(tmp_path / "secrets", f"trainer {OLD}", f"other {NEW}")
    wish = ServeOptions(place="memory:8M", listen=["127.0.0.1:0"], quota_path=quotas)
    said = f"--quota-file {quotas}: expected a tenant that has a secret, such as other, trainer, "
    with pytest.raises(UsageError, match=f"^{re.escape(said)}found 'trianer'"):
        prepare(replace(wish, secret_path=secrets))
    assert prepare(wish).stop(), "anybody may come as that one"


def test_quotas_are_each_tenants_own_and_may_change_in_the_middle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "quotas", "# of the small ones", "small 1M")
    options = ServeOptions(
        place=str(tmp_path / "pools"), listen=["127.0.0.1:0"], quota="64M", quota_path=path
    )
    big = {"x": torch.zeros(1 << 20)}
    with started(options) as server:
        with portus.PoolCheckpointer(url(server, "big"), on_error="raise") as run:
            run.save(big, 1).wait()
        with portus.PoolCheckpointer(url(server, "small"), on_error="raise") as run:
            with pytest.raises(MediumError, match="quota is 1048576"):
                run.save(big, 1).wait()
            write(tmp_path / "quotas", "small 32M")
            reload(options, server)
            run.save(big, 2).wait()
    assert "read again" in caplog.text


def test_memory_is_the_most_whatever_the_quota(tmp_path: Path) -> None:
    quotas = read_quotas("1G", write(tmp_path / "quotas", "small 16K"))
    pools = Pools("memory:1M", quotas)
    assert pools.of("small").writer.max_bytes == 16 << 10
    assert pools.of("other").writer.max_bytes == 1 << 20
    pools.limit(Quotas())
    assert pools.of("small").writer.max_bytes == 1 << 20
    pools.close()
