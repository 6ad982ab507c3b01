"""``portus serve POOL --replica portus://other``: two hosts, of which one may be lost."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import portus
from portus.errors import BusyError, PortusError, StaleError, TransportError, UsageError
from portus.reach.daemon.main import prepare
from portus.reach.daemon.options import ServeOptions
from portus.reach.daemon.server import Server
from portus.reach.mirror.address import parse as parse_store
from portus.reach.mirror.commit_numbers import REPLICA
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.objects import State
from portus.reach.protocol.address import Address, Scheme, parse
from portus.reach.protocol.messages import VERSION
from tests.hosts import Host, connect_again_at_once, free_port, serving, url
from tests.moments import until
from tests.same import assert_same
from tests.simulation.lossy import LossyLink
from tests.warm import in_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only")


def state(step: int) -> dict[str, Any]:
    return {"frozen": torch.arange(1000), "model": torch.full((64,), float(step)), "step": step}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of reference files are in a directory of the test, and nobody waits for long."""
    monkeypatch.chdir(tmp_path)
    connect_again_at_once(monkeypatch)
    monkeypatch.setattr("portus.reach.mirror.background_copier._PAUSE_MIN_S", 0.01)
    monkeypatch.setattr("portus.reach.mirror.commit_numbers.PAUSE_MAX_S", 0.05)


class Two:
    """A host, its replica, and what is between them."""

    def __init__(self, first: Server, second: Server, between: LossyLink) -> None:
        self.first = first
        self.second = second
        self.between = between

    @property
    def both(self) -> str:
        """The address of the two."""
        return f"{url(self.first)}+127.0.0.1:{self.second.listeners[0].port}"

    def cut(self) -> None:
        """Neither host reaches the other."""
        self.between.cut_after = self.between.relayed
        self.between.cut()

    def heal(self) -> None:
        self.between.cut_after = None

    def log(self) -> State:
        """What the log says."""
        store = self.second.house.pools.of("default").objects.below(REPLICA)
        return Mirror(store, "net").read()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with (
        serving(tmp_path / "second") as second,
        LossyLink("127.0.0.1", second.listeners[0].port) as between,
        serving(tmp_path / "first", replica=f"portus://127.0.0.1:{between.port}") as first,
    ):
        yield Two(first, second, between)


def saved(saver: portus.PoolCheckpointer, *steps: int) -> None:
    for step in steps:
        saver.save(state(step), step).wait()


def steps_at(server: Server) -> list[int]:
    with portus.open(url(server)) as pool:
        return pool.steps("net")


def copiers() -> int:
    """The threads that copy the model, of both hosts."""
    return sum(each.name == "portus-mirror-net" for each in threading.enumerate())


