"""What became of the reference files of a pool: alive, deleted, or unknown, which means held.

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
"""

from __future__ import annotations

import enum
import itertools
import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from portus.client.files.reference import (
    NEW,
    NO_HARD_LINKS,
    LinkName,
    births_of,
    home_of,
    is_foreign,
    link_names,
    read_through,
)
from portus.client.files.survey import Survey, survey_of
from portus.errors import MediumError
from portus.format.reference import Reference, encode
from portus.media.base import Birth, FileSystem
from portus.protocol.address import is_address

_log: Final = logging.getLogger("portus")

_ID: Final = re.compile(r"[0-9a-f]{32}")
"""Of a reference, by which its link is named; somebody else's files have other names."""


class Fate(enum.Enum):
    """What became of a reference file; see the module. UNKNOWN: it may be anywhere, so it holds.
    PINNED: it has no file, and holds until somebody takes it back."""

    ALIVE = "alive"
    DELETED = "deleted"
    UNKNOWN = "unknown"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class FileLink:
    """One reference file as the links directory knows it. ``path``: where it is, or a copy of it,
    if that is known; if it is deleted, what used to be its path."""

    reference: Reference
    state: Fate
    path: str | None = None


def links(
    directory: str, files: FileSystem, *, adopt: bool = True, survey: Survey | None = None
) -> list[FileLink]:
    """Every reference file that was written for a pool, with its state.

    Copies of files that are not where they were are looked for, and linked; ``adopt`` False only
    looks, and changes nothing. survey: of the run, kept from call to call. Raises ``MediumError``.
    A damaged link is left out: what it named keeps its version by nobody.
    """
    judge = _Judge(directory, files, survey, adopt=adopt)
    found: dict[str, FileLink] = {}
    for name in link_names(directory, files):
        link = judge.look(name)
        if link is not None:
            before = found.get(link.reference.id, link)
            found[link.reference.id] = min(before, link, key=lambda each: _WORTH[each.state])
    return list(found.values())


_WORTH: Final = {Fate.ALIVE: 0, Fate.PINNED: 0, Fate.UNKNOWN: 1, Fate.DELETED: 2}


def overwritten(
    directory: str,
    files: FileSystem,
    references: Collection[str] = (),
    survey: Survey | None = None,
) -> dict[LinkName, str | None]:
    """The links to files that another program wrote to in place, so that they are references no
    more; with the path of each, if it is found in its directory. references: the ids of links that
    are known to be references, and need not be read. Only looks. Raises ``MediumError``."""
    found: dict[LinkName, str | None] = {}
    for name in link_names(directory, files):
        link = os.path.join(directory, str(name))
        is_link = _ID.fullmatch(name.id) is not None and not name.is_copy
        if is_link and name.id not in references and is_foreign(link, files):
            found[name] = _path_of(link, name, files, survey or survey_of(directory))
    return found


def _path_of(link: str, name: LinkName, files: FileSystem, survey: Survey) -> str | None:
    """Another path of the file of a link, in its home, or in a directory there."""
    home = None if name.births is None else survey.directory(name.births[1])
    linked = files.status(link)
    if home is None or linked is None:
        return None
    near = [os.path.join(home, each) for each in files.entries(home)]
    below = (os.path.join(d, each) for d in near if os.path.isdir(d) for each in files.entries(d))
    for path in itertools.chain(near, below):
        status = files.status(path)
        if status is not None and status.identity == linked.identity:
            return path
    return None


def state_of(
    reference: Reference, directory: str, files: FileSystem, survey: Survey | None = None
) -> Fate:
    """What became of the file of ``reference``; DELETED if its pool knows nothing of it, and no
    copy was found."""
    judge = _Judge(directory, files, survey, adopt=True)
    found = [judge.look(name) for name in link_names(directory, files) if name.id == reference.id]
    states = [link.state for link in found if link is not None]
    if not states and judge.copy_of(reference) is not None:
        return Fate.ALIVE
    return min(states, key=_WORTH.__getitem__, default=Fate.DELETED)


def strays(
    directory: str, files: FileSystem, pool: str, survey: Survey, there: Collection[str]
) -> list[Reference]:
    """The reference files below the root of the run that lead to the pool of that identity, to what
    is ``there`` by its token, and of which the links directory knows nothing. Those of versions
    that are there are linked from now on, if nobody else did: a link without a version is that of a
    save that was cut off, and the others may be of versions that were retired."""
    known = {name.id for name in link_names(directory, files)}
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

    def look(self, name: LinkName) -> FileLink | None:
        """What became of the file of ``name``; None if the link is damaged."""
        reference = read_through(os.path.join(self._directory, str(name)), self._files)
        if reference is None:
            return None
        if reference.is_pin:
            return FileLink(reference, Fate.PINNED)
        try:
            return self._look(name, reference)
        except MediumError as error:  # a place that cannot be looked at proves nothing
            _log.warning("%s: cannot tell what became of it: %s", reference.written_path, error)
            return FileLink(reference, Fate.UNKNOWN)

    def copy_of(self, reference: Reference) -> str | None:
        """The path of a file that says the same, at its place, beside it, or below the root."""
        return self._found(reference, self._places(reference, None, is_original=False))

    def adopt(self, path: str, reference: Reference, old: LinkName | None) -> None:
        """Have a link to the file at ``path`` in place of ``old``, unless others have one."""
        files = self._files
        own = None if old is None else os.path.join(self._directory, str(old))
        here, linked = files.status(path), None if own is None else files.status(own)
        is_own = here is not None and linked is not None and here.identity == linked.identity
        if here is None or not (is_own or here.links == 1):
            return
        births = births_of(path, home_of(reference, path), files)
        link = os.path.join(self._directory, str(LinkName(reference.id, births)))
        if own == link and is_own:
            return
        try:
            files.remove(f"{link}{NEW}")
            files.link(path, f"{link}{NEW}")
            files.replace(f"{link}{NEW}", link)
            files.remove(f"{link}{NEW}")  # it stays where both were one file already
        except MediumError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            return
        if own is not None and own != link:
            files.sync(self._directory)
            files.remove(own)
        files.sync(self._directory)

    def _look(self, name: LinkName, reference: Reference) -> FileLink:
        files, path = self._files, os.path.join(self._directory, str(name))
        is_original = name.births is not None and files.birth(path) == name.births[0]
        home = name.births[1] if name.births else None
        places = self._places(reference, home, is_original=is_original)
        status = files.status(path)
        if not name.is_copy and status is not None and status.links > 1:
            at = next((place for place in places if self._is_same(place, path)), None)
            if self._adopts and at is not None and not is_original:
                self._try_to_adopt(at, reference, name)
            return FileLink(reference, Fate.ALIVE, at)
        found = self._found(reference, places)
        if found is not None:
            if self._adopts and not name.is_copy:
                self._try_to_adopt(found, reference, name)
            return FileLink(reference, Fate.ALIVE, found)
        if is_original and not name.is_copy and self._survey.is_complete:
            gone = self._gone(reference, name)
            if gone is not None:
                return FileLink(reference, Fate.DELETED, gone)
        return FileLink(reference, Fate.UNKNOWN)

    def _try_to_adopt(self, path: str, reference: Reference, old: LinkName) -> None:
        """A file that is there is alive, whether or not there is room for a link to it."""
        try:
            self.adopt(path, reference, old)
        except MediumError as error:
            _log.warning("%s: cannot make a link for it now: %s", path, error)

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

    def _gone(self, reference: Reference, name: LinkName) -> str | None:
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
