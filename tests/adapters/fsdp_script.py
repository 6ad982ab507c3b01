"""A training script for Accelerate with FSDP2 states, on CPUs. It knows nothing of Portus.

Accelerate itself takes FSDP for GPUs only. So the model is sharded here, and Accelerate is told
that it was; ``save_state`` and ``load_state`` are its own from there on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration, set_seed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Progress:
    """Where the script is; registered for checkpointing."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def digest(values: list[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--kill-after", type=int)
    parser.add_argument("--settle", action="store_true", help="be killed when all is committed")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--load", help="a directory, here or not")
    parser.add_argument("--kind", default="SHARDED_STATE_DICT")
    args = parser.parse_args()
    project = ProjectConfiguration(
        project_dir=args.root, automatic_checkpoint_naming=True, total_limit=args.limit
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=args.kind
    )
    set_seed(7, device_specific=True)
    torch.manual_seed(1)  # fully_shard shards what each process has
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    torch.manual_seed(100 + accelerator.process_index)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    accelerator._models.append(model)
    accelerator._optimizers.append(optimizer)
    accelerator._schedulers.append(schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    saved = os.path.join(args.root, "checkpoints")
    if args.load or (os.path.isdir(saved) and os.listdir(saved)):
        accelerator.load_state(args.load)
        accelerator.project_configuration.iteration = progress.total
    log = open(os.path.join(args.root, f"losses-{accelerator.process_index}.txt"), "a")  # noqa: SIM115 - open until the process is killed
    while progress.total < 6:
        loss = model(torch.rand(5, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(progress.total, float(loss).hex(), file=log, flush=True)
        progress.total += 1
        accelerator.save_state()
        if progress.total == args.kill_after and args.settle:
            import portus_accelerate  # the one line of Portus, for this wish alone

            portus_accelerate.wait(accelerator)
            accelerator.wait_for_everyone()
        if progress.total == args.kill_after and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    moments = [value for each in optimizer.state.values() for value in each.values()]
    end = digest([*model.state_dict().values(), *moments])
    accelerator.end_training()
    print("end", end, file=log, flush=True)
    os._exit(0)  # gloo's threads sometimes abort a process that ends, also without Portus


if __name__ == "__main__":
    main()
