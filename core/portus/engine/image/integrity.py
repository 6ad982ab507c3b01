"""The test whether a file is as it was saved, whatever its format: a start restores no other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NamedTuple

from portus.engine.extensions import IS_POINTER_GOOD, OTHER_FORMAT, SHARD_OF, extension
from portus.engine.format.pointer_marks import POINTER_MAX, is_pointer
from portus.engine.image.image import Read
from portus.engine.image.torch_reader import read_torch
from portus.engine.image.torch_zip import ZIP
from portus.errors import PortusError

_OF_SHARDS: Final = (".distcp", ".metadata")

_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".safetensors")


class ShardFile(NamedTuple):
    """A file of a sharded checkpoint. verify: reads all bytes with digests."""

    has_digests: bool
    verify: Callable[[Read], object]


def shard_of(read: Read, size: int, path: str) -> ShardFile | None:
    """Return the facts of a file of a sharded checkpoint, by its name; None for another one. Raises
    ``CorruptionError``."""
    if not path.endswith(_OF_SHARDS):
        return None
    found: ShardFile | None = extension(SHARD_OF)(read, size, path)
    return found


def is_whole(number: int, path: str) -> bool:
    """Return True if the open file is a checkpoint with all bytes as they were saved, or a pointer
    not known to refer to a removed version, or one of the other files beside checkpoints, which
    nothing verifies. path: its future place."""

    def read(offset: int, length: int) -> bytes:
        return os.pread(number, length, offset)

    try:
        size = os.fstat(number).st_size
        if size <= POINTER_MAX and is_pointer(data := read(0, size)):
            return bool(extension(IS_POINTER_GOOD)(data, path))
        verify_by_format(read, size, path)
    except (PortusError, OSError):
        return False
    return True


def verify_by_format(read: Read, size: int, path: str) -> None:
    """Compare every byte of a file with the digests in it, by its format. Nothing verifies the
    other files beside checkpoints. Raises ``CorruptionError``."""
    shard = shard_of(read, size, path)
    if shard is not None:
        shard.verify(read)
        return
    outline = read_torch
    if read(0, len(ZIP)) != ZIP:
        other = extension(OTHER_FORMAT)(read, path)
        if other is not None:
            outline = other.outline
        elif os.path.splitext(path)[1] not in _SUFFIXES:
            return
    outline(read, size, path).verify(read)
