"""Put real torch files where reference files are: the way out of Portus."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from portus.client.files.fate import Fate
from portus.client.files.keeper import is_aside, keeper_of
from portus.client.files.reference import is_link, read
from portus.client.leaving import torch_file, weights_file
from portus.client.leaving.whole import PoolPath
from portus.client.loading.resolve import POOLS, KnownPools, use_reference
from portus.client.shards.grouped import is_shard, shards_at
from portus.errors import BusyError, MediumError, PortusError, UsageError
from portus.format.reference import SIZE_MAX, Reference
from portus.index.directory import WRITERS, remove_pool
from portus.index.place import local_path
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.media.calls import is_nested, refused
from portus.media.local import LocalFiles

_TEMPORARY: Final = re.compile(r"\.[0-9a-f]{32}\.portus")
"""What a file is called while it is written."""

Advanced = Callable[[int], None]
"""Is told how many bytes were written since the last time, and may raise."""

Fits = Callable[[int], None]
"""Is told how many bytes a file is going to have, and raises if there is no room for them."""

Failed = Callable[[PortusError], None]
"""Is told why a file stays a reference."""

_SAFETENSORS: Final = ".safetensors"


def materialize(
    path: str | os.PathLike[str],
    pools: KnownPools = POOLS,
    *,
    to: str | os.PathLike[str] | None = None,
    tables_pool: PoolPath | None = None,
) -> list[str]:
    """Put a real torch file in place of each reference file at ``path`` or below it.

    to: put it here instead, in place of what is there; ``path`` is one reference file then, and
        stays.
    tables_pool: where the pool of protected tables (``portus.embedding``) is now; None: where it
        was when they were saved. The files contain the tables, as of the batch of each checkpoint.

    The bytes go from the pool to a hidden file beside it, verified on the way, 16 MiB at a time;
    then that is synced, and renamed into place. The time of last change and the mode stay; so does
    the time of a directory in which all files are made real. In
    memory is what of the state is no tensor: numbers, text, arrays of numpy.
    Symbolic links below a directory are left alone; what they lead to is found where it lies. So
    are files that were put aside (``.uncommitted``).
    Weights that Accelerate would have saved as ``model.safetensors`` become that file.

    A directory of a sharded checkpoint (``portus.dcp``) becomes one that
    ``torch.distributed.checkpoint`` reads, and ``dcp_to_torch_save``; in bounded memory.

    What a load falls back to, where a save was never committed, becomes no file: it would be taken
    for its own step for good.

    Returns the paths of the new files; a file that is no reference is left as it is.
    Raises ``MediumError`` (ENOSPC before anything is written, when there is no room), and what
    loads raise; for a protected table that its pool does not have any more, an error that names the
    key path and the pool. The file at hand is then untouched. Of a directory all others are done
    first, and then the first error is raised. ``UsageError`` in a signal handler that interrupted a
    call of Portus.
    """
    if to is None:
        errors: list[PortusError] = []
        done = materialize_all(path, errors.append, pools, tables_pool=tables_pool)
        if errors:
            raise errors[0]
        return done
    place = _to_materialize(path)
    target = local_path(to, "to")
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
    except OSError as error:
        raise MediumError(error.errno, f"cannot write {target}: {error.strerror}") from error
    if not _materialize_file(place, target, pools, lambda size: None, tables_pool):
        raise UsageError(f"{place}: there is no Portus reference file")
    return [target]


def materialize_all(
    path: str | os.PathLike[str],
    failed: Failed,
    pools: KnownPools = POOLS,
    *,
    tables_pool: PoolPath | None = None,
) -> list[str]:
    """Put real files in place as ``materialize`` does, but pass what it would raise of a file to
    ``failed``. Raises ``UsageError`` if there is nothing at ``path``, and in a signal handler."""
    place = _to_materialize(path)
    return list(in_place(place, pools, lambda size: None, failed, tables_pool=tables_pool))


def _to_materialize(path: str | os.PathLike[str]) -> str:
    if is_nested():
        raise refused("materialize")
    place = os.path.realpath(os.fspath(path))
    if not os.path.exists(place):
        raise UsageError(f"{place}: there is nothing to materialise")
    return place


def in_place(
    place: str,
    pools: KnownPools,
    advanced: Advanced,
    failed: Failed | None = None,
    *,
    tables_pool: PoolPath | None = None,
) -> Iterator[str]:
    """Real files in place of the references at ``place``, without symbolic links, or below it: the
    path of each, once it is one. ``advanced`` may end it. What loads and writes of one file raise
    is told to ``failed``, and the others go on; without that it is raised, and ends it."""
    advanced(0)
    if os.path.isdir(place):
        for paths in _directories(place):
            saved_ns, is_changed = _newest_ns(paths), False
            try:
                for each in _materialize_directory(paths, pools, advanced, failed, tables_pool):
                    is_changed = True
                    yield each
            finally:
                if is_changed:
                    _set_time(os.path.dirname(paths[0]), saved_ns)
    else:
        with _telling(failed):
            if made := _materialize_file(place, place, pools, advanced, tables_pool):
                yield made


@contextlib.contextmanager
def _telling(failed: Failed | None) -> Iterator[None]:
    try:
        yield
    except PortusError as error:
        if failed is None:
            raise
        failed(error)


def _directories(place: str) -> Iterator[list[str]]:
    """The files in a directory and below it, by directory; no links, and none put aside."""
    for directory, _, names in os.walk(place):
        paths = [os.path.join(directory, name) for name in sorted(names)]
        yield [path for path in paths if not os.path.islink(path) and not is_aside(path)]


def _newest_ns(paths: list[str]) -> int:
    """When the newest of some files was changed last; 0 if none is there any more."""
    found = [0]
    for path in paths:
        with contextlib.suppress(OSError):
            found.append(os.stat(path).st_mtime_ns)
    return max(found)


def _set_time(directory: str, changed_ns: int) -> None:
    """Set the time of a directory to when its files were saved, not when they became real. Trainer,
    for one, sorts checkpoints by that time when it removes old ones."""
    with contextlib.suppress(OSError):
        os.utime(directory, ns=(changed_ns, changed_ns))


def _materialize_directory(
    paths: list[str],
    pools: KnownPools,
    advanced: Advanced,
    failed: Failed | None,
    tables_pool: PoolPath | None,
) -> Iterator[str]:
    """The files of one directory. References to shards go last: all else is a torch file then."""
    shards: list[str] = []
    for path in paths:
        with _telling(failed):
            if is_shard(path):
                shards.append(path)
            elif made := _materialize_file(path, path, pools, advanced, tables_pool):
                yield made
    directory = os.path.dirname(shards[0]) if shards else ""
    with _telling(failed):
        if shards and shards_at(directory):
            from portus.client.leaving.materialize_shards import (
                materialize_shards,
                remove_references,
            )

            yield from materialize_shards(directory, tables_pool)
            remove_references(directory, [path for path in shards if is_shard(path)])


def _materialize_file(
    path: str,
    target: str,
    pools: KnownPools,
    advanced: Advanced,
    tables_pool: PoolPath | None,
) -> str | None:
    """The path of the new file; None if there is no reference at ``path``."""
    reference = read(path)
    if reference is None or is_link(path, reference):  # a link stays what it is
        return None
    if is_shard(path):
        raise UsageError(
            f"{path} is a part of a sharded checkpoint, which cannot become one file: "
            "materialise its directory, or use portus export to write safetensors"
        )
    directory = os.path.dirname(target)

    def put(pool: PoolReader, entry: VersionEntry, found: Reference) -> str:
        expected = found if target == path else None

        def made(place: str, write: Callable[[BinaryIO, Fits], None]) -> str:
            temporary = os.path.join(directory, f".{found.id}.portus")
            with temporary_file(temporary) as file:
                write(file, lambda size: _check_space(place, size, pool.medium.info.name))
                _finish(file, temporary, like=path)
                if expected is not None and read(path) != expected:
                    raise UsageError(f"{path} was replaced while it was materialised: try again")
                os.replace(temporary, place)
                if place not in (path, target):
                    os.unlink(path)
                sync_directory(directory)
            return place

        part = found.part or ""
        if expected is not None and part.endswith(_SAFETENSORS):

            def write_weights(file: BinaryIO, fits: Fits) -> None:
                weights_file.write(
                    pool,
                    entry,
                    file,
                    part,
                    near=directory,
                    tables_pool=tables_pool,
                    fits=fits,
                    advanced=advanced,
                )

            with contextlib.suppress(UsageError):  # safetensors cannot hold it, a torch file can
                return made(os.path.join(directory, os.path.basename(part)), write_weights)

        def write_torch_file(file: BinaryIO, fits: Fits) -> None:
            torch_file.write(
                pool,
                entry,
                file,
                found.part,
                tables_pool=tables_pool,
                fits=fits,
                advanced=advanced,
            )

        return made(target, write_torch_file)

    try:
        _sweep(directory)
        return use_reference(path, put, pools, falls_back=False)
    except MediumError:
        raise
    except OSError as error:
        raise MediumError(error.errno, f"cannot write {target}: {error.strerror}") from error


@contextlib.contextmanager
def temporary_file(path: str) -> Iterator[BinaryIO]:
    """A new file, locked as long as somebody writes it, and gone at the end unless it was renamed.
    Its name is ``.<32 hexadecimal digits>.portus``: what a killed process leaves goes later.

    Raises ``BusyError`` if another process is writing it.
    """
    with contextlib.suppress(OSError):
        _remove_unlocked(path)
    try:
        file = open(path, "xb")  # noqa: SIM115
    except FileExistsError:
        raise BusyError(
            errno.EAGAIN, f"{path}: another process is writing it; if none is, remove it"
        ) from None
    try:
        with file:
            with contextlib.suppress(OSError):
                _lock(file)
            yield file
    finally:
        with contextlib.suppress(OSError):  # hidden, and the next try removes it
            os.unlink(path)


def _sweep(directory: str) -> None:
    """Remove what processes left in ``directory`` that were killed while they wrote: it may hold
    the very room that is needed now. What is as small as a reference may be one on its way."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if _TEMPORARY.fullmatch(name) and os.stat(path).st_size > SIZE_MAX:
                _remove_unlocked(path)


