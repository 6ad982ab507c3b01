"""The end of an Accelerate job of several processes, which torch alone can hang."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import portus_accelerate
from tests.adapters.trainings import Weight
from tests.adapters.trainings import warm_up as warm_up  # the nursery of this module calls it
from tests.crash.epoch_script import join
from tests.nursery import Say, nursery
from tests.unit.cli.scene import portus_json

LATE_S = 0.5
"""How long after the model is gone gloo's thread is done with the last exchange."""


def end_before_gloo_does(say: Say, root: str, rank: int) -> None:
    """Train, save and end, and let go of the model while gloo's own thread still has a tensor."""
    join(f"{root}/meeting", rank, 2)
    accelerator = Accelerator(cpu=True, project_dir=root)
    portus_accelerate.enable(accelerator)
    model = accelerator.prepare(Weight())
    accelerator.backward(model())
    accelerator.save_state(os.path.join(root, "step_1"))
    group = dist.group.WORLD
    assert group is not None
    accelerator.end_training()
    if rank == 1:
        time.sleep(LATE_S)
    group.allreduce([torch.ones(1)])
    del group, model, accelerator
    gc.collect()
    say("ended")


@pytest.mark.long
def test_a_job_ends_though_gloo_still_holds_its_last_tensor(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        children = nursery(__name__)
        ranks = [
            stack.enter_context(children.start("end_before_gloo_does", str(tmp_path), rank))
            for rank in range(2)
        ]
        for child in ranks:
            assert child.rest() == ["ended"]
            assert child.wait() == 0


def test_a_training_is_titled_by_its_project_and_found_by_any_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    naming = ProjectConfiguration(str(project), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=naming)
    portus_accelerate.enable(accelerator)
    model = accelerator.prepare(Weight())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model())
        optimizer.step()
        accelerator.save_state()
    accelerator.end_training()
    checkpoint = project / "checkpoints" / "checkpoint_1"
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    assert files
    for said in (project, checkpoint, *files):
        found = portus_json("report", said)
        assert (found["run"], found["title"]) == ("checkpoints", "out")
    assert portus_json("report", "checkpoints", "--pool", project / ".portus")["title"] == "out"
