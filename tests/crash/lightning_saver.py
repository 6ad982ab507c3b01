"""A Trainer with loader workers that saves every step; all of its state follows from the step."""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader, Dataset

from portus_lightning import PortusIO
from portus_lightning.of_lightning import PortusCompanion
from tests.nursery import Say

WORKERS = 2
BATCHES = 3
"""In an epoch: workers that are forked while a pool is open inherit what they can."""

SIZE = 20_000


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Net(LightningModule):
    """As ``saver.Training``: at step n momentum is n times a pattern of integers, and the weight
    minus their sum; a buffer counts batches."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.pattern = 1 + torch.arange(SIZE, dtype=torch.float64) % 97
        self.weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(300))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.count += 1
        return (self.weight * self.pattern).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=1.0)


class Reports(DummyLogger):
    """Says each save that Portus reported as committed; saves are reported in order."""

    def __init__(self, say: Say, step: int) -> None:
        super().__init__()
        self._say = say
        self._step = step

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if metrics.get("portus/total_ms"):
            self._step += 1
            self._say(f"saved {self._step}")


class Tells(Callback):
    """Says where training starts, and who its loader workers are, which each epoch forks anew."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._workers: list[int | None] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._say(f"started {trainer.global_step}")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        workers = [child.pid for child in multiprocessing.active_children()]
        if workers != self._workers:
            self._say(" ".join(map(str, ["workers", *workers])))
        self._workers = workers


def train_for_ever(say: Say, root: str, resume: str | None, step: int) -> None:
    """Train from the checkpoint ``resume`` of ``step``, or from the start, and save every step."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    keep = ModelCheckpoint(
        dirpath=f"{root}/checkpoints",
        filename="{step}",
        every_n_train_steps=1,
        monitor="step",
        mode="max",
        save_top_k=3,
        enable_version_counter=False,
    )
    say("begin")
    trainer = trainer_in(
        root,
        callbacks=[keep, Tells(say), PortusCompanion()],
        logger=Reports(say, step),
        plugins=[PortusIO()],
    )
    trainer.fit(Net(), loader_of(WORKERS), ckpt_path=resume)


def trainer_in(root: str, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        default_root_dir=root,
        max_epochs=-1,
        enable_model_summary=False,
        enable_progress_bar=False,
        **settings,
    )


def loader_of(workers: int) -> DataLoader[torch.Tensor]:
    context = "fork" if workers else None
    return DataLoader(Rows(), num_workers=workers, multiprocessing_context=context)


def warm_up() -> None:
    """What a first fit imports. No thread stays, and nothing of Portus."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = trainer_in(".", max_steps=1, logger=False, enable_checkpointing=False)
    trainer.fit(Net(), loader_of(0))
