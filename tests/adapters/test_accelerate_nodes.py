"""Machines that have directories of their own: ``save_on_each_node``, and relative paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters import forked

SCRIPT = """
import os, sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
import portus_accelerate

damage = sys.argv[1]
rank = os.environ["RANK"]
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
os.makedirs(f"node{rank}")
os.chdir(f"node{rank}")
project = ProjectConfiguration("run", automatic_checkpoint_naming=True, save_on_each_node=True)
accelerator = Accelerator(cpu=True, project_config=project)
model = accelerator.prepare(torch.nn.Linear(2, 2))
for value in (0.0, 1.0):
    torch.nn.init.constant_(accelerator.unwrap_model(model).weight, value + 10 * int(rank))
    accelerator.save_state()
    project.iteration = int(value) + 1
portus_accelerate.wait(accelerator)
accelerator.wait_for_everyone()
newest = os.path.join("run", "checkpoints", "checkpoint_1")
if damage == f"lost on {rank}":
    os.rename(newest, "lost")
elif damage == f"cut off on {rank}":
    for name in os.listdir(newest):
        if name.startswith("random_states"):
            os.unlink(os.path.join(newest, name))
accelerator.load_state()
loaded = accelerator.unwrap_model(model).weight[0, 0].item()
with open("loaded", "w") as file:
    file.write(str(loaded))
accelerator.wait_for_everyone()
accelerator.end_training()
os._exit(0)
"""


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("damage", "found"),
    [("none", 1), ("lost on 1", 0), ("cut off on 0", 0), ("cut off on 1", 0)],
)
def test_each_process_loads_from_its_own_machine_the_newest_that_all_have(
    tmp_path: Path, damage: str, found: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = tmp_path / "root"
    forked.script(script, root, damage, processes=2, flag=True)
    loaded = [float((root / f"node{rank}" / "loaded").read_text()) for rank in (0, 1)]
    assert loaded == [found, found + 10]
