"""``portus.Checkpointer`` on a directory: real files, numbered by their steps."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import portus
from portus.engine.copying.local import fetch
from portus.engine.files.queue import Errand
from portus.engine.loading import checkpoint_file, open_file
from portus.engine.loading.checkpoint_file import load_file
from portus.engine.paths import directory_steps, process
from portus.engine.paths.saver import FileSaver
from portus.engine.writer.image_file import ImageFile
from portus.reach.media.file import PlainFile
from tests.same import assert_same
from tests.unit.paths.programs import SLOW
from tests.warm import in_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

WAIT_S_MAX = 30.0


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PORTUS_POOL", raising=False)
    monkeypatch.setattr(process, "_savers", [])
    monkeypatch.setattr(process, "_writers", [])
    yield
    process._finish()


def state(step: int) -> dict[str, Any]:
    weight, bias = torch.full((1000,), float(step)), torch.arange(3) + step
    return {"step": step, "weight": weight, "bias": bias}


def save(directory: str, *steps: int, **settings: Any) -> None:
    with portus.Checkpointer(directory, **settings) as checkpointer:
        for step in steps:
            checkpointer.save(state(step), step).wait()


def files(directory: str = "run") -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != ".portus")


def damage(path: str, place: int | None = None) -> None:
    data = bytearray(Path(path).read_bytes())
    at = data.index(b"\x00\x00\x40\x40" * 8) if place is None else place
    data[at] ^= 1
    Path(path).write_bytes(data)


# What a user finds.


def test_each_checkpoint_is_a_file_that_stock_torch_reads_and_keep_removes_the_others() -> None:
    save("run", 1, 20, 300, 123456789)
    assert files() == ["step-00000300.pt", "step-123456789.pt"]
    program = "import sys; sys.modules['portus'] = None; import torch\n"
    for step in (300, 123456789):
        program += f"print(torch.load('run/step-{step:08}.pt')['step'])\n"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["300", "123456789"]


@pytest.mark.parametrize("journal", [True, False])
def test_nothing_hidden_stays_but_the_journal(journal: bool) -> None:
    save("run", 1, 2, 3, journal=journal)
    hidden = set(os.listdir("run/.portus")) if journal else None
    assert os.path.isdir("run/.portus") == journal
    assert hidden in (None, {"checkpoints.journal", ".gitignore", "CACHEDIR.TAG"})


def test_the_default_directory_is_made_by_the_first_save() -> None:
    with portus.Checkpointer() as checkpointer:
        assert checkpointer.steps() == []
        assert os.listdir() == []
        checkpointer.save(state(1), 1).wait()
        assert checkpointer.path == os.path.abspath("checkpoints")
    assert files("checkpoints") == ["step-00000001.pt"]


def test_what_torch_save_accepts_is_accepted() -> None:
    things = {"sparse": torch.eye(4).to_sparse(), "object": Thing(3), "set": {1, 2}}
    with portus.Checkpointer("run") as checkpointer:
        checkpointer.save(things, 1)
        found = checkpointer.load(weights_only=False)
    assert torch.equal(found["sparse"].to_dense(), torch.eye(4))
    assert found["object"].value == 3
    assert found["set"] == {1, 2}


class Thing:
    def __init__(self, value: int) -> None:
        self.value = value


# Which are kept, and which is the newest.


def test_metrics_are_in_the_file_and_the_best_stay() -> None:
    keep = portus.Keep(last=1, best=("loss", "min", 2))
    losses = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.3, 5: 0.7}
    for step, loss in losses.items():  # each in a run of its own, which knows only the files
        with portus.Checkpointer("run", keep=keep) as checkpointer:
            checkpointer.save(state(step), step, metrics={"loss": loss})
    assert files() == [f"step-{step:08}.pt" for step in (2, 4, 5)]
    found = portus.Checkpointer("run").versions()
    assert [(info.step, dict(info.metrics)) for info in found] == [
        (step, {"loss": losses[step]}) for step in (2, 4, 5)
    ]


def test_the_newest_is_the_one_that_was_saved_last_also_in_a_copy_with_other_times() -> None:
    save("run", 100, 200, 300, keep=None)
    save("run", 150, keep=None)  # a run that went back
    shutil.copytree("run", "copy")
    for number, name in enumerate(sorted(files(), reverse=True)):
        os.utime(f"copy/{name}", (number, number))
    for directory in ("run", "copy"):
        with portus.Checkpointer(directory) as checkpointer:
            assert checkpointer.steps() == [100, 200, 300, 150]
            assert checkpointer.load()["step"] == 150


def test_a_clock_that_goes_back_does_not_change_which_is_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save("run", 1)
    monkeypatch.setattr("time.time_ns", lambda: 1)
    save("run", 2, 3)
    assert portus.Checkpointer("run").steps() == [2, 3]


def test_what_keep_lets_go_of_is_gone_when_a_wait_for_the_save_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remove = FileSaver.remove

    def slowly(own: FileSaver, path: str) -> None:
        time.sleep(0.2)
        remove(own, path)

    monkeypatch.setattr(FileSaver, "remove", slowly)
    os.mkdir("there")
    os.symlink("there", "run")
    with portus.Checkpointer("run", keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(step), step).wait()
            assert files("there") == [f"step-{step:08}.pt"]


def test_a_removal_that_fails_fails_no_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(own: FileSaver, path: str) -> None:
        raise portus.MediumError(5, f"{path}: Input/output error")

    monkeypatch.setattr(FileSaver, "remove", refused)
    save("run", 1, 2, keep=1)
    assert files() == ["step-00000001.pt", "step-00000002.pt"]
    assert "more checkpoints than keep= says stay until the next commit" in caplog.text


def test_a_step_that_is_saved_again_is_replaced() -> None:
    with portus.Checkpointer("run") as checkpointer:
        checkpointer.save(state(5), 5)
        checkpointer.save(state(5) | {"again": True}, 5)
        assert checkpointer.load()["again"]
        assert checkpointer.steps() == [5]


def test_files_of_stock_torch_count_by_their_times_and_other_names_are_left_alone() -> None:
    os.mkdir("run")
    for name in ("step-1.pt", "step-00000001.pt.bak", "step-00000000009.pt", "last.pt"):
        torch.save(state(9), f"run/{name}")
    torch.save(state(1), "run/step-00000001.pt")
    os.utime("run/step-00000001.pt", (1, 1))
    save("run", 2, 3)
    assert set(files()) == {
        *("step-1.pt", "step-00000001.pt.bak", "step-00000000009.pt", "last.pt"),
        *("step-00000002.pt", "step-00000003.pt"),
    }
    torch.save(state(4), "run/step-00000004.pt")
    with portus.Checkpointer("run") as checkpointer:
        assert checkpointer.load()["step"] == 4


# Damage.


def flipped(path: str) -> None:
    damage(path)


def in_the_pickle(path: str) -> None:
    damage(path, 120)


def truncated(path: str) -> None:
    os.truncate(path, 700)


def emptied(path: str) -> None:
    os.truncate(path, 0)


def zeroed(path: str) -> None:
    Path(path).write_bytes(bytes(os.stat(path).st_size))


@pytest.mark.parametrize("harm", [flipped, in_the_pickle, truncated, emptied, zeroed])
def test_the_newest_that_verifies_is_loaded_and_a_step_by_name_raises(
    harm: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    save("run", 1, 2, 3, keep=None)
    harm("run/step-00000003.pt")
    with portus.Checkpointer("run", keep=None) as checkpointer:
        with caplog.at_level(logging.ERROR, "portus"):
            assert_same(checkpointer.load(), state(2))
        assert "step-00000003.pt" in caplog.text
        assert "FALLING BACK to" in caplog.text
        into = state(9)
        assert checkpointer.restore_into(into).version.step == 2
        assert_same(into, state(2))
        for act in (checkpointer.load, lambda step: checkpointer.restore_into(into, step)):
            with pytest.raises(portus.CorruptionError, match=r"run/step-00000003\.pt"):
                act(3)
        assert_same(into, state(2))
        assert checkpointer.steps() == [1, 2, 3]


def test_an_error_names_file_tensor_and_offset() -> None:
    save("run", 3)
    damage("run/step-00000003.pt")
    offset = Path("run/step-00000003.pt").read_bytes().index(b"\x00\x00\x40\x40" * 8) // 64 * 64
    words = rf"run/step-00000003\.pt: \['weight'\]: 4000 bytes at {offset} are not"
    with pytest.raises(portus.CorruptionError, match=words):
        portus.Checkpointer("run").load()


def test_with_nothing_that_verifies_the_damage_of_the_newest_is_raised() -> None:
    save("run", 1, 2)
    for name in files():
        truncated(f"run/{name}")
    with pytest.raises(portus.CorruptionError, match="step-00000002"):
        portus.Checkpointer("run").load()


def test_damaged_files_neither_count_nor_go() -> None:
    save("run", 1, 2, 3, keep=None)
    truncated("run/step-00000003.pt")
    save("run", 4, keep=2)
    assert files() == [f"step-{step:08}.pt" for step in (2, 3, 4)]


def test_a_file_that_could_not_be_read_once_counts_when_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save("run", 1, 2, keep=None)
    read_note, failed = checkpoint_file.read_note, list[str]()

    def failing_once(path: str) -> bytes | None:
        if not failed:
            failed.append(path)
            raise portus.MediumError(errno.EIO, "the disk does not answer")
        return read_note(path)

    monkeypatch.setattr(directory_steps, "read_note", failing_once)
    with portus.Checkpointer("run", keep=2) as checkpointer:
        checkpointer.save(state(3), 3).wait()
        checkpointer.save(state(4), 4).wait()
    assert failed
    assert files() == [f"step-{step:08}.pt" for step in (3, 4)]


def test_unverified_loads_are_a_setting() -> None:
    save("run", 3)
    damage("run/step-00000003.pt")
    with portus.Checkpointer("run", verify=False) as checkpointer:
        assert checkpointer.load()["weight"][-1] == 3
        into = state(3)
        checkpointer.restore_into(into)


# In place.


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 64))
    first, last = model[0], model[2]
    assert isinstance(first, nn.Linear)
    last.weight = nn.Parameter(first.weight.t())  # one memory, two views
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_a_training_is_restored_in_place() -> None:
    model, optimizer = trained()
    whole: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
    }
    with portus.Checkpointer("run") as checkpointer:
        checkpointer.save(whole, 3)
        expected = checkpointer.load()
        places = {name: tensor.data_ptr() for name, tensor in whole["model"].items()}
        with torch.no_grad():
            for tensor in whole["model"].values():
                tensor.zero_()
        whole["epoch"] = 0
        restored = checkpointer.restore_into(whole)
    assert (restored.missing, restored.unexpected, restored.version.step) == ((), (), 3)
    assert_same(whole, expected)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places


def test_parts_are_restored_by_patterns_and_other_names() -> None:
    save("run", 3)
    with portus.Checkpointer("run") as checkpointer:
        assert list(checkpointer.load(names="bias")) == ["bias"]
        into: dict[str, Any] = {"w": torch.zeros(1000), "step": 0}
        checkpointer.restore_into(into, names="weight", rename={"weight": "w"})
        assert into["step"] == 0
        assert torch.equal(into["w"], state(3)["weight"])
        halves = {"weight": torch.zeros(1000, dtype=torch.float16)}
        restored = checkpointer.restore_into(halves, strict=False)
        assert restored.unexpected == ("bias",)
        assert torch.equal(halves["weight"], state(3)["weight"].half())
        turned = {"weight": torch.zeros(2, 1000).t()[:, 0], "bias": torch.zeros(3).long()}
        checkpointer.restore_into(turned | {"step": 0})
        assert torch.equal(turned["weight"], state(3)["weight"])


def test_what_does_not_fit_changes_nothing() -> None:
    save("run", 3)
    into = state(9) | {"bias": torch.arange(9)}
    with (
        portus.Checkpointer("run") as checkpointer,
        pytest.raises(portus.UsageError, match="size mismatch for bias: the version has") as said,
    ):
        checkpointer.restore_into(into)
    assert "step-00000003.pt does not fit the state" in str(said.value)
    assert_same(into, state(9) | {"bias": torch.arange(9)})


def test_a_file_of_stock_torch_is_restored_in_place() -> None:
    os.mkdir("run")
    torch.save(state(2), "run/step-00000002.pt")
    torch.save(state(3), "run/step-00000003.pt", _use_new_zipfile_serialization=False)
    with portus.Checkpointer("run") as checkpointer:
        for step in (2, 3):
            into = state(step) | {"weight": torch.zeros(1000)}
            checkpointer.restore_into(into, step)
            assert_same(into, state(step))


def test_an_array_that_takes_the_memory_of_a_tensor_that_loading_dropped_is_its_own() -> None:
    array = np.arange(1 << 20, dtype=np.int32)
    whole = {"dropped": Dropped(torch.ones(1 << 20)), "array": array}
    with portus.Checkpointer("run") as checkpointer:
        checkpointer.save(whole, 1)
        into: dict[str, Any] = {"dropped": 0, "array": np.zeros(1 << 20, np.int32)}
        checkpointer.restore_into(into, weights_only=False)
    assert np.array_equal(into["array"], array)


class Dropped:
    """Comes back as a number: the tensor that it was made with goes when the load is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.numel, (self.tensor,)


