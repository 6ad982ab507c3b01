"""The pools that a command means, and what they hold. No torch."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final

from portus.cli.output import Json, age_text, moment_text
from portus.client.files import fate
from portus.client.files import reference as files_of
from portus.client.files.fate import Fate, FileLink
from portus.client.files.home import open_place
from portus.client.files.pins import pins_of
from portus.errors import MediumError, PortusError, UsageError
from portus.format.reference import Reference, pin_at
from portus.index.catalogue import Catalogue
from portus.index.directory import links_directory, pools_at
from portus.index.groups import part_of
from portus.index.place import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE, Place, PlaceKind
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.media.local import LocalFiles
from portus.mirror import objects as mirrored
from portus.mirror.address import is_store, parse
from portus.mirror.mirrors import Mirrors, meant
from portus.mirror.objects import Referred
from portus.protocol.address import is_address
from portus.spec import VersionInfo

_STEPS_MAX: Final = 20
"""Steps and models that an error lists."""


def find_pool(pool: str | None, near: str | None = None, *, mirrors: bool = False) -> Place:
    """The pool file, pool directory or storage host that is meant; or the mirrors, for commands
    that take ``mirrors``.

    That is ``pool`` if given; else ``$PORTUS_POOL``; else ``.portus`` in the current directory or
    in one above it; for the reference file ``near``, in its directory or in one above that, or
    else the pool that it leads to. Raises ``UsageError`` if there is none.
    """
    if pool is not None and is_store(pool):
        return _mirrors_at(pool, mirrors=mirrors)
    named = Place.by_variable() if pool is None else Place.named(pool, "--pool")
    if named is not None:
        refuse_reference(named)
        return named
    start = os.getcwd() if near is None else os.path.dirname(os.path.abspath(near))
    place = nearest(start)
    if place is None and near is not None:
        return _led_to(near)
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


def _led_to(reference: str) -> Place:
    from portus.client.loading.resolve import pool_of  # and torch with it

    return pool_of(reference)


def refuse_reference(place: Place) -> None:
    """Raises ``UsageError`` where a checkpoint is named in place of a pool."""
    if place.kind is PlaceKind.FILE and reference_at(place.path) is not None:
        raise UsageError(
            f"{place} is a reference file, which leads into a pool; expected the pool. portus "
            f"show {place} shows what the file leads to"
        )


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


Holder = FileLink | Referred
"""What holds a version: a reference file, or, in a mirror, its path."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundVersion:
    """A version, and the pool that holds it, or its mirror. ``open``: gives a reader, and the
    version there; that of a mirror is opened by the first use, and has an id of its own."""

    pool: Place
    info: VersionInfo
    open: Callable[[], tuple[PoolReader, VersionEntry]]
    held: Callable[[], Sequence[Holder]]

    @property
    def path(self) -> str:
        """Where that pool is."""
        return self.pool.path

    @property
    def reader(self) -> PoolReader:
        """Raises what opening raises."""
        return self.open()[0]

    @property
    def entry(self) -> VersionEntry:
        """Return the version as ``reader`` has it. Raises what opening raises."""
        return self.open()[1]


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

    def has(self, reference: Reference) -> bool:
        """True if the pool is among them that a reference file leads to."""
        return any(each.superblock.uuid.hex() == reference.pool for each in self._readers.values())

    def select(self, target: str) -> list[FoundVersion]:
        """The versions that ``target`` means: ``MODEL``, ``MODEL@STEP`` or a reference file.

        A step may have several, after a rollback. Raises ``UsageError`` if there are none; if a
        pool could not be read, that is raised.
        """
        versions = self.versions()
        reference = reference_at(target)
        if reference is not None:
            found = [each for each in versions if each.info.token.hex() == reference.token]
        else:
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
        if reference is not None:
            raise UsageError(
                f"{target} leads to step {reference.step} of model {reference.model!r}, which is "
                f"not in {self.place}; its pool was at {reference.pool_path}"
            )
        if os.path.isfile(target):
            raise UsageError(f"{target} is a file, but not a Portus reference file")
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
    def held() -> Sequence[Holder]:
        return holders(pool, reader.catalogue(), reader).get(entry.info.token, [])

    return FoundVersion(pool, entry.info, lambda: (reader, entry), held)


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
                links = [each for each in state.references if each.token == added.token]
                info = added.info(model, len(made) + 1, added.commit)
                opener = self._opener(model, added)
                made.append(FoundVersion(self._place, info, opener, partial(list, links)))
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
    """True if ``MODEL`` or ``MODEL@STEP`` may be this model, or the group that it is a part of."""
    part = part_of(model)
    return {target, target.rpartition("@")[0]} & {model, part[0] if part else model} != set()


