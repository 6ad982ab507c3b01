"""Models, data and Trainers as small as they can be."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from portus_lightning import PortusIO

BATCHES = 6

# What Lightning says about runs as small and odd as these.
NO_FUSS = [
    pytest.mark.filterwarnings(f"ignore:{start}")
    for start in (
        "You defined a `validation_step` but have no",
        "You are using the `DataLoader`",
        "You're resuming from a checkpoint that ended before the epoch ended",
        "The dirpath has changed from",
        "'set_vital' is deprecated",  # torchdata's
        "Found .* in eval mode at the start of training",
    )
]


class Numbers(Dataset[torch.Tensor]):
    """24 rows that tell which they are; ``noisy`` ones draw from torch's generator too."""

    def __init__(self, noisy: bool = False) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((4,), float(index))
        return row + torch.rand(4) if self.noisy else row


class Net(LightningModule):
    """Buffers that change in forward, dropout, AdamW with a schedule."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(width, 1),
        )
        self.seen: list[tuple[int, str]] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(batch / 24)
        return result

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        digest = hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:12]
        self.seen.append((self.global_step, digest))
        loss: torch.Tensor = self(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val", self(batch).pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader(**changes: Any) -> DataLoader[torch.Tensor]:
    settings = {"batch_size": 4, "shuffle": True}
    return DataLoader(Numbers(), **(settings | changes))


def trainer(root: Path, *, plugin: object = "portus", **changes: Any) -> Trainer:
    """A quiet Trainer on the CPU, for one epoch of six steps."""
    plugins = [PortusIO()] if plugin == "portus" else [plugin] if plugin else []
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "default_root_dir": root,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "max_epochs": 1,
        "plugins": plugins,
    }
    return Trainer(**(settings | changes))


def every_step(root: Path, **changes: Any) -> ModelCheckpoint:
    """A checkpoint after each step, all of them kept."""
    settings: dict[str, Any] = {
        "dirpath": root / "ckpt",
        "filename": "{step}",
        "every_n_train_steps": 1,
        "save_top_k": -1,
    }
    return ModelCheckpoint(**(settings | changes))


def same(state: object, other: object) -> bool:
    """True for nested states with equal bits, types and keys."""
    if type(state) is not type(other):
        return False
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return state.dtype == other.dtype and torch.equal(state, other)
    if isinstance(state, dict) and isinstance(other, dict):
        return list(state) == list(other) and all(same(state[k], other[k]) for k in state)
    if isinstance(state, list | tuple) and isinstance(other, list | tuple):
        return len(state) == len(other) and all(map(same, state, other))
    return bool(state == other)


def files(root: Path) -> list[str]:
    """Names in the checkpoint directory."""
    return sorted(os.listdir(root / "ckpt"))
