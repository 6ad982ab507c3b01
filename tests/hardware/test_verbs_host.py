"""A storage host that reaches its clients by verbs: saves, restores, and what goes wrong."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

pytest.importorskip("pyverbs.device", reason="no pyverbs; make test-hardware", exc_type=ImportError)

from portus.engine.copying.segments import Stop, memory
from portus.engine.media.linux import MAP_ANONYMOUS, MAP_FIXED, MAP_PRIVATE, map_pages, unmap_pages
from portus.errors import AbandonedError, PortusError, TransportError, UsageError
from portus.reach.daemon.server import Server
from portus.reach.index.check import check
from portus.reach.index.directory import format_device
from portus.reach.index.findings import Severity
from portus.reach.media.local import LocalFiles
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import parse
from portus.reach.protocol.messages import pack_column, pack_pairs
from portus.reach.transport.dial import Credentials
from portus.reach.transport.host import Links
from portus.reach.versions.host import HostDraft, HostPool
from tests.contents import table
from tests.hardware.conftest import DEVDAX, FSDAX, PATIENCE, WAIT_S_MAX
from tests.hardware.states import Bytes, begun, holds, loaded, saved, snapshot_of, state_of, steps
from tests.hosts import Host, serving, url

SIZE = 64 << 20
TENSORS = 200
RING = (20 << 20) + 12345
SOME = 2 << 20
"""Bytes of states that are quicker to save: of more than one batch, and of one."""

T = TypeVar("T")

pytestmark = [
    *(pytest.mark.rdma, pytest.mark.pmem, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("by_verbs_alone"),
]


@contextlib.contextmanager
def pool_on(address: str, model: str = "run") -> Iterator[HostPool]:
    pool = HostPool(address, model)
    try:
        yield pool
    finally:
        pool.close()


def check_sound(server: Server) -> None:
    """Nothing is half-made, and the host is at no save any more."""
    hosted = server.house.pools.of("default")
    until = time.monotonic() + WAIT_S_MAX
    while hosted.saves and time.monotonic() < until:
        time.sleep(0.01)
    assert hosted.saves == 0
    assert not hosted.writer._space._held, "space is held by no save"
    assert [each for each in check(hosted.writer) if each.severity is Severity.ERROR] == []


def others_save(server: Server) -> bool:
    state = state_of(SOME, 3, step=77)
    with pool_on(url(server), "other") as pool:
        saved(pool, snapshot_of(state, 77, "other"))
        return holds(pool, state, 77)


# --- saves and restores ---


def test_a_state_is_pulled_straight_into_a_device_and_written_back(server: Server) -> None:
    state = state_of(SIZE, TENSORS)
    counters = server.house.counters
    with pool_on(url(server)) as pool:
        assert saved(pool, snapshot_of(state, 1)).bounced_bytes == 0
        assert counters.counts["verbs_bytes"] == counters.counts["pulled_bytes"] == SIZE
        assert pool.links.verbs is not None
        regions = {each.region.remote_key for each in pool.links.verbs._known.values()}
        assert len(regions) == TENSORS
        for each in state:
            each += 1  # trained, in place
        assert saved(pool, snapshot_of(state, 2)).bounced_bytes == 0
        again = {each.region.remote_key for each in pool.links.verbs._known.values()}
        assert again == regions, "what is registered stays registered"
        targets = [np.zeros_like(each) for each in state]
        assert loaded(pool, targets, 2)
        assert all(np.array_equal(*pair) for pair in zip(state, targets, strict=True))
        assert counters.counts["verbs_bytes"] == 3 * SIZE, "it was written back by verbs"
        assert counters.counts["bounced_bytes"] == 0
    check_sound(server)


def test_a_state_of_all_sizes_comes_back(server: Server) -> None:
    """Small ones go over the socket; one is longer than a unit, some are empty."""
    sizes = [0, 1, 63, 64, 65, 4096, 16383, 16384, 70_001, 0, (16 << 20) + 5, 100, *range(1, 300)]
    state = [np.full(size, number % 251, np.uint8) for number, size in enumerate(sizes)]
    with pool_on(url(server)) as pool:
        stats = saved(pool, snapshot_of(state, 1))
        assert stats.bounced_bytes == sum(size for size in sizes if size < 16384)
        assert server.house.counters.counts["bounced_bytes"] == 0
        assert holds(pool, state, 1)
    check_sound(server)


def test_a_file_system_with_dax_is_reached_through_the_ring(tmp_path: Path) -> None:
    state = state_of(RING, 20)
    place = Path(FSDAX, f"verbs-{tmp_path.name}")
    with serving(place, patience=PATIENCE) as server, pool_on(url(server)) as pool:
        stats = saved(pool, snapshot_of(state, 1))
        assert stats.bounced_bytes == stats.copied_bytes == RING
        assert server.house.counters.counts["bounced_bytes"] == RING
        assert holds(pool, state, 1)
        check_sound(server)


def test_a_pool_in_memory_grows_under_its_regions() -> None:
    with serving("memory:512M", patience=PATIENCE) as server, pool_on(url(server)) as pool:
        for step in range(4):
            state = state_of(SOME, 3, step)
            assert saved(pool, snapshot_of(state, step)).bounced_bytes == 0
        state = state_of(RING, 5, 9)
        assert saved(pool, snapshot_of(state, 9)).bounced_bytes == 0
        assert holds(pool, state, 9)
        check_sound(server)


def test_a_pool_whose_pages_are_pinned_gives_nothing_back(tmp_path: Path) -> None:
    """The device would go on with pages that are the file's no more."""
    place = Path("/dev/shm", f"verbs-{tmp_path.name}")
    try:
        with serving(place, patience=PATIENCE) as server, pool_on(url(server)) as pool:
            for step in (1, 2, 3):
                saved(pool, snapshot_of(state_of(SOME, 3, step=step), step))
            pool.let_go([entry.info.token for entry in pool.catalogue().entries()][:2])
            assert pool.give_back() == 0
            for step in (4, 5):
                state = state_of(SOME, 3, step=step)
                assert saved(pool, snapshot_of(state, step)).bounced_bytes == 0
                assert holds(pool, state, step)
            check_sound(server)
    finally:
        shutil.rmtree(place)


