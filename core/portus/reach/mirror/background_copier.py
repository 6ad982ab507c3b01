"""The base class ``BackgroundCopier``: a thread that copies to a store while training saves.

The thread copies all that is not copied, retries while the store does not answer, and ends when
another writer has taken over. Subclasses define the work: for a pool, or for a directory of files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final, Protocol

from portus.engine.copying.segments import Stop, StoppedError
from portus.engine.copying.thread import JoinableThread
from portus.errors import PortusError, StaleError, UsageError
from portus.reach.mirror.log import SupersededError
from portus.reach.mirror.store import UnwritableError

_log: Final = logging.getLogger("portus")

_PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
"""Seconds between two tries, at most, if the store does not answer."""

SAY_S: Final = 10.0
"""Seconds between two reports of progress to a user who waits."""

READ_ALONE: Final = "it may be read, not written"
"""The meaning of a refused write, after a successful read."""


class ElsewhereError(UsageError):
    """The mirror has the newer history, of another pool or directory."""


class Closable(Protocol):
    """A store, or a storage host."""

    def close(self) -> None:
        """Close the connections, and end running requests."""


class BackgroundCopier(ABC):
    """A thread that copies to a store while training saves. Thread-safe."""

    def __init__(
        self,
        store: Closable,
        address: str,
        model: str,
        *,
        wait_s: float,
        pause_max_s: float = PAUSE_MAX_S,
    ) -> None:
        """Make no request. address: of the store, for messages. wait_s: the longest that ``close``
        waits. pause_max_s: between two tries, if the store does not answer."""
        self.address: Final = address
        self._model: Final = model
        self._store: Final = store
        self._wait_s: Final = wait_s
        self._pause_max_s: Final = pause_max_s
        self._changed: Final = threading.Condition()
        self._thread: JoinableThread | None = None
        self._wanted = False
        """True if there may be work."""
        self._closing = False
        """True if the thread is to end once no work is left."""
        self._ended = False
        """True if the thread is to end now."""
        self._copying: Stop | None = None
        self._copies = 0
        self._has_copied = False
        """True if something was mirrored after the last failure."""
        self._failure = ""
        self._mirrored_ns = 0

    @abstractmethod
    def _catch_up(self) -> None:
        """Copy all that the store lacks. Runs on the thread."""

    @abstractmethod
    def _describe_backlog(self) -> str:
        """Return the backlog in words; empty if all is mirrored."""

    def _may_yield(self) -> bool:
        """Return whether a running upload may hold the space of a removed version or file."""
        return True

    def _note_passing(self) -> None:  # noqa: B027
        """Note that a command took the term for a moment: the thread claims it again."""

    def wake(self) -> None:
        """Wake the thread after a commit or a removal."""
        with self._changed:
            if self._closing:
                return
            self._wanted = True
            if self._thread is None:
                # With the first commit: a run that saves nothing has no thread.
                self._thread = JoinableThread(self._run, f"portus-mirror-{self._model}")
                self._thread.start()
            self._changed.notify_all()

    def yield_space(self) -> bool:
        """End the running upload, whose version may hold space, because a save finds no room.
        Return whether there was one; it has ended then, and begins again after the next commit.
        Blocks until the store has answered."""
        with self._changed:
            if self._copying is None or not self._may_yield():
                return False
            self._copying.set()
            copies = self._copies
            # Running requests read the sent bytes: only afterwards their space is free.
            self._changed.wait_for(lambda: self._copies != copies)
            return True

    @property
    def lag_s(self) -> float | None:
        """Seconds of training that the loss of this machine would cost now: since the save of the
        newest mirrored version. None before there is one."""
        return (time.time_ns() - self._mirrored_ns) / 1e9 if self._mirrored_ns else None

    @property
    def failure(self) -> str:
        """The reason why the mirror is behind; empty if nothing is wrong."""
        return self._failure

    def close(self) -> None:
        """Wait, for ``wait_s`` seconds at most, until all is mirrored; log what is not. Ctrl-C ends
        the wait, and the copier is still closed."""
        try:
            self.finish(self._wait_s)
        finally:
            self.end()
            self._store.close()  # this ends the running request
            self.wait_for_end()

    def finish(self, wait_s: float) -> None:
        """Wait until all is mirrored, ``wait_s`` seconds at most. No commit comes afterwards."""
        with self._changed:
            self._closing = self._wanted = True  # once more: this ends a pause between two tries
            self._changed.notify_all()
        if self._thread is not None:
            self._wait_for(self._thread, wait_s)

    def end(self) -> None:
        """End the running request, once the store is closed. Call ``wait_for_end`` then."""
        with self._changed:
            self._closing = self._ended = True
            if self._copying is not None:
                self._copying.set()
            self._changed.notify_all()

    def wait_for_end(self) -> None:
        """Return when the thread has ended; log what is not mirrored."""
        if self._thread is not None:
            self._thread.join()
        left = self._describe_backlog()
        if left:
            _log.error("portus: the mirror is behind: %s. %s", left, self._failure)

    def _wait_for(self, thread: JoinableThread, wait_s: float) -> None:
        """Wait until the thread has ended, ``wait_s`` seconds at most; log why."""
        until_s = time.monotonic() + wait_s
        while thread.is_alive() and (left_s := until_s - time.monotonic()) > 0:
            thread.join(min(SAY_S, left_s))
            if thread.is_alive():
                left = self._describe_backlog() or "older versions are to be removed there"
                text = "portus: waiting for the mirror, Ctrl-C ends that: %s. %s"
                _log.warning(text, left, self._failure)

    @contextlib.contextmanager
    def _first_write(self) -> Iterator[None]:
        """Explain a refusal of the first write to the store: no write is allowed there at all."""
        try:
            yield
        except UnwritableError as error:
            raise UnwritableError(
                f"{self.address}: nothing can be mirrored there: {READ_ALONE}: {error}. Expected a "
                "mirror that this process may write to: give it that right, or name another mirror"
            ) from error

    @contextlib.contextmanager
    def _uploading(self) -> Iterator[Stop]:
        """Yield the stop of an upload: set when a save needs the space, and at the end."""
        stop = Stop()
        with self._changed:
            if self._ended:
                raise StoppedError("the run ends")
            self._copying = stop
        try:
            yield stop
        finally:
            with self._changed:
                self._copying = None
                self._copies += 1
                self._changed.notify_all()

    # The thread.

    def _run(self) -> None:
        pause_s = _PAUSE_MIN_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closing or self._ended)
                if self._ended or not self._wanted:
                    return
                self._wanted = False
            try:
                # Not under the lock: a commit that wakes this thread must not wait for a store.
                self._catch_up()
                pause_s, self._failure = _PAUSE_MIN_S, ""
            except StoppedError:
                self._again(None)
            except StaleError:
                self._again(0.0)  # the version or file was removed meanwhile
            except SupersededError as error:
                # Another run keeps the term; a command (``passing``) gives it up at once.
                if not error.passing:
                    self._fail(error)
                    return
                self._note_passing()
                self._again(0.0)
            except ElsewhereError as error:
                self._fail(error)
                return
            except Exception as error:  # also MemoryError and the like: else no one hears of it
                self._say(error)
                if self._has_copied:  # a new failure, not the one of before
                    self._has_copied, pause_s = False, _PAUSE_MIN_S
                self._again(pause_s)
                pause_s = min(2 * pause_s, self._pause_max_s)

    def _again(self, pause_s: float | None) -> None:
        """Try again after a pause; None: after the next commit, or at once when closing."""
        with self._changed:
            if pause_s is None:
                self._wanted = self._wanted or self._closing
                return
            if self._closing:
                # The caller of ``finish`` waits now, so the pauses are short.
                self._changed.wait_for(lambda: self._ended, min(pause_s, _PAUSE_MIN_S))
            else:
                self._changed.wait_for(lambda: self._closing or self._ended, pause_s)
            self._wanted = True

    def _say(self, error: Exception) -> None:
        """Log why the mirror is behind, each cause once until it is gone."""
        if self._ended:
            return  # the store was closed, so this error explains nothing
        foreign = not isinstance(error, PortusError)
        said = f"{READ_ALONE}: {error}" if isinstance(error, UnwritableError) else str(error)
        text = f"{type(error).__name__}: {error}" if foreign else said
        # Each cause once: a store may be away for days.
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


def who() -> str:
    """Return a name for this process, which other processes show in messages."""
    return f"pid {os.getpid()} on {platform.node()}"
