"""What one save is made of, and where its bytes go, before a byte moves. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from portus.format.layout import EXTENT
from portus.index.records import Rows, VersionRecord
from portus.spec import PAGE, Extent, VersionInfo

Column = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

ALIGNED_SIZE: Final = 16 * PAGE
"""Storages of at least this many bytes start on a page; smaller ones share pages, 64-aligned."""

_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Memory of a device: its number, and the address there. ``owner``: the object whose life is
    that of the memory."""

    device: int
    address: int
    owner: object


class Feed(Protocol):
    """A storage that has no address here (it is on a device), fetched a unit at a time."""

    @property
    def there(self) -> OnDevice:
        """Where a network card finds it, after ``await_device``."""

    def await_device(self) -> None:
        """Return when the device has carried out what the storage's bytes come from."""

    def units(self) -> AbstractContextManager[Iterator[tuple[int, int]]]:
        """(address, length) of each unit (16 MiB, the last one shorter) in host memory, in order.

        A unit is valid until the next one is asked for. When the last one was handed out, the
        device's memory is not read any more.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state at the call of save, as the pipeline sees it.

    ``address`` and ``length``: of each storage, in this process, in bytes (address 0 if empty or
    fed). ``late``: the storage stays as it is until the fence lets go, so it may be copied late;
    the others are copied before the save returns. ``steady``: it probably equals what the
    version before holds, so it is hashed before anything is copied. ``guarded``: the data
    pointers of the late ones, by which a fence knows them. ``feeds``: by index, those on a
    device. ``alive``: held until the save is over, so that no address is used again. ``owners``:
    the object of each storage whose life is that of its memory; empty: nobody says. ``changes``:
    a count for each storage, which grows with the writes to it that are counted. ``exposed``: the
    indices of those in memory that other processes may have too; none of them is late.
    ``metrics``: what the version is saved with, see ``VersionInfo``.
    """

    model: str
    step: int
    token: bytes
    tree: bytes
    layout: bytes
    address: Column
    length: Column
    late: Flags
    steady: Flags
    guarded: frozenset[int] = frozenset()
    feeds: Mapping[int, Feed] = field(default_factory=dict)
    changes: Callable[[], Column] | None = None
    alive: object = None
    owners: Sequence[object] = ()
    exposed: Column = field(default_factory=lambda: np.empty(0, np.int64))
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Before:
    """The newest committed version of the same model, to share with."""

    record: VersionRecord
    layout: bytes
    tree: bytes

    @property
    def info(self) -> VersionInfo:
        """What it is."""
        return self.record.info


def packed(lengths: Column) -> tuple[Column, int]:
    """Offsets at which storages of ``lengths`` lie side by side, and the room they take, in bytes.

    Big ones first, each on pages of its own; the small ones after them, 64-aligned.
    """
    big = lengths >= ALIGNED_SIZE
    room = np.where(big, -(-lengths // PAGE) * PAGE, -(-lengths // _ALIGNMENT) * _ALIGNMENT)
    order = np.argsort(~big, kind="stable")
    ends = np.cumsum(room[order])
    offsets = np.empty(len(lengths), np.int64)
    offsets[order] = ends - room[order]
    return offsets, int(ends[-1]) if len(ends) else 0


def placed(offsets: Column, lengths: Column, room: list[Extent]) -> tuple[Rows, Column]:
    """Extent rows of storages at ``offsets`` of the reserved ``room`` (its extents end to end),
    and how many rows each storage has."""
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
