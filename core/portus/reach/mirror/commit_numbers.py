"""The lead of a model that two storage hosts keep: one of them numbers its commits.

Each model has one log, on the second host (``reach.mirror.log``). The host that grants a claim of
the model leads it: it brings its own pool up to the newest version that counts in the log, and
takes a new term, before the first commit. The former leader meets a higher term, and stops.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Final

from portus.engine.spec import VersionInfo
from portus.errors import BusyError, PortusError, StaleError, TransportError
from portus.reach.index.pool import PoolWriter
from portus.reach.mirror.background_copier import ElsewhereError
from portus.reach.mirror.copier import Copier
from portus.reach.mirror.log import SupersededError
from portus.reach.mirror.objects import Added, State
from portus.reach.mirror.store import Store

REPLICA: Final = "portus.replica"
"""The prefix of the logs that the second host is the home of. No model's own mirror is called so:
there a name has no dot."""

PAUSE_MAX_S: Final = 2.0
"""Seconds between two tries, at most, if the other host does not answer."""

TOLD_S: Final = 300.0
"""The longest that a commit waits for its entry in the log while no try fails."""


class Leader(Copier):
    """Copies one model to its log, for as long as this host has the term. Thread-safe.

    Made for one claim, or (``is_wanted`` False) to copy the rest of what this pool led before.
    """

    _advice = "What is committed here does not count any more"

    def __init__(
        self,
        store: Store,
        name: str,
        model: str,
        writer: PoolWriter,
        turn: AbstractContextManager[object],
        *,
        shed: Callable[[Collection[VersionInfo]], None],
        is_home: bool,
    ) -> None:
        """name: of the host that has the log. shed: reports versions of the pool that do not count
        any more, and removes them. is_home: the log is on this host: then it has all
        reported versions, so others in this host's pool do not count."""
        super().__init__(store, name, model, writer, turn=turn, pause_max_s=PAUSE_MAX_S)
        self._shed: Final = shed
        self.is_home: Final = is_home
        self.why_over = ""
        """The reason why no commit here counts any more; empty while commits may count."""
        self._is_wanted = False
        self._tries = 0

    def lead(self) -> str:
        """Take the lead before the claim is granted. Return "" if the term is taken; else why the
        log cannot be read: the pool has versions, and the term is taken once the log answers.
        Nothing is copied before ``wake``. If this raises, the leader is closed.

        Raises ``StaleError`` if the model continued elsewhere, and this pool has versions that do
        not count; ``TransportError`` if the log cannot be read and the pool is empty, or is known
        to be behind; ``BusyError`` if another client saves the model at the other host.
        """
        self._is_wanted = True
        try:
            return self._why_not_led()
        except BaseException:
            self._store.close()
            raise

    def wait_until_logged(self, token: bytes) -> None:
        """Return when the version of that token is in the log; for 16 zeros, when this host has the
        term. Raises ``StaleError`` if it never will be, ``TransportError`` after a failed try, or
        if it took too long."""

        def is_told() -> bool:
            if token == bytes(len(token)):
                return self._mirror.is_claimed
            return self._mirror.state.version(token) is not None

        def is_over() -> bool:
            return self._ended or bool(self.why_over) or token in self._skipped

        # Noted before the wait: one failed try after this ends it.
        tries = self._tries
        with self._changed:
            self._changed.wait_for(
                lambda: is_told() or self._tries != tries or is_over(),
                TOLD_S,
            )
        if is_told():
            return
        self.require()
        raise TransportError(f"it is not at {self.address} yet. {self.failure}")

    def require(self) -> None:
        """Raise ``StaleError`` if the model continued elsewhere."""
        if self.why_over:
            raise StaleError(self.why_over)

    def _why_not_led(self) -> str:
        try:
            state = self._mirror.read()
        except TransportError as error:
            if not self._infos():
                raise
            return str(error)
        # Another writer appended in between, and may have changed what counts: look again.
        while not self._has_led(state):
            state = self._mirror.read()
        return ""

    def _has_led(self, state: State) -> bool:
        """Return whether the term was taken; not if another writer appended meanwhile."""
        newest = state.newest
        if newest is not None and self._is_behind(state):
            there = {each.token for each in state.versions}
            foreign = [info for info in self._infos() if info.token not in there]
            has_led = any(term.pool == self._writer.uuid for term in state.terms)
            # Here every reported version is in the log, so what is only in the pool was never
            # reported (decision 0156).
            if foreign and not (self.is_home and has_led):
                raise StaleError(self._went_on(state, newest, foreign))
            if foreign:
                self._shed(foreign)
            self._fill(state)
        self._since = self._writer.catalogue().root.sequence
        try:
            self._take_term(state)
        except StaleError:
            return False
        except BusyError as error:
            raise BusyError(
                errno.EBUSY,
                f"another client saves model {self._model!r} at {self.address}: it continues there",
            ) from error
        return True

    def _went_on(self, state: State, newest: Added, foreign: Collection[VersionInfo]) -> str:
        steps = ", ".join(str(info.step) for info in foreign)
        return (
            f"model {self._model!r} continued elsewhere: the newest that counts is step "
            f"{newest.step}, in term {newest.term}, at {self.address}. Steps {steps} here do "
            "not count, and keep it from continuing here: once they are not needed, `portus rm "
            f"{self._model}@STEP --force` each"
        )

    def _take_term(self, state: State, at: int | None = None) -> None:
        is_own = state.terms and state.terms[-1].pool == self._writer.uuid
        if state.terms and not (self._is_wanted or is_own):
            raise ElsewhereError(
                f"model {self._model!r} was saved last by {state.who}; it is copied from here once "
                "a client claims it here"
            )
        super()._take_term(state, state.number)
        with self._changed:
            self._changed.notify_all()

    def _say(self, error: Exception) -> None:
        super()._say(error)
        with self._changed:
            self._tries += 1
            self._changed.notify_all()

    def _fail(self, error: PortusError) -> None:
        state, why = self._mirror.state, str(error)
        if isinstance(error, SupersededError) and state.newest is not None:
            why = (
                f"model {self._model!r} continued elsewhere, in term {state.term}, by {state.who}: "
                f"the newest that counts is step {state.newest.step}, at {self.address}. What is "
                "committed here does not count any more"
            )
        self.why_over = why
        super()._fail(StaleError(why))
        with self._changed:
            self._changed.notify_all()
