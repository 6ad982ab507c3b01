"""Reference files on disk: put, read, removed, and told alive from deleted.

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
``....new``                  a second hard link, on its way. Left only by a crash.

A reference file appears at the user's path by ``link`` or ``rename`` from there, so no other name
is ever seen beside it. Only where hard links cannot be, a dot-file is renamed into place.

What became of it (``State``). Unknown means held:

alive     the link count is over 1: there is a name, wherever; ``mv`` does not change that. Or the
          file at its place says the same, or one beside it, or one below the root of the run
          (``survey``): a copy. It is *adopted*: linked, under a name of its own, if nobody else
          has a link to it. So a copied run has its own files, and leaves those of the original
          alone: they have two names.
deleted   only if it is proven. The link is the one that was made then (its birth is the one in
          its name: links that were copied, restored or packed prove nothing); ``home`` is there,
          by its birth, and the file is not; and no copy was found, everywhere.
unknown   all else. Only a user may say that it is gone: by removing it through Portus, or with
          ``portus gc --missing``.

Where the place of a file is: by the way from the pool to it, which a run that is moved or copied
as a whole keeps. The path at which it was written counts only if ``home`` is there: to a copy of
the pool it leads to the files of the original.

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

import contextlib
import enum
import errno
import itertools
import logging
import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from portus.client import order
from portus.client.survey import Survey, survey_of
from portus.errors import CorruptionError, MediumError
from portus.format.reference import SIZE_MAX, Reference, decode, encode
from portus.media.base import Birth, Files, Names
from portus.media.process import Descriptor
from portus.protocol.address import is_address
from portus.spec import Extent

_log: Final = logging.getLogger("portus")

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


_COPY: Final = ".copy"
_NEW: Final = ".new"
_BIRTHS: Final = re.compile(r"\.([0-9a-f]{1,16})-([0-9a-f]{1,16})" * 2)


class FileSystem(Files, Names, Protocol):
    """Names that can be changed and looked at."""


class State(enum.Enum):
    """What became of a reference file; see the module. UNKNOWN: it may be anywhere, so it holds."""

    ALIVE = "alive"
    DELETED = "deleted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Link:
    """One reference file as the links directory knows it. ``path``: where it is, or a copy of it,
    if that is known; if it is deleted, what used to be its path."""

    reference: Reference
    state: State
    path: str | None = None


@dataclass(frozen=True, slots=True)
class _Name:
    """A name in a links directory. See the module."""

    id: str
    births: tuple[Birth, Birth] | None
    """Of the file, and of its home; None: not known."""

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
    """Put ``reference`` at ``path``, atomically in place of what is there; durable by ``settle``.

    ``directory`` is the links directory; it and that of ``path`` exist. asked: False, and nothing
    is changed, if what is at ``path`` is newer than that (see ``order``). Raises ``MediumError``;
    then ``path`` is as it was, or holds the new reference.
    """
    link = _made(reference, home_of(reference, path), files, directory)
    try:
        try:
            placed = _link_into_place(link, path, files, directory, asked)
        except MediumError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            placed = _copy_into_place(link, path, reference, files, directory, asked)
    except MediumError:
        files.remove(link)  # it leads to no file, and never did
        raise
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


def links(
    directory: str, files: FileSystem, *, adopt: bool = True, survey: Survey | None = None
) -> list[Link]:
    """Every reference file that was written for a pool, with its state.

    Copies of files that are not where they were are looked for, and linked; ``adopt`` False only
    looks, and changes nothing. survey: of the run, kept from call to call. Raises ``MediumError``.
    A damaged link is left out: what it named keeps its version by nobody.
    """
    judge = _Judge(directory, files, survey, adopt=adopt)
    found: dict[str, Link] = {}
    for name in _names(directory, files):
        link = judge.look(name)
        if link is not None:
            before = found.get(link.reference.id, link)
            found[link.reference.id] = min(before, link, key=lambda each: _WORTH[each.state])
    return list(found.values())


_WORTH: Final = {State.ALIVE: 0, State.UNKNOWN: 1, State.DELETED: 2}


def state_of(
    reference: Reference, directory: str, files: FileSystem, survey: Survey | None = None
) -> State:
    """What became of the file of ``reference``; DELETED if its pool knows nothing of it, and no
    copy was found."""
    judge = _Judge(directory, files, survey, adopt=True)
    found = [judge.look(name) for name in _names(directory, files) if name.id == reference.id]
    states = [link.state for link in found if link is not None]
    if not states and judge.copy_of(reference) is not None:
        return State.ALIVE
    return min(states, key=_WORTH.__getitem__, default=State.DELETED)


def strays(
    directory: str, files: FileSystem, pool: str, survey: Survey, there: Collection[str]
) -> list[Reference]:
    """The reference files below the root of the run that lead to the pool of that identity, to what
    is ``there`` by its token, and of which the links directory knows nothing. Those of versions
    that are there are linked from now on, if nobody else did: a link without a version is that of a
    save that was cut off, and the others may be of versions that were retired."""
    known = {name.id for name in _names(directory, files)}
    judge = _Judge(directory, files, survey, adopt=True)
    found = []
    for path, reference in survey.references():
        is_known = reference.pool != pool or reference.id in known
        if is_known or reference.leads_to(there) is None:
            continue
        if reference.token in there:
            judge.adopt(path, reference, None)
        found.append(reference)
    return found


def lead_links_to(target: str, path: str) -> None:
    """Let the symbolic links beside ``path`` that lead to it lead to ``target``. Each is replaced
    atomically. Raises ``MediumError``."""
    directory = os.path.dirname(path)
    try:
        for name in os.listdir(directory):
            link = os.path.join(directory, name)
            if os.path.islink(link) and os.path.realpath(link) == os.path.realpath(path):
                second = os.path.join(directory, f".{name}{_NEW}")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(second)
                os.symlink(os.path.relpath(target, directory), second)
                os.replace(second, link)
    except FileNotFoundError:
        return  # there is no such directory here
    except OSError as error:
        raise MediumError(error.errno, f"cannot link to {target}: {error.strerror}") from error


def forget(reference: Reference, directory: str, files: FileSystem) -> None:
    """Remove the link of a reference file whose version was retired. Not durable by itself."""
    for name in _names(directory, files):
        if name.id == reference.id:
            files.remove(os.path.join(directory, str(name)))


def tidy(directory: str, files: FileSystem) -> None:
    """Remove what a crash in ``put`` left behind. For the writer of the pool, at open."""
    for entry in files.entries(directory):
        path = os.path.join(directory, entry)
        if entry.endswith(_NEW):
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


def _names(directory: str, files: FileSystem) -> list[_Name]:
    """What is in a links directory, but for what is on its way."""
    found = []
    for entry in files.entries(directory):
        stem = entry.removesuffix(_COPY)
        name, _, births = stem.partition(".")
        if entry.endswith(_NEW):
            continue
        matched = _BIRTHS.fullmatch(f".{births}")
        if matched:
            numbers = [int(number, 16) for number in matched.groups()]
            found.append(
                _Name(name, ((numbers[0], numbers[1]), (numbers[2], numbers[3])), stem != entry)
            )
        elif not births:
            found.append(_Name(name, None, stem != entry))
    return found


def _made(reference: Reference, home: str, files: FileSystem, directory: str) -> str:
    """A link, persisted, of a file that is to be in ``home``; its path."""
    coming = os.path.join(directory, f"{reference.id}{_NEW}")
    _store(coming, encode(reference), files)
    link = os.path.join(directory, str(_Name(reference.id, _births(coming, home, files))))
    files.replace(coming, link)
    return link


def _births(link: str, home: str, files: FileSystem) -> tuple[Birth, Birth] | None:
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
        second = f"{link}{_NEW}"
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


class _Judge:
    """Tells what became of the reference files of one links directory."""

    def __init__(
        self, directory: str, files: FileSystem, survey: Survey | None, *, adopt: bool
    ) -> None:
        self._directory: Final = directory
        self._files: Final = files
        self._adopts: Final = adopt
        self._survey: Final = survey or survey_of(directory)
        self._survey.renew()

    def look(self, name: _Name) -> Link | None:
        """What became of the file of ``name``; None if the link is damaged."""
        reference = read_through(os.path.join(self._directory, str(name)), self._files)
        if reference is None:
            return None
        try:
            return self._look(name, reference)
        except MediumError as error:  # a place that cannot be looked at proves nothing
            _log.warning("%s: what became of it is not known: %s", reference.written_path, error)
            return Link(reference, State.UNKNOWN)

    def copy_of(self, reference: Reference) -> str | None:
        """The path of a file that says the same, at its place, beside it, or below the root."""
        return self._found(reference, self._places(reference, None, is_original=False))

    def adopt(self, path: str, reference: Reference, old: _Name | None) -> None:
        """Have a link to the file at ``path`` in place of ``old``, unless others have one."""
        files = self._files
        own = None if old is None else os.path.join(self._directory, str(old))
        here, linked = files.status(path), None if own is None else files.status(own)
        is_own = here is not None and linked is not None and here.identity == linked.identity
        if here is None or not (is_own or here.links == 1):
            return
        births = _births(path, home_of(reference, path), files)
        link = os.path.join(self._directory, str(_Name(reference.id, births)))
        if own == link and is_own:
            return
        try:
            files.remove(f"{link}{_NEW}")
            files.link(path, f"{link}{_NEW}")
            files.replace(f"{link}{_NEW}", link)
            files.remove(f"{link}{_NEW}")  # it stays where both were one file already
        except MediumError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return
        if own is not None and own != link:
            files.sync(self._directory)
            files.remove(own)
        files.sync(self._directory)

    def _look(self, name: _Name, reference: Reference) -> Link:
        files, path = self._files, os.path.join(self._directory, str(name))
        is_original = name.births is not None and files.birth(path) == name.births[0]
        home = name.births[1] if name.births else None
        places = self._places(reference, home, is_original=is_original)
        status = files.status(path)
        if not name.is_copy and status is not None and status.links > 1:
            at = next((place for place in places if self._is_same(place, path)), None)
            if self._adopts and at is not None and not is_original:
                self._try_to_adopt(at, reference, name)
            return Link(reference, State.ALIVE, at)
        found = self._found(reference, places)
        if found is not None:
            if self._adopts and not name.is_copy:
                self._try_to_adopt(found, reference, name)
            return Link(reference, State.ALIVE, found)
        if is_original and not name.is_copy and self._survey.is_complete:
            gone = self._gone(reference, name)
            if gone is not None:
                return Link(reference, State.DELETED, gone)
        return Link(reference, State.UNKNOWN)

    def _try_to_adopt(self, path: str, reference: Reference, old: _Name) -> None:
        """A file that is there is alive, whether or not there is room for a link to it."""
        try:
            self.adopt(path, reference, old)
        except MediumError as error:
            _log.warning("%s: it gets no link of its own now: %s", path, error)

    def _places(self, reference: Reference, home: Birth | None, *, is_original: bool) -> list[str]:
        """Where the file may be. home: known to be the one that it was put into; None: not known.
        The path that it was written at is believed by a link that was not copied, and there."""
        here, written = self._relative(reference), reference.written_path
        if here == written:
            return [written]
        is_believed = home is None or self._is_home(reference, written, home)
        places = [] if here is None else [here]
        return [*places, written] if is_original and is_believed else places

    def _relative(self, reference: Reference) -> str | None:
        """The place of the file by the way from the pool to it. None: a pool on a host has none,
        nor has a device, whose links are not beside it."""
        directory, stem = os.path.split(os.path.splitext(self._directory)[0])
        if is_address(reference.pool_relative) or stem == reference.pool:
            return None
        way = [part for part in reference.pool_relative.split("/") if part != "."]
        ups = sum(part == ".." for part in way)
        root = directory
        for _ in range(len(way) - ups - 1):
            root = os.path.dirname(root)
        below = reference.written_path.split("/")[-ups - 1 :]
        return os.path.join(root, *below)

    def _found(self, reference: Reference, places: Sequence[str]) -> str | None:
        beside = (
            os.path.join(home, name)
            for home in dict.fromkeys(map(os.path.dirname, places))
            for name in self._files.entries(home)
        )
        size = len(encode(reference))
        for path in itertools.chain(places, beside):
            status = self._files.status(path)
            if status is not None and status.size == size:
                there = read_through(path, self._files)
                if there == reference:
                    return path
        return next(iter(self._survey.copies(reference)), None)

    def _gone(self, reference: Reference, name: _Name) -> str | None:
        """Where the file was, if it is proven that it is not there any more. Its home is there,
        and in it is nothing of its name, or another file; not a name that leads nowhere now."""
        assert name.births is not None
        for path in dict.fromkeys((self._relative(reference), reference.written_path)):
            if path is None or not self._is_home(reference, path, name.births[1]):
                continue
            is_there = self._files.status(path) is not None
            return path if is_there or self._is_absent(path, home_of(reference, path)) else None
        found = self._survey.directory(name.births[1])
        return None if found is None else os.path.join(found, reference.id)

    def _is_absent(self, path: str, home: str) -> bool:
        """True if the way from ``home`` to ``path`` ends in a directory without the next name."""
        at = home
        for name in os.path.relpath(path, home).split(os.sep):
            if name not in self._files.entries(at):
                return True
            at = os.path.join(at, name)
            if self._files.status(at) is None:
                break
        return False

    def _is_home(self, reference: Reference, path: str, home: Birth) -> bool:
        return self._files.birth(home_of(reference, path)) == home

    def _is_same(self, path: str, link: str) -> bool:
        here, there = self._files.status(path), self._files.status(link)
        return here is not None and there is not None and here.identity == there.identity


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
