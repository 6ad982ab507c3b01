"""Tensors written into files piece by piece, in any order: a piece is a box of the whole.

The bytes of a box come in row-major order. In the whole tensor they are runs: as long as the box
reaches over all of the inner dimensions, and beyond that one for each row.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from portus.errors import CorruptionError


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor goes: from byte ``offset`` of an open file, with ``item`` bytes an element."""

    descriptor: int
    offset: int
    shape: tuple[int, ...]
    item: int


def runs(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """Where the elements of a box are in the whole: (first, count), in row-major order."""
    if 0 in sizes:
        return
    inner = len(shape)
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # the first dimension that is cut still has neighbours side by side
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    count = prod(sizes[inner:])
    start = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    for index in itertools.product(*(range(size) for size in sizes[:inner])):
        yield start + sum(i * step for i, step in zip(index, steps, strict=False)), count


def write_box(
    target: Target,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    pieces: Iterable[memoryview],
) -> Iterator[int]:
    """Write the bytes of a box, in row-major order, where they belong; yields bytes done.

    Raises ``CorruptionError`` if the box does not lie in the tensor, or there are not as many
    bytes as it has.
    """
    lies = len(offsets) == len(sizes) == len(target.shape) and all(
        low >= 0 and low + size <= length
        for low, size, length in zip(offsets, sizes, target.shape, strict=True)
    )
    if not lies:
        raise CorruptionError(f"a piece at {offsets} of {sizes} of a tensor of {target.shape}")
    places = runs(target.shape, offsets, sizes)
    at = left = done = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            if left == 0:
                at, left = _next(places, target)
            taken = min(left, len(piece) - start)
            _write(target.descriptor, piece[start : start + taken], at)
            at, left, start = at + taken, left - taken, start + taken
        done += len(piece)
        yield len(piece)
    if done != prod(sizes) * target.item:
        raise CorruptionError(f"expected {prod(sizes) * target.item} bytes, found {done}")


def _next(places: Iterator[tuple[int, int]], target: Target) -> tuple[int, int]:
    place = next(places, None)
    if place is None:
        raise CorruptionError("a shard has more bytes than its piece of the tensor")
    return target.offset + place[0] * target.item, place[1] * target.item


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written
