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
from portus.errors import BusyError, MediumError, printable


class SeriesClaim:
    """A claim of this process to the checkpoints of a series in the directory ``above``, absolute
    and without links. Raises ``BusyError`` if another process has them, and ``MediumError``. Of two
    simultaneous claims, one or both are refused."""

    def __init__(self, above: str, series: str) -> None:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        # In a folder without checkpoints: waits for the saves of a directory do not see it.
        said = [os.fsencode(os.path.join(series, FOLDER, each)) for each in ("claim", who)]
        folder = HiddenFolder(Linux(), above)
        try:
            record = folder.claim()
        except BaseException:
            folder.close()
            raise
        self.release: Final = weakref.finalize(self, _release, os.getpid(), folder, record)
        """Ends the claim when it is called, or when the process exits."""
        try:
            folder.system.write(record.file, b"\0".join(said))
            # With our claim in place: of two that come at once, at least one sees the other.
            for paths in folder.in_flight().values():
                if paths[0] == said[0] and paths != said:
                    raise BusyError(
                        None,
                        f"{printable(os.path.join(above, series))}: another job saves checkpoints "
                        f"of these names: {os.path.basename(os.fsdecode(paths[-1]))}. End it, or "
                        "save to another directory",
                    )
        except BaseException:
            self.release()
            raise


def _release(owner: int, folder: HiddenFolder, record: LockedRecord) -> None:
    if owner != os.getpid():
        return  # a forked child exits
    with contextlib.suppress(MediumError):
        # Before the lock is released: an unlocked record counts as a killed process's.
        folder.system.unlink(folder.make(), record.name)
    with contextlib.suppress(MediumError):
        folder.system.close(record.file)
    with contextlib.suppress(MediumError):
        folder.close()