def open_pools(pool: str | None, target: str | None = None, *, mirrors: bool = False) -> PlacePools:
    """The pools in which ``target`` is looked for; or the mirrors, for commands that take
    ``mirrors``. Raises ``UsageError``.

    For a reference file, ``.portus`` beside it or above counts only if its pool is there; a
    ``.portus`` of something else would hide the pool that it leads to.
    """
    if target is not None and is_address(target):
        raise UsageError(f"{target} is a storage host: name a model, and pass --pool {target}")
    reference = None if target is None else reference_at(target)
    if target is None or reference is None:
        return PlacePools(find_pool(pool, mirrors=mirrors), target)
    pools = PlacePools(find_pool(pool, target, mirrors=mirrors), target)
    if pool is not None or Place.by_variable() is not None or pools.has(reference):
        return pools
    pools.close()
    return PlacePools(_led_to(target))


def newest(found: list[FoundVersion]) -> FoundVersion:
    """The one committed last; across pool files, by time."""
    last = {each.path: each for each in found}  # of each file the last in order of commits
    return max(last.values(), key=lambda each: each.info.time_ns)


def reference_at(target: str) -> Reference | None:
    """The reference file at the path ``target``, if there is one."""
    return files_of.read(target) if os.path.isfile(target) else None


def _is_step(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()


def _choices(target: str, versions: list[FoundVersion], models: list[str] | None = None) -> str:
    model = target.rpartition("@")[0]
    steps = [str(each.info.step) for each in versions if each.info.model in (target, model)]
    steps = steps or [str(step) for step in _steps_of_groups(model, versions)]
    if steps:
        more = "... " if len(steps) > _STEPS_MAX else ""
        return f"model {model!r} has steps {more}{', '.join(steps[-_STEPS_MAX:])}"
    if models is None:
        models = sorted({each.info.model for each in versions})
    if not models:
        return "it holds no versions"
    return f"it holds the models {', '.join(map(repr, models[:_STEPS_MAX]))}"


def _steps_of_groups(model: str, versions: list[FoundVersion]) -> list[int]:
    named = [(part_of(each.info.model), each.info.step) for each in versions]
    return sorted({step for part, step in named if part is not None and part[0] == model})


def holders(
    pool: Place, catalogue: Catalogue, reader: PoolReader | None = None
) -> dict[bytes, list[FileLink]]:
    """The reference files that lead to each version of a pool, by token; deleted ones too.

    Only looks; changes nothing. Those of a storage host's pool are known where they are, not here,
    but for pins, which ``reader`` asks for.
    """
    if pool.is_host:
        links = [] if reader is None else pins_of(pool, reader)
    else:
        links = fate.links(links_directory(pool.path), LocalFiles(), adopt=False)
    there = {entry.info.token.hex() for entry in catalogue.entries()}
    found: dict[bytes, list[FileLink]] = {}
    for link in sorted(links, key=lambda link: link.reference.written_ns):
        said = link.reference
        token = said.leads_to(there)
        if token is not None:
            found.setdefault(bytes.fromhex(token), []).append(link)
    return found


def overwritten(pool: Place) -> list[str]:
    """The paths of files that were references to versions of a pool, until another program wrote to
    them in place. Only looks. What cannot be looked at is none."""
    directory, files = links_directory(pool.path), LocalFiles()
    try:
        found = fate.overwritten(directory, files)
    except MediumError:
        return []
    paths = (path for path in found.values() if path is not None)
    return [min(os.path.relpath(path), path, key=len) for path in paths]


def link_text(link: Holder) -> str:
    """A reference file, for people."""
    if isinstance(link, Referred):
        return link.path if pin_at(link.path) is None else "a pin"
    if link.state is Fate.PINNED:
        return f"a pin ({age_text(link.reference.written_ns)})"
    known = link.path if link.state is Fate.ALIVE and link.path else link.reference.written_path
    path = min(os.path.relpath(known), known, key=len)
    if link.state is Fate.ALIVE:
        return path if link.path else f"{path} (moved)"
    if link.state is Fate.UNKNOWN:
        return f"{path} (missing)"
    return f"{path} ({_successor(link) or 'deleted'})"


def _successor(link: FileLink) -> str:
    """What is now where a deleted reference file was, for people; empty if nothing is."""
    path = link.path or link.reference.written_path
    if reference_at(path) is not None:
        return "another reference file now"
    if not os.path.lexists(path):
        return ""
    return f"{kind_of(path)} now"


def kind_of(path: str) -> str:
    """What a file is that is no reference, for people."""
    return "a torch file" if zipfile.is_zipfile(path) else "another file"


def link_document(link: Holder) -> dict[str, Json]:
    """A reference file, for machines. Its state is "replaced" where another file is at its path."""
    if isinstance(link, Referred):
        is_pin = pin_at(link.path) is not None
        return {"path": None if is_pin else link.path, "state": "pinned" if is_pin else "mirrored"}
    known = link.path if link.state is Fate.ALIVE and link.path else link.reference.written_path
    path = None if link.state is Fate.PINNED else known
    is_replaced = link.state is Fate.DELETED and _successor(link)
    return {"path": path, "state": "replaced" if is_replaced else link.state.value}


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
