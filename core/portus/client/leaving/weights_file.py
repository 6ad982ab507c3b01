"""A part of a version, the state of a model, as a safetensors file: streamed, and verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

import msgspec
import torch

from portus.client.leaving import safetensors, whole
from portus.client.leaving.whole import OutlinedStorage, PoolPath, WholeOutline
from portus.client.loading.contents import tensor_bytes
from portus.client.state.tensors import TensorTable
from portus.errors import CorruptionError, UsageError
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.spec import TensorSpec


def write(
    pool: PoolReader,
    entry: VersionEntry,
    target: BinaryIO,
    part: str,
    *,
    near: str,
    tables_pool: PoolPath | None = None,
    fits: Callable[[int], None] = lambda size: None,
    advanced: Callable[[int], None] = lambda size: None,
) -> None:
    """Write the value of the key ``part`` of a state, a dict of tensors, to ``target``. Of names
    for one and the same tensor the first is written, as Accelerate does: loaders know of ties.

    near: a directory with room for a storage whose tensors are not contiguous. ``tables_pool``,
    ``fits`` and ``advanced``: as for ``torch_file.write``. Raises ``UsageError``, before anything
    is written, for what safetensors cannot hold; else as that.
    """
    with whole.outlined(pool, entry, part, tables_pool=tables_pool) as outline:
        tensors, storages = _tensors(outline)
        placed = safetensors.place(tensors)
        head = safetensors.head_of(placed, {"format": "pt"})
        fits(len(head) + sum(each.size for each in placed))
        target.write(head)
        for each in placed:
            storage = storages[each.spec.storage]
            spec = msgspec.structs.replace(each.spec, storage=storage.index)
            try:
                for piece in tensor_bytes(storage.storages, spec, near):
                    target.write(piece)
                    advanced(len(piece))
            except CorruptionError as error:
                raise CorruptionError(f"{storage.name}: {error}") from error


def _tensors(outline: WholeOutline) -> tuple[dict[str, TensorSpec], list[OutlinedStorage]]:
    """Return the tensors by name, and the list of storages that they refer to by index. Raises
    ``UsageError`` for anything but a dict of tensors."""
    state = outline.state
    if not isinstance(state, dict):
        raise UsageError(f"safetensors holds dicts of tensors, found {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.is_meta:
            raise UsageError(f"{name} is not a named tensor, and safetensors holds nothing else")
    specs, storages = TensorTable().describe(list(state), list(state.values()))
    found: dict[tuple[object, ...], TensorSpec] = {}
    for spec in specs:
        found.setdefault(_place(spec), spec)
    by_name = {spec.name: spec for spec in found.values()}
    return by_name, [outline.storages[each._cdata] for each in storages]


def _place(spec: TensorSpec) -> tuple[object, ...]:
    """Equal for two tensors that are the same bytes, read in the same way."""
    if 0 in spec.shape:
        return (spec.name,)
    bits = (spec.conjugate, spec.negative)
    return (spec.storage, spec.offset, spec.dtype, spec.shape, spec.strides, bits)
