"""``portus ls``: the models and versions of a pool."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Final

from portus.cli import files, mirrored
from portus.cli.grouped import group_document, ranks_text
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
from portus.cli.pools import (
    PlacePools,
    find_pool,
    holders,
    kind_of,
    link_document,
    link_text,
    overwritten,
    version_document,
)
from portus.cli.training import directories_of, real_files, runs_in
from portus.client.files.fate import Fate, FileLink
from portus.client.files.held import missing, unheld
from portus.client.files.host import HostPool
from portus.errors import MediumError
from portus.index.catalogue import Catalogue
from portus.index.directory import on_disk
from portus.index.groups import Group, groups_of
from portus.index.messages import read_failure
from portus.index.place import DEFAULT_DIRECTORY, Place, PlaceKind
from portus.index.reader import PoolReader
from portus.spec import VersionInfo

NEWEST: Final = 10
"""Versions of a model that are listed, unless all are asked for."""

SHOWN: Final = 3
"""Files of a training that are named."""

Holders = dict[bytes, list[FileLink]]


def run(pool: str | None, every: bool, output: Output) -> int:
    """List; the exit code."""
    directory = files.meant(pool, None)
    if directory is not None:
        _list_files(directory, every, output)
        return 0
    documents: list[Json] = []
    infos: list[tuple[Place, VersionInfo]] = []
    where = find_pool(pool, mirrors=True)
    if where.kind is PlaceKind.MIRROR:
        return mirrored.ls(where, every, NEWEST, output)
    with PlacePools(where) as pools:
        for place, reader, catalogue in pools.catalogues():
            path = place.path
            held = _holders(place, reader, catalogue, output)
            size = reader.medium.size
            failure = read_failure(reader.medium)
            document = _document(catalogue, held)
            document.update(path=path, size=size, uuid=reader.superblock.uuid.hex())
            document.update(failure=failure or None)
            if documents:
                output.line()
            documents.append(document)
            count = count_text(len(catalogue.ids()), "version")
            space = _space(reader, _let_go_of(catalogue, held))
            document.update(asdict(space))
            holes = f", {size_text(space.on_disk)} on disk" if 0 < space.on_disk < size else ""
            output.line(
                f"{path}: {count}, file of {size_text(size)}{holes}: kept {size_text(space.kept)}, "
                f"reclaimable {size_text(space.reclaimable)}, free {size_text(space.free)}"
            )
            _say(catalogue, held, every, output)
            _say_missing(catalogue, held, document, output)
            _say_overwritten(place, document, output)
            if failure:
                output.line(f"the last save that failed: {failure}")
            infos += [(place, entry.info) for entry in catalogue.entries()]
        for place, error in pools.failed.items():
            documents.append({"path": place.path, "error": error_document(error)})
            output.note(f"portus: {said(error)}")
        ended = [] if documents else _say_ended(pools.place, output)
        groups = groups_of(infos)
        _say_groups(groups, every, output)
        output.document(
            {
                "pools": documents,
                "groups": [group_document(g) for g in groups],
                "ended": ended,
            }
        )
        return max(map(exit_code, pools.failed.values()), default=0)


def _list_files(directory: str, every: bool, output: Output) -> None:
    """A directory of files, and the trainings that made them."""
    listed = files.ls(directory, every, output)
    hidden = os.path.join(directory, DEFAULT_DIRECTORY)
    ended = _say_runs(Place.named(hidden), output) if os.path.isdir(hidden) else []
    output.document({"directories": listed, "pools": [], "groups": [], "ended": ended})


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
        paths = real_files(journals)
        documents.append({"run": name, "files": list[Json](paths)})
        shown = [min(os.path.relpath(each), each, key=len) for each in paths[-SHOWN:]]
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


def _space(reader: PoolReader, gone: Collection[int]) -> _Space:
    """gone: versions, by id, that ``portus gc`` would let go of."""
    name = reader.medium.info.name
    taken = reader.standing().taken if isinstance(reader, HostPool) else on_disk(name)
    kept = reader.kept_bytes(gone)
    free = reader.medium.size - (reader.kept_bytes() if gone else kept)
    return _Space(taken, kept, max(0, taken - kept), max(0, free))


def _let_go_of(catalogue: Catalogue, held: Holders) -> set[int]:
    """Versions whose files are all deleted."""
    links = [link for each in held.values() for link in each]
    return unheld(links, catalogue, {Fate.DELETED})


def _holders(pool: Place, reader: PoolReader, catalogue: Catalogue, output: Output) -> Holders:
    try:
        return holders(pool, catalogue, reader)
    except MediumError as error:  # who may read a pool need not be let into its neighbour
        output.note(f"portus: reference files are not listed: {said(error)}")
        return {}


def _document(catalogue: Catalogue, held: Holders) -> dict[str, Json]:
    return {
        "models": [
            {
                "name": name,
                "versions": [
                    {
                        **version_document(entry.info),
                        "references": [
                            link_document(link) for link in held.get(entry.info.token, [])
                        ],
                    }
                    for entry in model.versions
                ],
            }
            for name, model in sorted(catalogue.models.items())
        ],
    }


def _say(catalogue: Catalogue, held: Holders, every: bool, output: Output) -> None:
    rows: list[tuple[str, ...]] = []
    for name, model in sorted(catalogue.models.items()):
        infos = [entry.info for entry in model.versions]
        left_out = 0 if every else max(0, len(infos) - NEWEST)
        if left_out:
            rows.append((name, "...", f"{left_out} older: --all", "", ""))
        rows += [_row(info, held) for info in infos[left_out:]]
    if rows:
        output.table(("MODEL", ">STEP", "SAVED", ">SIZE", "REFERENCES"), rows)


def _say_missing(
    catalogue: Catalogue, held: Holders, document: dict[str, Json], output: Output
) -> None:
    """What is held for files of which it is not known where they are."""
    found = missing([link for links in held.values() for link in links], catalogue)
    size = sum(info.size for info, _ in found)
    document["missing"] = {"versions": len(found), "size": size}
    if found:
        info, reference = found[-1]
        output.line(
            f"{count_text(len(found), 'version')}, {size_text(size)}, held for files that are not "
            f"where they were; the newest, {age_text(info.time_ns)}, at {reference.written_path}. "
            f"If they are gone: portus gc --missing"
        )


def _say_overwritten(place: Place, document: dict[str, Json], output: Output) -> None:
    """The files that were references until another program wrote to them in place."""
    paths = [] if place.is_host else overwritten(place)
    if paths:
        document["overwritten"] = list[Json](paths)
    for path in paths:
        output.line(
            f"{path} was a reference and is {kind_of(path)} now: another program wrote to it in "
            "place, so it no longer keeps its version"
        )


def _say_groups(groups: list[Group], every: bool, output: Output) -> None:
    if not groups:
        return
    output.line()
    shown = groups if every else groups[-NEWEST:]
    output.table(
        ("GROUP", ">STEP", "RANKS"), [(g.model, str(g.step), ranks_text(g)) for g in shown]
    )


def _row(info: VersionInfo, held: Holders) -> tuple[str, ...]:
    links = [link_text(link) for link in held.get(info.token, [])]
    names = ", ".join(links[:2]) + (f" and {len(links) - 2} more" if len(links) > 2 else "")
    return info.model, str(info.step), age_text(info.time_ns), size_text(info.size), names
