"""Groups on storage hosts: which there are, which one a load takes, and why not another.

Loads take complete groups only. What stands in the way of one is said rank by rank: a host that
does not answer, one that never committed this save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from portus.client.files import reference as files_of
from portus.client.loading import restore, view
from portus.client.loading.resolve import AWAITED_S_MAX, POOLS, hosts_of, pool_of
from portus.client.loading.view import PoolFile
from portus.client.shards.cuts import CHECKPOINT_ID, FORMAT_KEY
from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.format.reference import Reference
from portus.index.directory import pools_at
from portus.index.groups import ID_SIZE, Group, groups_of, part_model, part_of
from portus.index.place import Place
from portus.media.calls import is_nested
from portus.spec import VersionInfo, checked_step

_log: Final = logging.getLogger("portus")

_SHARD: Final = re.compile(r"rank-(?:0|[1-9][0-9]{0,6})-of-[1-9][0-9]{0,6}\.shard")
STOCK_METADATA: Final = ".metadata"
"""What torch's own storage writes last into a checkpoint directory, and looks for there. Ours has a
reference of this name: torch's storage fails on it, where it would find nothing and start afresh.
"""

_NAMED_MAX: Final = 8
"""Ranks that a message tells about."""

_POLL_S: Final = 0.02


@dataclass(slots=True)
class Census:
    """What the pools on storage hosts hold now.

    groups: newest last. held: by the name of a rank's part, the steps it has. pools: the identity
    of each. silent: by address, why one of several hosts could not be read: any part may be there.
    """

    place: Place
    groups: list[Group]
    held: dict[str, list[int]] = field(default_factory=dict)
    pools: dict[Place, bytes] = field(default_factory=dict)
    silent: dict[str, PortusError] = field(default_factory=dict)


def check_hosts(place: Place) -> None:
    """Raise ``UsageError`` unless ``place`` is one of storage hosts."""
    if not place.is_host:
        raise UsageError(
            f"{place}: expected a storage host (portus://host:7117), found a path; shards are "
            "saved to a directory by portus.dcp.save or PortusStorageWriter, and loaded from it "
            "by portus.dcp.load or PortusStorageReader"
        )


def census(place: Place, model: str | None = None) -> Census:
    """Look at every pool of a place. One that is damaged is in ``silent``, and one of several hosts
    that does not answer. Raises ``TransportError`` if none answers."""
    infos: list[tuple[Place, VersionInfo]] = []
    found = Census(place, [])
    for pool in pools_at(place):
        try:
            with contextlib.closing(PoolFile(pool)) as file:
                infos += [(pool, info) for info in file.versions()]
                found.pools[pool] = file.uuid
        except (CorruptionError, MediumError, TransportError) as error:
            found.silent[pool.path] = error
    if not found.pools:
        for silent in found.silent.values():
            if isinstance(silent, TransportError):
                raise silent
    found.groups = groups_of(infos, model)
    for _, info in infos:
        found.held.setdefault(info.model, []).append(info.step)
    return found


def versions_at(pools: Iterable[Place]) -> list[tuple[Place, bytes, VersionInfo]]:
    """What is in some pools, with their places and identities. Raises as opening a pool does."""
    found = []
    for pool in pools:
        with contextlib.closing(PoolFile(pool)) as file:
            found += [(pool, file.uuid, info) for info in file.versions()]
    return found


def chosen(
    found: Census,
    model: str,
    step: int | None,
    *,
    ids: Collection[bytes] | None = None,
    but: Collection[bytes] = (),
) -> Group:
    """The newest complete group, of a step or of any.

    ids: only these groups. but: not these, which turned out to be damaged. Raises ``UsageError``
    that says what is missing of each rank if there is none; ``TransportError`` that says so too
    where a host that does not answer may have it.
    """
    step = None if step is None else checked_step(step)
    fitting = [group for group in found.groups if group.model == model and group.id not in but]
    fitting = [group for group in fitting if step is None or group.step == step]
    fitting = [group for group in fitting if ids is None or group.id in ids]
    complete = [group for group in fitting if group.is_complete]
    if complete:
        return complete[-1]
    if fitting:
        raise _refusal(found, _incomplete(found, fitting[-1], but))
    if but:
        raise _refusal(found, f"{found.place}: no other complete group of {model!r} is there")
    steps = sorted({group.step for group in found.groups if group.is_complete})
    asked = "" if step is None else f" has step {step}"
    asked = asked if ids is None else " is the one that was asked for"
    has = f"there are steps {steps}" if steps else _nothing_sharded(found, model)
    raise _refusal(found, f"{found.place}: no group of model {model!r}{asked}; {has}")


def _refusal(found: Census, text: str) -> UsageError | TransportError:
    """Why nothing is loaded, and what could not be looked at."""
    unread = [f"{path} cannot be read: {error}" for path, error in found.silent.items()]
    text = ". ".join([text, *(["; ".join(unread[:_NAMED_MAX])] if unread else [])])
    silent = any(isinstance(error, TransportError) for error in found.silent.values())
    return TransportError(text) if silent else UsageError(text)


# What checkpoints were saved as.


def id_of(checkpoint_id: str | os.PathLike[str] | None) -> str | None:
    """What a ``checkpoint_id`` is kept and compared as; None if there is none.

    It is a name, not a place: a path and its text are one id, and so are ``a/b``, ``a//b/`` and
    ``./a/b``. A relative one is not made absolute, so it stays the same when its run is moved.
    """
    text = os.fsdecode(checkpoint_id) if checkpoint_id else ""
    if not text:
        return None
    return text.rstrip("/") if "://" in text else os.path.normpath(text)


def step_of(checkpoint_id: str | None, otherwise: Any) -> Any:
    """The number at the end of an id; ``otherwise`` if there is none."""
    found = re.search(r"(\d{1,15})$", checkpoint_id) if checkpoint_id else None
    return int(found[1]) if found else otherwise


def id_kept(group: Group) -> str | None:
    """What a group was saved as; None if it was given a step alone, and "" if it was saved before
    ids were kept, or if the part that has it is missing. Raises as ``load_part``."""
    for rank in sorted(group.parts):
        content = load_part(group, rank, lambda path: path in (CHECKPOINT_ID, FORMAT_KEY))
        if CHECKPOINT_ID in content:
            kept: str | None = content[CHECKPOINT_ID]
            return kept
    return ""


def saved_as(
    found: Census, model: str, wanted: str, step: int | None, but: Collection[bytes] = ()
) -> Group:
    """The newest group that was saved as ``wanted``, and no other; of a step or of any. One that
    is complete, if there is one. One that was saved before ids were kept is known by its number.

    Raises ``UsageError`` that says what there is if there is none; ``TransportError`` where a host
    that does not answer may have it.
    """
    groups = [each for each in found.groups if each.model == model and each.id not in but]
    groups = [each for each in groups if step is None or each.step == step]
    others: list[tuple[Group, str | None]] = []
    damage: CorruptionError | None = None
    groups.sort(key=lambda group: group.is_complete)
    for group in reversed(groups):
        try:
            kept = id_kept(group)
        except StaleError:
            continue  # it was let go of meanwhile
        except CorruptionError as error:
            damage = damage or error
            continue
        if kept == wanted or (kept == "" and step_of(wanted, None) == group.step):
            if damage is not None:
                _log.error("%s; FALLING BACK to %s", damage, name_of(group))
            return group
        others.append((group, kept))
    at = "" if step is None else f" at step {step}"
    told = [_listed(others), *([] if damage is None else [str(damage)])]
    raise _refusal(
        found,
        f"{found.place}: no checkpoint of model {model!r} was saved as {wanted!r}{at}; "
        + "; ".join(told),
    )


def _listed(groups: Sequence[tuple[Group, str | None]]) -> str:
    """What there is to load, newest first."""
    complete = [(group, kept) for group, kept in groups if group.is_complete]
    named = [f"{kept!r:.120} (step {group.step})" for group, kept in complete if kept]
    bare = [group.step for group, kept in complete if kept is None]
    old = [group.step for group, kept in complete if kept == ""]
    told = []
    if named:
        told.append(f"there are {_some(named)}")
    if bare:
        told.append(f"saved by step alone, so ask with step=: {_some(list(map(str, bare)))}")
    if old:
        told.append(f"saved before ids were kept, so by number: {_some(list(map(str, old)))}")
    return "; ".join(told) or "nothing complete is there"


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _NAMED_MAX} more" if len(texts) > _NAMED_MAX else ""
    return ", ".join(texts[:_NAMED_MAX]) + more


def _nothing_sharded(found: Census, model: str) -> str:
    """What to say where there is no group; also of what was saved rank by rank by hand."""
    parts = [part for part in found.held if (of := part_of(part)) and of[0] == model]
    told = [f"{part!r} has steps {found.held[part][-_NAMED_MAX:]}" for part in parts[:_NAMED_MAX]]
    own = f"; {', '.join(told)}, not saved by portus.dcp: load each separately" if told else ""
    return f"nothing sharded is there{own}"


def _incomplete(found: Census, group: Group, but: Collection[bytes]) -> str:
    told = [_why_missing(found, group, rank) for rank in group.missing[:_NAMED_MAX]]
    more = [f"{len(group.missing) - _NAMED_MAX} more"] if len(group.missing) > _NAMED_MAX else []
    others = [each for each in found.groups if each.model == group.model and each.id not in but]
    steps = sorted({each.step for each in others if each.is_complete})
    instead = f"step {steps[-1]} is" if steps else "there is no complete group to load instead"
    return (
        f"{name_of(group)} is not complete: of {group.count} ranks, those of "
        f"{few(group.missing)} are not in {found.place}; {instead}. {'; '.join(told + more)}"
    )


def _why_missing(found: Census, group: Group, rank: int) -> str:
    if found.silent:
        return f"rank {rank}: its part is not on {_some([str(pool) for pool in found.pools])}"
    part = part_model(group.model, rank, group.count)
    if part in found.held:
        steps = found.held[part][-_NAMED_MAX:]
        return f"rank {rank}: {found.place} has steps {steps}, this save was not committed there"
    return f"rank {rank}: nothing of it is on {found.place}, this save was not committed there"


def name_of(group: Group) -> str:
    """A group, for people."""
    return f"model {group.model!r}, step {group.step} of {group.count} ranks"


def few(ranks: list[int]) -> str:
    """Ranks, for people."""
    return _some(list(map(str, ranks)))


def load_part(
    group: Group, rank: int, keep: Callable[[str], bool], *, stand_ins: bool = False
) -> dict[str, Any]:
    """What a rank's part holds at the key paths to ``keep``, verified. stand_ins: in the place of
    objects of codecs.

    Raises as loads do; ``CorruptionError`` names model, step and rank too.
    """
    with _part(group, rank) as (file, info):
        entry = view.of_token(file.reader.catalogue(), info.token)
        return _dict(restore.load_where(file.reader, entry, keep, stand_ins=stand_ins))


def check_part(
    group: Group, rank: int, keep: Callable[[str], bool], kept_max: int
) -> dict[str, Any] | None:
    """Read and check those bytes; and give them back if they are ``kept_max`` at most. Raises as
    ``load_part``."""
    with _part(group, rank) as (file, info):
        entry = view.of_token(file.reader.catalogue(), info.token)
        content = restore.check_where(file.reader, entry, keep, kept_max)
        return None if content is None else _dict(content)


def _dict(content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CorruptionError("its state is not a dict")
    return content


@contextlib.contextmanager
def _part(group: Group, rank: int) -> Iterator[tuple[PoolFile, VersionInfo]]:
    pool, info = group.parts[rank]
    try:
        with contextlib.closing(PoolFile(pool)) as file:
            yield file, info
    except CorruptionError as error:
        raise CorruptionError(f"{name_of(group)}, the part of rank {rank}: {error}") from error


# Checkpoint directories: each rank has a reference to its part in it.


def shard_name(rank: int, count: int) -> str:
    """The name of the reference to a rank's part in a checkpoint directory."""
    return f"rank-{rank}-of-{count}.shard"


