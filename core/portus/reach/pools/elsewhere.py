"""The tensor that an ``Elsewhere`` in a state stands for, in a version of another pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from portus.engine.state.walk import Elsewhere
from portus.errors import CorruptionError, StaleError, UsageError
from portus.reach.index.directory import open_reader
from portus.reach.index.place import Place
from portus.reach.index.reader import PoolReader
from portus.reach.pools.restore import load

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


def within(state: object, place: Elsewhere) -> torch.Tensor:
    """Return the tensor of an ``Elsewhere`` from the state of its version. Raise
    ``CorruptionError`` if there is none."""
    found: Any = state
    with contextlib.suppress(LookupError, TypeError):
        for key in place.path:
            found = found[key]
        if isinstance(found, torch.Tensor):
            return found
    raise CorruptionError(f"{place.pool}: no tensor is at {place.path} of batch {place.batch}")


def fill(state: object, *, pool: str | os.PathLike[str] | None = None) -> object:
    """Return ``state``, as loaded, with the tables filled in: each ``Elsewhere`` in its dicts,
    lists and tuples is replaced by the tensor, which is read from the pool and verified. The caller
    owns the tensors. Blocks while it reads.

    pool: the present place of the tables' pool; None: its place when the state was saved.

    Needed only for a model that is not protected: a protected one accepts such a state as it is.
    Raises ``StaleError`` if the mark was deleted, ``CorruptionError``, ``MediumError``;
    ``UsageError`` for a ``pool`` that is none.
    """
    with contextlib.ExitStack() as stack:
        read: dict[tuple[str, str], object] = {}

        def of(place: Elsewhere, path: str) -> torch.Tensor:
            key = place.pool, place.token
            if key not in read:
                named = Place.parse(place.pool if pool is None else pool, "the pool of tables")
                if named.local_pool is None:
                    raise UsageError(f"{named}: expected the pool file or the DAX device of tables")
                reader = stack.enter_context(contextlib.closing(open_reader(named.path)))
                read[key] = marked_state(reader, place)
            return within(read[key], place)

        return replace_elsewhere(state, of)


def marked_state(pool: PoolReader, place: Elsewhere) -> object:
    """Return the state of the mark of an ``Elsewhere``. Raise ``StaleError`` if it is not in the
    pool, and as ``load``."""
    found = None
    with contextlib.suppress(ValueError):
        found = pool.catalogue().of_token(bytes.fromhex(place.token))
    if found is None:
        raise StaleError(
            f"{pool.medium.info.name}: expected the tables of batch {place.batch}, a version with "
            f"the token {place.token}, found none: it was deleted, or this is not the pool "
            f"{place.pool}"
        )
    return load(pool, found)
