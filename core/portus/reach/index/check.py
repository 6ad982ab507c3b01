"""``check``: walks a pool and names every rule of the format that it breaks.

Theory. The check reads both root slots, and all that they reach, until no commit came in between:
then all of it was reached at one moment. It pins each version while it looks at it, and skips one
that was retired meanwhile, whose pages may belong to another by now. So a check may run while a
writer works, and reports no damage that does not exist.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from portus.engine.format.checksum import UNIT
from portus.engine.media.base import Medium
from portus.engine.media.read_file import Pace, Wait
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError, StaleError, UsageError
from portus.reach.format.layout import VERSION_ID_MAX
from portus.reach.index.catalogue import read_catalogue
from portus.reach.index.check_catalogue import (
    ReachableVersions,
    Subject,
    check_catalogues,
    check_fixed_pages,
    settled_slots,
)
from portus.reach.index.check_reach import check_reach
from portus.reach.index.check_version import BATCH, Bytes, CheckedVersion, Flags, Versions
from portus.reach.index.directory import pools_at
from portus.reach.index.findings import RULES, Finding, Findings, Severity
from portus.reach.index.place import Place
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.index.roots import read_roots
from portus.reach.media.local import LocalFiles
from portus.reach.media.lock import FileLocks
from portus.reach.media.pool import Locks

__all__ = ["RULES", "CheckOptions", "Finding", "Severity", "check", "check_file", "check_medium"]

# No writer commits that often while slots are read: a bound, so that the loop ends.
_RETRIES_MAX: Final = 1000

Progress = Callable[[int, int], None]
"""Receives the bytes done, and the bytes to do in total."""

Only = Callable[[VersionInfo], bool]


def _to_nobody(*tell: object) -> None:
    pass


def _every(info: VersionInfo) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of a check. ``data``, ``progress``, ``only``: as for ``check``. ``tell``: receives
    each finding when it is found. ``batch``: bytes of versions to read together, one unit at least;
    ``pace``: a limit of their rate, None for no limit. An error that a callback raises ends the
    check."""

    data: bool = True
    progress: Progress = _to_nobody
    only: Only = _every
    tell: Callable[[Finding], None] = _to_nobody
    batch: int = BATCH
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
        return check_medium(pool.medium, pool.locks, look)
    place = Place.parse(pool)
    if place.local_path is None:
        raise UsageError(f"{place}: `portus verify --pool {place}` checks what a storage host has")
    if not os.path.isdir(place.path):
        return check_file(place.path, look)
    found = pools_at(place)
    if not found:
        raise UsageError(f"{place}: there is no pool file in this directory")
    return [
        replace(finding, where=f"{each}: {finding.where}")
        for each in found
        for finding in check_file(each.path, look)
    ]


def check_file(path: str, look: CheckOptions, *, cached: bool = True) -> list[Finding]:
    """Return the findings of one pool file or device, as ``check`` does. cached: False bypasses the
    system's page cache, where that is possible."""
    files = LocalFiles()
    with contextlib.ExitStack() as stack:
        medium = files.open(path, writable=False) if cached else files.open_uncached(path)
        stack.callback(medium.close)
        locks = stack.enter_context(contextlib.closing(FileLocks(path, writable=False)))
        return check_medium(medium, locks, look)


def scrub(
    pool: Place | PoolReader, bytes_per_s: int, look: CheckOptions, *, wait: Wait = time.sleep
) -> list[Finding]:
    """Return every broken rule of a pool file, a device, or an open pool, reading ``bytes_per_s``
    at most, 1 or more: rot is reported before a version is needed. Bypasses the system's page
    cache, since rot is on the disk.

    look: its ``batch`` and ``pace`` are ignored. An open pool is read through its reader: on a
    storage host, the host reads it. Blocks until the end. Raises as ``check``, and what ``wait``
    raises.
    """
    paced = replace(look, batch=UNIT, pace=Pace(bytes_per_s, wait))
    if isinstance(pool, PoolReader):
        return check_medium(pool.medium, pool.locks, paced)
    return check_file(pool.path, paced, cached=False)


def check_medium(medium: Medium, locks: Locks, look: CheckOptions) -> list[Finding]:
    """Return the findings of the pool on a medium, as ``check`` does."""
    findings = Findings(look.tell)
    uuid = check_fixed_pages(medium, findings)
    if uuid is None:
        return findings.all
    standing = check_catalogues(medium, uuid, findings)
    subject = Subject(medium, uuid, findings)
    pins = _Pins(subject, standing, locks)
    seen = _look(subject, standing, pins, look.only)
    check_reach(seen, standing.runs.values(), findings)
    if look.data:
        _read_bytes(subject, seen, pins, look)
    return findings.all


def _look(
    subject: Subject,
    standing: ReachableVersions,
    pins: _Pins,
    only: Only,
) -> list[CheckedVersion]:
    versions, found = Versions(subject, standing), []
    for entry in standing.entries.values():
        if only(entry.info):
            with pins.hold(entry) as there:
                seen = versions.look(entry) if there else None
            if seen is not None:
                found.append(seen)
    return found


def _read_bytes(
    subject: Subject, seen: list[CheckedVersion], pins: _Pins, look: CheckOptions
) -> None:
    verifier, progress = Bytes(subject, look.batch, look.pace), look.progress
    verifier.note(seen)
    todo: list[tuple[CheckedVersion, Flags, int]] = []
    for each in seen:
        some = verifier.unknown(each)
        todo.append((each, some, int(each.record.storages["length"][some].sum())))
    total, before = sum(size for _, _, size in todo), 0
    progress(0, total)
    for each, some, size in todo:
        done = before
        with pins.hold(each.entry) as there:
            if there:
                for length in verifier.verify(each, some):
                    done += length
                    progress(done, total)
                verifier.verify_log(each)
        before += size
        progress(before, total)


class _Pins:
    """Pins versions of a catalogue while they are checked."""

    def __init__(self, subject: Subject, standing: ReachableVersions, locks: Locks) -> None:
        self._subject: Final = subject
        self._places = standing.places
        self._there = frozenset(standing.entries)
        self._locks: Final = locks

    @contextlib.contextmanager
    def hold(self, entry: VersionEntry) -> Iterator[bool]:
        """Pin a version and yield True, or False if no root reaches it or its id is wrong."""
        version = entry.info.id
        if not 0 < version < VERSION_ID_MAX:
            yield False
            return
        self._locks.pin(version)
        try:
            # After the pin, as in ``PoolReader.pin``: a writer that asked before has released
            # it in a slot by now.
            yield self._is_there(version)
        finally:
            self._locks.unpin(version)

    def _is_there(self, version: int) -> bool:
        for _ in range(_RETRIES_MAX):
            places = settled_slots(self._subject.medium, self._places)
            if places == self._places:
                return version in self._there
            self._there, self._places = self._reachable_ids(), places
        raise StaleError(
            f"{self._subject.medium.info.name}: commits came faster than they could be read; "
            "try again"
        )

    def _reachable_ids(self) -> frozenset[int]:
        """Return the ids in both catalogues. Damage was reported before."""
        ids: set[int] = set()
        for root in read_roots(self._subject.medium, self._subject.uuid):
            with contextlib.suppress(CorruptionError):
                ids |= read_catalogue(self._subject.medium, root).ids()
        return frozenset(ids)
