"""``portus rescue``: what a damaged pool file still holds, and a pool of it again."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from portus.cli.output import FOUND, Json, Output, count_text, moment_text, size_text
from portus.cli.pools import version_document
from portus.cli.progress import bar
from portus.errors import CorruptionError, PortusError, UsageError
from portus.index.check import Severity, check
from portus.index.directory import locked, pools_at
from portus.index.place import Place, local_path
from portus.index.pool import PoolWriter
from portus.index.reader import PoolReader
from portus.index.rebuild import chosen, copy_versions, rebuild
from portus.index.rescue import RecoverableVersion, find_versions, is_whole
from portus.media.base import Medium
from portus.media.local import LocalFiles
from portus.media.lock import FileLocks

_FILES = LocalFiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueOptions:
    """Options of a rescue. ``into``: write a new pool file at this path; ``in_place``: repair the
    file itself. Neither: only look."""

    into: str | None = None
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """A version that was found. ``listed``: a root leads to it."""

    found: RecoverableVersion
    whole: bool
    listed: bool


def run(place: str, options: RescueOptions, output: Output) -> int:
    """Look, and make what is wished for; the exit code."""
    if options.into is not None and options.in_place:
        raise UsageError("--into or --in-place: choose one of them")
    path = _file(place)
    with contextlib.closing(_FILES.open(path, writable=False)) as medium:
        seen = _look(path, medium)
        whole = [each.found for each in seen if each.whole]
        _say(path, seen, output)
        made: str | None = None
        if options.into is not None:
            made = _into(path, medium, _some(path, medium, whole), options.into)
    if options.in_place:
        made = _in_place(path)
    damaged = not whole or any(each.listed and not each.whole for each in seen)
    code = FOUND if damaged else 0
    if made is not None:
        wrong = [each for each in check(made) if each.severity is Severity.ERROR]
        for finding in wrong:
            output.line(f"{finding.severity.value} {finding}")
        output.line(f"{made}: {'DAMAGED' if wrong else 'a healthy pool'}")
        code = FOUND if wrong else 0
    versions: list[Json] = [
        {**version_document(each.found.record.info), "whole": each.whole, "listed": each.listed}
        for each in seen
    ]
    output.document({"path": path, "versions": versions, "made": made})
    return code


def _file(place: str) -> str:
    path = Place.named(place)
    if path.is_host:
        raise UsageError(f"{path}: run this on the storage host, on the pool file that it serves")
    if not path.is_directory and os.path.exists(path.path):
        return path.path  # not the generations of its run: each is one pool
    files = [each.path for each in pools_at(path)]
    if len(files) != 1:
        raise UsageError(
            f"{path}: expected one pool file, found {len(files)} in this directory; name one: "
            + (", ".join(files[:20]) or "there is none")
        )
    return files[0]


def _look(path: str, medium: Medium) -> list[_Seen]:
    listed: set[bytes] = set()
    with contextlib.suppress(PortusError), contextlib.ExitStack() as stack:
        locks = stack.enter_context(contextlib.closing(FileLocks(path, writable=False)))
        catalogue = PoolReader(medium, locks).catalogue()
        listed = {entry.info.token for entry in catalogue.entries()}
    found = find_versions(medium)
    return [
        _Seen(each, is_whole(medium, each.record), each.record.info.token in listed)
        for each in found
    ]


def _say(path: str, seen: list[_Seen], output: Output) -> None:
    rows = [
        (
            each.found.record.info.model,
            str(each.found.record.info.step),
            moment_text(each.found.record.info.time_ns),
            size_text(each.found.record.info.size),
            "whole" if each.whole else "damaged",
            "yes" if each.listed else "no",
        )
        for each in seen
    ]
    if rows:
        output.table(("model", ">step", "saved", ">size", "bytes", "listed"), rows)
    whole = sum(each.whole for each in seen)
    output.line(f"{path}: {count_text(len(seen), 'version')} found, {whole} whole")


def _some(path: str, medium: Medium, whole: list[RecoverableVersion]) -> list[RecoverableVersion]:
    versions = chosen(medium, whole)
    if not versions:
        raise CorruptionError(f"{path}: no version is whole; there is nothing to make a pool of")
    return versions


def _into(path: str, medium: Medium, versions: list[RecoverableVersion], into: str) -> str:
    target = local_path(into, "--into")
    made = _FILES.create(target, medium.size)
    try:
        with contextlib.closing(made), bar(os.path.basename(target)) as told:
            done, total = 0, sum(each.record.info.size for each in versions)

            def advanced(length: int) -> None:
                nonlocal done
                done += length
                told(min(done, total), total)

            copy_versions(medium, made, versions, advanced)
            rebuild(made, versions)
        _FILES.sync(os.path.dirname(target))
    except BaseException:
        _FILES.remove(target)
        raise
    return target


def _in_place(path: str) -> str:
    """Repair the pool file at ``path``, and return ``path``. If its writer can read the file, it
    repairs a slot or a superblock; otherwise the pool is rebuilt from the versions found whole."""
    with contextlib.ExitStack() as stack:
        locks = stack.enter_context(contextlib.closing(locked(path, _FILES)))
        medium = stack.enter_context(contextlib.closing(_FILES.open(path, writable=True)))
        try:
            PoolWriter(medium, locks)
        except CorruptionError:
            # Looked at once more: it may have been mended, and saved to, before we had the lock.
            whole = [each.found for each in _look(path, medium) if each.whole]
            rebuild(medium, _some(path, medium, whole))
    return path
