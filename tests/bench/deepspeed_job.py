"""A training with DeepSpeed on one rank that saves: stock and Portus, taking turns.

python -m tests.bench.deepspeed_job DIRECTORY ROUNDS

Prints a JSON object: for each of them, by round, the seconds for which a save blocked training,
and those that it added to the training, whose steps fill all processors. Stock's files are made
durable before training goes on, as those of Portus are meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.adapters import deepspeed_jobs
from tests.bench.accelerate_job import sync
from tests.bench.fenced import Fenced

WIDTH = 1088  # with fp32 masters and moments: 160 MB
ROWS, STEPS, WARMUPS = 1024, 6, 2


class Training:
    """One engine, which saves below ``root``, and what a save of it costs."""

    def __init__(self, root: Path, fenced: Fenced, *, is_stock: bool) -> None:
        spec = {"stage": 2, "kind": "fp32", "width": WIDTH, "by": "stock"}
        spec["config"] = {"gradient_accumulation_steps": 1}
        self.root, self.is_stock, self._fenced = root, is_stock, fenced
        self.engine = deepspeed_jobs.engine_of(spec)
        self._batch = torch.rand(ROWS, WIDTH)
        self.step()

    def step(self) -> None:
        self.engine.backward(self.engine(self._batch).pow(2).mean())
        self.engine.step()

    def steps(self) -> float:
        """Seconds of some steps."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        return time.perf_counter() - start

    def cost(self) -> tuple[float, float]:
        """Seconds blocked by a save, and added by it."""
        plain_s = self.steps()
        self._fenced.taken()
        start = time.perf_counter()
        self.engine.save_checkpoint(str(self.root), tag="newest")
        blocked_s = time.perf_counter() - start
        if self.is_stock:
            sync(self.root / "newest")
        self.steps()
        whole_s = time.perf_counter() - start
        if not self.is_stock:
            blocked_s += self._fenced.taken()
            self._wait()
        shutil.rmtree(self.root / "newest")
        return blocked_s, whole_s - plain_s

    def _wait(self) -> None:
        from portus_accelerate.deepspeed import files_of

        files = files_of(self.engine)
        assert files is not None
        files.wait()


def main() -> None:
    root, rounds = Path(sys.argv[1]), int(sys.argv[2])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT="0")
    deepspeed_jobs.warm_up()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    import portus_accelerate

    fenced = Fenced()
    stock = Training(root / "stock", fenced, is_stock=True)
    ours = Training(root / "portus", fenced, is_stock=False)
    portus_accelerate.enable(ours.engine, on_error="raise")
    ways: dict[str, Callable[[], Any]] = {"stock": stock.cost, "portus": ours.cost}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(WARMUPS + rounds):
        for name, cost in ways.items():
            found = cost()
            if number >= WARMUPS:
                figures[name].append(found)
    for training in (ours, stock):
        training.engine.destroy()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
