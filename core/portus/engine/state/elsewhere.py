"""A placeholder in a state for a tensor that a version in another pool has.

A ``state_dict`` of a model or an optimizer with protected tables (``portus.embedding``) has an
``Elsewhere`` for each of them, and for what the optimizer keeps of their rows. It refers to a mark:
a version in the pool of the tables for exactly that batch. The engine knows the class, so that
every process can load such a state, and no file is made of it without the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a tensor that is stored in a mark: a version of the tables for one batch.

    pool: the path of the tables' pool. token: the mark's token, in hex. batch: the number of
    batches that the mark contains. path: the keys of the tensor in the mark's state.
    """

    pool: str
    token: str
    batch: int
    path: tuple[str | int, ...]


# The name of the class in a file of ``torch.save``: where it is public.
Elsewhere.__module__ = "portus.embedding.elsewhere"

torch.serialization.add_safe_globals([Elsewhere])
