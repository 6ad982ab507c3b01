"""Putting in order what the death of a process left half done."""

from __future__ import annotations

import os

from portus.client.grouped import Census, census, has_writer, place_of
from portus.client.keeper import keeper_of
from portus.client.resolve import POOLS
from portus.errors import BusyError, UsageError
from portus.index.directory import WRITERS, pool_file, pool_files
from portus.index.groups import part_model
from portus.protocol.address import is_address


def mend(pool: str | os.PathLike[str], *, uncommitted: bool = False) -> list[str]:
    """Put the reference files of a pool, or of all pools in a directory, in order.

    For adapters whose checkpoint is a directory of reference files, before they look for the
    newest one. A save into an existing directory may have been cut off while its files were
    replaced: they come to lead to one version again, the newest. uncommitted: files that lead to
    nothing, since their save was cut off, are removed; those to parts of a group of which other
    ranks committed nothing count as such.

    Returns the paths of files that were removed. A pool that somebody writes is left alone; no
    pool is no error. Raises ``MediumError``, ``CorruptionError``.
    """
    try:
        place = place_of(pool)
        if is_address(place):
            return []  # its references are known where they are
        found, paths = census(place), pool_files(place)
    except UsageError:
        return []
    cut_off = _cut_off(found) if uncommitted else set()
    removed = []
    for path in paths:
        try:
            writer = WRITERS.open(path, timeout_s=0)
        except BusyError:
            continue
        try:
            if all(pool.uuid != writer.superblock.uuid for pool in POOLS.open_ones()):
                keeper = keeper_of(path, writer)
                removed += keeper.mend(uncommitted=uncommitted, cut_off=cut_off)
        finally:
            WRITERS.close(writer)
    return removed


def _cut_off(found: Census) -> set[bytes]:
    """Tokens of the parts of groups whose other parts were never committed.

    Not of a group with a rank whose pool file is lost, cannot be read, or is being written: what
    is in it is not known.
    """
    tokens = set()
    for group in found.groups:
        missing = [
            pool_file(found.place, part_model(group.model, rank, group.count))
            for rank in group.missing
        ]
        if missing and all(
            os.path.isfile(path) and path not in found.unreadable and not has_writer(path)
            for path in missing
        ):
            tokens |= {info.token for _, info in group.parts.values()}
    return tokens
