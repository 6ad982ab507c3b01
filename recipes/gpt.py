"""A GPT, its sizes, and a text to train it on.

Plain PyTorch, without Portus and without a framework: every recipe trains this model.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

TEXT_BYTES_MAX: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a GPT.

    context: the tokens that it sees at once. vocabulary: the number of tokens. ranks: the processes
    that share the state, 1 if each has all of it. recompute: compute the activations of a block
    again in backward, instead of keeping them. batch: the sequences of one process in a step.
    learning_rate: the highest one.
    """

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.1
    ranks: int = 1
    recompute: bool = False
    batch: int = 8
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


def _sharded(layers: int, width: int, heads: int, ranks: int, rate: float) -> Size:
    """Return one of GPT-3's shapes; Megatron-LM's vocabulary, a multiple of any count of ranks
    here, so no shard is padded; no dropout, as models of that size are trained."""
    return Size(
        layers=layers, width=width, heads=heads, context=2048, vocabulary=51200, dropout=0.0,
        ranks=ranks, recompute=True, batch=4, learning_rate=rate,
    )  # fmt: skip


SIZES: Final = {
    "tiny": Size(layers=2, width=128, heads=4, context=64, vocabulary=256),
    "demo": Size(layers=4, width=256, heads=4, context=96, vocabulary=256),
    "cost": Size(layers=4, width=416, heads=4, context=96, vocabulary=256),
    "124M": Size(layers=12, width=768, heads=12, batch=16, learning_rate=6e-4),
    "355M": Size(layers=24, width=1024, heads=16, batch=16, learning_rate=3e-4),
    "774M": Size(layers=36, width=1280, heads=20, learning_rate=2.5e-4),
    "1.5B": Size(layers=48, width=1600, heads=25, batch=4, learning_rate=2e-4),
    "6.7B": _sharded(32, 4096, heads=32, ranks=8, rate=1.2e-4),
    "13B": _sharded(40, 5120, heads=40, ranks=8, rate=1e-4),
    "22B": _sharded(48, 6144, heads=64, ranks=16, rate=1e-4),
}
"""The sizes by name. "tiny" is for tests and laptops, "demo" and "cost" for ``make demo``; the
others are GPT-2's four and three sharded ones; 22B is the largest of the Portus paper."""


class Linear(nn.Linear):
    """A linear layer with GPT-2's initial values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with GPT-2's initial values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and before a dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads, self.dropout = size.heads, size.dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.grow, self.shrink = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block. x: (batch, length, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed = self.shrink(functional.gelu(self.grow(self.norms[1](x))))
        return x + functional.dropout(fed, self.dropout, self.training)


class GPT(nn.Module):
    """The model of GPT-2. The embedding of the tokens is the head too: one tensor, one name."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = Embedding(size.vocabulary, size.width)
        self.places = Embedding(size.context, size.width)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it, in nats. tokens:
        (batch, length + 1), integers."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.size.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """Return the optimizer of all recipes. Only trained parameters have state."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def warm_then_cosine(step: int, steps: int) -> float:
    """Return the learning rate at a step of ``steps``, as a part of the highest: up for a tenth of
    them, then down to a tenth of it."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, steps - warm))
    return 0.55 + 0.45 * math.cos(math.pi * done)


def shard(model: GPT, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Shard by FSDP2: ranks keep parts of each tensor in float32, and compute in ``compute``."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class Text(Dataset[torch.Tensor]):
    """Windows of ``context`` + 1 bytes of the standard library's modules, one after another.

    A token is a byte, whatever the vocabulary: put your own tokens here.
    """

    def __init__(self, context: int) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
        self._bytes = torch.frombuffer(bytearray(text[:TEXT_BYTES_MAX]), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._context
        return self._bytes[start : start + self._context + 1].long()
