"""A training of several ranks with a mirror: run, mirror, epochs."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer

from portus_lightning import PortusIO
from tests.adapters.tiny import Net, every_step, loader


class Telling(Net):
    def on_train_start(self) -> None:
        print(f"rank {self.global_rank} starts at {self.global_step}", flush=True)


def main(run: str, mirror: str, epochs: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    model: LightningModule = Telling()
    Trainer(
        default_root_dir=run,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=int(epochs),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[every_step(Path(run), save_last=True)],
        plugins=[PortusIO(mirror=mirror)],
    ).fit(model, loader(), ckpt_path="last")


if __name__ == "__main__":
    main(*sys.argv[1:])