class Config:
    """An object that only torch's own rules can make, with a tensor in it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tensor = torch.full((3,), float(number))


def odd_state(number: int) -> dict[str, Any]:
    return {
        "weight": torch.full((4,), float(number)),
        "config": Config(number),
        "rows": [Config(number), torch.full((2,), float(number)), number],
        "pair": (Config(number), number),
        "sparse": torch.eye(3).to_sparse() * number,
    }


def test_objects_and_tensors_of_any_kind_are_restored_beside_those_in_place() -> None:
    with portus.Checkpointer("run") as checkpointer:
        checkpointer.save(odd_state(1), 1)
        into = odd_state(9)
        weight, row, sparse = into["weight"], into["rows"][1], into["sparse"]
        restored = checkpointer.restore_into(into, weights_only=False)
        assert restored.missing == restored.unexpected == ()
        part = odd_state(9)
        checkpointer.restore_into(part, weights_only=False, names="weight")
    assert into["weight"] is weight
    assert into["rows"][1] is row
    assert into["sparse"] is sparse
    assert torch.equal(weight, torch.ones(4))
    assert torch.equal(row, torch.ones(2))
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    for config in (into["config"], into["rows"][0], into["pair"][0]):
        assert config.number == 1
        assert torch.equal(config.tensor, torch.ones(3))
    assert (into["rows"][2], into["pair"][1]) == (1, 1)
    assert part["config"].number == 9
    assert torch.equal(part["weight"], torch.ones(4))


def test_a_damaged_file_with_such_objects_leaves_the_state_as_it_was() -> None:
    with portus.Checkpointer("run") as checkpointer:
        checkpointer.save(odd_state(1), 1).wait()
        path = Path("run/step-00000001.pt")
        data = bytearray(path.read_bytes())
        at = data.index(torch.ones(4).numpy().tobytes())
        data[at] ^= 1
        path.write_bytes(data)
        into = odd_state(9)
        with pytest.raises(portus.CorruptionError):
            checkpointer.restore_into(into, weights_only=False)
    assert into["config"].number == 9
    assert torch.equal(into["weight"], torch.full((4,), 9.0))


def test_a_part_of_a_file_is_read_for_a_part_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    save("run", 3)
    read: list[int] = []
    real = fetch

    def noted(file: Any, sources: Any, stop: Any) -> Any:
        read.extend(sources.length.tolist())
        return real(file, sources, stop)

    monkeypatch.setattr(open_file, "fetch", noted)
    portus.Checkpointer("run").restore_into({"bias": torch.zeros(3).long()}, names="bias")
    assert read == [24]


# While it runs.


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves wait before their file is complete, until this is set."""
    go_on = threading.Event()
    real = ImageFile.finish

    def finish(file: ImageFile) -> None:
        assert go_on.wait(WAIT_S_MAX)
        real(file)

    monkeypatch.setattr(ImageFile, "finish", finish)
    yield go_on
    go_on.set()


