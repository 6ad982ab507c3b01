"""The objects that the savers of a process share: one queue, one ring of buffers, one publisher."""

from __future__ import annotations

from typing import Final

from portus.engine.directory.publisher import Publisher
from portus.engine.directory.system import Linux
from portus.engine.directory.waiting import bases_of
from portus.engine.files.queue import Queue
from portus.engine.writer.ring import StagingRing
from portus.engine.writer.ways import Ways


class SharedWriter:
    """The objects that the savers of a process share. Threads share it; a forked child makes its
    own.

    staging: bytes of saves that may be unfinished before a call waits, and of the buffers that
        they share.
    """

    def __init__(self, staging: int) -> None:
        self.queue: Final = Queue("portus-files", staging)
        self.publisher: Final = Publisher(Linux())
        self.ring: Final = StagingRing(staging)
        self.ways: Final = Ways()

    def close(self) -> None:
        """Finish the saves in flight, and remove hidden files."""
        # First: its work uses the other two.
        self.queue.close()
        self.publisher.close()
        self.ring.close()


def recover(directory: str) -> None:
    """Restore files that a killed process had removed from ``directory`` before their replacement
    was there. Raises ``MediumError``."""
    files = Publisher(Linux())
    try:
        for base in bases_of(directory):
            files.recover(base)
    finally:
        files.close()
