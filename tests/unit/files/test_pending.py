"""Code of this process that touches a path of a save in flight waits for it."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from portus.engine.files.pending import PENDING, PendingPaths
from portus.engine.media import process
from portus.engine.media.process import Descriptor
from portus.engine.pipeline.handle import EndedSave, SaveStats
from portus.errors import PortusError
from tests.warm import in_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

WAIT_S_MAX = 30.0


class Saving(EndedSave):
    """A save that is over when ``wait`` returns."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__(PortusError("no save"), SaveStats())
        self._wait = wait

    def join(self) -> None:
        self._wait()


class Late:
    """A file that appears 50 ms after somebody began to wait for it, and at no other time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waits = 0
        self._over = threading.Event()
        self._awaited = threading.Event()
        self._save = Saving(self.wait)
        PENDING.add(os.path.realpath(path), self._save)
        self._thread = threading.Thread(target=self._appear)
        self._thread.start()

    def wait(self) -> None:
        self.waits += 1
        self._awaited.set()
        assert self._over.wait(WAIT_S_MAX)

    def _appear(self) -> None:
        with PENDING.exempt():
            if not self._awaited.wait(WAIT_S_MAX):
                return
            time.sleep(0.05)
            self.path.write_text("whole")
            PENDING.remove(self._save)
            self._over.set()

    def end(self) -> None:
        self._awaited.set()
        self._thread.join()


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    (tmp_path / "run" / "ckpt").mkdir(parents=True)
    os.symlink("run/ckpt", tmp_path / "link")
    os.symlink("run/ckpt/step.pt", tmp_path / "last.pt")
    monkeypatch.chdir(tmp_path)
    made = Late(tmp_path / "run" / "ckpt" / "step.pt")
    yield made
    made.end()


def read_by_descriptor() -> object:
    directory = os.open("run/ckpt", os.O_RDONLY)
    try:
        os.rename("step.pt", "other.pt", src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.close(directory)
    return Path("run/ckpt/other.pt").read_text()


def archived() -> object:
    with tarfile.open("all.tar", "w") as archive:
        archive.add("run")
        return archive.getnames()[-1].endswith("step.pt")


def unlinked() -> object:
    os.unlink("run/ckpt/step.pt")
    return not os.path.exists("run/ckpt/step.pt")


def removed_tree() -> object:
    shutil.rmtree("run")
    return not os.path.exists("run")


def linked() -> object:
    os.symlink("step.pt", "run/ckpt/best.pt")
    return Path("run/ckpt/best.pt").read_text()


TOUCHES: dict[str, tuple[Callable[[], Any], Any]] = {
    "open": (lambda: Path("run/ckpt/step.pt").read_text(), "whole"),
    "open bytes": (lambda: os.close(os.open(b"run/ckpt/step.pt", os.O_RDONLY)), None),
    "open absolute": (lambda: Path("run/ckpt/step.pt").absolute().read_text(), "whole"),
    "open by a linked directory": (lambda: Path("link/step.pt").read_text(), "whole"),
    "open by a link": (lambda: Path("last.pt").read_text(), "whole"),
    "open with dots": (lambda: Path("run/../run/ckpt/./step.pt").read_text(), "whole"),
    "os.open": (lambda: os.close(os.open("run/ckpt/step.pt", os.O_RDONLY)), None),
    "listdir": (lambda: os.listdir("run/ckpt"), ["step.pt"]),
    "listdir by a link": (lambda: os.listdir("link"), ["step.pt"]),
    "scandir": (lambda: [each.name for each in os.scandir("run/ckpt")], ["step.pt"]),
    "glob": (lambda: glob.glob("run/ckpt/*.pt"), ["run/ckpt/step.pt"]),
    "rglob": (lambda: [each.name for each in Path("run").rglob("*.pt")], ["step.pt"]),
    "walk": (lambda: [files for _, _, files in os.walk("run") if files], [["step.pt"]]),
    "copy": (lambda: Path(shutil.copy("run/ckpt/step.pt", "b.pt")).read_text(), "whole"),
    "copytree": (lambda: os.listdir(shutil.copytree("run", "copy") + "/ckpt"), ["step.pt"]),
    "move": (lambda: Path(shutil.move("run/ckpt/step.pt", "b.pt")).read_text(), "whole"),
    "move of what it is in": (lambda: os.listdir(shutil.move("run", "b") + "/ckpt"), ["step.pt"]),
    "rename": (lambda: os.rename("run/ckpt/step.pt", "b.pt"), None),
    "rename of what it is in": (lambda: os.rename("run", "b"), None),
    "replace by": (lambda: os.replace("run/ckpt/step.pt", "b.pt"), None),
    "rename by descriptors": (read_by_descriptor, "whole"),
    "link": (lambda: os.link("run/ckpt/step.pt", "b.pt"), None),
    "symlink": (linked, "whole"),
    "unlink": (unlinked, True),
    "rmtree": (removed_tree, True),
    "truncate": (lambda: os.truncate("run/ckpt/step.pt", 0), None),
    "chmod": (lambda: os.chmod("run/ckpt/step.pt", 0o600), None),
    "utime": (lambda: os.utime("run/ckpt/step.pt"), None),
    "tar": (archived, True),
    "subprocess": (lambda: subprocess.check_output(["cat", "run/ckpt/step.pt"]), b"whole"),
    "system": (lambda: os.system("test -f run/ckpt/step.pt"), 0),
    "posix_spawn": (
        lambda: os.waitpid(
            os.posix_spawn("/usr/bin/test", ["test", "-f", "run/ckpt/step.pt"], os.environ), 0
        )[1],
        0,
    ),
}


@pytest.mark.parametrize("touch", sorted(TOUCHES))
def test_whoever_touches_a_promised_path_finds_the_file(late: Late, touch: str) -> None:
    act, expected = TOUCHES[touch]
    assert act() == expected
    assert late.waits >= 1


def test_whoever_touches_others_does_not_wait(late: Late) -> None:
    Path("run/ckpt/older.pt").write_text("x")
    assert Path("run/ckpt/older.pt").read_text() == "x"
    os.rename("run/ckpt/older.pt", "run/ckpt/old.pt")
    os.remove("run/ckpt/old.pt")
    os.mkdir("other")
    assert os.listdir("other") == []
    assert sorted(os.listdir("run")) == ["ckpt"]
    assert not os.path.exists("run/ckpt/step.pt")
    assert late.waits == 0


def test_portus_itself_does_not_wait(late: Late) -> None:
    with PENDING.exempt():
        assert os.listdir("run/ckpt") == []
        with PENDING.exempt():
            assert os.listdir("run/ckpt") == []
        assert os.listdir("run/ckpt") == []
    assert late.waits == 0


def test_a_save_may_close_files_while_portus_waits_for_its_path(tmp_path: Path) -> None:
    """Files of Portus are opened and closed with a lock that fork waits for, too."""
    path, closed = tmp_path / "step.pt", threading.Event()
    path.write_text("before")

    def wait() -> None:
        worker = threading.Thread(target=save, daemon=True)
        worker.start()
        assert closed.wait(WAIT_S_MAX)
        worker.join()

    def save() -> None:
        with PENDING.exempt():
            Descriptor(str(path), os.O_RDONLY).close()
            path.write_text("whole")
            PENDING.remove(saving)
            closed.set()

    saving = Saving(wait)
    PENDING.add(os.path.realpath(path), saving)
    opened = Descriptor(str(path), os.O_RDONLY)
    assert os.read(opened.number, 9) == b"whole"
    opened.close()


def test_a_save_that_begins_as_portus_opens_its_path_is_not_awaited_with_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, really_open, waits = tmp_path / "step.pt", process._open, list[str]()
    path.write_text("before")

    def wait() -> None:
        waits.append("with the lock")

    def late(*arguments: Any) -> int:
        saving = Saving(wait)
        PENDING.add(os.path.realpath(path), saving)
        try:
            return really_open(*arguments)
        finally:
            PENDING.remove(saving)

    monkeypatch.setattr(process, "_open", late)
    Descriptor(str(path), os.O_RDONLY).close()
    assert waits == []


def test_a_load_waits_for_a_file_and_for_what_is_below_a_directory(late: Late) -> None:
    PENDING.wait_for(os.path.realpath("run/ckpt/other.pt"))
    assert late.waits == 0
    PENDING.wait_for(os.path.realpath("run"))
    assert late.waits == 1


def test_an_error_of_a_save_is_not_that_of_whoever_opens_the_file(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError

    failing = Saving(fail)
    PENDING.add(str(tmp_path / "x"), failing)
    try:
        assert os.listdir(tmp_path) == []
    finally:
        PENDING.remove(failing)
        PENDING.remove(failing)


def test_ctrl_c_ends_a_wait(tmp_path: Path) -> None:
    saving = Saving(lambda: time.sleep(WAIT_S_MAX))
    PENDING.add(str(tmp_path / "x"), saving)

    def listed() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        os.listdir(tmp_path)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            listed()
    finally:
        signal.signal(signal.SIGALRM, before)
        PENDING.remove(saving)


def test_a_forked_child_waits_for_nobody(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from tests.unit.files.test_pending import PENDING, Saving, time\n"
        f"PENDING.add({str(tmp_path / 'x')!r}, Saving(lambda: time.sleep(60)))\n"
        "child = os.fork()\n"
        "if not child:\n"
        f"    os._exit(len(os.listdir({str(tmp_path)!r})))\n"
        "os._exit(os.waitpid(child, 0)[1])\n"
    )
    assert in_process(program).returncode == 0


def test_the_hook_is_installed_once_and_by_the_first_path(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[object] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    own = PendingPaths()
    assert hooks == []
    for _ in range(3):
        saving = Saving(int)
        own.add("/x", saving)
        own.remove(saving)
    assert len(hooks) == 1
