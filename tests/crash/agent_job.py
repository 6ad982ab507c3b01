"""What ``torchrun`` starts on each of two processes: a training that is told to go.

    torchrun --nproc-per-node=2 -m tests.crash.agent_job FRAMEWORK ROOT LINES GATE

What rank N says is in LINES-N; see ``told_trainings``.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist

from tests.crash import told_trainings


def main(framework: str, root: str, lines: str, gate: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with open(f"{lines}-{rank}", "a", buffering=1) as file:
        train = getattr(told_trainings, framework)
        train(lambda text: file.write(f"{text}\n"), root, "", rank, dist.get_world_size(), gate)
    os._exit(0)  # gloo's threads sometimes abort a process that ends


if __name__ == "__main__":
    main(*sys.argv[1:])
