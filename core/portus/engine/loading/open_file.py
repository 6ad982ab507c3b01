"""Checkpoint files that are open for reading, and ``DiskFile``: one on a disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final, Protocol

from portus.engine.copying.segments import Column
from portus.engine.image.stored_file import Read
from portus.engine.media.base import Medium
from portus.engine.media.process import Descriptor
from portus.engine.media.read_file import ReadFile
from portus.errors import MediumError, printable


class DiskFile:
    """A file of a file system, as an ``OpenFile``."""

    def __init__(self, file: ReadFile, number: int) -> None:
        self.medium: Final = file
        self.number: Final[int | None] = number

    @property
    def size(self) -> int:
        return self.medium.size

    def extents(self, offset: Column, length: Column) -> tuple[Column, Column]:
        return offset, length

    def announce(self, offset: Column, length: Column) -> None:
        """Do nothing: the system reads ahead."""

    def load(self, offset: int, target: memoryview) -> None:
        self.medium.load(offset, target)


class OpenFile(Protocol):
    """A file of ``size`` bytes. ``number``: its descriptor; None for one that has none."""

    @property
    def size(self) -> int: ...

    @property
    def number(self) -> int | None: ...

    @property
    def medium(self) -> Medium:
        """The medium that has its bytes."""

    def extents(self, offset: Column, length: Column) -> tuple[Column, Column]:
        """Return the places on the medium of the bytes of these ranges, end to end: offsets and
        lengths."""

    def announce(self, offset: Column, length: Column) -> None:
        """Note the ranges to be read next, in their order: a remote file may read ahead."""

    def load(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``; all of it is in the file."""


@contextlib.contextmanager
def open_file(where: str, *, as_torch: bool = True) -> Iterator[DiskFile]:
    """Yield the open file at a path. as_torch: for a missing one, raise the error of torch."""
    try:
        descriptor = Descriptor(where, os.O_RDONLY)
    except OSError as error:
        # Scripts catch what ``torch.load`` raises.
        if as_torch and isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise MediumError(error.errno, f"{printable(where)}: {error.strerror}") from error
    with contextlib.closing(ReadFile(descriptor)) as file:
        yield DiskFile(file, descriptor.number)


def reads(file: OpenFile) -> Read:
    """Return a function that reads an open file."""

    def read(offset: int, length: int) -> bytes:
        target = memoryview(bytearray(max(0, min(length, file.size - offset))))
        if target:
            file.load(offset, target)
        return bytes(target)

    return read
