"""What a job of another number of ranks left in the mirror goes, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import portus.dcp
from portus.client.shards import mirrored_groups
from portus.client.shards.beginning import beginning
from portus.client.shards.mirrored_groups import GroupMirror, MirroredRun
from portus.client.shards.mirrored_leftovers import MirroredLeftovers
from portus.client.shards.part_mirror import PartMirroring
from portus.dcp import GroupReader, GroupWriter
from portus.errors import TransportError
from portus.index.groups import part_model
from portus.index.keep import Keep
from portus.index.place import Place
from portus.mirror import copier
from portus.mirror.address import parse
from portus.mirror.objects import prefix_of
from portus.mirror.opening import open_store
from portus.testing.nursery import nursery
from portus.transport.base import Stop
from tests.unit.client.stuck import until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized"),
]
RANKS = 2


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left: groups of steps 1 and 2, the second with a checkpoint directory."""
    root = tmp_path_factory.mktemp("left")
    with (
        tempfile.NamedTemporaryFile() as errors,
        nursery("tests.unit.client.sharded").start(
            "tests.crash.mirrored_shards:run",
            str(root),
            (f"mirrored:{RANKS}:1:2",),
            {},
            errors.name,
        ) as child,
    ):
        child.rest()
        assert child.wait() == 0, errors.read().decode(errors="replace")
    return root


@pytest.fixture
def root(left: Path, tmp_path: Path) -> Path:
    return shutil.copytree(left, tmp_path / "job")


def mirror(root: Path) -> GroupMirror:
    return GroupMirror(parse(f"file://{root}/bucket"), "run")


def there(root: Path) -> MirroredRun:
    return mirror(root).look()


def groups(root: Path) -> list[tuple[int, int]]:
    return [(each.step, each.count) for each in there(root).complete]


def objects(root: Path, count: int = RANKS) -> list[str]:
    """Of the parts of ``count`` ranks, but their logs."""
    found = []
    for rank in range(count):
        part = root / "bucket" / prefix_of(part_model("run", rank, count))
        found += [path.name for path in part.rglob("*") if path.is_file()]
    return [name for name in found if not name.isdecimal()]


def aged(root: Path, days: float) -> None:
    """All that is in the mirror was put there so long ago."""
    for path in (root / "bucket").rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - days * 86400
            os.utime(path, (then, then))


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((50_000,), value)}


@contextlib.contextmanager
def alone(root: Path, keep: int) -> Iterator[GroupWriter]:
    """A job of one rank goes on."""
    with contextlib.closing(
        GroupWriter(root / "run" / "pools", "run", mirror=f"file://{root}/bucket", keep=keep)
    ) as writer:
        writer.prepare(1)
        yield writer


def save(root: Path, *steps: int, keep: int = 1) -> None:
    with alone(root, keep) as writer:
        saved_by(writer, *steps)


def saved_by(writer: GroupWriter, *steps: int) -> None:
    for step in steps:
        writer.save(state(float(step)), step=step).wait()
        mirroring = writer._mirroring
        assert mirroring is not None
        until(lambda: not mirroring.unmirrored())  # noqa: B023


def let_go(root: Path, newer: int, keep: int = 1) -> None:
    """What the first rank of a job of one rank does once a day."""
    place = Place.named(root / "run" / "pools")
    begun = beginning(mirror(root), place)
    MirroredLeftovers(mirror(root), place, 1, Keep(last=keep), begun).let_go(newer, Stop())


@pytest.mark.long
def test_a_run_lets_go_of_what_other_numbers_of_ranks_left_a_day_after_its_own_are_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "_COLLECT_S", 0.0)
    collected, delete = threading.Event(), PartMirroring._delete

    def noted(self: PartMirroring, stop: Stop) -> None:
        delete(self, stop)
        collected.set()

    def saved(*steps: int) -> None:
        """And what may go went: the end of a run does not wait for that."""
        with alone(root, 1) as writer:
            saved_by(writer, *steps)
            collected.clear()
            assert writer._mirroring is not None
            writer._mirroring.wake()
            assert collected.wait(30)

    monkeypatch.setattr(PartMirroring, "_delete", noted)
    saved(3, 4, 5)
    assert groups(root)[-1] == (5, 1)
    assert all(count == 1 for _, count in groups(root)), "the log says so"
    assert objects(root), "and who began to load yesterday finds them"
    aged(root, 1.1)
    saved(6, 7, 8)
    assert objects(root) == []
    target = state(0.0)
    reader = GroupReader(root / "none", "run", mirror=f"file://{root}/bucket")
    assert portus.dcp.load(target, reader).step == 8
    assert torch.equal(target["w"], state(8.0)["w"])


def test_what_is_kept_stays_and_so_does_what_a_pool_has(root: Path) -> None:
    before = groups(root)
    assert before == [(1, RANKS), (2, RANKS)]
    shutil.copytree(root / "run", root / "put away")
    save(root, 3, 4, keep=1)
    for newer, keep in ((0, 1), (1, 2), (2, 3)):
        let_go(root, newer, keep)
        assert groups(root)[:2] == before, "too few groups came after it"
    shutil.rmtree(root / "run")
    shutil.copytree(root / "put away", root / "run")
    let_go(root, 9)
    assert groups(root)[:2] == before, "pools have it"
    shutil.rmtree(root / "run")
    let_go(root, 9)
    assert [each for each in groups(root) if each[1] == RANKS] == []
    assert groups(root)[-1] == (4, 1)


class Dying:
    """A store whose process dies before request ``at``."""

    def __init__(self, root: Path, at: int) -> None:
        self._store = open_store(parse(f"file://{root}/bucket"))
        self._left = at

    @property
    def is_dead(self) -> bool:
        return self._left < 0

    def __getattr__(self, call: str) -> Any:
        def asked(*args: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise TransportError("it died")
            return getattr(self._store, call)(*args)

        return getattr(self._store, call) if call == "close" else asked


@pytest.mark.long
def test_who_collects_may_die_before_any_request_and_the_next_one_does_the_rest(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, 3, 4)
    shutil.rmtree(root / "run")
    let_go(root, 2)
    aged(root, 1.1)  # some requests only remove, and most delete
    for at in range(1000):
        turn = shutil.copytree(root, tmp_path / f"turn {at}", symlinks=True)
        aged(turn, 1.1)
        place = Place.named(turn / "run" / "pools")
        begun = beginning(mirror(turn), place)
        store = Dying(turn, at)
        with monkeypatch.context() as patched, contextlib.suppress(TransportError):
            patched.setattr(mirrored_groups, "open_store", lambda address: store)  # noqa: B023
            MirroredLeftovers(mirror(turn), place, 1, Keep(last=1), begun).let_go(2, Stop())
        assert groups(turn)[-1] == (4, 1)
        let_go(turn, 2)
        assert objects(turn) == []
        assert groups(turn)[-1] == (4, 1)
        shutil.rmtree(turn)
        if not store.is_dead:
            break
    assert at > 15
