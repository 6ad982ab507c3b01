"""``portus.save`` and ``portus.load``: what a user sees of them."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from portus.engine.files.pending import PENDING
from portus.engine.paths import process
from portus.engine.paths.process import load, save
from portus.engine.pipeline.audit import Auditor
from portus.engine.pipeline.request import SaveRequest
from portus.engine.pipeline.run import Save
from portus.engine.writer.image_file import ImageFile
from portus.errors import AbandonedError, CorruptionError, MediumError, UsageError
from tests.crash.saver import Training
from tests.same import assert_same
from tests.unit.paths.programs import SLOW
from tests.warm import in_process

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only"),
    pytest.mark.usefixtures("own_saver"),
]

WAIT_S_MAX = 30.0


class Held:
    """Saves wait before their file is complete, while this is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        real = ImageFile.finish

        def finish(file: ImageFile) -> None:
            assert self.open.wait(WAIT_S_MAX)
            real(file)

        monkeypatch.setattr(ImageFile, "finish", finish)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.open.set()


def visible() -> list[str]:
    return sorted(name for name in os.listdir() if name != ".portus")


def without_portus(program: str) -> str:
    """What a program prints in a process that has torch and no Portus."""
    blocked = "import sys; sys.modules['portus'] = None\n"
    result = subprocess.run(
        [sys.executable, "-c", blocked + program],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_file_is_that_of_torch_save_byte_for_byte_through_its_last_storage() -> None:
    state = Training(3).state()
    save(state, "run.pt").wait()
    os.mkdir("stock")
    torch.save(state, "stock/run.pt")
    ours, stock = Path("run.pt").read_bytes(), Path("stock/run.pt").read_bytes()
    with zipfile.ZipFile("stock/run.pt") as archive:
        tail = archive.getinfo("run/version").header_offset
    assert ours[:tail] == stock[:tail]
    assert len(ours) > tail


def test_a_process_without_portus_reads_it_in_every_way_of_torch() -> None:
    save({"w": torch.arange(1000.0), "step": 7, "name": "x"}, "run.pt").wait()
    out = without_portus(
        "import torch, zipfile\n"
        "for how in ({}, {'weights_only': True}, {'mmap': True}, {'map_location': 'cpu'}):\n"
        "    found = torch.load('run.pt', **how)\n"
        "    print(float(found['w'].sum()), found['step'], found['name'])\n"
        "print(torch.load('run.pt', map_location='meta')['w'].shape)\n"
        "print(zipfile.ZipFile('run.pt').testzip())\n"
    )
    assert out.splitlines() == ["499500.0 7 x"] * 4 + ["torch.Size([1000])", "None"]


def test_each_save_is_the_state_at_its_call_while_training_goes_on() -> None:
    training = Training()
    handles = []
    for step in range(1, 21):
        training.advance()
        handles.append(save(training.state(), f"{step}.pt"))
    for step, handle in enumerate(handles, 1):
        assert handle.wait().size > 0
        assert_same(load(f"{step}.pt", weights_only=False), Training(step).state())
    assert visible() == sorted(f"{step}.pt" for step in range(1, 21))


def test_until_the_commit_there_is_nothing_or_the_previous_file(held: Held) -> None:
    handle = save({"step": 1}, "run.pt")
    assert not os.path.exists("run.pt")
    held.open.set()
    handle.wait()
    held.open.clear()
    before = Path("run.pt").read_bytes()
    handle = save({"step": 2}, "run.pt")
    with PENDING.exempt():
        assert Path("run.pt").read_bytes() == before
    held.open.set()
    handle.wait()
    assert load("run.pt") == {"step": 2}


def test_more_small_saves_than_two_are_in_flight_and_appear_in_order(held: Held) -> None:
    handles = [save({"part": part}, f"{part}.pt") for part in range(8)]
    assert not any(handle.done for handle in handles)
    held.open.set()
    for part, handle in enumerate(handles):
        handle.wait()
        assert all(other.done for other in handles[:part])
        assert load(f"{part}.pt") == {"part": part}


def test_a_load_waits_for_the_save_and_so_does_python_code(held: Held) -> None:
    save({"step": 1}, "run.pt")
    threading.Timer(0.2, held.open.set).start()
    assert load("run.pt") == {"step": 1}
    held.open.clear()
    save({"step": 2}, "run.pt")
    threading.Timer(0.2, held.open.set).start()
    assert torch.load("run.pt") == {"step": 2}


def test_memory_gets_huge_pages_behind_a_save_until_another_one_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def steps(auditor: Auditor) -> Iterator[None]:
        until_s = time.monotonic() + WAIT_S_MAX
        begun.set()
        while time.monotonic() < until_s:
            time.sleep(0.001)
            yield
        ended.set()

    monkeypatch.setattr(Auditor, "use_huge_pages", steps)
    save([1], "a.pt")
    assert begun.wait(WAIT_S_MAX)
    assert not ended.is_set(), "the save is over, and nothing waits"
    monkeypatch.setattr(Auditor, "use_huge_pages", lambda auditor: iter(()))
    save([2], "b.pt").wait()
    assert not ended.is_set()


def test_links_are_followed_and_modes_are_kept() -> None:
    os.mkdir("disk")
    os.symlink("disk/real.pt", "link.pt")
    old = os.umask(0o027)
    try:
        save({"step": 1}, "link.pt").wait()
        assert os.path.islink("link.pt")
        assert os.stat("disk/real.pt").st_mode & 0o777 == 0o640
        os.chmod("disk/real.pt", 0o604)
        for step in (2, 3, 4):  # one of them goes into a spare
            save({"step": step}, "link.pt").wait()
            assert os.stat("disk/real.pt").st_mode & 0o777 == 0o604
    finally:
        os.umask(old)
    assert load("link.pt") == {"step": 4}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("there", "expected the path of a file to write, found a directory"),
        ("new/", "expected the path of a file to write, found a directory"),
        ("none/run.pt", "there is no directory .*none; create it first"),
        ("file/run.pt", "there is no directory .*file; create it first"),
        ("fifo", "found not a regular file"),
        ("/dev/full", "found not a regular file"),
        ("", "expected the path of a file"),
        ("a\0b", "expected the path of a file"),
        (b"bytes.pt", "expected the path of a file, as text"),
        (io.BytesIO(), "torch.save writes to file objects"),
        (None, "expected the path of a file"),
    ],
)
def test_a_path_that_no_file_can_be_put_at_is_an_error_at_the_call(path: Any, words: str) -> None:
    os.mkdir("there")
    os.mkfifo("fifo")
    Path("file").write_text("x")
    before = sorted(os.listdir())
    with pytest.raises(UsageError, match=words):
        save({}, path)
    assert sorted(os.listdir()) == before


