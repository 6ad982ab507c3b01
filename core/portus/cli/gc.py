"""``portus gc``: give free space back; remove versions whose pointers are gone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Sequence

from portus.cli import files, mirrored
from portus.cli.output import Json, Output, count_text, size_text
from portus.cli.pools import find_pool, pointers_of, table_in, taken_by, version_document
from portus.cli.rm import writing
from portus.client.files.home import open_place
from portus.client.files.host import HostPool
from portus.errors import PortusError, StaleError, UsageError
from portus.index.directory import on_disk, pools_at, remove_journals, remove_pool
from portus.index.place import Place, PlaceKind
from portus.index.reader import PoolReader
from portus.media.local import LocalFiles
from portus.spec import VersionInfo

YOUNG_S: float = 60
"""A trainer commits a version before its pointers are there; after so many seconds they surely are.
Whoever writes a pool file knows that no trainer does."""


def run(
    pool: str | None,
    output: Output,
    *,
    missing: Sequence[str] = (),
    yes: bool = False,
    empty: bool = False,
    dry_run: bool = False,
) -> None:
    """Collect what ``pool`` names. missing: directories; versions that have their pointers there,
    or below, and have none any more, are removed. yes: without asking. empty: remove pool files
    without versions. dry_run: change nothing."""
    path = None if missing or empty else files.find_files(pool, None)
    if path is not None and os.path.isdir(path):
        files.gc(path, output, dry_run=dry_run)
        return
    where = find_pool(pool, mirrors=True)
    if where.kind is PlaceKind.MIRROR:
        if missing or empty:
            raise UsageError(f"{where}: --missing and --empty are for pools")
        mirrored.gc(where, dry_run=dry_run, output=output)
        return
    documents: list[Json] = []
    for each in pools_at(where):
        try:
            documents.append(_collect(each, missing, yes, empty, dry_run, output))
        except PortusError as error:
            documents.append({"path": each.path, "error": output.skip(error)})
    if not documents:
        output.line("no pools")
    output.document({"dry_run": dry_run, "pools": documents})


def _collect(
    pool: Place, missing: Sequence[str], yes: bool, empty: bool, dry_run: bool, output: Output
) -> Json:
    may_remove = empty and pool.kind is PlaceKind.FILE
    with contextlib.closing(open_place(pool)) as reader:
        gone = _without_pointers(reader, missing)
        ids = {info.id for info in gone}
        is_removed = may_remove and reader.catalogue().ids() == ids
        freed = taken_by(reader) if is_removed else _unneeded(reader, ids)
    would = "would be " if dry_run else ""
    for info in gone:
        name, size = f"{info.model}@{info.step}", size_text(info.size)
        output.line(f"{pool}: {name}, {size}: no pointer leads to it any more")
    if not dry_run:
        question = f"Remove {count_text(len(gone), 'version')}?"
        if gone and not yes and not output.ask(question):
            raise UsageError(f"{pool}: nothing was removed: use --yes to remove these versions")
        is_removed, freed = _collected(pool, gone, missing, may_remove)
    if gone:
        output.line(f"{pool}: {count_text(len(gone), 'version')} {would}removed")
    if is_removed:
        output.line(f"{pool}: empty, {would}removed")
    if freed:
        size = f"about {size_text(freed)} {would}" if would else f"{size_text(freed)} "
        output.line(f"{pool}: {size}returned to the file system")
    elif not gone and not is_removed:
        output.line(f"{pool}: nothing to do")
    retired: list[Json] = [version_document(info) for info in gone]
    return {"path": pool.path, "retired": retired, "removed": is_removed, "freed": freed}


def _without_pointers(reader: PoolReader, directories: Sequence[str]) -> list[VersionInfo]:
    """Return the versions that have their pointers in one of these directories, or below, and of
    which none is there. Raises ``CorruptionError``, ``MediumError``: then it is not known."""
    roots = [os.path.realpath(os.path.expanduser(each)) for each in directories]
    young_ns = time.time_ns() - int(YOUNG_S * 1e9)
    is_host = isinstance(reader, HostPool)
    found = []
    for entry in reader.catalogue().entries() if roots else ():
        if is_host and entry.info.time_ns > young_ns:
            continue
        with contextlib.suppress(StaleError):
            table = table_in(reader, entry)
            if table is None or not table.directory:
                continue
            where = os.path.realpath(table.directory)
            is_below = any(os.path.commonpath([where, root]) == root for root in roots)
            if is_below and not pointers_of(table, entry.info.token):
                found.append(entry.info)
    return found


def _collected(
    pool: Place, gone: Sequence[VersionInfo], missing: Sequence[str], may_remove: bool
) -> tuple[bool, int]:
    """Remove these versions, and give space back; return whether the pool file, now empty, was
    removed too, and how many bytes were given back."""
    if pool.is_host:
        with contextlib.closing(HostPool(pool.path)) as host:
            host.retire(_still_gone(host, gone, missing))
            return False, host.give_back()
    taken = on_disk(pool.path)
    with writing(pool.path) as writer:
        writer.retire(_still_gone(writer, gone, missing))
        is_removed = may_remove and not writer.catalogue().ids()
        if is_removed:  # while it is locked: whoever waits for it finds that it is gone
            remove_journals(pool.path)
            remove_pool(pool.path, LocalFiles())
    return is_removed, max(0, taken - on_disk(pool.path))


def _still_gone(
    reader: PoolReader, gone: Sequence[VersionInfo], missing: Sequence[str]
) -> Collection[int]:
    """Return the ids of these versions. Raises ``UsageError`` if a pointer came back meanwhile."""
    tokens = {info.token for info in (_without_pointers(reader, missing) if gone else ())}
    if not tokens >= {info.token for info in gone}:
        name = reader.medium.info.name
        raise UsageError(f"{name} changed meanwhile, and nothing was removed: run this again")
    return {info.id for info in gone}


def _unneeded(reader: PoolReader, gone: Collection[int]) -> int:
    """Return about how many of the bytes that a pool takes of its file system would be given back
    without the versions ``gone``. Not known here: what readers have pinned, and what the records of
    the commit before take; so a few pages are none."""
    taken, spare = taken_by(reader), reader.spare_bytes()
    unneeded = taken - reader.kept_bytes(gone) - spare
    return unneeded if taken and unneeded > spare else 0
