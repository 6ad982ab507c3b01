"""A rank's part of a sharded run and its mirror: all ranks copy the same group.

Each part is a model of its own, in the mirror too: with a log, a writer and terms of its own. A
group is complete in the mirror when all its parts are, so that is to be reached for groups that
nobody may have any more by then: ranks commit at their own times, and uploads take theirs.

So one group is *named*, by the first rank, when its save begins. Each rank holds its part of that
from its commit until it is copied, whatever the pool lets go of meanwhile; what is committed after
it waits. In each save the ranks tell each other how far they are, and once all have it, or one has
given up, the group of that save is the next. In the time between ranks copy what is older. At the
end of the run there is nothing to wait for, and everything that the pool has is copied.

A part goes from the mirror only if it is older than a group that is known to be complete there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from portus.client.files.run_mirror import Mirroring
from portus.client.job.exchange import UNNAMED, Parting, Progress
from portus.client.shards.mirrored_leftovers import MirroredLeftovers
from portus.errors import PortusError
from portus.index.groups import ID_SIZE, part_model, part_token
from portus.index.keep import Keep
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.mirror.address import StoreAddress
from portus.mirror.copier import Joined
from portus.mirror.fetching import place_of
from portus.mirror.objects import Fact, State
from portus.spec import VersionInfo
from portus.transport.base import Stop


@dataclass(frozen=True, slots=True)
class _Held:
    """A part that is pinned until it is copied. ``pin`` ends that."""

    info: VersionInfo
    reader: PoolReader
    entry: VersionEntry
    pin: contextlib.ExitStack


_MET_MAX: Final = 8
"""Groups that are told of at the end."""


class PartMirroring(Mirroring):
    """The mirror of the part of rank ``rank`` of ``count``, for the writer that saves it.

    What ranks say is heard on the thread that saves, which may stand still in a signal handler:
    without a lock.
    """

    def __init__(
        self,
        address: StoreAddress,
        model: str,
        rank: int,
        count: int,
        keep: Keep | None,
        *,
        wait_s: float,
        complete: Sequence[bytes] | None,
        parting: Parting,
        newest: int | None = None,
        left: MirroredLeftovers | None = None,
        is_start: bool = True,
    ) -> None:
        """model: of the run. keep: which complete groups stay; None: all. complete: ids of the
        groups that were complete in the mirror when the job began, newest last; None: nobody knows.
        parting: how ranks tell each other at the end what each has there. newest: as of ``Mirror``.
        left: what jobs of other numbers of ranks left there, on the rank that lets go of it.
        is_start: the job begins: it is an error then if the mirror may not be written.
        """
        part = part_model(model, rank, count)
        super().__init__(address, part, keep, wait_s=wait_s, newest=newest)
        self._rank: Final = rank
        self._is_start: Final = is_start
        self._named = UNNAMED
        self._waiting: frozenset[bytes] = frozenset()
        """Groups that began after the one that is named."""
        self._is_told = complete is not None
        self._complete = tuple(complete or ())
        self._begun: Final = frozenset(self._complete)
        self._left_there: Final = left
        self._parting: Final = parting
        self._has_met = False
        self._held: _Held | None = None

    # What the ranks tell each other.

    @property
    def named(self) -> bytes:
        """The id of the group that is mirrored first; ``UNNAMED`` before there is one."""
        return self._named

    def progress(self, *, under_way: bool) -> Progress:
        """With the named group. under_way: true while this rank saves its part of it."""
        token = part_token(self._named, self._rank)
        if self._mirror.state.version(token) is not None:
            return Progress.MIRRORED
        held, joined = self._held, self._joined
        if token in self._skipped:
            return Progress.GIVEN_UP
        if under_way or (held is not None and held.info.token == token):
            return Progress.UNDER_WAY
        there = joined is not None and any(info.token == token for info in joined.infos())
        return Progress.UNDER_WAY if there else Progress.GIVEN_UP

    def hear(self, named: bytes, progress: Collection[Progress], group: bytes) -> None:
        """All ranks told how far they are with ``named``, and the save of ``group`` begins."""
        is_complete = named != UNNAMED and set(progress) == {Progress.MIRRORED}
        if is_complete and named not in self._complete:
            self._complete = (*self._complete, named)
            added = self._mirror.state.version(part_token(named, self._rank))
            self._mirrored_ns = max(self._mirrored_ns, added.time_ns if added else 0)
        if named == UNNAMED or is_complete or Progress.GIVEN_UP in progress:
            self._named, self._waiting = group, frozenset()
        else:
            self._named, self._waiting = named, self._waiting | {group}

    def committed(self, info: VersionInfo) -> None:
        """On the worker, after a commit, and before the next one: hold what is named."""
        held, joined = self._held, self._joined
        if held is not None and held.info.token[:ID_SIZE] != self._named:
            self._let_go()
        if info.token[:ID_SIZE] == self._named and joined is not None:
            with contextlib.suppress(PortusError), contextlib.ExitStack() as stack:
                entry = stack.enter_context(joined.writer.pinned(info.id))
                with self._changed:
                    self._held = _Held(info, joined.writer, entry, stack.pop_all())
        self.wake()

    def yield_space(self) -> bool:
        """As that of ``Mirroring``; what is only held is let go of as well."""
        ended = super().yield_space()
        return self._let_go() or ended

    def close(self) -> None:
        """As that of ``Mirroring``."""
        super().close()
        self._let_go()

    def finish(self, wait_s: float) -> None:
        """As that of ``Mirroring``."""
        self._parting.begin()
        super().finish(wait_s)

    def ended(self) -> None:
        """As that of ``Mirroring``. Whoever waits for this rank waits no longer."""
        super().ended()
        if not self._has_met:
            self._has_met = True
            self._parting.shared((), lambda: True)

    def _awaited(self) -> str:
        if self._has_met and not self._failure and not self.unmirrored():
            return "other ranks are still copying their parts"
        return super()._awaited()

    def _let_go(self) -> bool:
        """Hold nothing any more, unless it is being copied; true if there was something."""
        with self._changed:
            held = self._held
            if held is None or self._copying is not None:
                return False
            self._held = None
        _end(held)
        return True

    def _catch_up_with(self, joined: Joined) -> None:
        closing = self._closing  # if it becomes so meanwhile, what waits was not looked at
        super()._catch_up_with(joined)
        if not closing or self._ended or self._has_met:
            return
        self._has_met = True
        there = {each.token for each in self._mirror.state.versions}
        own = [info.token[:ID_SIZE] for info in joined.infos() if info.token in there]
        found = self._parting.shared(own[-_MET_MAX:], lambda: self._ended)
        self._complete += tuple(each for each in own if each in found - set(self._complete))
        super()._catch_up_with(joined)

    # What is different from a run of one process.

    def _begin(self, joined: Joined) -> None:
        """What a fresh node needs was put back before, for all ranks together."""
        if self._is_start:
            self._claim_first(joined, self._mirror.state)

    def promise(self) -> bytes | None:
        return super().promise() if self._is_start else None

    def _claim(self, joined: Joined) -> None:
        if not self._is_told:  # else it was looked at, for all ranks together
            self._require_newest(joined)
        self._take_term(joined)

    def _claimed(self, joined: Joined) -> None:
        super()._claimed(joined)
        self._mirrored_ns = max(
            (
                each.time_ns
                for each in self._mirror.state.versions
                if each.token[:ID_SIZE] in self._complete
            ),
            default=0,
        )

    def _delete(self, stop: Stop) -> None:
        super()._delete(stop)
        if self._left_there is not None:
            self._left_there.let_go(len(set(self._complete) - self._begun), stop)

    def _next(self, missing: Sequence[VersionInfo]) -> VersionInfo | None:
        held = self._held
        if held is not None and self._mirror.state.version(held.info.token) is None:
            return held.info
        waiting = frozenset() if self._closing else self._waiting
        found = [info for info in missing if info.token[:ID_SIZE] not in waiting]
        return super()._next(found)

    def _copy_from(
        self, joined: Joined, info: VersionInfo, stop: Stop, facts: Sequence[Fact]
    ) -> None:
        held = self._held
        if held is None or held.info.token != info.token:
            self._mirror.copy(joined.reader_of(info), info.id, stop, facts)
            return
        self._mirror.copy_pinned(held.reader, held.entry, stop, facts)
        with self._changed:
            self._held = None
        _end(held)

    def _kept(self, state: State, infos: Sequence[VersionInfo]) -> set[bytes]:
        """The tokens of the parts that are to be mirrored: what the pool has, what is newer than
        the newest complete group, and what ``keep`` wants of the complete ones."""
        mirrored = sorted(state.versions, key=place_of)
        complete = [each for each in mirrored if each.token[:ID_SIZE] in self._complete]
        kept = {info.token for info in infos}
        newest = complete[-1:]
        is_settled = bool(newest) and newest[0].token[:ID_SIZE] == self._complete[-1]
        first = mirrored.index(newest[0]) if is_settled else 0
        kept |= {each.token for each in mirrored[first:]}
        if not self._is_told:
            kept |= {each.token for each in mirrored if each not in complete}
        # Complete ones alone are counted: of these all ranks know, so all let go of the same.
        staying = complete if self._keep is None else self._keep.staying(complete)
        return kept | {each.token for each in staying}


def _end(held: _Held) -> None:
    with contextlib.suppress(PortusError):  # the pool may have a successor, and be closed
        held.pin.close()
