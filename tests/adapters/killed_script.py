"""Trainings of Fabric, and of two ranks, that kill themselves at a change of a name: what, run,
number; 0 ends in peace. Each saves its weights at the end, and says where it began."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

STEPS: Final = 12
KEPT: Final = 2
"""Of Fabric's script, which removes what is older by itself."""


class Kills:
    """At the call of this number that changes a name: before it, or after it."""

    def __init__(self, number: int) -> None:
        self._left = number
        if number:
            for name in ("rename", "replace", "unlink", "remove", "symlink", "link"):
                setattr(os, name, self._around(getattr(os, name)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            self._count()
            try:
                return call(*arguments, **named)
            finally:
                self._count()

        return called

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def of_two_ranks(root: Path, number: int) -> None:
    """A Trainer, started by torchrun on both."""
    from lightning.pytorch import Trainer

    from portus_lightning import PortusIO
    from tests.adapters.tiny import Net, every_step, loader

    class Telling(Net):
        def on_train_start(self) -> None:
            if self.global_rank == 0:
                print(f"starts at {self.global_step}", flush=True)

    torch.manual_seed(5)
    model, keep = Telling(), every_step(root, save_last="link")
    made = Trainer(
        default_root_dir=root,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keep],
        plugins=[PortusIO()],
    )
    if os.environ["RANK"] == "0":
        Kills(number)
    made.fit(model, loader(shuffle=False), ckpt_path="last")
    if made.is_global_zero:
        torch.save(model.state_dict(), root / "weights.pt")


def of_fabric(root: Path, number: int) -> None:
    """A loop by hand, which goes on from the newest file that is there."""
    from lightning.fabric import Fabric

    from portus_lightning import PortusIO

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[PortusIO()])
    torch.manual_seed(5)
    model = torch.nn.Linear(8, 8)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    directory = root / "ckpt"
    directory.mkdir(exist_ok=True)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    found = sorted(directory.glob("step=*.ckpt"))
    if found:
        fabric.load(found[-1], state)
    print(f"starts at {state['step']}", flush=True)
    Kills(number)
    for step in range(int(str(state["step"])) + 1, STEPS + 1):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        fabric.save(directory / f"step={step:03d}.ckpt", state)
        for old in sorted(directory.glob("step=*.ckpt"))[:-KEPT]:
            os.remove(old)
    torch.save(model.state_dict(), root / "weights.pt")


def main(what: str, root: str, number: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    {"ddp": of_two_ranks, "fabric": of_fabric}[what](Path(root), int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
