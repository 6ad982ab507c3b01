"""A program with ``ModelParallelStrategy``, FSDP2 on CPUs, as ``test_lightning_sharded`` runs it.

``python sharded_lightning.py NAME [--resume PATH] [--kill-at STEP] [--stock]``: in the working
directory; what it drew and ended with goes to ``NAME-<rank>.pt``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader

from portus_lightning import PortusIO
from tests.adapters.tiny import Numbers, trainer

COUNT = 2


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
        )
        self.register_buffer("seen", torch.zeros(3))

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        if not isinstance(next(self.parameters()), DTensor):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        assert isinstance(self.seen, torch.Tensor)
        self.seen += 1
        loss: torch.Tensor = self.layers(batch / 24).pow(2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Draws(Callback):
    """What was drawn in each step; and a death in the middle of a save."""

    def __init__(self, kill_at: int | None) -> None:
        self.drawn: list[tuple[int, float, float]] = []
        self.kill_at = kill_at

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        seed = 100 + trainer.global_rank + 7 * (trainer.ckpt_path is not None)
        random.seed(seed)
        torch.manual_seed(seed)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.drawn.append((trainer.global_step, random.random(), torch.rand(1).item()))
        if trainer.global_step == self.kill_at and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in module.state_dict().items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--resume")
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--mirror")
    args = parser.parse_args()
    warnings.simplefilter("always")
    seed_everything(1, verbose=False)
    draws = Draws(args.kill_at)
    keep = ModelCheckpoint(
        "ckpt",
        filename="{step}",
        monitor="step" if args.top_k > 0 else None,
        mode="max",
        every_n_train_steps=1,
        save_top_k=args.top_k,
        save_last=True,
    )
    strategy = ModelParallelStrategy(data_parallel_size=COUNT, tensor_parallel_size=1)
    fit = trainer(
        Path.cwd(),
        strategy=strategy,
        devices=COUNT,
        use_distributed_sampler=False,  # each rank has its own dropout, and the same rows
        max_epochs=1,
        callbacks=[draws, keep],
        plugin=None if args.stock else PortusIO(mirror=args.mirror),
    )
    module = Net()
    data: Any = StatefulDataLoader(Numbers(), batch_size=4)
    fit.fit(module, data, ckpt_path=args.resume)
    result = {"drawn": draws.drawn, "model": whole(module), "best": keep.best_model_path}
    torch.save(result, f"{args.name}-{fit.global_rank}.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a process that ends, also without Portus


if __name__ == "__main__":
    main()
