"""Snapshots: what the pipeline copies of a state, as it was at the call of save."""

from __future__ import annotations

import enum
import functools
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from portus.client.fence.clock import Saving
from portus.client.fence.device import CopyChoice, WhereItFits, feeds_of
from portus.client.fence.placing import Placing
from portus.client.fence.writers import classify, with_kin
from portus.client.state.state import FlatState, Flattener
from portus.index.records import encode_layout
from portus.media import written
from portus.pipeline.plan import Column, Feed, Flags, Snapshot
from portus.spec import TensorSpec


class SnapshotMode(str, enum.Enum):
    """When a state is copied. AUTO: what the fence guards is copied late, the rest at once; device
    memory is copied on the device first where that stalls training less. SYNC: all at once. DEVICE:
    as AUTO, but device memory is copied on the device first wherever it fits."""

    AUTO = "auto"
    SYNC = "sync"
    DEVICE = "device"


class Suspects:
    """Storages that were torn, by their data pointers: they are copied at once for 1, 2, 4... saves
    and then late again, so that one writer does not end overlap for good (V7). Thread-safe."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._saves = 0
        self._span: Final[dict[int, int]] = {}
        self._until: Final[dict[int, int]] = {}

    def accuse(self, addresses: Collection[int]) -> None:
        """Have these, which were torn, copied at once for twice as many saves as the last time."""
        with self._lock:
            for address in addresses:
                self._span[address] = 2 * self._span.get(address, 0) or 1
                self._until[address] = self._saves + self._span[address]

    def turn(self) -> frozenset[int]:
        """Count a save that begins now, and return the storages that it does not copy late."""
        with self._lock:
            self._saves += 1
            return frozenset(a for a, until in self._until.items() if until >= self._saves)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """What of some storages is copied late, and what at once: columns of ``Snapshot``."""

    address: Column
    length: Column
    late: Flags
    guarded: frozenset[int]
    exposed: Column


def copy_order(
    storages: Sequence[torch.UntypedStorage],
    owned: Collection[int],
    feeds: Mapping[int, Feed],
    suspects: frozenset[int] | None,
    fenced: frozenset[int] = frozenset(),
) -> CopyOrder:
    """The order for ``storages``. owned, feeds: indices of those that are private copies, or are
    fed. suspects: data pointers that are not copied late; None: nothing is. fenced: those that
    nobody writes before the caller waited for the fence."""
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
    exposed = written.exposed(address, length)
    late = late & ~exposed
    guarded = late.copy()
    guarded[list(owned)] = False
    return CopyOrder(
        address=address,
        length=length,
        late=late,
        guarded=frozenset(pointers[guarded].tolist()) - {0},
        exposed=np.flatnonzero(exposed),
    )


class Snapshots:
    """Makes snapshots of one model's states; fast for a state that looks like the last one. What
    is kept of that is for one thread at a time: others wait."""

    def __init__(self, model: str, mode: SnapshotMode) -> None:
        self.suspects: Final = Suspects()
        self._turn: Final = threading.Lock()
        self._model: Final = model
        self._mode: Final = mode
        self._flattener: Final = Flattener()
        self._tensors: tuple[TensorSpec, ...] | None = None
        self._layout = b""
        self._has_devices = False
        self._placing: Placing | None = None
        self._steady: Flags | None = None

    def flatten(self, state: object) -> FlatState:
        """Take a state apart. Raises ``UsageError`` naming what cannot be saved."""
        with self._turn:
            return self._flattener.flatten(state)

    def take(
        self,
        flat: FlatState,
        step: int,
        *,
        synchronous: bool,
        unchanged: bool,
        token: bytes | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Snapshot:
        """A snapshot. ``unchanged``: nothing is known to have been written since the last one."""
        synchronous = synchronous or self._mode is SnapshotMode.SYNC
        with self._turn:
            layout, has_devices = self._layout_of(flat.tensors)
        choice = None if synchronous else self._choice()
        feeds, copies = feeds_of(flat.storages, choice) if has_devices else ({}, set())
        owned = flat.owned | copies
        suspects = None if synchronous else self.suspects.turn()
        order = copy_order(flat.storages, owned, feeds, suspects)
        return Snapshot(
            model=self._model,
            step=step,
            token=token or os.urandom(16),
            tree=flat.tree,
            layout=layout,
            address=order.address,
            length=order.length,
            late=order.late,
            steady=self._hint(order.late, unchanged),
            guarded=order.guarded,
            feeds=feeds,
            changes=functools.partial(_changes, flat),
            alive=(flat.storages, feeds),
            owners=flat.storages,
            exposed=order.exposed,
            metrics=metrics or {},
        )

    def begins(self, save: Saving) -> None:
        """A save of what ``take`` gave last begins."""
        if self._placing is not None:
            self._placing.begins(save)

    def _choice(self) -> CopyChoice | None:
        """Where memory of devices is copied first, if there is any."""
        if self._mode is SnapshotMode.DEVICE:
            return WhereItFits()
        if self._has_devices and self._placing is None:
            self._placing = Placing()
        return self._placing

    def learn(self, steady: Flags) -> None:
        """What the last save found: which storages equalled those of the version before."""
        self._steady = steady

    def _layout_of(self, tensors: tuple[TensorSpec, ...]) -> tuple[bytes, bool]:
        """The layout, and whether any of it is on a device."""
        if tensors is not self._tensors:
            self._tensors, self._layout = tensors, encode_layout(tensors)
            self._has_devices = any(spec.device not in ("cpu", "meta") for spec in tensors)
            self._steady = None
        return self._layout, self._has_devices

    def _hint(self, late: Flags, unchanged: bool) -> Flags:
        """Return which storages to hash before anything is copied: those that were the same last
        time; at first, those that nobody trains. ``unchanged``: also those that are copied late."""
        known = self._steady is not None and len(self._steady) == len(late)
        hint = self._steady if known and self._steady is not None else ~late
        return hint | late if unchanged else hint


def _changes(flat: FlatState) -> Column:
    """Return how often torch saw the tensors over each storage being written."""
    counts = np.zeros(len(flat.storages), np.int64)
    for spec, tensor in zip(flat.tensors, flat.live, strict=True):
        if spec.storage >= 0 and not tensor.is_inference():
            counts[spec.storage] += tensor._version
    return counts


def name_of(tensors: Sequence[TensorSpec], index: int) -> str:
    """The key paths of the tensors over a storage, for messages."""
    names = [spec.name for spec in tensors if spec.storage == index]
    return " = ".join(names[:3]) or f"storage {index}"
