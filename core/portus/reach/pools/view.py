"""Pools opened for reading only: any number of processes, also while one writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from portus.engine.fence.fence import before_write
from portus.engine.loading.checkpoint_file import use_newest
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_over import Rename, RestoreOptions, RestoreReport
from portus.engine.media import calls
from portus.engine.spec import VersionInfo, check_step
from portus.errors import NoCheckpointError, StaleError, UsageError
from portus.reach.files.home import open_place
from portus.reach.index.directory import pools_at
from portus.reach.index.place import Place, PlaceName
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.pools import restore

Result = TypeVar("Result")


class PoolStep(NamedTuple):
    """A version and its pool, as a ``StepSource``."""

    pool: PoolReader
    entry: VersionEntry

    def __str__(self) -> str:
        info = self.entry.info
        return f"step {info.step} (commit {info.commit}) of {self.pool.medium.info.name}"

    @calls.mark
    def load(self, names: Patterns, *, verify: bool, **settings: Any) -> object:
        if settings.keys() - {"map_location", "weights_only"}:
            raise UsageError(
                f"load: a pool takes map_location and weights_only, found {sorted(settings)}"
            )
        return restore.load(self.pool, self.entry, names, verify=verify, **settings)

    @calls.mark
    def restore_into(self, state: object, options: RestoreOptions) -> RestoreReport:
        return restore.restore_into(self.pool, self.entry, state, options)


def choose(pools: Iterable[PoolReader], model: str, step: int | None) -> list[PoolStep]:
    """Return the versions of a model, of one step or of any, in some pools: those of each pool with
    the oldest commit first, and the pool with the newest one, by time, last. Raises
    ``NoCheckpointError`` if there is none."""
    step = None if step is None else check_step(step)
    catalogues = [(pool, pool.catalogue().models) for pool in pools]
    found = [(pool, models[model]) for pool, models in catalogues if model in models]
    found.sort(key=lambda pair: pair[1][-1].info.time_ns)
    every = [PoolStep(pool, entry) for pool, entries in found for entry in entries]
    chosen = [each for each in every if step in (None, each.entry.info.step)]
    if every and not chosen:
        steps = [each.entry.info.step for each in every]
        raise NoCheckpointError(f"model {model!r} has no step {step}; there are {steps[-20:]}")
    if not chosen:
        names = ", ".join(pool.medium.info.name for pool, _ in catalogues) or "an empty directory"
        others = sorted({name for _, models in catalogues for name in models})
        raise NoCheckpointError(f"there is no model {model!r} in {names}; there are {others[:20]}")
    return chosen


class PoolView:
    """All pool files of a directory as one, or one pool file; ``portus.open`` returns it."""

    def __init__(self, pool: PlaceName | None = None) -> None:
        """pool: a pool file, a pool directory, or the addresses of storage hosts; None: the default
        one. Raises ``UsageError`` if there is none, and as opening does."""
        with contextlib.ExitStack() as stack:
            self._pools: Final = {
                each.path: stack.enter_context(contextlib.closing(open_place(each)))
                for each in pools_at(Place.parse(pool))
            }
            self._stack: Final = stack.pop_all()

    @property
    def paths(self) -> list[str]:
        """The paths of the pool files."""
        return list(self._pools)

    def models(self) -> list[str]:
        """Return the names of the models that have a version."""
        return sorted({info.model for info in self.versions()})

    def versions(self, model: str | None = None) -> list[VersionInfo]:
        """Return the committed versions of a model, or of all; by file, oldest commit first."""
        found = []
        for pool in self._pools.values():
            infos = [entry.info for entry in pool.catalogue().entries()]
            wanted = [info for info in infos if model in (None, info.model)]
            found += sorted(wanted, key=lambda info: (info.commit, info.id))
        return found

    def steps(self, model: str = "default") -> list[int]:
        """Return the steps of a model's versions, oldest commit first."""
        return [info.step for info in self.versions(model)]

    def load(
        self,
        model: str = "default",
        step: int | None = None,
        names: Patterns = None,
        *,
        weights_only: bool | None = None,
    ) -> object:
        """Return the verified state of a version on the CPU, newest by default; or its matching
        part.

        names: shell patterns of key paths (``"model.*"``). weights_only: as for ``torch.load``.
        Raises ``NoCheckpointError`` if there is no such version, ``CorruptionError`` if none
        verifies. If the newest does not verify, the one before is loaded, and the log has an error.
        """
        return self._use(
            model, step, lambda found: found.load(names, verify=True, weights_only=weights_only)
        )

    @calls.entry
    def restore_into(
        self,
        state: object,
        model: str = "default",
        step: int | None = None,
        *,
        strict: bool = True,
        names: Patterns = None,
        rename: Rename = None,
        weights_only: bool | None = None,
    ) -> RestoreReport:
        """See ``Checkpointer.restore_into``."""
        before_write()  # a Checkpointer of this process may be saving these tensors
        options = RestoreOptions(
            strict=strict, names=names, rename=rename, weights_only=weights_only
        )
        return self._use(model, step, lambda found: found.restore_into(state, options))

    def verify(self, info: VersionInfo, advance: Callable[[int], None] | None = None) -> int:
        """Read every byte of a version; return their number. Raises ``CorruptionError``,
        ``StaleError``."""
        for pool, entry in self.entries():
            if entry.info == info:
                return restore.verify(pool, entry, advance)
        raise StaleError(f"model {info.model!r}, step {info.step} is not in the pool any more")

    def entries(self) -> Iterator[tuple[PoolReader, VersionEntry]]:
        """Yield every version with its pool."""
        for pool in self._pools.values():
            for entry in pool.catalogue().entries():
                yield pool, entry

    def close(self) -> None:
        """Close the pools. Loaded states stay."""
        self._stack.close()

    def __enter__(self) -> PoolView:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _use(self, model: str, step: int | None, use: Callable[[PoolStep], Result]) -> Result:
        return use_newest(partial(choose, self._pools.values(), model, step), use)
