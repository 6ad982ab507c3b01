"""An ordinary script with ``transformers.Trainer``. It knows nothing of Portus."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(8) * (index + 1)) % 32
        return {"input_ids": words, "labels": words}


class Log(TrainerCallback):
    def __init__(self, path: str, kill_after: int | None) -> None:
        self.path = path
        self.kill_after = kill_after

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            with open(self.path, "a") as file:
                print(state.global_step, logs["loss"], logs["grad_norm"], file=file)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        if state.global_step == self.kill_after and args.process_index == last:
            os.kill(os.getpid(), signal.SIGKILL)


def shard(trainer: Any, kind: str) -> None:
    """Accelerate takes FSDP for GPUs only, and is told otherwise."""
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type=kind,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
    )
    trainer.accelerator.state.fsdp_plugin = plugin
    trainer.is_fsdp_enabled = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--kill-after", type=int)
    parser.add_argument("--only-model", action="store_true")
    parser.add_argument("--fsdp", help="FULL_STATE_DICT or SHARDED_STATE_DICT: FSDP2 over CPUs")
    args = parser.parse_args()
    output = os.path.join(args.root, "out")
    settings = TrainingArguments(
        output_dir=output,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        save_steps=1,
        save_total_limit=2,
        save_only_model=args.only_model,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
    )
    torch.manual_seed(1)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    trainer: Any = Trainer(GPT2LMHeadModel(config), settings, train_dataset=Texts())
    if args.fsdp:
        shard(trainer, args.fsdp)
    trainer.add_callback(Log(os.path.join(args.root, "losses-0.txt"), args.kill_after))
    trainer.train(resume_from_checkpoint=bool(os.path.isdir(output) and os.listdir(output)))
    values = [*trainer.model.state_dict().values()]
    values += [each for one in trainer.optimizer.state.values() for each in one.values()]
    values = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in values]
    end = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
    with open(os.path.join(args.root, f"end-{settings.process_index}.txt"), "w") as file:
        print(end, float(torch.rand(1)).hex(), file=file)
    if torch.distributed.is_initialized():
        os._exit(0)  # gloo's threads sometimes abort a process that ends, also without Portus


if __name__ == "__main__":
    main()
