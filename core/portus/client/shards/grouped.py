"""Groups in pool directories and on storage hosts: which there are, which one a load takes, and
why not another.

Loads take complete groups only. What stands in the way of one is said rank by rank: a pool file
that is not there, one that cannot be read, one that never committed this save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from portus.client.files import reference as files_of
from portus.client.job.exchange import standing
from portus.client.loading import restore, view
from portus.client.loading.resolve import AWAITED_S_MAX, POOLS, hosts_of, pool_of
from portus.client.loading.view import PoolFile
from portus.client.shards.cuts import CHECKPOINT_ID, FORMAT_KEY
from portus.client.shards.mirrored_groups import MirrorPlace, opened_part
from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.format.reference import Reference
from portus.index import roll
from portus.index.directory import generations, newest_generation, pools_at
from portus.index.groups import ID_SIZE, Group, groups_of, part_model, part_of, part_token
from portus.index.place import Place, PlaceKind
from portus.media.calls import is_nested
from portus.protocol.address import is_address
from portus.spec import VersionInfo, checked_step

_log: Final = logging.getLogger("portus")

_SHARD: Final = re.compile(r"rank-(?:0|[1-9][0-9]{0,6})-of-[1-9][0-9]{0,6}\.shard")
STOCK_METADATA: Final = ".metadata"
"""What torch's own storage writes last into a checkpoint directory, and looks for there. Ours has a
reference of this name: torch's storage fails on it, where it would find nothing and start afresh.
"""

_NAMED_MAX: Final = 8
"""Ranks that a message tells about."""

_SINCE_MAX: Final = 4
"""Groups newer than all that the roll names: those that were under way when a job ended."""

_POLL_S: Final = 0.02


@dataclass(slots=True)
class Census:
    """What the pool files of a directory hold now, or the pools on storage hosts.

    groups: newest last. held: by the name of a rank's part, the steps it has. pools: the identity
    of each. unreadable: by path, why a pool could not be read; also of one of several hosts that
    does not answer. By a glance alone, ids of groups that the roll does not name: since: newer than
    all that it names; unsure: older, and complete or not.
    """

    place: Place
    groups: list[Group]
    held: dict[str, list[int]] = field(default_factory=dict)
    pools: dict[Place, bytes] = field(default_factory=dict)
    unreadable: dict[str, PortusError] = field(default_factory=dict)
    unsure: frozenset[bytes] = frozenset()
    since: frozenset[bytes] = frozenset()

    @property
    def silent(self) -> dict[str, PortusError]:
        """The storage hosts that could not be read: any part may be there."""
        return self.unreadable if self.place.is_host else {}

    def is_certain(self, group: Group) -> bool:
        """True if no newer group may be complete though it does not look so."""
        newer = self.groups[self.groups.index(group) + 1 :]
        return self.unsure.isdisjoint(each.id for each in newer)


def with_mirrored(found: Census, mirrored: Sequence[Group]) -> Census:
    """What is in pools and in a mirror together: each part from a pool, where one has it.
    mirrored: newest last."""
    own = {group.id: group for group in found.groups}
    both = []
    for each in mirrored:
        here = own.pop(each.id, None)
        parts = {**each.parts, **(here.parts if here is not None else {})}
        both.append(Group(each.model, each.step, each.id, each.count, parts))
    return replace(found, groups=[*own.values(), *both])


def pool_of_part(place: Place, part: str) -> Place:
    """The pool that a rank saves its part to: a file of its own, or a host's."""
    named = part_of(part)
    pool = place.of_rank(named[1] if named else 0).pool_of(part)
    return pool if pool.is_host else Place(pool.kind, newest_generation(pool.path)[1])


def census(place: Place, model: str | None = None) -> Census:
    """Look at every pool of a place, whoever is to save there. A damaged one is in
    ``unreadable``, and one of several storage hosts that does not answer.

    Raises ``UsageError`` if there is no pool of this name, ``TransportError`` if no storage host
    answers.
    """
    infos: list[tuple[Place, VersionInfo]] = []
    found = Census(place, [])
    for pool in pools_at(place):
        try:
            with contextlib.closing(PoolFile(pool)) as file:
                infos += [(pool, info) for info in file.versions()]
                found.pools[pool] = file.uuid
        except (CorruptionError, MediumError, TransportError) as error:
            found.unreadable[pool.path] = error
    if not found.pools:
        for silent in found.silent.values():
            if isinstance(silent, TransportError):
                raise silent
    found.groups = groups_of(infos, model)
    for _, info in infos:
        found.held.setdefault(info.model, []).append(info.step)
    return found


