"""A pool on another file system than what leads there: found by the user's own note."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import portus
from portus.client.files.notes import PLACES_MAX, note, places
from portus.client.loading.resolve import KnownPools, load_reference
from portus.client.loading.view import open_pool
from portus.index.directory import state_directory

UUID = bytes(range(16))


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system than ``tmp_path``."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or os.stat(shared).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("one file system only: /dev/shm is none of its own")
    directory = Path(tempfile.mkdtemp(dir=shared))
    yield directory
    shutil.rmtree(directory)


def saved(pool: Path, run: Path, steps: int = 1) -> None:
    with portus.PoolCheckpointer(pool, "net", keep=1) as trainer:
        for step in range(1, steps + 1):
            state = {"w": torch.full((1000,), float(step))}
            trainer.save(state, step, reference=run / f"{step}.ckpt").wait()


def loaded(path: Path) -> int:
    """The step that a process would load that was told of no pool."""
    found = load_reference(path, KnownPools(open_pool))
    assert isinstance(found, dict)
    return int(found["w"][0])


def test_a_pool_on_another_file_system_is_found(tmp_path: Path, far: Path) -> None:
    saved(far, tmp_path / "run", 3)
    assert [loaded(tmp_path / f"run/{step}.ckpt") for step in (1, 2, 3)] == [1, 2, 3]
    portus.materialize(tmp_path / "run/2.ckpt")
    assert torch.load(tmp_path / "run/2.ckpt")["w"][0] == 2
    saved(far, tmp_path / "run")  # a pool that is there already is noted as well
    assert len(list(Path(state_directory(), "places").iterdir())) == 1


def test_only_a_note_of_the_user_leads_there(
    tmp_path: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(far, tmp_path / "run")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a stranger's"))
    with pytest.raises(portus.UsageError, match="not beside the reference"):
        loaded(tmp_path / "run/1.ckpt")


def test_a_pool_that_was_moved_while_it_was_saved_to_is_found_where_it_is(
    tmp_path: Path, far: Path
) -> None:
    with portus.PoolCheckpointer(far / "pools", "net") as trainer:
        for step in (1, 2):
            state = {"w": torch.full((1000,), float(step))}
            trainer.save(state, step, reference=tmp_path / f"{step}.ckpt").wait()
            if step == 1:
                (far / "pools").rename(far / "moved")
    assert [loaded(tmp_path / f"{step}.ckpt") for step in (1, 2)] == [1, 2]


def test_a_note_that_is_damaged_or_cannot_be_written_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(UUID, "/one")
    note(UUID, "/two")
    note(UUID, "/one")
    assert places(UUID) == ["/two", "/one"]
    for number in range(PLACES_MAX):
        note(UUID, f"/{number}")
    assert places(UUID) == [f"/{number}" for number in reversed(range(PLACES_MAX))]
    [path] = Path(state_directory(), "places").iterdir()
    for text in ("", "{", "3", '[3, "relative"]', "[" * 100_000):
        path.write_text(text)
        assert places(UUID) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    note(UUID, "/one")
    assert places(UUID) == []


def test_what_may_not_be_read_is_told_from_what_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Path(tempfile.mkdtemp())
    run.chmod(0o755)
    try:
        saved(run / ".portus", run)
        (run / ".portus").chmod(0o700)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        else:
            (run / ".portus").chmod(0)
        try:
            with pytest.raises(portus.UsageError, match="permission denied"):
                loaded(run / "1.ckpt")
        finally:
            os.seteuid(user)
            (run / ".portus").chmod(0o700)
    finally:
        shutil.rmtree(run)
