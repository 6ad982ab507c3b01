"""What stands in a state for a tensor that another version has, in another pool.

A ``state_dict`` of a model or an optimizer with protected tables (``portus.embedding``) has an
``Elsewhere`` for each of them, and for what the optimizer keeps of their rows. It leads to a mark:
a version in the pool of the tables that stands for that very batch. The client knows it, so that
every process can load such a state, and no file is made of it without the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from portus.client.state.codecs import (
    MARK,
    codec_named,
    decode_stand_ins,
    is_stand_in,
    register_codec,
)
from portus.client.state.tree import ELSEWHERE, below, object_paths, objects_of, said_at
from portus.client.state.tree_reader import TreeReader


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


def _decoded(state: Any) -> Elsewhere:
    place = Elsewhere(**{**state, "path": tuple(state["path"])})
    is_text = type(place.pool) is str and type(place.token) is str
    if not is_text or not all(type(key) in (str, int) for key in place.path):
        raise ValueError(f"not the place of a tensor: {state!r:.200}")
    return place


register_codec(
    Elsewhere,
    lambda value: {**asdict(value), "path": list(value.path)},
    _decoded,
    name=ELSEWHERE,
)
torch.serialization.add_safe_globals([Elsewhere])

Filler = Callable[[Elsewhere, str], object]
"""Gives what is to be at a key path in place of an ``Elsewhere``."""


def replaced(state: Any, of: Filler, path: str = "") -> Any:
    """``state`` with another value for each ``Elsewhere``, or stand-in for one, which a torch file
    of Portus has; containers that have one are copied."""
    if is_stand_in(state) and state[MARK] == ELSEWHERE:
        state = decode_stand_ins(state)
    if isinstance(state, Elsewhere):
        return of(state, path)
    if isinstance(state, Mapping):
        changed = {key: replaced(value, of, f"{below(path)}{key}") for key, value in state.items()}
        if any(changed[key] is not value for key, value in state.items()):
            copy: Any = state.copy() if hasattr(state, "copy") else dict(state)
            copy.update(changed)
            if hasattr(state, "__dict__"):  # such as ``_metadata`` of a module's state
                vars(copy).update(vars(state))
            return copy
        return state
    if type(state) in (list, tuple):
        values = [replaced(each, of, f"{below(path)}{place}") for place, each in enumerate(state)]
        if any(one is not other for one, other in zip(values, state, strict=True)):
            return type(state)(values)
    return state


def places_in(tree: bytes) -> dict[str, Elsewhere]:
    """Return each ``Elsewhere`` in the tree of a state, by key path. Raises ``CorruptionError``,
    and ``UsageError`` for one that is malformed."""
    found: dict[str, Elsewhere] = {}
    for path, node in objects_of(tree, ELSEWHERE).items():
        with said_at(path):
            state = TreeReader((), (), None, None).value(node, "", 0)
            place = codec_named(ELSEWHERE).decoded(state)
        assert isinstance(place, Elsewhere)
        found[path] = place
    return found


def by_place(tree: bytes, keep: Callable[[str], bool]) -> Callable[[str], bool]:
    """``keep``, for which an ``Elsewhere`` in the tree is one leaf: asked for by its own key path,
    and not by those of what it is stored as."""
    places = places_in(tree)
    if not places:
        return keep
    owners = {leaf: path for leaf, path in object_paths(tree).items() if path in places}
    return lambda name: keep(owners.get(name, name))