def test_several_clients_save_at_once(server: Server) -> None:
    failures: list[BaseException] = []

    def train(number: int) -> None:
        try:
            with pool_on(url(server), f"m{number}") as pool:
                for step in range(3):
                    state = state_of(SOME, 7, 10 * number + step)
                    saved(pool, snapshot_of(state, 10 * number + step, f"m{number}"))
                    assert holds(pool, state, 10 * number + step)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    check_sound(server)


# --- memory that is not what it was ---


class Pages:
    """Memory of its own at a place of its own, that can be exchanged for other pages."""

    def __init__(self, size: int) -> None:
        self.size = size
        flags = MAP_PRIVATE | MAP_ANONYMOUS
        self.start = map_pages(0, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, (-1, 0))

    def exchange(self) -> None:
        """Free it, and take it anew at the same address."""
        unmap_pages(self.start, self.size)
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED
        map_pages(self.start, self.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, (-1, 0))

    def array(self, value: int) -> Bytes:
        """A new object over it, filled."""
        array = np.frombuffer(memory(self.start, self.size), np.uint8)
        array[:] = value
        return array


def test_a_tensor_at_the_address_of_an_old_one_is_saved_with_its_own_bytes(
    server: Server,
) -> None:
    pages = Pages(1 << 20)
    with pool_on(url(server)) as pool:
        for step in range(1, 4):
            state = [pages.array(step)]
            saved(pool, snapshot_of(state, step))
            assert holds(pool, [np.full(pages.size, step, np.uint8)], step)
            del state
            pages.exchange()
    check_sound(server)


