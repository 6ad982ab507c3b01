"""By verbs, what goes wrong at each state: nothing is lost, half-made or stale; others go on."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("pyverbs.device", reason="no pyverbs; make test-hardware", exc_type=ImportError)

from portus.engine.copying.segments import Stop
from portus.errors import MediumError, TransportError, UsageError
from portus.reach.daemon.server import Server
from portus.reach.daemon.shared_state import ClientTimeouts
from portus.reach.index.check import check
from portus.reach.index.directory import format_device, open_reader
from portus.reach.index.findings import Severity
from portus.reach.media.local import LocalFiles
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Said, error_of, pack_column, pack_pairs
from portus.reach.protocol.vocabulary import Phase
from portus.reach.transport.verbs import RegisterError
from tests.hardware.conftest import DEVDAX, WAIT_S_MAX
from tests.hardware.states import begun, holds, loaded, saved, snapshot_of, state_of, steps
from tests.hardware.test_verbs_host import (
    check_sound,
    others_save,
    pool_on,
    settled,
)
from tests.hardware.walker import BEFORE, COMMITTED, MODEL, SIZE, Walk
from tests.hosts import Host, serving, url
from tests.nursery import Nursery, nursery
from tests.simulation.lossy import LossyLink

SOME = 2 << 20
TEN_TERABYTES = 10 << 40

pytestmark = [
    *(pytest.mark.rdma, pytest.mark.pmem, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("by_verbs_alone"),
]


def children() -> Nursery:
    return nursery("tests.hardware.walker")


def hear_all(walk: Walk) -> None:
    """What the host still said; raises at its end."""
    while True:
        walk.link.hear()


def models(server: Server) -> list[str]:
    catalogue = server.house.pools.of("default").writer.catalogue()
    return sorted(entry.info.model for entry in catalogue.entries())


# --- ends that are killed ---


@pytest.mark.parametrize("state", BEFORE)
def test_a_client_that_is_killed_at_any_state_leaves_its_version_or_nothing(
    server: Server, state: str
) -> None:
    other = state_of(SOME, 3, step=8)
    with pool_on(url(server), "other") as bystander:
        saved(bystander, snapshot_of(other, 7, "other"))
        with children().start("client", url(server), state) as child:
            assert (child.wait(), child.rest()) == (-9, ["there"])
        saved(bystander, snapshot_of(other, 8, "other"))  # over the connection that it had
        check_sound(server)
        hosted = server.house.pools.of("default")
        settled(lambda: not hosted.writer.locks.pins() or None)
        found = models(server).count(MODEL)
        assert found in ((0, 1) if state == "confirming" else (state in COMMITTED,))
        whole = state_of(SIZE, 1, step=1)
        with pool_on(url(server), MODEL) as pool:  # its claim is gone with it
            assert all(holds(pool, whole, 1) for _ in range(found))
            saved(pool, snapshot_of(other, 2, MODEL))
            assert holds(pool, other, 2)
            assert holds(pool, other, 8)
    check_sound(server)


@pytest.mark.parametrize("state", BEFORE)
def test_a_host_that_is_killed_at_any_state_keeps_what_it_had(state: str) -> None:
    format_device(DEVDAX, LocalFiles(), force=True)
    other = state_of(SOME, 3, step=8)
    with children().start("host", DEVDAX, 0) as host:
        port = int(host.line(WAIT_S_MAX).split()[1])
        address = f"portus://127.0.0.1:{port}"
        with pool_on(address, "other") as bystander:
            saved(bystander, snapshot_of(other, 8, "other"))
            walk = Walk(address)
            walk.to(state)
            host.kill()
            with pytest.raises(TransportError):
                hear_all(walk)
            walk.close()
            with children().start("host", DEVDAX, port) as again:
                again.line(WAIT_S_MAX)
                time.sleep(0.01)  # longer than the pause before another try
                found = steps(bystander)
                if state != "confirming":
                    assert found == ([8, 1] if state in COMMITTED else [8])
                assert found in ([8], [8, 1])
                assert holds(bystander, other, 8)
                if 1 in found:
                    assert holds(bystander, state_of(SIZE, 1, step=1), 1)
                saved(bystander, snapshot_of(other, 9, "other"))
                assert holds(bystander, other, 9)
    with contextlib.closing(open_reader(DEVDAX)) as reader:
        assert [each for each in check(reader) if each.severity is Severity.ERROR] == []


# --- the order of the end ---


def test_access_is_revoked_before_the_host_hears_that_a_save_is_given_up() -> None:
    """The host is stopped, and so cannot answer: what the client did before it said so is seen."""
    format_device(DEVDAX, LocalFiles(), force=True)
    state = state_of(SOME, 3)
    with Host(DEVDAX) as host, pool_on(host.url) as pool:
        snapshot = snapshot_of(state, 1)
        draft = pool.draft(snapshot)
        draft.copy(np.arange(3), snapshot.address, Stop())
        reached, link = draft._reached, draft._link
        assert reached is not None
        assert link is not None
        host.pause()
        worker = threading.Thread(target=draft.release)
        worker.start()
        settled(lambda: link.connection.state is Phase.ASKED or None)
        assert reached.lane.closed, "the host could still read what is about to change"
        host.resume()
        worker.join()
        saved(pool, snapshot_of(state, 2))
        assert steps(pool) == [2]


# --- links that fail ---


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8, 0.97])
def test_a_link_that_is_cut_while_verbs_go_on_loses_the_save_or_nothing(
    server: Server, part: float
) -> None:
    """The words of a save are few; its bytes do not go by the link."""
    state = state_of(SOME, 3)
    with (
        LossyLink("127.0.0.1", server.listeners[0].port) as link,
        pool_on(f"portus://127.0.0.1:{link.port}") as pool,
    ):
        saved(pool, snapshot_of(state, 1))
        before = link.relayed
        saved(pool, snapshot_of(state, 2))
        words = link.relayed - before
        assert words < SOME // 20
        link.once = True
        link.cut_after = link.relayed + int(words * part)
        save = begun(pool, snapshot_of(state, 3))
        save.run()
        settled(lambda: link.cuts or None)
        reported = [1, 2]
        try:
            save.result(0)
            reported.append(3)
        except TransportError:
            pass
        time.sleep(0.01)
        found = steps(pool)
        assert found in ([1, 2, 3], reported)
        assert all(holds(pool, state, step) for step in found)
        saved(pool, snapshot_of(state, 4))
        assert holds(pool, state, 4)
    check_sound(server)


def test_a_slow_link_delays_words_and_not_bytes(server: Server) -> None:
    """What goes by verbs does not wait for the words' link; what is committed is the same."""
    state = state_of(SIZE, 3)
    with (
        LossyLink("127.0.0.1", server.listeners[0].port) as link,
        pool_on(f"portus://127.0.0.1:{link.port}") as pool,
    ):
        saved(pool, snapshot_of(state, 1))
        link.bytes_s = SIZE // 100  # the whole state would take 100 seconds
        before = link.relayed
        assert saved(pool, snapshot_of(state, 2)).bounced_bytes == 0
        assert link.relayed - before < SIZE // 20
        save = begun(pool, snapshot_of(state, 3))
        link.stalled = True
        worker = threading.Thread(target=save.run)
        worker.start()
        time.sleep(0.5)
        assert len(models(server)) == 2, "the word to commit has not come"
        link.stalled = False
        worker.join()
        save.result(0)
        assert steps(pool) == [1, 2, 3]
        assert all(holds(pool, state, step) for step in (1, 2, 3))
    check_sound(server)


