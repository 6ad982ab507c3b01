"""``portus gc``: let go of versions whose reference files are gone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from portus.cli import files, mirrored
from portus.cli.output import Json, Output, error_document, exit_code, said, size_text
from portus.cli.pools import find_pool, nearest, version_document
from portus.cli.rm import writing
from portus.client.files.fate import Fate, FileLink, links
from portus.client.files.held import gone_for_good, unheld
from portus.client.files.home import host_links
from portus.client.files.host import HostPool, is_renounced
from portus.client.files.reference import read_through
from portus.errors import PortusError, UsageError
from portus.format.reference import Reference
from portus.index.directory import (
    links_directory,
    on_disk,
    open_reader,
    pools_at,
    remove_journals,
    remove_pool,
)
from portus.index.place import DEFAULT_DIRECTORY, Place, PlaceKind
from portus.index.reader import PoolReader
from portus.media.local import LocalFiles
from portus.spec import VersionInfo

_FILES: Final = LocalFiles()

YOUNG_S: Final = 60
"""A trainer links a reference file before it names it; after so many seconds it surely has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOptions:
    """``missing``: count as deleted what is gone and may have been moved. ``empty``: remove pool
    files without versions. ``dry_run``: change nothing. ``links``: the directory where trainers
    have their links for a host; None looks for it."""

    missing: bool = False
    empty: bool = False
    dry_run: bool = False
    links: str | None = None

    @property
    def states(self) -> frozenset[Fate]:
        """The states of reference files that hold nothing."""
        return frozenset({Fate.DELETED, Fate.UNKNOWN} if self.missing else {Fate.DELETED})


def run(pool: str | None, options: GcOptions, output: Output) -> int:
    """Collect; the exit code."""
    path = None if options.missing or options.empty or options.links else files.meant(pool, None)
    if path is not None and os.path.isdir(path):
        return files.gc(path, output, dry_run=options.dry_run)
    documents: list[Json] = []
    code = 0
    where = find_pool(pool, mirrors=True)
    if where.kind is PlaceKind.MIRROR:
        if options.missing or options.empty or options.links is not None:
            raise UsageError(f"{where}: --missing, --empty and --links are for pools")
        return mirrored.gc(where, dry_run=options.dry_run, output=output)
    for each in pools_at(where):
        path = each.path
        try:
            infos, removed, freed = _collected(each, options)
        except PortusError as error:
            documents.append({"path": path, "error": error_document(error)})
            output.note(f"portus: {said(error)}")
            code = max(code, exit_code(error))
        else:
            _say(path, infos, removed, freed, options, output)
            retired: list[Json] = [version_document(info) for info in infos]
            documents.append({"path": path, "retired": retired, "removed": removed, "freed": freed})
    if not documents:
        output.line("no pools")
    output.document({"dry_run": options.dry_run, "pools": documents})
    return code


_Collected = tuple[list[VersionInfo], bool, int]
"""The versions let go of, or that would be; whether the pool file went too, and bytes freed, or
about how many would be."""


def _collected(pool: Place, options: GcOptions) -> _Collected:
    if pool.is_host:
        return _collect_from_host(pool, options)
    return (_look if options.dry_run else _collect)(pool, options)


def _look(pool: Place, options: GcOptions) -> _Collected:
    """Changes nothing."""
    with contextlib.closing(open_reader(pool.path)) as reader:
        catalogue = reader.catalogue()
        found = links(links_directory(pool.path), _FILES, adopt=False)
        gone = unheld(found, catalogue, options.states)
        is_device = pool.kind is PlaceKind.DEVICE
        removed = options.empty and len(gone) == len(catalogue.ids()) and not is_device
        taken = on_disk(pool.path)
        freed = taken if removed else _unneeded(reader, taken, gone)
    infos = [entry.info for entry in catalogue.entries() if entry.info.id in gone]
    return infos, removed, freed


def _unneeded(reader: PoolReader, taken: int, gone: Collection[int]) -> int:
    """Return about how many of the bytes that a pool takes of its file system would be given back
    without the versions ``gone``. Not known here: what readers have pinned, and what the records of
    the commit before take; so a few pages are none."""
    if not taken:
        return 0
    spare = reader.spare_bytes()
    unneeded = taken - reader.kept_bytes(gone) - spare
    return unneeded if unneeded > spare else 0