def test_a_name_of_255_bytes_is_saved_and_one_of_256_is_an_error_at_the_call() -> None:
    for name in ("x" * 252 + ".pt", "é" * 126 + ".pt", "\udcff" * 252 + ".pt"):
        save({"name": 1}, name).wait()
        assert load(name) == {"name": 1}
        os.remove(name)
    with pytest.raises(MediumError, match="File name too long"):
        save({}, "x" * 253 + ".pt")
    assert visible() == []


def test_a_link_that_leads_to_itself_is_an_error_at_the_call() -> None:
    os.symlink("round.pt", "round.pt")
    with pytest.raises(MediumError, match=r"^\[Errno \d+\] round\.pt: Too many levels"):
        save({}, "round.pt")
    assert os.readlink("round.pt") == "round.pt"
    assert os.listdir() == ["round.pt"]


def test_an_error_at_a_hidden_file_says_in_which_directory_it_is() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(MediumError, match=re.escape(f"{os.getcwd()}/.portus/")):
            save({}, "run.pt").wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write all")
def test_a_directory_without_permission_is_an_error_at_the_call() -> None:
    os.mkdir("locked", 0o555)
    with pytest.raises(MediumError, match="Permission denied"):
        save({}, "locked/run.pt")
    assert os.listdir("locked") == []


def test_what_torch_cannot_pickle_is_an_error_at_the_call_that_names_it() -> None:
    with pytest.raises(UsageError, match=r"state\['model'\]\[1\]"):
        save({"model": [1, lambda: None]}, "run.pt")
    assert os.listdir() == []


