"""The copier of a mirror: what is committed to a pool is copied behind whoever saves, and a pool
that is new is filled from the mirror. Runs have one each, storage hosts one for each model.

There is one thread. It copies the newest version that is not mirrored yet, then older ones, as long
as the pool has them. What it copies it pins, as any reader does; a save that finds no room has it
end (``yield_space``). What the pool let go of goes from the mirror too, unless ``keep`` wants it
there. Reference files go along, by their paths.

Before anything is saved, ``begin`` looks which of the two has the newer history. A pool that is new
gets from the mirror what the model had: its newest version, what its reference files lead to, and
these files. A pool whose history went on elsewhere is named, and not gone on from. Then it claims
the mirror, which is its first write: where that is not allowed, nothing ever would be mirrored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.index.keep import Keep
from portus.index.pool import PoolWriter
from portus.index.reader import PoolReader
from portus.mirror.fetching import fill, missing, place_of
from portus.mirror.log import SupersededError
from portus.mirror.mirror import Mirror
from portus.mirror.objects import Added, Fact, Referred, Removed, State, Unreferred
from portus.mirror.opening import configured_key
from portus.mirror.store import Store, UnwritableError
from portus.mirror.waiting import Show, bar
from portus.spec import VersionInfo
from portus.transport.base import Stop, StoppedError
from portus.transport.beside import Beside

_log: Final = logging.getLogger("portus")

_PAUSE_MIN_S: Final = 1.0
_PAUSE_MAX_S: Final = 60.0
"""Between two tries, where the store does not answer."""

_COLLECT_S: Final = 24 * 3600.0
"""Between two times that what nobody needs any more is deleted."""

_SHOW_S: Final = 0.2
"""How often a bar is drawn."""

_SAY_S: Final = 10.0
"""How often who waits hears how far it is."""

_READ_ALONE: Final = "it may be read, not written"
"""What a refused write means, after a read that was not."""


class Copier:
    """Copies what is committed of one model to its mirror. Thread-safe but for ``begin``."""

    _advice = (
        "To resume from the mirror, move this pool away; to resume from here, use another mirror, "
        "or mirror='none'"
    )
    _instead = "or name another mirror"
    """What else to do about a mirror that cannot be written."""

    def __init__(
        self,
        store: Store,
        address: str,
        model: str,
        keep: Keep | None,
        *,
        wait_s: float,
        turn: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        is_whole: bool = False,
        newest: int | None = None,
        pause_max_s: float = _PAUSE_MAX_S,
    ) -> None:
        """Asks nobody. address: of the store, for messages. keep: which versions stay in the
        mirror, besides those that the pool has; None: all. wait_s: the longest that ``close``
        waits. turn: entered while it copies, for several that share a store. is_whole: the mirror
        has what the pool has, no more, and an empty pool gets all of it. newest: as of ``Mirror``.
        pause_max_s: between two tries, where the store does not answer."""
        self.address: Final = address
        self._model: Final = model
        self._keep: Final = keep
        self._wait_s = wait_s
        self._turn: Final = turn
        self._is_whole: Final = is_whole
        self._pause_max_s: Final = pause_max_s
        self._store: Final = store
        self._mirror: Final = Mirror(
            self._store, model, key=configured_key(), name=self.address, newest=newest
        )
        self._changed: Final = threading.Condition()
        self._joined: Joined | None = None
        self._thread: Beside | None = None
        self._wanted = False
        """True if there may be something to do."""
        self._closing = False
        """True if the thread is to end once there is nothing to do any more."""
        self._ended = False
        """True if it is to end now."""
        self._copying: Stop | None = None
        self._collecting: Stop | None = None
        self._collected_s: float | None = None
        """When it was tried last, here or by who had the term before; None: not yet asked."""
        self._uncollected = ""
        """Why that failed last."""
        self._copies = 0
        self._has_copied = False
        """True if something was mirrored after the last failure."""
        self._skipped: Final[set[bytes]] = set()
        self._unread: Final[set[bytes]] = set()
        """What could not be fetched: it stays where it is."""
        self._failure = ""
        self._mirrored_ns = 0

    # Before the first save.

    def has_versions(self) -> bool:
        """True if there is something that a new pool is to begin with. Raises what the store
        raises."""
        return self._mirror.read().newest is not None

    def claim_for(self, pool: bytes) -> None:
        """Claim it for a pool that is to be made, and will have this identity. Raises
        ``UsageError`` if it may be read, not written."""
        self._written(lambda: self._mirror.claim(_who(), pool, 0))

    def begin(self, joined: Joined) -> None:
        """This is saved to from now on: at the start, and when the pool has a successor. Blocks
        while versions are fetched.

        Raises ``UsageError`` if the pool's history went on elsewhere, for wrong credentials and
        the like, and if the mirror may be read, not written; ``TransportError`` if the store cannot
        be asked and the pool is empty: nobody knows then whether there is something to go on from.
        """
        if self._joined is None:
            self._begin(joined)
        self.follow(joined)

    @property
    def has_begun(self) -> bool:
        """True once there is a pool that is copied."""
        return self._joined is not None

    def follow(self, joined: Joined) -> None:
        """As ``begin``, where the mirror has nothing of this model, or cannot be asked: asks
        nobody."""
        with self._changed:
            self._joined = joined
            if self._copying is not None:
                self._copying.set()
        self.wake()

    def _begin(self, joined: Joined) -> None:
        own = joined.infos()
        try:
            state = self._mirror.read()
            newest = state.newest
            if newest is not None and self._is_behind(state, newest, joined, own):
                joined.require_alone(state, newest)
                self._fill(state, joined)
                joined.since = joined.writer.catalogue().root.sequence
        except (TransportError, MediumError) as error:
            if not own:
                raise
            self._say(error)
        else:
            self._claim_first(joined, state)

    def _claim_first(self, joined: Joined, state: State) -> None:
        """Claim it for the run that begins, unless it did so already for this pool, as ``state``
        says. Raises as ``_written``."""
        uuid, own = joined.writer.superblock.uuid, self._mirror.state
        if self._mirror.is_claimed and state.writer == own.writer and own.terms[-1].pool == uuid:
            self._claimed(joined)
        else:
            self._written(lambda: self._claim(joined))

    def _written(self, claim: Callable[[], object]) -> None:
        """The first write to the mirror. Raises ``UsageError`` if that is not allowed. If the store
        does not answer, or is full, the thread tries again."""
        try:
            claim()
        except (TransportError, MediumError) as error:
            self._say(error)
        except UnwritableError as error:
            raise UnwritableError(
                f"{self.address}: nothing can be mirrored there: {_READ_ALONE}: {error}. Expected "
                f"a mirror that this process may write to: give it that right, {self._instead}"
            ) from error

    def _is_behind(
        self, state: State, newest: Added, joined: Joined, own: Sequence[VersionInfo]
    ) -> bool:
        """True if the pool is to be filled from the mirror. Raises ``UsageError`` if it has what
        the mirror has not, of a history that was left behind."""
        if not joined.is_behind(state, own):
            return False
        if {info.token for info in own} <= {each.token for each in state.versions}:
            return True  # it has nothing of its own
        raise self._elsewhere(newest, joined, own)

    def _elsewhere(
        self, newest: Added, joined: Joined, own: Sequence[VersionInfo]
    ) -> ElsewhereError:
        return ElsewhereError(
            f"{joined.name}: model {self._model!r} went on elsewhere: the newest that "
            f"{self.address} has is step {newest.step}, of another pool, and the newest here "
            f"is step {own[-1].step if own else None}. {self._advice}"
        )

    def _fill(self, state: State, joined: Joined) -> None:
        found = missing(state, joined.infos(), everything=self._is_whole)
        if found:
            _log.warning(
                "portus: %s: %d versions of model %r, %d bytes, are fetched from %s",
                joined.name,
                len(found),
                self._model,
                sum(each.size for each in found),
                self.address,
            )
        done = fill(
            self._mirror,
            state,
            joined.writer,
            joined.put_back,
            joined.infos,
            everything=self._is_whole,
        )
        self._unread.update({each.token for each in found} - {each.token for each in done})

    # While it saves.

    def wake(self) -> None:
        """Something was committed, or let go of."""
        with self._changed:
            if self._closing or self._joined is None:
                return
            self._wanted = True
            if self._thread is None:
                name = f"portus-mirror-{self._model}"
                self._thread = Beside(self._run, name)
                self._thread.start()
            self._changed.notify_all()

    def yield_space(self) -> bool:
        """A save finds no room: end the upload, whose version may hold some. True if there was one;
        it is over then, and begins again after the next commit. Blocks until the store has
        answered."""
        with self._changed:
            if self._copying is None:
                return False
            self._copying.set()
            copies = self._copies
            self._changed.wait_for(lambda: self._copies != copies)
            return True

    @property
    def lag_s(self) -> float | None:
        """Seconds of training that the loss of this machine would cost now: since the newest
        version was saved that is mirrored. None before there is one."""
        return (time.time_ns() - self._mirrored_ns) / 1e9 if self._mirrored_ns else None

    @property
    def failure(self) -> str:
        """Why it is behind; empty if nothing is wrong."""
        return self._failure

    def close(self) -> None:
        """Wait, for ``wait_s`` seconds at most, until all is mirrored that the pool has; say what
        is not. A second call after an interrupt does not wait."""
        try:
            self.finish(self._wait_s)
        except BaseException:  # Ctrl-C: whoever ends the wait does not want the next one
            self._wait_s = 0.0
            raise
        self.end()
        self._store.close()  # which ends the request that is under way
        self.ended()

    def finish(self, wait_s: float) -> None:
        """Nothing is committed any more: wait until all is mirrored, ``wait_s`` seconds at most."""
        with self._changed:
            self._closing = self._wanted = True  # once more: what waited does not any longer
            if self._collecting is not None:
                self._collecting.set()  # the next run does that
            self._changed.notify_all()
        if self._thread is not None:
            self._wait_for(self._thread, wait_s)

    def end(self) -> None:
        """End what is under way, once the store is closed. ``ended`` is to be called then."""
        with self._changed:
            self._closing = self._ended = True
            if self._copying is not None:
                self._copying.set()
            self._changed.notify_all()

    def ended(self) -> None:
        """Return when the thread is over; say what is not mirrored."""
        if self._thread is not None:
            self._thread.join()
        left = self._left()
        if left:
            _log.error("portus: the mirror is behind: %s. %s", left, self._failure)
        self._joined = None

    def _wait_for(self, thread: Beside, wait_s: float) -> None:
        """Until it has mirrored all, or ``wait_s`` have passed; at a terminal with a bar."""
        until_s, total = time.monotonic() + wait_s, len(self.unmirrored())
        with bar("portus: mirror") as show:
            while thread.is_alive():
                often_s = _SAY_S if show is None else _SHOW_S
                thread.join(max(0.0, min(often_s, until_s - time.monotonic())))
                if time.monotonic() >= until_s:
                    return
                if thread.is_alive():
                    self._say_wait(show, total)

    def _say_wait(self, show: Show | None, total: int) -> None:
        if show is None:
            text = "portus: waiting for the mirror, Ctrl-C ends that: %s. %s"
            _log.warning(text, self._awaited(), self._failure)
            return
        copying, left = self._copying, len(self.unmirrored())
        sent = f", {copying.done >> 20} MiB of the next" if copying else ""
        show(max(0, total - left), total, f"{sent}; Ctrl-C ends it. {self._failure}".rstrip())

    def unmirrored(self) -> list[VersionInfo]:
        """The versions of the pool that are not mirrored, oldest commit first."""
        joined = self._joined
        there = {each.token for each in self._mirror.state.versions}
        return [each for each in (joined.infos() if joined else ()) if each.token not in there]

    def _awaited(self) -> str:
        """What the wait at the end is for, in words."""
        return self._left() or "older versions are to be removed there"

    def _left(self) -> str:
        """What is not mirrored, in words; nothing if all is."""
        left = self.unmirrored()
        if not left:
            return ""
        return (
            f"{len(left)} versions of model {self._model!r} are not in {self.address}, the newest "
            f"of step {left[-1].step}"
        )

    # The thread.

    def _run(self) -> None:
        pause_s = _PAUSE_MIN_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closing or self._ended)
                if self._ended or not self._wanted:
                    return
                self._wanted, joined = False, self._joined
            assert joined is not None
            try:
                with self._turn():
                    self._catch_up(joined)
                pause_s, self._failure = _PAUSE_MIN_S, ""
            except StoppedError:
                self._again(None)
            except StaleError:
                self._again(0.0)  # the version went meanwhile
            except SupersededError as error:
                if not error.passing:
                    self._fail(error)
                    return
                joined.since = joined.writer.catalogue().root.sequence
                self._again(0.0)
            except ElsewhereError as error:
                self._fail(error)
                return
            except Exception as error:  # MemoryError and the like, too: else nobody hears of it
                self._say(error)
                if self._has_copied:  # it is another failure, not the same one still
                    self._has_copied, pause_s = False, _PAUSE_MIN_S
                self._again(pause_s)
                pause_s = min(2 * pause_s, self._pause_max_s)

    def _again(self, pause_s: float | None) -> None:
        """Try again after a pause; None: after the next commit, if there is to be one."""
        with self._changed:
            if pause_s is None:
                self._wanted = self._wanted or self._closing
                return
            if self._closing:
                self._changed.wait_for(lambda: self._ended, min(pause_s, _PAUSE_MIN_S))
            else:
                self._changed.wait_for(lambda: self._closing or self._ended, pause_s)
            self._wanted = True

    def _say(self, error: Exception) -> None:
        """Say why the mirror is behind, each cause once until it is over."""
        if self._ended:
            return  # the store was closed, and the cause is that of before
        foreign = not isinstance(error, PortusError)
        said = f"{_READ_ALONE}: {error}" if isinstance(error, UnwritableError) else str(error)
        text = f"{type(error).__name__}: {error}" if foreign else said
        if text != self._failure:
            self._failure = text
            _log.warning(
                "portus: %s is behind; retrying: %s",
                self.address,
                text,
                exc_info=error if foreign else None,
            )

    def _fail(self, error: PortusError) -> None:
        self._failure = str(error)
        _log.error("portus: no longer mirroring to %s: %s", self.address, error)

    def _catch_up(self, joined: Joined) -> None:
        """Mirror what is not there, until all is."""
        if not (joined.is_claimed and self._mirror.is_claimed):
            self._claim(joined)
        while True:  # ends: each turn but the last mirrors something
            state, (infos, references) = self._mirror.state, joined.read()
            there = {each.token for each in state.versions} | self._skipped
            new = self._next([info for info in infos if info.token not in there])
            facts = self._facts(state, infos, new, references)
            if new is not None:
                self._copy(joined, new, facts)
            elif facts:
                self._mirror.note(facts)
            else:
                self._collect(joined)
                return

    def _next(self, missing: Sequence[VersionInfo]) -> VersionInfo | None:
        """What to copy now, of what the pool has and the mirror has not, oldest first; None for
        nothing yet."""
        return missing[-1] if missing else None

    def _collect(self, joined: Joined) -> None:
        """All is mirrored: once a day, by the clocks of those who had the term, mend what the store
        lost, and delete what nobody needs any more. Whether that can be done changes nothing of
        what is mirrored; so what fails is tried a day later."""
        now_s, stop = time.monotonic(), Stop()
        with self._changed:
            if self._collected_s is None:
                self._collected_s = self._collected_before(now_s)
            is_due = self._collected_s is None or now_s - self._collected_s >= _COLLECT_S
            if self._closing or not is_due:
                return
            self._collecting = stop
        try:
            self._mend(joined)
            self._delete(stop)
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
        self._collected_s = now_s

    def _delete(self, stop: Stop) -> None:
        """Delete what nobody needs any more."""
        self._mirror.collect(stop=stop)

    def _collected_before(self, now_s: float) -> float | None:
        """When the log says that it was done last, as ``time.monotonic`` counts; None for more than
        a day ago, for never, and for a time to come: of two clocks one is wrong."""
        age_s = (time.time_ns() - self._mirror.state.collected_ns) / 1e9
        return now_s - age_s if 0 <= age_s < _COLLECT_S else None

    def _mend(self, joined: Joined) -> None:
        for added in self._mirror.suspects():
            info = next((each for each in joined.infos() if each.token == added.token), None)
            if info is None:
                _log.error(
                    "portus: step %d lost objects in %s, and is not in the pool any more",
                    added.step,
                    self.address,
                )
                continue
            with self._uploading(joined) as stop:
                count = self._mirror.mend(added, joined.reader_of(info), info.id, stop)
            if count:
                _log.error(
                    "portus: step %d had lost objects in %s: they were replaced from the pool",
                    added.step,
                    self.address,
                )

    def _claim(self, joined: Joined) -> None:
        """Raises ``ElsewhereError`` if the mirror is ahead of the pool: what it has would go. The
        store may not have answered when the pool was joined."""
        self._require_newest(joined)
        self._take_term(joined)

    def _require_newest(self, joined: Joined) -> None:
        state, own = self._mirror.read(), joined.infos()
        if state.newest is not None and joined.is_behind(state, own):
            raise self._elsewhere(state.newest, joined, own)

    def _take_term(self, joined: Joined, at: int | None = None) -> None:
        self._mirror.claim(_who(), joined.writer.superblock.uuid, joined.since, at=at)
        self._claimed(joined)

    def _claimed(self, joined: Joined) -> None:
        joined.is_claimed, self._collected_s = True, None
        newest = self._mirror.state.newest
        if newest is not None:
            self._mirrored_ns = max(self._mirrored_ns, newest.time_ns)

    def _copy(self, joined: Joined, info: VersionInfo, facts: Sequence[Fact]) -> None:
        try:
            with self._uploading(joined) as stop:
                self._copy_from(joined, info, stop, facts)
            self._has_copied = True
        except CorruptionError as error:
            self._skipped.add(info.token)
            _log.error("portus: step %d is not mirrored: %s", info.step, error)

    @contextlib.contextmanager
    def _uploading(self, joined: Joined) -> Iterator[Stop]:
        """What is sent inside ends when a save needs the space of what it pins."""
        stop = Stop()
        with self._changed:
            if self._ended or joined is not self._joined:
                raise StoppedError("the run ends, or continues in another pool")
            self._copying = stop
        try:
            yield stop
        finally:
            with self._changed:
                self._copying = None
                self._copies += 1
                self._changed.notify_all()

    def _copy_from(
        self, joined: Joined, info: VersionInfo, stop: Stop, facts: Sequence[Fact]
    ) -> None:
        self._mirror.copy(joined.reader_of(info), info.id, stop, facts)
        self._mirrored_ns = max(self._mirrored_ns, info.time_ns)

    def _facts(
        self,
        state: State,
        infos: Sequence[VersionInfo],
        new: VersionInfo | None,
        references: Mapping[str, Referred],
    ) -> list[Fact]:
        """What is to be said besides: which versions go, and what became of reference files."""
        kept = self._kept(state, infos)
        gone = {each.token for each in state.versions} - kept
        there = {each.token for each in state.versions} - gone
        if new is not None:
            there.add(new.token)
        known = {each.path: each for each in state.references if each.token not in gone}
        wanted = {path: each for path, each in references.items() if each.token in there}
        facts: list[Fact] = [Removed(token) for token in sorted(gone)]
        facts += [each for path, each in wanted.items() if known.get(path) != each]
        facts += [Unreferred(path) for path in known.keys() - references.keys()]
        return facts

    def _kept(self, state: State, infos: Sequence[VersionInfo]) -> set[bytes]:
        """The tokens of the versions that are to be mirrored: what the pool has, and what ``keep``
        wants of the others."""
        local = {info.token for info in infos}
        if self._is_whole:
            return local | self._unread
        if self._keep is None:
            return local | {each.token for each in state.versions}
        mirrored = sorted(state.versions, key=place_of)
        tokens = {each.token for each in mirrored}
        every: list[Added | VersionInfo] = [*mirrored]
        every += [info for info in infos if info.token not in tokens]
        return local | {each.token for each in self._keep.staying(every)}


def _who() -> str:
    return f"pid {os.getpid()} on {platform.node()}"


class ElsewhereError(UsageError):
    """The mirror has the newer history, of another pool."""


class Joined:
    """A pool that versions of a model are copied from."""

    def __init__(
        self,
        model: str,
        writer: PoolWriter,
        older: Callable[[], Collection[PoolReader]] = tuple,
    ) -> None:
        """older: the pools that it is a successor of."""
        self.writer: Final = writer
        self.since = writer.catalogue().root.sequence
        """Its newest commit when it was joined."""
        self.is_claimed = False
        self._model: Final = model
        self._older: Final = older

    @property
    def name(self) -> str:
        """Of the pool, for messages."""
        return self.writer.medium.info.name

    def read(self) -> tuple[list[VersionInfo], Mapping[str, Referred]]:
        """``infos`` and ``references`` of one moment. Raises ``MediumError``."""
        return self.infos(), self.references()

    def references(self) -> Mapping[str, Referred]:
        """The reference files that lead to its versions, by path. Raises ``MediumError``."""
        return {}

    def require_alone(self, state: State, newest: Added) -> None:
        """Raise ``UsageError`` if it is not to be filled from a mirror that says ``state``."""

    def put_back(self, said: Referred, info: VersionInfo) -> None:
        """Put a reference file back that another pool had. Raises ``MediumError``."""

    def is_behind(self, state: State, own: Sequence[VersionInfo]) -> bool:
        """True if a mirror has the newer history. own: ``infos``."""
        commit = self.writer.catalogue().root.sequence
        return state.is_ahead_of(self.writer.superblock.uuid, own, commit)

    def infos(self) -> list[VersionInfo]:
        """The versions of the model, oldest commit first."""
        return [info for _, info in self._found()]

    def has_pool(self, uuid: bytes) -> bool:
        """True if it is one of these."""
        return any(each.superblock.uuid == uuid for each in (*self._older(), self.writer))

    def reader_of(self, info: VersionInfo) -> PoolReader:
        """The pool that has this version. Raises ``StaleError``."""
        for reader, each in self._found():
            if each == info:
                return reader
        raise StaleError(f"step {info.step} was let go of")

    def _found(self) -> list[tuple[PoolReader, VersionInfo]]:
        found = []
        for reader in (*self._older(), self.writer):
            listed = reader.catalogue().models.get(self._model)
            found += [(reader, entry.info) for entry in listed.versions] if listed else []
        return found
