"""What jobs of other numbers of ranks left in the mirror of a sharded run, and how it goes.

Their parts are models of their own, whose logs nobody writes any more. So the first rank of the job
that went on removes their versions, and collects their objects, when it collects its own. What goes
is what would go from pools, by the same rule (``index.groups.leftovers``): a group after which this
job made as many complete ones as ``keep`` says, all of them in the mirror. Never one that a pool
here still has, and none that a reference file led to whose pools cannot be seen.

The first rank's part is the last one that loses its objects: as long as that has some there may be
more, and a start or a day later goes on with it. Logs stay: a number of theirs is never used again.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Set
from typing import Final

from portus.client.shards.beginning import Beginning
from portus.client.shards.grouped import pools_of_part, versions_at
from portus.client.shards.mirrored_groups import GroupMirror, mirror_in, opened
from portus.index.groups import ID_SIZE, leftovers, part_model
from portus.index.keep import Keep
from portus.index.place import Place
from portus.mirror.mirror import Mirror
from portus.mirror.objects import FACTS_MAX, Added, Removed
from portus.mirror.store import Store
from portus.transport.abreast import abreast
from portus.transport.base import Stop

_ABREAST: Final = 8
"""Parts at once."""

_NO_POOL: Final = bytes(16)


class MirroredLeftovers:
    """See the module. For the first rank of a job of ``count``."""

    def __init__(
        self, mirror: GroupMirror, place: Place, count: int, keep: Keep, begun: Beginning
    ) -> None:
        """Asks nobody. place: of the pools. begun: what was found before this job saved."""
        self._mirror: Final = mirror
        self._place: Final = place
        self._keep: Final = keep
        self._groups: Final = [each for each in begun.left if each.count != count]
        self._referred: Final = begun.referred
        self._newest: Final = begun.newest
        self._counts: Final = sorted({each for _, each in begun.newest} - {count})
        self._began_ns: Final = time.time_ns()

    def let_go(self, newer: int, stop: Stop) -> None:
        """Remove and delete what may go. newer: how many complete groups this job has in the mirror
        by now. Whatever it raises, the next call does the rest.

        Raises what the store and the pools raise; ``UsageError`` without the right to delete;
        ``StoppedError`` within a request after ``stop`` is set.
        """
        if newer < self._keep.last or not self._counts:
            return
        going = leftovers(self._groups, newer, self._keep, time.time_ns())
        with opened(self._mirror.address) as store:
            for count in self._counts:
                if self._has_objects(store, 0, count):
                    self._let_go_of(store, count, going - self._held(count), stop)

    def _let_go_of(self, store: Store, count: int, going: Set[bytes], stop: Stop) -> None:
        def clean(rank: int) -> bool:
            if self._has_objects(store, rank, count):
                self._clean(self._part(store, rank, count), count, going, stop)
            return self._has_objects(store, rank, count)

        with contextlib.closing(abreast(clean, range(1, count), _ABREAST)) as left:
            is_left = any(list(left))
        part = self._part(store, 0, count)
        if is_left:
            self._remove(part, count, going)
        else:
            self._clean(part, count, going, stop)

    def _clean(self, part: Mirror, count: int, going: Set[bytes], stop: Stop) -> None:
        stop.check()
        self._remove(part, count, going)
        if not part.is_claimed:
            self._claim(part)
        part.collect(stop=stop)

    def _remove(self, part: Mirror, count: int, going: Set[bytes]) -> None:
        wanted = [each for each in part.read().versions if self._goes(each, count, going)]
        if not wanted:
            return
        there = {each.token for each in self._claim(part)}
        gone = [Removed(each.token) for each in wanted if each.token in there]
        for start in range(0, len(gone), FACTS_MAX):
            part.note(gone[start : start + FACTS_MAX])

    def _goes(self, added: Added, count: int, going: Set[bytes]) -> bool:
        """True for a version of a group that goes; and for one of a group that was not there as a
        whole when this job began, and so never will be."""
        group = added.token[:ID_SIZE]
        is_known = any(each.id == group for each in self._groups if each.count == count)
        return group in going if is_known else added.time_ns < self._began_ns

    def _claim(self, part: Mirror) -> tuple[Added, ...]:
        """Whoever still saves that part takes the term back, and goes on."""
        who = f"the first rank of {self._mirror.model!r}, pid {os.getpid()} on {platform.node()}"
        return part.claim(who, _NO_POOL, 0, passing=True).versions

    def _held(self, count: int) -> set[bytes]:
        """The groups of ``count`` ranks that stay, since a pool here has a part of them, or may."""
        held = set()
        for rank in range(count):
            pools = pools_of_part(self._place, part_model(self._mirror.model, rank, count))
            held |= {info.token[:ID_SIZE] for _, _, info in versions_at(pools)}
            if not pools:
                held |= self._referred
        return held

    def _part(self, store: Store, rank: int, count: int) -> Mirror:
        model = part_model(self._mirror.model, rank, count)
        return mirror_in(store, self._mirror.address, model, self._newest.get((rank, count)))

    def _has_objects(self, store: Store, rank: int, count: int) -> bool:
        return self._part(store, rank, count).has_objects()
