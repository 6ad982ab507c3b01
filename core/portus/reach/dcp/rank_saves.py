"""``RankSaves``: the saves of this rank. The others learn of failed ones at their next save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from portus.companions.job.exchange import Failures
from portus.engine.job.settings import Settings
from portus.engine.pipeline.handle import SaveHandle
from portus.errors import AbandonedError, PortusError

_ASKED_MAX: Final = 16
"""The most saves that are remembered, to look later whether they failed."""

_log: Final = logging.getLogger("portus")


@dataclass(slots=True)
class RankSave:
    """A save of this rank: its number, the same on all ranks, and its files. ``handle``: None
    before it begins."""

    save: int
    paths: Sequence[str]
    handle: SaveHandle | None = None


class RankSaves:
    """The saves of this rank that may turn out to have failed on another one."""

    def __init__(self, settings: Settings) -> None:
        self._raises: Final = settings.on_error == "raise"
        self.asked: Final[list[RankSave]] = []
        """Saves that have not failed, as far as is known; the newest last."""
        self.given_up: Final[set[int]] = set()
        """The numbers of saves that will never be complete."""
        self._own: Failures = {}

    def take_failures(self) -> Failures:
        """Return the saves of this rank that failed since the last call."""
        failed: dict[int, tuple[bool, str]] = {}
        left = []
        for each in self.asked:
            # Planned, but not begun: a rank raised in between, so its file will never be there.
            if each.handle is None:
                failed[each.save] = False, "the save was not begun on all ranks"
            elif each.handle.committed or not each.handle.done:
                left.append(each)
            else:
                try:
                    each.handle.wait(0)
                except PortusError as error:
                    is_given_up = isinstance(error, AbandonedError)
                    failed.setdefault(each.save, (is_given_up, str(error)))
        # A failed save is reported within two saves: older ones are forgotten (decision 0213).
        self.asked[:] = left[-_ASKED_MAX:]
        self._own = failed
        return failed

    def hear(
        self, said: Sequence[Failures], remove: Callable[[str], None], *, is_first: bool
    ) -> None:
        """Give up saves that failed on some rank, and remove this rank's files of them. Raises
        ``AbandonedError`` as ``on_error`` says. said: the failures by rank. is_first: this rank
        logs those of all, and not only its own."""
        every = [(rank, *each) for rank, one in enumerate(said) for each in one.items()]
        failed: dict[int, str] = {}
        for rank, save, (_, why) in sorted(every, key=lambda each: each[2][0]):  # causes first
            failed.setdefault(save, f"portus: a save was given up: rank {rank}: {why}")
        self.given_up.update(failed)
        for lost in [each for each in self.asked if each.save in failed]:
            self.asked.remove(lost)
            for path in lost.paths:
                remove(path)
        for save, text in failed.items():
            if self._raises:
                raise AbandonedError(text)
            if is_first or save in self._own:
                _log.error("%s", text)
