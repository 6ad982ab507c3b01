"""``Companion``: what accompanies the saves of one training, such as its journal or its mirror."""

from __future__ import annotations

from portus.engine.pipeline.run import Save


class Companion:
    """Is called at each point of a training's saves. Each method does nothing by default."""

    def fetch(self) -> object:
        """Bring what other machines have of the training, before it begins. Raises
        ``PortusError``."""

    def begin(self) -> None:
        """Prepare for a save. Raises ``PortusError`` if that save must not be."""

    def note_start(self, path: str, save: Save) -> None:
        """Note that a save to ``path``, absolute, is sure to end; empty: it has no path."""

    def note_commit(self, path: str, save: Save) -> None:
        """Note that what is at ``path`` was committed, before anybody is told. On the worker."""

    def removing(self, path: str) -> None:
        """Note that what is at ``path`` is about to be removed. On the worker."""

    def over(self, save: Save) -> None:
        """Note that a save has ended, and how. On the worker."""

    def yield_space(self) -> bool:
        """Give back space on a full disk. Return whether there was some."""
        return False

    def close(self) -> None:
        """Finish. A second call does nothing."""
