"""Where the pools of this user are: a note for each, by the identity of the pool.

A reference file does not choose what is opened (V6), and where its pool is on another file system
nothing beside it tells. So whoever opens a pool to save to it writes down where that is, among what
programs keep for this user; and a load looks there, by the identity that the reference names. That
is the user's own word, not the file's.

A note that cannot be written, or read, is none: loads then ask for ``$PORTUS_POOL``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from typing import Final

from portus.index.directory import state_directory

_log: Final = logging.getLogger("portus")

PLACES_MAX: Final = 16
"""Of one pool: it may have been moved, or copied with all that leads to it."""

_SIZE_MAX: Final = 1 << 20


def note(uuid: bytes, path: str) -> None:
    """Write down that the pool of that identity is at ``path``, absolute."""
    known = places(uuid)
    if path in known:
        return
    target = _path(uuid)
    fresh = f"{target}.{os.getpid()}-{threading.get_ident()}.new"
    try:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        with open(fresh, "w", encoding="ascii") as file:
            json.dump([path, *known][:PLACES_MAX], file)
        os.replace(fresh, target)
    except OSError as error:
        _log.debug("%s: cannot record where it is: %s", path, error)
        with contextlib.suppress(OSError):
            os.unlink(fresh)


def places(uuid: bytes) -> list[str]:
    """Where the pool of that identity was, last place first; nothing if nobody noted it."""
    try:
        with open(_path(uuid), encoding="ascii") as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_uid != os.geteuid():
                return []  # another's word
            found = json.loads(file.read(_SIZE_MAX))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return [each for each in found[:PLACES_MAX] if isinstance(each, str) and os.path.isabs(each)]


def _path(uuid: bytes) -> str:
    return os.path.join(state_directory(), "places", uuid.hex())
