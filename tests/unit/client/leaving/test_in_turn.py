"""Many checkpoints become real files where there is room for little more than one of them."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.client.leaving import torch_file
from tests.unit.client.leaving.test_materialize import Run, run

_ = run  # a fixture
SIZE = 2 << 20
COUNT = 10


def saved(run: Run, count: int = COUNT) -> list[str]:
    """References, each of which leads to a version of ``SIZE`` bytes."""
    paths = []
    with portus.PoolCheckpointer(run.pool, keep=1) as made:
        for step in range(count):
            path = run.ckpt / f"{step}.ckpt"
            state = {"w": torch.full((SIZE,), step, dtype=torch.uint8), "step": step}
            made.save(state, step, reference=path, synchronous=True).wait()
            paths.append(str(path))
    return paths


def used(root: Path) -> int:
    """Bytes that the files below ``root`` take on the disk, a hard link once."""
    found = {}
    for above, _, names in os.walk(root):
        for name in names:
            status = os.lstat(os.path.join(above, name))
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


class Disk:
    """A disk with room for so many bytes more than what is there now."""

    def __init__(self, root: Path, room: int) -> None:
        self.root, self.size = root, used(root) + room
        self._usage = shutil.disk_usage(root)
        self.asked = 0

    def usage(self, _: object) -> Any:
        self.asked += 1
        free = self.size - used(self.root)
        assert free >= 0
        return self._usage._replace(free=free)


def steps(paths: list[str]) -> list[int]:
    """What each path leads to, whatever is there; all of it is compared."""
    found = []
    for path in paths:
        state = torch.load(path)
        assert torch.equal(state["w"], torch.full((SIZE,), state["step"], dtype=torch.uint8))
        found.append(state["step"])
    return found


def test_ten_files_become_real_in_the_room_for_one_and_a_half(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = saved(run)
    disk = Disk(run.home, SIZE * 3 // 2)
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    assert portus.materialize_in_turn(paths, within_s=600) == []
    assert disk.asked > COUNT  # it was in need of room
    assert used(run.home) <= disk.size
    assert not any(map(portus.is_reference, paths))
    assert steps(paths) == list(range(COUNT))


@pytest.mark.parametrize("room", [0, SIZE // 2])
def test_without_room_for_one_all_stay_and_are_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    paths = saved(run)
    disk = Disk(run.home, room)
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    left = portus.materialize_in_turn(paths, within_s=600)
    assert [each.path for each in left] == paths
    assert all(each.size >= SIZE and "bytes needed" in each.reason for each in left)  # type: ignore[operator]
    assert str(left[0]).startswith(f"portus materialize {paths[0]}  # {left[0].size} bytes; ")
    assert steps(paths) == list(range(COUNT))


def test_what_is_left_when_the_time_is_over_stays_and_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = saved(run)
    now = [0.0]

    def written(*arguments: Any, **named: Any) -> None:
        stock(*arguments, **named)
        now[0] += 4

    stock = torch_file.write
    monkeypatch.setattr("portus.client.leaving.in_turn.time.monotonic", lambda: now[0])
    monkeypatch.setattr(torch_file, "write", written)
    left = portus.materialize_in_turn(paths, within_s=10)
    assert [each.path for each in left] == paths[3:]
    assert all("not done within 10 s" in each.reason for each in left)


def killed_before(count: int, root: Path, act: Callable[[], object]) -> bool:
    """``act`` in a forked child, which is killed before its ``count``-th change of a name below
    ``root``, or first opening for writing there. False if it came to its end."""
    child = os.fork()
    if child == 0:
        left = [count]

        def watch(event: str, arguments: Any) -> None:
            if event not in ("os.rename", "os.remove", "open"):
                return
            if not str(arguments[0]).startswith(str(root)):
                return
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(watch)
            act()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.long
def test_killed_at_each_step_it_loses_nothing_and_the_next_one_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = saved(run, 4)
    disk = Disk(run.home, SIZE * 3 // 2)
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    kills = 0

    def act() -> None:
        assert portus.materialize_in_turn(paths, within_s=600) == []

    while killed_before(kills + 1, run.home, act):
        kills += 1
        assert steps(paths) == list(range(4))
        assert used(run.home) <= disk.size
    assert kills > 4
    assert not any(map(portus.is_reference, paths))
    assert sorted(os.listdir(run.ckpt)) == sorted(map(os.path.basename, paths))
