"""Trainings with a real optimizer that tell each step they did, for tests that kill them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from portus.reach.pools.checkpointer import PoolCheckpointer
from portus_lightning import PortusIO
from tests.crash.lightning_saver import Net, loader_of, trainer_in
from tests.nursery import Say


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(40, 40)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def advance(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()


def train_for_ever(say: Say, root: str, every: int) -> None:
    """Resume, then train; each step and each version is told, the version before the step."""
    with PoolCheckpointer(f"{root}/run.portus", "run", keep=2) as checkpointer:
        model, optimizer = training()
        step = 0
        if any(checkpointer.steps()):
            state: dict[str, Any] = {"model": model.state_dict()}
            step = checkpointer.restore_into(state).version.step
            say(f"from {step}")
        else:
            checkpointer.save({"model": model.state_dict()}, 0).wait()  # before it, no journal
            say("from 0")
        while True:
            advance(model, optimizer)
            step += 1
            if step % every == 0:
                handle = checkpointer.save({"model": model.state_dict()}, step)
                if step % 2:
                    handle.wait()
            say(f"did {step}")


class Stops(Callback):
    """Says each step that was done, and goes no further than ``step``."""

    def __init__(self, say: Say, step: int) -> None:
        self._say = say
        self._step = step

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._say(f"from {trainer.global_step}")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            self._say(f"did {trainer.global_step}")
            threading.Event().wait()  # until it is killed


def train_lightning(say: Say, root: str, resume: str | None, step: int) -> None:
    """A real Trainer that saves every 5 steps, until it waits to be killed after ``step``."""
    keep = ModelCheckpoint(
        dirpath=f"{root}/checkpoints", filename="{step}", every_n_train_steps=5, save_top_k=-1
    )
    trainer = trainer_in(
        root, callbacks=[keep, Stops(say, step)], logger=False, plugins=[PortusIO()]
    )
    trainer.fit(Net(), loader_of(0), ckpt_path=resume)
