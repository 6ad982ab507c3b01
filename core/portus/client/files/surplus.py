"""Versions of a run that the next commit retires: those beyond ``keep`` that no file refers to."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from portus.client.files.held import held_in
from portus.client.files.home import Home, Pool
from portus.client.files.keeper import Keeper
from portus.index.catalogue import Catalogue
from portus.index.keep import Keep
from portus.pipeline.run import Save
from portus.spec import VersionInfo

ByOthers = Callable[[Sequence[VersionInfo]], Collection[int]]
"""Which versions go, by id, of those that there are; what a file leads to stays all the same."""


def versions_of(model: str, catalogues: Sequence[Catalogue]) -> list[VersionInfo]:
    """The versions of a model in pools, in their order there."""
    models = [catalogue.models.get(model) for catalogue in catalogues]
    return [entry.info for found in models if found for entry in found.versions]


def beyond(
    keep: Keep, infos: Sequence[VersionInfo], step: int, metrics: Mapping[str, float]
) -> list[int]:
    """Return the ids of the ``infos`` that do not stay once a version of ``step`` is committed."""
    if not infos:
        return []
    made = replace(infos[0], id=0, step=step, time_ns=time.time_ns())
    made = replace(made, metrics=metrics)
    staying = {info.id for info in keep.staying([*infos, made])}
    return [info.id for info in infos if info.id not in staying]


class Surplus:
    """The surplus versions of one model, in the pool of its home and those that this is a successor
    of. ``let_go``: the ids of the versions that are surplus once the commit under way is made."""

    def __init__(self, model: str, keep: Keep | None, home: Home) -> None:
        self.let_go: frozenset[int] = frozenset()
        self._model: Final = model
        self._keep: Final = keep
        self._home: Final = home

    def of(self, pool: Pool, keeper: Keeper, coming: Save, by_others: ByOthers | None) -> list[int]:
        """What goes once ``coming`` is committed, by id. ``by_others``: who decides in place of
        ``keep``. Looks at reference files; asks a storage host for its catalogue, once."""
        own = pool.catalogue()
        infos = versions_of(self._model, [*(each.catalogue() for each in self._home.older()), own])
        if not infos or (by_others is None and self._keep is None):
            return []
        if by_others is not None or (self._keep and not self._keep.is_last_alone):
            keeper.deleted()  # others remove reference files too: look at them now
        held = keeper.held(own, coming) | self.held_in_older()
        if by_others is not None:
            surplus = [version for version in by_others(infos) if version not in held]
        else:
            assert self._keep is not None
            free = [info for info in infos if info.id not in held]
            surplus = beyond(self._keep, free, coming.step, coming.metrics)
        self.let_go = frozenset(surplus)
        return surplus

    def to_come(self, pool: Pool | None) -> int:
        """Return how many more versions need room: those still to be kept and the one in flight."""
        found = pool.catalogue().models.get(self._model) if pool else None
        kept = len(found.versions) if found and self._keep else 0
        return 1 + max(1, (self._keep.last if self._keep else 1) - kept)

    def held_in_older(self) -> set[int]:
        """Versions of older pools that reference files lead to. Ids are unique in all pools."""
        held = [held_in(path, pool.catalogue()) for pool, path in self._home.older().items()]
        return set[int]().union(*held)
