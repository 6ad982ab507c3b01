"""``Companion``: accompanies the saves of one training, such as its journal or its mirror."""

from __future__ import annotations

from portus.engine.pipeline.run import Save


class Companion:
    """Is called at each point of a training's saves. Each method does nothing by default."""

    def fetch(self) -> object:
        """Fetch what other machines have of the training, before it begins. Raises
        ``PortusError``."""

    def begin(self) -> None:
        """Prepare for a save. Raise ``PortusError`` to forbid it."""

    def note_start(self, path: str, save: Save) -> None:
        """Note that a save to ``path``, absolute, is sure to end; "" for a save without a path."""

    def note_commit(self, path: str, save: Save) -> None:
        """Note that the file at ``path`` was committed, before waiters wake. On the worker."""

    def removing(self, path: str) -> None:
        """Note that the file at ``path`` is about to be removed. On the worker."""

    def over(self, save: Save) -> None:
        """Note that a save has ended, and its result. On the worker."""

    def yield_space(self) -> bool:
        """Free space on a full disk. Return whether there was some."""
        return False

    def close(self) -> None:
        """Finish. A second call does nothing."""
