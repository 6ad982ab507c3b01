"""The placement of the storages of a version in a pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.engine.pipeline.plan import Column
from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import EXTENT
from portus.reach.index.records import Rows

ALIGNED_SIZE: Final = 16 * PAGE
"""Storages of at least this many bytes start on a page; smaller ones share pages, 64-aligned."""

_ALIGNMENT: Final = 64


def pack(lengths: Column) -> tuple[Column, int]:
    """Return offsets at which storages of ``lengths`` lie side by side, and the bytes that they
    take.

    Big ones first, each on pages of its own; the small ones after them, 64-aligned.
    """
    # Small ones share pages only with others of the same save (V1).
    big = lengths >= ALIGNED_SIZE
    room = np.where(big, -(-lengths // PAGE) * PAGE, -(-lengths // _ALIGNMENT) * _ALIGNMENT)
    order = np.argsort(~big, kind="stable")
    ends = np.cumsum(room[order])
    offsets = np.empty(len(lengths), np.int64)
    offsets[order] = ends - room[order]
    return offsets, int(ends[-1]) if len(ends) else 0


def place(offsets: Column, lengths: Column, room: list[Extent]) -> tuple[Rows, Column]:
    """Return extent rows of storages at ``offsets`` of the reserved ``room`` (its extents end to
    end), and how many rows each storage has."""
    starts = np.cumsum([0] + [extent.length for extent in room])
    if len(room) == 1:
        some = lengths > 0
        rows = np.zeros(int(some.sum()), EXTENT.dtype)
        rows["offset"] = offsets[some] + room[0].offset
        rows["length"] = lengths[some]
        return rows, some.astype(np.int64)
    pieces: list[tuple[int, int]] = []
    counts = np.zeros(len(lengths), np.int64)
    for index, (offset, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        before = len(pieces)
        pieces += _pieces(offset, length, room, starts)
        counts[index] = len(pieces) - before
    return np.array(pieces, EXTENT.dtype), counts


def _pieces(
    offset: int, length: int, room: list[Extent], starts: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    while length > 0:
        index = int(np.searchsorted(starts, offset, side="right")) - 1
        inside = offset - int(starts[index])
        taken = min(length, room[index].length - inside)
        yield room[index].offset + inside, taken
        offset, length = offset + taken, length - taken
