"""Trains and saves, and prints where a line of the core ran with a lock held and no marked function
(``calls.marked``) on the stack: a signal handler that interrupts it there, and waits for a save,
waits for ever. Run as a script, so that its locks are there before those of Portus.

The last line: how many lines ran with a lock held.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_MAIN = threading.get_ident()
_held: dict[int, str] = {}
"""Locks that the main thread holds, and where each was made."""
_FREE = ("copying/thread.py",)
"""What makes a lock that is taken for a thread, which gives it back."""


class Lock:
    """As that of ``threading``; it is known whether the main thread holds it."""

    def __init__(self, lock: Any, where: str) -> None:
        self._lock, self._where, self._times = lock, where, 0

    def acquire(self, *arguments: Any, **named: Any) -> bool:
        taken: bool = self._lock.acquire(*arguments, **named)
        if taken and threading.get_ident() == _MAIN:
            self._times += 1
            _held[id(self)] = self._where
        return taken

    def release(self) -> None:
        if threading.get_ident() == _MAIN and self._times:
            self._times -= 1
            if not self._times:
                del _held[id(self)]
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """With what ``threading.Condition`` calls."""

    def _release_save(self) -> Any:
        times = self._times
        if threading.get_ident() == _MAIN:
            self._times = 0
            _held.pop(id(self), None)
        return times, self._lock._release_save()

    def _acquire_restore(self, saved: Any) -> None:
        self._lock._acquire_restore(saved[1])
        if threading.get_ident() == _MAIN:
            self._times = saved[0]
            _held[id(self)] = self._where

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())


def _known(kind: type[Lock], make: Callable[[], Any]) -> Callable[[], Any]:
    def new() -> Any:
        frame: FrameType = sys._getframe(1)
        while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
            frame = frame.f_back
        name = frame.f_code.co_filename
        if f"{os.sep}portus{os.sep}" not in name or name.endswith(_FREE):
            return make()
        return kind(make(), f"{name}:{frame.f_lineno}")

    return new


def _locks() -> None:
    threading.Lock = _known(Lock, _thread.allocate_lock)  # type: ignore[assignment]
    threading.RLock = _known(RLock, threading.RLock)  # type: ignore[assignment]


class Watch:
    """Inside a ``with``: finds the lines with a lock held and no mark."""

    def __init__(self) -> None:
        import portus
        from portus.media import calls

        self._core = os.path.dirname(portus.__file__) + os.sep
        self._marked = calls._marked
        self.found: set[str] = set()
        self.count = 0

    def __enter__(self) -> Watch:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        return self._ran if frame.f_code.co_filename.startswith(self._core) else None

    def _ran(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and _held:
            self.count += 1
            below: FrameType | None = frame
            while below is not None and id(below.f_code) not in self._marked:
                below = below.f_back
            if below is None:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                self.found.update(f"{where} holds the lock of {lock}" for lock in _held.values())
        return self._ran


def lightning(root: Path, **settings: Any) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from portus_lightning import PortusIO
    from tests.adapters.tiny import Net, loader, trainer

    for path in (None, root / "often" / "last.ckpt"):
        often = ModelCheckpoint(
            root / "often", filename="{step}", every_n_train_steps=1, save_top_k=2,
            monitor="step", mode="max", save_last="link",
        )  # fmt: skip
        other = ModelCheckpoint(root / "other", every_n_train_steps=2, save_last=True)
        settings_of = {"plugins": [PortusIO(**settings)], "callbacks": [often, other]}
        fit = trainer(root, max_epochs=2 if path is None else 3, **settings_of).fit
        fit(Net(), loader(shuffle=False), ckpt_path=path)


def mirrored(root: Path) -> None:
    lightning(root, mirror=f"file://{root}/mirror")


def by_hand(root: Path) -> None:
    import torch

    import portus

    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    with portus.Checkpointer(root / "run", keep=2) as checkpointer:
        for step in range(4):
            net(torch.ones(4)).sum().backward()
            optimizer.step()
            portus.save({"net": net.state_dict()}, root / "one.pt")
            checkpointer.save({"net": net.state_dict()}, step)
        checkpointer.wait()
        checkpointer.load()
        checkpointer.versions()
    portus.save({"net": net.state_dict()}, root / "one.pt").join()
    portus.load(root / "one.pt")


def sharded(root: Path) -> None:
    import torch

    from portus import dcp

    net = torch.nn.Linear(4, 4)
    for step in range(4):
        dcp.async_save({"net": net.state_dict()}, checkpoint_id=str(root / f"late-{step}"))
        dcp.save({"net": net.state_dict()}, checkpoint_id=str(root / f"now-{step}"))
    dcp.load({"net": net.state_dict()}, checkpoint_id=str(root / "late-3"))


def accelerated(root: Path) -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    import portus_accelerate

    project = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    portus_accelerate.enable(accelerator)
    net = torch.nn.Linear(4, 4)
    rows = torch.utils.data.TensorDataset(torch.ones(8, 4))
    data = torch.utils.data.DataLoader(rows, batch_size=2)
    net, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), data)
    for batch in data:
        accelerator.backward(net(batch[0]).sum())
        optimizer.step()
        accelerator.save_state()
    accelerator.load_state()
    portus_accelerate.wait(accelerator)
    accelerator.end_training()


WAYS = [lightning, mirrored, by_hand, sharded, accelerated]

if __name__ == "__main__":
    _locks()
    import tests  # noqa: F401  states as small as these are copied late too

    with Watch() as watch:
        {way.__name__: way for way in WAYS}[sys.argv[1]](Path(sys.argv[2]))
    for line in sorted(watch.found):
        print(line)
    print(watch.count)
