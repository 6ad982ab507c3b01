"""What the savers of a process share: one queue, one ring of buffers, one publisher."""

from __future__ import annotations

from typing import Final

from portus.engine.directory.publisher import Publisher
from portus.engine.directory.system import Linux, System
from portus.engine.directory.waiting import bases_of
from portus.engine.files.queue import Queue
from portus.engine.loading.any_format import is_whole
from portus.engine.media.process import Descriptor
from portus.engine.writer.ring import StagingRing
from portus.engine.writer.ways import Ways


class SharedWriter:
    """What the savers of one process share. Threads may share it; a forked child makes its own.

    staging: bytes of saves that may be unfinished before a call waits, and of the buffers that
        they share.
    """

    def __init__(self, staging: int) -> None:
        self.queue: Final = Queue("portus-files", staging)
        self.publisher: Final = new_publisher()
        self.ring: Final = StagingRing(staging)
        self.ways: Final = Ways()

    def close(self) -> None:
        """Finish what is in flight, and remove what is hidden."""
        # First: its work uses the other two.
        self.queue.close()
        self.publisher.close()
        self.ring.close()


def new_publisher() -> Publisher[Descriptor]:
    """Return what publishes files, and puts back none that is not whole."""
    return Publisher(Linux(), is_worth_restoring)


def is_worth_restoring(system: System[Descriptor], file: Descriptor, path: str) -> bool:
    """Return whether an open file, to be put at ``path``, is whole, and no pointer that is known to
    lead to nothing. Reads all of it."""
    return is_whole(file.number, path)


def recover(directory: str) -> None:
    """Put back what a process that was killed had removed from ``directory`` before the file that
    was to replace it was there. Raises ``MediumError``."""
    files = new_publisher()
    try:
        for base in bases_of(directory):
            files.recover(base)
    finally:
        files.close()
