"""A script for Accelerate, of any number of processes, that says which samples it is given at which
step. It knows nothing of Portus but that it is turned on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader, Dataset

import portus_accelerate
from tests.nursery import Say

SAMPLES = 22
EPOCHS = 2


class Rows(Dataset[torch.Tensor]):
    """Each row says which it is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


class Progress:
    """Where the script is; registered for checkpointing."""

    def __init__(self) -> None:
        self.epoch = self.done = self.total = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def join(meeting: str, rank: int, ranks: int) -> None:
    """Be one of ``ranks`` processes, as a launcher tells them."""
    if ranks == 1:
        return
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: f"{value}" for name, value in numbers.items()})
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="epochs", MASTER_ADDR="", MASTER_PORT="0")
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=ranks)


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
    a digest of the weights. meeting: a path that was never used, where ranks find each other.
    settings: of the script."""
    said: dict[str, Any] = {"skip": True, "drop_last": False, "accumulate": 1, "stop": -1}
    said |= settings
    named = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
    loading = DataLoaderConfiguration(
        data_seed=2 if resume else 1, **{name: said[name] for name in named if name in said}
    )
    join(meeting, rank, ranks)
    torch.manual_seed(rank + (100 if resume else 1))
    accelerator = Accelerator(
        cpu=True,
        project_dir=root,
        dataloader_config=loading,
        gradient_accumulation_steps=said["accumulate"],
    )
    portus_accelerate.enable(accelerator, **portus)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    data: Any = DataLoader(
        Rows(), batch, shuffle=True, num_workers=workers, drop_last=said["drop_last"]
    )
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if resume is not None:
        accelerator.load_state(resume)
    while progress.epoch < EPOCHS and progress.total != said["stop"]:
        is_within = bool(progress.done) and said["skip"]
        for rows in skip_first_batches(data, progress.done) if is_within else data:
            numbers = " ".join(str(int(row)) for row in rows[:, 0])
            say(f"step {progress.total} {progress.epoch} {progress.done} {numbers}")
            with accelerator.accumulate(model):
                accelerator.backward(model(rows / SAMPLES).pow(2).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.done += 1
            progress.total += 1
            if accelerator.gradient_state.end_of_dataloader:
                progress.epoch, progress.done = progress.epoch + 1, 0
            if accelerator.sync_gradients:
                accelerator.save_state(os.fspath(Path(root, "ckpt", f"step_{progress.total}")))
            if progress.total == said["stop"]:
                break
    accelerator.end_training()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    say(f"ended {progress.total} {hashlib.sha256(weights).hexdigest()}")
