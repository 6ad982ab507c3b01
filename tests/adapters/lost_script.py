"""A training with a mirror, slow enough to be killed in it: run, mirror, epochs, what is kept."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from portus_lightning import PortusIO
from tests.adapters.tiny import Net, every_step, loader, trainer

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


def main(run: str, mirror: str, epochs: str, kept: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    torch.set_num_threads(1)
    root, model = Path(run), Telling()
    fit = trainer(
        root,
        max_epochs=int(epochs),
        callbacks=[every_step(root, **KEPT[kept])],
        plugin=PortusIO(mirror=mirror),
    )
    fit.fit(model, loader(), ckpt_path="last")
    torch.save(model.state_dict(), root / "weights.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
