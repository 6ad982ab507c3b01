"""Logs of versions, and media under them, that make one mistake each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import DATA_START
from portus.reach.index import log
from portus.reach.index.log import Bunch, LogWriter, Patch
from portus.reach.media.space import SpaceMedium


class NotPersisted(LogWriter):
    def append(
        self, patches: Sequence[Patch], contents: bytes, commit: int, bunches: Sequence[Bunch] = ()
    ) -> None:
        self.advance(self.store(patches, contents, commit, bunches))


class HeadAlonePersisted(LogWriter):
    def append(
        self, patches: Sequence[Patch], contents: bytes, commit: int, bunches: Sequence[Bunch] = ()
    ) -> None:
        stored = self.store(patches, contents, commit, bunches)
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
    """A transaction is committed array by array."""

    def append(
        self, patches: Sequence[Patch], contents: bytes, commit: int, bunches: Sequence[Bunch] = ()
    ) -> None:
        for each in patches[:-1]:
            super().append([each], b"", commit)
        super().append(patches[-1:], contents, commit, bunches)


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
