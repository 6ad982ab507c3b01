"""The worst copier that a fence may meet, and what it has seen torn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from portus.engine.fence.fence import Fence
from portus.engine.fence.writers import classify
from portus.engine.pipeline.run import Save
from portus.engine.state.pickling import pickle_state

State = dict[str, object]
Scenario = Callable[[], Iterator[State]]
"""A training loop that yields its state wherever it saves."""

FENCE_S_MAX = 30.0


class LateCopy(Save):
    """A save that copies volatile storages at once, and each stable one at the last moment that
    is allowed: when somebody waits for it, or at the end. No threads, so no luck.

    ``everything_late``: as if nothing were volatile.
    """

    over = False

    def __init__(self, state: State, *, everything_late: bool = False) -> None:
        flat = pickle_state(state)
        flags = bytearray([True]) * len(flat.storages)
        if not everything_late:
            flags = classify(flat.storages, flat.owned_storages)
        self._names = list(map(flat.describer(), range(len(flat.storages))))
        self._sources = flat.storages
        self._wanted = [storage.clone() for storage in flat.storages]
        self._got = [storage.clone() for storage in flat.storages]
        self._late_rows = [index for index, flag in enumerate(flags) if flag]
        self.late_names = {self._names[index] for index in self._late_rows}
        self.storages = frozenset(self._sources[index].data_ptr() for index in self._late_rows)
        self.over = False
        self.waits = 0

    def release(self, timeout_s: float) -> bool:
        self.waits += 1
        return self.finish()

    def finish(self) -> bool:
        if not self.over:
            for index in self._late_rows:
                self._got[index].copy_(self._sources[index])
            self.over = True
        return True

    @property
    def torn(self) -> set[str]:
        """Names of the storages that do not hold what they held at the call."""
        assert self.over
        pairs = enumerate(zip(self._wanted, self._got, strict=True))
        return {self._names[i] for i, (wanted, got) in pairs if _bytes(wanted) != _bytes(got)}


def _bytes(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def played(scenario: Scenario, *, guarded: bool) -> list[LateCopy]:
    """The saves of a scenario, one at each of its states, each finished before the next one.

    Not guarded: every storage is copied late, and nobody waits for it.
    """
    fence, saves = Fence(FENCE_S_MAX), list[LateCopy]()
    try:
        for state in scenario():
            if saves:
                saves[-1].finish()
            saves.append(LateCopy(state, everything_late=not guarded))
            if guarded:
                fence.guard(saves[-1])
    finally:
        fence.close()
    saves[-1].finish()
    return saves


def torn_in(saves: list[LateCopy]) -> set[str]:
    return set[str]().union(*(save.torn for save in saves))
