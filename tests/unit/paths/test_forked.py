"""A training whose files were made in a parent, and that goes on in a forked child."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from portus.reach.mirror.address import parse
from portus.reach.mirror.files import MirroredFiles
from portus.reach.mirror.opening import open_store
from tests.unit.paths.programs import SLOW
from tests.warm import in_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

PROGRAM = """
import os, sys
import portus
home, opened = {home!r}, {opened}
files = portus.TrainingFiles(portus.Settings(mirror="file://" + home + "/bucket"))
if opened:
    files.begin("run", home + "/run/.portus", home + "/run/ckpt")
child = os.fork()
if child == 0:
    files.begin("run", home + "/run/.portus", home + "/run/ckpt")
    files.save({{"step": 1}}, home + "/run/ckpt/1.ckpt", 1).wait()
    files.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("opened", [False, True])
def test_what_a_child_saves_is_in_the_mirror_and_in_the_journal(
    tmp_path: Path, opened: bool
) -> None:
    (tmp_path / "bucket").mkdir()
    ran = in_process(PROGRAM.format(home=str(tmp_path), opened=opened))
    assert ran.returncode == 0, ran.stderr
    store = open_store(parse(f"file://{tmp_path}/bucket"))
    names = [each.path for each in MirroredFiles(store, "run", "bucket").read().added]
    store.close()
    assert names == ["ckpt/1.ckpt"]
    (journal,) = (tmp_path / "run" / ".portus").rglob("*.lines")
    assert "1.ckpt" in journal.read_text()


WAITING = (
    SLOW
    + """
import os, signal
import portus
handle = portus.save({{"step": 1}}, {path!r})
child = os.fork()
if child == 0:
    signal.alarm(30)
    asked = [handle.wait, lambda: handle.wait(60), handle.join]
    for ask in (*asked, lambda: handle.done, lambda: handle.committed):
        try:
            ask()
        except portus.UsageError as error:
            assert "the parent's process saves it" in str(error), error
        else:
            os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
done = handle.wait()
child = os.fork()
if child == 0:
    os._exit(0 if handle.done and handle.committed and handle.wait() == done else 1)
assert os.waitpid(child, 0)[1] == 0
"""
)


def test_a_forked_child_is_told_that_its_parent_saves_what_it_waits_for(tmp_path: Path) -> None:
    ran = in_process(WAITING.format(path=str(tmp_path / "a.pt")))
    assert ran.returncode == 0, ran.stderr
