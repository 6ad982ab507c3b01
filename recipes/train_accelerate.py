"""A GPT under Accelerate: an ordinary script. ``portus_config:`` in the YAML turns Portus on.

    accelerate launch --config_file recipes/configs/accelerate/124M.yaml \\
        recipes/train_accelerate.py --size 124M
    accelerate launch --config_file ... --num_machines 1 --num_processes 1 \\
        recipes/train_accelerate.py --tiny                                    on a laptop

When restarted, it continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DistributedType, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

from gpt import GPT, SIZES, Text, adamw, warm_then_cosine

KEPT: Final = 2
"""The number of checkpoints that Accelerate keeps."""


class Progress:
    """The position of training. Registered, so it is in every checkpoint."""

    def __init__(self) -> None:
        self.step = 0
        self.saves = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tiny", action="store_true", help="the tiny model, on the CPU")
    parser.add_argument("--out", help="directory of the run; runs/accelerate-SIZE by default")
    parser.add_argument("--steps", type=int, help="100,000 by default; 20 for the tiny model")
    parser.add_argument("--save-every", type=int, help="100 steps; 5 for the tiny model")
    parser.add_argument("--batch", type=int, help="sequences of one process in a step")
    parser.add_argument("--learning-rate", type=float, help="the highest")
    found = parser.parse_args()
    found.size = "tiny" if found.tiny else found.size
    small = found.size == "tiny"
    found.out = found.out or f"runs/accelerate-{found.size}"
    found.steps = found.steps or (20 if small else 100_000)
    found.save_every = found.save_every or (5 if small else 100)
    found.batch = found.batch or SIZES[found.size].batch
    found.learning_rate = found.learning_rate or SIZES[found.size].learning_rate
    return found


def main() -> None:
    args = arguments()
    project = ProjectConfiguration(args.out, automatic_checkpoint_naming=True, total_limit=KEPT)
    accelerator = Accelerator(cpu=args.tiny or None, project_config=project)
    set_seed(1)
    size = SIZES[args.size]
    # Under FSDP one process makes the model, and the others get their shards from it.
    sharded = accelerator.distributed_type == DistributedType.FSDP
    with torch.device("meta" if sharded and not accelerator.is_main_process else "cpu"):
        made = GPT(size)
    text = Text(size.context)
    model: Any
    optimizer: Any = adamw(made, args.learning_rate)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_then_cosine(step // accelerator.num_processes, args.steps)
    )
    data: Any = DataLoader(text, batch_size=args.batch, shuffle=True, drop_last=True)
    model, optimizer, data, schedule = accelerator.prepare(made, optimizer, data, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if any(Path(args.out, "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
        project.iteration = progress.saves
    accelerator.print(
        f"{args.size} on {accelerator.num_processes} ranks, from step {progress.step}"
    )
    model.train()
    while progress.step < args.steps:
        for batch in rest_of_epoch(data, progress.step):
            loss = model(batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % args.save_every == 0 or progress.step == args.steps:
                progress.saves += 1
                accelerator.save_state()
            accelerator.print(f"step {progress.step:4d}  loss {float(loss.detach()):.6f}")
            if progress.step == args.steps:
                break
    accelerator.end_training()


def rest_of_epoch(data: Any, step: int) -> Any:
    """Return the batches of an epoch that were not yet trained on after ``step`` steps."""
    done = step % len(data)
    return skip_first_batches(data, done) if done else data


if __name__ == "__main__":
    main()
