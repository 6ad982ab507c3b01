"""Waits for the saves of other processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from typing import Final

from portus.engine.directory.folder import FOLDER, HiddenFolder
from portus.engine.directory.system import Linux
from portus.engine.media.process import Descriptor
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
    return all(
        _wait_in(base, os.path.relpath(directory, base), name, until_s)
        for base in bases_of(directory)
    )


def bases_of(directory: str) -> list[str]:
    """Return the directories whose hidden folders may have drafts for ``directory``, absolute:
    itself, and those above it."""
    found, last = [], ""
    while directory != last:
        if os.path.isdir(os.path.join(directory, FOLDER)):
            found.append(directory)
        directory, last = os.path.dirname(directory), directory
    return found


def _wait_in(base: str, below: str, name: str | None, until_s: float | None) -> bool:
    pause_s = _PAUSE_MIN_S
    where = b"" if below == "." else os.fsencode(below)
    wanted = None if name is None else os.path.join(where, os.fsencode(name))

    def is_wanted(path: bytes) -> bool:
        return path == wanted if wanted is not None else os.path.dirname(path) == where

    with contextlib.suppress(MediumError), _open_hidden(base) as folder:

        def in_flight() -> set[str]:
            found = folder.in_flight().items()
            return {token for token, paths in found if any(map(is_wanted, paths))}

        awaited = in_flight()
        while awaited:
            if until_s is not None and time.monotonic() >= until_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            awaited &= in_flight()  # a record is empty at first, and may be of another file
    return True


def in_flight(directory: str) -> set[str]:
    """Return the names of the files that any process is saving to ``directory``, absolute and
    without links."""
    found: set[str] = set()
    for base in bases_of(directory):
        below = os.path.relpath(directory, base)
        with contextlib.suppress(MediumError), _open_hidden(base) as folder:
            for path in itertools.chain(*folder.in_flight().values()):
                where, name = os.path.split(os.fsdecode(path))
                if where == ("" if below == "." else below):
                    found.add(name)
    return found


@contextlib.contextmanager
def _open_hidden(base: str) -> Iterator[HiddenFolder[Descriptor]]:
    folder = HiddenFolder(Linux(), base)
    try:
        yield folder
    finally:
        # Not ``close``, which removes an empty hidden folder: waiting must change nothing.
        folder.forget()
        folder.system.close(folder.base)
