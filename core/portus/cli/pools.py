"""The pools that a command means, and what they hold. No torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from portus.cli.output import Json, fields, moment_text
from portus.client.files.home import open_place
from portus.client.files.host import HostPool
from portus.client.files.reference import read as pointer_at
from portus.client.pools.resolve import POOLS
from portus.client.pools.version_file import table_of
from portus.errors import PortusError, UsageError
from portus.index.catalogue import Catalogue
from portus.index.directory import on_disk, pools_at
from portus.index.place import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE, Place, PlaceKind
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.mirror.address import is_store, parse
from portus.mirror.fetching import missing
from portus.mirror.mirror import Mirror
from portus.mirror.mirrors import Mirrors, meant
from portus.mirror.objects import Added
from portus.protocol.address import is_address
from portus.spec import VersionInfo
from portus.versions.packed import FileTable

_STEPS_MAX: Final = 20
"""Steps and models that an error lists."""


def find_pool(pool: str | None, near: str | None = None, *, mirrors: bool = False) -> Place:
    """Return the pool file, pool directory or storage host that is meant; or the mirrors, for
    commands that take ``mirrors``.

    That is ``pool`` if given; else ``$PORTUS_POOL``; else ``.portus`` in the current directory, or
    in that of the file ``near``, or in one above it. Raises ``UsageError`` if there is none.
    """
    if pool is not None and is_store(pool):
        address = parse(pool, "--pool")
        if not mirrors:
            raise UsageError(
                f"{address} is the address of a mirror, and this command takes pools; portus pull "
                f"{address} makes pools from the mirror"
            )
        return Place(PlaceKind.MIRROR, str(address))
    named = Place.by_variable() if pool is None else Place.named(pool, "--pool")
    if named is not None:
        refuse_pointer(named)
        return named
    start = os.getcwd() if near is None else os.path.dirname(os.path.abspath(near))
    place = nearest(start)
    if place is None:
        raise UsageError(
            f"there is no {DEFAULT_DIRECTORY} in {start} or above; say where the pool is: "
            f"--pool PATH, or {DIRECTORY_VARIABLE}=PATH"
        )
    return Place.named(place)


def refuse_pointer(place: Place) -> None:
    """Raise ``UsageError`` where a checkpoint is named in place of a pool."""
    if place.kind is PlaceKind.FILE and pointer_at(place.path) is not None:
        raise UsageError(
            f"{place} is a pointer to a checkpoint in a pool; expected the pool. portus show "
            f"{place} shows what it leads to"
        )


def allow(pool: str | None) -> None:
    """Let pointers lead to the pool that ``--pool`` names, if it names one."""
    if pool is not None and not is_store(pool):
        POOLS.allow(Place.named(pool, "--pool"))


def nearest(start: str) -> str | None:
    """Return ``.portus`` in ``start`` or in a directory above it; None if there is none."""
    above = map(str, Path(start).parents)
    places = (os.path.join(each, DEFAULT_DIRECTORY) for each in (start, *above))
    return next(filter(os.path.isdir, places), None)


@dataclass(frozen=True, slots=True, eq=False)
class FoundVersion:
    """A version, and the pool that holds it, or its mirror. ``open`` returns a reader, and the
    version there; that of a mirror is opened by the first use, and has an id of its own.
    ``check``: of a mirror, reads all objects, and raises ``CorruptionError`` for a damaged one; it
    tells of bytes that were read."""

    pool: Place
    info: VersionInfo
    open: Callable[[], tuple[PoolReader, VersionEntry]]
    check: Callable[[Callable[[int], object]], None] = lambda _: None

    @property
    def title(self) -> str:
        """The version as users name it."""
        return f"{self.info.model}@{self.info.step}"

    @property
    def is_mirrored(self) -> bool:
        """True for a version of a mirror."""
        return self.pool.kind is PlaceKind.MIRROR


def table_in(reader: PoolReader, entry: VersionEntry) -> FileTable | None:
    """Return the files of a version; None if it is one of something else. Raises
    ``CorruptionError``, ``MediumError``, ``StaleError``."""
    with reader.pinned(entry.info.id) as current:
        return table_of(reader, reader.record(current))


def taken_by(reader: PoolReader) -> int:
    """Return the bytes that a pool takes of its file system; 0 if it is on none."""
    if isinstance(reader, HostPool):
        return reader.standing().taken
    return on_disk(reader.medium.info.name)


class PlacePools(contextlib.ExitStack):
    """The pools of a place, or its mirrors, opened for reading. ``failed``: why others cannot be.
    ``target``: what is looked for; of mirrors no others are read."""

    def __init__(self, place: Place, target: str | None = None) -> None:
        super().__init__()
        self.place: Final = place
        self.target: Final = target
        self.failed: Final[dict[Place, PortusError]] = {}
        self._readers: Final[dict[Place, PoolReader]] = {}
        self._mirrors: Mirrors | None = None
        if place.kind is PlaceKind.MIRROR:
            self._mirrors = self.enter_context(Mirrors(parse(place.path)))
            return
        for pool in pools_at(place):
            try:
                self._readers[pool] = self.enter_context(contextlib.closing(open_place(pool)))
            except PortusError as error:
                self.failed[pool] = error

    def catalogues(self) -> Iterator[tuple[Place, PoolReader, Catalogue]]:
        """Yield what each of the pools holds now."""
        for pool, reader in self._readers.items():
            try:
                yield pool, reader, reader.catalogue()
            except PortusError as error:
                self.failed[pool] = error

    def versions(self) -> list[FoundVersion]:
        """Return all versions: by pool file, oldest commit first; of mirrors those of ``target``,
        by their history."""
        if self._mirrors is not None:
            return list(self._mirrored(self._mirrors))
        found = [
            FoundVersion(pool, entry.info, lambda both=(reader, entry): both)  # type: ignore[misc]
            for pool, reader, catalogue in self.catalogues()
            for entry in catalogue.entries()
        ]
        return sorted(found, key=lambda each: (each.pool.path, each.info.commit, each.info.id))

    def _mirrored(self, mirrors: Mirrors) -> Iterator[FoundVersion]:
        """Yield versions of mirrors. Ids are counted here; commits are those of the pools that they
        were committed to."""
        numbers = itertools.count(1)
        for model in mirrors.models():
            if self.target is None or model in (self.target, self.target.rpartition("@")[0]):
                mirror = mirrors.of(model)
                for added in missing(mirror.read(), ()):
                    info = added.info(model, next(numbers), added.commit)
                    opening = functools.partial(self._open, mirror, added)
                    check = functools.partial(mirror.check, added)
                    yield FoundVersion(self.place, info, functools.cache(opening), check)

    def _open(self, mirror: Mirror, added: Added) -> tuple[PoolReader, VersionEntry]:
        return self.enter_context(mirror.opened_as(added))

    def select(self) -> list[FoundVersion]:
        """Return the versions that ``target`` means: ``MODEL`` or ``MODEL@STEP``.

        A step may have several, after a rollback. Raises ``UsageError`` if there are none; if a
        pool could not be read, that is raised.
        """
        versions, target = self.versions(), self.target or ""
        found = [each for each in versions if each.info.model == target]
        model, at, step = target.rpartition("@")
        if not found and at and step.removeprefix("-").isdecimal() and step.isascii():
            named = (model, int(step))
            found = [each for each in versions if (each.info.model, each.info.step) == named]
        if found:
            return found
        for error in self.failed.values():
            raise error
        if os.path.isfile(target):
            raise UsageError(f"{target} is a file, but no checkpoint")
        steps = [str(each.info.step) for each in versions if each.info.model in (target, model)]
        if steps:
            more = "... " if len(steps) > _STEPS_MAX else ""
            choices = f"model {model!r} has steps {more}{', '.join(steps[-_STEPS_MAX:])}"
        elif models := self._mirrors.models() if self._mirrors else _models(versions):
            choices = f"it holds the models {', '.join(map(repr, models[:_STEPS_MAX]))}"
        else:
            choices = "it holds no versions"
        raise UsageError(f"there is no {target} in {self.place}: {choices}")


def _models(versions: list[FoundVersion]) -> list[str]:
    return sorted({each.info.model for each in versions})


def open_pools(pool: str | None, target: str) -> PlacePools:
    """Open the pools, or the mirrors, in which ``target`` is looked for; a URL of a version in a
    mirror says both. Raises ``UsageError``."""
    if is_address(target):
        raise UsageError(f"{target} is a storage host: name a model, and pass --pool {target}")
    if pool is None and is_store(target):
        found = meant(target, "mirror")
        pool = str(found.address)
        target = found.model if found.step is None else f"{found.model}@{found.step}"
    return PlacePools(find_pool(pool, mirrors=True), target)


def newest(found: list[FoundVersion]) -> FoundVersion:
    """Return the version committed last; across pool files, by time."""
    last = {each.pool: each for each in found}  # of each file the last in order of commits
    return max(last.values(), key=lambda each: each.info.time_ns)


def pointers_of(table: FileTable, token: bytes) -> list[str]:
    """Return the paths of those pointers of a version that are there. Raises ``CorruptionError``,
    ``MediumError``."""
    paths = [os.path.join(table.directory, each.name) for each in table.files]
    found = [(path, pointer_at(path)) for path in paths if table.directory]
    return [path for path, said in found if said is not None and said.token == token.hex()]


def version_document(info: VersionInfo) -> dict[str, Json]:
    """Return a version for machines."""
    return {
        **fields(info, "model", "id", "commit", "step", "time_ns", "size", "inexact"),
        "token": info.token.hex(),
        "time": moment_text(info.time_ns),
        "metrics": dict(info.metrics),
    }


def table_document(table: FileTable | None) -> dict[str, Json]:
    """Return the fields that say, in a JSON document, of which files a version is."""
    if table is None:
        return {"files": None, "directory": None}
    files: list[Json] = [{"name": each.name, "size": each.size} for each in table.files]
    return {"files": files, "directory": table.directory or None}
