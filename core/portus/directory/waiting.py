"""Waiting for the saves of other processes."""

from __future__ import annotations

import os
import time
from typing import Final

from portus.directory.folder import FOLDER, HiddenFolder
from portus.directory.system import Linux
from portus.errors import MediumError

_PAUSE_MIN_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.05


def wait_for_drafts(
    directory: str, name: str | None = None, timeout_s: float | None = None
) -> bool:
    """Wait until the saves to ``directory`` that any process has in flight now are over; False if
    time ran out.

    A process that was killed has none. Changes nothing; where the hidden folder may not be read
    there is nothing to wait for. directory: absolute, without links. name: of the one file to wait
    for; None waits for all. timeout_s: None waits for ever.
    """
    if not os.path.isdir(os.path.join(directory, FOLDER)):
        return True
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = _PAUSE_MIN_S
    try:
        folder = HiddenFolder(Linux(), directory)
    except MediumError:
        return True
    try:
        wanted = None if name is None else os.fsencode(name)
        found = folder.in_flight().items()
        awaited = {token for token, names in found if wanted is None or wanted in names}
        while awaited:
            if until_s is not None and time.monotonic() >= until_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            awaited &= folder.in_flight().keys()
    except MediumError:
        return True
    finally:
        folder.forget()
        folder.system.close(folder.directory)
    return True
