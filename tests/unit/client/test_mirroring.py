"""A ``Checkpointer`` with a mirror: what it copies there, and what a fresh node gets back."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.cli import rm
from portus.cli.output import Output
from portus.client.dcp.group_writer import GroupWriter
from portus.client.files import run_mirror
from portus.client.files.keeper import Keeper
from portus.client.files.run_mirror import Mirroring
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.errors import CorruptionError, MediumError, TransportError, UsageError
from portus.index.groups import part_model
from portus.mirror import copier, opening
from portus.mirror.address import StoreAddress, parse
from portus.mirror.copier import Joined
from portus.mirror.mirror import Mirror, MirroringCost
from portus.mirror.objects import STRIDE, State
from portus.mirror.opening import open_store
from portus.mirror.store import Store
from portus.spec import VersionInfo
from portus.testing.hosting import serving, url
from portus.testing.stores import CountingStore
from portus.transport.base import Stop
from tests.unit.client.bucket import SmallBucket
from tests.unit.client.stuck import until


class Node:
    """A machine: a run in a directory of its own, which is lost with it; the mirror is not."""

    def __init__(self, root: Path) -> None:
        self.mirror = f"file://{root}/bucket/runs"
        self.run = root / "run"
        self.run.mkdir()

    def start(self, **changes: Any) -> PoolCheckpointer:
        settings: dict[str, Any] = {"mirror": self.mirror, "keep": 2, "mirror_wait": 60}
        return PoolCheckpointer(self.run / ".portus", "net", **(settings | changes))

    def lose(self) -> None:
        shutil.rmtree(self.run)
        self.run.mkdir()

    def state(self) -> State:
        return Mirror(open_store(parse(self.mirror)), "net").read()

    def steps(self) -> list[int]:
        found = sorted(self.state().versions, key=lambda each: (each.term, each.commit))
        return [each.step for each in found]

    def pool_steps(self) -> list[int]:
        with portus.open(self.run / ".portus") as pool:
            return pool.steps("net")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)
    monkeypatch.chdir(made.run)
    return made


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "frozen": torch.arange(70_000), "step": step}


def same(left: Any, right: dict[str, Any]) -> bool:
    return (
        left.keys() == right.keys()
        and left["step"] == right["step"]
        and all(torch.equal(left[name], right[name]) for name in ("w", "frozen"))
    )


def test_a_fresh_node_goes_on_from_the_mirror_alone(node: Node) -> None:
    with node.start() as run:
        for step in (1, 2, 3):
            run.save(state(step), step, metrics={"loss": step}).wait()
    assert node.steps() == [2, 3]
    node.lose()
    with node.start() as run:
        assert same(run.load(), state(3))
        assert run.versions()[-1].metrics == {"loss": 3.0}
        run.save(state(4), 4).wait()
    assert node.pool_steps() == [3, 4]
    assert node.steps() == [3, 4]
    assert portus.check(node.run / ".portus" / "net.portus") == []
    node.lose()
    with node.start() as run:
        assert same(run.load(), state(4))


def test_its_reference_files_are_put_back_and_lead_to_the_new_pool(node: Node) -> None:
    with node.start() as run:
        for step in (1, 2, 3):
            last = node.run / "ckpt" / "last.ckpt"
            run.save(state(step), step, reference=last).wait()
            if step == 1:
                run.save(state(step), step, reference=node.run / "best.ckpt").wait()
    node.lose()
    with node.start(keep=1) as run:
        assert sorted(run.steps()) == [1, 3]
        assert same(portus.load_reference(node.run / "best.ckpt"), state(1))
        assert same(portus.load_reference(last), state(3))
        run.remove(node.run / "best.ckpt")
        run.save(state(4), 4, reference=last).wait()
    assert node.steps() == [4]
    assert {each.path for each in node.state().references} == {"ckpt/last.ckpt"}
    node.lose()
    with node.start():
        assert not (node.run / "best.ckpt").exists()


def aged(node: Node, days: float) -> None:
    """All that is in the mirror was put there so long ago."""
    for path in (node.run.parent / "bucket").rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - days * 86400
            os.utime(path, (then, then))


def objects(node: Node, kind: str) -> set[str]:
    return {path.name for path in (node.run.parent / "bucket" / "runs" / "net" / kind).iterdir()}


def test_whenever_a_machine_is_lost_the_last_file_leads_to_the_newest_version(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes between the commit, its file, and the two looks of whoever copies."""
    real_copy, real_replace, real_infos = Mirror.copy, Keeper.replace, Joined.infos
    seen: list[tuple[int, bool]] = []

    def copy(mirror: Mirror, *rest: Any) -> MirroringCost:
        cost = real_copy(mirror, *rest)
        newest = mirror.state.newest
        assert newest is not None
        references = [(each.path, each.token) for each in mirror.state.references]
        seen.append((newest.step, references == [("ckpt/last.ckpt", newest.token)]))
        return cost

    def late(keeper: Keeper, *rest: Any, **settings: Any) -> None:
        time.sleep(0.02)  # the version is committed, and its file leads to the one before
        real_replace(keeper, *rest, **settings)

    def early(joined: Joined) -> list[VersionInfo]:
        infos = real_infos(joined)
        time.sleep(0.01)  # the next one is committed before the files are looked at
        return infos

    monkeypatch.setattr(Mirror, "copy", copy)
    monkeypatch.setattr(Keeper, "replace", late)
    monkeypatch.setattr(Joined, "infos", early)
    with node.start(keep=1) as run:
        for step in range(1, 41):
            run.save(state(step), step, reference=node.run / "ckpt" / "last.ckpt").wait()
            time.sleep(0.001 * (step % 7))
    assert [step for step, leads in seen if not leads] == []
    assert seen[-1][0] == 40