# --- clients that lie, or hang ---


def test_another_version_of_the_protocol_is_refused_before_a_queue_pair_is_made(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr("portus.reach.transport.dial.VERSION", said.VERSION + 1)
        with pytest.raises(UsageError, match="upgrade the older"), pool_on(url(server)):
            pass
    assert server.house.fabric._devices == {}
    check_sound(server)
    assert others_save(server)


@pytest.fixture
def walk(server: Server) -> Iterator[Walk]:
    made = Walk(url(server))
    try:
        yield made
    finally:
        made.close()


def refusal(walk: Walk, message: Said) -> Exception:
    answer = walk.ask(message, said.Refused)
    assert isinstance(answer, said.Refused)
    return error_of(answer)


ONE = pack_column([0])


def test_memory_that_is_given_back_before_it_is_pulled_is_refused(
    server: Server, walk: Walk
) -> None:
    walk.to("begun")
    walk.region.close()
    error = refusal(walk, said.Offer(ONE))
    assert isinstance(error, UsageError)
    assert "cannot be reached" in str(error)
    check_sound(server)
    assert others_save(server)


PUSHES: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "key": lambda address, key: (address, key ^ 0x5500),
    "address": lambda address, key: (address + (1 << 30), key),
    "behind": lambda address, key: (address + 4096, key),
}


