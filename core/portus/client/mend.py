"""Putting in order what the death of a process left half done."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Final

from portus.client.files.fate import links as links_in
from portus.client.files.home import host_links
from portus.client.files.host import HostPool
from portus.client.files.keeper import Keeper, keeper_of
from portus.client.files.reference import lead_links_to
from portus.client.leaving.in_turn import saved_in
from portus.client.loading.resolve import POOLS
from portus.client.shards.grouped import census
from portus.directory.links import replace_link
from portus.errors import BusyError, MediumError, UsageError
from portus.index.directory import WRITERS, has_pool, links_directory, pools_at
from portus.index.groups import Group, part_model
from portus.index.place import Place, PlaceName
from portus.media import calls
from portus.media.local import LocalFiles

_log = logging.getLogger("portus")

_LED_S: Final = 5.0
"""The longest that processes that make the same link may be in the way of each other."""

_CLAIM_S: Final = 2.0
"""The longest wait for a model on a storage host: whoever saved it may have just died."""


@calls.entry
def mend(
    pool: PlaceName,
    *,
    uncommitted: bool = False,
    links: str | None = None,
    model: str | None = None,
    wait_s: float = 0.0,
    before: Callable[[list[str]], None] | None = None,
) -> list[str]:
    """Put the reference files of a pool, or of all pools in a directory, in order.

    For adapters whose checkpoint is a directory of reference files, before they look for the
    newest one. A save into an existing directory may have been cut off while its files were
    replaced: they come to lead to one version again, the newest. uncommitted: files that lead to
    nothing, since their save was cut off, are renamed to ``.uncommitted``; those to parts of a
    group of which other ranks committed nothing count as such.

    model: only the files of this model, and the pool file that it has in a directory.
    wait_s: the longest wait for another process that has a pool file open, which may be mending it.

    before: is told the paths of files of one pool that are put aside, before the first one is: if
        this process dies then, nothing but their names tells that they were checkpoints.

    links: with a storage host, whose references the trainers of this machine know, what
    ``Checkpointer`` was given; None: ``.portus`` in the current directory.

    Returns the paths at which there is no file any more. A pool that somebody writes is left
    alone, and a model that somebody saves to a host; no pool is no error. Raises ``MediumError``,
    ``CorruptionError``; ``TransportError`` and what a host refuses, also where that is one of
    several: then nothing is changed.
    """
    place = Place.named(pool)
    on_hosts = [(host, path) for host in place.hosts for path in host_links(host, links)]
    if on_hosts and any(_is_open_here(_uuid_of(host)) for host in place.hosts):
        return []  # what this process saves there it would wait for in vain
    files = [] if place.is_host else _pool_files(place, model)
    cut_off = _cut_off(place) if uncommitted and on_hosts else set()
    removed = []
    for opened in (
        *(_of_host(host, path) for host, path in on_hosts),
        *(_of_file(path, wait_s) for path in files),
    ):
        with opened as keeper:
            if keeper is not None:
                removed += keeper.mend(
                    uncommitted=uncommitted, cut_off=cut_off, model=model, before=before
                )
    return removed


def lead_back(link: str, model: str) -> bool:
    """Let the symbolic link at ``link`` lead to the newest reference file of ``model`` where it
    leads, if there is no file at that path. True if it was done.

    For adapters of frameworks that make such a link right after they asked for a save, whatever
    becomes of that: they would take a link that leads nowhere for no checkpoint. Raises
    ``MediumError``.
    """
    if not os.path.islink(link) or os.path.exists(link):
        return False
    target = os.path.realpath(link)
    newest = _newest_file(os.path.dirname(target), model)
    if newest is None:
        return False
    lead_links_to(newest, target)
    _log.warning(
        "portus: there is no %s, whose save failed: files that led to it lead to %s now",
        target,
        newest,
    )
    return True


def lead_to_newest(path: str, model: str) -> bool:
    """Make ``path``, at which there is nothing, a symbolic link to the newest reference file of
    ``model`` beside it. True if there is one, also if another process made that link. Any number
    may at once. Raises ``MediumError``."""
    newest = _newest_file(os.path.dirname(path), model)
    if newest is None:
        return False
    until = time.monotonic() + _LED_S
    while True:
        try:
            replace_link(path, newest)
            break
        except OSError as error:  # another one may be in the way
            if os.path.exists(path):
                break
            if time.monotonic() > until:
                why = f"cannot link {path} to {newest}: {error.strerror}"
                raise MediumError(error.errno, why) from error
            time.sleep(0.01)
    _log.warning("portus: %s leads to %s, the newest that was committed", path, newest)
    return True


def _newest_file(directory: str, model: str) -> str | None:
    """The newest reference file of a model in a directory; no link to one, which may be what is to
    be led there."""
    found = saved_in([directory], model)
    return next(filter(_is_file, found), None)


def _is_file(path: str) -> bool:
    """True for a file that is no link, by one look: another rank's link may go between two."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _pool_files(place: Place, model: str | None) -> list[str]:
    try:
        pools = pools_at(place if model is None else place.pool_of(model))
        return [pool.path for pool in pools if has_pool(pool.path)]  # a device may be blank
    except UsageError:
        return []


@contextlib.contextmanager
def _of_file(path: str, wait_s: float) -> Iterator[Keeper | None]:
    """The reference files of a pool file, which is nobody else's meanwhile; None if it is, or if
    whoever had it took it away."""
    try:
        writer = WRITERS.open(path, timeout_s=wait_s)
    except (MediumError, UsageError) as error:
        if not isinstance(error, BusyError) and has_pool(path):
            raise
        yield None
        return
    try:
        yield None if _is_open_here(writer.superblock.uuid) else keeper_of(path, writer)
    finally:
        WRITERS.close(writer)


@contextlib.contextmanager
def _of_host(place: Place, path: str) -> Iterator[Keeper | None]:
    """The reference files of this machine that ``path`` is named for, likewise."""
    found = links_in(links_directory(path), LocalFiles(), adopt=False)
    with contextlib.ExitStack() as stack:
        pool = None
        try:
            for model in {each.reference.model for each in found}:
                pool = _claimed(place, model)
                stack.callback(pool.close)
        except BusyError:
            pool = None
        yield None if pool is None else keeper_of(path, pool, address=place.path)


def _claimed(place: Place, model: str) -> HostPool:
    return HostPool(place.path, model, claim_s=_CLAIM_S)


def _uuid_of(place: Place) -> bytes:
    with contextlib.closing(HostPool(place.path)) as pool:
        return pool.superblock.uuid


def _is_open_here(uuid: bytes) -> bool:
    return any(pool.uuid == uuid for pool in POOLS.open_ones())


def _cut_off(place: Place) -> set[bytes]:
    """Tokens of the parts of groups whose other parts were never committed, and will not be."""
    parts = {part for group in census(place).groups for part in _missing(group)}
    idle = {part for part in parts if _is_idle(place, part)}
    found = census(place)  # now: who has let go of its pool has committed what it was at
    if found.silent:
        return set()  # any part may be there
    groups = [group for group in found.groups if not group.is_complete]
    cut_off = [group for group in groups if idle.issuperset(_missing(group))]
    return {info.token for group in cut_off for _, info in group.parts.values()}


def _missing(group: Group) -> list[str]:
    """What the ranks call their parts that are not there."""
    return [part_model(group.model, rank, group.count) for rank in group.missing]


def _is_idle(place: Place, part: str) -> bool:
    """True if nobody saves a rank's part."""
    try:
        for host in place.hosts:
            _claimed(host, part).close()
    except BusyError:
        return False
    return True
