"""What stands in a state for a tensor that another version has, in another pool.

A ``state_dict`` of a model or an optimizer with protected tables (``portus.embedding``) has an
``Elsewhere`` for each of them, and for what the optimizer keeps of their rows. It leads to a mark:
a version in the pool of the tables that stands for that very batch. The client knows it, so that
every process can load such a state, and no file is made of it without the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Elsewhere:
    """Stands in for a tensor that is stored in a mark: a version of the tables for one batch.

    pool: the path of the tables' pool. token: the mark's token, in hex. batch: how many batches the
    mark contains. path: the keys that lead to the tensor in the mark's state.
    """

    pool: str
    token: str
    batch: int
    path: tuple[str | int, ...]


# What a file of ``torch.save`` calls the class: where it is public.
Elsewhere.__module__ = "portus.embedding.elsewhere"

torch.serialization.add_safe_globals([Elsewhere])
