"""Everything that ``save_state`` saves, and ``load_state`` loads, in one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator, checkpointing
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from safetensors import safe_open
from torch.utils.data import DataLoader, TensorDataset

import portus
import portus_accelerate
from portus.engine.fence import fence, snapshot
from portus.engine.fence.snapshot import copy_order
from portus.engine.files.pending import PENDING
from portus.engine.writer.image_file import ImageFile
from portus_accelerate import patch, resume, settings
from tests.hosts import serving, url
from tests.warm import Warm

FILES = [
    "custom_checkpoint_0.pkl",
    "model.safetensors",
    "model_1.safetensors",
    "optimizer.bin",
    "optimizer_1.bin",
    "random_states_0.pkl",
    "scheduler.bin",
]
"""What Accelerate itself writes."""


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.more: object = None

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "more": self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.more = state["count"], state["more"]


SCENES: list[Scene] = []


class Scene:
    """Two models, two optimizers, a schedule, a counter; ``on``: with Portus."""

    def __init__(
        self,
        root: Path,
        *,
        on: bool = True,
        on_error: Any = "warn",
        max_bytes: int | None = None,
        every: str | int | None = None,
        **project: Any,
    ) -> None:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        configuration = ProjectConfiguration(project_dir=str(root), **project)
        self.accelerator = Accelerator(cpu=True, project_config=configuration)
        if on:
            portus_accelerate.enable(
                self.accelerator,
                model="net",
                on_error=on_error,
                max_bytes=max_bytes,
                every=every,
            )
        self.models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
        self.optimizers: Any = [torch.optim.AdamW(model.parameters()) for model in self.models]
        self.schedule: Any = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1)
        self.counter = Counter()
        data: Any = DataLoader(TensorDataset(torch.rand(8, 4)))
        prepared = self.accelerator.prepare(*self.models, *self.optimizers, self.schedule, data)
        self.models, self.optimizers = list(prepared[:2]), list(prepared[2:4])
        self.schedule = prepared[4]
        self.accelerator.register_for_checkpointing(self.counter)
        SCENES.append(self)

    def step(self) -> None:
        self.accelerator.backward(self.models[1](self.models[0](torch.rand(3, 4))).sum())
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.schedule.step()
        self.counter.count += 1

    def wait(self) -> None:
        portus_accelerate.wait(self.accelerator)

    def facts(self) -> list[torch.Tensor]:
        moments = [o.state_dict()["state"][0]["exp_avg"] for o in self.optimizers]
        weights = [value for model in self.models for value in model.state_dict().values()]
        numbers = [float(self.counter.count), float(self.schedule.get_last_lr()[0])]
        return [each.clone() for each in (*weights, *moments, torch.tensor(numbers))]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while SCENES:
        saver = getattr(SCENES.pop().accelerator, "_portus_saver", None)
        if saver is not None:
            with contextlib.suppress(portus.PortusError):
                saver._files.close()
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_an_accelerator_is_copied_and_pickled_as_stock_is(tmp_path: Path, copied: Any) -> None:
    scene = Scene(tmp_path)
    scene.accelerator.save_state(str(tmp_path / "one"))
    made = copied(scene.accelerator)
    made.save_state(str(tmp_path / "two"))
    portus_accelerate.wait(made)
    assert sorted(os.listdir(tmp_path / "two")) == FILES
    for each in (made, scene.accelerator):
        each.end_training()
    assert torch.load(tmp_path / "two" / "optimizer.bin")["param_groups"]


class Tied(torch.nn.Module):
    """Two names for one weight, and a view that is not contiguous in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("turned", torch.rand(3, 5).t())


