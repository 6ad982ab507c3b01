"""The bytes of a checkpoint of each size, and of a pool that keeps two of them.

    python recipes/checkpoint_bytes.py          the table of README.md

Nothing is allocated: models and optimizers are made on the meta device, and step there once, so the
optimizer's state is torch's real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from gpt import GPT, SIZES, Size, adamw

KEPT: Final = 2
"""The checkpoints that a pool keeps in these figures."""

BESIDES: Final = 2
"""The versions that need more room: the one being written, and the one that the last commit
released, whose space is free at the next."""

RECORDS: Final = 1 << 20
"""The bytes that Portus reserves for the records of a version."""

TABLE: Final = ("tiny", "124M", "355M", "774M", "1.5B", "6.7B", "13B", "22B")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The bytes that one save stores, of float32 parameters and AdamW's state of them.

    state: all of it; each tensor once, under however many names. rank: the first rank's part, and
    no other has more; the same as ``state`` without shards.
    """

    parameters: int
    state: int
    rank: int

    @property
    def pool(self) -> int:
        """Return the largest size of one rank's pool file, but for rounding up to 2 MiB."""
        return (KEPT + BESIDES) * (self.rank + RECORDS)


def checkpoint_of(size: Size) -> Checkpoint:
    """Return the bytes of a checkpoint, computed on the meta device."""
    with torch.device("meta"):
        model = GPT(size)
    tensors = state_tensors(model)
    return Checkpoint(
        parameters=sum(each.numel() for each in model.parameters()),
        state=sum(each.nbytes for each in tensors),
        rank=sum(_first_shard(each, size.ranks) for each in tensors),
    )


def state_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and AdamW's state after one step. On the meta device it is free."""
    optimizer = adamw(model, 1e-3)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [each for state in optimizer.state.values() for each in state.values()]
    return [*model.parameters(), *moments]


def _first_shard(tensor: torch.Tensor, ranks: int) -> int:
    """Return the bytes of a tensor on rank 0: FSDP2 cuts the first dimension. Scalars are the same
    everywhere, and torch spreads them over the ranks; at most all are on one."""
    if tensor.dim() == 0 or ranks == 1:
        return tensor.nbytes
    return tensor.chunk(ranks)[0].nbytes


def row(name: str) -> str:
    """Return a line of the table."""
    size, found = SIZES[name], checkpoint_of(SIZES[name])
    of_each = f"{size.ranks} x " if size.ranks > 1 else ""
    cells = (
        name,
        f"{size.layers} x {size.width}",
        f"{found.parameters:,}",
        f"{found.state:,}",
        in_words(found.state),
        f"{of_each}{found.rank:,}",
        f"{of_each}{in_words(found.pool)}",
    )
    return f"| {' | '.join(cells)} |"


def in_words(size: int) -> str:
    """Return a size in GiB, or MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**27 else f"{size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    for _name in TABLE:
        print(row(_name))
