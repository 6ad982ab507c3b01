"""A ``transformers.Trainer`` of any number of processes that says which samples it is given, and at
which step."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.crash.epoch_script import SAMPLES, Rows, join
from tests.nursery import Say


def warm_up() -> None:
    """What is imported above is all."""
    warnings.simplefilter("ignore")
    for name in ("portus", "portus_accelerate", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        )

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(rows / SAMPLES).pow(2).mean()}


class Says(Trainer):
    """Says what it is given."""

    say: Say

    def training_step(self, model: Any, inputs: Any, *more: Any) -> torch.Tensor:
        step, epoch = self.state.global_step, int(self.state.epoch or 0)
        rows = " ".join(str(int(row)) for row in inputs["rows"][:, 0])
        self.say(f"step {step} {epoch} {step} {rows}")
        return super().training_step(model, inputs, *more)


def train(
    say: Say,
    root: str,
    resume: str | None,
    meeting: str,
    rank: int,
    ranks: int,
    workers: int,
    batch: int,
    portus: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Train on from ``resume``, with a checkpoint after each step; says each batch, and at the end
    a digest of the weights. meeting: a path that was never used, where ranks find each other."""
    os.environ["PORTUS_ACCELERATE_CONFIG"] = json.dumps(dict(portus))
    join(meeting, rank, ranks)
    torch.manual_seed(1)
    net = Net()
    stop = settings.get("stop", -1)
    arguments = TrainingArguments(
        output_dir=os.path.join(root, "ckpt"),
        num_train_epochs=2,
        per_device_train_batch_size=batch,
        dataloader_num_workers=workers,
        save_steps=1,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        label_names=[],
        remove_unused_columns=False,
        ddp_backend="gloo" if ranks > 1 else None,
        **{name: each for name, each in settings.items() if name != "stop"},
    )
    trainer: Any = Says(
        net, arguments, lambda rows: {"rows": torch.stack(rows)}, train_dataset=Rows()
    )
    trainer.say = say

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == stop

    trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume)
    weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    say(f"ended {trainer.state.global_step} {hashlib.sha256(weights).hexdigest()}")
