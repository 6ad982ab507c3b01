"""The copier of a mirror: copies the committed versions of a pool, in the background, and fills a
new pool from the mirror. Storage hosts have one copier for each model.

There is one thread. It copies the newest version that is not mirrored yet, then older ones, as long
as the pool has them. It pins the version that it copies, as any reader does; a save that finds no
room ends the copy (``yield_space``). Versions that the pool dropped go from the mirror too, but for
the newest ``keep`` of them.

Before the first save, ``begin`` finds which of the two has the newer history. A new pool gets the
versions of the model that the mirror has. If the pool's history continued elsewhere, ``begin``
raises. Then it claims the mirror, which is its first write: without the right to write, nothing
would ever be mirrored.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Final

from portus.engine.copying.segments import StoppedError
from portus.engine.spec import VersionInfo
from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    TransportError,
    UsageError,
)
from portus.reach.index.pool import PoolWriter
from portus.reach.mirror.background_copier import (
    PAUSE_MAX_S,
    BackgroundCopier,
    Closable,
    ElsewhereError,
    who,
)
from portus.reach.mirror.log import SupersededError
from portus.reach.mirror.mirror import Mirror, NotMirroredError
from portus.reach.mirror.objects import Added, State
from portus.reach.mirror.opening import key_from_environment
from portus.reach.mirror.store import Store, UnwritableError

_log: Final = logging.getLogger("portus")

_CARE_NS: Final = 24 * 3600 * 10**9
"""Nanoseconds between two looks for lost and for unneeded objects."""


class PoolCopier(BackgroundCopier):
    """Copies the committed versions of one model of a pool. Thread-safe."""

    def __init__(
        self,
        store: Closable,
        address: str,
        model: str,
        writer: PoolWriter,
        turn: AbstractContextManager[object],
        pause_max_s: float = PAUSE_MAX_S,
    ) -> None:
        """Take the parameters of ``BackgroundCopier``, and more. writer: of the pool to copy from.
        turn: entered while it copies, for several that share a store."""
        super().__init__(store, address, model, wait_s=0, pause_max_s=pause_max_s)
        self._writer: Final = writer
        self._turn: Final = turn
        self._skipped: Final[set[bytes]] = set()
        self._unread: Final[set[bytes]] = set()
        """The tokens of versions that could not be fetched: they stay in the copy."""

    @abstractmethod
    def _tokens_there(self) -> Collection[bytes]:
        """Return the tokens of the versions that are copied, as far as this process knows."""

    @abstractmethod
    def _copy_all(self) -> None:
        """Copy all that is missing."""

    def backlog(self) -> list[VersionInfo]:
        """Return the versions of the pool that are not copied, oldest commit first."""
        there = self._tokens_there()
        return [each for each in self._infos() if each.token not in there]

    def _infos(self) -> list[VersionInfo]:
        """Return the versions of the pool, oldest commit first."""
        listed = self._writer.catalogue().models.get(self._model)
        return [entry.info for entry in listed] if listed else []

    def _describe_backlog(self) -> str:
        """Return the backlog in words; empty if all is copied."""
        left = self.backlog()
        if not left:
            return ""
        return (
            f"{len(left)} versions of model {self._model!r} are not in {self.address}, the newest "
            f"of step {left[-1].step}"
        )

    def _catch_up(self) -> None:
        with self._turn:
            self._copy_all()

    def _note_copied(self, info: VersionInfo) -> None:
        self._mirrored_ns = max(self._mirrored_ns, info.time_ns)
        self._has_copied = True

    def _skip(self, info: VersionInfo, error: PortusError) -> None:
        """Leave out a version, because each copy of it would fail."""
        self._skipped.add(info.token)
        _log.error("portus: step %d is not mirrored: %s", info.step, error)

    def _tell_fetch(self, sizes: Sequence[int]) -> None:
        """Log that versions of these sizes are about to be fetched."""
        _log.warning(
            "portus: %s: %d versions of model %r, %d bytes, are fetched from %s",
            self._writer.medium.info.name,
            len(sizes),
            self._model,
            sum(sizes),
            self.address,
        )


class Copier(PoolCopier):
    """Copies the committed versions of one model to its mirror. Thread-safe but for ``begin``."""

    def __init__(
        self,
        store: Store,
        address: str,
        model: str,
        writer: PoolWriter,
        turn: AbstractContextManager[object],
        newest: int | None,
        keep: int,
    ) -> None:
        """Take the parameters of ``PoolCopier``, and more. newest: as for ``Mirror``. keep: as of
        ``Mirror.retire``, of the versions that the pool dropped."""
        super().__init__(store, address, model, writer, turn)
        self._since = writer.catalogue().root.sequence
        """The newest commit of the pool when this began, or when it was filled."""
        self._mirror: Final = Mirror(
            store, model, key=key_from_environment(), name=address, newest=newest
        )
        self._keep: Final = keep
        self._cared_ns = time.time_ns()
        """The time of the start, or of the last look for lost and for unneeded objects."""
        self._undeleted = ""
        """The cause of the last failed deletion."""

    # Before the first save.

    def begin(self) -> None:
        """Fill the pool if it is behind, claim the mirror, and copy from now on. Call it once. If
        the mirror has nothing of this model, or does not answer, ``wake`` may do it later. Blocks
        while versions are fetched.

        Raises ``UsageError`` if the pool's history continued elsewhere, for wrong credentials and
        the like, and without the right to write to the mirror; ``TransportError`` if the store does
        not answer and the pool is empty: then nothing says whether there is a version to resume
        from.
        """
        own = self._infos()
        try:
            with self._first_write():
                state = self._mirror.read()
                # If the pool has versions of its own, the claim says so.
                there = {each.token for each in state.added}
                if self._is_behind(state) and {info.token for info in own} <= there:
                    self._fill(state)
                self._claim()
        except (TransportError, MediumError) as error:
            if not own:
                # There may be a version to resume from: beginning anew would lose it.
                raise
            self._say(error)  # the thread tries again
        self.wake()

    def _is_behind(self, state: State) -> bool:
        """Return whether the mirror has the newer history."""
        commit = self._writer.catalogue().root.sequence
        return state.is_ahead_of(self._writer.uuid, self._infos(), commit)

    def _elsewhere(self, newest: Added) -> ElsewhereError:
        own = self._infos()
        return ElsewhereError(
            f"{self._writer.medium.info.name}: model {self._model!r} continued elsewhere: the "
            f"newest that {self.address} has is step {newest.step}, of another pool, and the "
            f"newest here is step {own[-1].step if own else None}. To resume from the mirror, move "
            "this pool away; to resume from here, use another mirror"
        )

    def _fill(self, state: State) -> None:
        found = state.missing(self._infos())
        if found:
            self._tell_fetch([each.size for each in found])
        done = self._mirror.fill(self._writer, found)
        self._unread.update({each.token for each in found} - {each.token for each in done})
        self._since = self._writer.catalogue().root.sequence

    # While it saves.

    def _tokens_there(self) -> Collection[bytes]:
        return {each.token for each in self._mirror.state.added}

    # The thread.

    def _note_passing(self) -> None:
        self._since = self._writer.catalogue().root.sequence

    def _copy_all(self) -> None:
        if not self._mirror.is_claimed:
            self._claim()
        while True:  # ends: each turn but the last mirrors something
            state, infos = self._mirror.state, self._infos()
            there = {each.token for each in state.added} | self._skipped
            missing = [info for info in infos if info.token not in there]
            if missing:
                # The newest first: if this machine is lost, that is what a run resumes from.
                self._copy(missing[-1])
                if missing[-1].token in self._skipped:
                    continue
            # Only now: the mirror never loses its newest version. One that could not be fetched is
            # missing in the pool, but stays in the mirror.
            kept = {info.token for info in infos} | self._unread
            if state.newest is not None and any(info.token in self._skipped for info in infos):
                kept.add(state.newest.token)  # what replaced it may be damaged here
            gone = [each.token for each in state.added if each.token not in kept]
            try:
                self._mirror.retire(gone, self._keep)
            except UnwritableError:
                raise
            except UsageError as error:  # no right to delete; they do not count any more
                self._say_undeleted(error)
            if not missing:
                self._care()
                return

    def _care(self) -> None:
        """Repair lost objects, and delete unneeded ones, once a day. All versions are mirrored by
        now. A failure changes no mirrored version, so it is tried again a day later."""
        # The wait for the end does not include this; the next run does it.
        if self._closing or 0 <= time.time_ns() - self._cared_ns < _CARE_NS:
            return
        try:
            self._mend()
            self._mirror.sweep()
            self._undeleted = ""
        except (SupersededError, StoppedError):
            raise
        except PortusError as error:
            self._say_undeleted(error)
        # Also after a failure: without the right to delete, a try a day is enough.
        self._cared_ns = time.time_ns()

    def _say_undeleted(self, error: PortusError) -> None:
        if str(error) != self._undeleted:
            self._undeleted = str(error)
            _log.warning(
                "portus: objects that %s no longer needs are not deleted, and take space there; "
                "saves and copies continue: %s",
                self.address,
                error,
            )

    def _mend(self) -> None:
        for added, lost in self._mirror.suspects():
            info = next((each for each in self._infos() if each.token == added.token), None)
            if info is None:
                _log.error(
                    "portus: step %d lost objects in %s, and is not in the pool any more",
                    added.step,
                    self.address,
                )
                continue
            try:
                with self._uploading() as stop:
                    self._mirror.mend(added, lost, self._writer, info.id, stop)
            except CorruptionError as error:  # of the pool: the other versions are mended
                _log.error(
                    "portus: step %d lost objects in %s, and is damaged in the pool: %s",
                    *(added.step, self.address, error),
                )
                continue
            _log.error(
                "portus: step %d had lost objects in %s: they were replaced from the pool",
                added.step,
                self.address,
            )

    def _claim(self) -> None:
        """Claim the term. Raise ``ElsewhereError`` if the mirror is ahead of the pool: its versions
        would go. The store may not have answered when the pool was joined."""
        state = self._mirror.read()
        if state.newest is not None and self._is_behind(state):
            raise self._elsewhere(state.newest)
        self._mirror.claim(who(), self._writer.uuid, self._since)
        newest = self._mirror.state.newest
        if newest is not None:
            self._mirrored_ns = max(self._mirrored_ns, newest.time_ns)

    def _copy(self, info: VersionInfo) -> None:
        try:
            with self._uploading() as stop:
                self._mirror.copy(self._writer, info.id, stop)
            self._note_copied(info)
        except (CorruptionError, NotMirroredError) as error:
            # The pool's bytes are damaged, or the version has no files.
            self._skip(info, error)
