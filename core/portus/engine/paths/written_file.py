"""``write_now``: files that are written within the call, by the calling thread.

For signal handlers, which may wait for nothing of ours (see ``engine.media.calls``): the publisher,
the buffers and the threads are this call's own, as those of another process would be. Earlier
requests for the paths do not change their names any more (see ``files.order``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from portus.engine.copying.segments import Stop
from portus.engine.files import order
from portus.engine.files.pending import PENDING
from portus.engine.paths.request import NewFile, name_of
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.handle import EndedSave, SaveStats
from portus.engine.pipeline.request import SaveRequest
from portus.engine.writer.image_file import FileDraft, FileWriter


def write_now(new: Sequence[NewFile], request: SaveRequest) -> EndedSave:
    """Write files of one directory, durably, and return their save. Raises ``MediumError``; then
    the paths are unchanged."""
    start = time.perf_counter()
    storages = [storage for each in new for storage in each.contents.storages]
    with PENDING.exempt(), contextlib.ExitStack() as stack:
        # Its own: the interrupted call may hold the locks of the shared one (decision 0055).
        writer = FileWriter(0)
        stack.callback(writer.close)
        paths = [each.real for each in new]
        images = [each.contents.image(each.said, request.note) for each in new]
        plain = SaveRequest(base=request.base)  # which waits for nothing
        draft = FileDraft(writer, paths, images, _newest_at(paths), plain)
        stack.callback(draft.release)
        is_here = np.array([each.device.type == "cpu" for each in storages], np.bool_)
        here = np.flatnonzero(is_here)
        address = np.array([storages[index].data_ptr() for index in here.tolist()], np.int64)
        draft.copy(here, address, Stop())
        for index in np.flatnonzero(~is_here).tolist():
            # Not by a feed, whose buffers the interrupted call may have locked.
            copied = storages[index].cpu()
            draft.copy(np.array([index]), np.array([copied.data_ptr()], np.int64), Stop())
        labels = Labels(model=name_of(new), step=request.step, token=os.urandom(16))
        info = draft.commit(labels).info
    took_s = time.perf_counter() - start
    stats = SaveStats(call_s=took_s, total_s=took_s, state_bytes=info.size, copied_bytes=info.size)
    return EndedSave(info, stats)


@contextlib.contextmanager
def _newest_at(paths: Sequence[str]) -> Iterator[None]:
    """Hold the turn while files get their names, and note them as the newest at their paths."""
    with order.turn:
        yield
        for path in paths:
            order.note(path)
