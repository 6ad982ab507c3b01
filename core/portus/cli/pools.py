"""The pools that a command means, and what they hold. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from portus.cli.output import Json, moment_text
from portus.client.files import reference as pointers
from portus.client.files.home import open_place
from portus.client.loading.open_file import table_of
from portus.client.loading.resolve import POOLS
from portus.errors import PortusError, UsageError
from portus.format.reference import Reference
from portus.image.packed import FileTable
from portus.index.catalogue import Catalogue
from portus.index.directory import pools_at
from portus.index.place import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE, Place, PlaceKind
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.mirror import objects as mirrored
from portus.mirror.address import is_store, parse
from portus.mirror.mirrors import Mirrors, meant
from portus.protocol.address import is_address
from portus.spec import VersionInfo

_STEPS_MAX: Final = 20
"""Steps and models that an error lists."""


def find_pool(pool: str | None, near: str | None = None, *, mirrors: bool = False) -> Place:
    """The pool file, pool directory or storage host that is meant; or the mirrors, for commands
    that take ``mirrors``.

    That is ``pool`` if given; else ``$PORTUS_POOL``; else ``.portus`` in the current directory, or
    in that of the file ``near``, or in one above it. Raises ``UsageError`` if there is none.
    """
    if pool is not None and is_store(pool):
        return _mirrors_at(pool, mirrors=mirrors)
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


def _mirrors_at(url: str, *, mirrors: bool) -> Place:
    address = parse(url, "--pool")
    if not mirrors:
        raise UsageError(
            f"{address} is the address of a mirror, and this command takes pools; portus pull "
            f"{address} makes pools from the mirror"
        )
    return Place(PlaceKind.MIRROR, str(address))


def aimed(target: str, pool: str | None) -> tuple[str, str | None]:
    """What a command's target and ``--pool`` are, where the target is a URL that says both: of a
    version in a mirror. Asks the store. Raises ``UsageError`` if there is none."""
    if pool is not None or not is_store(target):
        return target, pool
    found = meant(target, "mirror")
    step = "" if found.step is None else f"@{found.step}"
    return f"{found.model}{step}", str(found.address)


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
    """``.portus`` in ``start`` or in a directory above it; None if there is none."""
    for directory in _upwards(start):
        place = os.path.join(directory, DEFAULT_DIRECTORY)
        if os.path.isdir(place):
            return place
    return None


def _upwards(directory: str) -> Iterator[str]:
    while True:
        yield directory
        above = os.path.dirname(directory)
        if above == directory:
            return
        directory = above


@dataclass(frozen=True, slots=True, eq=False)
class FoundVersion:
    """A version, and the pool that holds it, or its mirror. ``open``: gives a reader, and the
    version there; that of a mirror is opened by the first use, and has an id of its own."""

    pool: Place
    info: VersionInfo
    open: Callable[[], tuple[PoolReader, VersionEntry]]

    @property
    def path(self) -> str:
        """Where that pool is."""
        return self.pool.path

    @property
    def title(self) -> str:
        """What people call it."""
        return f"{self.info.model}@{self.info.step}"

    @property
    def reader(self) -> PoolReader:
        """Raises what opening raises."""
        return self.open()[0]

    @property
    def entry(self) -> VersionEntry:
        """Return the version as ``reader`` has it. Raises what opening raises."""
        return self.open()[1]

    def table(self) -> FileTable | None:
        """Return its files; None if it is a version of something else. Raises ``CorruptionError``,
        ``MediumError``, ``StaleError``."""
        return table_in(self.reader, self.entry)


def table_in(reader: PoolReader, entry: VersionEntry) -> FileTable | None:
    """The files of a version; None if it is one of something else. Raises ``CorruptionError``,
    ``MediumError``, ``StaleError``."""
    with reader.pinned(entry.info.id) as current:
        return table_of(reader, reader.record(current))


class PlacePools:
    """The pool files of a place, opened for reading. One that cannot be is in ``failed``."""

    def __init__(self, place: Place, target: str | None = None) -> None:
        """target: what is looked for; of mirrors no others are read. Raises ``UsageError`` if there
        is nothing at ``place``."""
        self.place: Final = place
        self.failed: Final[dict[Place, PortusError]] = {}
        self._readers: Final[dict[Place, PoolReader]] = {}
        self._mirrored: Final = MirroredVersions(place, target) if _is_mirror(place) else None
        for pool in () if _is_mirror(place) else pools_at(place):
            try:
                self._readers[pool] = open_place(pool)
            except PortusError as error:
                self.failed[pool] = error

    def catalogues(self) -> Iterator[tuple[Place, PoolReader, Catalogue]]:
        """What each of them holds now."""
        for pool, reader in self._readers.items():
            try:
                yield pool, reader, reader.catalogue()
            except PortusError as error:
                self.failed[pool] = error

    def versions(self) -> list[FoundVersion]:
        """All versions; by pool file, oldest commit first."""
        if self._mirrored is not None:
            return self._mirrored.found()
        found = [
            _found(pool, reader, entry)
            for pool, reader, catalogue in self.catalogues()
            for entry in catalogue.entries()
        ]
        return sorted(found, key=lambda each: (each.path, each.info.commit, each.info.id))

    def select(self, target: str) -> list[FoundVersion]:
        """The versions that ``target`` means: ``MODEL`` or ``MODEL@STEP``.

        A step may have several, after a rollback. Raises ``UsageError`` if there are none; if a
        pool could not be read, that is raised.
        """
        versions = self.versions()
        found = [each for each in versions if each.info.model == target]
        model, at, step = target.rpartition("@")
        if not found and at and _is_step(step):
            found = [
                each
                for each in versions
                if each.info.model == model and each.info.step == int(step)
            ]
        if found:
            return found
        for error in self.failed.values():
            raise error
        if os.path.isfile(target):
            raise UsageError(f"{target} is a file, but no checkpoint")
        models = None if self._mirrored is None else self._mirrored.models()
        choices = _choices(target, versions, models)
        raise UsageError(f"there is no {target} in {self.place}: {choices}")

    def close(self) -> None:
        """Let go of all."""
        with contextlib.ExitStack() as stack:
            for reader in self._readers.values():
                stack.callback(reader.close)
            if self._mirrored is not None:
                stack.callback(self._mirrored.close)

    def __enter__(self) -> PlacePools:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _found(pool: Place, reader: PoolReader, entry: VersionEntry) -> FoundVersion:
    return FoundVersion(pool, entry.info, lambda: (reader, entry))


def _is_mirror(place: Place) -> bool:
    return place.kind is PlaceKind.MIRROR


class MirroredVersions:
    """The versions of the mirrors at an address, in the order of their history. Ids are counted
    here; commits are those of the pools that they were committed to."""

    def __init__(self, place: Place, target: str | None) -> None:
        self._place: Final = place
        self._target: Final = target
        self._mirrors: Final = Mirrors(parse(place.path))
        self._opened: Final = contextlib.ExitStack()

    def states(self) -> dict[str, mirrored.State]:
        """What the log of each model says, or of those that the target may mean."""
        names = self.models()
        wanted = [name for name in names if self._target is None or _may_mean(self._target, name)]
        return {name: self._mirrors.of(name).read() for name in wanted}

    def models(self) -> list[str]:
        """Return the names of the models that have a mirror here."""
        return self._mirrors.models()

    def found(self) -> list[FoundVersion]:
        """All of them."""
        made: list[FoundVersion] = []
        for model, state in self.states().items():
            for added in sorted(state.versions, key=lambda each: (each.term, each.commit)):
                info = added.info(model, len(made) + 1, added.commit)
                made.append(FoundVersion(self._place, info, self._opener(model, added)))
        return made

    def _opener(
        self, model: str, added: mirrored.Added
    ) -> Callable[[], tuple[PoolReader, VersionEntry]]:
        opened: list[tuple[PoolReader, VersionEntry]] = []

        def once() -> tuple[PoolReader, VersionEntry]:
            if not opened:
                opening = self._mirrors.of(model).opened_as(added)
                opened.append(self._opened.enter_context(opening))
            return opened[0]

        return once

    def close(self) -> None:
        """Let go of all."""
        with contextlib.closing(self._mirrors), self._opened:
            pass


def _may_mean(target: str, model: str) -> bool:
    """True if ``MODEL`` or ``MODEL@STEP`` may be this model."""
    return model in (target, target.rpartition("@")[0])


def open_pools(pool: str | None, target: str | None = None, *, mirrors: bool = False) -> PlacePools:
    """The pools in which ``target`` is looked for; or the mirrors, for commands that take
    ``mirrors``. Raises ``UsageError``."""
    if target is not None and is_address(target):
        raise UsageError(f"{target} is a storage host: name a model, and pass --pool {target}")
    return PlacePools(find_pool(pool, mirrors=mirrors), target)


def newest(found: list[FoundVersion]) -> FoundVersion:
    """The one committed last; across pool files, by time."""
    last = {each.path: each for each in found}  # of each file the last in order of commits
    return max(last.values(), key=lambda each: each.info.time_ns)


def pointer_at(path: str) -> Reference | None:
    """The pointer at a path, if there is one. Raises ``CorruptionError``, ``MediumError``."""
    return pointers.read(path)


def pointers_of(table: FileTable, token: bytes) -> list[str]:
    """The paths of those pointers of a version that are there. Raises ``CorruptionError``,
    ``MediumError``."""
    paths = [os.path.join(table.directory, each.name) for each in table.files]
    found = [(path, pointer_at(path)) for path in paths if table.directory]
    return [path for path, said in found if said is not None and said.token == token.hex()]


def _is_step(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()


def _choices(target: str, versions: list[FoundVersion], models: list[str] | None = None) -> str:
    model = target.rpartition("@")[0]
    steps = [str(each.info.step) for each in versions if each.info.model in (target, model)]
    if steps:
        more = "... " if len(steps) > _STEPS_MAX else ""
        return f"model {model!r} has steps {more}{', '.join(steps[-_STEPS_MAX:])}"
    if models is None:
        models = sorted({each.info.model for each in versions})
    if not models:
        return "it holds no versions"
    return f"it holds the models {', '.join(map(repr, models[:_STEPS_MAX]))}"


def version_document(info: VersionInfo) -> dict[str, Json]:
    """A version, for machines."""
    return {
        "model": info.model,
        "id": info.id,
        "commit": info.commit,
        "step": info.step,
        "token": info.token.hex(),
        "time": moment_text(info.time_ns),
        "time_ns": info.time_ns,
        "size": info.size,
        "inexact": info.inexact,
        "metrics": dict(info.metrics),
    }


def table_document(table: FileTable | None) -> dict[str, Json]:
    """The fields that say, in a JSON document, of which files a version is."""
    files: list[Json] | None = None
    if table is not None:
        files = [{"name": each.name, "size": each.size} for each in table.files]
    return {"files": files, "directory": table.directory or None if table else None}
