"""Waiting for the saves of other processes to a path."""

from __future__ import annotations

import os
import time
from typing import Final

from portus.directory.folder import FOLDER, HiddenFolder
from portus.directory.system import Linux
from portus.errors import MediumError

_PAUSE_MIN_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.05


def wait_for_drafts(path: str, timeout_s: float | None = None) -> bool:
    """Wait until no process has a save to ``path`` in flight; False if time ran out.

    A process that was killed has none. Changes nothing; where the hidden folder may not be read
    there is nothing to wait for. path: absolute, without links. timeout_s: None waits for ever.
    """
    directory, name = os.path.split(path)
    if not os.path.isdir(os.path.join(directory, FOLDER)):
        return True
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = _PAUSE_MIN_S
    try:
        folder = HiddenFolder(Linux(), directory)
    except MediumError:
        return True
    try:
        while folder.is_in_flight(name):
            if until_s is not None and time.monotonic() >= until_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    except MediumError:
        return True
    finally:
        folder.forget()
        folder.system.close(folder.directory)
    return True