@pytest.mark.parametrize("safe", [True, False])
def test_files_are_those_that_stock_writes(tmp_path: Path, safe: bool) -> None:
    found, names = {}, {}
    for on in (False, True):
        scene = Scene(tmp_path / str(on), on=on)
        torch.manual_seed(1)
        model = scene.accelerator.prepare(Tied())
        home = tmp_path / str(on) / "one"
        scene.accelerator.save_state(str(home), safe_serialization=safe)
        scene.accelerator.end_training()
        names[on] = sorted(os.listdir(home))
        assert {f"{name}.{'safetensors' if safe else 'bin'}" for name in MODELS[safe]} == {
            name for name in names[on] if "model" in name
        }
        if safe:
            found[on] = safetensors_of(home / "model_2.safetensors")
            scene.accelerator.load_state(str(home))
            assert torch.equal(model.turned, found[on]["turned"])
    assert names[True] == names[False]
    if safe:
        assert list(found[True]) == list(found[False])
        assert all(torch.equal(found[True][name], found[False][name]) for name in found[True])


MODELS = {
    True: ("model", "model_1", "model_2"),
    False: ("pytorch_model", "pytorch_model_1", "pytorch_model_2"),
}


def safetensors_of(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
        return {name: file.get_tensor(name) for name in sorted(file.keys())}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.smoke
def test_all_comes_back(tmp_path: Path, safe: bool) -> None:
    scene = Scene(tmp_path)
    scene.step()
    home = tmp_path / "step_12"
    assert scene.accelerator.save_state(str(home), safe_serialization=safe) == home
    assert home.is_dir()
    then, drawn = scene.facts(), torch.rand(1)
    scene.wait()
    expected = FILES if safe else sorted(map(as_torch, FILES))
    assert sorted(os.listdir(home)) == expected
    scene.step()
    assert not same(scene.facts(), then)
    scene.accelerator.load_state(str(home))
    assert same(scene.facts(), then)
    assert torch.equal(torch.rand(1), drawn)
    scene.accelerator.end_training()


def as_torch(name: str) -> str:
    return re.sub(r"^(model.*)\.safetensors$", r"pytorch_\1.bin", name)


@pytest.mark.long
def test_each_file_is_read_by_stock_torch_and_safetensors_in_a_process_without_portus(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    scene.step()
    scene.accelerator.save_state(str(tmp_path / "one"))
    scene.accelerator.end_training()
    program = (
        "import os, sys, torch\n"
        "from safetensors.torch import load_file\n"
        "sys.modules['portus'] = None\n"
        f"os.chdir({str(tmp_path / 'one')!r})\n"
        "for name in os.listdir():\n"
        "    load = load_file if name.endswith('.safetensors') else torch.load\n"
        "    more = {} if load is load_file else {'weights_only': False}\n"
        "    assert load(name, **more)\n"
        "print(sorted(os.listdir()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert done.stdout.strip() == str(FILES), done.stderr


@pytest.mark.parametrize("safe", [True, False])
def test_saving_over_a_stock_checkpoint_leaves_no_older_weights(tmp_path: Path, safe: bool) -> None:
    stock = Scene(tmp_path, on=False)
    stock.accelerator.save_state(str(tmp_path / "last"))
    scene = Scene(tmp_path)
    scene.step()
    scene.accelerator.save_state(str(tmp_path / "last"), safe_serialization=safe)
    scene.wait()
    expected = FILES if safe else sorted(map(as_torch, FILES))
    assert sorted(os.listdir(tmp_path / "last")) == expected
    then = scene.facts()
    scene.step()
    scene.accelerator.load_state(str(tmp_path / "last"))
    assert same(scene.facts(), then)


class Held:
    """Nothing is committed meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        real = ImageFile.finish

        def finish(file: ImageFile) -> None:
            assert self._open.wait(60)
            real(file)

        monkeypatch.setattr(ImageFile, "finish", finish)

    def release(self) -> None:
        self._open.set()


def test_total_limit_never_leaves_a_moment_without_a_committed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    scene.step()
    scene.accelerator.save_state()
    scene.wait()
    held = Held(monkeypatch)
    scene.step()
    scene.accelerator.save_state()
    with PENDING.exempt():
        there = sorted(os.listdir(tmp_path / "checkpoints"))
        files = os.listdir(tmp_path / "checkpoints" / "checkpoint_1")
    held.release()
    assert there == ["checkpoint_0", "checkpoint_1"]
    assert files == [], "no file that is not whole, and nothing hidden"
    scene.wait()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_1"]
    assert sorted(os.listdir(tmp_path / "checkpoints" / "checkpoint_1")) == FILES
    assert scene.accelerator.project_configuration.total_limit == 1


def test_a_directory_that_is_renamed_while_its_save_is_in_flight_is_loaded_from_there(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    scene.step()
    scene.accelerator.save_state(str(tmp_path / "temporary"))
    then = scene.facts()
    (tmp_path / "temporary").rename(tmp_path / "step_2")
    scene.step()
    scene.accelerator.load_state(str(tmp_path / "step_2"))
    assert same(scene.facts(), then)
    assert not (tmp_path / "temporary").exists()


def test_a_directory_that_another_program_renames_takes_its_save_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    scene.step()
    scene.accelerator.save_state(str(tmp_path / "step_1"))
    scene.wait()
    held = Held(monkeypatch)
    scene.step()
    scene.accelerator.save_state(str(tmp_path / "temporary"))
    then = scene.facts()
    with PENDING.exempt():
        (tmp_path / "temporary").rename(tmp_path / "step_2")
    held.release()
    scene.wait()
    scene.step()
    scene.accelerator.load_state(str(tmp_path / "step_2"))
    assert same(scene.facts(), then)


def fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no save comes to its end."""

    def finish(file: ImageFile) -> None:
        raise portus.MediumError(5, "the disk")

    monkeypatch.setattr(ImageFile, "finish", finish)


def test_a_failed_save_costs_no_older_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    scene.step()
    scene.accelerator.save_state()
    scene.wait()
    then = scene.facts()
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        fails(patched)
        scene.step()
        scene.accelerator.save_state()
        scene.wait()
    assert "save failed" in caplog.text
    assert sorted(os.listdir(tmp_path / "checkpoints/checkpoint_0")) == FILES
    assert os.listdir(tmp_path / "checkpoints/checkpoint_1") == []
    scene.accelerator.load_state()
    assert same(scene.facts(), then)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_who_waits_hears_of_a_failed_save_as_on_error_says(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    on_error: str,
) -> None:
    scene = Scene(tmp_path, on_error=on_error)
    scene.accelerator.save_state(str(tmp_path / "step_1"))
    scene.wait()
    fails(monkeypatch)
    scene.accelerator.save_state(str(tmp_path / "step_2"))
    if on_error == "raise":
        with pytest.raises(portus.MediumError, match="the disk"):
            scene.wait()
    else:
        scene.wait()
        assert "a save failed; training continues" in caplog.text
    assert os.listdir(tmp_path / "step_2") == []


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_training_that_commits_nothing_ends_as_a_failure(
    tmp_path: Path, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch)
    scene = Scene(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    assert not portus_accelerate.should_leave(scene.accelerator)
    scene.accelerator.save_state(str(tmp_path / "step_1"))

    def ends() -> None:
        if is_waited_for:
            scene.wait()
        scene.accelerator.end_training()

    with pytest.raises(portus.MediumError, match="the disk"):
        ends()
    scene.accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is before, "signals are given back"


def flip(path: Path, found: bytes) -> None:
    data = path.read_bytes()
    assert data.count(found) == 1
    with open(path, "r+b") as file:
        file.seek(data.index(found))
        file.write(bytes(255 - byte for byte in found[:8]))


def test_the_newest_that_verifies_is_loaded_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path, automatic_checkpoint_naming=True)
    facts = []
    for _ in range(2):
        scene.step()
        scene.accelerator.save_state()
        scene.wait()
        facts.append(scene.facts())
    weight = scene.models[0].weight.detach().numpy().tobytes()
    flip(tmp_path / "checkpoints/checkpoint_1/model.safetensors", weight)
    scene.accelerator.load_state()
    assert f"FALLING BACK to {tmp_path}/checkpoints/checkpoint_0" in caplog.text
    assert same(scene.facts(), facts[0])


def test_the_positions_of_a_newer_portus_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    with monkeypatch.context() as newer:
        newer.setattr(resume, "FORMAT", 3)
        scene.accelerator.save_state(str(tmp_path / "one"))
    with pytest.raises(portus.UsageError, match=r"have format 3, and this Portus knows 2.*Upgrade"):
        scene.accelerator.load_state(str(tmp_path / "one"))


def test_damaged_random_states_are_not_passed_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.accelerator.save_state(str(tmp_path / "one"))
    scene.wait()
    path = tmp_path / "one/random_states_0.pkl"
    generator = torch.get_rng_state().numpy().tobytes()
    data = path.read_bytes()
    at = data.index(generator)
    path.write_bytes(data[:at] + bytes(255 - each for each in generator[:8]) + data[at + 8 :])
    with pytest.raises(portus.CorruptionError, match=r"random_states_0\.pkl"):
        scene.accelerator.load_state(str(tmp_path / "one"))


def saved_twice(root: Path, scene: Scene) -> tuple[Path, Path]:
    """Directories of step 1 and step 2."""
    homes = (root / "step_1", root / "step_2")
    for home in homes:
        scene.step()
        scene.accelerator.save_state(str(home))
        scene.wait()
    return homes


def test_a_directory_of_two_checkpoints_is_refused_with_their_steps(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    first, second = saved_twice(tmp_path, scene)
    shutil.copy(first / "optimizer.bin", second / "optimizer.bin")
    before = scene.facts()
    with pytest.raises(portus.UsageError) as caught:
        scene.accelerator.load_state(str(second))
    said = str(caught.value)
    assert "optimizer.bin of model 'net', step 1" in said
    assert "random_states_0.pkl, scheduler.bin of model 'net', step 2" in said
    assert "model.safetensors" in said
    assert same(scene.facts(), before)


def test_a_model_of_another_shape_is_refused_with_rank_model_and_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    _, second = saved_twice(tmp_path, scene)
    scene.accelerator._models[0] = torch.nn.Linear(4, 5)
    with pytest.raises(RuntimeError) as caught:
        scene.accelerator.load_state(str(second))
    said = str(caught.value)
    assert said.startswith(f"rank 0: {second} (model 'net', step 2) does not fit")
    assert "size mismatch for weight" in said


def test_a_file_that_is_missing_is_named_with_rank_model_and_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    _, second = saved_twice(tmp_path, scene)
    (second / "optimizer_1.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"rank 0: .*model 'net', step 2.* lacks") as caught:
        scene.accelerator.load_state(str(second))
    assert "optimizer_1.bin" in str(caught.value)


def test_missing_random_states_of_a_rank_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path)
    scene.accelerator.state.num_processes = 2  # as on a job of two, whose other process died
    _, second = saved_twice(tmp_path, scene)
    scene.accelerator.state.process_index = 1
    scene.accelerator.load_state(str(second))
    assert "rank 1: " in caplog.text
    assert "(model 'net', step 2) holds no random states of this rank" in caplog.text


def test_another_number_of_processes_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    _, second = saved_twice(tmp_path, scene)
    scene.accelerator.load_state(str(second))
    assert "processes" not in caplog.text
    scene.accelerator.state.num_processes = 2  # as on a job of two; nothing is exchanged in a load
    scene.accelerator.load_state(str(second))
    assert "(model 'net', step 2) was saved by 1 processes and is loaded by 2" in caplog.text


def test_hooks_are_called_and_what_they_take_is_not_saved(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        torch.save(weights[1], os.path.join(directory, "mine.pt"))
        weights.pop()

    def load(models: list[Any], directory: str) -> None:
        models.pop().load_state_dict(torch.load(os.path.join(directory, "mine.pt")))

    scene.accelerator.register_save_state_pre_hook(save)
    scene.accelerator.register_load_state_pre_hook(load)
    scene.step()
    scene.accelerator.save_state(str(tmp_path / "one"))
    then = scene.facts()
    expected = sorted([*FILES, "mine.pt"])
    expected.remove("model_1.safetensors")
    assert sorted(os.listdir(tmp_path / "one")) == expected
    scene.step()
    scene.accelerator.load_state(str(tmp_path / "one"))
    assert same(scene.facts(), then)


def test_a_save_that_was_cut_off_is_passed_over_and_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path, automatic_checkpoint_naming=True)
    scene.step()
    scene.accelerator.save_state()
    scene.wait()
    then = scene.facts()
    cut_off = tmp_path / "checkpoints/checkpoint_1"
    cut_off.mkdir()
    (cut_off / "mine.pt").write_text("a hook's")
    scene = Scene(tmp_path, automatic_checkpoint_naming=True)
    scene.step()
    scene.accelerator.load_state()
    assert same(scene.facts(), then)
    assert "checkpoint_1: it was never complete" in caplog.text
    with pytest.raises(portus.UsageError, match=r"never complete.*before it, .*checkpoint_0$"):
        scene.accelerator.load_state(str(cut_off))
    assert (cut_off / "mine.pt").read_text() == "a hook's"


def test_what_hooks_wrote_makes_no_checkpoint_of_a_save_that_was_cut_off(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    cut_off = tmp_path / "ckpt"
    (cut_off / "unet").mkdir(parents=True)
    (cut_off / "unet" / "model.safetensors").write_bytes(b"of a hook")
    (cut_off / "model.safetensors").write_bytes(b"of a hook")
    with pytest.raises(portus.UsageError, match="never complete"):
        scene.accelerator.load_state(str(cut_off))


def test_a_directory_that_another_process_leads_is_loaded(tmp_path: Path) -> None:
    """As on the second machine, where each has a directory of its own."""
    scene = Scene(tmp_path)
    scene.step()
    then = scene.facts()
    scene.accelerator.save_state(str(tmp_path / "ckpt"))
    scene.wait()
    (tmp_path / "ckpt/random_states_0.pkl").rename(tmp_path / "ckpt/random_states_4.pkl")
    scene.step()
    scene.accelerator.load_state(str(tmp_path / "ckpt"))
    assert same(scene.facts(), then)


@pytest.mark.long
def test_on_a_host_a_run_from_another_working_directory_keeps_what_was_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then: dict[int, list[torch.Tensor]] = {}
    run = tmp_path / "run"
    with serving(tmp_path / "host") as server:
        monkeypatch.setenv("PORTUS_POOL", url(server))
        for number in (1, 2, 3):
            start = tmp_path / f"start {number}"
            start.mkdir()
            monkeypatch.chdir(start)
            scene = Scene(run)
            scene.step()
            scene.accelerator.save_state(str(run / f"step_{number}"))
            then[number] = scene.facts()
            scene.accelerator.end_training()
        scene = Scene(run)
        for number, facts in then.items():
            scene.accelerator.load_state(str(run / f"step_{number}"))
            assert same(scene.facts(), facts)


class Strange:
    pass


def test_objects_of_any_class_are_saved_as_stock_pickles_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.counter.more = Strange()
    scene.step()
    scene.accelerator.save_state(str(tmp_path / "last"))
    scene.wait()
    found = torch.load(tmp_path / "last/custom_checkpoint_0.pkl", weights_only=False)
    assert isinstance(found["more"], Strange)


def test_the_first_save_too_is_copied_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Any] = []

    def noted(*positional: Any) -> Any:
        orders.append(copy_order(*positional))
        return orders[-1]

    monkeypatch.setattr(snapshot, "copy_order", noted)
    scene = Scene(tmp_path)
    scene.step()
    scene.accelerator.save_state(str(tmp_path / "one"))
    assert orders[0].late.sum() >= 8, "weights and moments of both models"
    scene.wait()
    hidden = sorted(path.name for path in (tmp_path / ".portus").iterdir())
    assert hidden == [".gitignore", "CACHEDIR.TAG", "checkpoints.journal"]
    assert sorted(os.listdir(tmp_path / "one")) == FILES


def test_a_working_directory_that_is_gone_keeps_nothing_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    scene = Scene(tmp_path)
    scene.step()
    scene.accelerator.save_state(str(tmp_path / "step_1"))
    scene.accelerator.end_training()
    then = scene.facts()
    scene.step()
    scene.accelerator.load_state(str(tmp_path / "step_1"))
    assert same(scene.facts(), then)


def test_what_was_waited_for_is_committed(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    portus_accelerate.wait(scene.accelerator)  # nothing was saved
    scene.accelerator.save_state(str(tmp_path / "step_1"))
    portus_accelerate.wait(scene.accelerator)
    with PENDING.exempt():
        assert sorted(os.listdir(tmp_path / "step_1")) == FILES


def test_the_scaler_is_saved(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scene.accelerator.scaler.scale(torch.ones(1))
    scene.accelerator.save_state(str(tmp_path / "one"))
    scene.accelerator.scaler.load_state_dict(
        {**scene.accelerator.scaler.state_dict(), "scale": 3.0}
    )
    scene.accelerator.load_state(str(tmp_path / "one"))
    assert scene.accelerator.scaler.get_scale() == 8.0


def test_after_the_end_a_save_is_durable_when_it_returns(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.accelerator.save_state(str(tmp_path / "step_1"))
    scene.accelerator.end_training()
    scene.accelerator.save_state(str(tmp_path / "step_2"))
    with PENDING.exempt():
        assert sorted(os.listdir(tmp_path / "step_2")) == FILES


def test_an_accelerator_without_portus_is_left_alone_beside_one_with(tmp_path: Path) -> None:
    Scene(tmp_path / "on")
    stock = Scene(tmp_path / "off", on=False, automatic_checkpoint_naming=True, total_limit=1)
    for _ in range(2):
        stock.accelerator.save_state()
    assert os.listdir(tmp_path / "off/checkpoints") == ["checkpoint_1"]
    assert (tmp_path / "off/checkpoints/checkpoint_1/optimizer.bin").stat().st_nlink == 1
    assert not (tmp_path / "off/.portus").exists()


def test_a_version_that_is_not_known_is_left_alone_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patch.install()
    before = Accelerator.save_state
    for version in ("0.34.2", "1.16.0", "2.0.dev0"):
        monkeypatch.setattr(accelerate, "__version__", version)
        caplog.clear()
        patch.install()
        assert version in caplog.text
        told = f"Accelerate {version} is not supported by this version of Portus"
        assert told in portus_accelerate.status()
    assert Accelerator.save_state is before
    monkeypatch.undo()
    patch.install()


def test_what_portus_lacks_is_missed_before_accelerate_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(portus, "TrainingFiles")  # it is looked up anew
    monkeypatch.setitem(
        sys.modules, "portus.reach.training.training_files", None
    )  # no msgspec, say
    with pytest.raises(ImportError, match="training_files"):
        patch.install()


def test_the_rest_of_torch_is_seen_through_what_stands_in_for_it() -> None:
    patch.install()
    assert checkpointing.torch.rand is torch.rand
    assert checkpointing.torch.cuda is torch.cuda


def test_the_page_has_every_key_of_the_yaml_that_is_no_setting_of_portus() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "accelerate.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, flags=re.MULTILINE)
    keys = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    fields, general = (
        {field.name for field in dataclasses.fields(each)}
        for each in (settings.Settings, portus.Settings)
    )
    assert sorted(keys) == sorted(fields - general)


def test_an_unknown_key_in_the_yaml_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.config import config_args

    monkeypatch.setattr(
        config_args.BaseConfig, "process_config", config_args.BaseConfig.process_config
    )
    monkeypatch.setenv("PORTUS_ACCELERATE", "1")
    monkeypatch.setenv(settings.VARIABLE, "")
    settings.install()
    with pytest.raises(portus.UsageError, match=r"unknown keys \['slots'\]"):
        config_args.BaseConfig.process_config({"portus_config": {"slots": 3}})
    with pytest.raises(portus.UsageError, match="expected keys and values, found '/nvme/pools'"):
        config_args.BaseConfig.process_config({"portus_config": "/nvme/pools"})
    config = {"distributed_type": "NO", "portus_config": {"model": "a", "max_bytes": 1 << 30}}
    assert "portus_config" not in config_args.BaseConfig.process_config(config)
    assert settings.from_environment() == settings.Settings(model="a", max_bytes=1 << 30)


@pytest.mark.long
def test_a_pool_file_that_another_process_has_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = tmp_path / "run.portus"
    with Warm("tests.crash.saver").start("save_for_ever", str(pool), 1) as other:
        other.until("saved")
        monkeypatch.setenv("PORTUS_POOL", str(pool))
        scene = Scene(tmp_path)
        with pytest.raises(portus.BusyError, match="To read it meanwhile"):
            scene.accelerator.save_state(str(tmp_path / "step_1"))
    assert [each.name for each in tmp_path.glob("*.portus")] == ["run.portus"], "there is no other"


def test_a_loop_asks_when_to_save_and_goes_on_with_it_after_a_resume(tmp_path: Path) -> None:
    def saved(scene: Scene, steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            scene.step()
            if portus_accelerate.should_save(scene.accelerator):
                scene.accelerator.save_state(str(tmp_path / f"step_{scene.counter.count}"))
                found.append(scene.counter.count)
        return found

    first = Scene(tmp_path, every=3)
    portus_accelerate.cadence(first.accelerator)
    assert saved(first, 4) == [3]
    first.accelerator.save_state(str(tmp_path / "step_4"))
    first.accelerator.end_training()
    assert fence._listeners == ()

    for asks_before in (False, True):
        again = Scene(tmp_path, every=3)
        if asks_before:
            portus_accelerate.cadence(again.accelerator)
        again.accelerator.load_state(str(tmp_path / "step_4"))
        assert saved(again, 6) == [6, 9], "as if it had not been interrupted"
        again.accelerator.end_training()


def test_auto_is_what_a_loop_gets_and_time_where_portus_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    assert portus_accelerate.cadence(scene.accelerator).every == "auto"
    scene.accelerator.end_training()
    with pytest.raises(portus.UsageError, match="turn the flag on, or call"):
        portus_accelerate.should_save(Scene(tmp_path, on=False).accelerator)
    monkeypatch.setenv("PORTUS_DISABLE", "1")
    scene = Scene(tmp_path)
    assert portus_accelerate.cadence(scene.accelerator).every == 600.0
    scene.accelerator._portus_saver.finish()
    assert fence._listeners == ()


def test_no_pool_is_looked_for_where_portus_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_POOL", "s3://bucket/pool")
    monkeypatch.setenv("PORTUS_DISABLE", "1")
    scene = Scene(tmp_path / "run")
    scene.accelerator.save_state(str(tmp_path / "run" / "step_1"))
    scene.accelerator.load_state(str(tmp_path / "run" / "step_1"))
    monkeypatch.delenv("PORTUS_DISABLE")
    with pytest.raises(portus.UsageError, match="PORTUS_POOL"):
        Scene(tmp_path / "run").accelerator.save_state(str(tmp_path / "run" / "step_2"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"every": 0}, "every: expected 'auto', a time"),
        ({"max_overhead": 0}, "max_overhead: expected a share"),
        ({"mtbf": "4"}, "mtbf: expected a time"),
    ],
)
def test_a_cadence_that_makes_no_sense_is_refused_where_it_is_said(
    values: dict[str, object], said: str
) -> None:
    with pytest.raises(portus.UsageError, match=said):
        settings.from_mapping(values, "portus_config")
