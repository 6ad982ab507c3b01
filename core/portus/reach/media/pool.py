"""What a pool requires besides a medium: space given back, ranges in columns, names,
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
    """Many runs of bytes, in columns: an object for each costs more than to write the run back."""

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
    """Offset and length of each that is not empty."""
    if isinstance(ranges, Extents):
        return list(zip(ranges.offset.tolist(), ranges.length.tolist(), strict=True))
    return [(each.offset, each.length) for each in ranges if each.length]


def bounds(ranges: Sequence[Extent]) -> Sequence[Extent]:
    """Extents that are within a medium if all of ``ranges`` are."""
    if not isinstance(ranges, Extents) or not len(ranges):
        return ranges
    first, end = int(ranges.offset.min()), int((ranges.offset + ranges.length).max())
    return [Extent(first, end - first)]


class ReadableMedium(Protocol):
    """What can be loaded of a medium."""

    @property
    def info(self) -> MediumInfo: ...

    @property
    def size(self) -> int: ...

    def load(self, offset: int, target: memoryview) -> None: ...


@runtime_checkable
class SparseMedium(Medium, Protocol):
    """A medium that can do without the space of some bytes: one on a file system."""

    def discard(self, ranges: Sequence[Extent]) -> int:
        """Give the space of ``ranges`` back; how many bytes came back, 0 where there are no holes.

        These bytes read as zero; after power loss as zero or as they were. Nobody stores there
        before they were filled: there may be no space left for it.
        """

    def fill(self, ranges: Sequence[Extent]) -> None:
        """Give ``ranges`` space again, where they have none; no byte changes. ``MediumError``
        (ENOSPC) if there is none, and then maybe a part of them has some."""

    def holes(self) -> list[Extent]:
        """Where bytes may be without space; they read as zero. What is not listed has some."""


@dataclass(frozen=True, slots=True)
class FileStatus:
    """``identity`` is (device, inode): equal for two hard links. ``links`` is the link count."""

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
        """A new file of ``size`` zero bytes, allocated; it must not exist (``MediumError``,
        EEXIST). Its bytes and size are durable after ``persist``, its name after ``sync``."""

    def open(self, path: str, *, writable: bool) -> Medium:
        """The file at ``path``, as the best medium its file system allows."""

    def link(self, source: str, target: str) -> None:
        """A second name for the file ``source``. ``target`` must not exist (EEXIST)."""

    def replace(self, source: str, target: str) -> None:
        """Rename ``source`` to ``target``, atomically, in place of what was there."""

    def remove(self, path: str) -> None:
        """Remove the name. It is no error if it is not there."""

    def sync(self, directory: str) -> None:
        """Return when every earlier change of names in ``directory`` survives power loss."""

    def entries(self, directory: str) -> list[str]:
        """The names in ``directory``, sorted; empty if there is no such directory."""

    def status(self, path: str) -> FileStatus | None:
        """What is at ``path``, or None if nothing is. Follows symbolic links."""


class Locks(Protocol):
    """The locks of a pool's writer and of its versions' readers. Held by process, not by thread."""

    def acquire_writer(self, timeout_s: float) -> None:
        """Become the one writer; waits up to ``timeout_s``, then raises ``BusyError``, naming the
        holder. Does nothing if it is the writer already."""

    def release_writer(self) -> None:
        """Let others write. A second call does nothing."""

    def has_writer(self) -> bool:
        """True while somebody is the writer: another process, or another object in this one."""

    def pin(self, version: int) -> None:
        """Keep the space of ``version`` from reuse. Counted: pins of one version may nest."""

    def unpin(self, version: int) -> None:
        """Take one pin back."""

    def is_pinned(self, version: int) -> bool:
        """True if any process, this one included, pins ``version``. Asked by the writer before
        it reuses space. A pin taken later finds the version gone from the root."""

    def pins(self) -> set[int]:
        """Every version that any process pins now, this one included. Asked by a writer that
        opens the pool: it cannot know what the one before it had retired."""

    def close(self) -> None:
        """Let go of the writer lock and of all pins."""