def test_steps_are_the_committed_ones_and_loads_wait_here_and_in_another_process(
    held: threading.Event,
) -> None:
    program = (
        "import portus, torch; run = portus.Checkpointer('run'); run.steps(); "
        "print('ready', flush=True); input(); print(run.load()['step'])"
    )
    checkpointer = portus.Checkpointer("run")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        checkpointer.save(state(7), 7)
        assert checkpointer.steps() == []
        other.stdin.write("\n")
        other.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        with pytest.raises(TimeoutError):
            checkpointer.wait(0.05)
        threading.Timer(0.2, held.set).start()
        assert checkpointer.load()["step"] == 7
        assert other.stdout.readline().strip() == "7"
    checkpointer.close()


def test_a_fence_waits_until_the_copy_is_done_and_the_file_is_the_state_at_the_call() -> None:
    model, optimizer = trained()
    with portus.Checkpointer("run") as checkpointer:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        checkpointer.save(model.state_dict(), 1)
        checkpointer.fence()
        with torch.no_grad():
            next(model.parameters()).zero_()
        checkpointer.save({"optimizer": optimizer.state_dict()}, 2)
        optimizer.step()
        assert_same(dict(checkpointer.load(1)), before)


def test_a_restore_waits_for_a_save_elsewhere_that_reads_the_same_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = trained()
    go_on, copy = threading.Event(), ImageFile.copy

    def held_back(own: ImageFile, *arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(WAIT_S_MAX)
        return copy(own, *arguments)

    with portus.Checkpointer("run") as checkpointer:
        checkpointer.save(model.state_dict(), 1).wait()
        optimizer.step()
        now = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        monkeypatch.setattr(ImageFile, "copy", held_back)
        handle = portus.save(model.state_dict(), "other.pt")
        threading.Timer(0.3, go_on.set).start()
        checkpointer.restore_into(model.state_dict())
        handle.wait()
    assert_same(dict(torch.load("other.pt")), now)


def test_a_program_that_does_not_close_it_finishes_its_saves() -> None:
    program = (
        "import portus, torch\n"
        "checkpointer = portus.Checkpointer('run', journal=False)\n"
        "for step in range(1, 4):\n"
        "    checkpointer.save({'step': step, 'x': torch.zeros(1 << 20)}, step)\n"
    )
    in_process(program).check_returncode()
    assert sorted(os.listdir("run")) == ["step-00000002.pt", "step-00000003.pt"]


def test_what_a_signal_handler_saves_has_its_metrics_and_verifies() -> None:
    done = in_process(
        SLOW + "import signal, torch, portus\n"
        "checkpointer = portus.Checkpointer('run')\n"
        "state = {'weight': torch.ones(1000), 'size': torch.Size([3])}\n"
        "def handler(number, frame):\n"
        "    assert checkpointer.save(state, 2, metrics={'loss': 0.5}).done\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "checkpointer.save(state, 1).wait()\n"
    )
    assert done.returncode == 0, done.stderr
    with portus.Checkpointer("run") as checkpointer:
        assert [(each.step, each.metrics) for each in checkpointer.versions()] == [
            (1, {}),
            (2, {"loss": 0.5}),
        ]
    damage("run/step-00000002.pt", 2000)
    with pytest.raises(portus.CorruptionError, match=r"weight"):
        load_file("run/step-00000002.pt")


def test_two_in_one_directory_do_not_disturb_each_other() -> None:
    with portus.Checkpointer("run", keep=None) as one, portus.Checkpointer("run", keep=None) as two:
        for step in range(1, 9):
            (one if step % 2 else two).save(state(step), step)
    assert portus.Checkpointer("run").steps() == list(range(1, 9))


def test_a_checkpoint_that_is_removed_while_it_is_looked_at_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save("run", 1, 2)

    def removed_first(path: str, *arguments: Any, **settings: Any) -> Any:
        if path.endswith("2.pt") and os.path.exists(path):
            os.remove(path)
        return load_file(path, *arguments, **settings)

    monkeypatch.setattr(directory_steps, "load_file", removed_first)
    assert portus.Checkpointer("run").load()["step"] == 1


def test_a_failed_save_leaves_the_others_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with portus.Checkpointer("run") as checkpointer:
        checkpointer.save(state(1), 1).wait()
        shutil.move("run", "gone")
        Path("run").write_text("in the way")
        with pytest.raises(portus.PortusError):
            checkpointer.save(state(2), 2)
        os.remove("run")
        shutil.move("gone", "run")
        checkpointer.save(state(3), 3).wait()
    assert files() == ["step-00000001.pt", "step-00000003.pt"]


# Bad input.


def test_bad_input_is_an_error_at_the_call_that_leaves_nothing_behind() -> None:
    Path("file").write_text("text")
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: portus.Checkpointer("file"), "expected a directory for checkpoints, found a file"),
        (lambda: portus.Checkpointer("run", "gpt"), "one run; found 'gpt'"),
        (lambda: portus.Checkpointer("run", max_bytes=1 << 30), "keep= says how many"),
        (lambda: portus.Checkpointer("run", durable=2), "only storage hosts"),
        (lambda: portus.Checkpointer("run", mirror="portus://h:1"), "a storage host is no mirror"),
        (lambda: portus.Checkpointer("run", keep=0), "expected at least 1"),
        (lambda: portus.Checkpointer("run", guard="never"), "guard"),  # type: ignore[arg-type]
        (lambda: portus.Checkpointer("run").save({}, -1), "expected 0 or more, found -1"),
        (lambda: portus.Checkpointer("run").save({}, "x"), "expected an integer"),  # type: ignore[arg-type]
        (lambda: portus.Checkpointer("run").save({"f": lambda: 0}, 1), r"\['f'\]"),
        (lambda: portus.Checkpointer("run").save({}, 1, metrics={"x": "y"}), "expected a number"),  # type: ignore[dict-item]
        (lambda: portus.Checkpointer("run").load(), "there is no checkpoint; nothing was saved"),
        (lambda: portus.Checkpointer("run").load(5), "there is no checkpoint"),
    ]
    for call, words in calls:
        with pytest.raises(portus.UsageError, match=words) as caught:
            call()
        # Who catches that starts afresh.
        assert isinstance(caught.value, portus.NoCheckpointError) == ("no checkpoint" in words)
    assert os.listdir() == ["file"]


