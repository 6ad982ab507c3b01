"""Saves of a live training state, copied slowly, and compared with what the state was."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from portus.engine.copying.segments import Stop
from portus.engine.fence.fence import Fence
from portus.engine.paths.saver import FileSaver
from portus.engine.pipeline.audit import Audit, Auditor, LateStorages, ProbeAudit, StoredStorages
from portus.engine.pipeline.handle import SaveHandle
from portus.engine.pipeline.plan import Flags
from portus.engine.pipeline.run import Stage
from portus.engine.state.pickling import pickle_state
from portus.engine.state.walk import walk
from portus.errors import AbandonedError, PortusError
from portus.reach.pools.checkpointer import PoolCheckpointer

PAUSE_S: Final = 0.02
"""How long the copier sleeps before each save: many steps of these small models."""

FENCE_S_MAX: Final = 60.0
WRITTEN_S_MAX: Final = 10.0
"""The longest wait for somebody to write what is being saved."""


@dataclass(frozen=True, slots=True)
class _Before:
    """Work before a save, in the same queue: what makes the copier slow."""

    pause: Callable[[], object]
    awaited: threading.Event
    """Set when somebody waits for the copier."""

    def run(self) -> None:
        self.pause()

    def fail(self, error: BaseException) -> None: ...

    def hurry(self) -> None:
        self.awaited.set()


def _sleep() -> None:
    time.sleep(PAUSE_S)


def slow_down(
    saver: PoolCheckpointer | FileSaver,
    pause: Callable[[], object] = _sleep,
    awaited: threading.Event | None = None,
) -> None:
    """Have the copier do ``pause`` before the next save. ``awaited`` is set when somebody waits
    for that."""
    saver = saver._saver if isinstance(saver, PoolCheckpointer) else saver
    saver.shared.queue.put(_Before(pause, awaited or threading.Event()))


class Blind(ProbeAudit):
    """Sees nothing."""

    def torn(self, stored: StoredStorages) -> Flags:
        return np.zeros(len(self._late.length), np.bool_)


class Unaudited(Auditor):
    """Looks at nothing."""

    def __init__(self) -> None:
        super().__init__("probe")

    def begin(self, late: LateStorages, stop: Stop) -> Audit:
        return Blind(late)


class SlowSaves:
    """Saves to a pool of its own, and remembers what each state was.

    ``pause`` is called by the copier before each save; it sleeps, if nothing is said. unguarded:
    nothing holds writers up, so it waits until one has written something, or none can: they are
    over, or wait for the copier.
    """

    def __init__(
        self,
        folder: Path,
        *,
        unguarded: bool = False,
        audited: bool = True,
        pause: Callable[[], object] = _sleep,
    ) -> None:
        path = folder / "torn.portus"
        self.checkpointer = PoolCheckpointer(path, keep=None, fence_timeout=FENCE_S_MAX)
        if not audited:
            self.checkpointer._saver.auditor = Unaudited()  # type: ignore[misc]
        self.saves: list[SaveHandle] = []
        self._pause = pause
        self._unguarded = unguarded
        self._over = False
        self._wanted: list[dict[str, bytes]] = []

    def save(self, state: object) -> None:
        self._wanted.append(contents(state))
        awaited = threading.Event()
        pause = self._until_written(state, awaited) if self._unguarded else self._pause
        slow_down(self.checkpointer, pause, awaited)
        self.saves.append(self.checkpointer.save(state, len(self.saves)))

    def __deepcopy__(self, memo: object) -> SlowSaves:
        """Lightning copies whole modules to average them."""
        return self

    def reading(self) -> bool:
        """True while the last save still reads the live state."""
        if not self.saves:
            return False
        stage: Stage = self.saves[-1].of._stage  # type: ignore[attr-defined]
        return stage < Stage.COPIED

    def _until_written(self, state: object, awaited: threading.Event) -> Callable[[], object]:
        memory = [_bytes_of(each) for each in pickle_state(state).storages]
        before = [each.clone() for each in memory]

        def wait() -> None:
            until = time.monotonic() + WRITTEN_S_MAX
            while not (self._over or awaited.is_set()) and time.monotonic() < until:
                if not all(map(torch.equal, memory, before)):
                    break
                time.sleep(0.001)

        return wait

    def finish(self) -> None:
        self._over = True
        for save in self.saves:
            with contextlib.suppress(PortusError):
                save.wait(FENCE_S_MAX)

    def torn(self) -> set[str]:
        """Key paths of tensors that a committed version holds otherwise than the state did."""
        self.finish()
        found: set[str] = set()
        for step in self.checkpointer.steps():
            held = contents(self.checkpointer.load(step, weights_only=False))
            found |= {name for name in held if held[name] != self._wanted[step][name]}
        return found

    def voided(self) -> int:
        """Saves that were not committed."""
        self.finish()
        return len(self.saves) - len(self.checkpointer.steps())


@contextlib.contextmanager
def slow_saves(folder: Path, **settings: Any) -> Iterator[SlowSaves]:
    saves = SlowSaves(folder, **settings)
    try:
        yield saves
    finally:
        saves.finish()
        with contextlib.suppress(AbandonedError):  # it says so where every save was voided
            saves.checkpointer.close()


def contents(state: object) -> dict[str, bytes]:
    """The bytes of every tensor of a state, by key path."""
    flat = walk(state)
    memory = [_bytes_of(each.clone()) for each in flat.storages]
    return {spec.name: memory[spec.storage].numpy().tobytes() for spec in flat.tensors}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Sabotage:
    """Ways to break what guards a save, so that a test can show that it would notice."""

    @staticmethod
    def never_wait(self: Fence, save: object) -> None:
        """In place of ``Fence.guard``."""

    @staticmethod
    def all_stable(storages: object, owned: object, guilty: set[int]) -> bytearray:
        """In place of ``classify``: only the audit makes anything volatile."""
        return bytearray(
            storage.data_ptr() not in guilty
            for storage in storages  # type: ignore[attr-defined]
        )
