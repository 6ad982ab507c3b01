"""Lightning runs that are cut and resumed, and compared to the bit with those that were not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from portus_lightning import PortusIO
from tests.adapters.tiny import Net, every_step, files, loader, same, trainer


class Draws(Callback):
    """Uses every generator in each step, and remembers what they gave."""

    def __init__(self) -> None:
        self.drawn: dict[int, tuple[float, ...]] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.drawn[trainer.global_step] = (
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.standard_normal()),
            torch.rand(1).item(),
        )


def run(
    root: Path,
    data: Any,
    keep: Any,
    *,
    resume: Any = None,
    net: type[Net] = Net,
    **changes: Any,
) -> tuple[Net, Draws]:
    """Train three epochs, from the start or from a checkpoint; another global seed each time."""
    seed_everything(7 if resume else 1, verbose=False)
    model, draws = net(), Draws()
    settings = {"max_epochs": 3, "callbacks": [draws, keep]} | changes
    fit = trainer(root, plugin=PortusIO(), **settings)
    fit.fit(model, data, loader(shuffle=False), ckpt_path=resume)
    return model, draws


def check_all(root: Path, make: Any, keep: Any, **changes: Any) -> int:
    """Resume from each checkpoint of a run, and compare. How many were compared."""
    whole, all_drawn = run(root, make(), keep(root), **changes)
    compared = 0
    for name in files(root):
        path = root / "ckpt" / name
        start = torch.load(path)["global_step"]
        if start >= 18:
            continue
        elsewhere = root / f"from-{name}"
        model, draws = run(elsewhere, make(), keep(elsewhere), resume=path, **changes)
        assert model.seen == [each for each in whole.seen if each[0] >= start], name
        assert draws.drawn == {s: d for s, d in all_drawn.drawn.items() if s >= start}, name
        assert same(dict(model.state_dict()), dict(whole.state_dict())), name
        compared += 1
    return compared


def at_steps(root: Path) -> ModelCheckpoint:
    return every_step(root, every_n_train_steps=7)


def at_step_6(root: Path) -> ModelCheckpoint:
    return every_step(root, every_n_train_steps=6)


def at_step_9(root: Path) -> ModelCheckpoint:
    return every_step(root, every_n_train_steps=9)


def at_epochs(root: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        root / "ckpt", filename="{step}", save_top_k=-1, save_on_train_epoch_end=True
    )


def at_validation(root: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        root / "ckpt", filename="{step}", save_top_k=-1, save_on_train_epoch_end=False
    )


def at_step_5(root: Path) -> ModelCheckpoint:
    return every_step(root, every_n_train_steps=5)
