"""Copies of a tenant's pool, to a mirror or to a replica: one copier for each model."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import Final, Generic, TypeVar

from portus.engine.spec import VersionInfo
from portus.reach.index.pool import PoolWriter
from portus.reach.mirror.copier import PoolCopier

EachCopier = TypeVar("EachCopier", bound=PoolCopier)


class Copies(Generic[EachCopier]):
    """The copiers of one tenant's pool, by model. Thread-safe."""

    def __init__(self, tenant: str, writer: PoolWriter) -> None:
        self._tenant: Final = tenant
        self._writer: Final = writer
        self._guard: Final = threading.Lock()
        self._copiers: Final[dict[str, EachCopier]] = {}
        # A full pool asks copiers to end, since the versions that they read hold space.
        writer.yields.append(self._yield_space)

    def note_change(self, changed: Collection[str]) -> None:
        """Wake the copiers of these models: their versions, or what holds versions, changed."""
        for model in changed:
            copier = self._copiers.get(model)
            if copier is not None:
                copier.wake()

    def missing(self) -> list[VersionInfo]:
        """Return the versions that no copy has yet, of the models that this host copies."""
        return [info for copier in self._all() for info in copier.backlog()]

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest missing version was saved; 0 if none is missing."""
        first_ns = min((info.time_ns for info in self.missing()), default=None)
        return 0.0 if first_ns is None else max(0.0, time.time() - first_ns / 1e9)

    @property
    def failure(self) -> str:
        """The reason why versions are missing; empty if nothing is wrong."""
        return next(filter(None, (copier.failure for copier in self._all())), "")

    def _finish(self, wait_s: float) -> list[EachCopier]:
        """Wait for missing versions, ``wait_s`` at most; return the copiers, still to be ended."""
        until_s = time.monotonic() + wait_s
        copiers = self._all()
        for copier in copiers:
            copier.finish(max(0.0, until_s - time.monotonic()))
        return copiers

    def _all(self) -> list[EachCopier]:
        with self._guard:
            return list(self._copiers.values())

    def _yield_space(self) -> bool:
        ended = [copier.yield_space() for copier in self._all()]
        return any(ended)
