"""The request for one save, with the methods that report its progress; ``Companion``: accompanies
the saves of one training, such as its journal or its mirror."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from portus.engine.pipeline.run import Save
from portus.engine.settings.keep import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The parts of one save besides its state. A class that follows the save overrides some of the
    methods; the others do nothing. None may hold on to the state.

    step: of training; 0 for a file that only has a name. note: bytes for a record of the file.
    follows_links: False replaces a link at the path, and leaves its target alone. base: a directory
    whose hidden folder has the drafts, if it is above the files and on their file system; else
    their own directory has them. removed_elsewhere: see ``Publisher.begin``. metrics, keep: of a
    version in a pool, see ``Labels``.
    """

    step: int = 0
    note: bytes = b""
    follows_links: bool = True
    base: str | None = None
    removed_elsewhere: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    keep: Keep | None = None

    def make_room(self) -> bool:
        """Remove something from a full disk. Return whether that was done."""
        return False

    def note_start(self, save: Save) -> None:
        """Note, in the call, that the save is sure to end."""

    def ready(self) -> None:
        """Return when the files may become visible. Raises ``PortusError`` to forbid it. On the
        worker."""

    def note_commit(self, save: Save) -> None:
        """Note that the files are visible, before any waiter learns of it. On the worker."""

    def over(self, save: Save) -> None:
        """Note that the save has ended, and its result. On the worker."""


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