def glance(place: Place, model: str) -> Census | None:
    """The groups of a model that the first rank has, for as many opens with any number of ranks:
    which are complete, the roll says, and the parts themselves of those that were committed since.
    None where only a look at all parts can tell.

    Parts of a group that the roll names are looked for when they are asked for, and may be gone
    (``StaleError``). An older group that the roll does not name is ``unsure``.
    """
    named = frozenset(roll.read(place.path, model)) if place.is_directory else frozenset()
    if not named:
        return None
    try:
        files = roll.part_files(place.path, model)
        first = [path for (rank, _), paths in files.items() if rank == 0 for path in paths]
        pools = [Place(PlaceKind.FILE, path) for path in first]
        groups = groups_of(((pool, info) for pool, _, info in versions_at(pools)), model)
    except (OSError, PortusError):
        return None
    sure = [
        group.id in named and all((rank, group.count) in files for rank in range(group.count))
        for group in groups
    ]
    last = max((number for number, is_sure in enumerate(sure) if is_sure), default=-1)
    since = groups[last + 1 :]
    if last < 0 or len(since) > _SINCE_MAX:
        return None
    for group, is_sure in zip(groups, sure, strict=True):
        known = _Known(place, group)
        if is_sure:
            group.parts = known
        elif group in since:
            group.parts = known.there()
    unsure = {group.id for group, is_sure in zip(groups[:last], sure, strict=False) if not is_sure}
    newer = frozenset(group.id for group in since)
    return Census(place, groups, unsure=frozenset(unsure), since=newer)


class _Known(Mapping[int, tuple[Place, VersionInfo]]):
    """The parts of a group that is said to be complete, each looked for when it is asked for.

    Raises ``StaleError`` where one is not found: what was said is not so any more, or the pool
    cannot be read.
    """

    def __init__(self, place: Place, group: Group) -> None:
        self._place: Final = place
        self._model: Final = group.model
        self._id: Final = group.id
        self._count: Final = group.count
        self._found: Final = dict(group.parts)

    def __getitem__(self, rank: int) -> tuple[Place, VersionInfo]:
        if rank not in range(self._count):
            raise KeyError(rank)
        found = self._found.get(rank)
        if found is None:
            found = self._found[rank] = self._look(rank)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def __len__(self) -> int:
        return self._count

    def there(self) -> dict[int, tuple[Place, VersionInfo]]:
        """The parts themselves, if all are there; else some of them. Ranks commit at about the
        same time, so mostly the first that is looked at tells."""
        with contextlib.suppress(StaleError):
            for rank in reversed(range(self._count)):
                self[rank]
        return self._found

    def _look(self, rank: int) -> tuple[Place, VersionInfo]:
        part, token = part_model(self._model, rank, self._count), part_token(self._id, rank)
        try:
            with contextlib.suppress(PortusError):  # the first generation, without a look for more
                return _version_of(token, [self._place.pool_of(part)])
            return _version_of(token, pools_of_part(self._place, part))
        except PortusError as error:
            raise StaleError(
                f"{self._place}: a group of {self._model!r} has no part of rank {rank} (any more): "
                f"{error}"
            ) from error


def _version_of(token: bytes, pools: Iterable[Place]) -> tuple[Place, VersionInfo]:
    for pool, _, info in versions_at(pools):
        if info.token == token:
            return pool, info
    raise StaleError(f"version {token.hex()} is in no pool of it")


def versions_at(pools: Iterable[Place]) -> list[tuple[Place, bytes, VersionInfo]]:
    """What is in some pools, with their places and identities. Raises as opening a pool does."""
    found = []
    for pool in pools:
        with contextlib.closing(PoolFile(pool)) as file:
            found += [(pool, file.uuid, info) for info in file.versions()]
    return found


def pools_of_part(place: Place, part: str) -> list[Place]:
    """Where a rank's part may be: the generations of its pool file, or any host."""
    if place.is_host:
        return place.hosts
    pool = place.pool_of(part)
    return [Place(pool.kind, path) for path in generations(pool.path).values()]


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
    unread = [f"{path} cannot be read: {error}" for path, error in found.unreadable.items()]
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
    part = part_model(group.model, rank, group.count)
    path = str(found.place if found.place.is_host else pool_of_part(found.place, part))
    if path in found.unreadable:
        return f"rank {rank}: its pool cannot be read: {found.unreadable[path]}"
    if found.silent:
        return f"rank {rank}: its part is not on {_some([str(pool) for pool in found.pools])}"
    if part in found.held:
        steps = found.held[part][-_NAMED_MAX:]
        return f"rank {rank}: its pool {path} has steps {steps}, this save was not committed there"
    if found.place.is_host:
        return f"rank {rank}: nothing of it is on {path}, this save was not committed there"
    if os.path.exists(path):
        return f"rank {rank}: its pool {path} is empty, this save was not committed there"
    return f"rank {rank}: its pool file {path} is not there: lost, or on another file system"


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


