"""Groups: one save of a sharded job, of which every rank commits a part in a pool file of its own,
or in the pool of one of several storage hosts.

What there is can be seen from the catalogues alone, whatever ranks tell each other: a part is a
version whose model is called ``<model>/rank-<rank>-of-<count>``, and whose token is the group's id
(12 bytes, random) and the rank (4 bytes, big-endian).

A group is complete when the parts of all its ranks are there. A load sees complete groups only. So
a rank may let go of a part only when a newer group is known to be complete (``surplus``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from portus.index.keep import Keep
from portus.index.place import Place
from portus.spec import VersionInfo

ID_SIZE: Final = 12

_PART: Final = re.compile(r"(.+)/rank-(0|[1-9][0-9]{0,6})-of-([1-9][0-9]{0,6})", re.DOTALL)


@dataclass(slots=True)
class Group:
    """One save of all ranks.

    parts: by rank, the place of its pool and its version; a rank that has not committed is missing.
    count: the number of ranks that saved.
    """

    model: str
    step: int
    id: bytes
    count: int
    parts: Mapping[int, tuple[Place, VersionInfo]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if every rank has committed its part."""
        return len(self.parts) == self.count

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts are not there."""
        return [rank for rank in range(self.count) if rank not in self.parts]


def new_id() -> bytes:
    """Return the id of a new group; made once, by the rank that plans."""
    return os.urandom(ID_SIZE)


COUNT_MAX: Final = 9_999_999
"""The most ranks that the name of a part can say."""


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
    parts: dict[tuple[str, int, bytes, int], dict[int, tuple[Place, VersionInfo]]] = {}
    for path, info in infos:
        part = part_of(info.model)
        if part is None or (model is not None and part[0] != model):
            continue
        name, rank, count = part
        if info.token[ID_SIZE:] != rank.to_bytes(4, "big"):
            continue  # a model that only happens to be called so
        key = (name, count, info.token[:ID_SIZE], info.step)
        there = parts.setdefault(key, {})
        found.setdefault(key, Group(name, info.step, key[2], count, there))
        there[rank] = (path, info)
    times = {group.id: _time_ns(group) for group in found.values()}
    latest: dict[tuple[str, int, Place | None], int] = {}
    for group in sorted((each for each in found.values() if 0 in each.parts), key=_commit):
        pool = group.parts[0][0]
        family = (group.model, group.count, pool if pool.is_host else None)
        times[group.id] = latest[family] = max(times[group.id], latest.get(family, 0) + 1)
    return sorted(found.values(), key=lambda group: times[group.id])


def surplus(
    own: Collection[VersionInfo],
    complete: Collection[bytes],
    keep: Keep,
    unseen: Collection[bytes] = (),
) -> list[int]:
    """Ids of the versions of one rank that may go: those older than the newest groups that are
    complete, as many as ``keep`` says, but for what else that keeps. ``own``: the rank's versions.
    ``complete``: ids of groups known to be so. ``unseen``: of those that may be, since not all
    could be seen: of them what ``keep`` wants for good stays too.

    All ranks come to the same: steps and metrics are those of the group. Of the times of its parts
    they may differ by the seconds that a save takes, and so may when a group goes that is no longer
    ``within``.
    """
    ordered = sorted(own, key=lambda info: -info.commit)
    there = [info for info in reversed(ordered) if info.token[:ID_SIZE] in complete]
    maybe = [info for info in reversed(ordered) if info.token[:ID_SIZE] in {*complete, *unseen}]
    staying = {info.id for info in (*keep.staying(there), *keep.lasting(maybe))}
    seen = 0
    for place, info in enumerate(ordered):
        seen += info.token[:ID_SIZE] in complete
        if seen == keep.last:
            return [each.id for each in ordered[place + 1 :] if each.id not in staying]
    return []


def cut_off(
    own: Collection[VersionInfo], complete: Collection[bytes], incomplete: Collection[bytes]
) -> list[int]:
    """Ids of the versions of one rank whose groups will never be complete: some rank had no part of
    it (``incomplete``: ids of groups), and all ranks have committed a newer group since. ``own``,
    ``complete``: as for ``surplus``.

    Ranks commit in the order of the saves, so one that is past a save never commits it.
    """
    commits = [info.commit for info in own if info.token[:ID_SIZE] in complete]
    lost = [info for info in own if info.token[:ID_SIZE] in incomplete]
    return [info.id for info in lost if info.commit < max(commits, default=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What was there before a job of ``count`` ranks, or before a writer of it.

    complete, incomplete: ids of groups of as many ranks; none is in ``incomplete`` of which a part
    may only not have been seen. others: what jobs left that were of other numbers of ranks, or
    saved to other storage hosts; newest last.
    """

    complete: tuple[bytes, ...] = ()
    incomplete: tuple[bytes, ...] = ()
    others: tuple[Left, ...] = ()

    @classmethod
    def of(
        cls,
        groups: Collection[Group],
        count: int,
        *,
        is_whole: bool,
        is_moved: Callable[[Group], bool] = lambda group: False,
    ) -> Past:
        """Out of what is there of one model. is_whole: nothing there could not be read. is_moved:
        whether a rank saves to another pool now than in that group."""
        same = [group for group in groups if group.count == count]
        return cls(
            complete=tuple(group.id for group in same if group.is_complete),
            incomplete=tuple(each.id for each in same if is_whole and not each.is_complete),
            others=tuple(
                Left.of(group) for group in groups if group.count != count or is_moved(group)
            ),
        )


@dataclass(frozen=True, slots=True)
class Left:
    """A group that a job left which is over."""

    id: bytes
    count: int
    is_complete: bool
    step: int = 0
    time_ns: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, group: Group) -> Left:
        """What is told of ``group``."""
        metrics = group.parts[min(group.parts)][1].metrics
        return cls(
            group.id, group.count, group.is_complete, group.step, _time_ns(group), dict(metrics)
        )


def leftovers(others: Sequence[Left], newer: int, keep: Keep, now_ns: int) -> set[bytes]:
    """Ids of those groups that may go: with as many complete ones after them as ``keep`` says, but
    for what else that keeps. newer: how many complete groups the running job has made since it
    began: they are after all these. now_ns: Unix time in nanoseconds."""
    lasting = {
        each.id for each in keep.lasting([each for each in others if each.is_complete], now_ns)
    }
    found = set()
    for group in reversed(others):
        if newer >= keep.last and group.id not in lasting:
            found.add(group.id)
        newer += group.is_complete
    return found


def _time_ns(group: Group) -> int:
    return group.parts[min(group.parts)][1].time_ns


def _commit(group: Group) -> int:
    return group.parts[0][1].commit
