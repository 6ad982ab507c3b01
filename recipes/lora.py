"""LoRA on a frozen GPT, in a loop of your own: frozen weights are written once.

    python recipes/lora.py                   the tiny model, three saves
    python recipes/lora.py --size 124M       1 GB of memory, some minutes on a CPU

Every checkpoint is the whole state: frozen weights, adapters, and the optimizer of the adapters.
But in a pool a version shares equal bytes with the previous one, so from the second save on only
trained tensors are written. The pool is a file here; it can also be a device for persistent memory,
or a storage host.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import portus
from gpt import GPT, SIZES, Linear, Text, adamw


class Adapted(nn.Module):
    """A frozen linear layer, and a trained correction of low rank; at first it is 0."""

    def __init__(self, frozen: Linear, rank: int, alpha: float = 16.0) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))
        self.scale = alpha / rank
        nn.init.normal_(self.down, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        correction = functional.linear(functional.linear(x, self.down), self.up)
        result: torch.Tensor = self.frozen(x) + self.scale * correction
        return result


def adapted(model: GPT, rank: int) -> GPT:
    """Return ``model``, frozen, with adapters in the attention of every block."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out"):
            setattr(block, name, Adapted(getattr(block, name), rank))
    return model


def train(
    pool: str, size_name: str, *, saves: int, steps: int, rank: int = 8
) -> Iterator[portus.SaveStats]:
    """Train, and save every ``steps`` steps; yield the cost of each save."""
    torch.manual_seed(1)
    size = SIZES[size_name]
    model = adapted(GPT(size), rank)
    optimizer = adamw(model, 1e-3)
    data = DataLoader(Text(size.context), batch_size=2, shuffle=True)
    batches: Any = iter(data)
    with portus.PoolCheckpointer(pool, "lora", keep=2) as checkpointer:
        for step in range(1, saves * steps + 1):
            loss: Any = model(next(batches))
            loss.backward()
            optimizer.step()  # waits for a copy in flight, if need be
            optimizer.zero_grad()
            if step % steps == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                handle = checkpointer.save(state, step)
                handle.wait()  # only to print the cost: omit it
                yield handle.stats


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tiny", action="store_true", help="the same as --size tiny")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="from one save to the next")
    parser.add_argument("--pool", default="runs/lora/lora.portus")
    args = parser.parse_args()
    size = "tiny" if args.tiny else args.size
    print(f"{'save':>4} {'state':>15} {'written':>15} {'shared':>15}   (bytes)")
    for number, cost in enumerate(train(args.pool, size, saves=args.saves, steps=args.steps), 1):
        print(
            f"{number:4} {cost.state_bytes:15,} {cost.copied_bytes:15,} {cost.shared_bytes:15,}",
            flush=True,
        )


if __name__ == "__main__":
    main()
