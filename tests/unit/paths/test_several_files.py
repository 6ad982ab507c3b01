"""Files of one directory that are saved together: all of them are there, or none."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from portus.engine.directory.recovery import recover_directory
from portus.engine.job.settings import Settings
from portus.engine.loading.checkpoint_file import verify_file
from portus.engine.paths import process
from portus.engine.paths.process import load, saver
from portus.engine.paths.request import FileToSave
from portus.engine.pipeline.handle import SaveHandle
from portus.engine.pipeline.request import SaveRequest
from portus.engine.writer.image_file import ImageFile
from portus.errors import MediumError, UsageError
from portus.reach.formats.safetensors_file import NamedTensors
from portus.reach.training.training_files import TrainingFiles
from tests.crash.saver import Training
from tests.same import assert_same
from tests.unit.paths import killed_saves
from tests.warm import Warm, in_process

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only"),
    pytest.mark.usefixtures("own_saver"),
]


def save_all(directory: str, weights: dict[str, torch.Tensor], **files: Any) -> SaveHandle:
    """Weights as safetensors, and all else as torch files."""
    os.makedirs(directory, exist_ok=True)
    new = [FileToSave(f"{directory}/model.safetensors", NamedTensors(weights))]
    new += [FileToSave(f"{directory}/{name}.bin", state) for name, state in files.items()]
    return saver().save_files(new)


def visible(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != ".portus")


def test_a_training_saves_its_files_together_each_as_it_was_at_the_call() -> None:
    training = Training()
    for step in range(6):
        state = training.state()
        expected: dict[str, Any] = {
            "weights": {name: each.clone() for name, each in state["weights"].items()},
            "buffer": training._buffer.clone(),
            "moments": [each["momentum_buffer"].clone() for each in _moments(state)],
        }
        handle = save_all(f"c{step}", state["weights"], optimizer=state["optimizer"], rest=state)
        training.advance()
        training.advance()
        handle.wait()
        assert visible(f"c{step}") == ["model.safetensors", "optimizer.bin", "rest.bin"]
        assert_same(safetensors.torch.load_file(f"c{step}/model.safetensors"), expected["weights"])
        optimizer = load(f"c{step}/optimizer.bin", weights_only=False)
        found = [each["momentum_buffer"] for each in _moments({"optimizer": optimizer})]
        assert_same(found, expected["moments"])
        rest = load(f"c{step}/rest.bin", weights_only=False)
        assert torch.equal(rest["buffer"], expected["buffer"])
        for name in visible(f"c{step}"):
            verify_file(f"c{step}/{name}")


def _moments(state: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    return list(state["optimizer"]["state"].values())


def test_a_directory_that_is_saved_over_again_and_again_uses_its_space_again() -> None:
    inodes = []
    for step in range(6):
        weights = {"w": torch.full((300_000,), float(step))}
        save_all("last", weights, optimizer={"m": torch.full((500_000,), step)}, rest=[step]).wait()
        inodes.append({name: os.stat(f"last/{name}").st_ino for name in visible("last")})
        assert load("last/rest.bin") == [step]
        assert load("last/model.safetensors")["w"][-1] == step
        assert load("last/optimizer.bin")["m"][0] == step
    for name in inodes[0]:
        assert len({each[name] for each in inodes}) <= 3, f"{name} is written over"


def test_the_largest_files_of_a_removed_directory_are_used_again_wherever_they_are() -> None:
    frozen, kept = torch.rand(500_000), []
    for step in range(6):
        below = f"c{step}/engine/deeper"
        os.makedirs(below)
        files: list[tuple[str, Any]] = [("big.pt", [step, frozen]), ("small.pt", [step])]
        saves = [FileToSave(f"{below}/{name}", it) for name, it in files]
        extra = SaveRequest(base=os.path.abspath("."))
        handle = saver().save_files(saves, extra)
        saver().save_files([FileToSave(f"c{step}/a.pt", [step])], extra).wait()
        handle.wait()
        kept.append(handle.stats.shared_bytes)
        if step:
            saver().remove_directory(f"c{step - 1}", re.compile("small.*"))
        for name, it in files:
            assert_same(load(f"{below}/{name}"), it)
    assert kept == [0, 0, *[4 * len(frozen)] * 4]
    assert sorted(os.listdir(".")) == [".portus", "c5"]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_directory_that_cannot_be_removed_whole_is_no_checkpoint_any_more(
    monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    files = TrainingFiles(Settings(), of_directories=True, telling=r"state_\d+")
    os.makedirs("c0/deeper")
    for name, size in (("small", 1), ("deeper/state_1", 900), ("state_22", 800), ("big", 700)):
        Path(f"c0/{name}").write_bytes(bytes(size))
    removed, unlink = [], os.unlink

    def fail(path: str, **named: Any) -> None:
        if os.path.basename(path) == "small":
            raise OSError(5, "the disk")
        if "portus" not in path:
            removed.append(os.path.basename(path))
        unlink(path, **named)

    if is_open:
        files.open()
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fail)
        files.remove(os.path.abspath("c0"))
        files.wait()
    assert removed == ["state_22", "state_1"]
    assert os.path.exists("c0/big")
    files.close()


def test_files_that_cannot_be_saved_together_are_refused() -> None:
    for paths in (("a.pt", "a.pt"), ("a.pt", "./a.pt"), ("a.pt", "d/b.pt")):
        os.makedirs("d", exist_ok=True)
        with pytest.raises(UsageError, match="expected different files of one directory"):
            saver().save_files([FileToSave(path, {}) for path in paths])
    assert visible(".") == ["d"]


def test_a_save_that_fails_in_one_file_leaves_the_directory_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_all("last", {"w": torch.zeros(9)}, a=1, b=1).wait()
    before = {name: Path(f"last/{name}").read_bytes() for name in visible("last")}
    real, count = ImageFile.finish, iter(range(100))

    def finish(file: ImageFile) -> None:
        if next(count) == 1:
            raise MediumError(5, "the disk")
        real(file)

    monkeypatch.setattr(ImageFile, "finish", finish)
    with pytest.raises(MediumError, match="the disk"):
        save_all("last", {"w": torch.ones(9)}, a=2, b=2).wait()
    assert {name: Path(f"last/{name}").read_bytes() for name in visible("last")} == before
    saver().close()
    process._writers[0].publisher.close()
    assert os.listdir("last") == visible("last"), "nothing hidden is left"


def test_a_state_that_cannot_be_pickled_names_its_place_and_nothing_is_begun() -> None:
    with pytest.raises(UsageError, match=r"state\['f'\]: torch cannot save it"):
        save_all("last", {"w": torch.zeros(9)}, a={"f": lambda: 1})
    assert visible("last") == []


def test_a_load_of_any_of_them_waits_and_so_does_a_listing() -> None:
    save_all("last", {"w": torch.full((100_000,), 7.0)}, a=1)
    assert load("last/model.safetensors")["w"][0] == 7
    save_all("more", {"w": torch.full((100_000,), 7.0)}, a=1)
    assert visible("more") == ["a.bin", "model.safetensors"]


def test_a_signal_handler_writes_them_at_once() -> None:
    done = in_process(
        "import os, signal, torch\n"
        "from portus.engine.paths.process import saver\n"
        "from portus.engine.paths.request import OwnFormat, FileToSave\n"
        "from portus.engine.state.pickling import pickle_state\n"
        "def files(value):\n"
        "    return [FileToSave(f'{n}.pt', value) for n in 'abc']\n"
        "def handle(*_):\n"
        "    assert saver().save_files(files({'x': torch.ones(5)})).committed\n"
        "signal.signal(signal.SIGUSR1, handle)\n"
        "class Interrupted(OwnFormat):\n"
        "    def file_contents(self):\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "        return pickle_state({'x': torch.zeros(5)})\n"
        "late = saver().save_files(files(Interrupted()))\n"
        "late.join()\n"
        "print(*(torch.load(f'{n}.pt')['x'].sum().item() for n in 'abc'))\n"
    )
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 1, "not a mixture"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["new", "last"])
def test_after_a_kill_at_any_change_of_a_name_a_directory_is_whole(
    way: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the script removes the old directory while the new one is in flight."""
    count, source = KILLS_MAX, random.Random(seed)
    for number in [KILLS_MAX, *sorted(source.sample(range(1, 200), KILLS))]:
        if number > count:
            continue
        where = tmp_path / str(number)
        where.mkdir()
        monkeypatch.chdir(where)
        with Warm(killed_saves.__name__).start("run", str(where), number, way) as saves:
            # How many changes there are depends on who is faster: near the end there is no kill.
            assert saves.wait() in ((0,) if number == KILLS_MAX else (0, -signal.SIGKILL))
            count = int(saves.line()) if number == KILLS_MAX else count
        told = where / "told"
        least = int(told.read_text() or 0) if told.exists() else 0
        for each in directories():
            recover_directory(os.path.realpath(each))
        steps = []
        for each in directories():
            found = [torch.load(f"{each}/{name}") for name in visible(each)]
            assert len(found) in (0, 3), f"{number}: {each} has {visible(each)}"
            assert len({state["step"] for state in found}) <= 1, f"{number}: {each} is a mixture"
            assert ".portus" not in os.listdir(each)
            steps += [state["step"] for state in found]
        assert max(steps, default=0) >= least, f"{number}: {least} was told"
    assert count > 60


KILLS_MAX = 1_000_000
KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "20"))


def directories() -> list[str]:
    return [name for name in os.listdir() if name != "told"]
