"""A pool file that accepts no more writes has a successor, in which a run goes on."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import portus
from portus.client.loading.resolve import KnownPools, _open_view
from portus.errors import CorruptionError, MediumError, UsageError
from portus.format.layout import DATA_START
from portus.index.directory import generations, on_disk
from portus.index.place import Place
from tests.crash.test_rot import blanked, emptied, halved, replaced
from tests.unit.cli.scene import portus as command
from tests.unit.cli.scene import portus_json
from tests.unit.client.stuck import Gate, gated


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return tmp_path / "pools" / "run.portus"


@pytest.fixture
def gate(pool: Path) -> Iterator[Gate]:
    gate = gated(pool)
    yield gate
    gate.broken = False


def state(value: int) -> dict[str, object]:
    return {"weight": torch.full((4096,), float(value)), "value": value}


def value_of(loaded: object) -> int:
    assert isinstance(loaded, dict)
    assert bool((loaded["weight"] == float(loaded["value"])).all())
    return int(loaded["value"])


def save(checkpointer: portus.PoolCheckpointer, step: int, path: Path | None = None) -> None:
    checkpointer.save(state(step), step, reference=path).wait()


def fail(checkpointer: portus.PoolCheckpointer, gate: Gate, step: int) -> None:
    gate.broken = True
    with pytest.raises(MediumError, match="accepts no more writes"):
        save(checkpointer, step)


def successor_of(pool: Path) -> Path:
    return pool.with_name("run+2.portus")


def test_saves_go_on_in_a_successor_and_what_was_committed_before_loads(
    pool: Path, gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "1.ckpt", tmp_path / "3.ckpt"
    with portus.PoolCheckpointer(pool, "run", keep=3) as checkpointer:
        save(checkpointer, 1, first)
        fail(checkpointer, gate, 2)
        with caplog.at_level(logging.ERROR, "portus"):
            save(checkpointer, 3, second)
        assert str(successor_of(pool)) in caplog.text
        assert checkpointer.path == str(successor_of(pool))
        assert checkpointer.steps() == [1, 3]
        commits = [info.commit for info in checkpointer.versions()]
        assert commits == sorted(set(commits))
        assert value_of(checkpointer.load()) == 3
        assert value_of(checkpointer.load(1)) == 1
        assert [value_of(torch.load(path)) for path in (first, second)] == [1, 3]
    for path in generations(str(pool)).values():
        assert not portus.check(path)


def test_another_process_finds_the_versions_of_both(pool: Path, gate: Gate, tmp_path: Path) -> None:
    paths = [tmp_path / "1.ckpt", tmp_path / "3.ckpt"]
    with portus.PoolCheckpointer(pool, "run", keep=None) as checkpointer:
        save(checkpointer, 1, paths[0])
        fail(checkpointer, gate, 2)
        save(checkpointer, 3, paths[1])
    with portus.open(pool) as view:
        assert view.steps("run") == [1, 3]
        assert [value_of(view.load("run", step)) for step in (None, 1)] == [3, 1]
    strangers = KnownPools(_open_view)
    strangers.allow(Place.named(pool))  # as $PORTUS_POOL may name it
    assert [value_of(portus.load_reference(path, strangers)) for path in paths] == [1, 3]


def test_a_run_that_starts_again_goes_on_in_the_successor(pool: Path, gate: Gate) -> None:
    with portus.PoolCheckpointer(pool, "run", keep=2) as checkpointer:
        save(checkpointer, 1)
        fail(checkpointer, gate, 2)
        save(checkpointer, 3)
    with portus.PoolCheckpointer(pool, "run", keep=2) as checkpointer:
        assert checkpointer.path == str(successor_of(pool))
        assert checkpointer.steps() == [1, 3]
        assert value_of(checkpointer.load()) == 3
        assert value_of(checkpointer.load(1)) == 1
        save(checkpointer, 4)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]
    assert not pool.exists()
    with portus.PoolCheckpointer(pool, "run", keep=2) as checkpointer:
        assert checkpointer.steps() == [3, 4]


def test_the_old_pool_goes_once_nothing_leads_there(pool: Path, gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    with portus.PoolCheckpointer(pool, "run", keep=1) as checkpointer:
        save(checkpointer, 1, path)
        fail(checkpointer, gate, 2)
        save(checkpointer, 3)
        save(checkpointer, 4)
        checkpointer.wait()
        assert pool.exists()
        assert value_of(torch.load(path)) == 1
        checkpointer.remove(path)
        save(checkpointer, 5)
    assert not pool.exists()
    assert not pool.with_suffix(".references").exists()
    assert sorted(os.listdir(pool.parent)) == ["run+2.portus", "run.journal"]


def test_keep_counts_the_versions_of_both(pool: Path, gate: Gate) -> None:
    with portus.PoolCheckpointer(pool, "run", keep=3) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
        fail(checkpointer, gate, 4)
        for step, expected in ((5, [1, 2, 3, 5]), (6, [1, 2, 3, 5, 6]), (7, [5, 6, 7])):
            save(checkpointer, step)
            checkpointer.wait()
            assert value_of(checkpointer.load()) == step
            assert checkpointer.steps()[-len(expected) :] == expected


@pytest.mark.long
@pytest.mark.parametrize("committed", [False, True])
def test_a_process_killed_around_the_first_commit_to_a_successor_loses_nothing(
    pool: Path, committed: bool
) -> None:
    program = f"""
