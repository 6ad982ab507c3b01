"""Putting in order what the death of a process left half done."""

from __future__ import annotations

import os

from portus.client.keeper import keeper_of
from portus.client.resolve import POOLS
from portus.errors import BusyError, UsageError
from portus.index.directory import WRITERS, pool_files


def mend(pool: str | os.PathLike[str], *, uncommitted: bool = False) -> list[str]:
    """Put the reference files of a pool, or of all pools in a directory, in order.

    For adapters whose checkpoint is a directory of reference files, before they look for the
    newest one. A save into an existing directory may have been cut off while its files were
    replaced: they come to lead to one version again, the newest. uncommitted: files that lead to
    nothing, since their save was cut off, are removed.

    Returns the paths of files that were removed. A pool that somebody writes is left alone; no
    pool is no error. Raises ``MediumError``, ``CorruptionError``.
    """
    try:
        paths = pool_files(pool)
    except UsageError:
        return []
    removed = []
    for path in paths:
        try:
            writer = WRITERS.open(path, timeout_s=0)
        except BusyError:
            continue
        try:
            if all(pool.uuid != writer.superblock.uuid for pool in POOLS.open_ones()):
                removed += keeper_of(path, writer).mend(uncommitted=uncommitted)
        finally:
            WRITERS.close(writer)
    return removed
