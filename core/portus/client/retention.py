"""What a rank of a sharded job may let go of, and when, without a look at the other ranks' parts.

Which groups are complete, the ranks tell each other (``portus.client.job.exchange``). What was
there before they began, one of them looks up, once, and tells the others (``Past``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence, Set
from typing import Final

from portus.client.job.exchange import Heard
from portus.client.run import Run
from portus.client.shards.grouped import (
    Census,
    census,
    versions_at,
)
from portus.errors import PortusError
from portus.index.groups import (
    ID_SIZE,
    Group,
    Past,
    cut_off,
    leftovers,
    part_model,
    part_token,
    surplus,
)
from portus.index.keep import Keep
from portus.index.place import Place
from portus.spec import VersionInfo

_log: Final = logging.getLogger("portus")

_MADE_MAX: Final = 64
"""Groups that a job remembers to have begun."""


class Retention:
    """The groups that one rank knows of, and which of its parts may go. The thread that saves
    reports what ranks say, and the worker asks at each commit. Takes no lock: the thread that saves
    may be held up in a signal handler."""

    def __init__(self, run: Run, keep: Keep | None) -> None:
        """keep: which complete groups stay; None: all."""
        self._run: Final = run
        self._keep: Final = keep
        self.stand(0, 1)

    def stand(self, rank: int, count: int) -> None:
        """Become rank ``rank`` of ``count``, and forget what was known: it was of other jobs."""
        self._rank, self._count = rank, count
        self._made: deque[bytes] = deque(maxlen=_MADE_MAX)
        last = self._keep.last if self._keep else 0
        self._complete: deque[bytes] = deque(maxlen=_MADE_MAX + last)
        self._stayed: frozenset[bytes] = frozenset()
        """Those of which this rank had its part when it was asked last what goes. On the worker."""
        self._lost: deque[tuple[bytes, int]] = deque(maxlen=_MADE_MAX)
        self._past = Past()
        self._shares: set[str] = set()
        self.is_told = False
        """True once it is known what was there before."""

    def look(self) -> Past | None:
        """Return the groups that exist now; None if they cannot be read. Called on one rank."""
        try:
            found = census(self._run.place, self._run.name)
        except PortusError as error:
            _log.warning(
                "portus: earlier checkpoints of model %r cannot be read, and stay until this "
                "job has made as many checkpoints as are kept: %s",
                self._run.name,
                error,
            )
            return None
        return Past.of(
            found.groups,
            self._count,
            is_whole=not found.silent,
            is_moved=lambda group: self._is_moved(group, found),
        )

    def _is_moved(self, group: Group, found: Census) -> bool:
        """True if a rank of that group had another one of several hosts, as far as is seen. An
        address says nothing: a host may have come back under another."""
        place = self._run.place
        return any(
            found.pools[pool] != found.pools.get(place.of_rank(rank), found.pools[pool])
            for rank, (pool, _) in group.parts.items()
        )

    def look_again(self) -> None:
        """Note groups that have become complete without a report from the ranks. For the end, when
        there is no next save. Raises nothing."""
        with contextlib.suppress(PortusError):
            groups = census(self._run.place, self._run.name).groups
            self._note({group.id for group in groups if group.is_complete})

    # On the thread that saves.

    def begin(self, group: bytes) -> None:
        """A save of all ranks begins."""
        self._made.append(group)

    def tell(self, past: Past) -> None:
        """Set the groups that existed before this job began."""
        self._past, self.is_told = past, True
        self._complete.extend(past.complete)
        self._shares = {
            part_model(self._run.name, rank, count)
            for count in {group.count for group in past.others}
            for rank in range(self._rank, count, self._count)
        }

    def hear(self, heard: Heard) -> None:
        """All ranks said how their saves ended."""
        if heard.count != self._count:
            return  # of some ranks only
        self._lost.extend(heard.lost)
        self._note(heard.complete)

    # On the worker, and at the end.

    def committed(self, group: bytes, *, is_last: bool) -> None:
        """Note ``group`` as complete if this rank's part, committed just now, is the last one."""
        if is_last:
            self._note({group})

    def is_replaced(self, group: bytes) -> bool:
        """True if ``group``, or one that this job made after it, is complete."""
        made = list(self._made)
        first = made.index(group) if group in made else 0
        return not set(self._complete).isdisjoint(made[first:])

    def going(self, own: Sequence[VersionInfo]) -> tuple[list[int], list[int]]:
        """Ids of the versions of this rank that may go with its next commit, ``own`` being all of
        them: those of groups that will never be complete, and all."""
        if self._count == 1:
            self._note({info.token[:ID_SIZE] for info in own})
        complete = {*self._complete, *self._past.complete, *self._stayed}
        self._stayed = frozenset(info.token[:ID_SIZE] for info in own) & complete
        never = [info.id for info in own if self._is_lost(info.token[:ID_SIZE])]
        never += cut_off(own, complete, self._past.incomplete)
        settled = {*complete, *self._past.incomplete, *list(self._made)}
        unseen = {info.token[:ID_SIZE] for info in own} - settled
        older = [] if self._keep is None else surplus(own, complete, self._keep, unseen)
        return never, sorted({*never, *older})

    def succeed(self, own: bytes) -> None:
        """Let go of what this job takes the place of: parts that jobs of other numbers of ranks
        left, and those of this rank in another pool than ``own``. Rank i of them is the business of
        rank i mod N of this one. What somebody has open stays until the next look, and so does what
        reference files lead to. Raises nothing."""
        newer = len(set(self._complete).difference(self._past.complete))
        if self._keep is None or not newer or not self._shares:
            return
        place, ids = self._run.place, {group.id for group in self._past.others}
        going = leftovers(self._past.others, newer, self._keep, time.time_ns())
        now = part_model(self._run.name, self._rank, self._count)
        there: dict[tuple[str, Place], list[int]] = {}
        left = set()
        try:
            for pool, uuid, info in versions_at(place.hosts):
                group = info.token[:ID_SIZE]
                if info.model in self._shares and group in ids and (info.model, uuid) != (now, own):
                    left.add(info.model)
                    if group in going:
                        there.setdefault((info.model, pool), []).append(info.id)
        except PortusError as error:
            _log.warning(
                "portus: parts that others left of %r stay for now: %s", self._run.name, error
            )
            return
        self._shares &= left
        for (part, at), versions in there.items():
            self._let_go(part, at, versions)

    def _let_go(self, part: str, at: Place, versions: list[int]) -> None:
        try:
            with self._run.part(part, at) as checkpointer:
                checkpointer.part.let_go(versions)
        except PortusError as error:
            _log.warning("portus: parts that %r left stay for now: %s", part, error)

    def _note(self, complete: Set[bytes]) -> None:
        """Groups are complete; of those that this job made."""
        known = set(self._complete)
        self._complete.extend(group for group in list(self._made) if group in complete - known)

    def _is_lost(self, group: bytes) -> bool:
        """True if a rank said that it has no part of that group, and has none: it may have failed
        when its part was there already."""
        ranks = [rank for each, rank in list(self._lost) if each == group]
        return group not in self._complete and any(not self._has_part(group, r) for r in ranks)

    def _has_part(self, group: bytes, rank: int) -> bool:
        """False where that cannot be seen: then what the rank said counts."""
        try:
            found = versions_at([self._run.place.of_rank(rank)])
        except PortusError:
            return False
        return part_token(group, rank) in {info.token for _, _, info in found}
