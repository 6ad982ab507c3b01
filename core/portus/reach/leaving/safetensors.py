"""Selects the tensors of a version that fit into a safetensors file, and their places in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from math import prod

from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.spec import TensorSpec
from portus.errors import UsageError
from portus.reach.formats.safetensors import DTYPES, METADATA, NamedTensor


def place(tensors: Mapping[str, TensorSpec]) -> list[tuple[NamedTensor, TensorSpec]]:
    """Return every tensor as the file has it, and as the version has it, in the order of the file.
    Raises ``UsageError`` naming a tensor that safetensors cannot hold."""
    odd = {name: spec.dtype for name, spec in tensors.items() if spec.dtype not in DTYPES}
    if odd:
        name, dtype = next(iter(odd.items()))
        raise UsageError(
            f"{name} is {dtype}, which safetensors does not support ({len(odd)} such tensors); "
            "leave it out with --names, or export to a .pt file"
        )
    if METADATA in tensors:
        raise UsageError(f"a tensor is called {METADATA}; leave it out with --names")
    placed = [
        (NamedTensor(name, DTYPES[spec.dtype], spec.shape, _size_of(spec)), spec)
        for name, spec in tensors.items()
    ]
    return sorted(placed, key=lambda pair: pair[0].rank)


def _size_of(spec: TensorSpec) -> int:
    return prod(spec.shape) * ITEM_SIZES[spec.dtype]


def shared_names(storages: Iterable[tuple[str, Hashable]]) -> list[list[str]]:
    """Return the names of tensors that share memory, which a safetensors file cannot express.
    storages: the names of tensors, with a key of each one's storage."""
    users: dict[Hashable, list[str]] = {}
    for name, storage in storages:
        users.setdefault(storage, []).append(name)
    return [names for names in users.values() if len(names) > 1]
