"""Trainings that kill themselves at a change of a name, of a number; 0 ends in peace. Those of two
ranks and of Fabric save their weights at the end, and say where they began."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from portus_lightning import PortusIO
from tests.adapters.kills import Kills
from tests.adapters.tiny import Net, every_step, loader, trainer
from tests.nursery import Say

STEPS: Final = 12
KEPT: Final = 2
"""Of Fabric's script, which removes what is older by itself."""


def fit(root: Path, resume: Any = None, top_k: int = -1, last: str = "link") -> Net:
    """An epoch that saves at each step. last: "none", "true" or "link"."""
    torch.set_num_threads(1)  # other sums in other processes, else
    torch.manual_seed(5)
    net, saves_last = Net(), {"none": None, "true": True}.get(last, "link")
    keep = every_step(
        root,
        save_last=saves_last,
        save_top_k=top_k,
        monitor=None if top_k == -1 else "step",
        mode="max",
    )
    made = trainer(root, plugin=PortusIO(), callbacks=[keep])
    made.fit(net, loader(shuffle=False), ckpt_path=resume)
    return net


def of_two_ranks(root: Path, number: int) -> None:
    """A Trainer on both."""
    from lightning.pytorch import Trainer

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


# In the nursery.


def warm_up() -> None:
    """All is imported."""


def run(
    _: Say, what: str, root: str, number: int, environment: Mapping[str, str], *more: Any
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(environment)
    if what == "one":
        Kills(number)
        fit(Path(root), "last", *more)
    else:
        {"ddp": of_two_ranks, "fabric": of_fabric}[what](Path(root), number)