def is_shard(path: str) -> bool:
    """True if ``path`` is called what a reference to a rank's part is called, and is one; or if
    it is the one in the place of torch's metadata."""
    name = os.path.basename(path)
    if name != STOCK_METADATA and not _SHARD.fullmatch(name):
        return False
    reference = files_of.read(path)
    return reference is not None and part_of(reference.model) is not None


def shards_at(directory: str) -> list[Reference]:
    """The references to parts in a checkpoint directory, newest first.

    None where torch's own storage, or nobody, wrote into it last. Raises ``CorruptionError`` for
    a damaged reference.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [os.path.join(directory, name) for name in names if _SHARD.fullmatch(name)]
    found = [reference for path in paths if (reference := files_of.read(path)) is not None]
    found.sort(key=lambda reference: -reference.written_ns)
    stock_ns = _stock_ns(directory)
    return [] if found and stock_ns > found[0].written_ns else found


def _stock_ns(directory: str) -> int:
    """When torch's own storage wrote its metadata; 0 if it is not there."""
    path = os.path.join(directory, STOCK_METADATA)
    try:
        return 0 if files_of.read(path) is not None else os.stat(path).st_mtime_ns
    except (OSError, PortusError):
        return 0


def has_stock(directory: str) -> bool:
    """True if a checkpoint of torch's own storage is in a directory."""
    return _stock_ns(directory) > 0


