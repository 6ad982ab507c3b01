"""Memory that other processes may have too, and write at any moment."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import portus
from portus.engine.fence.snapshot import copy_order
from portus.engine.media import linux, write_watch
from portus.engine.pipeline.run import Save
from portus.reach.index.check import check
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.hosts import serving, url
from tests.moments import at
from tests.unit.cli.scene import portus as command
from tests.unit.cli.scene import portus_json

ACTOR = """
import numpy as np, sys
memory = np.memmap(sys.argv[1], np.uint64, "r+")
print("begun", flush=True)
while True:
    memory += 1
"""


@pytest.fixture(params=["file", "host"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where it is saved to."""
    if request.param == "file":
        yield str(tmp_path / "run.portus")
        return
    with serving(tmp_path / "pools") as server:
        yield url(server)


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[torch.Tensor]:
    """A replay buffer, which an actor process writes all the time."""
    path = tmp_path / "replay"
    shared = torch.from_file(str(path), shared=True, size=1 << 19, dtype=torch.int64).zero_()
    arguments = [sys.executable, "-c", ACTOR, str(path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as actor:
        assert actor.stdout is not None
        actor.stdout.readline()
        yield shared
        actor.kill()


def save_while_others_write(
    run: PoolCheckpointer, shared: torch.Tensor, step: int
) -> portus.VersionInfo:
    """A save of ``shared``, which is written once it was copied. What is committed."""
    copied = shared.add_(1).clone()
    with at("return", Save._copy_from_here, lambda: shared.add_(1)):
        handle = run.save({"shared": shared}, step)
    info = handle.wait()
    assert handle.stats.inexact_bytes == shared.nbytes
    loaded = run.load(step)
    assert isinstance(loaded, dict)
    assert torch.equal(loaded["shared"], copied)
    return info


@pytest.mark.long
def test_every_version_of_what_another_process_writes_all_the_time_loads(
    place: str, replay: torch.Tensor, tmp_path: Path
) -> None:
    wrote = replay.clone()
    with PoolCheckpointer(place) as run:
        for step in range(20):
            run.save({"replay": replay}, step).wait()
            assert run.load(step) is not None
    until_s = time.monotonic() + 60
    while torch.equal(wrote, replay):
        assert time.monotonic() < until_s, "nobody wrote"


def test_the_mark_of_an_inexact_version_stays_and_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = tmp_path / "run.portus"
    shared = torch.zeros(5000).share_memory_()
    for first in (1, 11):  # another process finds the mark, and writes the index anew
        with PoolCheckpointer(pool, keep=None) as run:
            assert save_while_others_write(run, shared, first).inexact
            assert save_while_others_write(run, shared, first + 1).inexact
            assert not run.save({"shared": shared}, first + 2).wait().inexact
    marks = {1: True, 2: True, 3: False, 11: True, 12: True, 13: False}
    with portus.open(pool) as view:
        assert {info.step: info.inexact for info in view.versions()} == marks
    assert check(pool) == []
    said = [each for each in caplog.records if "another process wrote" in each.message]
    assert len(said) == 2, "once in each run"
    assert "shared" in said[0].message
    shown = portus_json("show", "default", "--pool", pool)["versions"]
    assert {each["step"]: each["inexact"] for each in shown} == marks
    assert ", inexact" in command("show", "default", "--pool", pool).out
    assert "another process wrote" in command("show", "default@12", "--pool", pool).out
    assert "another process wrote" not in command("show", "default@13", "--pool", pool).out


def test_a_storage_host_keeps_the_mark(tmp_path: Path) -> None:
    shared = torch.zeros(5000).share_memory_()
    with (
        serving(tmp_path / "pools") as server,
        PoolCheckpointer(url(server), keep=None) as run,
    ):
        assert save_while_others_write(run, shared, 1).inexact
        assert not run.save({"shared": shared}, 2).wait().inexact
        assert [info.inexact for info in run.versions()] == [True, False]


def of_python(size: int) -> torch.Tensor:
    """Shared memory that torch knows nothing of."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32)


def of_torch(size: int) -> torch.Tensor:
    memory = torch.zeros(size // 4)
    memory.share_memory_()
    return memory


def of_nobody_else(size: int) -> torch.Tensor:
    return torch.zeros(size // 4)


@pytest.fixture(params=["call", "text"])
def told_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the kernel says what is shared; one that is older refuses the call."""
    if request.param == "text":
        monkeypatch.setattr(linux, "_PROCMAP_QUERY", 0)


def test_a_call_and_text_tell_the_same_of_memory_that_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = [
        mmap.mmap(-1, mmap.PAGESIZE, flags=kind)
        for kind in [mmap.MAP_SHARED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS] * 50
    ]
    address = np.array([np.frombuffer(each, np.uint8).ctypes.data for each in apart])
    some = sorted(address)[10:90]
    with open("/proc/self/maps", "rb") as maps:
        try:
            called = linux.shared_mappings(maps.fileno(), 0, 1 << 63)
            of_some = linux.shared_mappings(maps.fileno(), int(some[0]) + 5, int(some[-1]) + 5)
        except OSError as error:
            pytest.skip(f"the kernel has no such call: {error}")
    expected = [True, False] * 50
    assert write_watch.exposure(address, np.full(100, 10)).tolist() == expected
    monkeypatch.setattr(linux, "_PROCMAP_QUERY", 0)
    assert called == write_watch._shared_runs(0, 1 << 63)
    assert of_some == write_watch._shared_runs(int(some[0]) + 5, int(some[-1]) + 5)
    assert 0 < len(of_some) < len(called)
    assert write_watch.exposure(address, np.full(100, 10)).tolist() == expected


@pytest.mark.long(every_case=True)
@pytest.mark.usefixtures("told_by")
@pytest.mark.parametrize("kind", [of_python, of_torch, of_nobody_else])
def test_shared_memory_of_ones_own_optimizer_is_copied_before_save_returns(
    kind: Callable[[int], torch.Tensor], tmp_path: Path
) -> None:
    with PoolCheckpointer(tmp_path / "run.portus"):  # it sees the steps
        weight = torch.nn.Parameter(kind(8 << 20))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        taken = copy_order([weight.untyped_storage()], (), {}, frozenset())
        assert taken.late.tolist() == [kind is of_nobody_else]
        assert taken.exposed.tolist() == ([] if kind is of_nobody_else else [0])
        assert bool(taken.guarded) is (kind is of_nobody_else)
