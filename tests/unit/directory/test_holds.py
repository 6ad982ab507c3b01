"""What a draft holds while others of its series are committed and removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from portus.engine.directory.publisher import Publication, Publisher
from portus.engine.directory.system import Linux


def draft(files: Publisher, tmp_path: Path, step: int) -> Publication:
    """A checkpoint directory in the making, of two files."""
    place = tmp_path / f"step_{step}"
    place.mkdir()
    names = [os.fspath(place / name) for name in ("a", "b")]
    return files.begin(*names, base=os.fspath(tmp_path))


def test_a_draft_is_given_up_after_the_one_behind_it_was_committed(tmp_path: Path) -> None:
    """What it holds is in a directory that nothing else needs by then."""
    files = Publisher(Linux())
    draft(files, tmp_path, 3).publish()
    first, second = draft(files, tmp_path, 4), draft(files, tmp_path, 5)
    second.publish()
    first.abandon()
    first.abandon()
    files.close()
    shutil.rmtree(tmp_path / "step_4")
    assert sorted(os.listdir(tmp_path)) == ["step_3", "step_5"]
    assert sorted(os.listdir(tmp_path / "step_3")) == ["a", "b"]
