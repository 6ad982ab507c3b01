"""Which pools a command means, and what they hold. No torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from portus.cli.output import Json, moment_text
from portus.client import fate
from portus.client import reference as files_of
from portus.client.fate import Link, State
from portus.client.home import open_place
from portus.errors import PortusError, UsageError
from portus.format.reference import Reference
from portus.index.catalogue import Catalogue
from portus.index.directory import links_directory, pools_at
from portus.index.place import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE, Place, PlaceKind
from portus.index.pool import PoolReader
from portus.index.records import VersionEntry
from portus.media.local import LocalFiles
from portus.protocol.address import is_address
from portus.spec import VersionInfo

_STEPS_MAX: Final = 20
"""Steps and models that an error lists."""


def find_pool(pool: str | None, near: str | None = None) -> Place:
    """The pool file, pool directory or storage host that is meant.

    That is ``pool`` if given; else ``$PORTUS_POOL``; else ``.portus`` in the current directory or
    in one above it; for the reference file ``near``, in its directory or in one above that, or
    else the pool that it leads to. Raises ``UsageError`` if there is none.
    """
    named = Place.by_variable() if pool is None else Place.named(pool, "--pool")
    if named is not None:
        _refuse_reference(named)
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


def _led_to(reference: str) -> Place:
    from portus.client.resolve import pool_of  # and torch with it

    return pool_of(reference)


def _refuse_reference(place: Place) -> None:
    """Raises ``UsageError`` where a checkpoint is named in place of a pool."""
    if place.kind is PlaceKind.FILE and reference_at(place.path) is not None:
        raise UsageError(
            f"{place} is a reference file, which leads into a pool; expected the pool. "
            f"portus show {place} tells what the file leads to"
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


@dataclass(frozen=True, slots=True)
class Found:
    """A version, and the pool that holds it."""

    pool: Place
    reader: PoolReader
    entry: VersionEntry

    @property
    def path(self) -> str:
        """Where that pool is."""
        return self.pool.path

    @property
    def info(self) -> VersionInfo:
        """What is known of it."""
        return self.entry.info


class Pools:
    """The pool files of a place, opened for reading. One that cannot be is in ``failed``."""

    def __init__(self, place: Place) -> None:
        """Raises ``UsageError`` if there is nothing at ``place``."""
        self.place: Final = place
        self.failed: Final[dict[Place, PortusError]] = {}
        self._readers: Final[dict[Place, PoolReader]] = {}
        for pool in pools_at(place):
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

    def versions(self) -> list[Found]:
        """All versions; by pool file, oldest commit first."""
        found = [
            Found(pool, reader, entry)
            for pool, reader, catalogue in self.catalogues()
            for entry in catalogue.entries()
        ]
        return sorted(found, key=lambda each: (each.path, each.info.commit, each.info.id))

    def select(self, target: str) -> list[Found]:
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
        if os.path.isfile(target):
            raise UsageError(f"{target} is a file, but no reference file of Portus")
        raise UsageError(f"there is no {target} in {self.place}: {_choices(target, versions)}")

    def close(self) -> None:
        """Let go of all."""
        with contextlib.ExitStack() as stack:
            for reader in self._readers.values():
                stack.callback(reader.close)

    def __enter__(self) -> Pools:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_pools(pool: str | None, target: str | None = None) -> Pools:
    """The pools in which ``target`` is looked for. Raises ``UsageError``."""
    if target is not None and is_address(target):
        raise UsageError(f"{target} is a storage host; say what of it, and --pool {target}")
    near = target if target is not None and reference_at(target) is not None else None
    return Pools(find_pool(pool, near))


def newest(found: list[Found]) -> Found:
    """The one committed last; across pool files, by time."""
    last = {each.path: each for each in found}  # of each file the last in order of commits
    return max(last.values(), key=lambda each: each.info.time_ns)


def reference_at(target: str) -> Reference | None:
    """The reference file at the path ``target``, if there is one."""
    return files_of.read(target) if os.path.isfile(target) else None


def _is_step(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()


def _choices(target: str, versions: list[Found]) -> str:
    model = target.rpartition("@")[0]
    steps = [str(each.info.step) for each in versions if each.info.model in (target, model)]
    if steps:
        more = "... " if len(steps) > _STEPS_MAX else ""
        return f"model {model!r} has steps {more}{', '.join(steps[-_STEPS_MAX:])}"
    models = sorted({each.info.model for each in versions})
    if not models:
        return "it holds no versions"
    return f"it holds the models {', '.join(map(repr, models[:_STEPS_MAX]))}"


def holders(pool: Place, catalogue: Catalogue) -> dict[bytes, list[Link]]:
    """The reference files that lead to each version of a pool, by token; deleted ones too.

    Only looks; changes nothing. Those of a storage host's pool are known where they are, not here.
    """
    if pool.is_host:
        return {}
    links = fate.links(links_directory(pool.path), LocalFiles(), adopt=False)
    there = {entry.info.token.hex() for entry in catalogue.entries()}
    found: dict[bytes, list[Link]] = {}
    for link in sorted(links, key=lambda link: link.reference.written_ns):
        said = link.reference
        token = said.leads_to(there)
        if token is not None:
            found.setdefault(bytes.fromhex(token), []).append(link)
    return found


def link_text(link: Link) -> str:
    """A reference file, for people."""
    known = link.path if link.state is State.ALIVE and link.path else link.reference.written_path
    path = min(os.path.relpath(known), known, key=len)
    if link.state is State.ALIVE:
        return path if link.path else f"{path} (moved)"
    return f"{path} ({'deleted' if link.state is State.DELETED else 'missing'})"


def link_document(link: Link) -> dict[str, Json]:
    """A reference file, for machines."""
    known = link.path if link.state is State.ALIVE and link.path else link.reference.written_path
    return {"path": known, "state": link.state.value}


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
    }
