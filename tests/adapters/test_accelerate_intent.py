"""Notes of directories that are being made: what the next run learns from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import portus
from portus_accelerate import intent
from tests.moments import at

MAKER = """
import os, sys
from portus_accelerate import intent
home, directory, is_writer = sys.argv[1], sys.argv[2], sys.argv[3] == "writer"
assert intent.note(home, directory, is_writer=is_writer)
os.mkdir(directory)
print("made", flush=True)
sys.stdin.read()
"""


class Maker:
    """Another process, which notes a directory and makes it, and then is killed."""

    def __init__(self, home: Path, directory: Path, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAKER, str(home), str(directory), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "made\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_directory_is_cut_off_once_its_maker_is_dead_and_not_before(tmp_path: Path) -> None:
    home, directory = tmp_path / ".portus", tmp_path / "step_1"
    maker = Maker(home, directory, "writer")
    (directory / "half").write_bytes(b"of the weights")
    assert list(intent.cut_off(str(home))) == []
    maker.kill()
    assert list(intent.cut_off(str(home))) == [str(directory)]
    assert list(home.iterdir()) == [], "the note went"


@pytest.mark.parametrize(("before", "cut_off"), [(True, True), (False, False)])
def test_a_reference_tells_that_it_is_whole_if_it_was_put_there_after_the_note(
    tmp_path: Path, before: bool, cut_off: bool
) -> None:
    home, directory = tmp_path / ".portus", tmp_path / "step_1"

    def save() -> None:
        with portus.PoolCheckpointer(tmp_path / "pools") as checkpointer:
            checkpointer.save({"x": 1}, 1, reference=tmp_path / "reference").wait()

    if before:
        save()
    maker = Maker(home, directory, "writer")
    if not before:
        save()
    (tmp_path / "reference").rename(directory / "optimizer.bin")
    maker.kill()
    assert list(intent.cut_off(str(home))) == [str(directory)] * cut_off


@pytest.mark.parametrize("is_empty", [True, False])
def test_who_only_may_have_made_it_speaks_for_an_empty_directory_alone(
    tmp_path: Path, is_empty: bool
) -> None:
    home, directory = tmp_path / ".portus", tmp_path / "step_1"
    maker = Maker(home, directory, "other")
    if not is_empty:
        (directory / "optimizer.bin").write_bytes(b"materialised meanwhile")
    maker.kill()
    assert list(intent.cut_off(str(home))) == [str(directory)] * is_empty


def test_own_notes_are_of_nobody_who_died_and_leave_nothing_when_dropped(tmp_path: Path) -> None:
    home, directory = tmp_path / ".portus", tmp_path / "step_1"
    note = intent.note(str(home), str(directory), is_writer=True)
    assert note is not None
    directory.mkdir()
    assert list(intent.cut_off(str(home))) == []
    note.drop()
    assert not home.exists()


def test_a_note_is_not_there_for_others_before_it_is_locked(tmp_path: Path) -> None:
    home, directory = tmp_path / ".portus", tmp_path / "step_1"

    def look_as_another_run() -> None:
        intent._own.clear()
        assert list(intent.cut_off(str(home))) == []

    with at("return", intent.Intent.__init__, look_as_another_run):
        note = intent.note(str(home), str(directory), is_writer=True)
    assert note is not None
    assert [str(each) for each in home.iterdir()] == [note.path]
    note.drop()
    assert not home.exists()


def test_a_note_whose_writer_died_before_it_was_locked_goes_when_it_is_old(tmp_path: Path) -> None:
    home = tmp_path / ".portus"
    home.mkdir()
    old, young = home / "1-a.saving.new", home / "2-b.saving.new"
    for path in (old, young):
        path.write_bytes(b"")
    os.utime(old, (1, 1))
    assert list(intent.cut_off(str(home))) == []
    assert list(home.iterdir()) == [young]
