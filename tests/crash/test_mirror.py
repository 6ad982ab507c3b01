"""Mirrors on a store whose requests are lost, land late, twice, and out of order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import pytest

from portus.engine.copying.segments import Stop
from portus.reach.mirror.log import MirrorLog, fold
from portus.reach.mirror.model_objects import ModelObjects
from portus.reach.mirror.objects import (
    Added,
    Collected,
    Fact,
    FileObject,
    Key,
    LogEntry,
    Seal,
    State,
    entry_name,
)
from portus.reach.mirror.pieces import WantedObject
from portus.reach.mirror.writer import DeletedObjects, Version, Writer
from tests.crash.mirrored import BrokenError, History
from tests.depth import deep

EVENTS = 300
Put = Callable[[WantedObject], FileObject]


class ManifestFirst(Writer):
    """Asks for its entry before its objects are there."""

    def add(
        self,
        version: Version,
        put: Put,
        facts: Sequence[Fact] = (),
        damaged: Collection[str] | None = None,
    ) -> Added:
        self._later: list[WantedObject] = []
        added = super().add(version, put, facts, damaged)
        for each in self._later:
            self._objects.for_each(put, [each])  # type: ignore[arg-type]
        return added

    def _put_objects(self, objects: Mapping[Key, WantedObject], put: Put) -> None:
        for each in objects.values():
            self._later.append(each)
            each.there = each.there or FileObject(each.name, each.size, bytes(16))


class CollectsWithoutTerm(Writer):
    """Deletes by what it knows, and does not look whether it still counts."""

    def collect(self, grace_s: float = 0.0, stop: Stop | None = None) -> DeletedObjects:
        self._log.require()
        now, _ = self._times(grace_s)
        entries = self._list_before(now - grace_s)
        self._known, self._epoch = {}, self._epoch + 1
        named = self._needed_objects(self.state, Stop())
        self._objects.delete([each.name for each in entries if each.name not in named])
        return DeletedObjects(0, 0)


class ListsLast(Writer):
    """Proves its term, and then looks what there is to delete."""

    def collect(self, grace_s: float = 0.0, stop: Stop | None = None) -> DeletedObjects:
        self._known, self._epoch = {}, self._epoch + 1
        now, number = self._times(86400.0)
        old = tuple(each.manifest for each in self.state.gone if each.number <= number)
        state = self._log.append((Collected(old),))
        named = self._needed_objects(state, Stop())
        entries = self._list_before(now + 1e6)
        self._objects.delete([each.name for each in entries if each.name not in named])
        return DeletedObjects(0, 0)


class RemembersWhatItDeleted(Writer):
    """Relies, after it collected, on what it put before."""

    def _rely_on(self, state: State) -> None:
        before = dict(self._known)
        super()._rely_on(state)
        self._known = {**before, **self._known}


class Assumes(Writer):
    """Takes what it put in a term before for there."""

    def claim(
        self,
        who: str,
        pool: bytes,
        commit: int = 0,
        *,
        passing: bool = False,
        at: int | None = None,
    ) -> State:
        before = dict(self._known)
        state = super().claim(who, pool, commit, passing=passing, at=at)
        self._known = {**before, **self._known}
        return state


class OneEpoch(Writer):
    """Gives a piece that comes back the name that it had before it was deleted."""

    @property
    def _epoch(self) -> int:
        return 0

    @_epoch.setter
    def _epoch(self, epoch: int) -> None:
        pass


class TrustsItsClock(Writer):
    """Takes the time from its machine, which is two days ahead."""

    def _times(self, grace_s: float) -> tuple[float, int]:
        now, number = super()._times(0.0)
        return now + 2 * 86400.0, number


class TakesTheirsForItsOwn(MirrorLog):
    """Believes that an entry which is there already is the one that it sent."""

    def _put(self, entry: LogEntry, *, is_whole: bool = False) -> bool:
        number = self.state.number + 1
        mine = self._objects.create(entry_name(number), self._seal.entry(number, entry))
        if not mine:
            there = self._objects.get(entry_name(number))
            self.state = self._folded(number, there)
        else:
            self.state = self._folded(number, self._seal.entry(number, entry))
        return True

    def _folded(self, number: int, data: bytes | None) -> State:
        assert data is not None
        return fold(self.state, number, self._seal.read_entry(number, data, self._model))


class WithItsOwnLog(Writer):
    """See ``TakesTheirsForItsOwn``."""

    def __init__(self, objects: ModelObjects, seal: Seal) -> None:
        super().__init__(objects, seal)
        self._log = TakesTheirsForItsOwn(objects, seal)


class NewestIsLast(Writer):
    """Gives an old version that is mirrored late a place after all others."""

    def add(
        self,
        version: Version,
        put: Put,
        facts: Sequence[Fact] = (),
        damaged: Collection[str] | None = None,
    ) -> Added:
        late = replace(version.info, commit=self.state.number)
        return super().add(replace(version, info=late), put, facts)


MISTAKES: dict[type[Writer], int] = {
    ManifestFirst: 0,
    CollectsWithoutTerm: 3,
    ListsLast: 27,
    RemembersWhatItDeleted: 219,
    Assumes: 608,
    OneEpoch: 188,
    TrustsItsClock: 1,
    WithItsOwnLog: 0,
    NewestIsLast: 0,
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