@dataclass(frozen=True, slots=True)
class Directory:
    """What the checkpoint directory at ``path`` leads to: groups of a model, by id, on storage
    hosts."""

    path: str
    place: Place
    model: str
    ids: tuple[bytes, ...]


def directory_at(path: str) -> Directory | None:
    """What the checkpoint directory at ``path`` leads to; None if it is not one of Portus.

    Waits for what this process saves there, and, for a limited time, for other ranks that are
    about to commit. Raises ``UsageError`` for a pool that may not be opened.
    """
    references = shards_at(path)
    if not references:
        return None
    _await_saves(references)
    references = shards_at(path) or references
    model = _part_named(path, references[0])[0]
    place = _place_led_to(path, references)
    ids = dict.fromkeys(bytes.fromhex(each.token)[:ID_SIZE] for each in references)
    found = Directory(path, place, model, tuple(ids))
    _await(found, references[0].written_ns)
    return found


def _await_saves(references: Iterable[Reference]) -> None:
    """Wait for what this process saves there."""
    for reference in references:
        for pool in POOLS.open_ones():
            pool.await_saves(None, bytes.fromhex(reference.token))


def _part_named(path: str, reference: Reference) -> tuple[str, int, int]:
    part = part_of(reference.model)
    if part is None:
        raise CorruptionError(f"{path}: {reference.model!r} is not the name of a rank's part")
    return part