def test_a_save_that_fails_leaves_the_old_file_and_the_next_one_succeeds() -> None:
    save({"w": torch.zeros(1000)}, "run.pt").wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        handle = save({"w": torch.ones(1 << 20)}, "run.pt")
        with pytest.raises(MediumError) as raised:
            handle.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert raised.value.errno == errno.EFBIG
    assert "run.pt" in str(raised.value)
    assert torch.equal(load("run.pt")["w"], torch.zeros(1000))
    save({"w": torch.ones(1 << 20)}, "run.pt").wait()
    assert torch.equal(load("run.pt")["w"], torch.ones(1 << 20))


def test_a_failure_that_nobody_waits_for_is_told_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(file: ImageFile) -> None:
        raise MediumError(errno.EIO, "run.pt: the disk")

    with monkeypatch.context() as patched:
        patched.setattr(ImageFile, "finish", fails)
        save({}, "run.pt")
        process._savers[0].shared.queue.catch_up()
        with pytest.raises(MediumError, match="the disk"):  # nothing was saved ever
            save({}, "run.pt")
    save({}, "run.pt").wait()
    with monkeypatch.context() as patched:
        patched.setattr(ImageFile, "finish", fails)
        save({}, "run.pt")
        process._savers[0].shared.queue.catch_up()
    with caplog.at_level(logging.WARNING, logger="portus"):
        save({}, "run.pt").wait()
    assert "a save failed; training continues: [Errno 5] run.pt: the disk" in caplog.text


def test_ctrl_c_while_a_save_begins_leaves_nothing_that_is_awaited_and_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Save, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save({"x": torch.ones(5)}, "run.pt")
    assert PENDING._tickets == ()
    save({}, "run.pt").wait()


def test_a_tensor_that_nobody_guards_is_never_saved_half_written(held: Held) -> None:
    """The audit sees a write by hand, or the file has the state at the call."""
    weight = torch.nn.Parameter(torch.zeros(1 << 18))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    for step in range(6):
        optimizer.step()
        expected = weight.detach().clone()
        handle = save({"w": weight}, f"{step}.pt")
        weight.data.mul_(-1)
        held.open.set()
        handle.join()
        if handle.committed:
            assert torch.equal(load(f"{step}.pt")["w"].detach(), expected)
        else:
            with pytest.raises(AbandonedError, match=r"\['w'\]"):
                handle.wait()


def test_a_damaged_byte_is_an_error_that_names_the_tensor() -> None:
    save({"model": {"w": torch.arange(5000.0)}}, "run.pt").wait()
    data = bytearray(Path("run.pt").read_bytes())
    place = data.index(torch.arange(5000.0).numpy().tobytes()) + 9999
    data[place] ^= 1
    Path("run.pt").write_bytes(data)
    with pytest.raises(CorruptionError, match=r"run\.pt.*\['model'\]\['w'\]|run\.pt.*model\.w"):
        load("run.pt")


def test_a_file_of_stock_torch_loads_unverified() -> None:
    torch.save({"step": 1}, "stock.pt")
    assert load("stock.pt") == {"step": 1}


