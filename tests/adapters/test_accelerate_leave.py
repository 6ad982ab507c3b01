"""What a run of Accelerate leaves: its checkpoints, and its journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

import portus_accelerate
from tests.adapters.trainings import SIZE, Weight
from tests.adapters.trainings import warm_up as warm_up  # the nursery of this module calls it
from tests.nursery import Say, nursery


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def trained(root: Path, first: int, last: int, **settings: Any) -> Accelerator:
    """A training that saved these steps, and has not ended."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, project_dir=str(root))
    portus_accelerate.enable(accelerator, **settings)
    model = Weight()
    with torch.no_grad():
        model.weight.fill_(1 - first)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(first, last + 1):
        accelerator.backward(model())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(str(root / "ckpt" / f"step_{step}"))
    return accelerator


def check(root: Path, last: int) -> None:
    """All steps are there, as safetensors reads them."""
    for step in range(1, last + 1):
        saved = load_file(root / "ckpt" / f"step_{step}" / "model.safetensors")
        assert torch.equal(saved["weight"], torch.full((SIZE,), -float(step)))


def test_a_resumed_run_leaves_nothing_beside_its_checkpoints(tmp_path: Path) -> None:
    trained(tmp_path, 1, 2).end_training()
    again = trained(tmp_path, 3, 2)
    again.load_state(str(tmp_path / "ckpt" / "step_2"))
    again.end_training()
    trained(tmp_path, 3, 4).end_training()
    check(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.rglob(".portus")) == [".portus"]
    assert not list(tmp_path.glob(".portus/*.portus")), "no pool"


def ends(say: Say, root: str) -> None:
    """A script that drops its Accelerator, and never says that training is over."""
    trained(Path(root), 1, 3)
    say("trained")
    raise SystemExit


@pytest.mark.long
def test_a_script_that_never_ends_its_training_ends_with_whole_files(tmp_path: Path) -> None:
    with nursery(__name__).start("ends", str(tmp_path)) as child:
        assert child.line() == "trained"
        assert child.wait() == 0
    check(tmp_path, 3)
