"""Mirrors on a store whose requests are lost, land late, twice, and out of order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from portus.engine.spec import VersionInfo
from portus.reach.mirror.objects import (
    Added,
    FileObject,
    LogEntry,
    Removed,
    State,
    entry_name,
)
from portus.reach.mirror.store import ListedObject
from portus.reach.mirror.writer import Writer
from tests.crash.mirrored import BrokenError, History
from tests.depth import deep

EVENTS = 300
Put = Callable[[int, str], FileObject]


class EntryFirst(Writer):
    """Asks for its entry before its objects are there."""

    def add(
        self, info: VersionInfo, pool: bytes, directory: str, files: Sequence[str], put: Put
    ) -> Added:
        later: list[tuple[int, str]] = []

        def promise(number: int, name: str) -> FileObject:
            later.append((number, name))
            return FileObject(name, 17, bytes(16))

        added = super().add(info, pool, directory, files, promise)
        for number, name in later:
            put(number, name)
        return added


class DeletesFirst(Writer):
    """Deletes a version before its removal counts."""

    def remove(self, tokens: Iterable[bytes]) -> None:
        gone = [each for each in self.state.added if each.token in {*tokens}]
        self._delete(file.name for each in gone for file in each.files.values())
        super().remove(each.token for each in gone)


class SweepsWithoutTerm(Writer):
    """Deletes by what it knows, and does not look whether it still counts."""

    def sweep(self) -> list[ListedObject]:
        self._sending = b""
        found = [each for each in self._uploads() if each.name not in self.state.sizes]
        self._delete_objects([each.name for each in found])
        return found


class ListsLast(Writer):
    """Proves its term, and then looks what there is to delete."""

    def sweep(self) -> list[ListedObject]:
        self._sending = b""
        needed = self.note((Removed(self._random(16)),)).sizes
        found = [each for each in self._uploads() if each.name not in needed]
        self._delete_objects([each.name for each in found])
        return found


class RemembersWhatItDeleted(Writer):
    """Relies, after it swept, on what it put before."""

    def sweep(self) -> list[ListedObject]:
        sending = self._sending
        try:
            return super().sweep()
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
        return b"the same"

    @_tag.setter
    def _tag(self, tag: bytes) -> None:
        pass


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
        self, info: VersionInfo, pool: bytes, directory: str, files: Sequence[str], put: Put
    ) -> Added:
        late = replace(info, commit=self.state.number)
        return super().add(late, pool, directory, files, put)


MISTAKES: dict[type[Writer], int] = {
    EntryFirst: 0,
    DeletesFirst: 0,
    SweepsWithoutTerm: 0,
    ListsLast: 82,
    RemembersWhatItDeleted: 8,
    Assumes: 433,
    OneTag: 12,
    TakesTheirsForItsOwn: 3,
    NewestIsLast: 4,
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
