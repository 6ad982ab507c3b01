"""What becomes of references when a training ends: real files, as many as there is room for.

Many scripts never call ``end_training``, and drop their ``Accelerator`` before the program ends. So
what is to be done then outlives it, and holds nothing of it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Final

import portus
from portus_accelerate.settings import Settings

_log: Final = logging.getLogger("portus_accelerate")


class Ending:
    """The checkpoint directories that one ``Accelerator`` saved, on the process that saves them."""

    def __init__(self, settings: Settings) -> None:
        self._settings: Final = settings
        self._process: Final = os.getpid()
        self._times_preempted: Final = portus.times_preempted()
        self._run: portus.Run | None = None
        self._saved: dict[str, None] = {}
        self._is_over = False

    def loaded(self, run: portus.Run, directory: str) -> None:
        """The training that ends went on from ``directory``, of ``run``. If it saved nothing since:
        a process that was killed as its training ended left references there."""
        if self._run is None:
            self._run, self._saved = run, {directory: None}

    def saved(self, run: portus.Run, directory: str) -> None:
        """Note that ``directory`` has references now, and that nothing in it is newer."""
        self._run = run
        self._saved.pop(directory, None)
        self._saved[directory] = None
        if self._settings.materialize == "end":
            _OPEN.add(self)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing yet that is to be made real."""
        return self._run is None

    def begin(self) -> None:
        """One more training: at its end older checkpoints are looked at again."""
        self._is_over = False

    def materialize(self) -> None:
        """Training ended as it should, and saves are over: real files, the newest first. What was
        saved later is made real each time; of what is older, what stays is said once. Nothing is
        where a job was told to go: the next run goes on with what there is."""
        if portus.times_preempted() != self._times_preempted:
            _OPEN.discard(self)
            return
        if self._settings.materialize == "end":
            within_s = self._settings.materialize_within
            portus.materialize_at_end(self._take(), within_s=within_s)
            if self._run is not None:
                self._run.give_back()

    def at_exit(self) -> None:
        """The program ends, and nobody said that training did. After an error, or Ctrl-C, nothing
        is materialised, and what stays is said."""
        if self._process != os.getpid() or self._run is None:
            return
        try:
            self._run.close()
            if getattr(sys, "last_type", None) is None:
                self.materialize()
            else:
                why = "training did not finish"
                portus.say_remaining(portus.remaining_references(self._take(), why))
        except portus.PortusError as error:  # nobody is left to catch it
            _log.error("Portus: a save failed: %s", error)

    def _take(self) -> list[str]:
        """What was saved, the newest first; for the first time, older ones of the same run too."""
        found = list(reversed(self._saved))
        if found and not self._is_over and self._run is not None:
            found += portus.saved_in(map(os.path.dirname, found), self._run.name)
        self._saved, self._is_over = {}, True
        _OPEN.discard(self)
        return [directory for directory in dict.fromkeys(found) if os.path.isdir(directory)]


_OPEN: Final[set[Ending]] = set()


@atexit.register
def _end_all() -> None:
    for ending in list(_OPEN):
        ending.at_exit()
