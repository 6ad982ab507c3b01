"""The tensors of a version that fit into a safetensors file, and their places in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.spec import TensorSpec
from portus.errors import UsageError
from portus.reach.formats.safetensors import DTYPES, LENGTH_SIZE, METADATA, NamedTensor, header


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of a version, and the same in the file."""

    spec: TensorSpec
    named: NamedTensor

    @property
    def name(self) -> str:
        """The name of the tensor in the file."""
        return self.named.name

    @property
    def size(self) -> int:
        """The size of the tensor in bytes."""
        return self.named.size


def place(tensors: Mapping[str, TensorSpec]) -> list[PlacedTensor]:
    """Every tensor, in the order of the file: wide elements first, so that all are aligned; and
    neighbours in a storage side by side.

    Raises ``UsageError`` naming what safetensors cannot hold.
    """
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
        PlacedTensor(
            spec,
            NamedTensor(
                name, DTYPES[spec.dtype], spec.shape, prod(spec.shape) * ITEM_SIZES[spec.dtype]
            ),
        )
        for name, spec in tensors.items()
    ]
    return sorted(
        placed,
        key=lambda p: (-ITEM_SIZES[p.spec.dtype], p.spec.storage, p.spec.offset, p.name),
    )


def head_of(placed: Sequence[PlacedTensor], metadata: Mapping[str, str]) -> bytes:
    """What stands before the bytes of the tensors. Raises ``UsageError`` if it is too long."""
    return header([each.named for each in placed], metadata, alignment=LENGTH_SIZE)


def shared_names(tensors: Mapping[str, TensorSpec]) -> list[list[str]]:
    """Names of tensors that share memory, which a safetensors file cannot express."""
    users: dict[int, list[str]] = {}
    for name, spec in tensors.items():
        users.setdefault(spec.storage, []).append(name)
    return [names for names in users.values() if len(names) > 1]
