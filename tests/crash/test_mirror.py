"""Mirrors on a store whose requests are lost, land late, twice, and out of order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest

from portus.engine.copying.segments import Stop
from portus.reach.mirror.objects import (
    WRITER_SIZE,
    Added,
    Collected,
    Fact,
    FileObject,
    LogEntry,
    State,
    entry_name,
)
from portus.reach.mirror.writer import DeletedObjects, Version, Writer
from tests.crash.mirrored import BrokenError, History
from tests.depth import deep

EVENTS = 300
Put = Callable[[int, str], FileObject]


class ManifestFirst(Writer):
    """Asks for its entry before its objects are there."""

    def add(
        self,
        version: Version,
        put: Put,
        facts: Sequence[Fact] = (),
        damaged: Collection[str] = (),
    ) -> Added:
        later: list[tuple[int, str]] = []

        def promise(number: int, name: str) -> FileObject:
            later.append((number, name))
            return FileObject(name, version.files[number].size, bytes(16))

        added = super().add(version, promise, facts, damaged)
        for number, name in later:
            put(number, name)
        return added


class CollectsWithoutTerm(Writer):
    """Deletes by what it knows, and does not look whether it still counts."""

    def collect(self, grace_s: float = 0.0, stop: Stop | None = None) -> DeletedObjects:
        self.require()
        now, _ = self._times(grace_s)
        entries = self._list_before(now - grace_s)
        self._sending, self._tag = b"", self._random(WRITER_SIZE)
        named = self._needed_objects(self.state, Stop())
        self._objects.delete([each.name for each in entries if each.name not in named])
        return DeletedObjects(0, 0)


class ListsLast(Writer):
    """Proves its term, and then looks what there is to delete."""

    def collect(self, grace_s: float = 0.0, stop: Stop | None = None) -> DeletedObjects:
        self._sending, self._tag = b"", self._random(WRITER_SIZE)
        now, number = self._times(86400.0)
        state = self.note((Collected(number),))
        named = self._needed_objects(state, Stop())
        entries = self._list_before(now + 1e6)
        self._objects.delete([each.name for each in entries if each.name not in named])
        return DeletedObjects(0, 0)


class RemembersWhatItDeleted(Writer):
    """Relies, after it collected, on what it put before."""

    def collect(self, grace_s: float = 86400.0, stop: Stop | None = None) -> DeletedObjects:
        sending = self._sending
        try:
            return super().collect(grace_s, stop)
        finally:
            self._sending = sending


class Assumes(Writer):
    """Takes what it put in a term before for there."""

    def claim(
        self,
        who: str,
        pool: bytes,
        commit: int = 0,
        *,
        passing: bool = False,
    ) -> State:
        sending = self._sending
        try:
            return super().claim(who, pool, commit, passing=passing)
        finally:
            self._sending = sending


class OneTag(Writer):
    """Gives a file that comes back the name that it had before it was deleted."""

    @property
    def _tag(self) -> bytes:
        return b"the same" if self._own is None else self._own[1]

    @_tag.setter
    def _tag(self, tag: bytes) -> None:
        pass


class TrustsItsClock(Writer):
    """Takes the time from its machine, which is two days ahead."""

    def _times(self, grace_s: float) -> tuple[float, int]:
        now, number = super()._times(0.0)
        return now + 2 * 86400.0, number


class TakesTheirsForItsOwn(Writer):
    """Believes that an entry which is there already is the one that it sent."""

    def _put(self, entry: LogEntry, *, is_whole: bool = False) -> bool:
        number = self.state.number + 1
        data = self._seal.entry(number, entry)
        if not self._objects.create(entry_name(number), data):
            data = self._objects.get(entry_name(number)) or b""
        assert self._known is not None
        self._known = self._known.append(self._seal.read_entry(number, data, self.model))
        return True


class NewestIsLast(Writer):
    """Gives an old version that is mirrored late a place after all others."""

    def add(
        self,
        version: Version,
        put: Put,
        facts: Sequence[Fact] = (),
        damaged: Collection[str] = (),
    ) -> Added:
        late = replace(version.info, commit=self.state.number)
        return super().add(replace(version, info=late), put, facts)


MISTAKES: dict[type[Writer], int] = {
    ManifestFirst: 0,
    CollectsWithoutTerm: 8,
    ListsLast: 42,
    RemembersWhatItDeleted: 718,
    Assumes: 327,
    OneTag: 233,
    TrustsItsClock: 0,
    TakesTheirsForItsOwn: 2,
    NewestIsLast: 2,
}
"""And the seed of a history in which it is found."""


@pytest.mark.long
def test_what_was_told_loads_in_every_history(seed: int) -> None:
    assert explored(seed, 200) == 200


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_was_told_loads_in_thousands_of_histories(seed: int) -> None:
    count = int(os.environ.get("PORTUS_TEST_HISTORIES", deep(4000)))
    assert explored(seed, count) == count


def explored(seed: int, count: int) -> int:
    """How many histories there were; in each of them all that was told was there."""
    much: Counter[str] = Counter()
    for number in range(count):
        history = History(seed + number)
        history.run(EVENTS)
        much["histories"] += 1
        much["told"] += len(history.oracle.told)
        much["loads"] += history.loads
        much["deleted"] += history.deleted
    assert much["told"] > 4 * count, much
    assert much["loads"] > count, much
    assert much["deleted"] > 2 * count, much
    return much["histories"]


def is_found(mistaken: type[Writer], seed: int) -> bool:
    try:
        History(seed, mistaken).run(EVENTS)
    except BrokenError:
        return True
    return False


@pytest.mark.parametrize("mistaken", MISTAKES)
def test_a_writer_that_makes_a_mistake_is_found(mistaken: type[Writer]) -> None:
    assert is_found(mistaken, MISTAKES[mistaken])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistaken", MISTAKES)
def test_a_mistake_is_found_whatever_the_seed(mistaken: type[Writer], seed: int) -> None:
    assert any(is_found(mistaken, seed + number) for number in range(6000))
