"""A GPT with DeepSpeed: an ordinary script. ``PORTUS_DEEPSPEED=1`` turns Portus on.

    PORTUS_DEEPSPEED=1 deepspeed recipes/gpt_deepspeed.py --size 1.5B
    PORTUS_DEEPSPEED=1 python recipes/gpt_deepspeed.py --tiny                 on a laptop

When restarted, it continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, DistributedSampler

from gpt import GPT, SIZES, Text, adamw, warm_then_cosine

CONFIG: Final = Path(__file__).with_name("configs") / "deepspeed" / "ds_config.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tiny", action="store_true", help="the tiny model, on the CPU")
    parser.add_argument("--config", type=Path, default=CONFIG, help="DeepSpeed's")
    parser.add_argument("--out", help="directory of the run; runs/deepspeed-SIZE by default")
    parser.add_argument("--steps", type=int, help="100,000 by default; 20 for the tiny model")
    parser.add_argument("--save-every", type=int, help="100 steps; 5 for the tiny model")
    parser.add_argument("--local_rank", type=int, default=0, help="from DeepSpeed's launcher")
    found = parser.parse_args()
    found.size = "tiny" if found.tiny else found.size
    small = found.size == "tiny"
    found.out = found.out or f"runs/deepspeed-{found.size}"
    found.steps = found.steps or (20 if small else 100_000)
    found.save_every = found.save_every or (5 if small else 100)
    return found


def deepspeed_for(args: argparse.Namespace) -> Any:
    """Return DeepSpeed; on a laptop for the CPU, and without a launcher for one process."""
    if args.tiny:
        os.environ["DS_ACCELERATOR"] = "cpu"
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}.items():
            os.environ.setdefault(name, value)
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    import deepspeed

    return deepspeed


def main() -> None:
    args = arguments()
    deepspeed = deepspeed_for(args)
    torch.manual_seed(1)
    size = SIZES[args.size]
    model = GPT(size)
    optimizer = adamw(model, size.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_then_cosine(step, args.steps)
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=json.loads(args.config.read_text()),
    )
    text = Text(size.context)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(text, drop_last=True)
    data = DataLoader(text, engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    path, _ = engine.load_checkpoint(args.out)
    done = engine.global_steps if path else 0
    if engine.global_rank == 0:
        print(f"{args.size} on {engine.world_size} ranks, from step {done}", flush=True)
    engine.train()
    for epoch in range(done // len(data), args.steps):
        sampler.set_epoch(epoch)
        for place, batch in enumerate(data):
            if epoch * len(data) + place < done:
                continue
            torch.manual_seed(engine.global_steps)  # dropout continues as it would have
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            engine.step()
            step = engine.global_steps
            if step % args.save_every == 0 or step == args.steps:
                engine.save_checkpoint(args.out)
            if engine.global_rank == 0:
                print(f"step {step:4d}  loss {float(loss.detach()):.6f}", flush=True)
            if step == args.steps:
                engine.destroy()
                return


if __name__ == "__main__":
    main()