@pytest.mark.parametrize("durable", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_training_goes_on_at_the_replica_when_its_host_is_killed(
    tmp_path: Path, durable: Literal[1, 2]
) -> None:
    """With durable=2 nothing that was told is lost; with durable=1 the lag at most."""
    with (
        Host(tmp_path / "second") as second,
        Host(tmp_path / "first", "--replica", second.url) as first,
        portus.PoolCheckpointer(
            f"{first.url}+127.0.0.1:{second.port}", "net", durable=durable
        ) as saver,
    ):
        saved(saver, 1, 2, 3)
        first.kill()
        loaded = saver.load()
        assert isinstance(loaded, dict)
        assert_same(loaded, state(loaded["step"]))
        assert loaded["step"] == 3 or (durable == 1 and loaded["step"] in (1, 2))
        saved(saver, 4, 5)
        assert_same(saver.load(), state(5))
        if durable == 2:
            assert [info.step for info in saver.versions()] == [4, 5], "the others are let go of"


@pytest.mark.long
def test_pointers_of_before_and_after_a_host_was_killed_lead_to_their_states(
    tmp_path: Path,
) -> None:
    settings = portus.Settings(durable=2, journal=False, on_error="raise")
    with (
        Host(tmp_path / "second") as second,
        Host(tmp_path / "first", "--replica", second.url) as first,
    ):
        pool = portus.Place.parse(f"{first.url}+127.0.0.1:{second.port}")
        with contextlib.closing(portus.TrainingFiles(settings, pool=pool)) as files:
            files.begin("net", str(tmp_path / ".portus"), str(tmp_path))
            for step in (1, 2, 3, 4, 5):
                files.save(state(step), str(tmp_path / f"{step % 2}.ckpt"), step).wait()
                for each in range(max(1, step - 1), step + 1):
                    assert_same(portus.load(tmp_path / f"{each % 2}.ckpt"), state(each))
                if step == 3:
                    first.kill()
        assert portus.is_reference(tmp_path / "1.ckpt")
        with portus.open(second.url) as view:
            assert view.steps("net") == [4, 5], "the others are let go of"


@pytest.mark.long
def test_a_pointer_loads_from_the_second_host_when_the_first_one_is_gone(tmp_path: Path) -> None:
    """In a process that saves nothing: before a training that resumes has saved."""
    with (
        Host(tmp_path / "second") as second,
        Host(tmp_path / "first", "--replica", second.url) as first,
    ):
        address, path = f"{first.url}+127.0.0.1:{second.port}", tmp_path / "a.ckpt"
        settings = portus.Settings(durable=2, journal=False, on_error="raise")
        pool = portus.Place.parse(address)
        with contextlib.closing(portus.TrainingFiles(settings, pool=pool)) as files:
            files.begin("net", str(tmp_path / ".portus"), str(tmp_path))
            files.save(state(1), str(path), 1).wait()
        first.kill()
        program = f"import portus; assert portus.load({str(path)!r})['step'] == 1"
        told = in_process(program, PORTUS_POOL=address)
        assert told.returncode == 0, told.stderr


def test_of_two_sides_that_do_not_reach_each_other_one_alone_commits(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    """A client on each side. After healing the one that was left behind is named, goes nowhere, and
    is not resumed; the terms are those of who counted."""
    with portus.PoolCheckpointer(url(two.first), "net", durable=2) as left:
        saved(left, 1)
        two.cut()
        with portus.PoolCheckpointer(url(two.second), "net", durable=2) as right:
            assert_same(right.load(), state(1))
            with pytest.raises(TransportError, match="durable=2 that counts as failed"):
                saved(left, 9)
            saved(right, 2)
            with pytest.raises(TransportError, match="durable=2 that counts as failed"):
                saved(left, 10)
            two.heal()
            with caplog.at_level(logging.ERROR):
                until(lambda: two.first.house.pools.of("default").replica.failure != "")
                with pytest.raises(PortusError):
                    saved(left, 11)
            saved(right, 3)
            with pytest.raises(PortusError, match="continued elsewhere"):
                saved(left, 12)
    assert "continued elsewhere" in caplog.text
    firsts, seconds = (each.house.pools.of("default") for each in (two.first, two.second))
    assert [term.pool for term in two.log().terms] == [
        firsts.writer.uuid,
        seconds.writer.uuid,
    ]
    assert not {9, 10, 11, 12} & {each.step for each in two.log().versions}
    with pytest.raises(StaleError, match=r"step 3, in term 2, at portus://127.0.0.1:\d+"):
        portus.PoolCheckpointer(url(two.first), "net")
    assert firsts.replica.missing() == [], "nothing is copied from here any more"
    with portus.PoolCheckpointer(two.both, "net") as resumed:
        assert_same(resumed.load(), state(3))


def test_with_durable_1_what_a_side_that_is_cut_off_commits_is_said_to_be_superseded(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    with portus.PoolCheckpointer(url(two.first), "net") as left:
        saved(left, 1)
        until(lambda: len(two.log().versions) == 1)
        two.cut()
        saved(left, 8, 9)
        with portus.PoolCheckpointer(url(two.second), "net") as right:
            saved(right, 2)
            with caplog.at_level(logging.ERROR):
                two.heal()
                until(lambda: "continued" in two.first.house.pools.of("default").replica.failure)
            with pytest.raises(StaleError, match="continued elsewhere"):
                saved(left, 10)
            saved(right, 3)
    assert "continued elsewhere" in caplog.text
    assert steps_at(two.second)[-1] == 3
    assert {each.step for each in two.log().versions} == set(steps_at(two.second))


def test_a_host_that_comes_back_is_used_again_once_what_does_not_count_is_let_go_of(
    two: Two,
) -> None:
    """The first host leads in term 1, its replica in 2, and it again in 3; what the replica let
    go of meanwhile, or the first host, comes back nowhere."""
    with portus.PoolCheckpointer(url(two.first), "net", durable=2) as saver:
        saved(saver, 1, 2)
    with portus.PoolCheckpointer(url(two.second), "net", durable=2) as saver:
        saved(saver, 3, 4)
        hosted = two.first.house.pools.of("default")
        hosted.writer.retire(hosted.writer.catalogue().ids())
        with pytest.raises(BusyError, match="another client saves model 'net' at portus"):
            portus.PoolCheckpointer(url(two.first), "net")
        before = copiers()
        hosted.replica.note_change(["net"])
        assert copiers() == before, "who was refused leads"
    with portus.PoolCheckpointer(two.both, "net", durable=2) as saver:
        assert_same(saver.load(), state(4))
        saved(saver, 5)
    assert steps_at(two.first) == [4, 5]
    assert [term.number for term in two.log().terms] == [1, 2, 3]
    with portus.PoolCheckpointer(url(two.second), "net") as saver:
        assert_same(saver.load(), state(5))
        assert steps_at(two.second) == [4, 5]


def test_what_the_replica_finds_no_room_for_in_its_log_is_not_told_where_it_leads(
    two: Two,
) -> None:
    """It would count for nobody: who leads next goes by the log."""
    with portus.PoolCheckpointer(url(two.first), "net", durable=2) as saver:
        saved(saver, 1)
    hosted = two.second.house.pools.of("default")
    with portus.PoolCheckpointer(url(two.second), "net", keep=1) as saver:
        saved(saver, 2)
        hosted.writer.max_bytes = hosted.writer.medium.size
        with pytest.raises(PortusError, match="the quota leaves"):
            saved(saver, 3)
        hosted.writer.max_bytes = None
        saved(saver, 4)
    assert steps_at(two.second) == [4]
    assert [each.step for each in two.log().versions] == [4]


def test_a_host_that_does_not_reach_its_replica_grants_what_it_has_and_nothing_new(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would know of a new model, nor whether it went on."""
    with portus.PoolCheckpointer(url(two.first), "net") as saver:
        saved(saver, 1)
    two.cut()
    with caplog.at_level(logging.ERROR), portus.PoolCheckpointer(url(two.first), "net") as saver:
        saved(saver, 2)
        replica = two.first.house.pools.of("default").replica
        assert [info.step for info in replica.missing()] == [2] or replica.failure
        assert replica.lag_s > 0
    assert "saved here WITHOUT its replica" in caplog.text
    with pytest.raises(TransportError):
        portus.PoolCheckpointer(url(two.first), "other")
    with pytest.raises(TransportError):
        portus.PoolCheckpointer(url(two.first), "net", durable=2)
    two.heal()
    with portus.PoolCheckpointer(two.both, "net", durable=2) as saver:
        assert_same(saver.load(), state(2))


def test_the_second_host_begins_nothing_of_which_it_knows_nothing(tmp_path: Path) -> None:
    """The first one may have a history, and not be served with --replica."""
    with serving(tmp_path / "second") as second:
        both = f"portus://127.0.0.1:{free_port()}+127.0.0.1:{second.listeners[0].port}"
        with pytest.raises(TransportError, match="keeps no replica of model 'net'"):
            portus.PoolCheckpointer(both, "net")


def test_what_did_not_change_is_sent_to_the_replica_once(two: Two) -> None:
    """Though what is before it in the file does, and moves it."""
    frozen, sent = torch.rand(5 << 20), []
    with portus.PoolCheckpointer(two.both, "net", durable=2) as saver:
        for step in (1, 2, 3):
            before = two.between.relayed
            state = {"text": "x" * 99 * step, "frozen": frozen, "head": torch.rand(1000)}
            saver.save(state, step).wait()
            sent.append(two.between.relayed - before)
    assert sent[0] > frozen.nbytes
    assert max(sent[1:]) < 1 << 20


def test_durable_2_takes_two_hosts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"durable=2: expected a storage host that has a replica"):
        portus.PoolCheckpointer(tmp_path / "run.portus", "net", durable=2)
    with (
        serving(tmp_path / "alone") as alone,
        pytest.raises(UsageError, match="on this host alone: durable=2 takes one that is served"),
    ):
        portus.PoolCheckpointer(url(alone), "net", durable=2)
    for wrong in (0, 3, "2"):
        with pytest.raises(UsageError, match="durable: expected 1 or 2"):
            portus.Settings(durable=wrong)  # type: ignore[arg-type]


def test_tenants_are_copied_to_the_tenants_of_their_names_by_their_own_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"anna": b"a" * 32, "ben": b"b" * 32}
    with (
        serving(tmp_path / "second", secrets=secrets) as second,
        serving(tmp_path / "first", secrets=secrets, replica=url(second)) as first,
    ):
        for number, tenant in enumerate(secrets):
            secret = tmp_path / tenant
            secret.write_bytes(secrets[tenant])
            secret.chmod(0o600)
            monkeypatch.setenv("PORTUS_SECRET_FILE", str(secret))
            for server in (first, second):
                with portus.PoolCheckpointer(url(server, tenant), "net", durable=2) as saver:
                    saved(saver, number + len(saver.versions()))
                    assert_same(saver.load(), state(number + len(saver.versions()) - 1))


def test_what_cannot_be_a_replica_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(replica: str, **more: Any) -> None:
        prepare(
            ServeOptions(
                place=str(tmp_path / "first"), listen=["127.0.0.1:0"], replica=replica, **more
            )
        )

    with pytest.raises(UsageError, match="expected a storage host, portus://host:7117"):
        started("s3://bucket")
    with pytest.raises(UsageError, match="expected one host, portus://host:7117, without a tenant"):
        started("portus://anna@other")
    with pytest.raises(UsageError, match="expected one host"):
        started("portus://a+b")
    with pytest.raises(UsageError, match="--mirror and --replica"):
        started("portus://a", mirror=f"file://{tmp_path}/bucket")
    port = free_port()
    with pytest.raises(UsageError, match="this is the host itself"):
        prepare(
            ServeOptions(
                place=str(tmp_path / "first"),
                listen=[f"127.0.0.1:{port}"],
                replica=f"portus://localhost:{port}",
            )
        )
    with (
        serving(tmp_path / "secret", secrets={"default": b"s" * 32}) as secret,
        pytest.raises(UsageError, match="needs a secret"),
    ):
        started(url(secret))
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"w" * 32)
    wrong.chmod(0o600)
    with (
        serving(tmp_path / "secret", secrets={"default": b"s" * 32}) as secret,
        pytest.raises(UsageError, match=r"--replica .* wrong secret"),
    ):
        started(url(secret), secret_path=str(wrong))
    monkeypatch.setattr("portus.reach.daemon.session.VERSION", VERSION + 1)
    with (
        serving(tmp_path / "later") as later,
        pytest.raises(UsageError, match=r"--replica .* upgrade the older"),
    ):
        started(url(later))


def test_a_replica_that_answers_later_and_speaks_another_version_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = Address(Scheme.TCP, host="127.0.0.1", port=free_port())
    with Host(tmp_path / "first", "--replica", str(address)) as first:
        # Of the second host alone: the first one is another process.
        monkeypatch.setattr("portus.reach.daemon.session.VERSION", VERSION + 1)
        named = f"{address}: the storage host says: .*: this host speaks {VERSION + 1}; upgrade"
        with serving(tmp_path / "second", address=address):
            for where in (first.url, f"{first.url}+127.0.0.1:{address.port}"):
                with pytest.raises(UsageError, match=named):
                    portus.PoolCheckpointer(where, "net")
        with portus.open(first.url) as pool:
            assert list(pool.versions()) == []


def test_an_address_of_two_hosts_is_one_and_its_replica() -> None:
    found = parse("portus+tls://anna@a:1+[::1]:2")
    assert [str(each) for each in found.each] == [
        "portus+tls://anna@a:1",
        "portus+tls://anna@[::1]:2",
    ]
    assert parse(str(found)) == found
    assert str(parse("portus://a+b")) == "portus://a:7117+b:7117"
    for wrong in ("portus://a+a", "portus://a+b+c", "portus://a+", "portus://+b", "portus://a+b:x"):
        with pytest.raises(UsageError):
            parse(wrong)
    with pytest.raises(UsageError, match="a mirror is on one storage host"):
        parse_store("portus://a+b")
