"""``FileJournal``: what the saves of one training to files came to, for ``portus report``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from portus.companions.job.journal import Journal
from portus.engine.pipeline.companions import Companion
from portus.engine.pipeline.run import Save

JOURNALS: Final = "checkpoints.journal"
"""In ``.portus``: the journals of all trainings that save files there, each a file of its own."""


class FileJournal(Companion):
    """The journal of one training, which is called ``name`` there. place: returns the directory of
    the journal; None while there is none. It is asked again at each save. medium: what is saved
    to."""

    def __init__(
        self, name: str, place: Callable[[], str | None], medium: str = "pool directory"
    ) -> None:
        self._journal: Final = Journal(name, place, medium)

    def begun(self, path: str, save: Save) -> None:
        self._journal.asked(save.token, save.step, path or None)

    def over(self, save: Save) -> None:
        self._journal.begin()
        if save.error is None:
            self._journal.committed(save.token, save.stats)
        else:
            self._journal.failed(save.step, str(save.error), save.token)

    def close(self) -> None:
        """Note that training ended by itself."""
        self._journal.close()
