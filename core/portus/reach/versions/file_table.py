"""Files as a pool holds them: their storages, and all the other bytes of each as one more storage.

A version of files f0, f1, ... has the storages of f0, then those of f1, and so on, and behind them
the bytes around the storages of f0, those around the storages of f1, and so on. Where each lies in
its file follows from the table of the version. So every byte of a file is a byte of a storage, and
is placed, hashed, shared, scrubbed and copied like one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from portus.engine.format.nesting import refuse_deep
from portus.engine.image.image import Column, Image, Literal
from portus.errors import CorruptionError

_KEY: Final = "$files"
"""The first key of a table."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file of ``size`` bytes. ``offset`` and ``length``: of its storages in it, in bytes; they do
    not overlap."""

    name: str
    size: int
    offset: Column
    length: Column

    @classmethod
    def of(cls, name: str, image: Image) -> PackedFile:
        """The file ``name`` of an image."""
        return cls(name, image.size, image.offset, image.length)

    @property
    def around(self) -> int:
        """How many bytes are in no storage."""
        return self.size - int(self.length.sum())

    def spans(self) -> Spans:
        """Every byte of it, in order, as spans of its storages and of the bytes around them."""
        filled = np.flatnonzero(self.length > 0)
        order = filled[np.argsort(self.offset[filled], kind="stable")]
        begin, length = self.offset[order], self.length[order]
        before = np.concatenate([np.zeros(1, np.int64), begin + length])
        gaps = np.append(begin, self.size) - before
        starts = np.stack([before, np.append(begin, self.size)], 1).reshape(-1)[:-1]
        lengths = np.stack([gaps, np.append(length, 0)], 1).reshape(-1)[:-1]
        around = len(self.length)
        storages = np.full(len(starts), around)
        storages[1::2] = order
        inside = np.zeros(len(starts), np.int64)
        inside[::2] = np.cumsum(gaps) - gaps
        return Spans(starts, lengths, storages, inside)

    def bytes_around(self, literals: Sequence[Literal]) -> bytearray:
        """The bytes around the storages, in order; what no literal covers is zero."""
        spans, made = self.spans(), bytearray(self.around)
        begins, insides = spans.begin[::2], spans.inside[::2]
        for literal in literals:
            number = int(np.searchsorted(begins, literal.offset, "right")) - 1
            at = int(insides[number]) + literal.offset - int(begins[number])
            made[at : at + len(literal.data)] = literal.data
        return made


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of a file, end to end. ``begin`` and ``length``: in the file. ``storage``: which of its
    storages; their number stands for the bytes around them. ``inside``: where in that."""

    begin: Column
    length: Column
    storage: Column
    inside: Column

    def within(self, offset: int, length: int) -> list[tuple[int, int, int]]:
        """The storage, the place in it, and the length of each part of a range of the file."""
        found = []
        first = max(0, int(np.searchsorted(self.begin, offset, "right")) - 1)
        end = offset + length
        for number in range(first, len(self.begin)):
            begin = int(self.begin[number])
            if begin >= end:
                break
            low, high = max(begin, offset), min(begin + int(self.length[number]), end)
            if low < high:
                at = int(self.inside[number]) + low - begin
                found.append((int(self.storage[number]), at, high - low))
        return found


@dataclass(frozen=True, slots=True)
class FileTable:
    """The files of a version. ``directory``: absolute, the one that has their pointers; empty if
    they have none."""

    files: Sequence[PackedFile]
    directory: str = ""

    @property
    def lengths(self) -> list[int]:
        """The bytes of each storage of the version."""
        own = [length for each in self.files for length in each.length.tolist()]
        return own + [each.around for each in self.files]


def encode_table(table: FileTable) -> bytes:
    """The bytes of a table in a pool."""
    files = [
        {
            "name": each.name,
            "offset": _encode(each.offset),
            "length": _encode(each.length),
            "size": each.size,
        }
        for each in table.files
    ]
    said = {_KEY: files, "directory": table.directory}
    return json.dumps(said, separators=(",", ":")).encode()


def decode_table(data: bytes | memoryview) -> FileTable | None:
    """The table of a version; None if it is a version of something else. Raises
    ``CorruptionError``."""
    if bytes(data[: len(_KEY) + 3]) != f'{{"{_KEY}"'.encode():
        return None
    try:
        refuse_deep(data)
        said = json.loads(bytes(data).decode("ascii"))
        files = [
            PackedFile(
                str(each["name"]),
                int(each["size"]),
                _decode(each["offset"]),
                _decode(each["length"]),
            )
            for each in said[_KEY]
        ]
        for file in files:
            _check(file)
        return FileTable(files, str(said["directory"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"table of files: {type(error).__name__}: {error}") from error


def _check(file: PackedFile) -> None:
    """Raise ``ValueError`` unless the storages have places in the file that do not overlap."""
    offset, length = file.offset, file.length
    if len(offset) != len(length) or (length < 0).any() or (offset < 0).any():
        raise ValueError(f"{file.name}: its storages have no places")
    if file.size < 0 or (length > file.size).any() or (offset > file.size - length).any():
        raise ValueError(f"{file.name}: a storage is not within its {file.size} bytes")
    taken = np.flatnonzero(length)
    taken = taken[np.argsort(offset[taken])]
    if (offset[taken][1:] < (offset + length)[taken][:-1]).any():
        raise ValueError(f"{file.name}: its storages overlap")


def _encode(column: Column) -> str:
    return base64.b64encode(column.astype("<i8").tobytes()).decode()


def _decode(text: str) -> Column:
    column: Column = np.frombuffer(base64.b64decode(text, validate=True), "<i8").astype(np.int64)
    return column
