"""Waits for the saves of other processes."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

from portus.engine.directory.folder import FOLDER, HiddenFolder
from portus.engine.directory.system import Linux
from portus.errors import MediumError

_PAUSE_MIN_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.05


def wait_for_drafts(
    directory: str, name: str | None = None, timeout_s: float | None = None
) -> bool:
    """Wait until the saves to ``directory`` that any process has in flight now have ended; return
    False if time ran out.

    A process that was killed has none. Changes nothing; if the hidden folder may not be read, there
    is nothing to wait for. directory: absolute, without links. name: of the one file to wait for;
    None waits for all. timeout_s: None waits for ever.
    """
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = _PAUSE_MIN_S

    def find_wanted() -> set[str]:
        found = _saves_to(directory).items()
        return {token for token, names in found if name is None or name in names}

    awaited = find_wanted()
    while awaited:
        if until_s is not None and time.monotonic() >= until_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        awaited &= find_wanted()  # a record is empty at first, and may be of another file
    return True


def in_flight(directory: str) -> set[str]:
    """Return the names of the files that any process is saving to ``directory``, absolute and
    without links."""
    return set[str]().union(*_saves_to(directory).values())


def bases_of(directory: str) -> list[str]:
    """Return the directories whose hidden folders may have drafts for ``directory``, absolute:
    itself, and those above it."""
    found, last = [], ""
    while directory != last:
        if os.path.isdir(os.path.join(directory, FOLDER)):
            found.append(directory)
        directory, last = os.path.dirname(directory), directory
    return found


def _saves_to(directory: str) -> dict[str, set[str]]:
    """Return the names of the files that each save in flight is to make in ``directory``, by its
    token."""
    found = {}
    for base in bases_of(directory):
        below = os.path.relpath(directory, base)
        with contextlib.suppress(MediumError), contextlib.ExitStack() as stack:
            folder = HiddenFolder(Linux(), base)
            # Not ``close``, which removes an empty hidden folder: waiting must change nothing.
            stack.callback(folder.leave)
            for token, paths in folder.in_flight().items():
                places = [os.path.split(os.fsdecode(path)) for path in paths]
                names = {name for where, name in places if where == ("" if below == "." else below)}
                if names:
                    found[token] = names
    return found
