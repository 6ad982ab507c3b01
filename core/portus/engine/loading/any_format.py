"""One open checkpoint file, recognized by its first bytes or its name: loaded and verified."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from portus.engine.extensions import OTHER_FORMAT, extension
from portus.engine.image.integrity import shard_of
from portus.engine.image.stored_file import Read, StoredFile
from portus.engine.image.torch_reader import read_torch
from portus.engine.image.torch_zip import ZIP
from portus.engine.loading.open_file import OpenFile, reads
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.stored_bytes import StoredBytes
from portus.engine.loading.torch_file import has_digests_of_torch, load_torch, note_of_torch
from portus.engine.media.pace import Pace
from portus.errors import printable


class FileFormat(NamedTuple):
    """A format of checkpoint files. Each function takes the path of a file for messages.

    load: see ``load_opened``. outline: returns the places of everything in a file. note,
    has_digests: see ``note_of`` and ``has_digests_in``.
    """

    load: Callable[..., Any]
    outline: Callable[[Read, int, str], StoredFile]
    note: Callable[[OpenFile, str], bytes | None]
    has_digests: Callable[[OpenFile, str], bool]


_TORCH: Final = FileFormat(load_torch, read_torch, note_of_torch, has_digests_of_torch)


def load_opened(
    file: OpenFile, where: str, names: Patterns, *, verify: bool, settings: dict[str, Any]
) -> Any:
    """Return the state in an open file; see ``load_file``. where: its path, for messages."""
    return _format_of(reads(file), where).load(file, where, names, verify=verify, settings=settings)


def verify_opened(file: OpenFile, where: str, pace: Pace | None = None) -> int:
    """Verify an open file; see ``verify_file``. where: its path, for messages."""
    shard = shard_of(reads(file), file.size, where)
    found = None if shard else outline_file(reads(file), file.size, printable(where))
    if pace is not None:
        # Rot on the disk does not show in cached pages.
        _drop_cached(file)
    read = reads(file) if pace is None else _pace(reads(file), pace)
    if shard is not None:
        shard.verify(read)
    elif found is not None and (pace is not None or found.digests is None):
        found.verify(read)
    elif found is not None:
        StoredBytes(file, found).check_all()
    return file.size


def note_of(file: OpenFile, where: str) -> bytes | None:
    """Return the note of an open file; see ``read_note``."""
    return _format_of(reads(file), where).note(file, where)


def has_digests_in(file: OpenFile, where: str) -> bool:
    """Return whether an open file has digests; see ``has_digests``."""
    shard = shard_of(reads(file), file.size, where)
    if shard is not None:
        return shard.has_digests
    return _format_of(reads(file), where).has_digests(file, where)


def _format_of(read: Read, name: str) -> FileFormat:
    """Return the format of a file, by its first bytes, or its name if those do not tell."""
    found: FileFormat | None = None
    if read(0, len(ZIP)) != ZIP:
        found = extension(OTHER_FORMAT)(read, name)
    return found or _TORCH


def outline_file(read: Read, size: int, name: str) -> StoredFile:
    """Return the places of everything in the file that ``read`` reads."""
    return _format_of(read, name).outline(read, size, name)


def _drop_cached(file: OpenFile) -> None:
    if file.number is not None and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)


def _pace(read: Read, pace: Pace) -> Read:
    def read_slowly(offset: int, length: int) -> bytes:
        data = read(offset, length)
        pace.take(len(data))
        return data

    return read_slowly
