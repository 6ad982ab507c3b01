"""``portus serve POOL --replica portus://other``: two hosts, of which one may be lost."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace

import portus
from portus.engine.copying.segments import Stop
from portus.errors import (
    BusyError,
    CorruptionError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.reach.daemon.leads import Lead
from portus.reach.daemon.main import prepare
from portus.reach.daemon.options import ServeOptions
from portus.reach.daemon.server import Server
from portus.reach.index.directory import create_pool
from portus.reach.media.local import LocalFiles
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import Address, Scheme, parse
from portus.reach.protocol.messages import VERSION
from portus.reach.transport.dial import Credentials
from portus.reach.transport.host import Links
from portus.reach.versions.copy_version import copy_version
from portus.reach.versions.host import HostPool
from portus.reach.versions.pool_draft import PoolDraft
from tests.device import stand_in
from tests.hosts import Host, connect_again_at_once, free_port, serving, url
from tests.moments import is_in, until
from tests.same import assert_same
from tests.simulation.lossy import LossyLink
from tests.unit.cli.scene import pointing
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
    monkeypatch.setattr("portus.reach.daemon.leader.PAUSE_MAX_S", 0.05)


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

    def lead(self) -> Lead:
        """Who leads the model, as the second host knows it."""
        return self.second.house.pools.of("default").leads.of("net")


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


def test_a_load_takes_no_lead(tmp_path: Path, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that does not reach the first host, and has a pointer to a version that went."""
    settings = portus.Settings(durable=2, journal=False, on_error="raise")
    pool = portus.Place.parse(two.both)
    with contextlib.closing(portus.TrainingFiles(settings, pool=pool)) as files:
        files.begin("net", str(tmp_path / ".portus"), str(tmp_path))
        path = tmp_path / "a.ckpt"
        files.save(state(1), str(path), 1).wait()
        shutil.copy(path, tmp_path / "old.ckpt")
        files.save(state(2), str(path), 2).wait()
        program = (
            "import portus\n"
            f"assert portus.load({str(path)!r})['step'] == 2\n"
            f"portus.load({str(tmp_path / 'old.ckpt')!r})\n"
        )
        second = two.second.listeners[0].port
        told = in_process(
            program, PORTUS_POOL=f"portus://127.0.0.1:{free_port()}+127.0.0.1:{second}"
        )
        assert "no storage host answers" in told.stderr
        files.save(state(3), str(path), 3).wait()
    assert two.lead().term == 1


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
    assert (two.lead().term, two.lead().pool) == (2, seconds.writer.uuid)
    assert not {9, 10, 11, 12} & set(steps_at(two.second))
    with pytest.raises(StaleError, match=r"step 3, in term 2, at portus://127.0.0.1:\d+"):
        portus.PoolCheckpointer(url(two.first), "net")
    assert firsts.replica.missing() == [], "nothing is copied from here any more"
    with portus.PoolCheckpointer(two.both, "net") as resumed:
        assert_same(resumed.load(), state(3))


@pytest.mark.parametrize("at", ["first", "second"])
def test_of_two_clients_that_leave_each_other_behind_one_goes_on(two: Two, at: str) -> None:
    """The one that was cut off, and comes back when the other one has saved at the other host."""
    servers = {"first": two.first, "second": two.second}
    with ExitStack() as ways:
        links = [
            ways.enter_context(LossyLink("127.0.0.1", each.listeners[0].port))
            for each in servers.values()
        ]
        both = f"portus://127.0.0.1:{links[0].port}+127.0.0.1:{links[1].port}"
        if at == "second":
            with portus.PoolCheckpointer(two.both, "net") as saver:
                saved(saver, 1)
            until(lambda: steps_at(two.second) == [1])
            links[0].cut_after = 0
        left = ways.enter_context(portus.PoolCheckpointer(both, "net", durable=2, keep=None))
        saved(left, 2)
        for link in links:
            link.cut_after = 0
            link.cut()
        other = servers["first" if at == "second" else "second"]
        with portus.PoolCheckpointer(url(other), "net", durable=2, keep=None) as right:
            assert_same(right.load(), state(2))
            saved(right, 3)
            for link in links:
                link.cut_after = None
            for step in (4, 5):
                with pytest.raises(TransportError, match="another client"):
                    saved(left, step)
            saved(right, 6)
        with pytest.raises(TransportError, match="another client has saved model 'net'"):
            saved(left, 7)
    assert steps_at(two.second)[-2:] == [3, 6]


