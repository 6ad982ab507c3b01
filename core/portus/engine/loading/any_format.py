"""One open checkpoint file, recognized by its first bytes or its name: loaded and verified."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from portus.engine.extensions import IS_POINTER_GOOD, OTHER_FORMAT, SHARD_OF, extension
from portus.engine.format.pointer_marks import POINTER_MAX, is_pointer
from portus.engine.image.stored_file import Read, StoredFile
from portus.engine.image.torch_reader import read_torch
from portus.engine.image.torch_zip import ZIP
from portus.engine.loading.open_file import OpenFile, reads
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.stored_bytes import StoredBytes
from portus.engine.loading.torch_file import has_digests_of_torch, load_torch, note_of_torch
from portus.engine.media.pace import Pace
from portus.errors import PortusError, printable

_OF_SHARDS: Final = (".distcp", ".metadata")

_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".safetensors")


class FileFormat(NamedTuple):
    """A format of checkpoint files. Each function takes the path of a file for messages.

    load: see ``load_opened``. outline: returns where everything is in a file. note,
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
    """Return what is in an open file; see ``load_file``. where: its path, for messages."""
    return _format_of(reads(file), where).load(file, where, names, verify=verify, settings=settings)


def verify_opened(file: OpenFile, where: str, pace: Pace | None = None) -> int:
    """Verify an open file; see ``verify_file``. where: its path, for messages."""
    shard = _shard_of(reads(file), file.size, where)
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


def is_whole(number: int, path: str) -> bool:
    """True if the open file is a checkpoint all of whose bytes are as they were saved, or a
    pointer that is not known to lead to nothing, or one of the other files beside checkpoints,
    which nothing verifies. path: where it is to be."""

    def read(offset: int, length: int) -> bytes:
        return os.pread(number, length, offset)

    try:
        size = os.fstat(number).st_size
        if size <= POINTER_MAX and is_pointer(data := read(0, size)):
            return bool(extension(IS_POINTER_GOOD)(data, path))
        shard = _shard_of(read, size, path)
        if shard is not None:
            shard.verify(read)
            return True
        is_other = os.path.splitext(path)[1] not in _SUFFIXES and read(0, len(ZIP)) != ZIP
        found = _format_of(read, path)
        if is_other and found is _TORCH:
            return True
        found.outline(read, size, path).verify(read)
    except (PortusError, OSError):
        return False
    return True


def note_of(file: OpenFile, where: str) -> bytes | None:
    """Return the note of an open file; see ``read_note``."""
    return _format_of(reads(file), where).note(file, where)


def has_digests_in(file: OpenFile, where: str) -> bool:
    """Return whether an open file has digests; see ``has_digests``."""
    shard = _shard_of(reads(file), file.size, where)
    if shard is not None:
        return shard.has_digests
    return _format_of(reads(file), where).has_digests(file, where)


class ShardFile(NamedTuple):
    """A file of a sharded checkpoint. verify: reads all that has digests."""

    has_digests: bool
    verify: Callable[[Read], object]


def _shard_of(read: Read, size: int, path: str) -> ShardFile | None:
    """Return what is known of a file of a sharded checkpoint, by its name; None for another one.
    Raises ``CorruptionError``."""
    if not path.endswith(_OF_SHARDS):
        return None
    found: ShardFile | None = extension(SHARD_OF)(read, size, path)
    return found


def _format_of(read: Read, name: str) -> FileFormat:
    """Return the format of a file, by its first bytes, or its name if they say nothing."""
    found: FileFormat | None = None
    if read(0, len(ZIP)) != ZIP:
        found = extension(OTHER_FORMAT)(read, name)
    return found or _TORCH


def outline_file(read: Read, size: int, name: str) -> StoredFile:
    """Return where everything is in the file that ``read`` reads; see ``outlined``."""
    return _format_of(read, name).outline(read, size, name)


def _drop_cached(file: OpenFile) -> None:
    if file.number is not None and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)


def _pace(read: Read, pace: Pace) -> Read:
    def paced(offset: int, length: int) -> bytes:
        data = read(offset, length)
        pace.take(len(data))
        return data

    return paced