def test_pages_that_are_exchanged_under_their_owner_are_never_saved_stale(server: Server) -> None:
    """No look at the owner can see it; the digests do. Then all is registered anew."""
    pages = Pages(1 << 20)
    owner = object()
    with pool_on(url(server)) as pool:
        saved(pool, snapshot_of([pages.array(1)], 1, owners=[owner]))
        pages.exchange()
        with pytest.raises(
            TransportError, match="the bytes that arrived are not those that were sent"
        ):
            saved(pool, snapshot_of([pages.array(2)], 2, owners=[owner]))
        assert steps(pool) == [1]
        saved(pool, snapshot_of([pages.array(3)], 3, owners=[owner]))
        assert holds(pool, [np.full(pages.size, 3, np.uint8)], 3)
        assert steps(pool) == [1, 3]
    check_sound(server)


# --- saves that are given up ---


def test_a_save_that_is_given_up_is_revoked_first(server: Server) -> None:
    state = state_of(SOME, 3)
    with pool_on(url(server)) as pool:
        saved(pool, snapshot_of(state, 1))
        snapshot = snapshot_of(state, 2)
        draft = pool.draft(snapshot)
        draft.copy(np.arange(3), snapshot.address, Stop())
        reached = draft._reached
        assert reached is not None
        closed = [reached.lane.closed]
        draft.release()
        assert [*closed, reached.lane.closed] == [False, True]
        check_sound(server)
        saved(pool, snapshot_of(state, 3))
        assert steps(pool) == [1, 3]


def test_a_fence_that_expires_in_a_slow_pull_lets_go_after_it_revoked() -> None:
    """The host stops in the middle of its pull; when it goes on it reads nothing any more."""
    format_device(DEVDAX, LocalFiles(), force=True)
    state = state_of(100 << 20, 8)
    with Host(DEVDAX) as host, pool_on(host.url) as pool:
        save = begun(pool, snapshot_of(state, 1))
        draft = save.draft
        assert isinstance(draft, HostDraft)
        worker = threading.Thread(target=save.run)
        worker.start()
        reached = settled(lambda: draft._reached)
        time.sleep(0.3)
        host.pause()
        assert not save.release(0.2), "the fence waits, and not for the pull"
        assert not save._reading
        assert reached.lane.closed
        for each in state:
            each[:] = 0  # the optimizer's step
        host.resume()
        worker.join()
        with pytest.raises(AbandonedError, match="fence_timeout"):
            save.result(0)
        assert steps(pool) == []
        small = state_of(SOME, 3, 5)
        saved(pool, snapshot_of(small, 5))
        assert steps(pool) == [5]
        assert holds(pool, small, 5)


def settled(found: Callable[[], T | None]) -> T:
    until = time.monotonic() + WAIT_S_MAX
    while (value := found()) is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    return value


# --- ends that die ---


def test_a_client_that_is_killed_in_a_pull_leaves_nothing_and_others_go_on(server: Server) -> None:
    command = [sys.executable, "-m", "tests.hardware.states", url(server), "64"]
    hosted = server.house.pools.of("default")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if line == "saving 2\n":
                break
        settled(lambda: hosted.saves or None)
        time.sleep(0.3)
        trainer.kill()
    assert others_save(server)
    check_sound(server)
    found = [each.info.step for each in hosted.writer.catalogue().entries()]
    assert found == [1, 77]


def test_a_host_that_is_killed_in_a_pull_costs_that_save_alone() -> None:
    format_device(DEVDAX, LocalFiles(), force=True)
    first, second = state_of(SOME, 3, 1), state_of(100 << 20, 8, 2)
    with Host(DEVDAX) as host, pool_on(host.url) as pool:
        saved(pool, snapshot_of(first, 1))
        save = begun(pool, snapshot_of(second, 2))
        draft = save.draft
        assert isinstance(draft, HostDraft)
        worker = threading.Thread(target=save.run)
        worker.start()
        reached = settled(lambda: draft._reached)
        time.sleep(0.3)
        host.kill()
        worker.join()
        with pytest.raises(TransportError):
            save.result(0)
        assert reached.lane.closed
        host.start()
        time.sleep(0.01)
        assert steps(pool) == [1]
        assert holds(pool, first, 1)
        saved(pool, snapshot_of(first, 3))
        assert steps(pool) == [1, 3]


