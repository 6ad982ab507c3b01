"""``SeriesClaim``: one job at a time saves checkpoints of one series beside each other.

It is a locked record in the hidden folder, as a save in flight has one, which names what is no
file. When its process ends, however that happens, nobody has the lock, and the next start removes
the record.
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
    """The checkpoints of a series in the directory ``above``, absolute and without links, are this
    process's. Raises ``BusyError`` if another process has them, and ``MediumError``."""

    def __init__(self, above: str, series: str) -> None:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        # In a folder that has no checkpoints: who waits for those of a directory sees none here.
        said = [os.fsencode(os.path.join(series, FOLDER, each)) for each in ("claim", who)]
        folder = HiddenFolder(Linux(), above)
        try:
            _refuse_if_taken(folder, said, "", os.path.join(above, series))
            record = folder.claim()
        except BaseException:
            folder.close()
            raise
        self.release: Final = weakref.finalize(self, _release, os.getpid(), folder, record)
        """Call it to end the claim, which the exit of the process does too."""
        try:
            folder.system.write(record.file, b"\0".join(said))
            # Again, now that ours is there: of two that saw nothing before, at least one sees the
            # other.
            _refuse_if_taken(folder, said, record.token, os.path.join(above, series))
        except BaseException:
            self.release()
            raise


def _refuse_if_taken(
    folder: HiddenFolder[Descriptor], said: list[bytes], own: str, what: str
) -> None:
    """Raise ``BusyError`` if another process has claimed the series. Of two that claim at once, one
    of them or both are refused."""
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
        return  # a forked child ends
    with contextlib.suppress(MediumError):
        # Before the lock goes: a record that nobody holds is what a killed process left.
        folder.system.unlink(folder.make(), record.name)
    with contextlib.suppress(MediumError):
        folder.system.close(record.file)
    with contextlib.suppress(MediumError):
        folder.close()
