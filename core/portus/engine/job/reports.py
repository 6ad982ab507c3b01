"""Reports of saves to their training: each failure once, in the way that ``on_error`` chooses."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from typing import Final

from portus.engine.files.queue import Queue
from portus.engine.job.settings import OnError
from portus.engine.pipeline.handle import EndedSave
from portus.engine.pipeline.run import Save
from portus.errors import AbandonedError

_log: Final = logging.getLogger("portus")


class Reports:
    """Failures, noted by any thread, and reported to the next caller.

    Until a first save is committed a failure is raised, whatever ``on_error`` is: a run that saves
    nothing must not look like one that did. Commits of earlier runs do not count: a run that
    resumes on a full disk would train to its end for nothing.
    """

    def __init__(self, on_error: OnError, queue: Queue, patience_s: float) -> None:
        """queue: of the saves in flight, which are waited for ``patience_s`` seconds at most."""
        self._on_error: Final = on_error
        self._queue: Final = queue
        self._patience_s: Final = patience_s
        self._failed: Final[deque[Save | EndedSave]] = deque()
        self._given_up: AbandonedError | None = None
        """The first save that was given up, if none was committed before it was logged."""
        self._commits = 0
        self._said_inexact = False

    @property
    def has_committed(self) -> bool:
        """True once a save was committed."""
        return self._commits > 0

    def await_commit(self) -> bool:
        """Return whether a save was committed. If none was, one in flight may be the first: wait
        for it."""
        if not self.has_committed and not self._queue.on_worker():
            self._queue.catch_up(self._patience_s)
        return self.has_committed

    def note_commit(self) -> None:
        self._commits += 1

    def note_failure(self, save: Save | EndedSave) -> None:
        """Note a failed save, to be reported unless its handle reports it first."""
        self._failed.append(save)

    def tell(self, *, is_save: bool = False) -> None:
        """Report failed saves that were not reported yet, each once. If one is raised, the next
        call reports the next one. Called by saves (``is_save``), waits and ``close``."""
        with contextlib.suppress(IndexError):
            while True:  # ends: there are no more; the worker may add one at any time
                save = self._failed.popleft()
                error = save.error
                if error is None or save.reported:
                    continue
                # The save that is about to begin may be in time where this one was not.
                goes_on = self.await_commit() or (is_save and isinstance(error, AbandonedError))
                if self._on_error == "raise" or not goes_on:
                    raise error
                if isinstance(error, AbandonedError) and not self.has_committed:
                    self._given_up = self._given_up or error
                _log.warning("portus: a save failed; training continues: %s", error)
        given_up = None if is_save or self.has_committed else self._given_up
        if given_up is not None:
            self._given_up = None
            raise given_up

    def inexact(self, step: int, name: str, count: int) -> None:
        """Warn, once, that another process wrote ``count`` storages while they were copied. name:
        of the first."""
        if not self._said_inexact:
            self._said_inexact = True
            _log.warning(
                "portus: step %d: another process wrote to %s%s while it was copied. The "
                "copied bytes are saved, and the version is marked inexact. This warning is "
                "given once; SaveStats.inexact_bytes reports it for each save. Have that process "
                "write at other times",
                step,
                name,
                f" and {count - 1} more" if count > 1 else "",
            )
