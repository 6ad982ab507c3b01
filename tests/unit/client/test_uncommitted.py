"""Reference files of saves that were cut off are told from checkpoints, and put aside."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import portus
from portus.cli.app import app
from portus.client.files.keeper import ASIDE
from portus.format.layout import DATA_START
from portus.index.pool import PoolWriter
from portus.spec import Extent
from tests.unit.client.stuck import gated

CUT_OFF = """
import os, sys, torch, portus
from portus.client.files.keeper import Keeper
pool, paths = sys.argv[1], sys.argv[2:]
checkpointer = portus.PoolCheckpointer(pool, "run", keep=1)
for step, path in enumerate(paths[:-1]):
    checkpointer.save({"step": step}, step, reference=path).wait()
checkpointer._queue.catch_up()

def die(*_):
    os.kill(os.getpid(), 9)

Keeper.make_durable = die  # when the file is at its place, and nothing is committed yet
checkpointer.save({"step": len(paths)}, len(paths), reference=paths[-1]).wait()
"""


OPEN = """
import sys, portus
checkpointer = portus.PoolCheckpointer(sys.argv[1], "other")  # another model: a file of its own
held = portus.PoolCheckpointer(sys.argv[1] + "/run.portus", "another")
print("open", flush=True)
sys.stdin.read()
"""


def cut_off(pool: Path | str, *paths: Path) -> None:
    """Save to all of ``paths``, killed in the last save."""
    ended = subprocess.run(
        [sys.executable, "-c", CUT_OFF, str(pool), *map(str, paths)], check=False, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    (tmp_path / "ckpt").mkdir()
    return [tmp_path / "ckpt" / f"step={step}.ckpt" for step in range(3)]


@pytest.mark.long
def test_the_file_of_a_save_that_was_cut_off_is_renamed_when_its_run_starts(
    tmp_path: Path, paths: list[Path]
) -> None:
    cut_off(tmp_path / "pools", *paths)
    assert paths[2].exists()
    with portus.PoolCheckpointer(tmp_path / "pools", "run", keep=1) as checkpointer:
        assert sorted(os.listdir(paths[0].parent)) == [
            "step=0.ckpt",
            "step=1.ckpt",
            "step=2.ckpt.uncommitted",
        ]
        checkpointer.save({"step": 2}, 2, reference=paths[2]).wait()
    assert [torch.load(path)["step"] for path in paths] == [0, 1, 2]


@pytest.mark.long
def test_a_second_one_at_the_same_path_gets_a_name_of_its_own(
    tmp_path: Path, paths: list[Path]
) -> None:
    for _ in range(2):
        cut_off(tmp_path / "pools", paths[0])
    with portus.PoolCheckpointer(tmp_path / "pools", "run"):
        names = sorted(os.listdir(paths[0].parent))
    assert names == ["step=0.ckpt.uncommitted", "step=0.ckpt.uncommitted-2"]


@pytest.mark.long
def test_nothing_is_renamed_while_another_process_has_the_pool(
    tmp_path: Path, paths: list[Path]
) -> None:
    cut_off(tmp_path / "pools", *paths)
    command = [sys.executable, "-c", OPEN, str(tmp_path / "pools")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        before = os.listdir(paths[0].parent)
        assert portus.mend(tmp_path / "pools", uncommitted=True) == []
        assert os.listdir(paths[0].parent) == before
        other.kill()


def test_a_file_whose_version_was_retired_by_hand_keeps_its_name(
    tmp_path: Path, paths: list[Path]
) -> None:
    with portus.PoolCheckpointer(tmp_path / "pools", "run", keep=1) as checkpointer:
        for step, path in enumerate(paths):
            checkpointer.save({"step": step}, step, reference=path).wait()
    removed = CliRunner().invoke(app, ["rm", "run@1", "--force", "--pool", str(tmp_path / "pools")])
    assert removed.exit_code == 0, removed.output
    with portus.PoolCheckpointer(tmp_path / "pools", "run", keep=1):
        assert [path.exists() for path in paths] == [True, True, True]


def test_it_keeps_its_name_also_where_files_without_a_link_are_looked_for(
    tmp_path: Path, paths: list[Path]
) -> None:
    pool = tmp_path / ".portus"
    with portus.PoolCheckpointer(pool, "run", keep=None) as checkpointer:
        checkpointer.save({}, 7).wait()  # which no file leads to: one may have lost its link
        for step, path in enumerate(paths):
            checkpointer.save({"step": step}, step, reference=path).wait()
    removed = CliRunner().invoke(app, ["rm", "run@1", "--force", "--pool", str(pool)])
    assert removed.exit_code == 0, removed.output
    for _ in range(2):
        with portus.PoolCheckpointer(pool, "run", keep=None):
            assert [path.exists() for path in paths] == [True, True, True]


@pytest.mark.long
def test_a_file_that_leads_to_another_pool_keeps_its_name(
    tmp_path: Path, paths: list[Path]
) -> None:
    cut_off(tmp_path / "pools", *paths)
    (tmp_path / "pools" / "run.portus").unlink()
    with portus.PoolCheckpointer(tmp_path / "pools", "run") as checkpointer:
        checkpointer.save({}, 9).wait()
    assert [path.exists() for path in paths] == [True, True, True]


def test_the_file_of_a_save_that_failed_is_put_aside_while_its_run_goes_on(
    tmp_path: Path, paths: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    last = paths[0].with_name("last.ckpt")
    with portus.PoolCheckpointer(tmp_path / "pools", "run", keep=1) as checkpointer:
        checkpointer.save({"step": 0}, 0, reference=paths[0]).wait()
        checkpointer.wait()
        with failing(checkpointer):
            checkpointer.save({"step": 1}, 1, reference=paths[1])
            last.symlink_to(paths[1].name)
            checkpointer.wait()
        aside = paths[1].with_name(f"{paths[1].name}{ASIDE}")
        assert sorted(os.listdir(last.parent)) == [last.name, paths[0].name, aside.name]
        assert f"the file is {aside.name} now" in caplog.text
        assert torch.load(last) == {"step": 0}
        assert len(os.listdir(tmp_path / "pools" / "run.references")) == 1
        assert portus.materialize_in_turn([aside, aside.parent], within_s=60) == []
        checkpointer.save({"step": 2}, 2, reference=paths[1]).wait()
    assert torch.load(paths[1]) == {"step": 2}
    assert not portus.is_reference(paths[0])
    assert portus.is_reference(aside), "of what was never committed there is no real file"


def test_a_run_whose_saves_all_fail_leaves_few_files(
    tmp_path: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.client.files.keeper._WITHDRAWN_MAX", 2)
    with portus.PoolCheckpointer(tmp_path / "pools", "run") as checkpointer:
        checkpointer.save({}, 0).wait()
        with failing(checkpointer):
            for step in range(5):
                checkpointer.save({}, step, reference=paths[0].with_name(f"{step}.ckpt"))
                checkpointer.wait()
    assert sorted(os.listdir(paths[0].parent)) == [f"{step}.ckpt{ASIDE}" for step in (3, 4)]


@pytest.mark.parametrize("stored", [False, True])
def test_a_file_whose_version_readers_may_find_stays(
    tmp_path: Path, paths: list[Path], stored: bool
) -> None:
    """A persist of the root that fails leaves the version in caches, and on the disk perhaps."""
    pool = tmp_path / "pools" / "run.portus"
    gate = gated(pool)

    def persist(writer: PoolWriter, ranges: Sequence[Extent]) -> None:
        is_root = all(extent.end <= DATA_START for extent in ranges)
        gate.broken = is_root or not stored
        writer.medium.persist(ranges)

    with portus.PoolCheckpointer(pool, "run") as checkpointer:
        checkpointer.save({"step": 0}, 0, reference=paths[0]).wait()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PoolWriter, "_persist", persist)
            with pytest.raises(portus.MediumError, match="accepts no more writes"):
                checkpointer.save({"step": 1}, 1, reference=paths[1]).wait()
        checkpointer.save({"step": 2}, 2, reference=paths[2]).wait()
        assert paths[1].exists() == stored
    if stored:
        assert torch.load(paths[1]) == {"step": 1}


def test_what_cannot_be_put_aside_stays_which_is_said_once(
    tmp_path: Path, paths: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    long = paths[0].with_name("x" * 250)  # and no longer name is possible
    with portus.PoolCheckpointer(tmp_path / "pools", "run") as checkpointer:
        checkpointer.save({"step": 0}, 0, reference=paths[0]).wait()
        with failing(checkpointer):
            checkpointer.save({"step": 1}, 1, reference=long)
            checkpointer.wait()
        checkpointer.save({"step": 2}, 2, reference=paths[2]).wait()
    assert long.exists()
    assert caplog.text.count("could not be removed, and does not lead to its own step") == 1


@contextlib.contextmanager
def failing(checkpointer: portus.PoolCheckpointer) -> Iterator[None]:
    """Saves fail when their files are there, before anything is committed."""

    def fail(infos: object) -> list[int]:
        raise portus.MediumError(errno.EIO, "the disk fails")

    checkpointer.part.surplus = fail
    yield
    checkpointer.part.surplus = None
