"""``portus ls``: the models and versions of a pool."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass
from typing import Final

from portus.cli import files, mirrored
from portus.cli.output import (
    Json,
    Output,
    age_text,
    count_text,
    error_document,
    exit_code,
    said,
    size_text,
)
from portus.cli.pools import PlacePools, find_pool, table_document, table_in, version_document
from portus.cli.training import directories_of, files_of, runs_in
from portus.client.files.host import HostPool
from portus.errors import CorruptionError, StaleError
from portus.image.packed import FileTable
from portus.index.catalogue import Catalogue
from portus.index.directory import on_disk
from portus.index.messages import read_failure
from portus.index.place import DEFAULT_DIRECTORY, Place, PlaceKind
from portus.index.reader import PoolReader
from portus.spec import VersionInfo

NEWEST: Final = 10
"""Versions of a model that are listed, unless all are asked for."""

SHOWN: Final = 3
"""Files of a training that are named."""

Tables = dict[int, FileTable]
"""The files of versions, by their ids; nothing of versions of something else."""


def run(pool: str | None, every: bool, output: Output) -> int:
    """List; the exit code."""
    directory = files.meant(pool, None)
    if directory is not None:
        _list_files(directory, every, output)
        return 0
    documents: list[Json] = []
    where = find_pool(pool, mirrors=True)
    if where.kind is PlaceKind.MIRROR:
        return mirrored.ls(where, every, NEWEST, output)
    with PlacePools(where) as pools:
        for place, reader, catalogue in pools.catalogues():
            path = place.path
            tables = _tables(reader, catalogue, output)
            size = reader.medium.size
            failure = read_failure(reader.medium)
            document = _document(catalogue, tables)
            document.update(path=path, size=size, uuid=reader.superblock.uuid.hex())
            document.update(failure=failure or None)
            if documents:
                output.line()
            documents.append(document)
            count = count_text(len(catalogue.ids()), "version")
            space = _space(reader)
            document.update(asdict(space))
            holes = f", {size_text(space.on_disk)} on disk" if 0 < space.on_disk < size else ""
            output.line(
                f"{path}: {count}, file of {size_text(size)}{holes}: kept {size_text(space.kept)}, "
                f"reclaimable {size_text(space.reclaimable)}, free {size_text(space.free)}"
            )
            _say(catalogue, tables, every, output)
            if failure:
                output.line(f"the last save that failed: {failure}")
        for place, error in pools.failed.items():
            documents.append({"path": place.path, "error": error_document(error)})
            output.note(f"portus: {said(error)}")
        ended = [] if documents else _say_ended(pools.place, output)
        output.document({"pools": documents, "ended": ended})
        return max(map(exit_code, pools.failed.values()), default=0)


def _list_files(directory: str, every: bool, output: Output) -> None:
    """A directory of files, and the trainings that made them."""
    listed = files.ls(directory, every, output)
    hidden = os.path.join(directory, DEFAULT_DIRECTORY)
    ended = _say_runs(Place.named(hidden), output) if os.path.isdir(hidden) else []
    output.document({"directories": listed, "pools": [], "ended": ended})


def _say_ended(place: Place, output: Output) -> list[Json]:
    """Where there is no pool."""
    documents = _say_runs(place, output)
    if not documents:
        output.line(f"{place}: no pools yet; the first save makes one")
    return documents


def _say_runs(place: Place, output: Output) -> list[Json]:
    """The trainings that were here, and where their files are."""
    found, failed = runs_in(directories_of(place))
    for error in failed:
        output.note(f"portus: skipped: {said(error)}")
    documents: list[Json] = []
    for name, journals in sorted(found.items()):
        paths = files_of(journals)
        documents.append({"run": name, "files": list[Json](paths)})
        shown = [_short(each) for each in paths[-SHOWN:]]
        more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
        now = f"its files are {', '.join(shown)}{more}" if paths else "none of its files is there"
        output.line(f"{name}: {now} (portus report {shlex.quote(name)})")
    return documents


@dataclass(frozen=True, slots=True)
class _Space:
    """Bytes of a pool. ``on_disk``: that it takes of its file system; 0 if it is on none. ``kept``:
    that its versions reach. ``reclaimable``: what ``portus gc`` would give back, but for the room
    that the records of one commit take. ``free``: what saves can use without letting go of a
    version, and before it gets longer."""

    on_disk: int
    kept: int
    reclaimable: int
    free: int


def _space(reader: PoolReader) -> _Space:
    name = reader.medium.info.name
    taken = reader.standing().taken if isinstance(reader, HostPool) else on_disk(name)
    kept = reader.kept_bytes()
    return _Space(taken, kept, max(0, taken - kept), max(0, reader.medium.size - kept))


def _tables(reader: PoolReader, catalogue: Catalogue, output: Output) -> Tables:
    """Return the tables of each version. A damaged one has none, and it is said; nor has one that
    was removed meanwhile."""
    found: Tables = {}
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


def _document(catalogue: Catalogue, tables: Tables) -> dict[str, Json]:
    return {
        "models": [
            {
                "name": name,
                "versions": [
                    {
                        **version_document(entry.info),
                        **table_document(tables.get(entry.info.id)),
                    }
                    for entry in model.versions
                ],
            }
            for name, model in sorted(catalogue.models.items())
        ],
    }


def _say(catalogue: Catalogue, tables: Tables, every: bool, output: Output) -> None:
    rows: list[tuple[str, ...]] = []
    for name, model in sorted(catalogue.models.items()):
        infos = [entry.info for entry in model.versions]
        left_out = 0 if every else max(0, len(infos) - NEWEST)
        if left_out:
            rows.append((name, "...", f"{left_out} older: --all", "", "", ""))
        rows += [_row(info, tables.get(info.id)) for info in infos[left_out:]]
    if rows:
        output.table(("MODEL", ">STEP", "SAVED", ">SIZE", ">FILES", "DIRECTORY"), rows)


def _row(info: VersionInfo, table: FileTable | None) -> tuple[str, ...]:
    files, directory = "", ""
    if table is not None:
        files = str(len(table.files))
        directory = table.directory and _short(table.directory)
    age, size = age_text(info.time_ns), size_text(info.size)
    return info.model, str(info.step), age, size, files, directory


def _short(path: str) -> str:
    """A path, for people: from the current directory, if that is shorter."""
    return min(os.path.relpath(path), path, key=len)
