"""The files that other ranks publish into a directory, found there without messages."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from typing import Final

from portus.engine.directory.system import medium_error
from portus.engine.directory.waiting import in_flight
from portus.engine.files.pending import PENDING
from portus.engine.media import linux
from portus.engine.media.process import Descriptor
from portus.errors import AbandonedError, UsageError, printable

_POLL_MIN_S: Final = 0.002
_POLL_MAX_S: Final = 0.05

GONE_S: Final = 60.0
"""The time for which another node may see neither a rank's file nor its draft."""

GONE_HERE_S: Final = 1.0
"""The same time on a file system of this machine alone: the file may come between the two looks."""

SEEN_S: Final = 10.0
"""The time for which a file that another rank has begun may be out of sight."""

_NAMED_MAX: Final = 8


def await_files(
    directory: str, names: Collection[str], save: object, given_up: Collection[object]
) -> None:
    """Return when files of other ranks, ``names``, are in ``directory``, absolute and without
    links. Blocks while processes write them. Raises ``AbandonedError`` if none does, or if
    ``save``, by its id, is ``given_up`` meanwhile, and ``MediumError``."""
    seen, pause_s = time.monotonic(), _POLL_MIN_S
    gone_s = GONE_HERE_S if _is_of_this_machine(directory) else GONE_S
    while missing := set(names) - _names_in(directory):
        if save in given_up:
            raise AbandonedError(
                f"{printable(directory)}: save given up: a rank could not save its part"
            )
        now = time.monotonic()
        if missing & in_flight(directory):
            seen = now
        elif now - seen > gone_s:
            raise AbandonedError(
                f"{printable(directory)}: save given up: {list_names(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not there, and no process writes it: a "
                "rank has ended, or could not save its part"
            )
        time.sleep(pause_s)
        # Polled: a shared file system does not report names that another node makes.
        pause_s = min(2 * pause_s, _POLL_MAX_S)


def require_seen(directory: str, names: Collection[str]) -> None:
    """Raise ``UsageError`` unless this rank sees the files of other ranks, which have all begun to
    write, in ``directory``. Blocks for ``SEEN_S`` at most."""
    until = time.monotonic() + SEEN_S
    with PENDING.exempt():
        os.makedirs(directory, exist_ok=True)
        while missing := set(names) - in_flight(directory) - _names_in(directory):
            if time.monotonic() > until:
                raise UsageError(
                    f"{printable(directory)}: expected a directory that all ranks see, but "
                    f"{list_names(missing)}, which other ranks began to write, cannot be seen "
                    "here. Save to a file system that all nodes share"
                )
            time.sleep(_POLL_MAX_S)


def _names_in(directory: str) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError as error:
        raise medium_error(error, directory) from error


def list_names(names: Collection[str]) -> str:
    """Return names for a message: the first few, and how many more."""
    found = sorted(names)
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    return ", ".join(found[:_NAMED_MAX]) + more


def _is_of_this_machine(directory: str) -> bool:
    """Return whether this kernel alone opens the files of ``directory``, so its view of other
    processes is complete. Raises nothing."""
    with (
        contextlib.suppress(OSError),
        contextlib.closing(Descriptor(directory, os.O_RDONLY)) as opened,
    ):
        return linux.file_system_type(opened.number) in linux.LOCAL_TYPES
    return False
