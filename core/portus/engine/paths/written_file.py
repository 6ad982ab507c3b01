"""``WrittenFile``: a file that is written within the call, by the calling thread.

For signal handlers, which may wait for nothing of ours (see ``engine.media.calls``): the publisher,
the buffers and the threads are this call's own, as those of another process would be. Earlier
requests for the path do not change its name any more (see ``files.order``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from portus.engine.copying.segments import Stop
from portus.engine.directory.publisher import Publisher, UnpublishedFile
from portus.engine.directory.system import Linux
from portus.engine.files import order
from portus.engine.files.pending import PENDING
from portus.engine.media.process import Descriptor
from portus.engine.paths.request import NewFile, base_of, name_of
from portus.engine.pipeline.handle import SaveStats
from portus.engine.pipeline.request import SaveRequest
from portus.engine.spec import VersionInfo
from portus.engine.writer.image_file import ImageFile
from portus.engine.writer.ring import StagingRing
from portus.engine.writer.ways import Ways


class WrittenFile:
    """A save that has ended, and is durable. See ``engine.pipeline.handle.SavePending``."""

    over: Final = True
    error: Final = None

    def __init__(self, files: Sequence[NewFile], request: SaveRequest) -> None:
        """Write the files, of one directory. Raises ``MediumError``; then the paths are
        unchanged."""
        start = time.perf_counter()
        with PENDING.exempt(), contextlib.ExitStack() as stack:
            # Its own: the interrupted call may hold the lock of the shared one (decision 0055).
            publisher = Publisher(Linux())
            stack.callback(publisher.close)
            paths = [each.real for each in files]
            draft = publisher.begin(*paths, base=base_of(request.base, paths[0]))
            stack.callback(draft.abandon)
            for each, unpublished in zip(files, draft.files, strict=True):
                _write(each, request.note, unpublished)
            draft.publish(_newest_at(paths))
        took_s = time.perf_counter() - start
        size = sum(int(each.contents.lengths.sum()) for each in files)
        self.stats: Final = SaveStats(
            call_s=took_s, total_s=took_s, state_bytes=size, copied_bytes=size
        )
        self._info: Final = VersionInfo(
            name_of(files), 0, 0, request.step, os.urandom(16), time.time_ns(), size
        )

    def join(self) -> None:
        """Return at once: the save has ended."""

    def result(self, timeout_s: float | None) -> VersionInfo:
        """Return the version that was saved, at once."""
        return self._info


def _write(new: NewFile, note: bytes, draft: UnpublishedFile[Descriptor]) -> None:
    """Write the file of a draft, durably. Storages of a device are copied here one at a time."""
    contents, ring = new.contents, StagingRing(0)
    file = ImageFile(
        draft.file.number,
        new.said,
        contents.image(new.said, note),
        is_spare=draft.is_spare,
        ring=ring,
        ways=Ways(),  # with no times of other saves, and none for them
    )
    try:
        is_here = np.array([each.device.type == "cpu" for each in contents.storages], np.bool_)
        here = np.flatnonzero(is_here)
        address = np.array(
            [contents.storages[index].data_ptr() for index in here.tolist()], np.int64
        )
        file.copy(here, address, Stop())
        for index in np.flatnonzero(~is_here).tolist():
            # Not by a feed, whose buffers the interrupted call may have locked.
            copied = contents.storages[index].cpu()
            file.copy(np.array([index]), np.array([copied.data_ptr()], np.int64), Stop())
        file.finish()
    finally:
        file.close()
        ring.close()


@contextlib.contextmanager
def _newest_at(paths: Sequence[str]) -> Iterator[None]:
    """Hold the turn while files get their names, and note them as the newest at their paths."""
    with order.turn:
        yield
        for path in paths:
            order.note(path)
