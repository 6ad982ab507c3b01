"""Put real torch files where reference files are: the way out of Portus."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from typing import Final

import torch

from portus.client.grouped import is_shard, shards_at
from portus.client.reference import is_link, read
from portus.client.resolve import POOLS, Pools, load_reference
from portus.errors import MediumError, UsageError
from portus.format.reference import Reference

_SLACK: Final = 16 << 20
"""Bytes kept free beside the tensors of a checkpoint, for all that is not tensors."""


def materialize(
    path: str | os.PathLike[str],
    pools: Pools = POOLS,
    *,
    to: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Put a real torch file in place of each reference file at ``path`` or below it.

    to: put it here instead, in place of what is there; ``path`` is one reference file then, and
        stays.

    The state is loaded, verified, written beside under a hidden name, synced, and renamed into
    place; the time of last change and the mode stay. Holds one checkpoint in memory at a time.
    Symbolic links below a directory are left alone; what they lead to is found where it lies.

    A directory of a sharded checkpoint (``portus.dcp``) becomes one that
    ``torch.distributed.checkpoint`` reads, and ``dcp_to_torch_save``; in bounded memory.

    Returns the paths of the new files; a file that is no reference is left as it is.
    Raises ``MediumError`` (ENOSPC before anything is written, when there is no room), and what
    loads raise; the file at hand is then untouched and earlier ones are done.
    """
    place = os.path.realpath(os.fspath(path))
    if not os.path.exists(place):
        raise UsageError(f"{place}: there is nothing to materialise")
    if to is None and os.path.isdir(place):
        return [e for paths in _directories(place) for e in _materialize_directory(paths, pools)]
    if to is None:
        return [place] if _materialize_file(place, place, pools) else []
    target = os.path.abspath(os.fspath(to))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if not _materialize_file(place, target, pools):
        raise UsageError(f"{place}: there is no Portus reference file")
    return [target]


def _directories(place: str) -> Iterator[list[str]]:
    """The files in a directory and below it, by directory; no links."""
    for directory, _, names in os.walk(place):
        paths = [os.path.join(directory, name) for name in sorted(names)]
        yield [path for path in paths if not os.path.islink(path)]


def _materialize_directory(paths: list[str], pools: Pools) -> Iterator[str]:
    """The files of one directory. References to shards go last: all else is a torch file then."""
    shards = [path for path in paths if is_shard(path)]
    for path in paths:
        if path not in shards and _materialize_file(path, path, pools):
            yield path
    directory = os.path.dirname(shards[0]) if shards else ""
    if shards and shards_at(directory):
        from portus.client.materialize_shards import materialize_shards, remove_references

        yield from materialize_shards(directory)
        remove_references(directory, shards)


def _materialize_file(path: str, target: str, pools: Pools) -> bool:
    reference = read(path)
    if reference is None or is_link(path, reference):  # a link stays what it is
        return False
    if is_shard(path):
        raise UsageError(
            f"{path} is a part of a sharded checkpoint, of which no one file can be made: "
            "materialise its directory, or let portus export make safetensors of its tensors"
        )
    state = load_reference(path, pools)
    reference = read(path)  # after the load: that waits for a save that replaces the file
    if reference is None:
        return False
    _check_space(target, state)
    temporary = os.path.join(os.path.dirname(target), f".{reference.id}.portus")
    try:
        _write(temporary, state, like=path)
        _replace(temporary, target, reference if target == path else None)
    except OSError as error:
        raise MediumError(error.errno, f"cannot write {target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return True


def write_torch_file(path: str, state: object) -> None:
    """Write ``state`` to ``path`` as a torch file, and sync it. Raises ``MediumError``; then part
    of the file may be there."""
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise MediumError(error.errno, f"cannot write {path}: {error.strerror}") from error


def _write(temporary: str, state: object, *, like: str) -> None:
    before = os.stat(like)
    write_torch_file(temporary, state)
    os.chmod(temporary, before.st_mode & 0o7777)
    os.utime(temporary, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(temporary: str, path: str, expected: Reference | None) -> None:
    """Rename into place, durably. ``expected``: what must still be there (None: anything)."""
    if expected is not None and read(path) != expected:
        raise UsageError(f"{path} was replaced while it was materialised: try again")
    os.replace(temporary, path)
    if os.name == "posix":
        directory = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _check_space(path: str, state: object) -> None:
    needed = sum(_storages(state, {}).values()) + _SLACK
    free = shutil.disk_usage(os.path.dirname(path)).free
    if needed > free:
        raise MediumError(
            errno.ENOSPC, f"cannot materialise {path}: {needed} bytes needed, {free} bytes free"
        )


def _storages(value: object, found: dict[int, int]) -> dict[int, int]:
    """Bytes of each distinct storage, by its address; those of exotic tensors do not count."""
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(NotImplementedError, RuntimeError):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, dict):
        for each in value.values():
            _storages(each, found)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            _storages(each, found)
    return found
