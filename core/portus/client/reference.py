"""Reference files on disk: put, read, removed, and told alive from deleted.

Beside each pool lies its links directory, ``<pool stem>.references/``. It holds one name for each
reference file that was written for that pool:

``<id>``       a hard link to it. Link count 1 means that the user's name is gone (``rm``); ``mv``
               does not change the count. A copy of the file that replaced it in its directory
               (``cp`` and rotate) has the same id, and is linked instead.
``<id>.copy``  its bytes, where no hard link can be made (another file system, or one without
               them). Then a missing file may as well have been moved: its state is *unknown*,
               and only a user may say that it is gone.
``<id>.new``   a second hard link, on its way to the user's path. Left only by a crash.

A reference file appears at the user's path by ``link`` or ``rename`` from there, so no other name
is ever seen beside it. Only where hard links cannot be, a dot-file is renamed into place.

Order of changes, so that a crash between any two loses nothing:

new path       ``place`` (bytes persisted, link, name) when the save is asked for; ``settle`` (both
               directories synced) before the version is committed. So what is committed has a
               durable name and a durable link, and is never taken for deleted.
existing path  after the commit: ``place`` syncs the link before it replaces the name, then
               ``settle``. A crash before leaves the old file, and the old version with it.
removal        ``take_away`` (name removed, its directory synced), then the caller retires the
               version, and only then ``forget`` removes the link.
deleted        by a user, or replaced by a process that was killed: the name may be gone in caches
               only. So before its version counts as not held, its directory is synced.
"""

from __future__ import annotations

import enum
import errno
import os
import stat
from dataclasses import dataclass
from typing import Final, Protocol

from portus.client import order
from portus.errors import CorruptionError, MediumError
from portus.format.reference import SIZE_MAX, Reference, decode, encode
from portus.index.directory import open_reader
from portus.media.base import Files, Names
from portus.media.dax import is_device
from portus.spec import Extent

_NO_HARD_LINKS: Final = frozenset(
    {
        errno.EXDEV,
        errno.EPERM,
        errno.EACCES,
        errno.EMLINK,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.ENOTSUP,
    }
)