# --- clients that lie ---


LIES: dict[str, Callable[[int, int, int], tuple[int, int, int]]] = {
    "key": lambda address, key, length: (address, key ^ 0x5500, length),
    "address": lambda address, key, length: (address + (1 << 30), key, length),
    "before": lambda address, key, length: (address - 4096, key, length),
    "length": lambda address, key, length: (address, key, length + 4096),
    "nought": lambda address, key, length: (0, key, length),
    "far": lambda address, key, length: ((1 << 47) - 4096, key, length),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_handle_that_lies_is_refused_and_others_save(server: Server, lie: str) -> None:
    [array] = state_of(1 << 20, 1)
    links = Links(parse(url(server)), Credentials(), model="liar")
    try:
        link = links.borrow()
        lane = links.lane(link)
        assert lane is not None
        start = array.ctypes.data
        region = lane.domain.register(start, array.nbytes, remote=True, writable=True)
        address, key, length = LIES[lie](region.start, region.remote_key, array.nbytes)
        lengths, one = pack_column([length]), pack_column([0])
        link.ask(said.Begin("liar", 1, b"t" * 16, lengths, pack_pairs([address], [key])))
        answer = link.ask(said.Offer(one))
        assert isinstance(answer, said.Refused), answer
        assert answer.fault is said.Fault.USAGE
        assert "cannot be reached" in answer.text
        links.revoke(link)
        region.close()
    finally:
        links.close()
    check_sound(server)
    assert others_save(server)


def test_digests_that_are_not_those_of_what_was_read_make_no_version(server: Server) -> None:
    """Weights that change between the hash and the read, say."""
    [array] = state_of(1 << 20, 1)
    with pool_on(url(server)) as pool:
        snapshot = snapshot_of([array], 1)
        draft = pool.draft(snapshot)
        draft.copy(np.arange(1), snapshot.address, Stop())
        digests = draft._digests
        confirm = said.Confirm(bytes(digests.nbytes), table([1 << 20]), b"")
        assert draft._link is not None
        answer = draft._link.ask(confirm)
        assert isinstance(answer, said.Refused)
        assert answer.fault is said.Fault.CORRUPTION
        draft.release()
        assert steps(pool) == []
    check_sound(server)


# --- what others write while it is saved ---

ACTOR = """
import numpy as np, sys
memory = np.memmap(sys.argv[1], np.uint64, "r+")
print("begun", flush=True)
while True:
    memory += 1
"""


@contextlib.contextmanager
def written_by_a_process(array: Bytes, path: Path) -> Iterator[None]:
    """``array`` is a mapping of the file ``path``."""
    command = [sys.executable, "-c", ACTOR, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as actor:
        assert actor.stdout is not None
        actor.stdout.readline()
        try:
            yield
        finally:
            actor.kill()


def test_every_version_of_what_another_process_writes_all_the_time_loads(
    server: Server, tmp_path: Path
) -> None:
    """It goes over the socket, where what is hashed is what is sent; the rest goes by verbs."""
    path = tmp_path / "replay"
    path.write_bytes(bytes(SOME))
    replay: Bytes = np.memmap(path, np.uint8, "r+")
    state = [*state_of(SOME, 3), replay]
    with written_by_a_process(replay, path), pool_on(url(server)) as pool:
        for step in range(20):
            late = np.array([True, True, True, False])
            snapshot = replace(snapshot_of(state, step), late=late, exposed=np.array([3]))
            assert saved(pool, snapshot).bounced_bytes == SOME
            assert loaded(pool, [np.zeros_like(each) for each in state], step)
        assert server.house.counters.counts["pulled_bytes"] == 20 * 2 * SOME
    check_sound(server)


def test_what_another_thread_writes_all_the_time_costs_one_version_at_most(server: Server) -> None:
    state = [*state_of(SOME, 3), np.zeros(2 * SOME, np.uint8)]
    late = np.array([True, True, True, False])
    over, failed = threading.Event(), []

    def write() -> None:
        while not over.is_set():
            state[3] += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with pool_on(url(server)) as pool:
            for step in range(20):
                try:
                    saved(pool, replace(snapshot_of(state, step), late=late))
                except TransportError as error:
                    failed.append(str(error))
                else:
                    assert loaded(pool, [np.zeros_like(each) for each in state], step)
            assert len(steps(pool)) == 20 - len(failed)
    finally:
        over.set()
        thread.join()
    assert len(failed) <= 1, "from then on it goes over the socket"
    assert all("not those that were sent" in each for each in failed)
    check_sound(server)


# --- where verbs cannot be ---


def test_memory_that_cannot_be_registered_goes_over_the_socket_and_says_so(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pages of a file system with DAX cannot be pinned."""
    path = Path(FSDAX, f"tensor-{tmp_path.name}")
    path.write_bytes(bytes(1 << 20))
    state = [np.memmap(path, np.uint8, "r+")]
    state[0][:] = 7
    with pool_on(url(server)) as pool, pytest.raises(UsageError, match="cannot register 1048576"):
        saved(pool, snapshot_of(state, 1))
    monkeypatch.setenv("PORTUS_TRANSPORT", "auto")
    with caplog.at_level(logging.INFO, "portus"), pool_on(url(server)) as pool:
        for step in (2, 3):
            stats = saved(pool, snapshot_of(state, step))
            assert stats.bounced_bytes == 1 << 20
        assert holds(pool, list(state), 3)
    lines = [each for each in caplog.messages if "over the socket" in each]
    assert len(lines) == 1, caplog.messages
    check_sound(server)


def test_a_limit_on_locked_memory_is_said(server: Server) -> None:
    """Root is above that limit, but for the right to be."""
    limited = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
    limited += ["prlimit", "--memlock=1000000"]
    command = [*limited, sys.executable, "-m", "tests.hardware.states", url(server), "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX)
    assert "PORTUS_TRANSPORT=verbs, but verbs cannot be used" in done.stderr
    assert "ulimit -l" in done.stderr
    check_sound(server)


@pytest.mark.parametrize("side", ["client", "host"])
def test_one_side_alone_means_the_socket(
    side: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PORTUS_TRANSPORT", "tcp" if side == "client" else "auto")
    options = ["--transport", "tcp"] if side == "host" else []
    state = state_of(SOME, 3)
    with Host("memory:64M", *options) as host:
        with caplog.at_level(logging.INFO, "portus"), pool_on(host.url) as pool:
            assert saved(pool, snapshot_of(state, 1)).bounced_bytes == SOME
            assert holds(pool, state, 1)
        if side == "host":
            monkeypatch.setenv("PORTUS_TRANSPORT", "verbs")
            with pytest.raises(UsageError, match="the storage host offers no verbs"):
                HostPool(host.url, "run")
    assert ("over the socket" in caplog.text) == (side == "host")


def test_a_forked_child_takes_nothing_from_its_parent(server: Server) -> None:
    """Neither by what it closes, nor by what it keeps."""
    state = state_of(SOME, 3)
    with pool_on(url(server)) as pool:
        saved(pool, snapshot_of(state, 1))
        child = os.fork()
        if child == 0:
            with contextlib.suppress(PortusError):
                pool.close()
            links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
            os._exit(any("infiniband" in each for each in links))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        saved(pool, snapshot_of(state, 2))
        assert holds(pool, state, 2)
