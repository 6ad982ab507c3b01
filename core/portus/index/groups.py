"""Groups: one save of a sharded job, of which every rank commits a part in a pool file of its own,
or in the pool of one of several storage hosts.

No rank tells another that it has committed. What there is can be seen from the catalogues alone:
a part is a version whose model is called ``<model>/rank-<rank>-of-<count>``, and whose token is
the group's id (12 bytes, random) and the rank (4 bytes, big-endian).

A group is complete when the parts of all its ranks are there. A load sees complete groups only. So
a rank may let go of a part only when a newer group is known to be complete (``surplus``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from portus.index.place import Place
from portus.spec import VersionInfo

ID_SIZE: Final = 12

_PART: Final = re.compile(r"(.+)/rank-(0|[1-9][0-9]{0,6})-of-([1-9][0-9]{0,6})", re.DOTALL)


@dataclass(slots=True)
class Group:
    """One save of all ranks: ``parts`` by rank, each with the path of its pool file."""

    model: str
    step: int
    id: bytes
    count: int
    parts: dict[int, tuple[Place, VersionInfo]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if every rank has committed its part."""
        return len(self.parts) == self.count

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts are not there."""
        return [rank for rank in range(self.count) if rank not in self.parts]


def new_id() -> bytes:
    """For a new group; made once, by the rank that plans."""
    return os.urandom(ID_SIZE)


def part_model(model: str, rank: int, count: int) -> str:
    """What a rank calls its part of ``model`` in its pool."""
    return f"{model}/rank-{rank}-of-{count}"


def part_of(model: str) -> tuple[str, int, int] | None:
    """The model, rank and count of ranks that the name of a part says; None for other names."""
    match = _PART.fullmatch(model)
    if match is None or int(match[2]) >= int(match[3]):
        return None
    return match[1], int(match[2]), int(match[3])


def part_token(group: bytes, rank: int) -> bytes:
    """The token of a rank's version in a group."""
    return group + rank.to_bytes(4, "big")


def groups_of(infos: Iterable[tuple[Place, VersionInfo]], model: str | None = None) -> list[Group]:
    """The groups among versions, each with the path of its pool file; of one model, or of all.

    Newest last. Those of one model and count that have rank 0's part are in the order of its
    commits, also if its clock went back; where that part is on different hosts, by the clock.
    """
    found: dict[tuple[str, int, bytes, int], Group] = {}
    for path, info in infos:
        part = part_of(info.model)
        if part is None or (model is not None and part[0] != model):
            continue
        name, rank, count = part
        if info.token[ID_SIZE:] != rank.to_bytes(4, "big"):
            continue  # a model that only happens to be called so
        key = (name, count, info.token[:ID_SIZE], info.step)
        group = found.setdefault(key, Group(name, info.step, key[2], count))
        group.parts[rank] = (path, info)
    times = {group.id: _time_ns(group) for group in found.values()}
    latest: dict[tuple[str, int, Place | None], int] = {}
    for group in sorted((each for each in found.values() if 0 in each.parts), key=_commit):
        pool = group.parts[0][0]
        family = (group.model, group.count, pool if pool.is_host else None)
        times[group.id] = latest[family] = max(times[group.id], latest.get(family, 0) + 1)
    return sorted(found.values(), key=lambda group: times[group.id])


def surplus(own: Collection[VersionInfo], groups: Collection[Group], keep: int) -> list[int]:
    """Ids of the versions of one rank that may go: those older than the ``keep`` newest groups
    that are complete. ``own``: the rank's versions. ``groups``: what is known of all ranks."""
    complete = {group.id for group in groups if group.is_complete}
    ordered = sorted(own, key=lambda info: -info.commit)
    seen = 0
    for place, info in enumerate(ordered):
        seen += info.token[:ID_SIZE] in complete
        if seen == keep:
            return [each.id for each in ordered[place + 1 :]]
    return []


def leftovers(
    older: Sequence[Group], newer: int, keep: int
) -> dict[tuple[int, int, Place | None], list[VersionInfo]]:
    """What jobs before this one left and may go, by rank, number of ranks and, if it is on one,
    storage host: versions of groups of one model with ``keep`` complete ones after them. older:
    their groups, newest last. newer: how many complete groups this job has made since it began:
    they are after all these.
    """
    found: dict[tuple[int, int, Place | None], list[VersionInfo]] = {}
    for group in reversed(older):
        if newer >= keep:
            for rank, (pool, info) in group.parts.items():
                host = pool if pool.is_host else None
                found.setdefault((rank, group.count, host), []).append(info)
        newer += group.is_complete
    return found


def never_complete(
    own: Collection[VersionInfo], groups: Collection[Group], said: Collection[bytes] = ()
) -> list[int]:
    """Ids of the versions of one rank whose groups will never be complete: a rank said that it has
    no part (``said``: ids of groups), or has a part of a newer group and not of this one. ``own``,
    ``groups``: as for ``surplus``.

    Ranks commit in the order of the saves, so one that was seen past a save never commits it.
    """
    by_id = {group.id: group for group in groups}
    past: set[int] = set()
    found = []
    for info in sorted(own, key=lambda info: -info.commit):
        group = by_id.get(info.token[:ID_SIZE])
        if group is None or group.is_complete:
            past.update(group.parts if group else ())
            continue
        if group.id in said or not past.isdisjoint(group.missing):
            found.append(info.id)
        past.update(group.parts)
    return found


def _time_ns(group: Group) -> int:
    return group.parts[min(group.parts)][1].time_ns


def _commit(group: Group) -> int:
    return group.parts[0][1].commit
