"""The copier of a mirror: what is committed to a pool is copied behind whoever saves, and a pool
that is new is filled from the mirror. Storage hosts have one for each model.

There is one thread. It copies the newest version that is not mirrored yet, then older ones, as long
as the pool has them. What it copies it pins, as any reader does; a save that finds no room has it
end (``yield_space``). What the pool let go of goes from the mirror too, unless ``keep`` wants it
there.

Before anything is saved, ``begin`` looks which of the two has the newer history. A pool that is new
gets the versions that the mirror has of the model. A pool whose history continued elsewhere is
reported, and not continued. Then it claims the mirror, which is its first write: where that is not
allowed, nothing ever would be mirrored.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

from portus.engine.copying.segments import Stop, StoppedError
from portus.engine.spec import VersionInfo
from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
)
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.mirror.background_copier import PAUSE_MAX_S, BackgroundCopier, ElsewhereError, who
from portus.reach.mirror.fetching import fill, missing
from portus.reach.mirror.log import SupersededError
from portus.reach.mirror.mirror import Mirror, NotMirroredError
from portus.reach.mirror.objects import Added, Fact, Removed, State
from portus.reach.mirror.opening import key_from_environment
from portus.reach.mirror.store import Store

_log: Final = logging.getLogger("portus")

_AT_ANY_TIME: Final = contextlib.nullcontext()

_COLLECT_S: Final = 24 * 3600.0
"""Between two times that what nobody needs any more is deleted."""


class Copier(BackgroundCopier):
    """Copies what is committed of one model to its mirror. Thread-safe but for ``begin``."""

    _advice = (
        "To resume from the mirror, move this pool away; to resume from here, use another mirror"
    )

    def __init__(
        self,
        store: Store,
        address: str,
        joined: JoinedPool,
        *,
        turn: AbstractContextManager[object] = _AT_ANY_TIME,
        newest: int | None = None,
        pause_max_s: float = PAUSE_MAX_S,
    ) -> None:
        """Take the parameters of ``BackgroundCopier``, and more. joined: the pool to copy from.
        turn: entered while it copies, for several that share a store. newest: as for ``Mirror``."""
        super().__init__(store, address, joined.model, wait_s=0, pause_max_s=pause_max_s)
        self._joined: Final = joined
        self._turn: Final = turn
        self._mirror: Final = Mirror(
            store, joined.model, key=key_from_environment(), name=address, newest=newest
        )
        self._collecting: Stop | None = None
        self._collected_s: float | None = None
        """When it was tried last, here or by who had the term before; None: not yet asked."""
        self._uncollected = ""
        """Why that failed last."""
        self._skipped: Final[set[bytes]] = set()
        self._unread: Final[set[bytes]] = set()
        """What could not be fetched: it stays where it is."""

    # Before the first save.

    def begin(self) -> None:
        """Fill the pool if it is behind, claim the mirror, and copy from now on. Once, or ``wake``
        does it later, for a mirror that has nothing of this model, or cannot be asked. Blocks
        while versions are fetched.

        Raises ``UsageError`` if the pool's history continued elsewhere, for wrong credentials and
        the like, and if the mirror may be read, not written; ``TransportError`` if the store cannot
        be asked and the pool is empty: then nobody knows if there is something to continue from.
        """
        joined = self._joined
        own = joined.infos()
        try:
            state = self._mirror.read()
            newest = state.newest
            if newest is not None and self._is_behind(state, newest, own):
                self._fill(state)
                joined.since = joined.writer.catalogue().root.sequence
        except (TransportError, MediumError) as error:
            if not own:
                # There may be something to resume from: beginning anew would lose it.
                raise
            self._say(error)
        else:
            try:
                with self._first_write():
                    self._claim()
            except (TransportError, MediumError) as error:
                self._say(error)  # the thread tries again
        self.wake()

    def _is_behind(self, state: State, newest: Added, own: Sequence[VersionInfo]) -> bool:
        """True if the pool is to be filled from the mirror. Raises ``UsageError`` if it has what
        the mirror has not, of a history that was left behind."""
        if not self._joined.is_behind(state, own):
            return False
        if {info.token for info in own} <= {each.token for each in state.versions}:
            return True  # it has nothing of its own
        raise self._elsewhere(newest, own)

    def _elsewhere(self, newest: Added, own: Sequence[VersionInfo]) -> ElsewhereError:
        return ElsewhereError(
            f"{self._joined.name}: model {self._model!r} continued elsewhere: the newest that "
            f"{self.address} has is step {newest.step}, of another pool, and the newest here "
            f"is step {own[-1].step if own else None}. {self._advice}"
        )

    def _fill(self, state: State) -> None:
        joined = self._joined
        found = missing(state, joined.infos())
        if found:
            _log.warning(
                "portus: %s: %d versions of model %r, %d bytes, are fetched from %s",
                joined.name,
                len(found),
                self._model,
                sum(each.size for each in found),
                self.address,
            )
        done = fill(self._mirror, state, joined.writer, found)
        self._unread.update({each.token for each in found} - {each.token for each in done})

    # While it saves.

    def finish(self, wait_s: float) -> None:
        """Wait as ``BackgroundCopier.finish`` does, and end a collection that is under way."""
        with self._changed:
            self._closing = self._wanted = True
            if self._collecting is not None:
                self._collecting.set()  # the next run does that
        super().finish(wait_s)

    def backlog(self) -> list[VersionInfo]:
        """The versions of the pool that are not mirrored, oldest commit first."""
        there = {each.token for each in self._mirror.state.versions}
        return [each for each in self._joined.infos() if each.token not in there]

    def _describe_backlog(self) -> str:
        """What is not mirrored, in words; nothing if all is."""
        left = self.backlog()
        if not left:
            return ""
        return (
            f"{len(left)} versions of model {self._model!r} are not in {self.address}, the newest "
            f"of step {left[-1].step}"
        )

    # The thread.

    def _catch_up(self) -> None:
        with self._turn:
            self._mirror_all()

    def _note_passing(self) -> None:
        self._joined.since = self._joined.writer.catalogue().root.sequence

    def _mirror_all(self) -> None:
        if not self._mirror.is_claimed:
            self._claim()
        while True:  # ends: each turn but the last mirrors something
            state, infos = self._mirror.state, self._joined.infos()
            there = {each.token for each in state.versions} | self._skipped
            missing = [info for info in infos if info.token not in there]
            # The newest first: if this machine is lost, that is what a run resumes from.
            new = missing[-1] if missing else None
            facts = self._facts(state, infos)
            if new is not None:
                self._copy(new, facts)
            elif facts:
                self._mirror.note(facts)
            else:
                self._collect()
                return

    def _collect(self) -> None:
        """All is mirrored: once a day, by the clocks of those who had the term, mend what the store
        lost, and delete what nobody needs any more. Whether that can be done changes nothing of
        what is mirrored; so what fails is tried a day later."""
        now_s, stop = time.monotonic(), Stop()
        with self._changed:
            if self._collected_s is None:
                self._collected_s = self._last_collection_s(now_s)
            is_due = self._collected_s is None or now_s - self._collected_s >= _COLLECT_S
            # Whoever waits for the end does not wait for this; the next run does it.
            if self._closing or not is_due:
                return
            self._collecting = stop
        try:
            self._mend()
            self._mirror.collect(stop=stop)
            self._uncollected = ""
        except (SupersededError, StoppedError):
            raise
        except PortusError as error:
            if str(error) != self._uncollected:
                self._uncollected = str(error)
                _log.warning(
                    "portus: objects that %s no longer needs are not deleted, and take space "
                    "there; saves and copies continue: %s",
                    self.address,
                    error,
                )
        finally:
            self._collecting = None
        # Also after a failure: without the right to delete, a try a day is enough.
        self._collected_s = now_s

    def _last_collection_s(self, now_s: float) -> float | None:
        """When the log says that it was done last, as ``time.monotonic`` counts; None for more than
        a day ago, for never, and for a time to come: of two clocks one is wrong."""
        age_s = (time.time_ns() - self._mirror.state.collected_ns) / 1e9
        return now_s - age_s if 0 <= age_s < _COLLECT_S else None

    def _mend(self) -> None:
        joined = self._joined
        for added in self._mirror.suspects():
            info = next((each for each in joined.infos() if each.token == added.token), None)
            if info is None:
                _log.error(
                    "portus: step %d lost objects in %s, and is not in the pool any more",
                    added.step,
                    self.address,
                )
                continue
            with self._uploading() as stop:
                count = self._mirror.mend(added, joined.reader_of(info), info.id, stop)
            if count:
                _log.error(
                    "portus: step %d had lost objects in %s: they were replaced from the pool",
                    added.step,
                    self.address,
                )

    def _claim(self) -> None:
        """Raises ``ElsewhereError`` if the mirror is ahead of the pool: what it has would go. The
        store may not have answered when the pool was joined."""
        state, own = self._mirror.read(), self._joined.infos()
        if state.newest is not None and self._joined.is_behind(state, own):
            raise self._elsewhere(state.newest, own)
        self._take_term(state)

    def _take_term(self, state: State, at: int | None = None) -> None:
        """Claim what says ``state``. at: as of ``Mirror.claim``."""
        joined = self._joined
        self._mirror.claim(who(), joined.writer.superblock.uuid, joined.since, at=at)
        self._collected_s = None
        newest = self._mirror.state.newest
        if newest is not None:
            self._mirrored_ns = max(self._mirrored_ns, newest.time_ns)

    def _copy(self, info: VersionInfo, facts: Sequence[Fact]) -> None:
        try:
            with self._uploading() as stop:
                self._mirror.copy(self._joined.reader_of(info), info.id, stop, facts)
            self._mirrored_ns = max(self._mirrored_ns, info.time_ns)
            self._has_copied = True
        except (CorruptionError, NotMirroredError) as error:
            # It would fail each time: the pool's own bytes are damaged, or it has no files.
            self._skipped.add(info.token)
            _log.error("portus: step %d is not mirrored: %s", info.step, error)

    def _facts(self, state: State, infos: Sequence[VersionInfo]) -> list[Fact]:
        """What is to be said besides: which versions go."""
        # What could not be fetched is missing in the pool, but must not go from the mirror.
        kept = {info.token for info in infos} | self._unread
        gone = {each.token for each in state.versions} - kept
        return [Removed(token) for token in sorted(gone)]


class JoinedPool:
    """A pool that versions of a model are copied from."""

    def __init__(self, model: str, writer: PoolWriter) -> None:
        self.model: Final = model
        self.writer: Final = writer
        self.since = writer.catalogue().root.sequence
        """The newest commit of the pool when it was joined."""

    @property
    def name(self) -> str:
        """The name of the pool, for messages."""
        return self.writer.medium.info.name

    def is_behind(self, state: State, own: Sequence[VersionInfo]) -> bool:
        """True if a mirror has the newer history. own: ``infos``."""
        commit = self.writer.catalogue().root.sequence
        return state.is_ahead_of(self.writer.superblock.uuid, own, commit)

    def infos(self) -> list[VersionInfo]:
        """The versions of the model, oldest commit first."""
        listed = self.writer.catalogue().models.get(self.model)
        return [entry.info for entry in listed.versions] if listed else []

    def reader_of(self, info: VersionInfo) -> PoolReader:
        """The pool, if it has this version. Raises ``StaleError``."""
        if info in self.infos():
            return self.writer
        raise StaleError(f"step {info.step} was removed")