@pytest.mark.parametrize("newest", ["is removed", "is not at the second host"])
def test_a_lone_client_goes_on_where_the_newest_is_a_version_from_before_it(
    two: Two, newest: str
) -> None:
    """Nobody else saves: an older version is the newest there, and the client saw it."""
    replica = two.first.house.pools.of("default").replica
    with ExitStack() as ways:
        link = ways.enter_context(LossyLink("127.0.0.1", two.first.listeners[0].port))
        both = f"portus://127.0.0.1:{link.port}+127.0.0.1:{two.second.listeners[0].port}"
        with portus.PoolCheckpointer(both, "net", keep=None) as before:
            saved(before, 1)
            until(lambda: not replica.missing())
            if newest == "is not at the second host":
                two.cut()
            saved(before, 2)
            until(lambda: newest != "is removed" or not replica.missing())
        with portus.PoolCheckpointer(both, "net", keep=None) as saver:
            if newest == "is removed":
                with contextlib.closing(HostPool(url(two.first))) as pool:
                    pool.let_go([info.token for info in saver.versions() if info.step == 2])
            else:
                link.cut_after = 0
            link.cut()
            saved(saver, 3)
            assert_same(saver.load(), state(3))
        two.heal()


def test_with_durable_1_what_a_side_that_is_cut_off_commits_is_said_to_be_superseded(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    with portus.PoolCheckpointer(url(two.first), "net") as left:
        saved(left, 1)
        until(lambda: steps_at(two.second) == [1])
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
    assert steps_at(two.second) == [2, 3]


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
    assert two.lead().term == 3
    with portus.PoolCheckpointer(url(two.second), "net") as saver:
        assert_same(saver.load(), state(5))
        assert steps_at(two.second) == [4, 5]


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
        until(lambda: bool(replica.failure))
        assert 2 in [info.step for info in replica.missing()]
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


@pytest.mark.parametrize("place", ["pools", "memory:64M"])
def test_a_first_host_that_lost_all_has_it_again_when_it_listens(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all tenants, in the pool of the second host once, and with what pointers lead to."""
    places = [place if ":" in place else str(tmp_path / f"{place} {n}") for n in range(2)]
    with serving("memory:64M") as second:
        with serving(places[0], replica=url(second)) as first:
            for tenant in ("default", "anna"):
                with portus.PoolCheckpointer(url(first, tenant), "net", keep=2) as saver:
                    saved(saver, 1, 2, 3)
            with portus.PoolCheckpointer(url(first, "anna"), "taken over", durable=2) as saver:
                saved(saver, 1)
            with pointing(url(first), "other") as files:
                files.save(state(7), str(tmp_path / "a.ckpt"), 7).wait()
            for tenant in ("default", "anna"):
                hosted = first.house.pools.of(tenant)
                until(lambda hosted=hosted: not hosted.replica.missing())  # type: ignore[misc]
        for model in ("own", "taken over"):
            with portus.PoolCheckpointer(url(second, "anna"), model) as saver:
                saved(saver, 5)
        with serving(places[1], replica=url(second)) as first:
            assert {*first.house.pools.of("anna").writer.catalogue().models} == {"net"}
            portus.allow(url(first))
            assert_same(portus.load(tmp_path / "a.ckpt"), state(7))
            assert steps_at(first) == steps_at(second) == [2, 3]
            with portus.PoolCheckpointer(url(first, "anna"), "net", durable=2) as saver:
                assert_same(saver.load(), state(3))
                saved(saver, 4)
        assert second.house.pools.of("anna").leads.of("net").term == 2


def test_a_version_that_was_removed_at_the_first_host_does_not_come_back_as_newer_than_others(
    two: Two,
) -> None:
    """While the second host, which did not hear of it, went on."""
    with portus.PoolCheckpointer(two.both, "net", keep=None) as saver:
        saved(saver, 1, 2, 3)
        until(lambda: not two.first.house.pools.of("default").replica.missing())
    two.cut()
    with contextlib.closing(HostPool(url(two.first))) as pool:
        pool.let_go([e.info.token for e in pool.catalogue().entries() if e.info.step < 3])
    with portus.PoolCheckpointer(url(two.second), "net", keep=None) as saver:
        saved(saver, 4)
    two.heal()
    with portus.PoolCheckpointer(url(two.first), "net", durable=2, keep=None) as saver:
        assert [info.step for info in saver.versions()] == [3, 4]
        saved(saver, 5)
    until(lambda: steps_at(two.second) == [3, 4, 5])


def test_versions_of_a_first_host_take_their_space_once(two: Two) -> None:
    """At the second host, before and after it leads, and in a fresh pool that they are fetched to:
    all share what did not change."""
    frozen = torch.rand(5 << 20)
    with portus.PoolCheckpointer(two.both, "net", durable=2, keep=3) as saver:
        for step in (1, 2, 3):
            saver.save({"frozen": frozen, "head": torch.rand(1000)}, step).wait()
    second, first = (each.house.pools.of("default").writer for each in (two.second, two.first))
    assert second.kept_bytes() < 1.2 * frozen.nbytes
    with portus.PoolCheckpointer(url(two.second), "net", durable=2, keep=3) as saver:
        assert second.kept_bytes() < 1.2 * frozen.nbytes
        saver.save({"frozen": frozen, "head": torch.rand(1000)}, 4).wait()
    first.retire(first.catalogue().ids())
    with portus.PoolCheckpointer(url(two.first), "net", durable=2, keep=3):
        assert steps_at(two.first) == [2, 3, 4]
        assert first.kept_bytes() < 1.2 * frozen.nbytes


def test_what_a_save_lets_go_of_goes_from_the_second_host_in_the_same_commit(two: Two) -> None:
    """So no kill leaves two versions of a step there, and a save costs one commit."""
    with portus.PoolCheckpointer(two.both, "net", durable=2, keep=1) as saver:
        saved(saver, 1)
        writer = two.second.house.pools.of("default").writer
        for count, step in enumerate((2, 2, 3), writer.catalogue().root.sequence + 1):
            saved(saver, step)
            assert steps_at(two.second) == [step]
            assert writer.catalogue().root.sequence == count


def test_what_is_removed_at_the_first_host_goes_from_the_second(two: Two) -> None:
    with portus.PoolCheckpointer(two.both, "net", durable=2, keep=None) as saver:
        saved(saver, 1, 2, 3)
        with contextlib.closing(HostPool(url(two.first))) as pool:
            pool.let_go([saver.versions()[1].token])
        until(lambda: steps_at(two.second) == [1, 3])


def test_a_version_that_rotted_in_the_first_pool_is_not_copied_and_later_ones_are(
    tmp_path: Path, two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    writer = two.first.house.pools.of("default").writer
    with portus.PoolCheckpointer(url(two.first), "net") as saver:
        saved(saver, 1)
        until(lambda: steps_at(two.second) == [1])
        two.cut()
        saved(saver, 2)
        record = writer.record(list(writer.catalogue().entries())[-1])
        [number] = [n for n, length in enumerate(record.length) if length == 64 * 4]
        with open(tmp_path / "first" / "default.portus", "r+b") as file:
            file.seek(record.storage_extents(number)[0].offset)
            file.write(b"rot")
        two.heal()
        saved(saver, 3)
        until(lambda: steps_at(two.second) == [3])
        assert_same(saver.load(), state(3))
    assert "step 2 is not mirrored" in caplog.text
    with portus.PoolCheckpointer(url(two.second), "net") as saver:
        assert_same(saver.load(), state(3))


def test_the_last_whole_version_stays_at_the_second_host_while_the_first_has_none(
    tmp_path: Path, two: Two
) -> None:
    """Of one that replaced it, and rotted before it was copied."""
    writer = two.first.house.pools.of("default").writer
    with portus.PoolCheckpointer(url(two.first), "net", keep=1) as saver:
        saved(saver, 1)
        until(lambda: steps_at(two.second) == [1])
        two.cut()
        saved(saver, 2)
        [entry] = writer.catalogue().entries()
        record = writer.record(entry)
        [number] = [n for n, length in enumerate(record.length) if length == 64 * 4]
        with open(tmp_path / "first" / "default.portus", "r+b") as file:
            file.seek(record.storage_extents(number)[0].offset)
            file.write(b"rot")
        two.heal()
        leader = two.first.house.pools.of("default").replica._copiers["net"]
        until(lambda: bool(leader._skipped))
        with pytest.raises(TransportError):
            leader.wait_until_copied(entry.info.token, Stop())
    assert steps_at(two.second) == [1]


def test_a_version_that_was_removed_at_the_second_host_does_not_come_back_as_its_newest(
    two: Two,
) -> None:
    """A takeover would go on from it."""
    with portus.PoolCheckpointer(url(two.first), "net", durable=2, keep=None) as saver:
        saved(saver, 1, 2)
        with contextlib.closing(HostPool(url(two.second))) as pool:
            pool.let_go([saver.versions()[0].token])
    with portus.PoolCheckpointer(url(two.first), "net", durable=2, keep=None) as saver:
        saved(saver, 3)
        assert two.first.house.pools.of("default").replica.missing() == []
    assert steps_at(two.second) == [2, 3]


def test_a_trainer_that_ends_while_it_waits_for_the_second_host_keeps_no_claim(two: Two) -> None:
    """Nor does it keep a host from ending."""
    links = Links(parse(url(two.first)), Credentials.from_environment(), model="net")
    link = links.borrow()
    link.send(said.Settle("net", b"t" * 16))
    until(lambda: any(is_in(each, "wait_until_copied") for each in threading.enumerate()))
    links.cut()
    with portus.PoolCheckpointer(url(two.first), "net", durable=2) as saver:
        saved(saver, 1)
    replica = two.first.house.pools.of("default").replica
    until(lambda: not replica._claims and not replica._locks)


def test_a_second_host_that_lost_its_memory_gets_all_again(tmp_path: Path) -> None:
    address = Address(Scheme.TCP, host="127.0.0.1", port=free_port())
    with ExitStack() as first:
        with serving("memory:64M", address=address):
            host = first.enter_context(serving(tmp_path / "first", replica=str(address)))
            saver = first.enter_context(
                portus.PoolCheckpointer(url(host), "net", keep=2, durable=2)
            )
            saved(saver, 1, 2)
        with pytest.raises(TransportError, match="durable=2 that counts as failed"):
            saved(saver, 3)
        with serving("memory:64M", address=address) as second:
            until(lambda: steps_at(second) == [2, 3])
            saved(saver, 4)
            assert steps_at(second) == [3, 4]
            first.close()


@pytest.mark.parametrize("place", ["second", "one.portus"])
def test_who_leads_is_known_after_the_second_host_was_started_again(
    tmp_path: Path, place: str
) -> None:
    """The first host, which it left behind, leads no more, and copies nothing there."""
    address = Address(Scheme.TCP, host="127.0.0.1", port=free_port())
    with ExitStack() as first:
        with serving(tmp_path / place, address=address) as second:
            host = first.enter_context(serving(tmp_path / "first", replica=str(address)))
            left = first.enter_context(portus.PoolCheckpointer(url(host), "net"))
            saved(left, 1)
            until(lambda: steps_at(second) == [1])
        saved(left, 2)
        with serving(tmp_path / place) as second, portus.PoolCheckpointer(url(second), "net"):
            assert steps_at(second) == [1], "it is claimed, and nothing is saved yet"
        with serving(tmp_path / place, address=address) as second:
            until(lambda: "continued" in host.house.pools.of("default").replica.failure)
            with pytest.raises(StaleError, match="the newest that counts is step 1, in term 2"):
                saved(left, 3)
            assert steps_at(second) == [1]
            first.close()  # while the other one answers: it waits for that


def test_a_damaged_file_of_leads_is_named_until_a_person_removes_it(tmp_path: Path) -> None:
    """The host that refuses the pool does not keep it."""
    with (
        serving(tmp_path / "second") as second,
        serving(tmp_path / "first", replica=url(second)) as first,
        portus.PoolCheckpointer(url(first), "net", durable=2) as saver,
    ):
        saved(saver, 1)
    leads = tmp_path / "second" / "default.portus.leads" / "leads"
    leads.write_bytes(leads.read_bytes()[:-1])
    with serving(tmp_path / "second") as second:
        for _ in range(2):
            with pytest.raises(CorruptionError, match="leads: it is damaged"):
                portus.PoolCheckpointer(url(second), "net")
        leads.unlink()
        with portus.PoolCheckpointer(url(second), "net") as saver:
            assert_same(saver.load(), state(1))


@pytest.mark.parametrize("commits", ["what it is told", "another model", "a new version"])
def test_an_old_copy_of_the_pool_that_led_takes_nothing_for_removed(
    tmp_path: Path, two: Two, commits: str
) -> None:
    """What the second host has is newer, and stays, also once the copy has as many commits."""
    with portus.PoolCheckpointer(url(two.first), "net", durable=2, keep=1) as saver:
        saved(saver, 1)
    shutil.copytree(tmp_path / "first", tmp_path / "old")
    with portus.PoolCheckpointer(url(two.first), "net", durable=2, keep=1) as saver:
        saved(saver, 2)
    if commits == "a new version":
        two.cut()
    with serving(tmp_path / "old", replica=f"portus://127.0.0.1:{two.between.port}") as old:
        if commits == "a new version":
            with portus.PoolCheckpointer(url(old), "net", keep=None) as saver:
                saved(saver, 8, 9)
            two.heal()
        if commits == "another model":
            with portus.PoolCheckpointer(url(old), "other", durable=2) as saver:
                saved(saver, 8, 9)
        with pytest.raises(StaleError, match=r"step 2, in term 2, .* Steps 1.* here do not count"):
            portus.PoolCheckpointer(url(old), "net")
        with contextlib.closing(HostPool(url(old))) as pool:
            pool.let_go([entry.info.token for entry in pool.catalogue().models["net"]])
        with portus.PoolCheckpointer(url(old), "net", durable=2, keep=None) as saver:
            assert_same(saver.load(), state(2))
            saved(saver, 3)
        assert steps_at(two.second) == [2, 3]


def test_a_first_host_with_the_newest_alone_removes_nothing_at_a_host_that_nobody_led(
    tmp_path: Path,
) -> None:
    """It was filled from elsewhere, and has never let go of the others."""
    with serving(tmp_path / "second") as second:
        with portus.PoolCheckpointer(url(second), "net", keep=None) as saver:
            saved(saver, 1, 2, 3)
        with (
            serving(tmp_path / "first") as first,
            contextlib.closing(HostPool(url(second))) as pool,
            pool.pin(pool.catalogue().models["net"][-1].info.id) as entry,
        ):
            record = pool.record(entry)
            draft = PoolDraft(first.house.pools.of("default").writer, record.length)
            draft.commit(copy_version(pool, record, draft, Stop(), None))
            draft.release()
        with serving(tmp_path / "first", replica=url(second)) as first:
            with pytest.raises(StaleError, match=r"steps 1, 2 at .* are of no first host"):
                portus.PoolCheckpointer(url(first), "net")
            assert steps_at(second) == [1, 2, 3]
            assert steps_at(first) == [3]
            for step in (1, 2):
                with contextlib.closing(HostPool(url(second))) as pool:
                    gone = [e.info.token for e in pool.catalogue().entries() if e.info.step == step]
                    pool.let_go(gone)
            with portus.PoolCheckpointer(url(first), "net", durable=2, keep=None) as saver:
                saved(saver, 4)
        assert steps_at(second) == [3, 4]


def test_a_copy_of_the_pool_of_the_second_host_leads_nothing(tmp_path: Path, two: Two) -> None:
    """Else what the second host did afterwards would count as removed by the first."""
    with portus.PoolCheckpointer(url(two.first), "net", durable=2) as saver:
        saved(saver, 1)
    with portus.PoolCheckpointer(url(two.second), "net", durable=2, keep=None) as saver:
        saved(saver, 2)
        (tmp_path / "copy").mkdir()
        shutil.copy(tmp_path / "second" / "default.portus", tmp_path / "copy")
        saved(saver, 3)
    with (
        serving(tmp_path / "copy", replica=url(two.second)) as copy,
        pytest.raises(UsageError, match="start one of the two with an empty pool"),
    ):
        portus.PoolCheckpointer(url(copy), "net", durable=2)
    assert steps_at(two.second) == [1, 2, 3]


def test_a_copy_that_arrives_late_is_refused_once_another_host_leads(two: Two) -> None:
    """So are a removal, and a request to lead that was sent before."""
    with portus.PoolCheckpointer(url(two.first), "net", durable=2) as saver:
        saved(saver, 1)
    leader = two.first.house.pools.of("default").replica._copiers["net"]
    there, term = leader._there, leader.term
    asked = there.ask("net")
    with portus.PoolCheckpointer(url(two.second), "net", durable=2) as saver:
        token, late = saver.versions()[0].token, said.Lead("net", b"p" * 16, 9, "", term, bytes(16))
        with pytest.raises(StaleError, match=r"led by pid .*, in term 2"):
            there.pool.let_go([token], "net", term)
        with pytest.raises(StaleError, match=r"led by pid .*, in term 2"):
            there.pool.links.ask(said.Begin("net", 2, b"t" * 16, b"", b"", term, 9), said.Done)
        with pytest.raises(BusyError):
            there.pool.links.ask(replace(late, newest=asked.newest), said.Led)
        saved(saver, 2)
    assert not there.pool.links.ask(replace(late, newest=asked.newest), said.Led).granted
    assert two.lead().term == 2
    assert steps_at(two.second) == [1, 2]


def test_a_host_of_a_device_that_lost_its_replica_is_no_replica_and_takes_saves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients still name both hosts."""
    path = tmp_path / "dax"
    path.touch()
    os.truncate(path, 32 << 20)
    stand_in(str(path), str(tmp_path / "sys"), monkeypatch)
    create_pool(str(path), LocalFiles())
    with serving(path) as alone:
        both = f"{url(alone)}+127.0.0.1:{free_port()}"
        with portus.PoolCheckpointer(both, "net") as saver:
            saved(saver, 1)
            assert_same(saver.load(), state(1))
        options = ServeOptions(
            place=str(tmp_path / "first"), listen=["127.0.0.1:0"], replica=url(alone)
        )
        with pytest.raises(UsageError, match="a pool on a device has no room beside it"):
            prepare(options)


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
