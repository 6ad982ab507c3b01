"""Marks of one training: which one is of the current tables, and which are kept."""

from __future__ import annotations

import logging
import os
from typing import Final

import torch

from portus.companions.embedding.committer import Committer
from portus.companions.embedding.store import TableStore
from portus.engine.state.elsewhere import Elsewhere
from portus.reach.pools.elsewhere import marked_state, within

_log: Final = logging.getLogger("portus")

_IMAGES_MAX: Final = 16
"""Images of the tables that marks may keep before a warning says how to keep fewer."""


class Marks:
    """The marks in the pool of one training. For the training thread alone."""

    def __init__(self, store: TableStore, committer: Committer, keep: int | None) -> None:
        """keep: how many of the newest marks to keep; None: all."""
        self._store: Final = store
        self._committer: Final = committer
        self._keep: Final = keep
        self._newest: tuple[int, str] | None = None
        """The batch of the newest mark, and its token."""
        self._read: tuple[str, object] | None = None
        """The token of the mark that was read last, and its state."""
        self._images: dict[int, int] = {}
        """The place of the image of each mark that was examined, by its id."""
        self._was_said = False
        """True once a warning of many marks was logged."""

    def of(self, batch: int) -> tuple[int, str]:
        """Return the batch and the token of a mark of ``batch``, the last one committed. Block
        until the mark is durable."""
        if self._newest is None or self._newest[0] != batch:
            token = os.urandom(16)
            with self._committer.alone():
                self._store.mark(batch, token, self._beyond())
                self._say_many()
            self._newest = batch, token.hex()
        return self._newest

    def read(self, place: Elsewhere) -> torch.Tensor:
        """Return the tensor at a place of a mark. Raise as ``fill``."""
        if self._read is None or self._read[0] != place.token:
            self._read = place.token, marked_state(self._store.pool, place)
        return within(self._read[1], place)

    def forget(self) -> None:
        """Forget the newest mark and the last state read: a new moment is about to be taken."""
        self._read = self._newest = None

    def _say_many(self) -> None:
        """Warn, once, that the pool keeps many images for marks, if ``keep`` is None."""
        if self._keep is not None or self._was_said:
            return
        marks = self._store.marks()
        for each in marks:
            if each.info.id not in self._images:
                self._images[each.info.id] = self._store.image_of(each)
        newest = self._store.newest
        shared = None if newest is None or self._store.in_place else self._store.image_of(newest)
        images = {self._images[each.info.id] for each in marks} - {shared}
        if len(images) > _IMAGES_MAX:
            self._was_said = True
            _log.warning(
                "portus: %s: %d marks keep %d images of the tables, and the pool grows with each "
                "further one: pass protect(keep=), two more than the checkpoints that you keep; or "
                "remove what no checkpoint needs: portus rm 'embedding marks' --keep N --force",
                self._store.pool.medium.info.name,
                len(marks),
                len(images),
            )

    def _beyond(self) -> list[int]:
        """Return the ids of the marks to remove once there is another one."""
        if self._keep is None:
            return []
        gone = self._store.marks()[: -self._keep + 1 or None]
        return [each.info.id for each in gone]
