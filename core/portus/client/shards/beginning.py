"""What a sharded job begins with: on empty disks, what its run has in the mirror.

One rank looks, and all put back what is wanted: each part is fetched once, by one rank, into the
pool file of that part. So a load reads pools, as after any restart, at any number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from portus.client.files.home import FileHome
from portus.client.loading.view import PoolFile
from portus.client.shards.grouped import Census, census, name_of, pool_of_part
from portus.client.shards.mirrored_groups import GroupMirror, MirroredRun, mirror_in, opened
from portus.errors import (
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.index.groups import ID_SIZE, Group, Left, part_model, part_token
from portus.index.place import Place
from portus.mirror.fetching import fill
from portus.mirror.mirror import Mirror
from portus.mirror.objects import State
from portus.spec import VersionInfo

_log: Final = logging.getLogger("portus")


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a job begins with, as one rank found it. complete: ids of the groups that are complete
    in the mirror, newest last; None: it did not answer. wanted: which groups are to be put back
    into the pools, oldest first, each with its number of ranks and its step. newest: of each part
    that was looked at, by rank and number of ranks, the newest entry of its log: nobody has to list
    it once more. left: all groups of the mirror, complete or not, newest last; referred: ids of
    those that reference files led to."""

    complete: tuple[bytes, ...] | None
    wanted: tuple[tuple[bytes, int, int], ...] = ()
    newest: Mapping[tuple[int, int], int] = field(default_factory=dict)
    left: tuple[Left, ...] = ()
    referred: frozenset[bytes] = frozenset()


def beginning(mirror: GroupMirror, place: Place) -> Beginning:
    """On one rank, before a job saves: what its pools, at ``place``, are to get from the mirror. If
    they have the newest complete group of it, or went on from there, nothing; if they have none of
    their own, the newest one, and what reference files led to.

    Raises ``UsageError`` if the run went on elsewhere, and for wrong credentials and the like;
    ``TransportError`` if the store cannot be asked and no complete group is here: nobody knows then
    whether there is something to go on from.
    """
    here = census(place, mirror.model) if os.path.isdir(place.path) else Census(place, [])
    own = [group for group in here.groups if group.is_complete]
    try:
        found = mirror.look()
    except (TransportError, MediumError) as error:
        if not own:
            raise
        _log.warning("portus: %s is behind; retrying: %s", mirror.address, error)
        return Beginning(None)
    complete = found.complete
    begun = Beginning(
        tuple(group.id for group in complete),
        newest={part: state.number for part, state in found.states.items()},
        left=tuple(map(Left.of, found.groups)),
        referred=frozenset(found.referred),
    )
    if not complete or not _is_behind(complete[-1], found, own, here):
        return begun
    if not {group.id for group in own} <= set(begun.complete or ()):
        raise UsageError(
            f"{place}: model {mirror.model!r} went on elsewhere: the newest that "
            f"{mirror.address} has is {name_of(complete[-1])}, of other pools, and the newest "
            f"here is {name_of(own[-1])}. To resume from the mirror, move these pools away; to "
            "resume from here, use another mirror, or mirror='none'"
        )
    there = {group.id for group in own}
    wanted = [
        group
        for group in complete
        if group.id not in there and (group is complete[-1] or group.id in found.referred)
    ]
    _log.warning(
        "portus: %s: %d checkpoints of model %r, %d bytes, are fetched from %s",
        place,
        len(wanted),
        mirror.model,
        sum(info.size for group in wanted for _, info in group.parts.values()),
        mirror.address,
    )
    return dataclasses.replace(
        begun, wanted=tuple((group.id, group.count, group.step) for group in wanted)
    )


def _is_behind(newest: Group, found: MirroredRun, own: Sequence[Group], here: Census) -> bool:
    """True if a training goes on from ``newest``, of the mirror, and not from what is here."""
    if any(group.id == newest.id for group in own):
        return False
    first = pool_of_part(here.place, part_model(newest.model, 0, newest.count))
    try:
        with contextlib.closing(PoolFile(first)) as file:
            commit = file.reader.catalogue().root.sequence
            infos = file.versions()
            if any(info.token == part_token(newest.id, 0) for info in infos):
                return not own or _time_ns(own[-1]) < _time_ns(newest)  # other parts were lost
            infos = [info for info in infos if _is_of(info, own)]
            state = found.states[0, newest.count]
            ids = {group.id for group in found.complete}
            complete = tuple(each for each in state.versions if each.token[:ID_SIZE] in ids)
            return replace(state, versions=complete).is_ahead_of(file.uuid, infos, commit)
    except PortusError:  # no such pool is here: nothing but the clock tells
        return not own or _time_ns(own[-1]) < _time_ns(newest)


def _is_of(info: VersionInfo, groups: Sequence[Group]) -> bool:
    return any(info.token[:ID_SIZE] == group.id for group in groups)


def _time_ns(group: Group) -> int:
    return group.parts[min(group.parts)][1].time_ns


def put_back(mirror: GroupMirror, place: Place, begun: Beginning, rank: int, count: int) -> None:
    """On rank ``rank`` of ``count``: commit this rank's share of what is wanted to pool files at
    ``place``, each under its token, and put the reference files back that led there. Part j is the
    business of rank j modulo ``count``: so each is fetched once, whatever the number of ranks. What
    is there already is left as it is.

    Blocks. Raises what ``fill`` raises.
    """
    shares: dict[tuple[int, int], list[bytes]] = {}
    for group, ranks, _ in begun.wanted:
        for part in range(rank, ranks, count):
            shares.setdefault((part, ranks), []).append(part_token(group, part))
    if not shares:
        return
    with opened(mirror.address) as store:
        for (part, ranks), tokens in shares.items():
            model = part_model(mirror.model, part, ranks)
            source = mirror_in(store, mirror.address, model, begun.newest.get((part, ranks)))
            state = source.read()
            versions = tuple(each for each in state.versions if each.token in tokens)
            if len(versions) < len(tokens):
                raise StaleError(f"{mirror.address}: a part of {model!r} was removed meanwhile")
            _fill(source, replace(state, versions=versions), FileHome(place, model, None))


def _fill(source: Mirror, state: State, home: FileHome) -> None:
    home.create()
    writer = home.open()
    try:

        def infos() -> list[VersionInfo]:
            return [entry.info for entry in writer.catalogue().entries()]

        keeper = home.keeper(writer)
        fill(
            source,
            state,
            writer,
            lambda said, info: keeper.put_back(said.path, info, said.part),
            infos,
            everything=True,
        )
    finally:
        home.close(made=True)
