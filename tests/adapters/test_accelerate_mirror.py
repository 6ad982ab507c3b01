"""Accelerate on a machine that has nothing: the same script, and the mirror."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration

import portus_accelerate


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
    portus_accelerate.enable(accelerator, mirror=mirror, materialize="none")
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


def test_a_state_that_is_damaged_here_is_taken_from_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, mirror = tmp_path / "run", f"file://{tmp_path}/bucket"
    run.mkdir()
    monkeypatch.chdir(run)
    accelerator, model = started(run, mirror, named=True)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1200.0).reshape(40, 30))
    content = model.weight.detach().numpy().tobytes()
    accelerator.save_state(str(run / "step_1"))
    accelerator.end_training()
    [pool] = (path for path in run.rglob("*.portus") if path.is_file())
    data = pool.read_bytes()
    at = data.rindex(content)
    pool.write_bytes(data[:at] + b"damage" + data[at + 6 :])
    accelerator, model = started(run, mirror, named=True)
    with caplog.at_level("ERROR", "portus"):
        accelerator.load_state(str(run / "step_1"))
    assert model.weight.detach().numpy().tobytes() == content
    assert "is taken from the mirror file://" in caplog.text
    accelerator.end_training()
