"""Reference files on disk: put, read, removed. What became of them: see ``fate``.

Beside each pool lies its links directory, ``<pool stem>.references/``. It holds one name for each
reference file that was written for that pool:

``<id>.<file>.<home>``       a hard link to it. ``<file>`` and ``<home>`` say which file and which
                             directory these are: inode and time of birth, in hex. ``home`` is
                             where the checkpoint was put: the directory of the file, or, of a
                             part of a state, the directory that holds that one.
``<id>``                     the same where the file system keeps no time of birth, and on its
                             way to the name above.
``<id>[.<file>.<home>].copy`` its bytes, where no hard link can be made (another file system, or
                             one without them). A file that is not there may then have been
                             moved: nothing proves that it is gone.
``<id>.copy``                of a pin: it has no file, and holds until it is removed.
``....new``                  a second hard link, on its way. Left only by a crash.

A reference file appears at the user's path by ``link`` or ``rename`` from there, so no other name
is ever seen beside it. Only where hard links cannot be, a dot-file is renamed into place.

Order of changes, so that a crash between any two loses nothing:

new path       ``place`` (bytes persisted, link, name) when the save is requested;
               ``make_durable`` (both directories synced) before the version is committed. So a
               committed version has a durable name and a durable link, and is never taken for
               deleted.
existing path  after the commit: ``place`` syncs the link before it replaces the name, then
               ``make_durable``. A crash before leaves the old file, and the old version with it.
removal        ``take_away`` (name removed, its directory synced), then the caller retires the
               version, and only then ``forget`` removes the link.
deleted        by a user, or replaced by a process that was killed: the name may be gone in caches
               only. So before its version counts as not held, its directory is synced.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from portus.client.files import order
from portus.directory.links import replace_link
from portus.errors import CorruptionError, MediumError, UsageError
from portus.format.reference import SIZE_MAX, Reference, decode, encode
from portus.media.base import Birth, FileSystem
from portus.media.process import Descriptor
from portus.spec import Extent

NO_HARD_LINKS: Final = frozenset(
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
"""Why a file cannot have one here."""

_NO_WAIT: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""A named pipe must not hold a reader up; Windows must not translate line ends."""

_COPY: Final = ".copy"

NEW: Final = ".new"
"""Behind a name that is on its way."""

_BIRTHS: Final = re.compile(r"\.([0-9a-f]{1,16})-([0-9a-f]{1,16})" * 2)


@dataclass(frozen=True, slots=True)
class LinkName:
    """A name in a links directory. See the module."""

    id: str
    births: tuple[Birth, Birth] | None
    """The births of the file and of its home; None if they are not known."""

    is_copy: bool = False

    def __str__(self) -> str:
        births = [f".{inode:x}-{born_ns:x}" for inode, born_ns in self.births or ()]
        return self.id + "".join(births) + (_COPY if self.is_copy else "")


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
    """Put ``reference`` at ``path``, atomically in place of what is there; not yet synced.

    ``directory`` is the links directory; it and that of ``path`` exist. asked: False, and nothing
    is changed, if what is at ``path`` is newer than that (see ``order``). Raises ``MediumError``;
    then ``path`` is as it was, or holds the new reference.
    """
    link = _made(reference, home_of(reference, path), files, directory)
    try:
        try:
            placed = _link_into_place(link, path, files, directory, asked)
        except MediumError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            placed = _copy_into_place(link, path, reference, files, directory, asked)
    except MediumError:
        files.remove(link)  # it leads to no file, and never did
        raise
    if not placed:
        forget(reference, directory, files)
    return placed


def place_copy(reference: Reference, directory: str, files: FileSystem) -> None:
    """Keep the bytes of a reference that has no file: a pin. Durable when this returns; the links
    directory exists. Raises ``MediumError``."""
    coming = os.path.join(directory, f"{reference.id}{NEW}")
    _store(coming, encode(reference), files)
    files.replace(coming, os.path.join(directory, str(LinkName(reference.id, None, True))))
    files.sync(directory)


def pins(directory: str, files: FileSystem, known: Mapping[str, Reference]) -> dict[str, Reference]:
    """The pins in a links directory, by their ids. known: what was read before, by its id, is not
    read again. Raises ``MediumError``."""
    found: dict[str, Reference] = {}
    for name in link_names(directory, files):
        if name.is_copy and name.births is None:
            reference = known.get(name.id) or read_through(
                os.path.join(directory, str(name)), files
            )
            if reference is not None and reference.is_pin:
                found[name.id] = reference
    return found


def make_durable(path: str, files: FileSystem, directory: str) -> None:
    """Return when the reference placed at ``path`` survives power loss. Raises ``MediumError``.

    Its directory may have been renamed or removed meanwhile: how durable that is, is up to who did.
    """
    files.sync(directory)
    make_removals_durable(os.path.dirname(path), files)


def take_away(path: str, files: FileSystem, asked: int | None = None) -> None:
    """Remove the name ``path``, durably; asked: not if what is there is newer (see ``order``).
    Nothing there is no error. Raises ``MediumError``."""
    with order.turn:
        if asked is None or not order.is_newer(path, asked):
            files.remove(path)
    files.sync(os.path.dirname(path))


def move(path: str, to: str, reference: Reference, files: FileSystem, asked: int | None) -> bool:
    """Rename the file of ``reference`` at ``path``; durable once its directory is synced. False if
    another file is there by now, or none; asked: or one that is newer (see ``order``). Raises
    ``MediumError``."""
    with order.turn:
        if asked is not None and order.is_newer(path, asked):
            return False
        if read_through(path, files) != reference:
            return False
        files.replace(path, to)
        return True


