"""The hidden folder, which each process that uses it removes when it is empty."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from portus.engine.directory.folder import FOLDER, HiddenFolder
from portus.engine.directory.system import Linux
from portus.engine.media.process import _open
from tests.moments import at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")


def test_a_folder_that_another_removes_before_it_is_opened_is_made_again(tmp_path: Path) -> None:
    system = Linux()
    directory = system.open_directory(str(tmp_path))
    other = HiddenFolder(system, str(tmp_path))
    with at("call", _open, lambda: (tmp_path / FOLDER).rmdir()):
        made = system.open_folder(directory, FOLDER, create=True)
    assert made is not None
    other.close()
    assert not (tmp_path / FOLDER).exists()
    for each in (made, directory):
        system.close(each)
