"""A ``Checkpointer`` on a storage host, over links that fail."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import portus
from portus.engine.copying.local import check as hashes
from portus.engine.copying.segments import Stop
from portus.engine.job.settings import Settings
from portus.errors import (
    AbandonedError,
    BusyError,
    MediumError,
    PortusError,
    TransportError,
    UsageError,
)
from portus.reach.daemon.requests import saves
from portus.reach.daemon.requests.guest import Guest
from portus.reach.daemon.server import Server
from portus.reach.daemon.session import ServedConnection
from portus.reach.daemon.shared_state import ClientTimeouts
from portus.reach.index.check import check
from portus.reach.index.place import Place
from portus.reach.index.records import VersionRecord
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import Address, Scheme
from portus.reach.protocol.messages import Message
from portus.reach.protocol.vocabulary import Phase
from portus.reach.training.training_files import TrainingFiles
from portus.reach.transport import stream
from portus.reach.transport.regions import Regions
from portus.reach.transport.stream import Link
from portus.reach.versions.host import HostPool, _HostAccess
from portus.reach.versions.parts import share, sources
from tests.hardware.states import snapshot_of
from tests.hosts import Host, connect_again_at_once, serving, url
from tests.simulation.lossy import LossyLink
from tests.unit.cli.scene import portus_json

CUTS = 45
FLIPS = 40
TRIES_MAX = 400
SIZES = (300_000, 40, 0, 5000)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Between two tries to connect, and for a side that says nothing."""
    monkeypatch.chdir(tmp_path)
    connect_again_at_once(monkeypatch)
    monkeypatch.setattr("portus.reach.transport.host.SILENCE_S", 10.0)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    patience = ClientTimeouts(silent_s=getattr(request, "param", 60.0), claim_s=5)
    with serving(tmp_path / "pools", patience=patience) as made:
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What every host of this process is asked for."""
    asked: list[str] = []
    answer = ServedConnection._answer

    def heard(served: ServedConnection, guest: Guest, message: Message) -> None:
        asked.append(message.kind.name)
        answer(served, guest, message)

    monkeypatch.setattr(ServedConnection, "_answer", heard)
    return asked


impatient = pytest.mark.parametrize("server", [1.0], indirect=True, ids=["impatient"])
"""Where a damaged length makes the host wait for what never comes."""


@pytest.fixture
def link(server: Server) -> Iterator[LossyLink]:
    with LossyLink("127.0.0.1", server.listeners[0].port) as made:
        yield made


def address(link: LossyLink) -> str:
    return f"portus://127.0.0.1:{link.port}"


def state(step: int) -> dict[str, torch.Tensor]:
    """Tensors that are others at each step."""
    return {str(n): torch.full((size // 4,), float(step * 10 + n)) for n, size in enumerate(SIZES)}


def same(left: Any, right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in right)


def test_a_host_keeps_metrics_and_what_is_best(server: Server) -> None:
    keep = portus.Keep(last=1, best=("loss", "min", 2))
    with PoolCheckpointer(url(server), keep=keep) as run:
        for step, loss in enumerate([0.3, 0.1, 0.5, 0.2, 0.4]):
            run.save(state(step), step, metrics={"loss": loss}).wait()
        assert [(info.step, info.metrics["loss"]) for info in run.versions()] == [
            (1, 0.1),
            (3, 0.2),
            (4, 0.4),
        ]
    assert check(server.house.pools.of("default").writer) == []


def test_a_save_takes_few_requests(server: Server, tmp_path: Path, asked: list[str]) -> None:
    """Of a group each rank makes its own: what one needs more, a host hears as often. No request
    asks what ``keep`` is to remove: the host knows. With the last pointer of a version the version
    goes, in one request."""
    first, steady = (["BEGIN", *share, "OFFER", "OFFER", "CONFIRM"] for share in ([], ["SHARE"]))
    with PoolCheckpointer(url(server), keep=2) as run:
        for step, save in enumerate((first, steady, steady)):
            asked.clear()
            run.save({**state(step), "same": torch.ones(9)}, step, metrics={"loss": 0.5}).wait()
            assert asked == save
    files = TrainingFiles(Settings(), of_directories=True, pool=Place.parse(url(server)))
    for step in range(3):
        asked.clear()
        where = tmp_path / str(step)
        states = {"a.pt": {**state(step), "same": torch.ones(9)}, "b.pt": state(step)}
        files.save_directory(str(where), states, step).wait()
        if step:
            files.remove(str(tmp_path / str(step - 1)))
        files.wait()
    assert asked == [*steady, "RETIRE"]
    files.close()


def test_a_load_of_many_small_tensors_takes_few_requests(server: Server, asked: list[str]) -> None:
    many = {str(n): torch.full((9,), float(n)) for n in range(1000)}
    with PoolCheckpointer(url(server)) as run:
        run.save(many, 1).wait()
        asked.clear()
        assert same(run.load(), many)
        assert len(asked) < 20, asked


def test_a_state_of_too_many_storages_is_not_begun(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.protocol.messages.STORAGES_MAX", 2)
    with PoolCheckpointer(url(server), "net") as run:
        for step in (1, 2):
            with pytest.raises(UsageError, match=rf"step {step} of .* storages; .* has 2 at most"):
                run.save({str(n): torch.ones(9) for n in range(4)}, step).wait()
        run.save({"x": torch.ones(9)}, 3).wait()
        assert [info.step for info in run.versions()] == [3]


class Trained:
    """Tensors that an optimizer writes, so they are copied late."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.model = torch.nn.Linear(size // 64, 16, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.step()

    def step(self) -> None:
        self.model.weight.grad = torch.ones_like(self.model.weight)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def attacked(link: LossyLink, server: Server, attack: str, numbers: list[int]) -> tuple[int, int]:
    """Saves, each of them with one attack on it, after so many bytes; how many came through.

    Whatever was committed is what was saved, and what was reported is there.
    """
    saved = lost = step = 0
    with PoolCheckpointer(address(link), keep=2, on_error="warn") as checkpointer:
        checkpointer.save(state(0), 0).wait()
        for step, number in enumerate(numbers, 1):
            setattr(link, attack, link.relayed + number)
            try:
                checkpointer.save(state(step), step).wait(30)
                saved += 1
                reported = True
            except PortusError:
                lost += 1
                reported = False
            setattr(link, attack, None)
            with portus.open(url(server)) as pool:
                newest = pool.versions()[-1]
                assert same(pool.load(), state(newest.step))
            assert newest.step == step or not reported
        saved_at_last(checkpointer, step + 1)
    assert check(server.house.pools.of("default").writer) == []
    return saved, lost


