"""Tensors of a state that share memory: a version must have the same values for all of them.

Weights are tied in one model and not in another, and views are cut differently. Copied one after
another, the last tensor would win, and the others would have values that were never saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from portus.engine.pipeline.plan import Column
from portus.engine.spec import TensorSpec

Pair = tuple[TensorSpec, torch.Tensor]
"""A tensor of a version, and the tensor of the state that it is copied over."""


def overlapping(address: Column, length: Column) -> npt.NDArray[np.bool_]:
    """Return a flag for each block of memory: True if it shares bytes with another one."""
    order = np.lexsort((length, address))
    start, end = address[order], (address + length)[order]
    found = np.zeros(len(order), bool)
    found[order[1:]] = start[1:] < np.maximum.accumulate(end)[:-1]
    found[order[:-1]] |= start[1:] < end[:-1]
    return found & (length > 0)


def doubtful_pairs(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield pairs that share memory in another way than in the version: only their values need to
    be read, to see whether there is a ``contradiction``."""
    by_memory: dict[tuple[str, int], list[Pair]] = {}
    for spec, target in pairs:
        if target.numel():
            memory = target.untyped_storage()
            by_memory.setdefault((str(target.device), memory.data_ptr()), []).append((spec, target))
    for users in by_memory.values():
        if doubtful := _doubtful(users):
            yield doubtful


def copy_over(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values, converted to the dtype of ``target``; elements that ``target`` repeats, once."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim]:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)


def _doubtful(users: list[Pair]) -> list[Pair]:
    """Return the pairs that may overlap in another way than when they were saved."""
    places = {
        (spec.storage, (int(target.storage_offset()) - spec.offset) * target.element_size())
        for spec, target in users
    }
    if len(places) == 1 and all(map(_alike, users)):  # one storage, copied as a whole
        return []
    address = np.array([target.data_ptr() for _, target in users], np.int64)
    length = np.array([_extent(target) for _, target in users], np.int64)
    shared = overlapping(address, length)
    return [
        user
        for user, is_shared in zip(users, shared.tolist(), strict=True)
        if is_shared or (_is_folded(user[1]) and not _alike(user))
    ]


def _alike(user: Pair) -> bool:
    """Return True if elements have the same width and distances as when they were saved."""
    spec, target = user
    return target.stride() == spec.strides and str(target.dtype) == f"torch.{spec.dtype}"


def _extent(target: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    steps = zip(target.shape, target.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * target.element_size()


def _is_folded(target: torch.Tensor) -> bool:
    """Return True if several elements of a tensor may be one place, except for repeated ones."""
    reach = 1
    for stride, size in sorted(zip(target.stride(), target.shape, strict=True)):
        if stride and size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False


def contradiction(users: Sequence[Pair], values: Sequence[torch.Tensor]) -> tuple[str, str] | None:
    """Return two tensors that are one place in memory, for which a version has different
    ``values``; twice the same name for one whose own elements are. None if there are none.

    The values are copied over a copy of that memory: the tensors stay as they are.
    """
    memory = users[0][1].untyped_storage().clone()
    copies = [(spec, _in(memory, target)) for spec, target in users]
    for (_, copy), value in zip(copies, values, strict=True):
        copy_over(copy, value)
    for place, ((spec, copy), value) in enumerate(zip(copies, values, strict=True)):
        wanted = torch.empty_like(copy, memory_format=torch.contiguous_format).copy_(value)
        if not _same_bits(copy, wanted):
            address = np.array([each.data_ptr() for _, each in copies], np.int64)
            length = np.array([_extent(each) for _, each in copies], np.int64)
            starts, ends = address[place], address[place] + length[place]
            others = np.flatnonzero((address < ends) & (address + length > starts))
            other = next((int(each) for each in others[::-1] if each != place), place)
            return spec.name, users[other][0].name
    return None


def _in(memory: torch.UntypedStorage, target: torch.Tensor) -> torch.Tensor:
    """Return ``target``, but in a copy of its memory."""
    blank = torch.empty(0, dtype=target.dtype, device=memory.device)
    tensor = blank.set_(memory, target.storage_offset(), target.shape, target.stride())
    tensor = tensor.conj() if target.is_conj() else tensor
    return torch._neg_view(tensor) if target.is_neg() else tensor


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of a shape and dtype have the same bits, NaNs too."""
    one, other = (
        each.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for each in (left, right)
    )
    return bool(torch.equal(one, other))
