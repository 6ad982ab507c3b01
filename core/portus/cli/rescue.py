"""``portus rescue``: the versions that a damaged pool file still holds, and a new pool of them."""

from __future__ import annotations

import contextlib
import os

from portus.cli import words
from portus.cli.options import Text, argument, flag, option
from portus.cli.output import FOUND, Json, Output, Row, counter
from portus.cli.pools import version_document
from portus.engine.media.base import Medium
from portus.errors import CorruptionError, PortusError, UsageError
from portus.reach.index.check import Severity, check
from portus.reach.index.check_catalogue import load
from portus.reach.index.directory import lock, pools_at
from portus.reach.index.place import Place, local_path
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.rescue import (
    RecoverableVersion,
    choose,
    chunks_of,
    find_versions,
    rebuild,
)
from portus.reach.index.rescue import is_whole as is_version_whole
from portus.reach.index.roots import read_slots
from portus.reach.media.local import LocalFiles
from portus.reach.media.lock import FileLocks

_FILES = LocalFiles()


_Seen = list[tuple[RecoverableVersion, bool, bool]]
"""The versions that were found; whether each is whole, and whether a root reaches it."""


def command(
    output: Output,
    place: str = argument("POOL", "a pool file with any name, or a device"),
    into: Text = option("--into NEW", "write the intact versions to a new pool file"),
    in_place: bool = flag("--in-place", "repair the pool itself; copy it first"),
) -> None:
    """List the versions that a damaged pool still holds, or rebuild a pool from them.

    For a pool that does not open (both root slots are lost, and their copies), or that lost its
    name. Reads the whole pool. Also finds deleted versions that were not overwritten. Pointers
    refer to the new pool once it replaces the old one; `portus export` extracts single versions
    from it. Exit code 1 if nothing is intact, or if a version that the pool lists
    is damaged.
    """
    if into is not None and in_place:
        raise UsageError("--into or --in-place: choose one of them")
    path = _file(place)
    made: str | None = None
    with contextlib.closing(_FILES.open(path, writable=False)) as medium:
        seen = _look(path, medium)
        whole = [found for found, is_whole, _ in seen if is_whole]
        _show(path, seen, output)
        if into is not None:
            made = _into(path, medium, _some(path, medium, whole), into)
    if in_place:
        made = _in_place(path)
    if not whole or any(listed and not is_whole for _, is_whole, listed in seen):
        output.code = FOUND
    if made is not None:
        wrong = [each for each in check(made) if each.severity is Severity.ERROR]
        for finding in wrong:
            output.line(f"{finding.severity.value} {finding}")
        output.line(f"{made}: {'DAMAGED' if wrong else 'a healthy pool'}")
        output.code = FOUND if wrong else 0
    versions: list[Json] = [
        {**version_document(found.record.info), "whole": is_whole, "listed": listed}
        for found, is_whole, listed in seen
    ]
    output.document({"path": path, "versions": versions, "made": made})


def _file(place: str) -> str:
    path = Place.parse(place)
    if path.local_path is None:
        raise UsageError(f"{path}: run this on the storage host, on the pool file that it serves")
    if os.path.exists(path.path) and not os.path.isdir(path.path):
        return path.path  # not the other pools of its run: each is a pool of its own
    files = [each.path for each in pools_at(path)]
    if len(files) != 1:
        raise UsageError(
            f"{path}: expected one pool file, found {len(files)} in this directory; name one: "
            + (", ".join(files[:20]) or "there is none")
        )
    return files[0]


def _look(path: str, medium: Medium) -> _Seen:
    listed: set[bytes] = set()
    with contextlib.suppress(PortusError), contextlib.ExitStack() as stack:
        locks = stack.enter_context(contextlib.closing(FileLocks(path, writable=False)))
        catalogue = PoolReader(medium, locks).catalogue()
        listed = {entry.info.token for entry in catalogue.entries()}
    return [
        (each, is_version_whole(medium, each.record), each.record.info.token in listed)
        for each in find_versions(medium)
    ]


def _show(path: str, seen: _Seen, output: Output) -> None:
    rows: list[Row] = []
    for found, is_whole, listed in seen:
        info = found.record.info
        moment, size = words.moment(info.time_ns), words.size(info.size)
        state = "whole" if is_whole else "damaged", "yes" if listed else "no"
        rows.append((info.model, info.step, moment, size, *state))
    if rows:
        output.table(("model", ">step", "saved", ">size", "bytes", "listed"), rows)
    count = sum(is_whole for _, is_whole, _ in seen)
    output.line(f"{path}: {words.count(len(seen), 'version')} found, {count} whole")


def _some(path: str, medium: Medium, whole: list[RecoverableVersion]) -> list[RecoverableVersion]:
    versions = choose(whole)
    if not versions:
        raise CorruptionError(f"{path}: no version is whole; there is nothing to make a pool of")
    return versions


def _into(path: str, medium: Medium, versions: list[RecoverableVersion], into: str) -> str:
    target = local_path(into, "--into")
    made = _FILES.create(target, medium.size)
    try:
        total = sum(each.record.info.size for each in versions)
        with contextlib.closing(made), counter(os.path.basename(target), total) as add:
            for chunk in chunks_of(versions, medium.size):
                made.store(chunk.offset, load(medium, chunk.offset, chunk.length))
                add(chunk.length)
            rebuild(made, versions)
        _FILES.sync(os.path.dirname(target))
    except BaseException:
        _FILES.remove(target)
        raise
    return target


def _in_place(path: str) -> str:
    """Repair the pool file at ``path``, and return ``path``. If the file can be opened for writing,
    that repairs a slot; otherwise the pool is rebuilt from its intact versions."""
    with contextlib.ExitStack() as stack:
        locks = stack.enter_context(contextlib.closing(lock(path, _FILES)))
        medium = stack.enter_context(contextlib.closing(_FILES.open(path, writable=True)))
        # Searched again: it may have been repaired, and saved to, before we had the lock.
        whole = [found for found, is_whole, _ in _look(path, medium) if is_whole]
        newest = max((each.root.sequence for each in read_slots(medium) if each), default=0)
        # A writer would take a whole version of a lost root for one that was never committed.
        is_lost = any(each.record.info.commit > newest for each in whole)
        try:
            if not is_lost:
                PoolWriter(medium, locks)
        except CorruptionError:
            is_lost = True
        if is_lost:
            rebuild(medium, _some(path, medium, whole))
    return path
