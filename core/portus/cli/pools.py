"""The places that a command works on, and their JSON documents. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from portus.cli import words
from portus.cli.output import Json, fields
from portus.engine.spec import VersionInfo
from portus.errors import UsageError
from portus.reach.files.reference import read_reference
from portus.reach.index.file_table import FileTable
from portus.reach.index.place import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE, Place
from portus.reach.places.opening import Places, place_and_target, place_named, places_at


def find_pool(
    pool: str | None, near: str | None = None, *, mirrors: bool = False, target: str | None = None
) -> Place:
    """Return the place of a command.

    That is ``pool`` if given; else ``$PORTUS_POOL``; else ``.portus`` in the current directory, or
    in that of the file ``near``, or in one above it. mirrors: whether a mirror is allowed. target:
    what the command looks for there, for the error. Raises ``UsageError`` if there is no place.
    """
    named = Place.by_variable() if pool is None else place_named(pool, "--pool", mirrors=mirrors)
    if named is not None:
        refuse_pointer(named)
        return named
    start = os.getcwd() if near is None else os.path.dirname(os.path.abspath(near))
    place = nearest(start)
    if place is None:
        if target is not None and os.path.isdir(target):
            raise UsageError(f"{target}: there are no checkpoints in this directory")
        if target is None:
            missing = f"there is no {DEFAULT_DIRECTORY} in {start} or above; name a directory"
        else:
            missing = f"{target}: there is no checkpoint file of this name; name another one"
        raise UsageError(f"{missing}, or a pool: --pool PATH, or {DIRECTORY_VARIABLE}=PATH")
    return Place.parse(place)


def only_place(place: str | None, pool: str | None) -> str | None:
    """Return the place that an argument, or ``--pool``, names. Raises ``UsageError`` for both."""
    if place is not None and pool is not None:
        raise UsageError(f"expected one place, found {place} and --pool {pool}: leave one out")
    return pool if place is None else place


def refuse_pointer(place: Place) -> None:
    """Raise ``UsageError`` if a checkpoint is named in place of a pool."""
    if read_reference(place.path) is not None:
        raise UsageError(
            f"{place} is a pointer to a checkpoint in a pool; expected the pool. portus show "
            f"{place} shows its checkpoint"
        )


def nearest(start: str) -> str | None:
    """Return ``.portus`` in ``start`` or in the nearest directory above it, or None."""
    above = map(str, Path(start).parents)
    places = (os.path.join(each, DEFAULT_DIRECTORY) for each in (start, *above))
    return next(filter(os.path.isdir, places), None)


def open_places(
    pool: str | None, target: str | None = None, *, whole: bool = False, mirrors: bool = True
) -> Places:
    """Open the places that may have ``target``, or all. whole: ``target`` may be a place. mirrors:
    the place may be one of mirrors. Raises ``UsageError``."""
    if target is not None:
        pool, target = place_and_target(target, pool, whole=whole)
    place = find_pool(pool, mirrors=mirrors, target=target)
    return Places(place, places_at(place), target)


def version_document(info: VersionInfo) -> dict[str, Json]:
    """Return the JSON document of a version."""
    return {
        **fields(info, "model", "id", "commit", "step", "time_ns", "size", "inexact"),
        "token": info.token.hex(),
        "time": words.moment(info.time_ns),
        "metrics": dict(info.metrics),
    }


def table_document(table: FileTable | None) -> dict[str, Json]:
    """Return the fields of a JSON document for the files of a version."""
    if table is None:
        return {"files": None, "directory": None}
    files: list[Json] = [{"name": each.name, "size": each.size} for each in table.files]
    return {"files": files, "directory": table.directory or None}
