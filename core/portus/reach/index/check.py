"""``check``: walks a pool and names every rule of the format that it breaks.

Theory. The check reads both root slots, and all that they reach, until no commit came in between:
then all of it was reached at one moment. It pins each version while it looks at it, and skips one
that was retired meanwhile, whose pages may belong to another by now. So a check may run while a
writer works, and reports no damage that does not exist.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from portus.engine.media.base import Medium
from portus.engine.media.read_file import Pace
from portus.engine.spec import VersionInfo
from portus.errors import UsageError
from portus.reach.index.check_catalogue import (
    ReachableVersions,
    check_catalogues,
    check_fixed_pages,
)
from portus.reach.index.check_reach import check_reach
from portus.reach.index.check_version import Bytes, CheckedVersion, check_version
from portus.reach.index.directory import pools_at
from portus.reach.index.findings import RULES, Finding, Findings, Severity
from portus.reach.index.place import Place
from portus.reach.index.reader import PoolReader
from portus.reach.media.local import LocalFiles
from portus.reach.media.lock import FileLocks
from portus.reach.media.pool import Locks

__all__ = ["RULES", "CheckOptions", "Finding", "Severity", "check", "check_medium", "check_pool"]

Progress = Callable[[int, int], None]
"""Receives the bytes done, and the bytes to do in total."""

Only = Callable[[VersionInfo], bool]


def _to_nobody(*told: object) -> None:
    pass


def _every(info: VersionInfo) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of a check. ``data``, ``progress``, ``only``: as for ``check``. ``tell``: receives
    each finding when it is found. ``pace``: a limit of the rate at which versions are read, from
    the medium itself; None for no limit. An error that a callback raises ends the check."""

    data: bool = True
    progress: Progress = _to_nobody
    only: Only = _every
    tell: Callable[[Finding], None] = _to_nobody
    pace: Pace | None = None


def check(
    pool: str | os.PathLike[str] | PoolReader,
    *,
    data: bool = True,
    progress: Progress | None = None,
    only: Only | None = None,
) -> list[Finding]:
    """Return every broken rule of a pool file, or of all in a pool directory, each with its path;
    none for healthy ones. Changes nothing.

    data: read every byte of every version too, once for all versions that share it.
    progress: called now and then with the bytes done and the bytes to do in total, in each file.
    only: check these versions alone; the catalogues are always checked.

    Works while a writer has the pool open. Blocks. Raises ``MediumError`` if a pool cannot be
    opened or its first pages cannot be read, ``UsageError`` if there is none or a newer Portus
    wrote it, ``StaleError`` if commits never pause for long enough.
    """
    look = CheckOptions(data=data, progress=progress or _to_nobody, only=only or _every)
    if isinstance(pool, PoolReader):
        return check_pool(pool, look)
    place = Place.parse(pool)
    if place.local_path is None:
        raise UsageError(f"{place}: `portus verify --pool {place}` checks what a storage host has")
    if not os.path.isdir(place.path):
        return check_pool(place.path, look)
    found = pools_at(place)
    if not found:
        raise UsageError(f"{place}: there is no pool file in this directory")
    return [
        replace(finding, where=f"{each}: {finding.where}")
        for each in found
        for finding in check_pool(each.path, look)
    ]


def check_pool(pool: str | PoolReader, look: CheckOptions) -> list[Finding]:
    """Return the findings of one pool file or device, or of an open pool, as ``check`` does. With a
    pace a file bypasses the system's page cache, where that is possible: rot is on the disk. An
    open pool is read through its reader: on a storage host, the host reads it."""
    if isinstance(pool, PoolReader):
        return check_medium(pool.medium, pool.locks, look)
    files = LocalFiles()
    with contextlib.ExitStack() as stack:
        is_paced = look.pace is not None
        medium = files.open_uncached(pool) if is_paced else files.open(pool, writable=False)
        stack.callback(medium.close)
        locks = stack.enter_context(contextlib.closing(FileLocks(pool, writable=False)))
        return check_medium(medium, locks, look)


def check_medium(medium: Medium, locks: Locks, look: CheckOptions) -> list[Finding]:
    """Return the findings of the pool on a medium, as ``check`` does."""
    findings = Findings(look.tell)
    uuid = check_fixed_pages(medium, findings)
    if uuid is None:
        return findings.all
    standing = check_catalogues(medium, locks, uuid, findings)
    seen = list[CheckedVersion]()
    for entry in standing.entries.values():
        if look.only(entry.info):
            with standing.pin(entry.info.id) as there:
                found = check_version(standing, entry) if there else None
            seen += [found] if found is not None else []
    check_reach([each.record for each in seen], standing.runs, findings)
    if look.data:
        _read_bytes(standing, seen, Bytes(medium, findings, look.pace), look.progress)
    return findings.all


def _read_bytes(
    standing: ReachableVersions, seen: list[CheckedVersion], verifier: Bytes, progress: Progress
) -> None:
    total, done = verifier.plan(each.record for each in seen), 0
    progress(0, total)
    for each in seen:
        with standing.pin(each.record.info.id) as there:
            if there:
                for length in verifier.verify(each):
                    done += length
                    progress(done, total)
                verifier.verify_log(each)
    progress(total, total)