def saved_at_last(checkpointer: PoolCheckpointer, step: int) -> None:
    """The link is well again, though what was said over it before may still have to end."""
    for _ in range(TRIES_MAX):
        try:
            assert checkpointer.save(state(step), step).wait(60).step == step
            break
        except PortusError:
            time.sleep(0.05)
    assert checkpointer.steps()[-1] == step


def bytes_of_one_save(link: LossyLink) -> int:
    with PoolCheckpointer(address(link), model="measured") as checkpointer:
        checkpointer.save(state(0), 0).wait()
        before = link.relayed
        checkpointer.save(state(1), 1).wait()
        return link.relayed - before


@pytest.mark.long
def test_a_link_that_is_cut_anywhere_loses_the_save_or_nothing(
    server: Server, link: LossyLink, seed: int
) -> None:
    size = bytes_of_one_save(link)
    # Most of it is payload; the beginning, the end, and what is small are tried more often.
    chance = random.Random(seed)
    numbers = [chance.randrange(size) for _ in range(CUTS // 3)]
    numbers += [chance.randrange(2000) for _ in range(CUTS // 3)]
    numbers += [size - chance.randrange(3000) for _ in range(CUTS // 3)]
    saved, lost = attacked(link, server, "cut_after", numbers)
    assert lost > CUTS // 2
    assert saved + lost == len(numbers)


@pytest.mark.long
def test_a_save_whose_answer_was_lost_is_told_as_what_it_is(
    server: Server, link: LossyLink
) -> None:
    """The connection breaks around the commit: what happened is looked up, not guessed."""
    link.once = True
    unheard = 0
    with PoolCheckpointer(address(link), keep=2) as checkpointer:
        checkpointer.save(state(0), 0).wait()
        checkpointer.wait()
        before = link.relayed
        checkpointer.save(state(1), 1).wait()
        size = link.relayed - before
        for step, place in enumerate(range(size - 1200, size, 30), 2):
            checkpointer.wait()
            cuts = link.cuts
            link.cut_after = link.relayed + place
            try:
                reported = checkpointer.save(state(step), step).wait(60).step == step
            except PortusError:
                reported = False
            unheard += reported and link.cuts > cuts
            link.cut_after = None
            with portus.open(url(server)) as pool:
                assert (pool.steps("default")[-1] == step) == reported
    assert unheard, "no answer was lost, so nothing was tried"


def test_a_forked_child_keeps_no_connection(server: Server) -> None:
    """Or a loader worker would hide from the host that its trainer was killed."""
    with PoolCheckpointer(url(server)) as checkpointer:
        checkpointer.save(state(1), 1).wait()
        links = list(stream._ALL)
        assert any(not each.closed for each in links)
        child = os.fork()
        if child == 0:
            os._exit(sum(each._socket.fileno() >= 0 for each in links))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        checkpointer.save(state(2), 2).wait()  # and the parent's go on


@pytest.mark.long
@impatient
def test_a_bit_that_flips_on_the_way_is_never_part_of_a_version(
    server: Server, link: LossyLink, seed: int
) -> None:
    size = bytes_of_one_save(link)
    chance = random.Random(seed)
    numbers = [chance.randrange(size) for _ in range(FLIPS)]
    _, lost = attacked(link, server, "damage_at", numbers)
    assert lost > FLIPS // 2


@pytest.mark.parametrize("where", ["in memory", "on the way"])
def test_a_save_ends_at_the_first_answer_that_is_not_what_was_sent(
    server: Server, link: LossyLink, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Not at its commit, where the host would see it too: until then it would be moved in vain."""
    array = np.ones(200_000, np.uint8)
    snapshot = snapshot_of([array], 1)
    with contextlib.closing(HostPool(address(link), "run")) as pool:
        draft = pool.draft(snapshot)
        draft._ready(Stop())
        if where == "on the way":
            link.damage_at = link.relayed + len(array) // 2
        else:
            pull = saves._pull

            def damaged(*each: Any) -> said.Hashed:
                found = pull(*each)
                return msgspec.structs.replace(found, digests=bytes(len(found.digests)))

            monkeypatch.setattr(saves, "_pull", damaged)
        with pytest.raises(TransportError, match="arrived are not those that were sent"):
            draft.copy(np.arange(1), snapshot.address, Stop())
        draft.release()


@impatient
def test_a_flip_in_what_is_read_is_never_handed_out(
    server: Server, link: LossyLink, seed: int
) -> None:
    with PoolCheckpointer(url(server)) as checkpointer:
        checkpointer.save(state(1), 1).wait()
    chance = random.Random(seed)
    refused = 0
    connections = server.house.counters.counts["connections"]
    for _ in range(FLIPS // 2):
        with portus.open(address(link)) as pool:
            link.damage_at = link.relayed + chance.randrange(300_000)
            target = state(2)
            try:
                pool.restore_into(target)
                assert same(target, state(1))
            except PortusError:
                refused += 1
            link.damage_at = None
    again = server.house.counters.counts["connections"] - connections - FLIPS
    assert refused + again > FLIPS // 6, "what is refused is read again, over another connection"


def test_a_fence_that_expires_in_a_slow_pull_abandons_and_training_goes_on(
    server: Server, link: LossyLink
) -> None:
    training = Trained()
    with PoolCheckpointer(address(link), fence_timeout=0.3) as checkpointer:
        checkpointer.save(training.state(), 1).wait()
        kept = training.model.weight.detach().clone()
        training.step()
        link.bytes_s = 400_000
        handle = checkpointer.save(training.state(), 2)
        training.step()  # waits for the fence, and not for the pull
        with pytest.raises(AbandonedError, match="fence_timeout"):
            handle.wait(20)
        link.bytes_s = None
        assert checkpointer.steps() == [1]
        loaded: Any = checkpointer.load()
        assert torch.equal(loaded["model"]["weight"], kept)
        hosted = server.house.pools.of("default")
        until = time.monotonic() + 10
        while hosted.saves and time.monotonic() < until:
            time.sleep(0.01)
        assert hosted.saves == 0
        checkpointer.save(training.state(), 3).wait()
        assert checkpointer.steps() == [1, 3]


@pytest.mark.long
def test_the_optimizer_waits_for_a_pull_that_is_in_time(server: Server, link: LossyLink) -> None:
    training = Trained()
    with PoolCheckpointer(address(link)) as checkpointer:
        checkpointer.save(training.state(), 0).wait()
        training.step()
        link.bytes_s = 4_000_000
        expected = training.model.weight.detach().clone()
        handle = checkpointer.save(training.state(), 1)
        training.step()
        handle.wait(60)
        assert handle.stats.fence_s > 0
        loaded: Any = checkpointer.load()
        assert torch.equal(loaded["model"]["weight"], expected)
        assert not torch.equal(loaded["model"]["weight"], training.model.weight)


def test_a_writer_without_a_fence_voids_the_version(server: Server, link: LossyLink) -> None:
    training = Trained()
    with PoolCheckpointer(address(link)) as checkpointer:
        checkpointer.save(training.state(), 1).wait()
        training.step()
        link.stalled = True
        handle = checkpointer.save(training.state(), 2)
        with torch.no_grad():
            training.model.weight.data.numpy()[:] = 7  # what no fence can see
        link.stalled = False
        with pytest.raises(AbandonedError, match="changed while being saved"):
            handle.wait(30)
        assert checkpointer.steps() == [1]


@pytest.mark.long
def test_a_tensor_at_the_address_of_an_old_one_is_saved_with_its_own_bytes(
    server: Server,
) -> None:
    memory = bytearray(1 << 18)
    with PoolCheckpointer(url(server)) as checkpointer:
        for step in range(4):
            tensor = torch.frombuffer(memory, dtype=torch.float32)  # a new one, at the old place
            tensor.fill_(float(step))
            checkpointer.save({"x": tensor}, step).wait()
            del tensor
            gc.collect()
            loaded: Any = checkpointer.load()
            assert torch.equal(loaded["x"], torch.full((1 << 16,), float(step)))


class Watched:
    """A queue pair that notes where the conversation was when it was closed."""

    def __init__(self, link: stream.Link) -> None:
        self._link = link
        self.closed_in: Phase | None = None

    @property
    def closed(self) -> bool:
        return self.closed_in is not None

    def close(self) -> None:
        self.closed_in = self.closed_in or self._link.connection.state


def test_the_host_reaches_nothing_any_more_when_it_hears_that_a_save_is_given_up(
    server: Server,
) -> None:
    array = np.ones(100_000, np.uint8)
    snapshot = snapshot_of([array], 1)
    with contextlib.closing(HostPool(url(server), "run")) as pool:
        draft = pool.draft(snapshot)
        draft.copy(np.arange(1), snapshot.address, Stop())
        link, nothing = draft._link, np.zeros(0, np.int64)
        assert link is not None
        domain: Any = None  # nothing is registered
        lane: Any = Watched(link)
        draft._reached = _HostAccess(lane, Regions(domain), (), nothing, nothing)
        draft.release()
        assert lane.closed_in is Phase.READY, "before it was said"
        assert link._socket.fileno() >= 0
        assert server.house.pools.of("default").saves == 0, "then it was said, and answered"


@pytest.mark.long
def test_a_stalled_link_costs_saves_and_not_the_training(server: Server, link: LossyLink) -> None:
    training = Trained()
    with PoolCheckpointer(address(link), fence_timeout=0.3) as checkpointer:
        checkpointer.save(training.state(), 0).wait()
        link.stalled = True
        lost = [checkpointer.save(training.state(), step) for step in range(1, 4)]
        for _ in range(20):
            training.step()
        link.stalled = False
        for handle in lost:
            with pytest.raises(PortusError):
                handle.wait(30)
        saved_at_last(checkpointer, 9)


@pytest.mark.long
def test_a_host_that_hangs_is_waited_for_once_and_then_asked_in_the_background(
    server: Server, link: LossyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_s, speakers = 1.0, set[str]()
    send = Link.send

    def noted(self: Link, message: said.Said) -> None:
        if message.kind.from_client:
            speakers.add(threading.current_thread().name)
        send(self, message)

    monkeypatch.setattr(Link, "send", noted)
    with PoolCheckpointer(address(link), keep=2) as checkpointer:
        checkpointer.save(state(1), 1).wait(60)
        pool = checkpointer._steps.pool.open()
        assert isinstance(pool, HostPool)
        monkeypatch.setattr("portus.reach.transport.dial.GREETING_S", wait_s)
        monkeypatch.setattr(pool.links, "answer_s", wait_s)
        for episode in (10, 20):
            link.stalled = True
            begin_s = time.monotonic()
            with pytest.raises(TransportError, match="no progress for"):
                checkpointer.save(state(1), episode).wait(60)
            assert time.monotonic() - begin_s > wait_s / 2, "it was not asked"
            speakers.clear()
            for step in range(1, 6):
                with pytest.raises(TransportError, match=r"no progress .*in the background"):
                    checkpointer.save(state(step), episode + step).wait(60)
            assert speakers <= {"portus-probe"}, "somebody waited again"
            link.stalled = False
            saved_at_last(checkpointer, episode + 9)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["volatile", "late", "as before"])
def test_a_host_that_hangs_is_not_waited_for_as_one_that_works(
    server: Server,
    link: LossyLink,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It accepts connections, and then says nothing. What waits for work would wait for ever."""
    for name in ("transport.host.SILENCE_S", "transport.host.WORK_S", "transport.host.ROOM_S"):
        monkeypatch.setattr(f"portus.reach.{name}", 1e6)
    monkeypatch.setattr("portus.reach.versions.host.ROOM_S", 1e6)
    training = Trained(1 << 10)
    keep = None if kind == "late" else 2
    saved = state(1) if kind == "volatile" else training.state()
    with PoolCheckpointer(address(link), keep=keep, fence_timeout=1e6) as checkpointer:
        checkpointer.save(saved if kind == "as before" else {"other": 0}, 0).wait(60)
        checkpointer.wait(60)  # from here on a failure is no more than said
        pool = checkpointer._steps.pool.open()
        assert isinstance(pool, HostPool)
        with monkeypatch.context() as hanging:
            hanging.setattr("portus.reach.transport.dial.GREETING_S", 0.3)
            hanging.setattr(pool.links, "answer_s", 0.3)
            link.stalled = True
            first = checkpointer.save(saved, 1)
            training.step()
            second = checkpointer.save(saved, 2)
            training.step()
        link.stalled = False
        for handle in (first, second):
            with pytest.raises(TransportError, match=r"no progress for|no storage host answers"):
                handle.wait(60)
        saved_at_last(checkpointer, 9)


@pytest.mark.long
@pytest.mark.parametrize("hangs", [False, True])
def test_a_host_is_waited_for_in_a_commit_as_long_as_it_answers_others(
    server: Server, link: LossyLink, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who works says as little as who hangs."""
    writer = server.house.pools.of("default").writer
    writer.release(writer.reserve(64 << 20))
    with PoolCheckpointer(address(link)) as checkpointer:
        checkpointer.save(state(0), 0).wait(60)
        checkpointer.wait(60)
        pool = checkpointer._steps.pool.open()
        assert isinstance(pool, HostPool)
        monkeypatch.setattr(pool.links, "silence_s", 0.1)
        with writer._committing:
            handle = checkpointer.save(state(1), 1)
            until(lambda: writer._line.waiting == 1)
            before = link.relayed
            until(lambda: link.relayed > before + 60)  # it is asked
            assert not handle.done
            if hangs:
                monkeypatch.setattr("portus.reach.transport.dial.GREETING_S", 0.3)
                monkeypatch.setattr("portus.reach.versions.host._OUTCOME_S", 0.1)
                monkeypatch.setattr(pool.links, "answer_s", 0.3)
                link.stalled = True
                with pytest.raises(TransportError, match="It may exist"):
                    handle.wait(60)
        assert hangs or handle.wait(60).step == 1


def until(truth: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not truth():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_host_that_is_not_there_at_the_start_raises(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"no storage host answers.*portus serve"):
        PoolCheckpointer("portus://127.0.0.1:1")


def test_a_second_trainer_of_one_model_is_refused_and_its_own_name_is_not(
    tmp_path: Path,
) -> None:
    with (
        serving(tmp_path / "pools", patience=ClientTimeouts(claim_s=0.1)) as server,
        PoolCheckpointer(url(server), model="a") as first,
    ):
        with pytest.raises(BusyError, match="another model name"):
            PoolCheckpointer(url(server), model="a")
        with PoolCheckpointer(url(server), model="b") as second:
            first.save(state(1), 1).wait()
            second.save(state(2), 2).wait()
            assert (first.steps(), second.steps()) == ([1], [2])


@pytest.mark.long
def test_a_host_whose_memory_was_lost_is_saved_to_again(tmp_path: Path) -> None:
    with Host("memory:64M") as host, PoolCheckpointer(host.url) as checkpointer:
        frozen = torch.ones(100_000)
        checkpointer.save({"frozen": frozen, **state(1)}, 1).wait()
        checkpointer.save({"frozen": frozen, **state(2)}, 2).wait()
        before = checkpointer._steps.pool.open().uuid
        host.kill()
        with pytest.raises(TransportError):
            checkpointer.save({"frozen": frozen, **state(3)}, 3).wait()
        host.start()
        time.sleep(0.01)
        checkpointer.save({"frozen": frozen, **state(4)}, 4).wait()
        assert checkpointer._steps.pool.open().uuid != before
        assert checkpointer.steps() == [4]
        loaded: Any = checkpointer.load()
        assert torch.equal(loaded.pop("frozen"), frozen)
        assert same(loaded, state(4))


@pytest.mark.long
def test_a_host_that_lost_its_memory_between_two_saves_costs_no_training() -> None:
    """The first that is heard of it is its answer to a look at what it holds."""
    with Host("memory:64M") as host, PoolCheckpointer(host.url) as checkpointer:
        checkpointer.save({"step": 1}, 1).wait()
        host.kill()
        host.start()
        checkpointer.save({"step": 2}, 2).wait()
        assert checkpointer.steps() == [2]
        assert checkpointer.load() == {"step": 2}


def test_a_pool_that_is_exchanged_under_its_host_is_committed_to_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was told would be lost with the next start of the host. What an older copy of the pool
    has lost, and that there is another one, is said to the trainer."""
    place, backup = tmp_path / "pools", tmp_path / "backup"
    with contextlib.ExitStack() as stack:
        with serving(place) as server:
            address = Address(Scheme.TCP, host="127.0.0.1", port=server.listeners[0].port)
            checkpointer = stack.enter_context(PoolCheckpointer(url(server)))
            checkpointer.save(state(1), 1).wait()
            [pool] = place.glob("*.portus")
            shutil.copy(pool, backup)
            checkpointer.save(state(2), 2).wait()
            pool.rename(tmp_path / "moved")
            with pytest.raises(MediumError, match=r"was replaced or moved while .*moved' now"):
                checkpointer.save(state(3), 3).wait()
            shutil.copy(backup, pool)
            with pytest.raises(MediumError, match="was replaced or moved"):
                checkpointer.save(state(3), 3).wait()
            reader = stack.enter_context(contextlib.closing(HostPool(url(server))))
            with pytest.raises(MediumError, match="was replaced or moved"):
                reader.let_go([each.info.token for each in reader.catalogue().entries()])
            (tmp_path / "moved").rename(pool)
            checkpointer.save(state(4), 4).wait()
            assert checkpointer.steps() == [2, 4]
        assert "history" not in caplog.text
        shutil.copy(backup, pool)
        with serving(place, address=address):
            saved_at_last(checkpointer, 5)
            assert checkpointer.steps() == [1, 5]
            assert caplog.text.count("has an older copy of its pool") == 1
            assert "different pool" not in caplog.text
        pool.unlink()
        with serving(place, address=address):
            saved_at_last(checkpointer, 6)
            assert checkpointer.steps() == [6]
        assert caplog.text.count("serves a different pool than before") == 1


def test_many_clients_save_at_once_and_each_has_its_own(server: Server) -> None:
    failures: list[BaseException] = []

    def train(name: str) -> None:
        try:
            with PoolCheckpointer(url(server), model=name) as checkpointer:
                for step in range(5):
                    checkpointer.save(state(step + ord(name)), step)
                checkpointer.wait()
                assert checkpointer.steps() == [3, 4]
                assert same(checkpointer.load(), state(4 + ord(name)))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(name,)) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert check(server.house.pools.of("default").writer) == []


def test_a_quota_ends_saves_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serving(tmp_path / "pools", quota=8 << 20) as server,
        PoolCheckpointer(url(server)) as checkpointer,
    ):
        checkpointer.save(state(1), 1).wait()
        handle = checkpointer.save({"x": torch.ones(16 << 20)}, 2)
        with pytest.raises(portus.MediumError, match="the storage host says"):
            handle.wait()
        with caplog.at_level(logging.WARNING, "portus"):
            checkpointer.save(state(3), 3).wait()
        assert checkpointer.steps() == [1, 3]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("pools", "needs space"),
        ("memory:8M", "needs space"),
        ("pools", "the disk is gone"),
        ("pools", "cut off"),
    ],
)
def test_ls_tells_which_save_failed_last_and_why(tmp_path: Path, place: str, why: str) -> None:
    where = place if place.startswith("memory") else tmp_path / place
    with (
        serving(where, quota=8 << 20) as server,
        LossyLink("127.0.0.1", server.listeners[0].port) as link,
        PoolCheckpointer(address(link), "net") as checkpointer,
    ):

        def said() -> Any:
            return portus_json("ls", url(server))["pools"][0]["failure"]

        checkpointer.save(state(1), 1).wait()
        assert said() is None
        if why == "cut off":
            link.cut_after = 0
        elif why == "the disk is gone":
            server.house.pools.of("default").writer.medium.poison(why)
        handle = checkpointer.save({"x": torch.ones((16 << 20) if why == "needs space" else 4)}, 40)
        with pytest.raises(PortusError) as failed:
            handle.wait(60)
        checkpointer._saver.catch_up()
        if why == "cut off":
            assert said() is None, "the host could not be told"
            link.cut_after = None
            checkpointer.save(state(41), 41).wait(60)
        assert said().startswith("net@40 at 20")
        assert str(failed.value)[:60] in said()


def test_a_wrong_secret_raises_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret that is long enough\n")
    secret.chmod(0o600)
    with serving(tmp_path / "pools", secrets={"default": b"a secret that is another"}) as server:
        with pytest.raises(UsageError, match="PORTUS_SECRET_FILE"):
            PoolCheckpointer(url(server))
        monkeypatch.setenv("PORTUS_SECRET_FILE", str(secret))
        with pytest.raises(UsageError, match="wrong secret"):
            PoolCheckpointer(url(server))
        secret.write_text("a secret that is another\n")
        with PoolCheckpointer(url(server)) as checkpointer:
            checkpointer.save(state(1), 1).wait()
        secret.chmod(0o644)
        with pytest.raises(UsageError, match="chmod 600"):
            PoolCheckpointer(url(server))


def test_what_is_read_under_a_lost_pin_is_not_handed_out(server: Server, link: LossyLink) -> None:
    """The space may be somebody else's by then, with the right digests of other bytes."""
    with PoolCheckpointer(url(server)) as checkpointer:
        checkpointer.save(state(1), 1).wait()
    pool = HostPool(address(link))
    try:
        (entry,) = pool.catalogue().entries()
        with pool.pin(entry.info.id) as held:
            record = pool.record(held)
            verify_extents(pool, record)
            link.cut()
            with pytest.raises(TransportError, match="load again"):
                verify_extents(pool, record)
        with pool.pin(entry.info.id) as held:  # a new pin, on a new connection
            verify_extents(pool, pool.record(held))
    finally:
        pool.close()


def verify_extents(pool: HostPool, record: VersionRecord) -> None:
    group = share(record, np.arange(len(record.storages)))
    lengths = record.length
    nowhere = np.ones(len(lengths), np.int64)
    found = hashes(pool.medium, sources(nowhere, lengths, group.extents), Stop())
    assert np.array_equal(found, group.digests)


def test_what_rotted_on_the_host_is_not_shared_but_sent_again(
    server: Server, tmp_path: Path
) -> None:
    frozen = torch.arange(100_000)
    with PoolCheckpointer(url(server)) as checkpointer:
        for step in (1, 2):
            handle = checkpointer.save({"frozen": frozen, "x": torch.tensor([step])}, step)
            handle.wait()
        assert handle.stats.shared_bytes == frozen.nbytes
        writer = server.house.pools.of("default").writer
        found = list(writer.catalogue().entries())[-1]
        record = writer.record(found)
        extent = record.storage_extents(int(np.argmax(record.storages["length"])))[0]
        writer.medium.store(extent.offset + 5000, b"rotten")
        handle = checkpointer.save({"frozen": frozen, "x": torch.tensor([3])}, 3)
        handle.wait()
        assert handle.stats.shared_bytes == 0
        loaded: Any = checkpointer.load()
        assert torch.equal(loaded["frozen"], frozen)


def test_the_variable_may_name_the_host(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_POOL", url(server))
    with PoolCheckpointer() as checkpointer:
        checkpointer.save(state(1), 1).wait()
        checkpointer.save(state(2), 2).wait()
        assert checkpointer.path == url(server)
        assert same(checkpointer.load(), state(2))
    assert sorted(each.name for each in tmp_path.iterdir()) == [".portus", "pools"]
    monkeypatch.delenv("PORTUS_POOL")


# --- verbs, on machines that have none ---


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("portus.reach.transport.verbs._SYS", str(tmp_path / "none"))
    monkeypatch.setattr("portus.reach.transport.verbs._FOUND", {})


def test_what_changed_of_a_catalogue_is_read_in_one_request(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    sizes = 0
    send = stream.Link.send

    def counted(link: stream.Link, message: Any) -> None:
        nonlocal sizes
        sizes += isinstance(message, said.Status)
        if isinstance(message, said.Read):
            asked.append(len(message.ranges) // 16)
        send(link, message)

    def saved(*models: int) -> None:
        before = server.connections()
        for number in models:
            with PoolCheckpointer(url(server), f"m{number}") as checkpointer:
                checkpointer.save({}, number).wait()
        # The host gives space back after the goodbye, which is a commit, too.
        until(lambda: server.connections() <= before)

    saved(*range(12))
    with contextlib.closing(HostPool(url(server))) as pool:
        monkeypatch.setattr(stream.Link, "send", counted)
        assert len(pool.catalogue().models) == 12
        assert len(asked) == 2, "the roots, and the catalogue"
        assert sizes == 2, "how big the pool is"
        saved(3, 5, 7)
        asked.clear()
        before = pool.catalogue()
        assert len(asked) == 2
        asked.clear()
        assert pool.catalogue() is before
        assert len(asked) == 1
    assert [len(before.models[f"m{number}"]) for number in (3, 4)] == [1, 1]


@pytest.mark.usefixtures("no_devices")
def test_without_verbs_the_socket_is_used_and_one_line_says_so(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "portus"), PoolCheckpointer(url(server)) as checkpointer:
        for step in (1, 2):
            handle = checkpointer.save(state(step), step)
            handle.wait()
            assert handle.stats.bounced_bytes == handle.stats.copied_bytes > 0
        assert same(checkpointer.load(), state(2))
    lines = [each for each in caplog.messages if "over the socket" in each]
    assert len(lines) == 1
    assert "offers no verbs" in lines[0]


@pytest.mark.usefixtures("no_devices")
def test_verbs_that_are_asked_for_and_cannot_be_raise_at_the_start(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_TRANSPORT", "verbs")
    with pytest.raises(
        UsageError, match="PORTUS_TRANSPORT=verbs, but verbs cannot be used: the storage"
    ):
        PoolCheckpointer(url(server))
    monkeypatch.setenv("PORTUS_TRANSPORT", "pigeons")
    with pytest.raises(UsageError, match="expected auto, tcp or verbs"):
        PoolCheckpointer(url(server))


def test_the_socket_can_be_asked_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PORTUS_TRANSPORT", "tcp")
    with caplog.at_level(logging.INFO, "portus"), PoolCheckpointer(url(server)) as checkpointer:
        checkpointer.save(state(1), 1).wait()
    assert "over the socket" not in caplog.text
