"""A process waits for the saves of others to a path, and for nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.engine.directory.folder import HiddenFolder
from portus.engine.directory.system import Linux
from portus.engine.directory.waiting import wait_for_drafts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

SAVER = """
import sys
from portus.engine.directory.publisher import Publisher
from portus.engine.directory.system import Linux
files = Publisher(Linux())
draft = files.begin(sys.argv[1])
Linux().write(draft.files[0].file, b"whole")
print("begun", flush=True)
sys.stdin.readline()
draft.publish()
print("there", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a save to ``run.pt`` in flight, until it is told something."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path / "run.pt")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    yield process
    process.kill()
    process.communicate()


def test_it_waits_until_the_file_is_there(saver: subprocess.Popen[str], tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    assert not wait_for_drafts(*os.path.split(path), 0.05)
    assert saver.stdin is not None
    timer = threading.Timer(0.1, lambda: (saver.stdin.write("go\n"), saver.stdin.flush()))  # type: ignore[union-attr]
    timer.start()
    assert wait_for_drafts(*os.path.split(path), 30)
    assert Path(path).read_bytes() == b"whole"
    timer.join()


def test_a_process_that_was_killed_is_not_waited_for(
    saver: subprocess.Popen[str], tmp_path: Path
) -> None:
    os.kill(saver.pid, signal.SIGKILL)
    saver.wait()
    before = sorted(os.listdir(tmp_path / ".portus"))
    assert before
    assert wait_for_drafts(str(tmp_path), "run.pt", 0)
    assert sorted(os.listdir(tmp_path / ".portus")) == before, "who waits changes nothing"


def test_nobody_waits_for_another_name_nor_where_nothing_is_saved(
    saver: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert wait_for_drafts(str(tmp_path), "other.pt", 0)
    assert wait_for_drafts(str(tmp_path / "none"), "run.pt", 0)
    assert wait_for_drafts("/proc/self", "run.pt", 0)


def test_a_record_that_turns_out_to_be_of_something_else_is_not_waited_for(tmp_path: Path) -> None:
    folder = HiddenFolder(Linux(), str(tmp_path))
    record = folder.claim()  # it says nothing yet
    assert not wait_for_drafts(str(tmp_path), None, 0)
    threading.Timer(0.1, Linux().write, (record.file, b"/")).start()
    assert wait_for_drafts(str(tmp_path), None, 60)