_NO_WAIT: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""A named pipe must not hold a reader up; Windows must not translate line ends."""


class FileSystem(Files, Names, Protocol):
    """Names that can be changed and looked at."""


class State(enum.Enum):
    """What became of a reference file. UNKNOWN: its name is gone, perhaps only moved."""

    ALIVE = "alive"
    DELETED = "deleted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Link:
    """One reference file as the links directory knows it."""

    reference: Reference
    state: State


def links_directory(pool_path: str) -> str:
    """Where the links of the pool at ``pool_path`` are: beside a file. Nothing lasts beside a
    device, and its name may change: there it is ``<uuid>.references``, among what programs keep
    for this user. Raises as opening that pool does.
    """
    if not is_device(pool_path):
        return os.path.splitext(pool_path)[0] + ".references"
    reader = open_reader(pool_path)
    try:
        uuid = reader.superblock.uuid.hex()
    finally:
        reader.close()
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(home, "portus", f"{uuid}.references")


def is_link(path: str, reference: Reference) -> bool:
    """True if ``path`` is, by its name, what a links directory holds for ``reference``."""
    return os.path.basename(path).partition(".")[0] == reference.id


def read(path: str | os.PathLike[str]) -> Reference | None:
    """What the reference file at ``path`` says; None if there is no regular file, or another's.

    Reads at most ``SIZE_MAX`` bytes, and nothing of a longer file. Raises ``CorruptionError`` for
    a damaged reference, naming it, and ``MediumError`` for what cannot be read.
    """
    data = _read_small(os.fspath(path))
    if data is None:
        return None
    try:
        return decode(data)
    except CorruptionError as error:
        raise CorruptionError(f"{os.fspath(path)}: {error}") from error


def place(
    path: str, reference: Reference, files: FileSystem, directory: str, asked: int | None = None
) -> bool:
    """Put ``reference`` at ``path``, atomically in place of what is there; durable by ``settle``.

    ``directory`` is the links directory; it and that of ``path`` exist. asked: False, and nothing
    is changed, if what is at ``path`` is newer than that (see ``order``). Raises ``MediumError``;
    then ``path`` is as it was, or holds the new reference.
    """
    link = os.path.join(directory, reference.id)
    _store(link, encode(reference), files)
    try:
        placed = _link_into_place(link, path, files, directory, asked)
    except MediumError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        placed = _copy_into_place(link, path, reference, files, directory, asked)
    if not placed:
        forget(reference, directory, files)
    return placed


def settle(path: str, files: FileSystem, directory: str) -> None:
    """Return when the reference placed at ``path`` survives power loss. Raises ``MediumError``.

    Its directory may have been renamed or removed meanwhile: how durable that is, is up to who did.
    """
    files.sync(directory)
    settle_removals(os.path.dirname(path), files)


def take_away(path: str, files: FileSystem, asked: int | None = None) -> None:
    """Remove the name ``path``, durably; asked: not if what is there is newer (see ``order``).
    Nothing there is no error. Raises ``MediumError``."""
    with order.turn:
        if asked is None or not order.is_newer(path, asked):
            files.remove(path)
    files.sync(os.path.dirname(path))


def settle_removals(directory: str, files: FileSystem) -> None:
    """Return when what was removed from ``directory``, by anybody, stays removed, also when the
    directory itself is gone. Raises ``MediumError``."""
    while True:
        try:
            return files.sync(directory)
        except MediumError as error:
            if error.errno != errno.ENOENT or directory == os.path.dirname(directory):
                raise
        directory = os.path.dirname(directory)


def links(directory: str, files: FileSystem, *, adopt: bool = True) -> list[Link]:
    """Every reference file that was written for a pool, with its state.

    Copies of files that seem deleted are looked for where the file was written, and linked;
    ``adopt`` False only looks, and changes nothing. Raises ``MediumError``. A damaged link is left
    out: what it named keeps its version by nobody.
    """
    found = []
    for name in files.entries(directory):
        if not name.endswith(".new"):
            link = _link(os.path.join(directory, name), files, directory, adopt=adopt)
            if link is not None:
                found.append(link)
    return found


def state_of(reference: Reference, directory: str, files: FileSystem) -> State:
    """What became of the file of ``reference``; DELETED if its pool knows nothing of it."""
    for name in (reference.id, f"{reference.id}.copy"):
        link = _link(os.path.join(directory, name), files, directory)
        if link is not None:
            return link.state
    return State.DELETED


def forget(reference: Reference, directory: str, files: FileSystem) -> None:
    """Remove the link of a reference file whose version was retired. Not durable by itself."""
    files.remove(os.path.join(directory, reference.id))
    files.remove(os.path.join(directory, f"{reference.id}.copy"))


def tidy(directory: str, files: FileSystem) -> None:
    """Remove what a crash in ``put`` left behind. For the writer of the pool, at open."""
    for name in files.entries(directory):
        path = os.path.join(directory, name)
        if name.endswith(".new"):
            files.remove(path)
        elif name.endswith(".copy"):
            reference = read_through(path, files)
            if reference is not None:
                files.remove(_temporary(reference.written_path, reference))


def is_linked(path: str, reference: Reference, directory: str) -> bool:
    """True if ``directory`` holds a hard link for ``reference`` to the file at ``path``.

    Only looks at names; opens nothing, follows no symbolic link at the end of the link's path.
    """
    try:
        here, there = os.stat(path), os.lstat(os.path.join(directory, reference.id))
    except (OSError, ValueError):
        return False
    same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
    return same and stat.S_ISREG(there.st_mode)


def _store(path: str, data: bytes, files: FileSystem) -> None:
    files.remove(path)  # the rest of an earlier try with the same id
    medium = files.create(path, len(data))
    try:
        medium.store(0, data)
        medium.persist([Extent(0, len(data))])
    finally:
        medium.close()


def _link_into_place(
    link: str, path: str, files: FileSystem, directory: str, asked: int | None
) -> bool:
    try:
        files.link(link, path)
        return True
    except MediumError as error:
        if error.errno != errno.EEXIST:
            raise
        second = f"{link}.new"
        files.remove(second)
        files.link(link, second)
        files.sync(directory)
        try:
            return _replace(second, path, files, asked)
        except MediumError:
            files.remove(second)
            raise


def _copy_into_place(
    link: str,
    path: str,
    reference: Reference,
    files: FileSystem,
    directory: str,
    asked: int | None,
) -> bool:
    copy, temporary = f"{link}.copy", _temporary(path, reference)
    files.replace(link, copy)
    files.sync(directory)
    try:
        _store(temporary, encode(reference), files)
        return _replace(temporary, path, files, asked)
    except MediumError:
        files.remove(temporary)
        files.remove(copy)
        raise


def _replace(source: str, path: str, files: FileSystem, asked: int | None) -> bool:
    """Rename ``source`` to ``path``; False, and it is removed, if what is there is newer."""
    with order.turn:
        if asked is None or not order.is_newer(path, asked):
            files.replace(source, path)
            return True
    files.remove(source)
    return False


def _temporary(path: str, reference: Reference) -> str:
    return os.path.join(os.path.dirname(path), f".{reference.id}.portus")


def _link(path: str, files: FileSystem, directory: str, *, adopt: bool = True) -> Link | None:
    reference = read_through(path, files)
    if reference is None:
        return None
    if path.endswith(".copy"):
        return Link(reference, _state_of_copy(reference, files))
    status = files.status(path)
    if status is not None and status.links > 1:
        return Link(reference, State.ALIVE)
    copy = _copy_of(reference, files)
    if copy is not None and adopt:
        _adopt(copy, path, files, directory)
    return Link(reference, State.DELETED if copy is None else State.ALIVE)


def _state_of_copy(reference: Reference, files: FileSystem) -> State:
    there = read_through(reference.written_path, files)
    if there is None:
        return State.UNKNOWN
    return State.ALIVE if there.id == reference.id else State.DELETED


def _copy_of(reference: Reference, files: FileSystem) -> str | None:
    """The path of a copy of the reference beside where it was written, if there is one."""
    size = len(encode(reference))
    home = os.path.dirname(reference.written_path)
    for name in files.entries(home):
        candidate = os.path.join(home, name)
        status = files.status(candidate)
        if status is None or status.size != size:
            continue
        if read_through(candidate, files) == reference:
            return candidate
    return None


def _adopt(copy: str, path: str, files: FileSystem, directory: str) -> None:
    """Let ``path``, in the links directory, be a link to ``copy``."""
    second = f"{path}.new"
    files.remove(second)
    files.link(copy, second)
    files.replace(second, path)
    files.sync(directory)


def read_through(path: str, files: FileSystem) -> Reference | None:
    """The reference in a small file, through ``files``; None if there is none, or a damaged one."""
    status = files.status(path)
    if status is None or not 0 < status.size <= SIZE_MAX:
        return None
    medium = files.open(path, writable=False)
    try:
        data = bytearray(medium.size)
        medium.load(0, memoryview(data))
    finally:
        medium.close()
    try:
        return decode(bytes(data))
    except CorruptionError:
        return None


def _read_small(path: str) -> bytes | None:
    """All bytes of a regular file of at most ``SIZE_MAX``; None for anything else, or nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _NO_WAIT)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise MediumError(error.errno, f"cannot read {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > SIZE_MAX:
            return None
        return os.read(descriptor, SIZE_MAX)
    except OSError as error:
        raise MediumError(error.errno, f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
