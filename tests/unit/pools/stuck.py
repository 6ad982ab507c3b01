"""A pool whose medium can get stuck, under a real ``Checkpointer``."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from portus.engine.media.file_calls import FileSystemTraits
from portus.engine.media.process import Descriptor
from portus.engine.spec import Extent
from portus.reach.index.directory import (
    WRITERS,
    _WriterOfPool,
    create_pool,
    make_directory,
    open_writer,
)
from portus.reach.media.dax import DaxDevice
from portus.reach.media.file import PlainFile
from portus.reach.media.local import LocalFiles

MOMENT_S = 0.01


class Gate(PlainFile):
    """A file that can be written to while its gate is open; else whoever stores or persists waits.

    ``reached``: somebody came to the closed gate. ``used``: bytes of the pool that are taken.
    ``broken``: the disk fails whatever is synced.
    """

    used: Callable[[], int]
    broken = False

    def __init__(self, path: str) -> None:
        self._opened = threading.Event()
        self._opened.set()
        self.reached = threading.Event()
        descriptor = Descriptor(path, os.O_RDWR)
        file_system = FileSystemTraits(volatile=False, early=False)
        super().__init__(descriptor, file_system, writable=True, sync=self._to_disk)

    def _to_disk(self, number: int) -> None:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fdatasync(number)

    def shut(self) -> None:
        self.reached.clear()
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    def store(self, offset: int, data: bytes | memoryview) -> None:
        self._pass()
        super().store(offset, data)

    def persist(self, ranges: Sequence[Extent]) -> None:
        self._pass()
        super().persist(ranges)

    def _pass(self) -> None:
        if not self._opened.is_set():
            self.reached.set()
            # A signal between the last look for one and the wait does not end the wait.
            while not self._opened.wait(MOMENT_S):
                pass


class _Gates(LocalFiles):
    def open(self, path: str, *, writable: bool) -> PlainFile | DaxDevice:
        return Gate(path) if writable else super().open(path, writable=writable)


def gated(path: Path) -> Gate:
    """Make a pool at ``path`` that this process has open already, on a gate: whoever opens it for
    writing shares that. Open it before the test ends."""
    files = _Gates()
    make_directory(str(path.parent))
    create_pool(str(path), LocalFiles())
    writer = open_writer(str(path), files)
    status = files.status(str(path))
    assert status is not None
    WRITERS._shared[status.identity] = _WriterOfPool(writer, 0)
    gate = writer.medium
    assert isinstance(gate, Gate)
    gate.used = lambda: gate.size - writer.free_bytes()
    return gate


class Training:
    """A model that is really trained. All of its state is written by the optimizer alone, and so
    is copied late, unless ``counts`` is there."""

    def __init__(self, *, counts: bool = False) -> None:
        self.model = torch.nn.Linear(64, 64)
        self.count = torch.zeros(1000)
        if counts:
            self.model.register_buffer("count", self.count)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
