"""A line of changes that wait for their commit: the first to get the turn commits all of them
together.

Theory. While one commit persists, others wait for the turn. The next one to get it takes along all
that wait by then: one commit, two persists, for all of them. No change waits for company. Only one
thread persists at a time. A kernel reports a failed write-back once for each descriptor, so of two
threads that sync at the same time, one may be told that all is well. Here the outcome of the one
persist is the outcome of all its changes (V3).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from portus.errors import AbandonedError, MediumError, PortusError
from portus.reach.index.commit_records import Change

Outcome = TypeVar("Outcome")


class RoomError(MediumError):
    """The error of a commit that has no room for its records. None of them was stored."""


class Line(Generic[Outcome]):
    """Changes that wait for ``turn``, a lock that its owner uses for other things too."""

    def __init__(
        self,
        turn: contextlib.AbstractContextManager[object],
        act: Callable[[Sequence[Change]], Sequence[Outcome]],
    ) -> None:
        """act: makes all of some changes, or raises and makes none; called with the turn. Returns
        outcomes in the order of the changes. After a ``RoomError`` fewer changes may succeed."""
        self._turn: Final = turn
        self._act: Final = act
        self._guard: Final = threading.Lock()
        self._waiting: Final[list[_Waiting[Outcome]]] = []

    @property
    def waiting(self) -> int:
        """The number of changes that wait for the turn."""
        return len(self._waiting)

    def make(self, change: Change) -> Outcome:
        """Make a change, alone or with others; return its outcome, or raise its error."""
        own = _Waiting[Outcome](change)
        with self._guard:
            self._waiting.append(own)
        try:
            with self._turn:
                # The thread that had the turn before may have made this one too.
                while not own.future.done():  # ends: each time the first that waits is made
                    self._make(self._first())
        finally:
            self._leave(own)
        return own.result()

    def _first(self) -> list[_Waiting[Outcome]]:
        """Return the changes to make next, and remove them from the line: all that wait, but only
        one of each model. The others of that model follow one after the other."""
        taken: list[_Waiting[Outcome]] = []
        models = set[str | None]()
        with self._guard:
            for each in self._waiting[:]:
                model = each.change.model
                # So the order of a model's commits stays that of its versions (decision 0040).
                if model is None or model not in models:
                    models.add(model)
                    taken.append(each)
                    self._waiting.remove(each)
        return taken

    def _make(self, batch: Sequence[_Waiting[Outcome]]) -> None:
        """Make all changes of a batch. Raises no error of ours: each change keeps its own."""
        try:
            outcomes = self._act([each.change for each in batch])
        except RoomError as error:
            for each in batch:
                if len(batch) == 1:
                    each.future.set_exception(error)
                else:
                    # Each alone: a client with many tensors must not make others fail
                    # (decision 0040).
                    self._make([each])
        except PortusError as error:
            for each in batch:
                # One persist, one outcome for all of them (V3).
                each.future.set_exception(error)
        except BaseException as error:
            for each in batch:
                each.future.set_exception(error)
            raise
        else:
            for each, outcome in zip(batch, outcomes, strict=True):
                each.future.set_result(outcome)

    def _leave(self, own: _Waiting[Outcome]) -> None:
        """Remove a change, however its caller left. If Ctrl-C interrupted the wait for the turn,
        no thread makes the change after this, or it is made already: its caller may free its
        memory."""
        with self._guard, contextlib.suppress(ValueError):
            self._waiting.remove(own)
            return
        if not own.future.done():
            with self._turn:
                pass


class _Waiting(Generic[Outcome]):
    """One change, and its outcome. Compared by identity."""

    def __init__(self, change: Change) -> None:
        self.change: Final = change
        self.future: Final = Future[Outcome]()

    def result(self) -> Outcome:
        """Return the outcome, or raise a fresh copy of the error: threads that raise the same
        object write into its traceback."""
        error = self.future.exception()
        if error is None:
            return self.future.result()
        if isinstance(error, MediumError):
            raise MediumError(*error.args) from error
        if isinstance(error, PortusError):
            raise type(error)(*error.args) from error
        raise AbandonedError(f"the commit was interrupted by {type(error).__name__}") from error