def test_a_run_deletes_what_nobody_needs_a_day_after_it_let_go_of_it_and_nothing_else(
    node: Node, daily: None
) -> None:
    with node.start(keep=1) as run:
        for step in (1, 2):
            run.save(state(step), step).wait()
            assert run._pool.mirroring is not None
            until(lambda step=step: node.steps() == [step])  # type: ignore[misc]
    aged(node, 0.9)
    with node.start(keep=1) as run:
        run.save(state(3), 3).wait()
        until(lambda: node.steps() == [3] and not collecting(run))
    assert len(objects(node, "manifests")) == 3, "who began to load an hour ago finds it"
    aged(node, 1.2)
    kept = {each.manifest for each in node.state().versions}
    with node.start(keep=1) as run:
        until(lambda: objects(node, "manifests") == kept)
    assert not node.state().gone
    node.lose()
    with node.start() as run:
        assert same(run.load(), state(3))


@pytest.fixture
def daily(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day passes with every step of a copier."""
    monkeypatch.setattr(copier, "_COLLECT_S", 0.0)


def collecting(run: PoolCheckpointer) -> bool:
    """False once the copier has nothing more to do, and collected if that was due."""
    assert run._pool.mirroring is not None
    return run._pool.mirroring._collected_s is None


def test_a_run_without_the_right_to_delete_goes_on_and_says_so_once(
    node: Node, before: Before, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(call: str, name: str) -> None:
        if call == "delete":
            raise UsageError("permission is denied")

    with node.start(keep=1) as run:
        for step in (1, 2):
            run.save(state(step), step).wait()
            until(lambda step=step: node.steps() == [step])  # type: ignore[misc]
    aged(node, 3)
    before.append(denied)
    monkeypatch.setattr(copier, "_COLLECT_S", 0.0)
    with caplog.at_level(logging.WARNING, "portus"), node.start(keep=1) as run:
        for step in (3, 4, 5):
            run.save(state(step), step).wait()
            until(lambda step=step: node.steps() == [step] and not collecting(run))  # type: ignore[misc]
    assert node.steps() == [5]
    assert caplog.text.count("no longer needs are not deleted, and take space there") == 1
    assert caplog.text.count("permission is denied") == 1
    assert "is behind" not in caplog.text
    assert len(node.state().gone) == 3, "those of this day: a run that may not delete forgets, too"


def test_the_end_of_a_run_does_not_wait_for_what_is_deleted(
    node: Node, before: Before, daily: None
) -> None:
    reached, go = threading.Event(), threading.Event()

    def slow(call: str, name: str) -> None:
        if call == "list" and name.endswith("/packs/"):
            reached.set()
            assert go.wait(60)

    before.append(slow)
    run = node.start()
    run.save(state(1), 1).wait()
    assert reached.wait(60)
    ended = threading.Thread(target=run.close)
    ended.start()
    assert run._pool.mirroring is not None
    until(lambda: run._pool.mirroring is not None and run._pool.mirroring._closing)
    go.set()
    ended.join(60)
    assert run._pool.mirroring._collected_s is None, "it was cut off"
    assert node.steps() == [1]


@pytest.mark.parametrize("kind", ["packs", "manifests"])
def test_what_the_store_lost_is_mended_from_the_pool_by_the_next_run(
    node: Node, kind: str, daily: None, caplog: pytest.LogCaptureFixture
) -> None:
    with node.start() as run:
        for step in (1, 2):
            run.save(state(step), step).wait()
    newest = node.state().newest
    for path in (node.run.parent / "bucket" / "runs" / "net" / kind).iterdir():
        path.unlink()
    with caplog.at_level(logging.ERROR, "portus"), node.start() as run:
        until(lambda: not collecting(run))
    assert caplog.text.count("they were replaced from the pool") == 2
    found = node.state().newest
    assert found is not None
    assert newest is not None
    assert (found.token, found.term, found.commit) == (newest.token, newest.term, newest.commit)
    node.lose()
    with node.start() as run:
        assert same(run.load(), state(2))


def test_what_keep_wants_outlives_the_machine(node: Node) -> None:
    keep = portus.Keep(last=1, every=10, best=("loss", "min", 1))
    with node.start(keep=keep) as run:
        for step in (5, 7, 10, 12):
            run.save(state(step), step, metrics={"loss": abs(step - 7)}).wait()
    assert node.steps() == [7, 10, 12]
    node.lose()
    with node.start(keep=keep) as run:
        assert run.steps() == [12]
        run.save(state(20), 20, metrics={"loss": 1}).wait()
    assert node.pool_steps() == [12, 20], "the first one after 10 that this pool ever had"
    assert node.steps() == [7, 10, 12, 20], "the mirror keeps what it never had"


def test_a_pool_whose_history_went_on_elsewhere_is_named(node: Node, tmp_path: Path) -> None:
    with node.start() as run:
        run.save(state(1), 1).wait()
    shutil.copytree(node.run, tmp_path / "left behind")
    node.lose()
    with node.start() as run:
        run.save(state(2), 2).wait()
        run.save(state(3), 3).wait()
        run.save(state(4), 4).wait()
    with pytest.raises(UsageError, match=r"went on elsewhere: the newest .* is step 4, .* step 1"):
        PoolCheckpointer(tmp_path / "left behind" / ".portus", "net", mirror=node.mirror)
    with PoolCheckpointer(tmp_path / "left behind" / ".portus", "net", mirror="none") as run:
        assert run.steps() == [1]


class Gate:
    """Passes all on to a store; ``before`` is called before each request, and may wait or raise."""

    def __init__(self, store: Store, before: Callable[[str, str], None]) -> None:
        self._store = store
        self._before = before

    def __getattr__(self, call: str) -> Any:
        def asked(name: Any = "", *more: Any) -> Any:
            self._before(call, name if isinstance(name, str) else "")
            return getattr(self._store, call)(name, *more) if name else self._store.close()

        return asked


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str, str], None]]:
    """What is called before each request of any mirror: the last one."""
    gates: list[Callable[[str, str], None]] = [lambda call, name: None]
    stock = opening.open_store
    gated = lambda address: Gate(stock(address), lambda *asked: gates[-1](*asked))  # noqa: E731
    monkeypatch.setattr(run_mirror, "open_store", gated)
    monkeypatch.setattr("portus.mirror.behind._PAUSE_MIN_S", 0.01)
    return gates


Before = list[Callable[[str, str], None]]


def test_training_does_not_wait_for_a_slow_store_and_the_newest_goes_first(
    node: Node, before: Before
) -> None:
    reached, go = threading.Event(), threading.Event()

    def slow(call: str, name: str) -> None:
        if call == "put":
            reached.set()
            assert go.wait(60)

    before.append(slow)
    with node.start(keep=3) as run:
        run.save(state(1), 1).wait()
        assert reached.wait(60)
        for step in (2, 3):
            run.save(state(step), step).wait()
        go.set()
    assert [each.step for each in node.state().versions] == [1, 3, 2]


def test_a_save_that_needs_the_space_ends_the_upload(node: Node, before: Before) -> None:
    """There is room for two versions, and the one that is uploaded was retired: of three one."""
    reached, go = threading.Event(), threading.Event()
    size = 8 << 20

    def slow(call: str, name: str) -> None:
        if call == "put" and not go.is_set():
            reached.set()
            assert go.wait(60)

    def big(step: int) -> dict[str, Any]:
        return {"x": torch.full((size,), step, dtype=torch.uint8)}

    def answer(stop: Stop) -> None:
        while not stop.is_set():  # until it is asked to end
            assert not go.wait(0.001)
        go.set()

    before.append(slow)
    with node.start(keep=1, max_bytes=2 * size + (3 << 20)) as run:
        run.save(big(1), 1).wait()
        assert reached.wait(60)
        assert run._pool.mirroring is not None
        assert run._pool.mirroring._copying is not None
        other = threading.Thread(target=answer, args=(run._pool.mirroring._copying,))
        other.start()
        for step in (2, 3, 4):
            run.save(big(step), step).wait()
        other.join(60)
        assert go.is_set(), "the third one had no room"
    assert node.steps() == [4]


def test_who_was_left_behind_takes_nothing_from_the_mirror_though_it_was_away_at_the_start(
    node: Node, before: Before, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def away(call: str, name: str) -> None:
        if call != "close":
            raise TransportError("the store does not answer")

    with node.start() as run:
        run.save(state(1), 1).wait()
    shutil.copytree(node.run, tmp_path / "left behind")
    node.lose()
    with node.start() as run:
        for step in (2, 3, 4):
            run.save(state(step), step).wait()
    expected = node.state()
    before.append(away)
    behind = PoolCheckpointer(
        tmp_path / "left behind" / ".portus", "net", mirror=node.mirror, keep=1
    )
    before.pop()
    with caplog.at_level(logging.ERROR, "portus"), behind as run:
        run.save(state(9), 9).wait()
    assert node.state() == expected
    assert "no longer mirroring to file://" in caplog.text
    assert "went on elsewhere: the newest" in caplog.text


def test_what_nobody_thought_of_is_said_and_the_mirror_catches_up(
    node: Node, before: Before, caplog: pytest.LogCaptureFixture
) -> None:
    def short_of_memory(call: str, name: str) -> None:
        if call == "put":
            before.pop()
            raise MemoryError("no 16 MiB")

    before.append(short_of_memory)
    with caplog.at_level(logging.WARNING, "portus"), node.start() as run:
        run.save(state(1), 1).wait()
    assert "is behind; retrying: MemoryError: no 16 MiB" in caplog.text
    assert node.steps() == [1]


def test_the_end_does_not_wait_for_a_server_that_keeps_silent(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request may take two minutes; ``mirror_wait`` is less."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
    run = node.start(mirror="none")
    run.save(state(1), 1).wait()
    run.close()
    monkeypatch.setattr(Mirroring, "_begin", lambda self, joined: None)  # it would ask, and wait
    run = node.start(mirror="s3://bucket/runs", mirror_wait=0.1)
    with server:
        began = time.monotonic()
        with caplog.at_level(logging.ERROR, "portus"):
            run.close()
        assert time.monotonic() - began < 30
    assert "1 versions of model 'net' are not in s3://bucket/runs" in caplog.text


def test_a_save_costs_the_requests_that_the_page_says_and_so_does_a_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[CountingStore] = []

    def counted(address: StoreAddress) -> Store:
        counts.append(CountingStore(open_store(address)))
        return counts[-1]

    monkeypatch.setattr(run_mirror, "open_store", counted)
    saves = int(os.environ.get("PORTUS_TEST_SAVES", "20"))
    with node.start(keep=1) as run:
        run.save(state(1), 1).wait()
        until(lambda: node.steps() == [1] and not collecting(run))
        counts[-1].reset()
        for step in range(2, saves + 2):
            run.save(state(step), step).wait()
            until(lambda step=step: node.steps() == [step])  # type: ignore[misc]
        assert counts[-1].puts == 3 * saves, "a pack of what changed, a manifest, an entry"
        assert sum(counts[-1].calls.values()) == 3 * saves, "and nothing else"
    page = (Path(__file__).parents[3] / "docs" / "mirrors.md").read_text()
    with node.start(keep=1) as run:
        until(lambda: not collecting(run))
    assert counts[-1].lists == 1
    assert counts[-1].puts == 1, "a claim"
    assert counts[-1].gets <= STRIDE + 4 == 20
    assert "A start is one LIST, at most 20 small GETs and a PUT" in page
    node.lose()
    with node.start(keep=1) as run:
        until(lambda: not collecting(run))
    assert counts[-1].lists == 1, "an empty disk"
    monkeypatch.setattr(copier, "_COLLECT_S", 0.0)
    with node.start(keep=1):
        until(lambda: counts[-1].lists >= 1 + 4)
    assert counts[-1].lists == 1 + 4, "a start, and what it collects"
    assert "A day is 4 LISTs for each 1,000 objects" in page


def test_an_empty_mirror_is_listed_once_too(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore(open_store(parse(node.mirror)))
    monkeypatch.setattr(run_mirror, "open_store", lambda address: store)
    with node.start() as run:
        run.save(state(1), 1).wait()
        until(lambda: node.steps() == [1] and not collecting(run))
    assert store.lists == 1


def test_who_starts_every_few_hours_collects_once_a_day(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_ns, hours = time.time_ns(), [0]
    stock, collected = Mirror.collect, list[int]()

    def noted(mirror: Mirror, *args: Any, **settings: Any) -> object:
        collected.append(hours[-1])
        return stock(mirror, *args, **settings)

    monkeypatch.setattr(Mirror, "collect", noted)
    monkeypatch.setattr(time, "time_ns", lambda: began_ns + hours[-1] * 3600 * 10**9)
    for hour in (0, 10, 20, 30, 40, 50, 60, -9000):  # the last clock is a year behind
        hours.append(hour)
        with node.start() as run:
            run.save(state(1), 1).wait()
            until(lambda: not collecting(run))
    assert collected == [30, 60, -9000]


def test_at_a_terminal_the_wait_at_the_end_has_a_bar_that_goes_away(
    node: Node, before: Before, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if "] 0 of 2, 0 MiB of the next" in text:
                go.set()
            return super().write(text)

    go, terminal = threading.Event(), Terminal()

    def slow(call: str, name: str) -> None:
        if call == "put":
            assert go.wait(60)

    before.append(slow)
    run = node.start()
    for step in (1, 2):
        run.save(state(step), step).wait()
    monkeypatch.setattr(sys, "stderr", terminal)
    run.close()
    said = terminal.getvalue()
    assert "portus: mirror [................] 0 of 2" in said
    assert "; Ctrl-C ends it." in said
    assert said.endswith("\r\x1b[K")
    assert node.steps() == [1, 2]


def test_who_interrupts_the_wait_at_the_end_waits_no_more(
    node: Node, before: Before, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    def away(call: str, name: str) -> None:
        if call == "put":
            assert run._pool.mirroring is not None
            tries.extend([name] * run._pool.mirroring._closing)
            if len(tries) == 2:  # the first one was told
                os.kill(os.getpid(), signal.SIGINT)
            raise TransportError("the store does not answer")

    before.append(away)
    run = node.start()
    run.save(state(1), 1).wait()
    with pytest.raises(KeyboardInterrupt):
        run.close()
    began = time.monotonic()
    with caplog.at_level(logging.ERROR, "portus"):
        run.close()
    assert time.monotonic() - began < 30, "mirror_wait is 60"
    assert "does not answer" in caplog.text


def test_what_is_not_mirrored_though_the_environment_asks_for_it_is_said_once(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PORTUS_MIRROR", node.mirror)
    with caplog.at_level(logging.WARNING, "portus"):
        for _ in range(2):
            PoolCheckpointer(node.run / "pool", part_model("shards", 0, 2)).close()
        with serving(node.run / "host") as server:
            PoolCheckpointer(url(server), "remote").close()
            with pytest.raises(UsageError, match="whose mirror is that of the host"):
                PoolCheckpointer(url(server), "remote", mirror=node.mirror)
    assert caplog.text.count("$PORTUS_MIRROR is set, and model 'shards' is NOT mirrored") == 1
    assert caplog.text.count("$PORTUS_MIRROR is set, and model 'remote' is NOT mirrored") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING, "portus"):
        GroupWriter("portus://host", "meant", mirror="none")
        PoolCheckpointer(node.run / "pool", part_model("of another rank", 1, 2)).close()
    assert "NOT mirrored" not in caplog.text


def test_where_the_store_is_away_training_goes_on_and_the_mirror_catches_up(
    node: Node, before: Before, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    count = 0

    def away(call: str, name: str) -> None:
        nonlocal count
        if call not in ("close", "list"):
            count += 1
            if count > 5:
                told.set()
            raise TransportError("the store does not answer")

    with caplog.at_level(logging.WARNING, "portus"), node.start() as run:
        run.save(state(1), 1).wait()
        before.append(away)
        for step in (2, 3):
            run.save(state(step), step).wait()
        assert told.wait(60)
        before.pop()
    assert caplog.text.count("is behind; retrying: the store does not answer") == 1
    assert node.steps() == [2, 3]


def test_one_failure_after_another_makes_no_pause_longer_while_versions_are_mirrored(
    node: Node, before: Before
) -> None:
    """There is more to copy all the time, and each version fails once: 14 pauses, of which each is
    twice the one before, would be minutes."""
    failed: set[str] = set()
    count, go = 14, threading.Event()

    def flaky(call: str, name: str) -> None:
        if call == "put":
            assert go.wait(60)
        if "/manifests/" in name and name not in failed:
            failed.add(name)
            raise TransportError("the connection was cut")

    before.append(flaky)
    with node.start(keep=None) as run:
        for step in range(count):
            run.save(state(step), step).wait()
        go.set()
        mirroring = run._pool.mirroring
        assert mirroring is not None
        until(lambda: not mirroring.unmirrored())
    assert len(failed) >= count


def test_a_mirror_that_cannot_be_asked_ends_no_run_with_a_pool_and_no_empty_one_begins(
    node: Node, before: Before
) -> None:
    def away(call: str, name: str) -> None:
        if call != "close":
            raise TransportError("the store does not answer")

    def refused(call: str, name: str) -> None:
        if call != "close":
            raise UsageError("wrong credentials")

    with node.start() as run:
        run.save(state(1), 1).wait()
    before.append(away)
    with node.start(mirror_wait=0) as run:
        assert run.steps() == [1]
    before.append(refused)
    with pytest.raises(UsageError, match="wrong credentials"):
        node.start()
    before.pop()
    node.lose()
    with pytest.raises(TransportError, match="does not answer"):
        node.start()
    before.pop()
    with node.start() as run:
        assert run.steps() == [1]


def no_directory(root: Path) -> str:
    """The address of a mirror below a file: nobody can write there, not even root."""
    (root / "file").touch()
    return f"file://{root}/file/runs"


def test_a_directory_that_nobody_can_write_to_is_an_error_at_once_and_what_is_there_loads(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = r"/file/runs: nothing can be mirrored there: .* Not a directory.* mirror='none'"
    with pytest.raises(UsageError, match=refused):
        node.start(mirror=no_directory(tmp_path))
    assert list(node.run.iterdir()) == [], "and no pool was made"
    with node.start() as run:
        run.save(state(1), 1).wait()
    with pytest.raises(UsageError, match=refused):
        node.start(mirror=no_directory(tmp_path))
    stock = os.open

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT and "/bucket/" in os.fspath(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return stock(path, flags, *more, **named)

    with monkeypatch.context() as changes:
        changes.setattr(os, "open", read_only)
        with pytest.raises(UsageError, match=r"nothing can be mirrored there.*Read-only file sys"):
            node.start()
        assert same(portus.load(f"{node.mirror}/net"), state(1)), "who only loads writes nothing"
    with node.start() as run:
        run.save(state(2), 2).wait()
    assert node.steps() == [1, 2]


def test_the_end_waits_no_longer_than_it_is_told_to_and_says_what_is_missing(
    node: Node, before: Before, caplog: pytest.LogCaptureFixture
) -> None:
    def full(call: str, name: str) -> None:
        if call == "put":
            raise MediumError(28, "no room there")

    before.append(full)
    with caplog.at_level(logging.ERROR, "portus"), node.start(mirror_wait=0.2) as run:
        run.save(state(1), 1).wait()
    assert "1 versions of model 'net' are not in file://" in caplog.text
    assert "no room there" in caplog.text


def test_the_environment_says_where_and_none_says_nowhere(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_MIRROR", node.mirror)
    with node.start(mirror="none") as run:
        run.save(state(1), 1).wait()
    assert not node.steps()
    with node.start(mirror=None) as run:
        run.save(state(2), 2).wait()
    assert node.steps() == [1, 2]
    monkeypatch.setenv("PORTUS_MIRROR", "ftp://x")
    with pytest.raises(UsageError, match=r"\$PORTUS_MIRROR"):
        node.start(mirror=None)


def test_another_run_of_the_same_name_takes_no_mirror_from_one_that_is_here(
    node: Node, tmp_path: Path
) -> None:
    """``lightning_logs/version_0`` is what half of all runs are called."""
    with node.start() as run:
        run.save(state(1), 1).wait()
    expected, other = node.state(), tmp_path / "other"
    with pytest.raises(UsageError, match=r"two runs of one name.*or mirror='none'"):
        PoolCheckpointer(other, "net", mirror=node.mirror)
    assert node.state() == expected
    with PoolCheckpointer(other, "other", mirror=node.mirror) as run:
        run.save(state(2), 2).wait()
    shutil.move(node.run / ".portus", tmp_path / "put away")
    with PoolCheckpointer(tmp_path / "fresh", "net", mirror=node.mirror) as run:
        assert run.steps() == [1]


def test_what_an_operator_removed_does_not_come_back(node: Node) -> None:
    with node.start() as run:
        for step in (1, 2):
            run.save(state(step), step).wait()
    pool = str(node.run / ".portus")
    rm.run("net@2", pool, yes=True, force=True, keep=None, output=Output(as_json=False))
    with node.start() as run:
        assert run.steps() == [1]
        run.save(state(3), 3).wait()
        run.save(state(4), 4).wait()
    assert node.steps() == [3, 4]


def test_an_older_version_that_is_damaged_keeps_no_fresh_node_from_the_newest(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with node.start() as run:
        for step in (1, 2, 3):
            run.save(state(step), step, reference=node.run / f"{step}.ckpt").wait()
    node.lose()
    names = {each.step: each.manifest for each in node.state().versions}
    folder = Path(node.mirror.removeprefix("file://")) / "net" / "manifests"
    damaged = folder / names[2]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with caplog.at_level(logging.ERROR, "portus"), node.start() as run:
        assert run.steps() == [1, 3]
        assert same(portus.load_reference(node.run / "1.ckpt"), state(1))
        assert not (node.run / "2.ckpt").exists()
    assert "step 2 cannot be fetched from the mirror" in caplog.text
    node.lose()
    damaged = folder / names[3]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptionError, match="manifests"):
        node.start()


def test_whoever_fails_while_he_fetches_goes_on_with_that(node: Node, before: Before) -> None:
    with node.start() as run:
        run.save(state(1), 1, reference=node.run / "best.ckpt").wait()
        for step in (2, 3):
            run.save(state(step), step).wait()
    node.lose()
    count = 0

    def die(call: str, name: str) -> None:
        nonlocal count
        if call == "get" and "manifests/" in name:
            count += 1
            if count == 2:
                raise TransportError("died")

    before.append(die)
    with pytest.raises(TransportError, match="died"):
        node.start()
    assert node.pool_steps() == [1]
    with node.start() as run:
        assert same(run.load(), state(3))
        assert same(portus.load_reference(node.run / "best.ckpt"), state(1))


def said_by(url: str) -> State:
    """What the log of the mirror there says."""
    with contextlib.closing(open_store(parse(url))) as store:
        return Mirror(store, "net").read()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallBucket]:
    """A bucket, to which the environment leads."""
    monkeypatch.setattr("portus.mirror.behind._PAUSE_MIN_S", 0.01)
    with SmallBucket() as bucket:
        bucket.lead(monkeypatch)
        yield bucket


REFUSED = (
    r"s3://bucket/runs: nothing can be mirrored there: it may be read, not written: "
    r"s3://bucket/runs: cannot create net/log/.*: permission is denied \(403 AccessDenied\), at "
    r"127.0.0.1.*; grant the right to s3:PutObject on bucket. Expected a mirror that this process "
    r"may write to: give it that right, name another mirror, or say mirror='none'"
)


def test_a_bucket_that_may_be_read_and_not_written_is_an_error_at_once(
    node: Node, small: SmallBucket
) -> None:
    small.is_read_only = True
    with pytest.raises(UsageError, match=REFUSED):
        node.start(mirror="s3://bucket/runs")
    assert list(node.run.iterdir()) == [], "and no pool was made"
    with node.start(mirror="none") as run:
        run.save(state(1), 1).wait()
    with pytest.raises(UsageError, match=REFUSED):
        node.start(mirror="s3://bucket/runs")
    assert small.objects == {}
    small.is_read_only = False
    with node.start(mirror="s3://bucket/runs") as run:
        assert run.steps() == [1], "nothing holds the pool"
    small.is_read_only = True
    assert same(portus.load("s3://bucket/runs/net"), state(1)), "who only loads writes nothing"
    node.lose()
    with pytest.raises(UsageError, match=REFUSED):
        node.start(mirror="s3://bucket/runs")


def test_if_the_right_to_write_is_withdrawn_training_goes_on_and_the_log_names_that(
    node: Node, small: SmallBucket, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "portus"),
        node.start(mirror="s3://bucket/runs") as run,
    ):
        mirroring = run._pool.mirroring
        assert mirroring is not None
        run.save(state(1), 1).wait()
        until(lambda: not mirroring.unmirrored())
        small.is_read_only = True
        for step in (2, 3):
            run.save(state(step), step).wait()
        until(lambda: bool(mirroring.failure))
        assert "it may be read, not written" in mirroring.failure
        small.is_read_only = False
        until(lambda: not mirroring.unmirrored() and not mirroring.failure)
    told = [each.message for each in caplog.records if "is behind; retrying: " in each.message]
    assert told
    for each in told:
        assert "it may be read, not written: s3://bucket/runs: cannot put net/" in each
        assert "grant the right to s3:PutObject on bucket" in each
    found = portus.load("s3://bucket/runs/net")
    assert same(found, state(3))


def test_the_claim_of_a_start_is_its_only_write_also_where_there_is_nothing_yet(
    node: Node, small: SmallBucket
) -> None:
    with node.start(mirror="s3://bucket/runs") as run:
        assert (small.count("LIST"), small.count("PUT")) == (1, 1)
        assert not run._pool.home.exists()
        run.save(state(1), 1).wait()
        mirroring = run._pool.mirroring
        assert mirroring is not None
        until(lambda: not mirroring.unmirrored())
        assert (small.count("LIST"), small.count("PUT")) == (1, 1 + 3)
        uuid = run.uuid
    assert [each.pool for each in said_by("s3://bucket/runs").terms] == [uuid]
    node.lose()
    with node.start(mirror="s3://bucket/runs") as run:
        assert same(run.load(), state(1))


def test_who_began_before_a_run_went_on_elsewhere_claims_anew(
    node: Node, small: SmallBucket, tmp_path: Path
) -> None:
    """Between the start of a run and its first save another machine saved the same run."""
    with node.start(mirror="s3://bucket/runs") as run:
        with PoolCheckpointer(tmp_path / "other", "net", mirror="s3://bucket/runs") as other:
            other.save(state(7), 7).wait()
        shutil.rmtree(tmp_path / "other")
        run.save(state(8), 8).wait()
        assert run.steps() == [7, 8]
    found = said_by("s3://bucket/runs")
    assert [each.step for each in found.versions] == [7, 8]
    assert found.term == 3
