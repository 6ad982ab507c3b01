"""Sharded jobs with a mirror: all ranks copy the same group, and a job on empty disks goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import portus.dcp
from portus.client.files import run_mirror
from portus.client.job.exchange import Progress
from portus.client.shards import mirrored_groups, part_mirror
from portus.client.shards.beginning import beginning, put_back
from portus.client.shards.grouped import has_writer
from portus.client.shards.mirrored_groups import GroupMirror, MirroredRun
from portus.dcp import GroupReader, GroupWriter, groups
from portus.errors import CorruptionError, TransportError, UsageError
from portus.index.groups import ID_SIZE, part_model, part_token
from portus.index.keep import Keep
from portus.index.place import Place
from portus.mirror import copier
from portus.mirror.address import StoreAddress, parse
from portus.mirror.mirror import Mirror
from portus.mirror.objects import Added
from portus.mirror.opening import open_store
from portus.mirror.store import Store
from portus.testing.nursery import nursery
from portus.testing.stores import CountingStore
from tests.unit.client.bucket import SmallBucket
from tests.unit.client.stuck import is_in, until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized"),
]


def job(root: Path, *tasks: str) -> list[str]:
    """Jobs one after another; what they said."""
    with (
        tempfile.NamedTemporaryFile() as errors,
        nursery("tests.unit.client.sharded").start(
            "tests.crash.mirrored_shards:run", str(root), tasks, {}, errors.name
        ) as child,
    ):
        lines = child.rest()
        assert child.wait() == 0, errors.read().decode(errors="replace")
    return lines


def said(lines: list[str], what: str) -> dict[int, str]:
    """The digests by step, of what was saved or loaded."""
    words = [line.split() for line in lines]
    return {int(step): digest for word, step, digest in words if word == what}


def mirrored(root: Path) -> MirroredRun:
    return GroupMirror(parse(f"file://{root}/bucket"), "run").look()


@pytest.mark.long
def test_a_job_on_empty_disks_goes_on_bit_for_bit_at_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    saved = said(job(tmp_path, "mirrored:4:1:3"), "saved")
    assert [(each.step, each.is_complete) for each in mirrored(tmp_path).groups][-1] == (3, True)
    shutil.rmtree(tmp_path / "run")
    lines = job(tmp_path, "mirrored:2:4:1")
    assert said(lines, "loaded") == {3: saved[3]}
    there = mirrored(tmp_path).complete[-1]
    assert (there.step, there.count) == (4, 2)
    assert [(g.step, g.count) for g in groups(tmp_path / "run" / "pools")] == [(3, 4), (4, 2)]


@pytest.mark.long
def test_with_one_rank_at_a_quarter_of_the_speed_groups_complete_and_in_the_end_all_is_there(
    tmp_path: Path,
) -> None:
    job(tmp_path, "mirrored:4:1:12:3")
    held = groups(tmp_path / "run" / "pools", "run")
    there = mirrored(tmp_path).groups
    assert all(each.is_complete for each in there)
    assert [each.id for each in there] == [each.id for each in held]


@pytest.mark.long
def test_who_only_loads_reads_the_mirror_at_any_number_of_ranks(tmp_path: Path) -> None:
    saved = said(job(tmp_path, "mirrored:4:1:2"), "saved")
    shutil.rmtree(tmp_path / "run")
    lines = job(tmp_path, *(f"look_there:{count}" for count in (1, 2, 3, 4, 8)))
    assert [line for line in lines if line.startswith("loaded")] == [f"loaded 2 {saved[2]}"] * 5


@pytest.mark.long
def test_a_group_over_disks_of_each_node_outlives_a_node(tmp_path: Path) -> None:
    saved = said(job(tmp_path, "mirrored:4:1:3:-1:2"), "saved")
    shutil.rmtree(tmp_path / "run" / "node-1")
    lines = job(tmp_path, "mirrored:4:4:2:-1:2")
    assert said(lines, "loaded") == {3: saved[3]}
    assert mirrored(tmp_path).complete[-1].step == 5


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((50_000,), value), "frozen": torch.arange(50_000)}


def save(root: Path, *steps: int, keep: int = 2) -> None:
    """In this process alone, which is all ranks."""
    mirror = f"file://{root}/bucket"
    with contextlib.closing(
        GroupWriter(root / "run" / "pools", "run", mirror=mirror, keep=keep)
    ) as writer:
        writer.prepare(1)
        for step in steps:
            writer.save(state(float(step)), step=step).wait()


def load(root: Path) -> tuple[int, float]:
    target = state(0.0)
    reader = GroupReader(root / "run" / "pools", "run", mirror=f"file://{root}/bucket")
    found = portus.dcp.load(target, reader)
    assert torch.equal(target["frozen"], torch.arange(50_000))
    return found.step, float(target["w"][-1])


def start(root: Path, **more: Any) -> GroupWriter:
    """The job of this process alone, before its first save."""
    more = {"mirror": f"file://{root}/bucket", "mirror_wait": 60, **more}
    writer = GroupWriter(root / "run" / "pools", "run", **more)
    writer.prepare(1)
    return writer


Before = Callable[[str, str], None]


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> list[Before]:
    """What is called before each request of any mirror: the last one."""
    gates: list[Before] = [lambda call, name: None]

    def gated(address: StoreAddress) -> Any:
        return Gate(open_store(address), lambda *asked: gates[-1](*asked))

    for each in (run_mirror, mirrored_groups):
        monkeypatch.setattr(each, "open_store", gated)
    monkeypatch.setattr("portus.mirror.behind._PAUSE_MIN_S", 0.01)
    return gates


def test_a_policy_says_which_groups_stay_in_the_mirror_also_those_of_a_lost_machine(
    tmp_path: Path,
) -> None:
    keep = Keep(last=1, every=3, best=("loss", "min", 1))
    losses = (9.0, 1.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0)

    def saved(steps: range) -> list[int]:
        with contextlib.closing(start(tmp_path, keep=keep)) as writer:
            for step in steps:
                metrics = {"loss": losses[step - 1]}
                writer.save(state(float(step)), step=step, metrics=metrics).wait()
        return [each.step for each in mirrored(tmp_path).complete]

    assert saved(range(1, 6)) == [2, 3, 4, 5], "best, every third, and what was last before 5 was"
    shutil.rmtree(tmp_path / "run")
    assert saved(range(6, 9)) == [2, 3, 5, 6, 7, 8], "4 is none of these; the pools have no 2 and 3"
    assert [each.step for each in groups(tmp_path / "run" / "pools")] == [5, 6, 7, 8]


def test_a_job_that_ends_while_its_last_groups_wait_leaves_no_older_ones_in_the_mirror(
    tmp_path: Path, before: list[Before], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, is_idle = threading.Event(), threading.Event()
    collect = part_mirror.PartMirroring._collect

    def held_up(call: str, name: str) -> None:
        if call == "put":
            assert may_go_on.wait(60)

    def ended(self: Any, joined: Any) -> None:
        if self.unmirrored():
            is_idle.set()  # nothing to copy now, while some wait
            until(lambda: self._closing)
        collect(self, joined)

    monkeypatch.setattr(part_mirror.PartMirroring, "_collect", ended)
    before.append(held_up)
    writer = start(tmp_path)
    for step in (1, 2, 3, 4, 5):
        writer.save(state(float(step)), step=step).wait()
    may_go_on.set()
    assert is_idle.wait(60)
    writer.close()
    held = [each.step for each in groups(tmp_path / "run" / "pools")]
    assert held[-2:] == [4, 5]
    assert 1 not in held
    assert [each.step for each in mirrored(tmp_path).groups] == held


def test_groups_that_are_not_complete_in_the_mirror_take_the_place_of_none_that_is(
    tmp_path: Path, before: list[Before]
) -> None:
    """Ranks hear of complete groups together, and of others at different times: only if those do
    not count, all let go of the same."""

    def steps() -> list[int]:
        return [each.step for each in mirrored(tmp_path).groups]

    def away(call: str, name: str) -> None:
        if call == "put":
            raise TransportError("the store does not answer")

    with contextlib.closing(start(tmp_path, keep=2)) as writer:
        mirroring = writer._mirroring
        assert mirroring is not None
        for step in (1, 2):
            writer.save(state(float(step)), step=step).wait()
            until(lambda: mirroring.progress(under_way=True) is Progress.MIRRORED)
        before.append(away)
        for step in (3, 4):
            writer.save(state(float(step)), step=step).wait()
        before.pop()
        until(lambda: 3 in steps())
        assert steps() == [1, 2, 3], "3 and 4 are the last two, and nobody knows of them"
    assert steps() == [each.step for each in groups(tmp_path / "run" / "pools")] == [2, 3, 4]


def test_who_may_not_list_is_told_at_once_and_later_training_goes_on(
    tmp_path: Path,
    before: list[Before],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def denied(call: str, name: str) -> None:
        if call == "list":
            raise UsageError("cannot list log/: permission is denied")

    before.append(denied)
    for _ in range(2):
        with pytest.raises(UsageError, match="cannot list log/: permission is denied"):
            start(tmp_path)
        save_without_mirror(tmp_path)  # with pools of its own it is an error all the same
    before.pop()
    monkeypatch.setattr(copier, "_COLLECT_S", 0.0)  # what else is listed, is listed once a day
    with caplog.at_level(logging.WARNING, "portus"), contextlib.closing(start(tmp_path)) as writer:
        until(lambda: bool(GroupMirror(parse(f"file://{tmp_path}/bucket"), "run").look().states))
        before.append(denied)
        for step in (2, 3, 4):
            writer.save(state(float(step)), step=step).wait()
        until(lambda: "permission is denied" in caplog.text)
    assert [each.message for each in caplog.records if "permission is denied" in each.message] == [
        f"portus: objects that file://{tmp_path}/bucket no longer needs are not deleted, and take "
        "space there; saves and copies continue: cannot list log/: permission is denied"
    ]
    before.pop()
    assert mirrored(tmp_path).complete[-1].step == 4


def test_who_interrupts_the_wait_at_the_end_leaves_no_lock_and_no_half_of_an_object(
    tmp_path: Path, before: list[Before], caplog: pytest.LogCaptureFixture
) -> None:
    closing = threading.Event()
    tries: list[str] = []

    def away(call: str, name: str) -> None:
        if call == "put":
            tries.extend([name] * closing.is_set())
            if len(tries) == 2:
                until(lambda: is_in(threading.main_thread(), "_wait_for"))
                os.kill(os.getpid(), signal.SIGINT)
            raise TransportError("the store does not answer")

    before.append(away)
    writer = start(tmp_path)
    writer.save(state(1.0), step=1).wait()
    closing.set()
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    began = time.monotonic()
    with caplog.at_level(logging.ERROR, "portus"):
        writer.close()
    assert time.monotonic() - began < 30, "mirror_wait is 60"
    assert "1 versions of model 'run/rank-0-of-1' are not in" in caplog.text
    assert not any(each.name.startswith("portus-mirror") for each in threading.enumerate())
    [pool] = (tmp_path / "run" / "pools").glob("*.portus")
    assert not has_writer(Place.named(pool))
    assert os.listdir(tmp_path / "bucket" / ".partial") == []
    before.pop()
    start(tmp_path).close()
    assert [each.step for each in mirrored(tmp_path).complete] == [1]


def test_a_directory_that_nobody_can_write_to_is_an_error_at_once_for_who_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"nothing can be mirrored there: .* Not a directory"):
        start(tmp_path, mirror=f"file://{tmp_path}/file/runs")
    assert not list((tmp_path / "run").rglob("*.portus"))
    save(tmp_path, 1)
    reader = GroupReader(tmp_path / "run" / "pools", "run", mirror=f"file://{tmp_path}/file/runs")
    assert portus.dcp.load(state(0.0), reader).step == 1, "who only loads writes nothing"


def test_a_damaged_part_is_taken_from_the_mirror_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)
    [path] = (tmp_path / "run" / "pools").glob("*.portus")
    data = path.read_bytes()
    at = data.rindex(torch.full((64,), 2.0).numpy().tobytes())
    path.write_bytes(data[:at] + b"damage" + data[at + 6 :])
    with caplog.at_level(logging.ERROR, "portus"):
        assert load(tmp_path) == (2, 2.0)
    assert "TAKEN FROM file://" in caplog.text


def test_a_damaged_object_is_never_handed_out(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)
    shutil.rmtree(tmp_path / "run")
    packs = [each for each in (tmp_path / "bucket").rglob("packs/*") if each.is_file()]
    for pack in packs:
        data = pack.read_bytes()
        pack.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptionError):
            load(tmp_path)
        with pytest.raises(CorruptionError):
            save(tmp_path, 2)
        pack.write_bytes(data)
    assert load(tmp_path) == (1, 1.0)
    assert packs


def test_pools_that_were_left_behind_are_named_and_not_gone_on_from(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    shutil.rmtree(tmp_path / "run")
    save(tmp_path, 2, 3, 4)
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "old", tmp_path / "run")
    with pytest.raises(UsageError, match=r"went on elsewhere.* step 4 of 1 ranks, of other pools"):
        save(tmp_path, 5, keep=9)


def test_each_object_of_a_group_is_fetched_once_whatever_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    counts = []
    for count in (1, 2, 4):
        shutil.rmtree(tmp_path / "run")
        place = Place.named(tmp_path / "run" / "pools")
        mirror = GroupMirror(parse(f"file://{tmp_path}/bucket"), "run")
        got: list[str] = []

        def opened(address: StoreAddress, got: list[str] = got) -> Any:
            return Counting(open_store(address), got)

        monkeypatch.setattr(mirrored_groups, "open_store", opened)
        begun = beginning(mirror, place)
        del got[:]
        for rank in range(count):
            put_back(mirror, place, begun, rank, count)
        counts.append(sorted(got))
    assert counts[0] == counts[1] == counts[2] != []


def test_a_start_lists_each_part_once_and_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CountingStore(open_store(parse(f"file://{tmp_path}/bucket")))
    monkeypatch.setattr(
        store, "close", lambda: None
    )  # each call opens one: they are counted in one
    monkeypatch.setattr(mirrored_groups, "open_store", lambda address: store)
    monkeypatch.setattr(run_mirror, "open_store", lambda address: store)
    for turn in range(2):
        save(tmp_path, turn)
        assert store.lists == 2
        store.reset()
    shutil.rmtree(tmp_path / "run")
    save(tmp_path, 2)
    assert store.lists == 2, "an empty disk"
    group = os.urandom(ID_SIZE)
    for rank in range(4):
        mirror = Mirror(store, part_model("run", rank, 4))
        mirror.claim("a test", bytes(16), 0)
        mirror.note([Added(part_token(group, rank), 3, 1, 1, time.time_ns(), 0, False, "none")])
    store.reset()
    begun = beginning(
        GroupMirror(parse(f"file://{tmp_path}/bucket"), "run"),
        Place.named(tmp_path / "elsewhere" / "pools"),
    )
    assert begun.wanted == ((group, 4, 3),)
    for rank in range(4):
        Mirror(store, part_model("run", rank, 4), newest=begun.newest[rank, 4]).read()
    assert store.lists == 1 + 4 + 1, "a part of one rank, four of four, and the end"


def save_without_mirror(root: Path) -> None:
    with contextlib.closing(start(root, mirror="none")) as writer:
        writer.save(state(1.0), step=1).wait()


class Gate:
    """Passes all on to a store; ``before`` is called before each request, and may raise."""

    def __init__(self, store: Store, before: Before) -> None:
        self._store = store
        self._before = before

    def __getattr__(self, call: str) -> Any:
        def asked(*arguments: Any) -> Any:
            self._before(call, str(arguments[0]) if arguments else "")
            return getattr(self._store, call)(*arguments)

        return asked


class Counting:
    """A store that notes what is read of it."""

    def __init__(self, store: Store, got: list[str]) -> None:
        self._store, self._got = store, got

    def __getattr__(self, call: str) -> Any:
        def asked(name: str = "", *more: Any) -> Any:
            self._got.extend([f"{call} {name}"] if call.startswith("get") else [])
            return getattr(self._store, call)(*([name] if name or more else []), *more)

        return asked

    def list(self, prefix: str, after: str = "") -> Any:
        return self._store.list(prefix, after)


@pytest.mark.long
def test_a_bucket_that_may_be_read_and_not_written_is_an_error_at_once_and_no_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("portus.mirror.behind._PAUSE_MIN_S", 0.01)
    with SmallBucket() as small:
        mirror = small.lead(monkeypatch)
        small.is_read_only = True
        for _ in range(2):
            with pytest.raises(
                UsageError, match=r"nothing can be mirrored there: it may be read, not written: .*"
            ):
                start(tmp_path, mirror=mirror)
            save_without_mirror(tmp_path)  # with pools of its own it is an error all the same
        assert small.objects == {}
        small.is_read_only = False
        with (
            caplog.at_level(logging.WARNING, "portus"),
            contextlib.closing(start(tmp_path, mirror=mirror, mirror_wait=3)) as writer,
        ):
            writer.save(state(2.0), step=2).wait()
            until(lambda: bool(GroupMirror(parse(mirror), "run").look().groups))
            small.is_read_only = True
            writer.close()  # as where ranks change; what is opened again is no start
            writer.save(state(3.0), step=3).wait()
            until(lambda: "retrying: it may be read, not written: " in caplog.text)
            small.is_read_only = False
        assert GroupMirror(parse(mirror), "run").look().complete[-1].step == 3
