"""What others do to a directory while a program saves into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest
import torch

from portus.engine.files.pending import PENDING
from portus.engine.paths.process import load, save
from portus.engine.writer.image_file import ImageFile
from portus.errors import MediumError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")


@pytest.fixture(autouse=True)
def run(own_saver: None) -> None:
    os.mkdir("run")


def state(step: int) -> dict[str, object]:
    return {"w": torch.full((50_000,), float(step)), "step": step}


def check(path: str, step: int) -> None:
    """The file is whole, and that of ``step``, for stock torch too."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for found in (load(path), torch.load(path)):
        assert found["step"] == step
        assert (found["w"] == step).all()


def test_a_directory_that_is_moved_takes_its_saves_along() -> None:
    for step in range(6):
        handle = save(state(step), f"run/{step}.pt")
        if step == 3:
            with PENDING.exempt():  # as another program does it
                os.rename("run", "moved")
            os.mkdir("run")
    handle.wait()
    names = {
        each: sorted(x for x in os.listdir(each) if x != ".portus") for each in ("run", "moved")
    }
    assert sorted(names["run"] + names["moved"]) == [f"{step}.pt" for step in range(6)]
    assert {"0.pt", "1.pt", "2.pt"} <= set(names["moved"])
    assert {"4.pt", "5.pt"} <= set(names["run"])
    for directory, found in names.items():
        for name in found:
            check(f"{directory}/{name}", int(name[0]))


def test_whoever_deletes_the_hidden_folder_costs_the_save_in_flight_at_most() -> None:
    failed = 0
    for step in range(12):
        handle = save(state(step), "run/last.pt")
        if step % 3 == 1:
            shutil.rmtree("run/.portus", ignore_errors=True)
        try:
            handle.wait()
        except MediumError:
            failed += 1
        else:
            check("run/last.pt", step)
    assert failed <= 4
    save(state(99), "run/last.pt").wait()
    check("run/last.pt", 99)


def test_a_directory_that_is_deleted_fails_its_save_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(state(0), "run/0.pt").wait()
    deleted, real = threading.Event(), ImageFile.finish

    def finish(file: ImageFile) -> None:
        assert deleted.wait(30)
        real(file)

    monkeypatch.setattr(ImageFile, "finish", finish)
    handle = save(state(1), "run/1.pt")
    with PENDING.exempt():
        shutil.rmtree("run")
    deleted.set()
    with pytest.raises(MediumError):
        handle.wait()
    os.mkdir("run")
    save(state(2), "run/2.pt").wait()
    check("run/2.pt", 2)
    assert not os.path.exists("run/1.pt")


def test_what_stock_torch_writes_over_our_file_stays_and_changes_no_other() -> None:
    for step in range(6):
        save(state(step), "run/last.pt").wait()
        save(state(step), f"run/{step}.pt").wait()
        torch.save(state(step + 100), "run/last.pt")  # in place, as stock does it
        check_stock("run/last.pt", step + 100)
        for older in range(step + 1):
            check(f"run/{older}.pt", older)


def check_stock(path: str, step: int) -> None:
    assert torch.load(path)["step"] == step


def test_a_file_that_somebody_has_open_or_mapped_keeps_its_bytes() -> None:
    mapped, opened = [], []
    for step in range(20):
        save(state(step), "run/last.pt").wait()
        if step % 3 == 0:
            mapped.append((step, torch.load("run/last.pt", mmap=True)))
        if step % 3 == 1:
            opened.append((step, open("run/last.pt", "rb")))  # noqa: SIM115 - it stays open
    for step, found in mapped:
        assert (found["w"] == step).all()
    for step, file in opened:
        with file:
            assert torch.load(file)["step"] == step


@pytest.mark.long
def test_two_programs_save_into_one_directory_and_over_one_path() -> None:
    program = (
        "import sys, torch\n"
        "from portus.engine.paths.process import save\n"
        "who = int(sys.argv[1])\n"
        "for step in range(15):\n"
        "    state = {'w': torch.full((50_000,), float(step)), 'step': step}\n"
        "    save(state, 'run/last.pt')\n"
        "    save(state, f'run/{who}-{step}.pt')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    programs = [
        subprocess.Popen([sys.executable, "-c", program, str(who)], env=environment)
        for who in range(2)
    ]
    assert [each.wait() for each in programs] == [0, 0]
    check("run/last.pt", 14)
    for who in range(2):
        for step in range(15):
            check(f"run/{who}-{step}.pt", step)
    assert len(os.listdir("run")) == 31, "nothing hidden is left"


def test_a_copy_while_files_are_saved_has_whole_files() -> None:
    over = threading.Event()
    found: list[int] = []

    def copies() -> None:
        number = 0
        while not over.is_set():
            number += 1
            with PENDING.exempt():  # as another program does it
                subprocess.run(["cp", "-r", "run", f"copy-{number}"], check=False, stderr=-3)
            for name in os.listdir(f"copy-{number}"):
                if name.endswith(".pt") and not name.startswith("."):
                    with zipfile.ZipFile(f"copy-{number}/{name}") as archive:
                        assert archive.testzip() is None
                    found.append(torch.load(f"copy-{number}/{name}")["step"])
            shutil.rmtree(f"copy-{number}")

    failed: list[BaseException] = []

    def run() -> None:
        try:
            copies()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for step in range(40):
        save(state(step), "run/last.pt")
        save(state(step), f"run/{step % 4}.pt").wait()
    over.set()
    thread.join()
    assert failed == []
    assert found
