"""The requirements of a pool besides a medium: returned space, ranges in columns, file names,
locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from portus.engine.media.base import Medium, MediumInfo
from portus.engine.spec import Extent


class Extents(Sequence[Extent]):
    """Runs of bytes, in columns: with many runs, an object for each would cost too much."""

    def __init__(self, offset: NDArray[np.int64], length: NDArray[np.int64]) -> None:
        """offset: in bytes, from the start of the pool. length: in bytes, none of them 0."""
        self.offset: Final = offset
        self.length: Final = length

    def __len__(self) -> int:
        return len(self.offset)

    @overload
    def __getitem__(self, index: int) -> Extent: ...
    @overload
    def __getitem__(self, index: slice) -> Extents: ...
    def __getitem__(self, index: int | slice) -> Extent | Extents:
        if isinstance(index, slice):
            return Extents(self.offset[index], self.length[index])
        return Extent(int(self.offset[index]), int(self.length[index]))


def spans(ranges: Sequence[Extent]) -> list[tuple[int, int]]:
    """Return offset and length of each range that is not empty."""
    if isinstance(ranges, Extents):
        return list(zip(ranges.offset.tolist(), ranges.length.tolist(), strict=True))
    return [(each.offset, each.length) for each in ranges if each.length]


def bounds(ranges: Sequence[Extent]) -> Sequence[Extent]:
    """Return extents that are within a medium if all of ``ranges`` are."""
    if not isinstance(ranges, Extents) or not len(ranges):
        return ranges
    first, end = int(ranges.offset.min()), int((ranges.offset + ranges.length).max())
    return [Extent(first, end - first)]


class ReadableMedium(Protocol):
    """The part of a medium that is needed to load from it."""

    @property
    def info(self) -> MediumInfo: ...

    @property
    def size(self) -> int: ...

    def load(self, offset: int, target: memoryview) -> None: ...


@runtime_checkable
class SparseMedium(Medium, Protocol):
    """A medium that can do without the space of some bytes: one on a file system."""

    def discard(self, ranges: Sequence[Extent]) -> int:
        """Return the space of ``ranges`` to the file system; return how many bytes that was, 0 if
        there are no holes.

        These bytes read as zero; after power loss as zero or as before. Nothing may be stored there
        before they are filled: there may be no space left.
        """

    def fill(self, ranges: Sequence[Extent]) -> None:
        """Give ``ranges`` space again where they have none; no byte changes. Raise ``MediumError``
        (ENOSPC) if there is none; then a part of them may have some."""

    def holes(self) -> list[Extent]:
        """Return extents that may be without space; they read as zero. All others have space."""


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The status of a file. ``identity`` is (device, inode): equal for two hard links."""

    identity: tuple[int, int]
    links: int
    size: int
    time_ns: int


class FileSystem(Protocol):
    """The names of files: the one place from which files are made, linked, renamed, removed.

    No change of a name is durable before ``sync(directory)`` of the directory that holds it
    returns; before that it may have happened after a crash, or not, in any order.
    All raise ``MediumError`` (with the ``errno`` of the cause) unless they say otherwise.
    """

    def create(self, path: str, size: int) -> Medium:
        """Create a file of ``size`` zero bytes, allocated; it must not exist (``MediumError``,
        EEXIST). Its bytes and size are durable after ``persist``, its name after ``sync``."""

    def open(self, path: str, *, writable: bool) -> Medium:
        """Open the file at ``path``, as the best medium that its file system allows."""

    def link(self, source: str, target: str) -> None:
        """Add a second name for the file ``source``. ``target`` must not exist (EEXIST)."""

    def replace(self, source: str, target: str) -> None:
        """Rename ``source`` to ``target``, atomically, replacing any file there."""

    def remove(self, path: str) -> None:
        """Remove the name; do nothing if there is none."""

    def sync(self, directory: str) -> None:
        """Make every earlier change of names in ``directory`` durable."""

    def entries(self, directory: str) -> list[str]:
        """Return the names in ``directory``, sorted; none if there is no such directory."""

    def status(self, path: str) -> FileStatus | None:
        """Return the status of the file at ``path``, or None. Follows symbolic links."""


class Locks(Protocol):
    """The locks of a pool's writer and of its versions' readers. A process holds them."""

    def acquire_writer(self, timeout_s: float) -> None:
        """Become the one writer; wait up to ``timeout_s``, then raise ``BusyError``, naming the
        holder. Do nothing if this is the writer already."""

    def pin(self, version: int) -> None:
        """Keep the space of ``version`` from reuse. Counted: pins of one version may nest."""

    def unpin(self, version: int) -> None:
        """Take one pin back."""

    def pins(self) -> set[int]:
        """Return all versions that any process pins now, this one included. The writer calls this
        before it reuses space: a pin taken later finds the version gone from the root. When it
        opens the pool, it cannot know what the one before it had retired."""

    def close(self) -> None:
        """Release the writer lock and all pins."""
