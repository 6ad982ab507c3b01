"""``portus ls``: the models and versions of a pool."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Final

from portus.cli import files, mirrored
from portus.cli.output import (
    Json,
    Output,
    Row,
    age_text,
    count_text,
    newest_rows,
    path_text,
    said,
    size_text,
)
from portus.cli.pools import (
    PlacePools,
    find_pool,
    table_document,
    table_in,
    taken_by,
    version_document,
)
from portus.cli.training import directories_of, files_of, runs_in
from portus.errors import CorruptionError, StaleError
from portus.index.catalogue import Catalogue
from portus.index.messages import read_failure
from portus.index.place import DEFAULT_DIRECTORY, Place, PlaceKind
from portus.index.reader import PoolReader
from portus.spec import VersionInfo
from portus.versions.packed import FileTable

NEWEST: Final = 10
"""Versions of a model that are listed, unless all are asked for."""

SHOWN: Final = 3
"""Files of a training that are named."""

_Tables = Mapping[int, FileTable]
"""The files of versions, by their ids; nothing of versions of something else."""


def run(pool: str | None, every: bool, output: Output) -> None:
    """List what ``pool`` names."""
    directory = files.find_files(pool, None)
    if directory is not None:
        listed = files.ls(directory, every, output)
        hidden = os.path.join(directory, DEFAULT_DIRECTORY)
        ended = _show_runs(Place.named(hidden), output) if os.path.isdir(hidden) else []
        output.document({"directories": listed, "pools": [], "ended": ended})
        return
    most = None if every else NEWEST
    where = find_pool(pool, mirrors=True)
    if where.kind is PlaceKind.MIRROR:
        mirrored.ls(where, most, output)
        return
    documents: list[Json] = []
    ended = []
    with PlacePools(where) as pools:
        for place, reader, catalogue in pools.catalogues():
            if documents:
                output.line()
            documents.append(_show_pool(place, reader, catalogue, most, output))
        for place, error in pools.failed.items():
            documents.append({"path": place.path, "error": output.skip(error)})
    if not documents:
        ended = _show_runs(where, output)
        if not ended:
            output.line(f"{where}: no pools yet; the first save makes one")
    output.document({"pools": documents, "ended": ended})


def _show_pool(
    place: Place, reader: PoolReader, catalogue: Catalogue, most: int | None, output: Output
) -> Json:
    """Show a pool; return it for machines. ``on_disk``: bytes that it takes of its file system; 0
    if it is on none. ``kept``: that its versions reach. ``reclaimable``: what ``portus gc`` would
    give back, but for the room that the records of one commit take. ``free``: what saves can use
    without removing a version, and before it gets longer."""
    tables, size = _tables(reader, catalogue, output), reader.medium.size
    taken, kept = taken_by(reader), reader.kept_bytes()
    reclaimable, free = max(0, taken - kept), max(0, size - kept)
    failure = read_failure(reader.medium)
    holes = f", {size_text(taken)} on disk" if 0 < taken < size else ""
    count = count_text(len(catalogue.ids()), "version")
    output.line(
        f"{place}: {count}, file of {size_text(size)}{holes}: kept {size_text(kept)}, "
        f"reclaimable {size_text(reclaimable)}, free {size_text(free)}"
    )
    rows: list[Row] = []
    models: list[Json] = []
    for model, listed in sorted(catalogue.models.items()):
        infos = [entry.info for entry in listed.versions]
        shown = [_row(info, tables.get(info.id)) for info in infos]
        rows += newest_rows(shown, most, model, "...")
        versions: list[Json] = [
            {**version_document(info), **table_document(tables.get(info.id))} for info in infos
        ]
        models.append({"name": model, "versions": versions})
    if rows:
        output.table(("MODEL", ">STEP", "SAVED", ">SIZE", ">FILES", "DIRECTORY"), rows)
    if failure:
        output.line(f"the last save that failed: {failure}")
    return {
        "models": models,
        "path": place.path,
        "size": size,
        "uuid": reader.superblock.uuid.hex(),
        "failure": failure or None,
        "on_disk": taken,
        "kept": kept,
        "reclaimable": reclaimable,
        "free": free,
    }


def _show_runs(place: Place, output: Output) -> list[Json]:
    """Show the trainings that were here, and where their files are; return them for machines."""
    found, failed = runs_in(directories_of(place))
    for error in failed:
        output.note(f"portus: skipped: {said(error)}")
    documents: list[Json] = []
    for name, journals in sorted(found.items()):
        paths = files_of(journals)
        documents.append({"run": name, "files": list[Json](paths)})
        shown = ", ".join(map(path_text, paths[-SHOWN:]))
        more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
        now = f"its files are {shown}{more}" if paths else "none of its files is there"
        output.line(f"{name}: {now} (portus report {shlex.quote(name)})")
    return documents


def _tables(reader: PoolReader, catalogue: Catalogue, output: Output) -> _Tables:
    """Return the tables of each version. A damaged one has none, and it is said; nor has one that
    was removed meanwhile."""
    found: dict[int, FileTable] = {}
    for entry in catalogue.entries():
        try:
            table = table_in(reader, entry)
        except StaleError:
            continue
        except CorruptionError as error:
            output.note(f"portus: {said(error)}")
        else:
            if table is not None:
                found[entry.info.id] = table
    return found


def _row(info: VersionInfo, table: FileTable | None) -> Row:
    count = "" if table is None else str(len(table.files))
    directory = "" if table is None else table.directory and path_text(table.directory)
    age, size = age_text(info.time_ns), size_text(info.size)
    return info.model, str(info.step), age, size, count, directory
