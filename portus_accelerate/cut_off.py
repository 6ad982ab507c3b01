"""Checkpoint directories whose save was cut off: they are taken out of the way.

Whoever looks for the newest checkpoint, the script, Accelerate or Trainer, would take such a one
for it. What is being made is on record (``intent``); what was never committed is known to the pool.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, Final

import portus
from portus_accelerate import intent, place

_log: Final = logging.getLogger("portus_accelerate")


class CutOff:
    """The cut-off checkpoints of one ``Accelerator``, on each of its processes.

    run_of: the run that saves a checkpoint directory. pool: the one that was configured.
    is_writer: whether this process saves for others; it is the one that takes them away.
    """

    def __init__(
        self,
        accelerator: Any,
        run_of: Callable[[str], portus.Run],
        pool: portus.Place | None,
        *,
        is_writer: bool,
    ) -> None:
        self._accelerator: Final = accelerator
        self._run_of: Final = run_of
        self._pool: Final = pool
        self._is_writer: Final = is_writer
        self._note: intent.Intent | None = None

    # While one is made.

    @contextlib.contextmanager
    def noted(self, directory: str, *, fills: bool) -> Iterator[list[Callable[[], Any]]]:
        """Inside, it is on record that ``directory`` is being made; what is given is to be done
        after the commit. fills: whether Accelerate writes into it what has to be whole, also if
        it is there already."""
        is_new = not os.path.exists(directory)
        after_commit: list[Callable[[], Any]] = []
        note = None
        if is_new or (fills and self._is_writer):
            note = intent.note(_home(self._run_of(directory)), directory, is_writer=self._is_writer)
        yield after_commit  # after an error the note stays, for the next run
        if note is None:
            return
        if not self._is_writer:
            self._note = note  # the writer may not have come so far
        elif is_new:
            note.drop()
        else:
            after_commit.append(note.drop)

    def drop_note(self) -> None:
        """The writer has come so far: the next save begins, or training ends."""
        note, self._note = self._note, None
        if note is not None:
            note.drop()

    # After a restart.

    def was_cut_off(self, directory: str) -> bool:
        """True if ``directory`` was a checkpoint that was put aside, since it is not whole."""
        return bool(_aside(self._run_of(directory), directory))

    def has_saved(self, directory: str) -> bool:
        """True if Portus has begun to save checkpoints beside ``directory``, in any process."""
        run = self._run_of(directory)
        home = _home(run)
        is_alone = os.path.dirname(home) == os.path.dirname(directory) and os.path.isdir(home)
        has_pool = run.place.is_directory and os.path.exists(run.place.pool_of(run.name))
        return is_alone or has_pool or bool(_aside(run))

    def mend_all(self) -> None:
        """Put checkpoints aside that are not whole, wherever this ``Accelerator`` may save."""
        homes = [
            os.path.join(root, ".portus") for root in place.roots(self._accelerator.project_dir)
        ]
        own = map(portus.Place.named, homes)
        pools = [self._pool, portus.Place.by_variable(), *own]
        self._mend([pool for pool in dict.fromkeys(pools) if pool], homes, uncommitted=True)

    def mend(self, directory: str, *, uncommitted: bool) -> None:
        """Put in order what the run has that saves ``directory``. uncommitted: also put aside what
        was never committed."""
        run = self._run_of(directory)
        self._mend([run.place], [_home(run)], uncommitted=uncommitted)

    def _mend(self, pools: list[portus.Place], homes: list[str], *, uncommitted: bool) -> None:
        """Mend ``pools`` on the process that saves, while the others wait."""
        pairs = itertools.product(pools, homes)  # a home has links, if the pool is on a host
        for pool, home in pairs if self._is_writer else ():
            notes = _Notes(home)
            try:
                removed = portus.mend(pool, uncommitted=uncommitted, links=home, before=notes.add)
            except portus.PortusError as error:
                _log.warning("Portus: %s could not be cleaned up: %s", pool, error)
                continue
            for directory in sorted({os.path.dirname(path) for path in removed}):
                self._take_away(directory)
            notes.drop()
        for home in homes if self._is_writer and uncommitted else ():
            for directory in intent.cut_off(home):
                self._take_away(directory)
        self._accelerator.wait_for_everyone()

    def _take_away(self, directory: str) -> None:
        """A checkpoint that is not whole is out of the way of whoever looks for the newest one. Of
        each run the last one is kept, for what hooks wrote into it."""
        run = self._run_of(directory)
        older, home = _aside(run), _home(run)
        name = _aside_name(run, os.path.basename(directory)) + str(time.time_ns())
        try:
            os.makedirs(home, exist_ok=True)
            os.rename(directory, os.path.join(home, name))
        except OSError as error:
            _log.warning("Portus: %s is not a whole checkpoint; remove it: %s", directory, error)
            return
        _log.warning("Portus: %s was never committed (its save was cut off)", directory)
        for path in older:
            shutil.rmtree(path, ignore_errors=True)


class _Notes:
    """Notes that checkpoints are being taken away: their files are removed first, one by one. If
    the process dies meanwhile, the next run takes away what it leaves."""

    def __init__(self, home: str) -> None:
        self._home: Final = home
        self._made: Final[list[intent.Intent]] = []

    def add(self, paths: list[str]) -> None:
        """Note that the files at ``paths`` are about to be removed."""
        for directory in sorted({os.path.dirname(path) for path in paths}):
            made = intent.note(self._home, directory, is_writer=True)
            if made is not None:
                self._made.append(made)

    def drop(self) -> None:
        """Drop the notes: the files were removed."""
        for made in self._made:
            made.drop()


def _home(run: portus.Run) -> str:
    """Where notes are, and what was put aside."""
    assert run.links is not None
    return run.links


def _aside(run: portus.Run, directory: str = "") -> list[str]:
    """What was put aside of a run, or of its checkpoint ``directory`` alone; oldest first."""
    start, home = _aside_name(run, os.path.basename(directory)), _home(run)
    names = place.names_in(home) if os.path.isdir(home) else []
    found = [name for name in names if name.startswith(start)]
    return [os.path.join(home, name) for name in sorted(found, key=_when)]


def _aside_name(run: portus.Run, checkpoint: str) -> str:
    """How the name begins of what was put aside; a time follows."""
    start = f"incomplete-{urllib.parse.quote(run.name, safe='')}-"
    return f"{start}{checkpoint}-" if checkpoint else start


def _when(name: str) -> int:
    end = name.rpartition("-")[2]
    return int(end) if end.isdigit() else 0
