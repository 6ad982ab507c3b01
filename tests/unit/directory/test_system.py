"""The calls of this machine, where a directory is not what its path says any more."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from portus.engine.directory.folder import FOLDER, HiddenFolder
from portus.engine.directory.system import Linux
from portus.engine.media.process import Descriptor
from portus.errors import MediumError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")


def test_a_directory_that_was_removed_has_no_path_though_another_is_there(tmp_path: Path) -> None:
    system, path = Linux(), tmp_path / "a"
    path.mkdir()
    directory = system.open_directory(str(path))
    assert system.path_of(directory) == str(path)
    path.rename(tmp_path / "b")
    assert system.path_of(directory) == str(tmp_path / "b")
    (tmp_path / "b").rmdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b (deleted)").mkdir()  # how the kernel calls the one that was removed
    assert system.path_of(directory) is None
    system.close(directory)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_hidden_folder_that_is_a_file_or_a_link_is_refused(tmp_path: Path, kind: str) -> None:
    system, elsewhere = Linux(), tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "file":
        (tmp_path / FOLDER).write_bytes(b"")
    else:
        (tmp_path / FOLDER).symlink_to(elsewhere)
    directory = system.open_directory(str(tmp_path))
    with pytest.raises(MediumError) as refused:
        system.open_folder(directory, FOLDER, create=True)
    assert refused.value.errno in (errno.ENOTDIR, errno.ELOOP)
    assert os.strerror(refused.value.errno or 0) in str(refused.value)
    assert os.listdir(elsewhere) == []
    system.close(directory)


class Unlockable(Linux):
    """A file system without locks."""

    def lock(self, file: Descriptor) -> bool:
        raise MediumError(errno.ENOLCK, f"{file.path}: {os.strerror(errno.ENOLCK)}")


def test_a_record_that_cannot_be_locked_is_not_left_behind(tmp_path: Path) -> None:
    folder = HiddenFolder(Unlockable(), str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MediumError, match="No locks"):
        folder.claim()
    assert os.listdir(tmp_path / FOLDER) == []
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "the directory, and the folder in it"
    folder.close()