def _remove_unlocked(path: str) -> None:
    """Remove a file, unless another process has locked it or there are no locks: ``OSError``."""
    with open(path, "rb") as file:
        _lock(file)
        os.unlink(path)


def _lock(file: BinaryIO) -> None:
    """Raises ``OSError`` where another process has locked it, or where there are no such locks."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "no locks of files here")
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _finish(file: BinaryIO, path: str, *, like: str) -> None:
    before = os.stat(like)
    file.flush()
    os.fsync(file.fileno())
    os.chmod(path, before.st_mode & 0o7777)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def sync_directory(path: str) -> None:
    """Return when the names in a directory survive power loss. Raises ``OSError``."""
    if os.name != "posix":
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _check_space(path: str, needed: int, pool: str) -> None:
    """Raises ``MediumError`` where there is no room, also after the pool gave some back."""
    directory = os.path.dirname(path)
    free = shutil.disk_usage(directory).free
    if needed > free and _is_beside(pool, directory):
        give_back(pool)
        free = shutil.disk_usage(directory).free
    if needed > free:
        raise MediumError(
            errno.ENOSPC, f"cannot materialise {path}: {needed} bytes needed, {free} bytes free"
        )


def _is_beside(pool: str, directory: str) -> bool:
    """True for a pool file on the file system of ``directory``."""
    try:
        return os.stat(pool).st_dev == os.stat(directory).st_dev
    except OSError:
        return False


def give_back(pool: str) -> None:
    """Let the pool file go of what nothing leads to any more, such as what was materialised before,
    and give its space back; a pool file that is empty then goes. Not while somebody saves to it:
    he uses the space."""
    with contextlib.suppress(PortusError), contextlib.ExitStack() as undo:
        writer = WRITERS.open(pool, timeout_s=0, mapped=False)  # else holes would be filled

        def last() -> None:
            if writer.catalogue().ids():
                writer.give_back()
            else:
                remove_pool(pool, LocalFiles())

        undo.callback(WRITERS.close, writer, last)
        keeper_of(pool, writer).collect({Fate.DELETED})