@pytest.mark.parametrize("lie", PUSHES)
def test_a_handle_that_lies_at_a_restore_is_refused_and_others_are_served(
    server: Server, walk: Walk, lie: str
) -> None:
    walk.to("pinned")
    before = walk.array.copy()
    version = walk.record.info.id
    extents = walk.record.extents
    offsets = np.stack([extents["offset"], extents["length"]], axis=1).reshape(-1)
    handle = PUSHES[lie](walk.region.start, walk.region.remote_key)
    packed = pack_pairs([handle[0]], [handle[1]])
    message = said.Push(pack_column([SIZE]), pack_column(offsets.astype(np.int64)), packed)
    error = refusal(walk, message)
    assert isinstance(error, UsageError)
    assert "cannot be reached" in str(error)
    if lie != "behind":  # there it is the client's own memory that it lied about
        assert np.array_equal(walk.array, before)
    walk.ask(said.Unpin(version), said.Done)
    check_sound(server)
    assert others_save(server)


def test_memory_that_may_only_be_read_is_never_written(server: Server) -> None:
    """What a save registers: a host that wrote there would change the weights."""
    state = state_of(SOME, 3)
    with pool_on(url(server)) as pool:
        saved(pool, snapshot_of(state, 1))
        verbs = pool.links.verbs
        assert verbs is not None
        key = next(iter(verbs._known.values())).region
        with pool.links.lend() as link:
            entry = next(iter(pool.catalogue().entries()))
            extents = pool.record(entry).extents[:1]
            size = min(key.length, int(extents["length"][0]))
            ranges = pack_column([int(extents["offset"][0]), size])
            handle = pack_pairs([key.start], [key.remote_key])
            before = state[0].copy()
            answer = link.ask(said.Push(pack_column([size]), ranges, handle))
            assert isinstance(answer, said.Refused), answer
            assert answer.fault is said.Fault.USAGE
        assert np.array_equal(state[0], before)
    check_sound(server)


def test_an_end_that_is_not_there_fails_its_own_save_alone() -> None:
    """A client that names a queue pair that nobody has: its host waits, and others do not."""
    format_device(DEVDAX, LocalFiles(), force=True)
    with serving(DEVDAX, patience=ClientTimeouts(silent_s=8.0)) as server:
        walk = Walk(url(server))
        try:
            walk.to("registered")
            there = walk.lane.endpoint
            walk.ask(said.Connect(*there._replace(number=there.number ^ 0x5555)), said.Connected)
            walk.step("begun")
            walk.link.send(said.Offer(ONE))
            assert others_save(server), "while it hangs"
            answer = walk.hear(said.Refused)
            assert isinstance(answer, said.Refused)
            assert isinstance(error_of(answer), TransportError)
            assert "no progress" in answer.text or "no longer answers" in answer.text
        finally:
            walk.close()
        check_sound(server)


@pytest.mark.parametrize("secret", [b"another secret of many bytes", None])
def test_who_does_not_have_the_secret_reaches_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, secret: bytes | None
) -> None:
    format_device(DEVDAX, LocalFiles(), force=True)
    right = tmp_path_factory.mktemp("secret") / "right"
    right.write_bytes(b"the secret of many bytes")
    right.chmod(0o600)
    state = state_of(SOME, 3)
    with serving(DEVDAX, secrets={"default": b"the secret of many bytes"}) as server:
        if secret is not None:
            wrong = right.with_name("wrong")
            wrong.write_bytes(secret)
            wrong.chmod(0o600)
            monkeypatch.setenv("PORTUS_SECRET_FILE", str(wrong))
        with pytest.raises(UsageError, match="secret"), pool_on(url(server)):
            pass
        assert server.house.fabric._devices == {}, "no queue pair was made for it"
        monkeypatch.setenv("PORTUS_SECRET_FILE", str(right))
        with pool_on(url(server)) as pool:
            assert saved(pool, snapshot_of(state, 1)).bounced_bytes == 0
            assert holds(pool, state, 1)
        check_sound(server)


