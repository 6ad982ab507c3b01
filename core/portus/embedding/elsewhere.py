"""What stands in for a protected table in states that others save: where the table is.

A ``state_dict`` of a model or an optimizer with protected tables has an ``Elsewhere`` for each of
them, and for what the optimizer keeps of their rows. It leads to a mark: a version in the pool of
the tables that stands for that very batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from portus.client.loading.restore import load
from portus.client.state.codecs import MARK, decode_stand_ins, is_stand_in, register_codec
from portus.embedding.store import MARKS
from portus.errors import StaleError
from portus.index.directory import open_reader
from portus.index.reader import PoolReader


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


_NAME: Final = "portus.embedding.Elsewhere"

register_codec(
    Elsewhere,
    lambda value: {**asdict(value), "path": list(value.path)},
    lambda state: Elsewhere(**{**state, "path": tuple(state["path"])}),
    name=_NAME,
)
torch.serialization.add_safe_globals([Elsewhere])


def fill(state: object) -> object:
    """Return ``state``, as loaded, with the tables filled in: each ``Elsewhere`` in its dicts,
    lists and tuples is replaced by the tensor, which is read from the pool and verified. The caller
    owns the tensors. Blocks while it reads.

    Needed only for a model that is not protected: a protected one accepts such a state as it is.
    Raises ``StaleError`` if the mark was deleted, ``CorruptionError``, ``MediumError``.
    """
    with contextlib.ExitStack() as stack:
        read: dict[tuple[str, str], object] = {}

        def of(place: Elsewhere) -> torch.Tensor:
            key = place.pool, place.token
            if key not in read:
                pool = stack.enter_context(contextlib.closing(open_reader(place.pool)))
                read[key] = marked(pool, place)
            return within(read[key], place.path)

        return replaced(state, of)


def marked(pool: PoolReader, place: Elsewhere) -> object:
    """The state of a mark. Raises as ``fill``."""
    model = pool.catalogue().models.get(MARKS)
    for entry in () if model is None else model.versions:
        if entry.info.token.hex() == place.token:
            return load(pool, entry)
    raise StaleError(
        f"{pool.medium.info.name}: expected the tables of batch {place.batch}, a version of "
        f"{MARKS!r} with the token {place.token}, found none: it was deleted, or this is not "
        f"the pool {place.pool}"
    )


def within(state: object, path: Iterable[str | int]) -> torch.Tensor:
    """What is at a path of a state."""
    found: Any = state
    for key in path:
        found = found[key]
    assert isinstance(found, torch.Tensor)
    return found


def replaced(state: Any, of: Callable[[Elsewhere], object]) -> Any:
    """``state`` with another value for each ``Elsewhere``, or stand-in for one, which a torch file
    of Portus has; containers that have one are copied."""
    if is_stand_in(state) and state[MARK] == _NAME:
        state = decode_stand_ins(state)
    if isinstance(state, Elsewhere):
        return of(state)
    if isinstance(state, Mapping):
        changed = {key: replaced(value, of) for key, value in state.items()}
        if any(changed[key] is not value for key, value in state.items()):
            copy: Any = state.copy() if hasattr(state, "copy") else dict(state)
            copy.update(changed)
            return copy
        return state
    if type(state) in (list, tuple):
        values = [replaced(value, of) for value in state]
        if any(one is not other for one, other in zip(values, state, strict=True)):
            return type(state)(values)
    return state