def _place_led_to(path: str, references: list[Reference]) -> Place:
    """All storage hosts that may have a part: those that have a pool of a reference, and what was
    configured with them. One of the first reference that is found: one may be lost."""
    problem: UsageError | None = None
    pools = {reference.pool: reference for reference in reversed(references)}
    for reference in reversed(pools.values()):
        _, rank, count = _part_named(path, reference)
        try:
            pool = pool_of(os.path.join(path, shard_name(rank, count)))
            hosts = hosts_of({bytes.fromhex(each) for each in pools})
            return Place.named([str(each) for each in hosts or [pool]])
        except UsageError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _await(directory: Directory, written_ns: int) -> None:
    """Return once the newest group is complete, or none of its missing ranks is saving."""
    while 0 <= time.time() - written_ns / 1e9 < AWAITED_S_MAX:
        groups = [g for g in census(directory.place).groups if g.id == directory.ids[0]]
        is_complete = bool(groups) and groups[0].is_complete
        is_saving = any(map(has_writer, directory.place.hosts))
        if is_complete or not is_saving or is_nested():
            return
        time.sleep(_POLL_S)


def has_writer(pool: Place) -> bool:
    """True while somebody has the pool open for saving, or saves to that host."""
    try:
        with contextlib.closing(PoolFile(pool)) as file:
            return file.has_writer()
    except PortusError:
        return False
