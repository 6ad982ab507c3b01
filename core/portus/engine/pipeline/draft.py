"""A version that is being made: the place of the bytes of one save, until its commit or release.

This is the seam between a save and its place. ``Save`` decides what is copied, what is shared, and
whether it still counts; a draft places bytes, and makes them a version. ``FileDraft`` does it in a
directory, and ``PoolDraft`` in a pool that this process writes. The client of a storage host has
another one, and on that host it is a ``PoolDraft`` again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.segments import Digests, Stop
from portus.engine.pipeline.plan import Column, Feed, Previous
from portus.engine.settings.keep import Keep
from portus.engine.spec import VersionInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The facts of a version besides its bytes. ``contents``: of a pool, the contents of its
    storages. ``inexact``, ``metrics``: see ``VersionInfo``. ``keep``: which versions of the model
    stay: the same commit removes the others, and an older one of the same step; None: all stay."""

    model: str
    step: int
    token: bytes
    contents: bytes = b""
    inexact: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    keep: Keep | None = None


class CommittedVersion(Protocol):
    """The result of a commit."""

    @property
    def info(self) -> VersionInfo:
        """The version that was made."""


class Draft(Protocol):
    """A save in the making, at any place. One thread at a time; any thread may call ``release``,
    and again.

    All raise the errors of the place: ``MediumError``, ``TransportError``, ``StoppedError``.
    """

    @property
    def name(self) -> str:
        """The place, for messages."""

    @property
    def bounced_bytes(self) -> int:
        """Bytes so far that did not go straight from their memory to the pool."""

    @property
    def kept_bytes(self) -> int:
        """Bytes copied so far that were in their places already."""

    def copy(self, indices: Column, address: Column, stop: Stop) -> Digests:
        """Place storages, by index, and copy them from their addresses; return their digests."""

    def copy_fed(self, indices: Column, feeds: Sequence[Feed], stop: Stop) -> Digests:
        """Copy storages that have no addresses; return their digests."""

    def share(self, before: Previous, indices: Column, address: Column, stop: Stop) -> bool:
        """Let the version share the bytes that ``before`` has for these storages, whose digests are
        those of the bytes at ``address``, if the place still holds them. Return False if not, and
        nothing changed."""

    def read_back(
        self, storage: Column, offset: Column, length: Column
    ) -> NDArray[np.uint8] | None:
        """Return bytes of storages that were copied or shared, a short piece at each offset, end to
        end; None if they cannot be read back."""

    def commit(self, labels: Labels) -> CommittedVersion:
        """Persist and commit, and return the version."""

    def release(self) -> None:
        """Discard uncommitted bytes. Raises nothing."""