def _collect(pool: Place, options: GcOptions) -> _Collected:
    taken = on_disk(pool.path)
    with writing(pool.path) as (writer, keeper):
        before = {entry.info.id: entry.info for entry in writer.catalogue().entries()}
        gone = keeper.collect(options.states)
        removed = (
            options.empty and not writer.catalogue().ids() and pool.kind is not PlaceKind.DEVICE
        )
        if removed:  # while it is locked: whoever waits for it finds that it is gone
            remove_journals(pool.path)
            remove_pool(pool.path, _FILES)
    freed = max(0, taken - on_disk(pool.path))
    return [before[version] for version in sorted(gone)], removed, freed


def _collect_from_host(place: Place, options: GcOptions) -> _Collected:
    """Collect by the links that trainers of this machine keep. They may be running: nothing of
    theirs is changed, and a young reference file counts as alive, since it may be about to get its
    name. Files that only the host has on record were written elsewhere, and may exist there."""
    directory = options.links or nearest(os.getcwd())
    paths = host_links(place, directory)
    if not paths and not options.missing:
        raise UsageError(
            f"{place}: no links to it in {directory or DEFAULT_DIRECTORY}: the machine whose "
            "trainer wrote the reference files knows which are gone. Run this there, in the "
            f"directory of the run, or give its {DEFAULT_DIRECTORY}: --links DIR"
        )
    directories = map(links_directory, paths)
    found = [each for path in directories for each in links(path, _FILES, adopt=False)]
    with contextlib.closing(HostPool(place.path)) as host:
        here = {each.reference.id for each in found}
        known = host.on_record()
        renounced = {each.id for each in known if is_renounced(each)}
        elsewhere = [each for each in known if each.id not in here | renounced]
        found = [each for each in found if each.reference.id not in renounced]
        found += [_written_elsewhere(each) for each in elsewhere]
        before = time.time_ns() - YOUNG_S * 10**9
        found = [
            each if each.reference.written_ns < before else replace(each, state=Fate.ALIVE)
            for each in found
        ]
        catalogue = host.catalogue()
        gone = unheld(found, catalogue, options.states)
        infos = [entry.info for entry in catalogue.entries() if entry.info.id in gone]
        if gone and not options.dry_run:
            lost = gone_for_good(found, options.states, _FILES)
            tokens = {info.token.hex() for info in infos}
            unknown = [each.reference for each in found if each.state is Fate.UNKNOWN]
            missing = [each for each in unknown if each in lost and each.token in tokens]
            host.renounce(missing)
            host.retire(gone)
            there = {entry.info.token.hex() for entry in host.catalogue().entries()}
            for each in lost:
                if each not in missing and each.leads_to(there) is None:
                    host.let_go(each)
        if options.dry_run:
            return infos, False, _unneeded(host, host.standing().taken, gone)
        freed = host.give_back()
    return infos, False, freed


def _written_elsewhere(reference: Reference) -> FileLink:
    """What of a file is known that another directory of links, or another machine, knows more of:
    it is alive if it is where it was written, and a pin is a pin."""
    if reference.is_pin:
        return FileLink(reference, Fate.PINNED)
    there = read_through(reference.written_path, _FILES)
    is_there = there is not None and there.id == reference.id
    return FileLink(reference, Fate.ALIVE if is_there else Fate.UNKNOWN)


def _say(
    path: str,
    infos: list[VersionInfo],
    removed: bool,
    freed: int,
    options: GcOptions,
    output: Output,
) -> None:
    would = "would be " if options.dry_run else ""
    for info in infos:
        output.line(f"{path}: {info.model}@{info.step} {would}deleted, {size_text(info.size)}")
    if removed:
        output.line(f"{path}: empty, {would}removed")
    if freed:
        size = f"about {size_text(freed)} {would}" if would else f"{size_text(freed)} "
        output.line(f"{path}: {size}returned to the file system")
    elif not infos and not removed:
        output.line(f"{path}: nothing to do")
