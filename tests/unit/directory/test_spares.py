"""Removed files whose space is used again, on the file system of this machine."""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from portus.engine.directory import publisher
from portus.engine.directory.publisher import Publisher
from portus.engine.directory.recovery import recover_directory
from portus.engine.directory.system import Linux
from portus.engine.media import linux

NFS = 0x6969


@pytest.fixture
def files() -> Publisher:
    return Publisher(Linux())


def save(files: Publisher, path: Path, **more: Any) -> bool:
    """Whether it went into a spare."""
    draft = files.begin(os.fspath(path), **more)
    files._system.write(draft.files[0].file, path.name.encode())
    files._system.sync(draft.files[0].file)
    draft.publish()
    return draft.files[0].is_spare


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_removed_file_is_written_over_where_this_kernel_sees_every_reader(
    files: Publisher,
    elsewhere: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for step in range(6):
        if step == 3:
            monkeypatch.setattr(linux, "file_system_type", lambda _: NFS)
        found.append(save(files, tmp_path / f"{step}.pt", removed_elsewhere=elsewhere))
        if step and elsewhere:
            os.unlink(tmp_path / f"{step - 1}.pt")
        elif step:
            files.remove(os.fspath(tmp_path / f"{step - 1}.pt"))
    files.close()
    # One removed elsewhere is found as the next save commits.
    assert found == [False, False, not elsewhere, False, False, False]
    assert os.listdir(tmp_path) == ["5.pt"]


def test_of_files_that_others_remove_the_newest_are_watched_and_none_after_the_end(
    files: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "WATCHED_MAX", 2)
    for step in range(5):
        save(files, tmp_path / f"{step}.pt", removed_elsewhere=True)
    links = [(tmp_path / f"{step}.pt").stat().st_nlink for step in range(5)]
    assert links == [1, 1, 1, 2, 2]
    os.unlink(tmp_path / "4.pt")
    assert not save(files, tmp_path / "5.pt", removed_elsewhere=True)
    assert save(files, tmp_path / "6.pt", removed_elsewhere=True)
    os.unlink(tmp_path / "6.pt")
    assert files.drop_spare(), "it is no use on a full disk"
    files.close()
    assert sorted(os.listdir(tmp_path)) == ["0.pt", "1.pt", "2.pt", "3.pt", "5.pt"]
    assert {path.stat().st_nlink for path in tmp_path.iterdir()} == {1}


def test_a_committed_file_stays_open_only_where_it_may_become_a_spare(
    files: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for step, kind in enumerate((linux.EXT_TYPE, NFS)):
        monkeypatch.setattr(linux, "file_system_type", lambda _, kind=kind: kind)
        path = tmp_path / f"{step}.pt"
        save(files, path, removed_elsewhere=True)
        # An NFS client renames an open file that is removed, and its directory cannot be removed.
        opened = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
        found.append((path in opened, path.stat().st_nlink))
    files.close()
    assert found == [(True, 2), (False, 1)]


def test_a_file_is_watched_though_it_was_written_through_a_mapping(
    files: Publisher, tmp_path: Path
) -> None:
    draft = files.begin(os.fspath(tmp_path / "0.pt"), removed_elsewhere=True)
    os.truncate(draft.files[0].file.number, 1)
    with mmap.mmap(draft.files[0].file.number, 1):  # as of its writer, which closes it later
        os.fsync(draft.files[0].file.number)
        draft.publish()
    os.unlink(tmp_path / "0.pt")
    assert not save(files, tmp_path / "1.pt")
    assert save(files, tmp_path / "2.pt")
    files.close()


def test_what_a_process_that_was_killed_watched_is_let_go_of_by_the_next_one(
    files: Publisher, tmp_path: Path
) -> None:
    save(files, tmp_path / "0.pt", removed_elsewhere=True)
    files._watched[0].file.close()  # as its death does: the lock is gone
    os.unlink(tmp_path / "0.pt")
    recover_directory(os.fspath(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_file_is_not_written_over_when_a_user_removes_the_hidden_folder(
    files: Publisher, tmp_path: Path
) -> None:
    for step in range(5):
        assert not save(files, tmp_path / f"{step}.pt", removed_elsewhere=True)
        if step == 2:  # the newest has other links, by which it is held
            shutil.rmtree(tmp_path / ".portus")
    files.close()
    assert [(tmp_path / f"{step}.pt").read_text() for step in range(5)] == [
        f"{step}.pt" for step in range(5)
    ]