import os, portus
from pathlib import Path
from tests.crash.test_rot import blanked, emptied, halved, replaced
from tests.unit.client.stuck import gated
from tests.unit.client.test_succession import fail, save
pool = Path({str(pool)!r})
gate = gated(pool)
checkpointer = portus.PoolCheckpointer(pool, "run")
save(checkpointer, 1)
fail(checkpointer, gate, 2)
save(checkpointer, 3) if {committed} else checkpointer.prepare(0)
os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert successor_of(pool).exists()
    with portus.PoolCheckpointer(pool, "run") as checkpointer:
        assert value_of(checkpointer.load()) == (3 if committed else 1)
        save(checkpointer, 4)
        assert checkpointer.path == str(successor_of(pool))
        commits = [info.commit for info in checkpointer.versions()]
        assert commits == sorted(set(commits))
    with portus.PoolCheckpointer(pool, "run") as checkpointer:
        assert value_of(checkpointer.load()) == 4


def test_a_run_has_one_successor(pool: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    with portus.PoolCheckpointer(pool, "run") as checkpointer:
        save(checkpointer, 1)
        fail(checkpointer, gate, 2)
        save(checkpointer, 3)
        successor_of(pool).unlink()
        for step in (4, 5):
            with pytest.raises(MediumError, match="accepts no more writes"):
                save(checkpointer, step)
        assert value_of(checkpointer.load()) == 3
    assert generations(str(pool)) == {1: str(pool)}


def test_a_successor_without_room_is_not_left_behind(
    pool: Path, gate: Gate, tmp_path: Path
) -> None:
    with portus.PoolCheckpointer(pool, "run", max_bytes=3 << 20) as checkpointer:
        save(checkpointer, 1)
        fail(checkpointer, gate, 2)
        with pytest.raises(MediumError, match="max_bytes"):
            save(checkpointer, 3)
        assert value_of(checkpointer.load()) == 1
    assert generations(str(pool)) == {1: str(pool)}


def test_a_pool_directory_that_was_deleted_under_a_training_is_made_again(
    pool: Path, tmp_path: Path
) -> None:
    path = tmp_path / "new.ckpt"
    with portus.PoolCheckpointer(pool.parent, "run") as checkpointer:
        save(checkpointer, 1)
        checkpointer.wait()  # what makes room for the next save would notice it, too
        shutil.rmtree(pool.parent)
        with pytest.raises(MediumError, match="deleted"):
            save(checkpointer, 2)
        save(checkpointer, 3, path)
        assert checkpointer.steps()[-1] == 3
    assert value_of(torch.load(path)) == 3
    with portus.PoolCheckpointer(pool.parent, "run") as checkpointer:
        assert checkpointer.steps() == [3]


def test_several_that_share_a_pool_file_share_its_successor(pool: Path, gate: Gate) -> None:
    with (
        portus.PoolCheckpointer(pool, "a", keep=1) as one,
        portus.PoolCheckpointer(pool, "b", keep=1) as other,
    ):
        save(one, 1)
        save(other, 1)
        fail(one, gate, 2)
        save(one, 3)
        save(other, 4)
        assert one.path == other.path == str(successor_of(pool))
        assert (value_of(one.load()), value_of(other.load())) == (3, 4)
    with portus.PoolCheckpointer(pool, "b") as other:
        assert value_of(other.load()) == 4
        with pytest.raises(UsageError, match="step 9"):
            other.load(9)


@pytest.mark.parametrize("deed", [halved, emptied, blanked, replaced])
def test_a_pool_that_others_change_has_a_successor_and_is_never_written_again(
    deed: Callable[[Path, bytes], None], pool: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.portus"
    with portus.PoolCheckpointer(other, "run") as checkpointer:
        save(checkpointer, 7)
    path = tmp_path / "4.ckpt"
    with portus.PoolCheckpointer(pool, "run", keep=2) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
        checkpointer.wait()
        deed(pool, other.read_bytes())
        head = pool.read_bytes()[:DATA_START]
        with pytest.raises((CorruptionError, MediumError), match=r"another program|trunc"):
            save(checkpointer, 3)
        checkpointer.wait()
        changed = pool.read_bytes()
        assert changed[:DATA_START] == head, "not even a message"
        save(checkpointer, 4, path)
        assert checkpointer.path == str(successor_of(pool))
        for step in (5, 6, 7, 8):
            save(checkpointer, step)
        checkpointer.wait()
        assert value_of(checkpointer.load()) == 8
        commits = [info.commit for info in checkpointer.versions()]
        assert commits == sorted(set(commits))
    assert value_of(torch.load(path)) == 4
    with portus.open(pool) as view:
        assert value_of(view.load("run", 8)) == 8
    with portus.PoolCheckpointer(pool, "run", keep=2) as checkpointer:
        assert checkpointer.path == str(successor_of(pool))
        assert value_of(checkpointer.load()) == 8
        save(checkpointer, 9)
    assert pool.read_bytes() == changed


def test_an_old_pool_that_nothing_leads_to_goes_at_the_end(
    pool: Path, gate: Gate, tmp_path: Path
) -> None:
    """The last file that led there is removed after the last save, which cannot let go of it."""
    first, second = tmp_path / "1.ckpt", tmp_path / "3.ckpt"
    with portus.PoolCheckpointer(pool, "run", keep=1) as checkpointer:
        save(checkpointer, 1, first)
        fail(checkpointer, gate, 2)
        save(checkpointer, 3, second)
        gate.broken = False
        first.unlink()
    assert generations(str(pool)) == {2: str(successor_of(pool))}
    assert value_of(torch.load(second)) == 3


def test_an_old_pool_that_holds_what_no_file_ever_led_to_stays(pool: Path, gate: Gate) -> None:
    with portus.PoolCheckpointer(pool, "run", keep=2) as checkpointer:
        save(checkpointer, 1)
        fail(checkpointer, gate, 2)
        save(checkpointer, 3)
        gate.broken = False
    with portus.PoolCheckpointer(pool, "run", keep=2) as checkpointer:
        assert checkpointer.steps() == [1, 3]


def test_at_the_end_all_generations_go_if_all_files_are_real(
    pool: Path, gate: Gate, tmp_path: Path
) -> None:
    paths = [tmp_path / "1.ckpt", tmp_path / "3.ckpt"]
    with portus.PoolCheckpointer(pool, "run", keep=1) as checkpointer:
        save(checkpointer, 1, paths[0])
        fail(checkpointer, gate, 2)
        save(checkpointer, 3, paths[1])
        gate.broken = False
    assert list(generations(str(pool))) == [1, 2]
    assert not portus.materialize_in_turn(paths, within_s=60)
    assert [value_of(torch.load(path)) for path in paths] == [1, 3]
    assert not generations(str(pool))


def test_tidying_up_reaches_all_generations(pool: Path, gate: Gate, tmp_path: Path) -> None:
    big = 1 << 20
    paths = [tmp_path / f"{step}.ckpt" for step in (1, 2, 4)]
    with portus.PoolCheckpointer(pool, "run", keep=None) as checkpointer:
        for step, path in zip((1, 2), paths, strict=False):
            checkpointer.save({"x": torch.zeros(big // 4) + step}, step, reference=path).wait()
        fail(checkpointer, gate, 3)
        checkpointer.save({"x": torch.zeros(big // 4)}, 4, reference=paths[2]).wait()
        gate.broken = False
    both = portus_json("ls", pool)["pools"]
    assert [each["path"] for each in both] == [str(pool), str(successor_of(pool))]
    assert [each["kept"] // big for each in both] == [2, 1]
    paths[0].unlink()
    old, new = portus_json("gc", pool)["pools"]
    assert [each["step"] for each in old["retired"]] == [1]
    assert old["freed"] > big * 0.9 > new["freed"], "room for records stays"
    removed = portus_json("rm", "run", "--keep", "1", "--force", "--pool", pool)["removed"]
    assert [each["step"] for each in removed] == [2]
    assert on_disk(str(pool)) < big
    assert portus_json("gc", "--empty", pool)["pools"][0]["removed"] is True
    assert generations(str(pool)) == {2: str(successor_of(pool))}


def test_what_an_old_generation_gave_back_is_room_for_its_successor(
    pool: Path, gate: Gate, tmp_path: Path
) -> None:
    size, paths = 1 << 20, [tmp_path / "1.ckpt", tmp_path / "2.ckpt"]
    with portus.PoolCheckpointer(pool, "run", keep=None, max_bytes=16 * size) as checkpointer:
        for step, path in enumerate(paths, 1):
            checkpointer.save({"x": torch.zeros(size)}, step, reference=path).wait()
        fail(checkpointer, gate, 3)
        save(checkpointer, 4)
        gate.broken = False
    paths[0].unlink()
    assert command("gc", pool).code == 0
    with portus.PoolCheckpointer(pool, "run", keep=None, max_bytes=16 * size) as checkpointer:
        checkpointer.save({"x": torch.zeros(size)}, 5).wait()
        assert checkpointer.path == str(successor_of(pool))


def test_a_root_that_could_not_be_stored_is_not_taken_for_somebody_elses(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MediumError(errno.EIO, "the disk refuses it")

    with portus.PoolCheckpointer(pool, "run") as checkpointer:
        save(checkpointer, 1)
        with monkeypatch.context() as patch:
            patch.setattr("portus.index.pool.store_root", fail)
            with pytest.raises(MediumError, match="refuses"):
                save(checkpointer, 2)
        save(checkpointer, 3)
        assert checkpointer.path == str(pool)
        assert checkpointer.steps() == [1, 3]
