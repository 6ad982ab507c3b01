"""A training of one process with TorchTitan's checkpoint manager, in forks."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from tests.matrix.trainings import TITAN, TitanProgress
from tests.nursery import Say


def warm_up() -> None:
    sys.path.insert(0, str(TITAN))
    import torchtitan.components.checkpointer.dcp  # noqa: F401


def train(say: Say, root: str, environment: dict[str, str], how: str, steps: int, at: int) -> None:
    """Go on from the step ``at`` (-1: the newest) for so many steps, saving each. how: "stock",
    "portus", or "taken": stock's class, which Portus takes over."""
    os.environ.update(environment)
    os.chdir(root)
    os.dup2(os.open("errors.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    import portus_accelerate.titan
    from portus_accelerate.torchtitan import PortusCheckpoints

    torch.distributed.init_process_group("gloo")
    kind: Any = PortusCheckpoints if how == "portus" else CheckpointManager
    if how == "taken":
        portus_accelerate.titan.take_over(kind)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    progress = TitanProgress()
    mode = {"stock": "disabled", "portus": "async_with_pinned_mem", "taken": "async"}[how]
    manager = kind(
        kind.Config(
            enable=True, interval=1, keep_latest_k=2, async_mode=mode, last_save_model_only=False
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=None,
        lr_schedulers=None,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=root,
    )
    for name in ("dataloader", "optimizer", "lr_scheduler"):
        manager.states.pop(name)
    manager.load(at)
    say(f"from {progress.step} {float(model.weight.sum()).hex()}")
    for step in range(progress.step + 1, progress.step + 1 + steps):
        progress.step = step
        manager.maybe_wait_for_staging()
        with torch.no_grad():
            model.weight.add_(step)
        manager.save(step)
    manager.close()
    say(f"end {progress.step} {float(model.weight.sum()).hex()}")
