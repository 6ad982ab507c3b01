"""An ordinary training script for Accelerate. It knows nothing of Portus."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    """Where the script is; registered for checkpointing."""

    def __init__(self) -> None:
        self.epoch = 0
        self.done = 0
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def network(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(width, 1),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--kill-after", type=int, help="die right after this save was asked for")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    loading = DataLoaderConfiguration(
        use_stateful_dataloader=args.stateful, use_seedable_sampler=args.seedable
    )
    project = ProjectConfiguration(
        project_dir=args.root, automatic_checkpoint_naming=True, total_limit=args.limit
    )
    accelerator = Accelerator(cpu=True, dataloader_config=loading, project_config=project)
    set_seed(7, device_specific=True)
    model = network(args.width)
    rows = torch.arange(24.0).unsqueeze(1).expand(24, 4).contiguous()
    data: Any = DataLoader(
        TensorDataset(rows), batch_size=4, shuffle=True, num_workers=args.workers
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    saved = os.path.join(args.root, "checkpoints")
    if os.path.isdir(saved) and os.listdir(saved):
        accelerator.load_state()
        accelerator.project_configuration.iteration = progress.total
    log = open(os.path.join(args.root, f"losses-{accelerator.process_index}.txt"), "a")  # noqa: SIM115 - open until the process is killed
    while progress.epoch < args.epochs:
        batches = data
        if progress.done and not args.stateful:
            batches = skip_first_batches(data, progress.done)
        for (batch,) in batches:
            loss = model(batch / 24).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            what = hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:8]
            print(progress.total, what, float(loss).hex(), file=log, flush=True)
            progress.done += 1
            progress.total += 1
            if accelerator.gradient_state.end_of_dataloader:
                progress.epoch, progress.done = progress.epoch + 1, 0
            accelerator.save_state()
            if args.kill_after and accelerator.num_processes > 1 and progress.total == 1:
                time.sleep(1)  # one checkpoint that all processes have finished
            if progress.total == args.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
    accelerator.end_training()
    state = [*model.state_dict().values(), *optimizer.state_dict()["state"][0].values()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state)).hexdigest()
    print("end", digest, float(torch.rand(1)).hex(), file=log, flush=True)
    if accelerator.num_processes > 1:
        os._exit(0)  # gloo's threads sometimes abort a process that ends, also without Portus


if __name__ == "__main__":
    main()