def make_removals_durable(directory: str, files: FileSystem) -> None:
    """Return when what was removed from ``directory``, by anybody, stays removed, also when the
    directory itself is gone. Raises ``MediumError``."""
    while True:
        try:
            return files.sync(directory)
        except MediumError as error:
            if error.errno != errno.ENOENT or directory == os.path.dirname(directory):
                raise
        directory = os.path.dirname(directory)


def lead_links_to(target: str, path: str) -> None:
    """Let the symbolic links beside ``path`` that lead to it lead to ``target``. Each is replaced
    atomically. Raises ``MediumError``."""
    directory = os.path.dirname(path)
    try:
        for name in os.listdir(directory):
            link = os.path.join(directory, name)
            if os.path.islink(link) and os.path.realpath(link) == os.path.realpath(path):
                replace_link(link, target)
    except FileNotFoundError:
        return  # there is no such directory here
    except OSError as error:
        raise MediumError(error.errno, f"cannot link to {target}: {error.strerror}") from error


def forget(reference: Reference, directory: str, files: FileSystem) -> None:
    """Remove the link of a reference file whose version was retired. Not durable by itself."""
    for name in link_names(directory, files):
        if name.id == reference.id:
            files.remove(os.path.join(directory, str(name)))


def tidy(directory: str, files: FileSystem) -> None:
    """Remove what a crash in ``put`` left behind. For the writer of the pool, at open."""
    for entry in files.entries(directory):
        path = os.path.join(directory, entry)
        if entry.endswith(NEW):
            files.remove(path)
        elif entry.endswith(_COPY):
            reference = read_through(path, files)
            if reference is not None:
                files.remove(_temporary(reference.written_path, reference))


def is_linked(path: str, reference: Reference, directory: str) -> bool:
    """True if ``directory`` holds a hard link for ``reference`` to the file at ``path``.

    Only looks at names; opens nothing, follows no symbolic link at the end of the link's path.
    """
    try:
        here = os.stat(path)
        entries = [name for name in os.listdir(directory) if name.startswith(reference.id)]
        for name in entries:
            there = os.lstat(os.path.join(directory, name))
            same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
            if same and stat.S_ISREG(there.st_mode):
                return True
    except (OSError, ValueError):
        pass
    return False


def home_of(reference: Reference, path: str) -> str:
    """The directory that the checkpoint was put into, of which the file at ``path`` is all, or
    (``part``) one file of a directory that is the checkpoint."""
    directory = os.path.dirname(path)
    return directory if reference.part is None else os.path.dirname(directory)


def link_names(directory: str, files: FileSystem) -> list[LinkName]:
    """What is in a links directory, but for what is on its way."""
    found = []
    for entry in files.entries(directory):
        stem = entry.removesuffix(_COPY)
        name, _, births = stem.partition(".")
        if entry.endswith(NEW):
            continue
        matched = _BIRTHS.fullmatch(f".{births}")
        if matched:
            numbers = [int(number, 16) for number in matched.groups()]
            found.append(
                LinkName(name, ((numbers[0], numbers[1]), (numbers[2], numbers[3])), stem != entry)
            )
        elif not births:
            found.append(LinkName(name, None, stem != entry))
    return found


def _made(reference: Reference, home: str, files: FileSystem, directory: str) -> str:
    """A link, persisted, of a file that is to be in ``home``; its path."""
    coming = os.path.join(directory, f"{reference.id}{NEW}")
    _store(coming, encode(reference), files)
    link = os.path.join(directory, str(LinkName(reference.id, births_of(coming, home, files))))
    files.replace(coming, link)
    return link


def births_of(link: str, home: str, files: FileSystem) -> tuple[Birth, Birth] | None:
    """Return the births of a link and of its file's home; None if the file system keeps none."""
    file, directory = files.birth(link), files.birth(home)
    return None if file is None or directory is None else (file, directory)


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
        second = f"{link}{NEW}"
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
    copy, temporary = f"{link}{_COPY}", _temporary(path, reference)
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


def read_through(path: str, files: FileSystem) -> Reference | None:
    """The reference in a small file, through ``files``; None if there is none, or a damaged one."""
    data = _small_through(path, files)
    if data is None:
        return None
    try:
        return decode(data)
    except CorruptionError:
        return None


def is_foreign(path: str, files: FileSystem) -> bool:
    """True if there are bytes at ``path`` that are no reference, nor what is left of a damaged one.
    Raises ``MediumError``."""
    data = _small_through(path, files)
    if data is None:
        status = files.status(path)
        return status is not None and status.size > SIZE_MAX
    try:
        return decode(data) is None
    except (CorruptionError, UsageError):
        return False


def _small_through(path: str, files: FileSystem) -> bytes | None:
    """What is in a file that may be a reference by its size; None if there is none, or nothing."""
    status = files.status(path)
    if status is None or not 0 < status.size <= SIZE_MAX:
        return None
    medium = files.open(path, writable=False)
    try:
        data = bytearray(medium.size)
        medium.load(0, memoryview(data))
    finally:
        medium.close()
    return bytes(data)


def _read_small(path: str) -> bytes | None:
    """All bytes of a regular file of at most ``SIZE_MAX``; None for anything else, or nothing."""
    try:
        descriptor = Descriptor(path, os.O_RDONLY | _NO_WAIT)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise MediumError(error.errno, f"cannot read {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor.number)
        if not stat.S_ISREG(status.st_mode) or status.st_size > SIZE_MAX:
            return None
        return os.read(descriptor.number, SIZE_MAX)
    except OSError as error:
        raise MediumError(error.errno, f"cannot read {path}: {error.strerror}") from error
    finally:
        descriptor.close()