@pytest.mark.parametrize("place", ["run", "run.portus"])
def test_a_save_keeps_a_checkpointer_that_nobody_holds(place: str) -> None:
    """So a save by one that is made for it alone returns at once."""
    checkpointer = portus.Checkpointer(place)
    watched = weakref.ref(checkpointer)
    handle = checkpointer.save(state(1), 1)
    del checkpointer
    assert watched() is not None
    handle.wait()
    cast("portus.Checkpointer", watched()).close()


def test_a_closed_one_and_a_forked_one_say_so() -> None:
    checkpointer = portus.Checkpointer("run")
    checkpointer.save(state(1), 1)
    program = (
        "import os, portus\n"
        "c = portus.Checkpointer('other')\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        c.save({}, 1)\n"
        "    except portus.UsageError as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    told = in_process(program)
    assert "another process opened this Checkpointer; open one here" in told.stdout
    checkpointer.close()
    checkpointer.close()
    for act in (checkpointer.load, checkpointer.steps, lambda: checkpointer.save({}, 2)):
        with pytest.raises(portus.UsageError, match="this Checkpointer is closed"):
            act()


def test_a_pool_file_and_a_host_are_pools_as_before() -> None:
    with portus.Checkpointer("run.portus", "gpt") as checkpointer:
        checkpointer.save(state(1), 1)
        assert_same(checkpointer.load(), state(1))
        with pytest.raises(portus.UsageError, match="takes map_location and weights_only"):
            checkpointer.load(mmap=True)
    assert os.path.isfile("run.portus")


def test_a_listing_reads_little_of_the_files_and_nothing_of_those_just_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = {str(number): torch.zeros(20_000) for number in range(50)}
    read: list[int] = []
    load = PlainFile.load

    def noted(own: PlainFile, offset: int, target: memoryview) -> None:
        read.append(len(target))
        load(own, offset, target)

    monkeypatch.setattr(PlainFile, "load", noted)
    with portus.Checkpointer("run", keep=2) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(weights, step)
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4]
    assert read == []
    assert portus.Checkpointer("run").steps() == [3, 4]
    assert len(read) < 20
    assert sum(read) < 20_000


def test_one_that_ends_on_the_worker_waits_for_nobody_who_waits_for_the_worker(
    tmp_path: Path,
) -> None:
    """The garbage collector may end a ``Checkpointer`` on any thread."""
    ended = threading.Event()

    def end() -> None:
        process.leave(forgotten)
        ended.set()

    forgotten = portus.Checkpointer(tmp_path / "run")
    with process._making:  # as whoever closes the writer, until the worker has ended
        process.saver().shared.queue.put(Errand(end))
        assert ended.wait(WAIT_S_MAX)
    forgotten.close()
