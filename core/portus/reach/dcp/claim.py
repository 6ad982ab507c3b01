"""``SeriesClaim``: the right of one job to save checkpoints of one series in a directory.

It is a locked record in the hidden folder, like that of a save in flight, but its names are not
files. When its process ends in any way, the lock is free, and the next start removes the record.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Final

from portus.engine.directory.folder import FOLDER, HiddenFolder, LockedRecord
from portus.engine.directory.system import Linux
from portus.engine.media.process import Descriptor
from portus.errors import BusyError, MediumError, printable


class SeriesClaim:
    """A claim of this process to the checkpoints of a series in the directory ``above``, absolute
    and without links. Raises ``BusyError`` if another process has them, and ``MediumError``."""

    def __init__(self, above: str, series: str) -> None:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        # In a folder without checkpoints: waits for the saves of a directory do not see it.
        said = [os.fsencode(os.path.join(series, FOLDER, each)) for each in ("claim", who)]
        folder = HiddenFolder(Linux(), above)
        try:
            _refuse_if_taken(folder, said, "", os.path.join(above, series))
            record = folder.claim()
        except BaseException:
            folder.close()
            raise
        self.release: Final = weakref.finalize(self, _release, os.getpid(), folder, record)
        """Ends the claim when it is called, or when the process exits."""
        try:
            folder.system.write(record.file, b"\0".join(said))
            # Again, with our claim in place: of two that saw none before, at least one sees the
            # other.
            _refuse_if_taken(folder, said, record.token, os.path.join(above, series))
        except BaseException:
            self.release()
            raise


def _refuse_if_taken(
    folder: HiddenFolder[Descriptor], said: list[bytes], own: str, what: str
) -> None:
    """Raise ``BusyError`` if another process has claimed the series. Of two simultaneous claims,
    one or both are refused."""
    for token, paths in folder.in_flight().items():
        if token != own and paths[0] == said[0] and paths != said:
            who = os.path.basename(os.fsdecode(paths[-1]))
            raise BusyError(
                None,
                f"{printable(what)}: another job saves checkpoints of these names: {who}. End it, "
                "or save to another directory",
            )


def _release(
    owner: int, folder: HiddenFolder[Descriptor], record: LockedRecord[Descriptor]
) -> None:
    if owner != os.getpid():
        return  # a forked child exits
    with contextlib.suppress(MediumError):
        # Before the lock is released: an unlocked record counts as a killed process's.
        folder.system.unlink(folder.make(), record.name)
    with contextlib.suppress(MediumError):
        folder.system.close(record.file)
    with contextlib.suppress(MediumError):
        folder.close()
