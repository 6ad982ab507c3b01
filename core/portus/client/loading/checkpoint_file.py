"""One checkpoint file, of torch or safetensors, or one of a sharded checkpoint: loaded, verified,
recognized by its first or last bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from portus.client.loading.patterns import Patterns
from portus.client.loading.safetensors_file import load_tensors
from portus.client.loading.stored_bytes import StoredBytes, opened, reads
from portus.client.loading.torch_file import has_digests_of_torch, load_torch, note_of_torch
from portus.errors import PortusError, UsageError, printable
from portus.image.metadata_file import NAME as METADATA
from portus.image.metadata_file import read_pickle
from portus.image.rank_file import DISTCP, RANK_FILE, is_rank_file, read_rank_file
from portus.image.safetensors import LENGTH_SIZE, SUFFIX
from portus.image.safetensors_reader import is_safetensors, read_safetensors
from portus.image.stored import Read, StoredFile
from portus.image.torch_reader import read_torch
from portus.image.torch_zip import ZIP

_TORCH_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin", ".pkl")


def load_file(
    path: str | os.PathLike[str],
    names: Patterns = None,
    *,
    verify: bool = True,
    **settings: Any,
) -> Any:
    """Return what is in the file at ``path``, verified if the file has digests: of a safetensors
    file the tensors by their names, else what ``torch.load`` returns.

    names: shell patterns of key paths: only the storages of what matches are read, and of dicts,
        lists and tuples only that is returned, with None for what a list or tuple lacks.
    verify: False compares no digests of storages.
    settings: those of ``torch.load``. With ``mmap`` the whole file is read and verified first.

    Blocks. Raises ``CorruptionError``, ``MediumError``, ``UsageError`` for a pattern that matches
    nothing, and what ``torch.load`` raises.
    """
    where = os.fspath(path)
    if os.path.isdir(where):
        raise UsageError(
            f"{printable(where)}: expected a file of torch.save, found a directory; portus.open "
            "reads a pool"
        )
    with opened(where) as (file, number):
        if _is_safetensors(reads(file), where):
            return load_tensors(file, where, names, verify=verify, settings=settings)
        return load_torch(file, number, where, names, verify=verify, settings=settings)


def read_note(path: str | os.PathLike[str]) -> bytes | None:
    """Return what whoever saved a file noted in it; None if nothing. Reads little of the file.
    Raises ``CorruptionError`` for one that is cut off, ``MediumError``."""
    where = os.fspath(path)
    with opened(where) as (file, _):
        if _is_safetensors(reads(file), where):
            note = read_safetensors(reads(file), file.size, printable(where)).note
            return None if note is None else note.encode()
        return note_of_torch(file, where)


def has_digests(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has digests of its storages, as one that Portus saved. Reads little of
    it. Raises ``CorruptionError`` for one that is cut off, ``MediumError``."""
    where = os.fspath(path)
    with opened(where, as_torch=False) as (file, _):
        shard = _shard_of(reads(file), file.size, where)
        if shard is not None:
            return shard.has_digests
        if _is_safetensors(reads(file), where):
            found = read_safetensors(reads(file), file.size, printable(where))
            return found.digests is not None
        return has_digests_of_torch(file, where)


def verify_file(path: str | os.PathLike[str], pace: Callable[[int], object] | None = None) -> int:
    """Read every byte of a file and compare it with the digests in it; how many bytes. Of a stock
    file of torch the CRCs of the zip are compared; one of safetensors has nothing to compare with.

    pace: called after each piece with its bytes, and waits as long as it likes; what is cached of
    the file is read from the disk then. Raises ``CorruptionError``, ``MediumError``.
    """
    where = os.fspath(path)
    with opened(where, as_torch=False) as (file, number):
        shard = _shard_of(reads(file), file.size, where)
        if shard is not None:
            if pace is not None:
                _drop_cached(number)
            shard.verify(reads(file) if pace is None else _paced(reads(file), pace))
            return file.size
        found = _read(reads(file), file.size, printable(where))
        if pace is not None:
            _drop_cached(number)
            found.verify(_paced(reads(file), pace))
        elif found.digests is None:
            found.verify(reads(file))
        else:
            StoredBytes(file, found).check_all()
        return found.size


def outlined(path: str | os.PathLike[str]) -> StoredFile:
    """Return where everything is in a file of safetensors, or of torch 1.6 or newer. Raises
    ``CorruptionError``, ``MediumError``."""
    where = os.fspath(path)
    with opened(where, as_torch=False) as (file, _):
        return _read(reads(file), file.size, printable(where))


def is_whole(number: int, name: str) -> bool:
    """True if the open file is a checkpoint all of whose bytes are as they were saved, or one of
    the other files beside checkpoints, which nothing verifies."""

    def read(offset: int, length: int) -> bytes:
        return os.pread(number, length, offset)

    try:
        shard = _shard_of(read, os.fstat(number).st_size, name)
        if shard is not None:
            shard.verify(read)
            return True
        is_other = os.path.splitext(name)[1] not in (SUFFIX, *_TORCH_SUFFIXES)
        if is_other and not _is_safetensors(read, name) and read(0, len(ZIP)) != ZIP:
            return True
        _read(read, os.fstat(number).st_size, name).verify(read)
    except (PortusError, OSError):
        return False
    return True


class _Shard(NamedTuple):
    """A file of a sharded checkpoint. verify: reads all that has digests."""

    has_digests: bool
    verify: Callable[[Read], object]


def _shard_of(read: Read, size: int, path: str) -> _Shard | None:
    """What is known of a file of a directory of ``torch.distributed.checkpoint``, by its name; None
    for another one. Raises ``CorruptionError``."""
    name = os.path.basename(path)
    if name == METADATA:
        _, is_verified = read_pickle(read, size, printable(path))
        return _Shard(is_verified, lambda _: None)
    if not name.endswith(DISTCP):
        return None
    if not is_rank_file(read, size) and not RANK_FILE.fullmatch(name):
        return _Shard(False, lambda _: None)
    return _Shard(True, read_rank_file(read, size, printable(path)).verify)


def _is_safetensors(read: Read, name: str) -> bool:
    """Return whether a file is safetensors, by its first bytes, or its name if they say nothing."""
    begin = read(0, LENGTH_SIZE + 1)
    return is_safetensors(begin) or (name.endswith(SUFFIX) and not begin.startswith(ZIP))


def _read(read: Read, size: int, name: str) -> StoredFile:
    reader = read_safetensors if _is_safetensors(read, name) else read_torch
    return reader(read, size, name)


def _drop_cached(number: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)


def _paced(read: Read, pace: Callable[[int], object]) -> Read:
    def paced(offset: int, length: int) -> bytes:
        data = read(offset, length)
        pace(len(data))
        return data

    return paced
