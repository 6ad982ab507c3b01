"""What became of the saves of a run: for the training, for other processes, and for good."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Final

from portus.client.files.opened import RunPool
from portus.client.job.journal import Journal
from portus.client.job.reports import Reports
from portus.client.job.settings import Settings
from portus.pipeline.handle import RefusedSave
from portus.pipeline.queue import Chore, Queue
from portus.pipeline.run import Save


class Ledger:
    """The records of one run: its ``reports`` to the training, its ``journal``, if it keeps one,
    and the failures that ``portus ls`` shows. Threads may share it."""

    def __init__(self, pool: RunPool, queue: Queue, settings: Settings) -> None:
        self.reports: Final = Reports(settings.on_error)
        self.journal: Final = Journal(pool.model) if settings.journal else None
        self._fence_timeout: Final = settings.fence_timeout
        self._pool: Final = pool
        self._queue: Final = queue

    def count_steps(self) -> None:
        """Have the journal begin its session with the first step, if there is a pool by then."""
        if self.journal is not None:
            self.journal.on_first_step(_asks(weakref.ref(self._pool)))

    def asked(self, token: bytes, step: int, file: str | None = None) -> None:
        """A save was asked for, and begins. ``file``: where its reference is to be."""
        if self.journal is not None:
            self.journal.asked(token, step, file)

    def failed(self, save: Save | RefusedSave, step: int) -> None:
        """A save was not committed."""
        self.reports.failed(save)
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        text = f"{self._pool.model}@{step} at {when}: {save.error}"
        self._queue.put(_Note(self, text, save, step))

    def tell(self, *, is_save: bool = False, is_heard_of: bool = False) -> None:
        """Tell the caller of failures that nobody heard of; see ``Reports.tell``."""
        self.reports.tell(self._first_may_commit, is_save=is_save, is_heard_of=is_heard_of)

    def close(self) -> None:
        """The session is over."""
        if self.journal is not None:
            self.journal.close()

    # On the worker.

    def committed(self, save: Save) -> None:
        """Enter it in the journal."""
        journal = self._begun_journal()
        if journal is not None:
            journal.committed(save.token, save.stats)

    def note_failed(self, text: str, save: Save | RefusedSave, step: int) -> None:
        """Put it on record, for other processes and in the journal."""
        self._pool.home.note_failure(text)
        journal = self._begun_journal()
        if journal is not None:
            token = save.token if isinstance(save, Save) else None
            journal.failed(step, str(save.error), token)

    def _begun_journal(self) -> Journal | None:
        """The journal, once the session has begun."""
        journal = self.journal
        if journal is not None and not journal.has_begun:
            place = self._pool.place_of_journal()
            if place is not None:
                journal.begin(*place)
        return journal

    def _first_may_commit(self) -> None:
        """Wait for a first save in flight, for at most ``fence_timeout``."""
        if not self._queue.on_worker():
            self._queue.catch_up(self._fence_timeout)


class _Note(Chore):
    """Records a failed save for other processes; on the worker, since a medium may hang."""

    def __init__(self, ledger: Ledger, text: str, save: Save | RefusedSave, step: int) -> None:
        self._ledger: Final = ledger
        self._text: Final = text
        self._save: Final = save
        self._step: Final = step

    def run(self) -> None:
        self._ledger.note_failed(self._text, self._save, self._step)


def _asks(known: weakref.ref[RunPool]) -> Callable[[], tuple[str, str] | None]:
    """Asks for the place of a journal, and holds nobody: a ``Checkpointer`` that nobody holds is
    closed."""

    def place() -> tuple[str, str] | None:
        pool = known()
        return None if pool is None else pool.place_of_journal()

    return place
