"""Changes that wait for a turn to commit: whoever gets the turn first commits them together.

Theory. While one commit persists, others wait for the turn. Who gets it next takes along all that
wait by then: one commit, two persists, for all of them. Nobody ever waits for company. And there is
one persist at a time, made by one thread: a kernel reports a write-back that failed once for each
descriptor, so of two threads that sync at the same time one may be told that all is well. Here the
outcome of the one persist is the outcome of all that it was for (V3).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from portus.errors import AbandonedError, MediumError, PortusError
from portus.reach.index.commit_records import Change

Outcome = TypeVar("Outcome")


class RoomError(MediumError):
    """The error of a commit that has no room for its records. None of them was stored."""


class Line(Generic[Outcome]):
    """Changes that wait for ``turn``, a lock that its owner also takes for other things."""

    def __init__(
        self,
        turn: contextlib.AbstractContextManager[object],
        act: Callable[[Sequence[Change]], Sequence[Outcome]],
    ) -> None:
        """act: makes all of some changes, or none and raises; called with the turn. The outcomes
        are in the order of the changes. ``RoomError``: fewer at once may do."""
        self._turn: Final = turn
        self._act: Final = act
        self._guard: Final = threading.Lock()
        self._waiting: Final[list[_Waiting[Outcome]]] = []

    @property
    def waiting(self) -> int:
        """Changes that wait for the turn."""
        return len(self._waiting)

    def make(self, change: Change) -> Outcome:
        """Make it, alone or with others. Raises what ``act`` raised for it."""
        own = _Waiting[Outcome](change)
        with self._guard:
            self._waiting.append(own)
        try:
            with self._turn:
                # Whoever had the turn before may have made this one, too.
                while not own.over:  # ends: each time the first that waits is made
                    self._make(self._first())
        finally:
            self._leave(own)
        return own.result()

    def _first(self) -> list[_Waiting[Outcome]]:
        """Return the changes to make next, and remove them from the line: all that wait, but one of
        each model. Those of the same are made one after the other."""
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
        """Make all changes of a batch. Raises nothing of ours: each change has its own error."""
        try:
            outcomes = self._act([each.change for each in batch])
        except RoomError as error:
            for each in batch:
                if len(batch) == 1:
                    each.fail(error)
                else:
                    # Each alone: a client with many tensors must not make others fail
                    # (decision 0040).
                    self._make([each])
        except PortusError as error:
            for each in batch:
                # One persist, one outcome for all of them (V3).
                each.fail(error)
        except BaseException as error:
            for each in batch:
                each.fail(error)
            raise
        else:
            for each, outcome in zip(batch, outcomes, strict=True):
                each.end(outcome)

    def _leave(self, own: _Waiting[Outcome]) -> None:
        """However its caller left: if Ctrl-C came out of the wait for the turn, then either nobody
        makes the change any more, or whoever is at it is through with what its caller frees."""
        with self._guard, contextlib.suppress(ValueError):
            self._waiting.remove(own)
            return
        if not own.over:
            with self._turn:
                pass


class _Waiting(Generic[Outcome]):
    """One change, and what became of it. Compared by identity."""

    def __init__(self, change: Change) -> None:
        self.change: Final = change
        self.over = False
        self._outcome: list[Outcome] = []
        self._error: BaseException | None = None

    def end(self, outcome: Outcome) -> None:
        """Record that the change was made, and its outcome."""
        self._outcome, self.over = [outcome], True

    def fail(self, error: BaseException) -> None:
        """Record ``error``: the change was not made, or nobody knows whether it was."""
        self._error, self.over = error, True

    def result(self) -> Outcome:
        """Raises an error of its own: threads that raise one object write into its traceback."""
        error = self._error
        if error is None:
            return self._outcome[0]
        if isinstance(error, MediumError):
            raise MediumError(*error.args) from error
        if isinstance(error, PortusError):
            raise type(error)(*error.args) from error
        raise AbandonedError(f"the commit was interrupted by {type(error).__name__}") from error
