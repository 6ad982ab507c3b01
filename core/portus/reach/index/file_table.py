"""Files as a pool holds them: their storages, and all other bytes of each as one more storage.

A version of files f0, f1, ... has the storages of f0, then those of f1, and so on. After them come
the bytes around the storages of f0, those around the storages of f1, and so on. The table of the
version says where each lies in its file. So every byte of a file is a byte of a storage, and is
placed, hashed, shared, scrubbed and copied like one.
"""

from __future__ import annotations

import base64
import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from portus.engine.format.nesting import refuse_deep
from portus.engine.image.image import Column, Image, Literal
from portus.errors import CorruptionError

_KEY: Final = "$files"
"""The first key of a table."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file of ``size`` bytes. ``offset`` and ``length``: of its storages in the file, in bytes;
    storages do not overlap."""

    name: str
    size: int
    offset: Column
    length: Column

    @classmethod
    def of(cls, name: str, image: Image) -> PackedFile:
        """Return the file of an image, under a name."""
        return cls(name, image.size, image.offset, image.length)

    @property
    def around(self) -> int:
        """Bytes of the file that are in no storage."""
        return self.size - int(self.length.sum())

    def spans(self) -> Spans:
        """Return spans of storages and of the bytes around them that cover the file, in order."""
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
        """Return the bytes around the storages, in order; bytes that no literal covers are zero."""
        spans, made = self.spans(), bytearray(self.around)
        begins, insides = spans.begin[::2], spans.inside[::2]
        offset = np.array([literal.offset for literal in literals], np.int64)
        number = np.searchsorted(begins, offset, "right") - 1
        places = (insides[number] + offset - begins[number]).tolist()
        for literal, at in zip(literals, places, strict=True):
            made[at : at + len(literal.data)] = literal.data
        return made


@dataclass(frozen=True)
class Spans:
    """Spans of a file, end to end. ``begin`` and ``length``: in the file. ``storage``: the index of
    a storage; the number of storages stands for the bytes around them. ``inside``: the first byte
    within that."""

    begin: Column
    length: Column
    storage: Column
    inside: Column

    @cached_property
    def _lists(self) -> list[list[int]]:
        # numpy takes several times as long for one number.
        return [each.tolist() for each in (self.begin, self.length, self.storage, self.inside)]

    def within(self, offset: int, length: int) -> list[tuple[int, int, int]]:
        """Return storage, first byte in it, and length of each part of a range of the file."""
        begins, lengths, storages, insides = self._lists
        found, end = [], offset + length
        number = max(0, bisect.bisect_right(begins, offset) - 1)
        while number < len(begins) and (begin := begins[number]) < end:
            low, high = max(begin, offset), min(begin + lengths[number], end)
            if low < high:
                found.append((storages[number], insides[number] + low - begin, high - low))
            number += 1
        return found


@dataclass(frozen=True, slots=True)
class FileTable:
    """The files of a version. ``directory``: the absolute path of the directory that has their
    pointers; empty if they have none."""

    files: Sequence[PackedFile]
    directory: str = ""

    @property
    def lengths(self) -> list[int]:
        """The bytes of each storage of the version."""
        own = [length for each in self.files for length in each.length.tolist()]
        return own + [each.around for each in self.files]


def encode_table(table: FileTable) -> bytes:
    """Return the bytes of a table in a pool."""
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
    """Return the table of a version, or None if the version holds no files. Raise
    ``CorruptionError`` if the table is damaged."""
    if bytes(data[: len(_KEY) + 3]) != f'{{"{_KEY}"'.encode():
        return None
    try:
        refuse_deep(data)
        said = json.loads(bytes(data).decode("ascii"))
        files = [_file(each) for each in said[_KEY]]
        if len({each.name for each in files}) != len(files):
            raise ValueError("two files of one name")
        directory = said["directory"]
        if not isinstance(directory, str) or not _is_path(directory):
            raise ValueError(f"not an absolute path: {directory!r:.80}")
        return FileTable(files, directory)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(f"table of files: {type(error).__name__}: {error}") from error


def _file(said: Any) -> PackedFile:
    """Return the file of an entry. Raise ``ValueError``, ``KeyError``, ``TypeError``."""
    name, size = said["name"], said["size"]
    if not isinstance(name, str) or not is_file_name(name):
        raise ValueError(f"not the name of a file: {name!r:.80}")
    if type(size) is not int or not 0 <= size < 1 << 63:
        raise ValueError(f"{name!r:.80}: not the size of a file: {size!r:.80}")
    file = PackedFile(name, size, _decode(said["offset"]), _decode(said["length"]))
    _check(file)
    return file


def is_file_name(name: str) -> bool:
    """Return whether a text can name a file in a directory, as an export needs."""
    return _is_path(f"/{name}") and name not in ("", ".", "..") and "/" not in name


def _is_path(path: str) -> bool:
    """Return whether a text is an absolute path, or empty. Raise ``ValueError`` for no path."""
    # Paths that are not UTF-8 have such surrogates, and no others.
    path.encode(errors="surrogateescape")
    return path[:1] in ("", "/") and "\0" not in path


def _check(file: PackedFile) -> None:
    """Raise ``ValueError`` unless the storages lie within the file and do not overlap."""
    offset, length = file.offset, file.length
    if len(offset) != len(length) or (length < 0).any() or (offset < 0).any():
        raise ValueError(f"{file.name!r:.80}: its storages have no places")
    if (length > file.size).any() or (offset > file.size - length).any():
        raise ValueError(f"{file.name!r:.80}: a storage is not within its {file.size} bytes")
    taken = np.flatnonzero(length)
    taken = taken[np.argsort(offset[taken])]
    if (offset[taken][1:] < (offset + length)[taken][:-1]).any():
        raise ValueError(f"{file.name!r:.80}: its storages overlap")


def _encode(column: Column) -> str:
    return base64.b64encode(column.astype("<i8").tobytes()).decode()


def _decode(text: str) -> Column:
    column: Column = np.frombuffer(base64.b64decode(text, validate=True), "<i8").astype(np.int64)
    return column
