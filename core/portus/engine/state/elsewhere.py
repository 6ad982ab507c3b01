"""What stands in a state for a tensor that another version has, in another pool.

A ``state_dict`` of a model or an optimizer with protected tables (``portus.embedding``) has an
``Elsewhere`` for each of them, and for what the optimizer keeps of their rows. It leads to a mark:
a version in the pool of the tables that stands for that very batch. The client knows it, so that
every process can load such a state, and no file is made of it without the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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

Filler = Callable[[Elsewhere, str], object]
"""Gives what is to be at a key path in place of an ``Elsewhere``."""


def replace_elsewhere(state: Any, of: Filler, path: str = "") -> Any:
    """``state`` with another value for each ``Elsewhere``; containers that have one are copied."""
    if isinstance(state, Elsewhere):
        return of(state, path)
    start = f"{path}." if path else ""
    if isinstance(state, Mapping):
        changed = {
            key: replace_elsewhere(value, of, f"{start}{key}") for key, value in state.items()
        }
        if any(changed[key] is not value for key, value in state.items()):
            copy: Any = state.copy() if hasattr(state, "copy") else dict(state)
            copy.update(changed)
            if hasattr(state, "__dict__"):  # such as ``_metadata`` of a module's state
                vars(copy).update(vars(state))
            return copy
        return state
    if type(state) in (list, tuple):
        values = [
            replace_elsewhere(each, of, f"{start}{place}") for place, each in enumerate(state)
        ]
        if any(one is not other for one, other in zip(values, state, strict=True)):
            return type(state)(values)
    return state