def saving(program: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a program that saves."""
    begin = (
        "import os, signal, sys, threading, torch\n"
        "from portus.engine.paths import process\n"
        "from portus.engine.paths.process import load, save\n"
        "from portus.engine.writer.image_file import ImageFile\n"
        "import time\n"
    )
    return in_process(begin + program)


def test_the_exit_of_the_process_finishes_what_is_in_flight_and_leaves_nothing_hidden() -> None:
    done = saving(SLOW + "for step in range(3): save({'step': step}, f'{step}.pt')\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert [load(f"{step}.pt") for step in range(3)] == [{"step": step} for step in range(3)]
    assert sorted(os.listdir()) == ["0.pt", "1.pt", "2.pt"]


@pytest.mark.parametrize("first", ["save({}, 'first.pt')\n", ""])
def test_a_save_in_a_handler_of_the_exit_is_finished(first: str) -> None:
    """The handler runs after that of Portus, which finishes the saves before it."""
    done = saving(
        SLOW + "import atexit\n"
        "atexit.register(lambda: save({'by': 'handler'}, 'late.pt'))\n" + first
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert load("late.pt") == {"by": "handler"}
    assert sorted(os.listdir()) == ["first.pt", "late.pt"] if first else ["late.pt"]


@pytest.mark.parametrize(
    "call", ["save({'by': 'handler'}, '1.pt')", "Checkpointer('.').save({'by': 'handler'}, 1)"]
)
def test_a_save_in_the_very_last_handler_of_the_exit_is_finished(call: str) -> None:
    """It is older than the import of torch, so nothing of Portus runs after it."""
    program = f"import atexit\natexit.register(lambda: portus.{call})\nimport torch, portus\n{SLOW}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert load("1.pt" if call.startswith("save") else "step-00000001.pt") == {"by": "handler"}


@pytest.mark.parametrize(
    "call", ["save(state, 'step-00000001.pt')", "portus.Checkpointer('.').save(state, 1)"]
)
def test_the_end_of_a_child_of_multiprocessing_finishes_its_saves(call: str) -> None:
    """Such a child runs no handlers of the exit."""
    done = saving(
        SLOW + "import multiprocessing, portus\n"
        "def train(state):\n"
        f"    {call}\n"
        "save({}, 'parent.pt')\n"
        "child = multiprocessing.get_context('fork').Process(target=train, args=[{'step': 1}])\n"
        "child.start()\n"
        "child.join()\n"
        "assert child.exitcode == 0\n"
        "print(os.path.exists('step-00000001.pt'))\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert load("step-00000001.pt") == {"step": 1}


def test_an_exit_after_a_failed_save_says_so() -> None:
    done = saving(
        "from portus.errors import MediumError\n"
        "def finish(file): raise MediumError(5, 'run.pt: the disk')\n"
        "ImageFile.finish = finish\n"
        "save({}, 'run.pt')\n"
    )
    assert "a save failed: [Errno 5] run.pt: the disk" in done.stderr
    assert os.listdir() == []


def test_a_forked_child_waits_for_nobody_and_saves_by_itself() -> None:
    done = saving(
        SLOW + "save({'who': 'parent'}, 'parent.pt')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    save({'who': 'child'}, 'child.pt').wait()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert load("parent.pt") == {"who": "parent"}
    assert load("child.pt") == {"who": "child"}
    assert sorted(os.listdir()) == ["child.pt", "parent.pt"]


def test_a_signal_handler_writes_at_once_and_the_save_that_it_interrupted_does_not_replace_it() -> (
    None
):
    done = saving(
        SLOW + "def handler(number, frame):\n"
        "    handle = save({'by': 'handler'}, 'run.pt')\n"
        "    assert handle.done\n"
        "    assert torch.load('run.pt') == {'by': 'handler'}\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "handle = save({'by': 'loop'}, 'run.pt')\n"
        "try:\n"
        "    handle.wait()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__)\n"
        "print(torch.load('run.pt')['by'])\n"
    )
    assert done.stdout.split() == ["AbandonedError", "handler"], done.stderr
    assert "run/.portus/digests" in zipfile.ZipFile("run.pt").namelist()
    assert os.listdir() == ["run.pt"]


def test_ctrl_c_in_a_wait_leaves_the_save_in_flight() -> None:
    done = saving(
        SLOW + "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "handle = save({'step': 1}, 'run.pt')\n"
        "try:\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "    handle.wait()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', handle.done)\n"
        "print(handle.wait().size)\n"
    )
    assert done.stdout.split() == ["interrupted", "False", "0"], done.stderr


def test_blocking_is_a_setting_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTUS_BLOCKING", "1")
    assert save({"step": 1}, "run.pt").committed
    monkeypatch.setenv("PORTUS_BLOCKING", "0")
    assert save({"step": 1}, "other.pt", wait=True).committed


def test_threads_save_at_once(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    def loop(who: int) -> None:
        for step in range(10):
            save({"who": who, "w": torch.full((3000,), float(step))}, f"{who}.pt")
        assert float(load(f"{who}.pt")["w"][0]) == 9.0

    threads = [threading.Thread(target=run, args=(lambda who=who: loop(who),)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_kill_loses_two_steps_of_a_training_at_most_however_small_they_are(held: Held) -> None:
    training = process.saver()
    for step in (1, 2):
        for name in ("best", "last"):
            training.save({"step": step}, f"{name}-{step}.pt", SaveRequest(step=step))
    third = threading.Thread(target=training.save, args=({}, "best-3.pt", SaveRequest(step=3)))
    third.start()
    third.join(0.5)
    assert third.is_alive(), "two steps are not over yet"
    held.open.set()
    third.join(WAIT_S_MAX)
    assert not third.is_alive()
    training.wait()
    assert len(visible()) == 5
