"""Trains and saves, and prints where a line of the core ran with a lock held and no marked function
(``calls.mark``) on the stack: a signal handler that interrupts it there, and waits for a save,
waits for ever. Prints also which locks were taken while others were held, by any thread. Run as a
script, so that its locks are there before those of Portus.

The last line: how many lines ran with a lock held.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

HOLDS = " holds the lock of "
TAKES = " is held, and then taken: "
_held: defaultdict[int, list[Lock]] = defaultdict(list)
"""The locks that each thread holds; one that it entered twice is there twice."""
_mine = _held[threading.get_ident()]
"""Those of the main thread."""
_nested: set[tuple[str, str]] = set()
"""Where two locks were made, the second of which was taken while the first was held."""
_FREE = ("engine/copying/thread.py", "engine/media/write_watch.py")
"""What makes locks that one thread takes and another one gives back, and that nobody waits for
while others are held."""


class Lock:
    """As that of ``threading``; it is known which thread holds it."""

    def __init__(self, lock: Any, where: str) -> None:
        self._lock, self.where = lock, where

    def acquire(self, *arguments: Any, **named: Any) -> bool:
        taken: bool = self._lock.acquire(*arguments, **named)
        if taken:
            self._enter(1)
        return taken

    def release(self) -> None:
        _held[threading.get_ident()].remove(self)
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _enter(self, times: int) -> None:
        held = _held[threading.get_ident()]
        if self not in held:
            _nested.update((other.where, self.where) for other in held)
        held.extend([self] * times)


class RLock(Lock):
    """With what ``threading.Condition`` calls."""

    def _release_save(self) -> Any:
        held = _held[threading.get_ident()]
        times = held.count(self)
        held[:] = [each for each in held if each is not self]
        return times, self._lock._release_save()

    def _acquire_restore(self, saved: Any) -> None:
        self._lock._acquire_restore(saved[1])
        self._enter(saved[0])

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())


def _known(kind: type[Lock], make: Callable[[], Any]) -> Callable[[], Any]:
    def new() -> Any:
        frame: FrameType = sys._getframe(1)
        while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
            frame = frame.f_back
        name = frame.f_code.co_filename
        if f"{os.sep}portus" not in name or name.endswith(_FREE):
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
        from portus.engine.media import calls

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
        if event == "line" and _mine:
            self.count += 1
            below: FrameType | None = frame
            while below is not None and id(below.f_code) not in self._marked:
                below = below.f_back
            if below is None:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                own = [lock.where for lock in _mine if lock.where.startswith(self._core)]
                self.found.update(f"{where}{HOLDS}{lock}" for lock in own)
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


def pooled(root: Path) -> None:
    _in_a_pool(root / "run.portus")


def _in_a_pool(place: str | Path) -> None:
    import torch

    import portus

    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    with portus.Checkpointer(place, model="net", keep=2) as checkpointer:
        for step in range(4):
            net(torch.ones(4)).sum().backward()
            optimizer.step()
            checkpointer.save({"net": net.state_dict()}, step)
        checkpointer.wait()
        checkpointer.load()


WAYS = [lightning, mirrored, by_hand, sharded, accelerated, pooled]


def hosted(root: Path) -> None:
    from portus.reach.daemon.mirrors import TenantMirrors
    from portus.reach.mirror.address import parse
    from tests.hosts import serving, url

    mirrors = TenantMirrors(parse(f"file://{root}/mirror", "--mirror"))
    with serving(root / "pools", mirrors=mirrors) as server:
        _in_a_pool(url(server))


def shelved(root: Path) -> None:
    import numpy as np

    import portus

    with portus.Shelf(root / "shelf.portus") as shelf:
        shelf["numbers"] = np.zeros(10)
        with shelf.transaction():
            shelf["numbers"][3] = 1


IN_ORDER_ALONE = [hosted, shelved]
"""Ways in which the main thread holds locks that no worker wants: only their order counts."""

if __name__ == "__main__":
    _locks()
    import tests  # noqa: F401  states as small as these are copied late too

    with Watch() as watch:
        {way.__name__: way for way in (*WAYS, *IN_ORDER_ALONE)}[sys.argv[1]](Path(sys.argv[2]))
    for line in sorted(watch.found):
        print(line)
    for outer, inner in sorted(_nested):
        print(f"{outer}{TAKES}{inner}")
    print(watch.count)
