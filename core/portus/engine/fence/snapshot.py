"""The choice of what a save copies at once, and what late."""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from portus.engine.extensions import PLACING, extension
from portus.engine.fence.device import CopyChoice, DeviceFeed, feeds_of
from portus.engine.fence.fence import steps_seen
from portus.engine.fence.writers import classify, pointer, with_kin
from portus.engine.media import write_watch
from portus.engine.pipeline.plan import Feed, Snapshot
from portus.engine.pipeline.run import Save
from portus.engine.state.contents import JoinedStorages


class SnapshotMode(str, enum.Enum):
    """When a state is copied. AUTO: storages that the fence guards late, the others at once; device
    memory is first copied on the device where that stalls training less. SYNC: all at once. DEVICE:
    as AUTO, but device memory is first copied on the device wherever it fits."""

    AUTO = "auto"
    SYNC = "sync"
    DEVICE = "device"


class Suspects:
    """Storages that were torn, by their data pointers. They are copied at once for 1, 2, 4... saves
    and then late again, so that one writer does not end overlap for good (V7). Thread-safe."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._saves = 0
        self._span: Final[dict[int, int]] = {}
        self._until: Final[dict[int, int]] = {}

    def accuse(self, addresses: Collection[int]) -> None:
        """Copy these torn storages at once for twice as many saves as the last time."""
        with self._lock:
            for address in addresses:
                # Not for good: one swap by hand must not end overlap for the whole run
                # (decision 0051).
                self._span[address] = 2 * self._span.get(address, 0) or 1
                self._until[address] = self._saves + self._span[address]

    def turn(self) -> frozenset[int]:
        """Count a save that begins now, and return the storages that it does not copy late."""
        with self._lock:
            self._saves += 1
            return frozenset(a for a, until in self._until.items() if until >= self._saves)


class CopyPlanner:
    """Decides for the saves of one run which storages are copied late, and where memory of devices
    is copied first. For one thread at a time, except ``accuse``."""

    def __init__(self, mode: SnapshotMode) -> None:
        self._mode: Final = mode
        self._suspects: Final = Suspects()
        self._placing: CopyChoice | None = None
        self._steps_at_last = -1

    def plan(self, joined: JoinedStorages, fenced: Sequence[torch.Tensor]) -> Snapshot:
        """Return the storages of a save, each late or at once. fenced: tensors that their writer
        changes only after a wait for the fence."""
        is_late = self._mode is not SnapshotMode.SYNC
        feeds: dict[int, DeviceFeed] = {}
        copies: set[int] = set()
        if joined.has_devices:
            feeds, copies = feeds_of(joined.storages, self._choice() if is_late else None)
        suspects = self._suspects.turn() if is_late else None
        pointers = frozenset(map(pointer, fenced)) - {0}
        return copy_order(
            joined.storages, copies | joined.owned_storages, feeds, suspects, pointers
        )

    def has_stepped(self) -> bool:
        """Return whether any optimizer of this process stepped since the last call."""
        before, self._steps_at_last = self._steps_at_last, steps_seen()
        return before != self._steps_at_last

    def begins(self, save: Save) -> None:
        """Note that a save has begun, whose order this planner made."""
        if self._placing is not None:
            self._placing.begins(save)

    def accuse(self, addresses: Collection[int]) -> None:
        """Copy torn storages at once for some saves."""
        self._suspects.accuse(addresses)

    def _choice(self) -> CopyChoice:
        if self._placing is None:
            is_forced = self._mode is SnapshotMode.DEVICE
            self._placing = CopyChoice() if is_forced else extension(PLACING)()
        return self._placing


def copy_order(
    storages: Sequence[torch.UntypedStorage],
    owned: Collection[int],
    feeds: Mapping[int, Feed],
    suspects: frozenset[int] | None,
    fenced: frozenset[int] = frozenset(),
) -> Snapshot:
    """Return ``storages`` with the choice for each, late or at once; steady: none. owned, feeds:
    indices of those that are private copies, or are fed. suspects: data pointers that are not
    copied late; None: copy nothing late. fenced: those that their writer changes only after a wait
    for the fence."""
    late = np.zeros(len(storages), np.bool_)
    pointers = np.array([storage.data_ptr() for storage in storages], np.int64)
    if suspects is not None:
        late = np.frombuffer(classify(storages, owned, with_kin(suspects)), np.bool_)
        if fenced:
            late = late | np.isin(pointers, list(fenced - suspects))
    length = np.array([storage.nbytes() for storage in storages], np.int64)
    here = np.ones(len(pointers), np.bool_)
    here[list(feeds)] = False
    address = np.where(here & (length > 0), pointers, 0)
    # No fence of this process keeps another process out, so none of these is late (V7).
    exposed = write_watch.exposure(address, length)
    late = late & ~exposed
    guarded = late.copy()
    guarded[list(owned)] = False  # private copies: no other code can write them
    return Snapshot(
        feeds=feeds,
        address=address,
        length=length,
        late=late,
        steady=np.zeros_like(late),
        guarded=frozenset(pointers[guarded].tolist()) - {0},
        owners=storages,
        exposed=np.flatnonzero(exposed),
    )
