"""The leaves of a version of a shelf, or of tables: by key path, without a byte of its
storages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from portus.engine.spec import TensorSpec
from portus.engine.state.walk import leaves, walk
from portus.errors import CorruptionError
from portus.reach.format.items import Make, StoredArray, decode
from portus.reach.pools.weights_only import unpickle

Leaf = tuple[str, object]
"""A key path and its value."""


def is_pickle(contents: bytes) -> bool:
    """Return True for contents of tables, False for those of a shelf."""
    return contents[:1] == b"\x80"


def shelf_items(
    contents: bytes, lengths: Sequence[int], make: Make = lambda array: array
) -> dict[str, object]:
    """Return the items of a shelf whose storages have these lengths. Raises ``CorruptionError`` for
    an array that is not all of one of them, and as ``decode``."""

    def make_checked(array: StoredArray) -> object:
        if not 0 <= array.storage < len(lengths) or array.size != lengths[array.storage]:
            raise CorruptionError(f"{array.name}: no storage has its {array.size} bytes")
        return make(array)

    return decode(contents, make_checked)


def leaves_in(
    contents: bytes, lengths: Sequence[int], storages: Sequence[torch.UntypedStorage] | None = None
) -> list[Leaf]:
    """Return the leaves in contents, of storages of these lengths. Of a shelf, a tensor or an array
    is a ``StoredArray``; of tables, a plain tensor is a ``TensorSpec``. storages: these, with their
    bytes, which torch needs for tensors of some kinds, such as quantized ones. Raises
    ``CorruptionError``, also without such bytes, and ``UsageError``."""
    if not is_pickle(contents):
        return leaves(shelf_items(contents, lengths))
    if storages is None:
        storages = [torch.UntypedStorage(length, device="meta") for length in lengths]
    state = unpickle(contents, storages)
    specs = {spec.name: spec for spec in walk(state, storages).tensors}
    return [(path, specs.get(path, value)) for path, value in leaves(state)]


def tensors_among(found: Iterable[Leaf]) -> tuple[TensorSpec, ...]:
    """Return the plain tensors among leaves; an array of a shelf as its bytes."""
    return tuple(
        value if isinstance(value, TensorSpec) else value.raw(path)
        for path, value in found
        if isinstance(value, (TensorSpec, StoredArray))
    )
