"""Accelerate on a machine that has nothing: the same script, and the mirror."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration

import portus
import portus_accelerate
from portus.reach.training.file_mirror import DirectoryMirror


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def started(run: Path, mirror: str, *, named: bool) -> tuple[Accelerator, torch.nn.Linear]:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    project = ProjectConfiguration(str(run), automatic_checkpoint_naming=not named, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    portus_accelerate.enable(accelerator, mirror=mirror)
    torch.manual_seed(1)
    return accelerator, accelerator.prepare(torch.nn.Linear(30, 40))


@pytest.mark.parametrize("named", [False, True])
def test_a_run_whose_machine_was_lost_goes_on_from_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    run, mirror = tmp_path / "run", f"file://{tmp_path}/bucket"
    run.mkdir()
    monkeypatch.chdir(run)
    accelerator, model = started(run, mirror, named=named)
    for number in range(3):
        with torch.no_grad():
            model.weight.fill_(number)
        accelerator.save_state(str(run / f"step_{number}") if named else None)
    accelerator.end_training()
    before = {path for path, _, _ in os.walk(run) if ".portus" not in path}
    shutil.rmtree(run)
    run.mkdir()
    accelerator, model = started(run, mirror, named=named)
    accelerator.load_state(str(run / "step_2") if named else None)
    assert torch.equal(model.weight, torch.full((40, 30), 2.0))
    assert {path for path, _, _ in os.walk(run) if ".portus" not in path} == before
    accelerator.end_training()


def test_the_mirror_has_the_files_of_a_checkpoint_whole_under_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mirror = tmp_path / "run", tmp_path / "bucket"
    run.mkdir()
    monkeypatch.chdir(run)
    accelerator, model = started(run, f"file://{mirror}", named=False)
    accelerator.save_state()
    accelerator.end_training()
    [there] = mirror.glob("*/checkpoints/checkpoint_0")
    here = run / "checkpoints" / "checkpoint_0"
    for path in here.iterdir():
        assert (there / path.name).read_bytes() == path.read_bytes()
    weights = safetensors.torch.load_file(there / "model.safetensors")
    assert torch.equal(weights["weight"], model.weight)


def test_a_run_that_has_its_checkpoints_starts_while_the_mirror_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mirror = tmp_path / "run", f"file://{tmp_path}/bucket"
    run.mkdir()
    monkeypatch.chdir(run)
    accelerator, model = started(run, mirror, named=False)
    with torch.no_grad():
        model.weight.fill_(3.0)
    accelerator.save_state()
    accelerator.end_training()

    def silent(_: DirectoryMirror) -> int:
        raise portus.TransportError("no answer")

    monkeypatch.setattr(DirectoryMirror, "fetch", silent)
    accelerator, model = started(run, mirror, named=False)
    accelerator.load_state()
    assert torch.equal(model.weight, torch.full((40, 30), 3.0))
    accelerator.end_training()


def test_a_checkpoint_that_is_damaged_here_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mirror = tmp_path / "run", f"file://{tmp_path}/bucket"
    run.mkdir()
    monkeypatch.chdir(run)
    accelerator, _ = started(run, mirror, named=True)
    accelerator.save_state(str(run / "step_1"))
    accelerator.end_training()
    path = run / "step_1" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    accelerator, _ = started(run, mirror, named=True)
    with pytest.raises(portus.CorruptionError, match=r"model\.safetensors"):
        accelerator.load_state(str(run / "step_1"))
    accelerator.end_training()


def test_a_setting_that_would_be_ignored_is_an_error(tmp_path: Path) -> None:
    mirror = f"file://{tmp_path}/bucket"
    accelerator, _ = started(tmp_path, mirror, named=True)
    portus_accelerate.enable(accelerator)
    portus_accelerate.enable(accelerator, mirror=mirror)
    with pytest.raises(portus.UsageError, match=r"mirror='file:///elsewhere'.*already on.*bucket"):
        portus_accelerate.enable(accelerator, mirror="file:///elsewhere")
    accelerator.end_training()
