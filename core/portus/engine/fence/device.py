"""Storages on a CUDA device: fetched through two pinned buffers, a unit at a time.

The copies run on a stream of their own, after everything that the caller had enqueued at the call
of save. A storage host that reaches the device directly does so after ``await_device``; the bytes
fetched are then only hashed. Host memory: two units (32 MiB), pinned, for each device, kept for the
process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch

from portus.engine.format.checksum import UNIT
from portus.engine.pipeline.plan import OnDevice
from portus.engine.pipeline.run import Save
from portus.errors import UsageError


class _Ring:
    """Two pinned buffers and a stream of one device. One storage at a time."""

    def __init__(self, device: torch.device) -> None:
        self.busy: Final = threading.Lock()
        self.stream: Final = torch.cuda.Stream(device)
        self.buffers: Final = [
            torch.empty(UNIT, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
        ]
        self.arrived: Final = [torch.cuda.Event() for _ in range(2)]


_rings: Final[dict[torch.device, _Ring]] = {}
_making: Final = threading.Lock()


class DeviceFeed:
    """One storage on a device, as ``engine.pipeline.plan.Feed``."""

    def __init__(self, storage: torch.UntypedStorage, ready: torch.cuda.Event) -> None:
        """``ready``: recorded on the caller's stream at the call of save."""
        self._storage: Final = storage
        self._ready: Final = ready

    @property
    def there(self) -> OnDevice:
        storage = self._storage
        return OnDevice(storage.device.index, storage.data_ptr(), storage)

    def await_device(self) -> None:
        # Other threads run meanwhile.
        self._ready.synchronize()

    @contextlib.contextmanager
    def units(self) -> Iterator[Iterator[tuple[int, int]]]:
        """Yield the units; see ``Feed``. Blocks while another storage of the device is fetched."""
        ring = _ring(self._storage.device)
        with ring.busy:
            yield self._fetch(ring)

    def _fetch(self, ring: _Ring) -> Iterator[tuple[int, int]]:
        source = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        source.set_(self._storage)
        units = torch.split(source, UNIT)
        # For the work enqueued at the call of save, and for no later work.
        ring.stream.wait_event(self._ready)
        self._enqueue(ring, 0, units[0])
        for index, unit in enumerate(units):
            # The next unit is fetched while the caller hashes this one. Its buffer is free: by
            # asking for this unit, the caller gave back the one before.
            if index + 1 < len(units):
                self._enqueue(ring, index + 1, units[index + 1])
            ring.arrived[index % 2].synchronize()
            yield ring.buffers[index % 2].data_ptr(), unit.numel()

    def _enqueue(self, ring: _Ring, index: int, unit: torch.Tensor) -> None:
        with torch.cuda.stream(ring.stream):
            ring.buffers[index % 2][: unit.numel()].copy_(unit, non_blocking=True)
            ring.arrived[index % 2].record(ring.stream)


class Timeline(Protocol):
    """Moments on a device or processor that runs steps."""

    def mark(self) -> Any:
        """Return the moment when all work enqueued until now is done; None if it is unknown."""

    def between(self, first: Any, second: Any) -> float | None:
        """Return the seconds from one moment to the next; None while the second has not come."""


class DeviceTimeline:
    """Moments of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device: Final = device

    def mark(self) -> torch.cuda.Event | None:
        """Return a moment; None while a CUDA graph is captured. See ``Timeline``."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float | None:
        return 1e-3 * first.elapsed_time(second) if second.query() else None


class CopyChoice:
    """The choice of where storages of a device are copied first: here, on the device whenever there
    is room, whatever a save or a copy costs."""

    def on_device(self, size: int, free: int) -> bool:
        """Return True to copy all of them, ``size`` bytes, into spare memory of the device: here if
        a second copy fits beside the most that training takes. free: bytes not reserved."""
        return free > size

    def begins(self, save: Save) -> None:
        """Note that a save has begun, whose storages were copied by this choice."""

    def note_copy(self, timeline: Timeline, first: Any, second: Any) -> None:
        """Record when the copy started and when it ended, as marks of ``timeline``."""


def feeds_of(
    storages: tuple[torch.UntypedStorage, ...], choice: CopyChoice | None
) -> tuple[dict[int, DeviceFeed], set[int]]:
    """Return a feed for each storage that is on a device, and the indices of the private copies.

    choice: chooses the devices whose storages are copied there first (CheckFreq's snapshot:
    FAST'21, section 4.2), for each anew; None: no device. If memory runs out there is no copy.

    Raises ``UsageError`` for devices other than CUDA, and during the capture of a CUDA graph.
    """
    away = {i: storage for i, storage in enumerate(storages) if storage.device.type != "cpu"}
    feeds: dict[int, DeviceFeed] = {}
    copies: set[int] = set()
    for device in {storage.device for storage in away.values()}:
        if device.type != "cuda":
            raise UsageError(f"tensors on {device} cannot be saved; move them to the CPU first")
        if torch.cuda.is_current_stream_capturing():
            raise UsageError("a save cannot be part of a CUDA graph; save outside of its capture")
        mine = {i: storage for i, storage in away.items() if storage.device == device}
        size = sum(storage.nbytes() for storage in mine.values())
        if choice is not None and choice.on_device(size, torch.cuda.mem_get_info(device)[0]):
            cloned = _clone(mine, device, choice)
            copies |= cloned.keys()
            mine |= cloned
        ready = torch.cuda.Event()
        # After the clones, which are on the same stream.
        ready.record(torch.cuda.current_stream(device))
        feeds |= {i: DeviceFeed(storage, ready) for i, storage in mine.items() if storage.nbytes()}
    return feeds, copies


def _ring(device: torch.device) -> _Ring:
    with _making:
        if device not in _rings:
            _rings[device] = _Ring(device)
        return _rings[device]


def _clone(
    storages: dict[int, torch.UntypedStorage], device: torch.device, choice: CopyChoice
) -> dict[int, torch.UntypedStorage]:
    """Return copies in spare memory of the device, without waiting; none if it is used up."""
    timeline = DeviceTimeline(device)
    # No synchronization: marks are read when the device has passed them.
    first = timeline.mark()
    try:
        cloned = {index: storage.clone() for index, storage in storages.items()}
    except torch.OutOfMemoryError:
        return {}
    choice.note_copy(timeline, first, timeline.mark())
    return cloned
