"""Where the storages of saved files go: into the files themselves, or into a pool."""

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
    """Where one ``FileSaver`` saves to; each has its own. With this one the files have their
    storages, and share none; others extend it."""

    @property
    def kind(self) -> str:
        """The kind of medium, once this is open."""
        return PLAIN_FILE.name

    def open(self) -> object:
        """Open it, if it is not open. Raises ``PortusError``."""

    def steady(self, late: Flags, *, unchanged: bool) -> Flags:
        """Return which storages to hash before anything is copied. late: those that are copied
        late. unchanged: nothing was stepped since the last save."""
        return np.zeros(len(late), np.bool_)

    def before(self, files: int) -> Previous | None:
        """Return the newest version that one of so many files may share storages with."""
        return None

    def at_paths(
        self, new: Sequence[NewFile], images: Sequence[Image], snapshot: Snapshot
    ) -> Sequence[Image]:
        """Return what the files at the paths are to contain; nothing if there are to be none."""
        return images

    def draft(
        self,
        new: Sequence[NewFile],
        images: Sequence[Image],
        snapshot: Snapshot,
        files: FileDraft | None,
        request: SaveRequest,
    ) -> Draft:
        """Begin one save. files: the draft of what ``at_paths`` returned; if this raises, it stays
        the caller's. request: asked to make room where there is no space. Raises
        ``PortusError``."""
        assert files is not None, "there are files at the paths"
        return files

    def note_commit(self, draft: Draft, version: CommittedVersion, steady: Flags) -> None:
        """Note that ``draft`` was committed. steady: which storages equalled those before."""

    def remove(self, path: str, publisher: Publisher[Descriptor]) -> None:
        """Remove the file at ``path``, and what it alone leads to."""
        publisher.remove(path)

    def note_failure(self, save: Save) -> None:
        """Note that a save failed. Raises nothing."""

    def close(self) -> None:
        """Let go of everything. A later save opens it again."""
