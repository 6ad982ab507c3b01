"""The tables of a state that others saved: read from the marks that it leads to."""

from __future__ import annotations

import contextlib
import os

import torch

from portus.client.loading.elsewhere import opened, version_of, within
from portus.client.loading.restore import load
from portus.client.state.elsewhere import Elsewhere as Elsewhere
from portus.client.state.elsewhere import replaced
from portus.index.reader import PoolReader


def fill(state: object, *, pool: str | os.PathLike[str] | None = None) -> object:
    """Return ``state``, as loaded, with the tables filled in: each ``Elsewhere`` in its dicts,
    lists and tuples is replaced by the tensor, which is read from the pool and verified. The caller
    owns the tensors. Blocks while it reads.

    pool: where the tables' pool is now; None: where it was when the state was saved.

    Needed only for a model that is not protected: a protected one accepts such a state as it is.
    Raises ``StaleError`` if the mark was deleted, ``CorruptionError``, ``MediumError``;
    ``UsageError`` for a ``pool`` that is none.
    """
    with contextlib.ExitStack() as stack:
        read: dict[tuple[str, str], object] = {}

        def of(place: Elsewhere, path: str) -> torch.Tensor:
            key = place.pool, place.token
            if key not in read:
                read[key] = marked(stack.enter_context(opened(place, pool)), place)
            return within(read[key], place)

        return replaced(state, of)


def marked(pool: PoolReader, place: Elsewhere) -> object:
    """The state of a mark. Raises as ``fill``."""
    return load(pool, version_of(pool, place))


__all__ = ["Elsewhere", "fill", "marked"]
