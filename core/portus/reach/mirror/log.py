"""The log of a mirror: read, claimed and appended to.

Theory. Entry n is created if absent, by a writer that knows all entries before it. So each number
gets one entry, all see the same one, and its writer knew its predecessors. An entry counts if no
earlier one has a higher term; a claim takes the term after the highest. So the former holder learns
of the claim at the next entry: its place is taken.

A request may take effect after its sender gave up. Its place is the next free one; this writer
decides nothing else before that place is filled, by it or by another (M2). From then on the request
cannot take effect.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from portus.errors import (
    BusyError,
    CorruptionError,
    PortusError,
    TransportError,
    UsageError,
)
from portus.reach.mirror.model_objects import ModelObjects
from portus.reach.mirror.objects import (
    FACTS_MAX,
    LOG,
    NUMBER_MAX,
    STRIDE,
    TERMS_MAX,
    Claimed,
    Fact,
    LogEntry,
    Removed,
    Seal,
    SealError,
    State,
    Term,
    entry_name,
    entry_number,
)

_log: Final = logging.getLogger("portus")

_ABSENT_MAX: Final = 8
"""Times in a row that a store may call an entry both existing and missing, before an error."""


class SupersededError(BusyError):
    """Another writer took the term. ``passing``: only to remove or to sweep, so it may be claimed
    again."""

    def __init__(self, message: str, *, passing: bool) -> None:
        super().__init__(errno.EBUSY, message)
        self.passing: Final = passing


@dataclass(frozen=True, slots=True)
class _KnownLog:
    """The state of a log when it was read last. damage: the errors of entries that could not be
    read, since the last whole state."""

    state: State
    damage: tuple[CorruptionError, ...] = ()

    def append(self, found: LogEntry | CorruptionError) -> _KnownLog:
        """Return the log with its next entry, or with the error of reading that."""
        number = self.state.number + 1
        if isinstance(found, CorruptionError):
            return _KnownLog(fold(self.state, number, None), (*self.damage, found))
        return _KnownLog(fold(self.state, number, found), () if found.state else self.damage)


class MirrorLog:
    """The log of one model, and this writer's end of it. One thread at a time, but for ``read``.

    The first read or claim lists it. From then on it is read forward, an entry at a time, and
    listed again only if many entries were made meanwhile.
    """

    def __init__(self, objects: ModelObjects, seal: Seal, newest: int | None = None) -> None:
        """newest: the number of an existing entry, 0 for none. The first read takes it for the
        newest, instead of a list."""
        self._objects: Final = objects
        self.model: Final = objects.model
        self._seal: Final = seal
        self._known: _KnownLog | None = None
        self._newest = newest
        self._own: tuple[int, bytes] | None = None
        """The term of this writer, and its random name there."""

    @property
    def state(self) -> State:
        """The state when this object last read the log, or wrote to it."""
        return State() if self._known is None else self._known.state

    @property
    def damage(self) -> Sequence[CorruptionError]:
        """The errors of the entries that could not be read, one for each, at the last read or
        claim. A claim repeats what is known, and then there are none."""
        return () if self._known is None else self._known.damage

    @property
    def is_claimed(self) -> bool:
        """True from a claim until this writer finds that another one superseded it."""
        return self._own is not None

    def require(self) -> None:
        """Raise ``SupersededError`` unless this writer has the term, as far as it knows."""
        state = self.state
        if self._own != (state.term, state.writer):
            self._own = None
            what = "was passing by" if state.passing else "continues with it"
            raise SupersededError(
                f"the mirror of model {self.model!r} is in term {state.term}: "
                f"{state.who or 'no writer'} {what}. Commits of this process are no longer "
                "mirrored",
                passing=state.passing,
            )

    def read(self) -> State:
        """Return the present state: one page of a list, and up to 17 small reads; from the second
        call on one small read, and one for each new entry. Damaged entries are skipped, with an
        error in the log of Python.

        Raises ``CorruptionError`` if all are damaged, ``UsageError`` if a newer Portus wrote the
        log, or if it needs a key.
        """
        told, known = self.damage, self._known
        if known is not None:
            # A read of the next number is cheaper than a list.
            known = self._onward(known, STRIDE)
        if known is None:  # never read, or much was appended meanwhile
            # A list may lack the newest names; a read of the next number does not (decision 0141).
            known = self._onward(self._up_to(self._newest_entry()), NUMBER_MAX)
            assert known is not None
        if known.damage and not known.state.term:
            raise self._unread(known.damage)
        for error in known.damage:
            if error not in told:
                _log.error("the mirror of model %r: %s; its contents are lost", self.model, error)
        self._known = known
        return known.state

    def require_whole(self) -> None:
        """Raise ``CorruptionError`` if entries were damaged at the last read: the objects that they
        named may be intact, and a claim makes later readers skip these entries."""
        if self.damage:
            raise CorruptionError(
                f"the mirror of model {self.model!r}: {self.damage[0]}. What it named may be here, "
                "and would be taken for unneeded: portus mirror repair makes it count again"
            )

    def confirm(self) -> None:
        """Read the log, and raise ``SupersededError`` if another writer took the term by now."""
        self.read()
        self.require()

    def note(self, facts: Sequence[Fact]) -> State:
        """Append ``facts``, all or none; when this returns, they count. If this raises after a
        request, they may count, now or later: the next call settles that before it does anything
        else.

        Raises ``SupersededError`` if another writer took the term, at once or before.
        """
        self.require()
        if not 0 < len(facts) <= FACTS_MAX:
            raise UsageError(f"an entry of a mirror: expected 1 to {FACTS_MAX} facts")
        assert self._own is not None
        entry = LogEntry(self.model, *self._own, tuple(facts))
        while not self._put(entry):  # ends: each time an entry of another was found in its place
            # That need not be a claim: it may be one that does not count.
            self.require()
        return self.state

    def _begin_term(self, claimed: Claimed, writer: bytes) -> None:
        """Begin a term. writer: random, and new for each claim."""
        self._own = None
        self.read()
        while self._own is None:  # ends: as in ``note``
            state, damage = self.state, self.damage
            # A damaged entry may have been a claim: then its term differs from this one.
            # The first term of a run is 2. If a log is lost, a command makes it anew in term 1: a
            # run that mirrors there finds the number of its next entry free, and still counts.
            term = max(state.term + 1 + len(damage), 1 if claimed.passing else 2)
            # After damaged entries it has the whole state, so readers need not look at those.
            if self._put(LogEntry(self.model, term, writer, (claimed,)), is_whole=bool(damage)):
                self._own = term, writer

    def _put(self, entry: LogEntry, *, is_whole: bool = False) -> bool:
        """Make ``entry`` the next one. Return False if another one is in its place; the state has
        that now. is_whole: with the whole state."""
        known, number = self._known, self.state.number + 1
        assert known is not None
        # So a start reads 17 entries at most, however long the log is.
        if is_whole or number % STRIDE == 0:
            entry = replace(entry, state=fold(known.state, number, entry))
        data = self._seal.entry(number, entry)
        for _ in range(_ABSENT_MAX):
            made = self._objects.create(entry_name(number), data)
            # A taken name may be this very request's, which was repeated, or another writer's.
            there = data if made else self._objects.get(entry_name(number))
            if there is not None:
                # The same bytes: made now, or by a repeated request (M1).
                is_own = there == data
                entry = entry if is_own else self._seal.read_entry(number, there, self.model)
                self._known = known.append(entry)
                return is_own
        raise TransportError(
            f"{entry_name(number)} of the mirror of model {self.model!r}: the store reports "
            "both that it exists and that it does not"
        )

    def _newest_entry(self) -> int:
        """Return the number of the newest entry, or of one before it; 0 if there is none."""
        newest, self._newest = self._newest, None
        if newest is not None:
            return newest
        # Numbers in names go down, so the newest entry is the first of the list.
        for each in self._objects.list(LOG):
            if (number := entry_number(each.name)) is not None:
                return number
        return 0

    def _onward(self, known: _KnownLog, most: int) -> _KnownLog | None:
        """Return the log with the entries after the known ones; None if there are more than
        ``most`` of them."""
        for _ in range(most + 1):  # a list lacks only entries made just before it
            number = known.state.number + 1
            data = self._objects.get(entry_name(number))
            if data is None:
                return known
            known = known.append(self._decode(number, data))
        return None

    def _unread(self, damage: Sequence[CorruptionError]) -> PortusError:
        """Return the error of a log of which no entry could be read."""
        what = f"the mirror of model {self.model!r}: none of the {len(damage)} entries of its log"
        if all(isinstance(error, SealError) for error in damage):
            return UsageError(
                f"{what} is sealed with the key of PORTUS_MIRROR_KEY. Set that to the key which "
                f"the mirror was made with, or unset it if that was made without one"
            )
        return CorruptionError(
            f"{what} can be read. The first: {damage[0]}. Files of a run are still there, under "
            f"their own names: delete {LOG} there, and portus mirror repair makes it anew; to "
            "begin without, use another mirror"
        )

    def _up_to(self, newest: int) -> _KnownLog:
        entries: dict[int, LogEntry | CorruptionError] = {}
        first, known = newest - newest % STRIDE, _KnownLog(State())
        after = newest + 1
        while after > 1:  # back to the newest entry that has the whole state
            numbers = range(max(first, 1), after)
            found = self._objects.get_all([entry_name(number) for number in numbers])
            for number, data in zip(numbers, found, strict=True):
                entries[number] = each = self._decode(number, data)
                if isinstance(each, LogEntry) and each.state is not None:
                    known = _KnownLog(each.state)
            if known.state.number:
                break
            after, first = max(first, 1), first - STRIDE
        for number in range(known.state.number + 1, newest + 1):
            known = known.append(entries[number])
        return known

    def _decode(self, number: int, data: bytes | None) -> LogEntry | CorruptionError:
        """Return an entry, or the error of reading it."""
        try:
            if data is None:
                raise CorruptionError(f"{entry_name(number)} is missing")
            entry = self._seal.read_entry(number, data, self.model)
            if entry.state is not None and entry.state.number != number:
                raise CorruptionError(f"{entry_name(number)}: its state is of another entry")
        except CorruptionError as error:
            return error
        return entry


def fold(state: State, number: int, entry: LogEntry | None) -> State:
    """Return the state of a log after the next entry. None: one that cannot be read."""
    assert number == state.number + 1
    state = replace(state, number=number)
    # A lower term is of a writer that was superseded meanwhile.
    if entry is None or entry.term < state.term:
        return state  # it does not count
    if entry.term > state.term:  # by a claim, even a damaged one
        state = replace(state, term=entry.term, writer=entry.writer, who="", passing=False)
    return _with_facts(state, entry) if entry.writer == state.writer else state


def _with_facts(state: State, entry: LogEntry) -> State:
    terms = list(state.terms)
    added = {each.token: each for each in state.added}
    for fact in entry.facts:
        if isinstance(fact, Claimed):
            terms.append(Term(entry.term, fact.pool, fact.commit))
            state = replace(state, who=fact.who, passing=fact.passing)
        elif isinstance(fact, Removed):
            added.pop(fact.token, None)
        else:
            if fact.path:
                replaced = [each.token for each in added.values() if each.is_in(fact.path)]
                for token in replaced:
                    del added[token]
            added[fact.token] = fact
    return replace(state, terms=tuple(terms[-TERMS_MAX:]), added=tuple(added.values()))
