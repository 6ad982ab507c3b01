"""``ClosingCheckpointer``: what a ``Checkpointer`` is from its first save to its end, whatever it
saves to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from portus.engine.checkpointer import Checkpointer
from portus.engine.media import calls
from portus.engine.paths.process import leave
from portus.engine.paths.request import SaveRequest
from portus.engine.paths.saver import FileSaver
from portus.engine.pipeline.companions import Companion
from portus.engine.pipeline.handle import SaveHandle, SaveStats
from portus.engine.pipeline.run import Save
from portus.errors import PortusError, UsageError, printable


class ClosingCheckpointer(Checkpointer):
    """See ``Checkpointer``. Whoever extends this sets ``_is_closed`` first, to True, and the other
    fields once they are made."""

    _saver: FileSaver
    _companions: Sequence[Companion]
    _last: SaveHandle | None
    _process: int
    _is_closed: bool

    @calls.entry
    def fence(self) -> None:
        if self._process == os.getpid():
            self._saver.fence()

    @calls.entry
    def wait(self, timeout: float | None = None) -> None:
        self._check_process()
        self._saver.wait(timeout)

    @calls.entry
    def close(self) -> None:
        if self._is_closed or self._process != os.getpid():
            return
        try:
            self._saver.close()
        except Exception:
            self._end()
            raise
        self._end()  # not behind Ctrl-C: a second call closes the rest

    def _end(self) -> None:
        self._is_closed = True
        leave(self)
        for each in self._companions:
            each.close()

    @property
    def last_stats(self) -> SaveStats | None:
        return None if self._last is None else self._last.stats

    @property
    def has_committed(self) -> bool:
        return self._saver.has_committed

    def __del__(self) -> None:
        try:  # at the end of an interpreter there may be no contextlib
            self.close()
        except (PortusError, AttributeError):
            return

    def _check_usable(self) -> None:
        self._check_process()
        if self._is_closed:
            raise UsageError("this Checkpointer is closed")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UsageError(
                f"{printable(self.path)}: another process opened this Checkpointer; open one here"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccompaniedRequest(SaveRequest):
    """The request of a save that ``companions`` are told of. path: where it goes, absolute; empty
    for a version in a pool that has no pointer."""

    companions: Sequence[Companion]
    path: str = ""

    def make_room(self) -> bool:
        return any(each.yield_space() for each in self.companions)

    def begun(self, save: Save) -> None:
        for each in self.companions:
            each.begun(self.path, save)

    def committed(self, save: Save) -> None:
        for each in self.companions:
            each.committed(self.path, save)

    def over(self, save: Save) -> None:
        for each in self.companions:
            each.over(save)
