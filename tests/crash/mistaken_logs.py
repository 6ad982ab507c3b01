"""Logs of versions, and media under them, that make one mistake each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import DATA_START
from portus.reach.index import log
from portus.reach.index.log import Bunch, LogWriter
from portus.reach.media.space import SpaceMedium


class NotPersisted(LogWriter):
    def append(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> None:
        self.advance(self.store(bunches, contents, commit, undo=undo))


class HeadAlonePersisted(LogWriter):
    def append(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> None:
        stored = self.store(bunches, contents, commit, undo=undo)
        self._medium.persist([Extent(stored.offset, PAGE)])
        self.advance(stored)


class NotCut(LogWriter):
    def cut(self) -> None:
        pass


class WhatCountsIsInCachesOnly(LogWriter):
    """Blanks what is behind the end, and believes what it found."""

    def cut(self) -> None:
        self._medium.store(self._tail, bytes(PAGE))
        self._medium.persist([Extent(self._tail, PAGE)])


class TwoEntries(LogWriter):
    """A transaction is committed patch by patch."""

    def append(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> None:
        rows = [(each, row) for each in bunches for row in range(len(each.offset))]
        apart = [Bunch(each.offset[row : row + 1], each.data[row : row + 1]) for each, row in rows]
        for bunch in apart[:-1]:
            super().append([bunch], b"", commit)
        super().append(apart[-1:], contents, commit, undo=undo)


class ForTheVersionBefore(LogWriter):
    """An entry that is stored for a new version names the commit before."""

    def append(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> None:
        super().append(bunches, contents, commit + 1, undo=undo)

    def store(
        self, bunches: Sequence[Bunch], contents: bytes, commit: int, *, undo: bool = False
    ) -> Extent:
        return super().store(bunches, contents, commit - 1, undo=undo)


class OverTheLastEntry(LogWriter):
    def advance(self, stored: Extent) -> None:
        self.count = 1
        if self._tail == self.log.extent.offset:
            self._tail = stored.end


class NotDrained(SpaceMedium):
    """Entries are flushed, and counted before they are drained."""

    def persist(self, ranges: Sequence[Extent]) -> None:
        if len(ranges) == 1 and ranges[0].offset > DATA_START:
            self._space.flush(ranges[0].offset, ranges[0].length)
        else:
            super().persist(ranges)


def digest_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(log, "_is_whole", lambda entry: True)