def fill_part(group: Group, rank: int, targets: Mapping[str, torch.Tensor]) -> set[str]:
    """Copy what a rank's part holds, by key path, straight over those of ``targets`` for which that
    can be done; which these were. After ``check_part``. None if the part is on a storage host or in
    a mirror: the way may fail halfway. Raises as ``load_part``; then targets hold anything."""
    pool = group.parts[rank][0]
    if pool.is_host or isinstance(pool, MirrorPlace):
        return set()
    with _part(group, rank) as (file, info):
        entry = view.of_token(file.reader.catalogue(), info.token)
        return restore.fill_where(file.reader, entry, targets)


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
        with _opened(pool, info) as file:
            yield file, info
    except CorruptionError as error:
        raise CorruptionError(f"{name_of(group)}, the part of rank {rank}: {error}") from error


@contextlib.contextmanager
def _opened(pool: Place, info: VersionInfo) -> Iterator[PoolFile]:
    if isinstance(pool, MirrorPlace):
        with opened_part(pool, info.model) as reader:
            yield PoolFile(pool, reader)
        return
    with contextlib.closing(PoolFile(pool)) as file:
        yield file


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
    """What the checkpoint directory at ``path`` leads to: groups of a model, by id, in a pool
    directory or on a storage host."""

    path: str
    place: Place
    model: str
    ids: tuple[bytes, ...]


def directory_at(path: str) -> Directory | None:
    """What the checkpoint directory at ``path`` leads to; None if it is not one of Portus.

    Waits for what this process saves there, and, for a limited time, for other ranks that are
    about to commit. Raises ``UsageError`` for a pool that may not be opened.
    """
    found = _by_the_roll(path)
    if found is not None:
        return found
    references = shards_at(path)
    if not references:
        return None
    _await_saves(references)
    references = shards_at(path) or references
    model, _, count = _part_named(path, references[0])
    place = _place_led_to(path, references)
    ids = dict.fromkeys(bytes.fromhex(each.token)[:ID_SIZE] for each in references)
    found = Directory(path, place, model, tuple(ids))
    _await(found, count, references[0].written_ns)
    return found


def _by_the_roll(path: str) -> Directory | None:
    """What the directory leads to, by the references of the first rank and of this one: where both
    lead to a group that is known to be complete. None where all of them have to be read."""
    try:
        found = [files_of.read(os.path.join(path, STOCK_METADATA))]
        if found[0] is None or is_address(found[0].pool_path):
            return None
        found.append(files_of.read(os.path.join(path, shard_name(*standing()))))
        references = [each for each in found if each is not None]
        model = _part_named(path, references[0])[0]
        ids = {bytes.fromhex(each.token)[:ID_SIZE] for each in references}
        if len(ids) > 1:
            return None
        _await_saves(references)
        place = _place_led_to(path, references[:1])
    except PortusError:
        return None
    glanced = glance(place, model)
    if glanced is None:
        return None
    for group in reversed(glanced.groups):
        if group.id in ids and group.is_complete:
            return Directory(path, place, model, tuple(ids))
        if group.id in glanced.since and group.is_complete:
            return None  # references of other ranks may lead to it
    return None


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
    """The place of the first reference whose pool is there: one may be lost. Of storage hosts, all
    that may have a part: those that have a pool of a reference, and what was configured with them.
    """
    problem: UsageError | None = None
    pools = {reference.pool: reference for reference in reversed(references)}
    for reference in reversed(pools.values()):
        _, rank, count = _part_named(path, reference)
        try:
            pool = pool_of(os.path.join(path, shard_name(rank, count)))
            if not pool.is_host:
                return Place.named(os.path.dirname(pool.path))
            hosts = hosts_of({bytes.fromhex(each) for each in pools})
            return Place.named([str(each) for each in hosts or [pool]])
        except UsageError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _await(directory: Directory, count: int, written_ns: int) -> None:
    """Return once the newest group is complete, or none of its missing ranks is saving."""
    while 0 <= time.time() - written_ns / 1e9 < AWAITED_S_MAX:
        groups = [g for g in census(directory.place).groups if g.id == directory.ids[0]]
        missing = groups[0].missing if groups else list(range(count))
        parts = [part_model(directory.model, each, count) for each in missing]
        own = {pool_of_part(directory.place, part) for part in parts}
        if not any(map(has_writer, directory.place.hosts or own)) or is_nested():
            return
        time.sleep(_POLL_S)


def has_writer(pool: Place) -> bool:
    """True while somebody has the pool open for saving, or saves to that host."""
    try:
        with contextlib.closing(PoolFile(pool)) as file:
            return file.has_writer()
    except PortusError:
        return False
