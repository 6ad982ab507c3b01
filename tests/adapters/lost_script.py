"""A training with a mirror, slow enough to be killed in it."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from portus_lightning import PortusIO
from tests.adapters.tiny import Net, every_step, loader, trainer
from tests.nursery import Say

KEPT: Final[dict[str, dict[str, Any]]] = {
    "all": {"save_top_k": -1, "save_last": True},
    "best": {"save_top_k": 2, "monitor": "loss", "save_last": True},
    "newest": {"save_top_k": 1, "save_last": True},
    "link": {"save_top_k": -1, "save_last": "link"},
}
STEP_S: Final = 0.04


class Telling(Net):
    def on_train_start(self) -> None:
        print(f"starts at {self.global_step}", flush=True)

    def on_train_batch_end(self, *_: object) -> None:
        time.sleep(STEP_S)
        print("step", flush=True)


# In the nursery.


def warm_up() -> None:
    """All is imported."""


def run(_: Say, run: str, mirror: str, epochs: int, kept: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    torch.set_num_threads(1)
    root, model = Path(run), Telling()
    fit = trainer(
        root,
        max_epochs=epochs,
        callbacks=[every_step(root, **KEPT[kept])],
        plugin=PortusIO(mirror=mirror),
    )
    fit.fit(model, loader(), ckpt_path="last")
    torch.save(model.state_dict(), root / "weights.pt")
