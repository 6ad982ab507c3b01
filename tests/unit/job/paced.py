"""Two ranks that ask when to save; for the nursery."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from tests.nursery import Say
from tests.unit.job.test_cadence import Training


def run(_: Say, place: str, backend: str) -> None:
    """Rank 1 is a child of rank 0."""
    child = os.fork()
    rank = 0 if child else 1
    dist.init_process_group(backend, f"file://{place}/store", rank=rank, world_size=2)
    training = Training(max_overhead=0.05)
    training.run(150, save_s=0.07 * (1 + rank))
    Path(place, f"{rank}").write_text(" ".join(map(str, training.saved)))
    dist.barrier(training.cadence._group)
    dist.destroy_process_group()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