def test_ten_terabytes_are_neither_registered_nor_pulled(server: Server, walk: Walk) -> None:
    walk.to("connected")
    with pytest.raises(RegisterError, match="ulimit -l"):
        walk.register(TEN_TERABYTES)
    lengths = pack_column([TEN_TERABYTES])
    handle = pack_pairs([walk.array.ctypes.data], [7])
    walk.link.send(said.Begin(MODEL, 1, b"t" * 16, lengths, handle))
    answer = walk.link.hear()
    if isinstance(answer, said.Done):
        full = walk.ask(said.Offer(ONE), said.Refused)
        assert isinstance(full, said.Refused)
        assert (full.fault, full.errno) == (said.Fault.FULL, errno.ENOSPC)
        walk.ask(said.Abandon(), said.Done)  # until then it may be offered again
    else:
        assert isinstance(answer, said.Refused)
        assert isinstance(error_of(answer), MediumError)
    check_sound(server)
    assert others_save(server)


def test_a_client_that_says_nothing_after_a_pull_is_ended_and_holds_nobody_up() -> None:
    """Its processor has no part in the pull: that it hangs is seen when it does not confirm."""
    format_device(DEVDAX, LocalFiles(), force=True)
    with serving(DEVDAX, patience=ClientTimeouts(idle_s=3.0, silent_s=WAIT_S_MAX)) as server:
        walk = Walk(url(server))
        try:
            walk.to("pulled")
            hosted = server.house.pools.of("default")
            assert hosted.saves == 1
            assert others_save(server)
            settled(lambda: hosted.saves == 0 or None)
            with pytest.raises(TransportError):
                walk.link.hear()
        finally:
            walk.close()
        assert models(server) == ["other"]
        check_sound(server)


# --- pools that cannot be reached straight ---


def pinning(size: int) -> list[str]:
    """The command under which a host may pin so many bytes."""
    limited = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
    return [*limited, "prlimit", f"--memlock={size}"]


def test_a_host_that_may_not_pin_its_pool_goes_on_through_buffers() -> None:
    """One block may be pinned, or one ring, and not both."""
    format_device(DEVDAX, LocalFiles(), force=True)
    small, big = state_of(SOME, 3, 1), state_of(70 << 20, 8, 2)
    with Host(DEVDAX, under=pinning(100 << 20)) as host, pool_on(host.url) as pool:
        assert saved(pool, snapshot_of(small, 1)).bounced_bytes == 0
        with pytest.raises(TransportError, match="cannot register"):
            saved(pool, snapshot_of(big, 2))
        assert steps(pool) == [1]
        assert saved(pool, snapshot_of(big, 3)).bounced_bytes == 70 << 20
        assert holds(pool, big, 3)
        assert holds(pool, small, 1)
        host.stop()
        assert "go through buffers from now on" in host.log


def test_a_second_pool_that_may_not_be_pinned_goes_through_the_same_buffers() -> None:
    """The ring of the first one is all that may be pinned. So not even a block of the second is,
    which is found before anything is read, and costs no save."""
    small, big = state_of(SOME, 3, 1), state_of(70 << 20, 8, 2)
    with Host("memory:256M", under=pinning(65 << 20)) as host:
        first, second = (f"portus://{tenant}@127.0.0.1:{host.port}" for tenant in "ab")
        with pool_on(first) as pool:
            with pytest.raises(TransportError, match="cannot register"):
                saved(pool, snapshot_of(big, 1))
            assert saved(pool, snapshot_of(big, 2)).bounced_bytes == 70 << 20
        with pool_on(second) as pool:
            for step in (1, 2):
                assert saved(pool, snapshot_of(small, step)).bounced_bytes == SOME
                assert holds(pool, small, step)
        host.stop()
        assert host.log.count("go through buffers from now on") == 2, "once for each"


def test_a_pool_that_a_failed_persist_poisoned_is_still_restored_from(server: Server) -> None:
    """It has no addresses any more; its bytes go through the ring."""
    state = state_of(SIZE, 5)
    with pool_on(url(server)) as pool:
        saved(pool, snapshot_of(state, 1))
        medium = server.house.pools.of("default").writer.medium
        medium._poison = "persist: worn out"  # type: ignore[attr-defined]
        with pytest.raises(MediumError, match="worn out"):
            saved(pool, snapshot_of(state, 2))
        targets = [np.zeros_like(each) for each in state]
        assert loaded(pool, targets, 1)
        assert all(np.array_equal(*pair) for pair in zip(state, targets, strict=True))
        assert server.house.counters.counts["bounced_bytes"] == SIZE
        assert steps(pool) == [1]
