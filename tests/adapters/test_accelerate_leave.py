"""What leaves a run of Accelerate is real files: all its checkpoints, the newest first."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

import portus
import portus_accelerate
from portus.client import run
from portus.client.leaving import in_turn
from portus.testing.nursery import Say, nursery
from portus_accelerate import ending
from tests.adapters.trainings import SIZE, Weight
from tests.adapters.trainings import warm_up as warm_up  # the nursery of this module calls it


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


def references(root: Path) -> list[str]:
    """Directories with a reference in them."""
    found = {path.parent.name for path in root.glob("ckpt/*/*") if portus.is_reference(path)}
    return sorted(found)


def check(root: Path, last: int) -> None:
    """All steps are real files, of their own step."""
    assert references(root) == []
    for step in range(1, last + 1):
        saved = load_file(root / "ckpt" / f"step_{step}" / "model.safetensors")
        assert torch.equal(saved["weight"], torch.full((SIZE,), -float(step)))


def test_at_the_end_all_are_real_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = trained(tmp_path, 1, 3)
    portus_accelerate.wait(accelerator)
    assert references(tmp_path) == ["step_1", "step_2", "step_3"]
    order, replace = [], os.replace

    def noted(source: Any, target: Any) -> None:
        if os.path.basename(target) == "model.safetensors":
            order.append(os.path.basename(os.path.dirname(target)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    accelerator.end_training()
    assert order == ["step_3", "step_2", "step_1"]
    check(tmp_path, 3)
    assert not list(tmp_path.glob(".portus/*.portus")), "nothing leads there any more"


def test_a_resumed_run_makes_real_what_it_saved_before_and_leaves_alone_what_others_did(
    tmp_path: Path,
) -> None:
    trained(tmp_path, 1, 2, materialize="none").end_training()
    with portus.PoolCheckpointer(tmp_path / "other", "other") as other:
        other.save({"x": 1}, 1, reference=tmp_path / "ckpt" / "theirs" / "x.ckpt")
    trained(tmp_path, 3, 4).end_training()
    assert references(tmp_path) == ["theirs"]
    (tmp_path / "ckpt" / "theirs" / "x.ckpt").unlink()
    check(tmp_path, 4)


@pytest.mark.parametrize("killed", ["before its files were real", "before its pool was gone"])
def test_a_run_that_died_as_it_ended_ends_when_it_is_started_again_and_saves_nothing_more(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_real = killed == "before its pool was gone"
    with monkeypatch.context() as patch:
        for module in (in_turn, run):
            patch.setattr(module, "give_back", lambda pool: None)
        trained(tmp_path, 1, 2, materialize="end" if is_real else "none").end_training()
    assert references(tmp_path) == ([] if is_real else ["step_1", "step_2"])
    assert list(tmp_path.glob(".portus/*.portus"))
    again = trained(tmp_path, 3, 2)
    again.load_state(str(tmp_path / "ckpt" / "step_2"))
    again.end_training()
    check(tmp_path, 2)
    assert not list(tmp_path.glob(".portus/*.portus")), "nothing leads there any more"


def test_a_run_that_starts_from_a_checkpoint_of_another_leaves_that_as_it_is(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    trained(first, 1, 1, materialize="none").end_training()
    other = trained(second, 2, 1)
    other.load_state(str(first / "ckpt" / "step_1"))
    other.end_training()
    assert references(first) == ["step_1"]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "references" in each.getMessage()]


def test_what_there_is_no_time_for_is_listed_once_with_its_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = trained(tmp_path, 1, 2, materialize_within=0)
    accelerator.end_training()
    assert references(tmp_path) == ["step_1", "step_2"]
    (text,) = said(caplog)
    lines = text.splitlines()[1:]
    assert len(lines) == 2
    for line, step in zip(lines, (2, 1), strict=True):
        path = tmp_path / "ckpt" / f"step_{step}"
        assert line.startswith(f"portus materialize {shlex.quote(str(path))}  # ")
        assert "bytes; it was not done within 0 s" in line
    accelerator.save_state(str(tmp_path / "ckpt" / "step_3"))
    assert [each for each in said(caplog)[1].splitlines() if "step_1" in each] == []


def test_a_setting_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(portus.UsageError, match="materialize_within"):
        portus_accelerate.enable(Accelerator(cpu=True), materialize_within=-1)


def ends(say: Say, root: str) -> None:
    """A script that drops its Accelerator, and never says that training is over."""
    trained(Path(root), 1, 3)
    say("trained")
    raise SystemExit


@pytest.mark.long
def test_a_script_that_never_ends_its_training_ends_with_real_files(tmp_path: Path) -> None:
    with nursery(__name__).start("ends", str(tmp_path)) as child:
        assert child.line() == "trained"
        assert child.wait() == 0
    check(tmp_path, 3)


def test_after_an_error_the_program_lists_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = trained(tmp_path, 1, 2)
    monkeypatch.setattr(sys, "last_type", KeyboardInterrupt, raising=False)  # by the interpreter
    ending._end_all()
    del accelerator
    assert references(tmp_path) == ["step_1", "step_2"]
    (text,) = said(caplog)
    assert text.count("training did not finish") == 2
