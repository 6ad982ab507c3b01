"""What saves cost reaches the trackers of Accelerate and of transformers, by the flag."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker

import portus
import portus_accelerate
from portus.engine.writer.image_file import ImageFile
from tests.adapters.test_transformers_trainer import flag, trained  # noqa: F401 - a fixture

NAMES = set(portus.SaveStats().metrics())


class Tracker(GeneralTracker):  # type: ignore[misc]
    """Keeps what it is told, as wandb does: one row for each call, and no step twice or back."""

    name = "mine"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.ended = False

    @property
    def tracker(self) -> Any:
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        assert not self.ended
        steps = [at for at, _ in self.rows if at is not None]
        assert step is None or step >= max(steps, default=0), "wandb would drop it"
        self.rows.append((step, dict(values)))

    def finish(self) -> None:
        self.ended = True

    def costs(self) -> list[int | None]:
        """At which step each was told."""
        return [step for step, values in self.rows if values.keys() >= NAMES]


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def accelerator_with(tracker: Tracker, root: Path, *, on: bool = True) -> Accelerator:
    made = Accelerator(cpu=True, project_dir=str(root), log_with=tracker)
    if on:
        portus_accelerate.enable(made)
    made.init_trackers("run")
    made.prepare(torch.nn.Linear(3, 3))
    return made


def save(accelerator: Accelerator, root: Path, step: int) -> None:
    accelerator.save_state(str(root / f"step_{step}"))
    portus_accelerate.wait(accelerator)


def test_what_saves_cost_goes_to_the_trackers_at_the_step_that_the_script_logs(
    tmp_path: Path,
) -> None:
    tracker = Tracker()
    accelerator = accelerator_with(tracker, tmp_path)
    save(accelerator, tmp_path, 1000)  # its number is none of the tracker's steps
    accelerator.log({"loss": 1.0}, step=7)
    accelerator.log({"loss": 2.0}, step=8)
    for step in (2000, 3000):
        save(accelerator, tmp_path, step)
    accelerator.log({"loss": 3.0}, step=9)
    accelerator.save_state(str(tmp_path / "step_4000"))
    accelerator.end_training()
    assert [row for row in tracker.rows if "loss" in row[1]] == [
        (step, {"loss": loss}) for step, loss in ((7, 1.0), (8, 2.0), (9, 3.0))
    ]
    assert tracker.costs() == [7, 9, 9, 9]
    assert tracker.ended
    for _, values in tracker.rows:
        if "loss" not in values:
            assert values.keys() == NAMES
            assert values["portus/total_ms"] > 0
            assert values["portus/copied_gb"] + values["portus/shared_gb"] > 0


@pytest.mark.long
def test_where_trackers_count_calls_themselves_none_is_added(tmp_path: Path) -> None:
    tracker = Tracker()
    accelerator = accelerator_with(tracker, tmp_path)
    for step in (1, 2):
        save(accelerator, tmp_path, step)
    accelerator.log({"loss": 1.0, "portus/fence_ms": "mine"})
    accelerator.log({"loss": 2.0})
    [(_, first), (_, second)] = tracker.rows
    assert first.keys() == NAMES | {"loss"}
    assert first["portus/fence_ms"] == "mine"
    assert second == {"loss": 2.0}
    accelerator.end_training()


def test_a_save_that_failed_has_no_cost_in_the_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker()
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), log_with=tracker)
    portus_accelerate.enable(accelerator)
    accelerator.init_trackers("run")
    accelerator.prepare(torch.nn.Linear(3, 3))
    save(accelerator, tmp_path, 1)

    def finish(file: ImageFile) -> None:
        raise portus.MediumError(5, "the disk")

    monkeypatch.setattr(ImageFile, "finish", finish)
    accelerator.save_state(str(tmp_path / "step_2"))
    failed = accelerator._portus_saver._handles[-1]
    failed.join()
    assert not failed.committed
    accelerator.log({"loss": 1.0}, step=3)
    costs = [values for _, values in tracker.rows if "loss" not in values]
    assert len(costs) == 1
    assert costs[0]["portus/total_ms"] > 0
    accelerator.end_training()


def test_a_script_that_never_logs_there_has_nothing_logged(tmp_path: Path) -> None:
    tracker = Tracker()
    accelerator = accelerator_with(tracker, tmp_path)
    for step in (1, 2, 3):
        save(accelerator, tmp_path, step)
    assert len(accelerator._portus_saver._handles) == 1, "saves that are over are let go of"
    accelerator.end_training()
    assert tracker.rows == []


def test_without_the_flag_nothing_is_added(tmp_path: Path) -> None:
    tracker = Tracker()
    accelerator = accelerator_with(tracker, tmp_path, on=False)
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.log({"loss": 2.0})
    assert tracker.rows == [(1, {"loss": 1.0}), (None, {"loss": 2.0})]
    accelerator.end_training()


@pytest.mark.long
@pytest.mark.usefixtures("flag")
@pytest.mark.filterwarnings("ignore")
def test_the_callbacks_of_transformers_get_it_and_its_history_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import TrainerCallback

    class Logs(TrainerCallback):
        """As those of transformers that write to a tracker."""

        def __init__(self) -> None:
            self.rows: list[tuple[int, dict[str, Any]]] = []
            self.ended = False

        def on_log(  # type: ignore[override]
            self, args: Any, state: Any, control: Any, logs: Any, **more: Any
        ) -> None:
            assert not self.ended
            assert more["model"] is not None
            self.rows.append((state.global_step, dict(logs)))

        def on_train_end(self, *given: Any, **more: Any) -> None:
            self.ended = True

    logs = Logs()
    made = trained(tmp_path, 4, callbacks=[logs], logging_steps=2)
    costs = [(step, values) for step, values in logs.rows if values.keys() == NAMES]
    assert len(costs) == 4, "each save once"
    assert [step for step, _ in costs] == sorted(step for step, _ in costs)
    assert all(values["portus/total_ms"] > 0 for _, values in costs)
    assert [step for step, values in logs.rows if "loss" in values] == [2, 4]
    history = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())
    told = {name for row in [*made.state.log_history, *history["log_history"]] for name in row}
    assert "loss" in told
    assert not told & NAMES
    assert "portus/" not in capsys.readouterr().out
