"""The place of the storages of saved files: in the files themselves, or in a pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from portus.engine.directory.publisher import Publisher
from portus.engine.image.image import Image
from portus.engine.media.base import PLAIN_FILE
from portus.engine.media.process import Descriptor
from portus.engine.paths.request import NewFile
from portus.engine.pipeline.draft import CommittedVersion, Draft
from portus.engine.pipeline.plan import Flags, Previous, Snapshot
from portus.engine.pipeline.request import SaveRequest
from portus.engine.pipeline.run import Save
from portus.engine.writer.image_file import FileDraft


class Destination:
    """The place that one ``FileSaver`` saves to; each has its own. Here the files have their
    storages, and share none; subclasses differ."""

    @property
    def kind(self) -> str:
        """The kind of medium, once the destination is open."""
        return PLAIN_FILE.name

    def open(self) -> object:
        """Open the destination, if it is not open. Raises ``PortusError``."""

    def steady(self, late: Flags, *, unchanged: bool) -> Flags:
        """Return which storages to hash before anything is copied. late: those that are copied
        late. unchanged: no optimizer stepped since the last save."""
        return np.zeros(len(late), np.bool_)

    def before(self, files: int) -> Previous | None:
        """Return the newest version, with that many files, to share storages with."""
        return None

    def at_paths(
        self, new: Sequence[NewFile], images: Sequence[Image], snapshot: Snapshot
    ) -> Sequence[Image]:
        """Return the images of the files at the paths; none if there are to be no files."""
        return images

    def draft(
        self,
        new: Sequence[NewFile],
        images: Sequence[Image],
        snapshot: Snapshot,
        files: FileDraft | None,
        request: SaveRequest,
    ) -> Draft:
        """Begin one save. files: the draft of what ``at_paths`` returned; if this raises, the
        caller keeps it. request: makes room when space runs out. Raises ``PortusError``."""
        assert files is not None, "there are files at the paths"
        return files

    def note_commit(self, draft: Draft, version: CommittedVersion, steady: Flags) -> None:
        """Note that ``draft`` was committed. steady: which storages equalled those before."""

    def remove(self, path: str, publisher: Publisher[Descriptor]) -> None:
        """Remove the file at ``path``, and data that only it refers to."""
        publisher.remove(path)

    def note_failure(self, save: Save) -> None:
        """Note that a save failed. Raises nothing."""

    def close(self) -> None:
        """Release everything. A later save opens the destination again."""
