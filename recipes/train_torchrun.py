"""A GPT under torchrun: FSDP2, and ``portus.dcp`` in the background, into torch's own directories.

    torchrun --nproc-per-node 8 recipes/train_torchrun.py \\
        --config recipes/configs/torchrun/6.7B.yaml
    torchrun --nproc-per-node 2 recipes/train_torchrun.py --config ... --tiny      on a laptop

When restarted, even with another number of processes, it continues from the newest checkpoint that
all ranks committed. Random draws of a step depend only on its number and the rank, so a killed run
repeats an uninterrupted one with as many processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import portus.dcp
from gpt import GPT, SIZES, Text, adamw, shard, warm_then_cosine
from portus.dcp import PortusStorageWriter

TYPES: Final = {"str": str, "int": int, "float": float}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys of the YAML; each is an option of the command line too.

    batch, learning_rate: 0 for those of the size. save_every: in steps. checkpoints: a directory
    that all ranks see. keep: the number of complete checkpoints to keep.
    """

    size: str = "tiny"
    steps: int = 20
    batch: int = 0
    learning_rate: float = 0.0
    seed: int = 1
    save_every: int = 5
    checkpoints: str = "runs/torchrun/checkpoints"
    keep: int = 2

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise SystemExit(f"size: there are {', '.join(SIZES)}; found {self.size!r}")


def settings_of(arguments: Sequence[str] | None = None) -> tuple[Settings, bool]:
    """Return the YAML's settings, changed by the command line; and whether to use the CPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", type=Path, help="a YAML of recipes/configs/torchrun")
    parser.add_argument("--tiny", action="store_true", help="the tiny model, on the CPU")
    for field in fields(Settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=TYPES[str(field.type)])
    given = vars(parser.parse_args(arguments))
    config, tiny = given.pop("config"), given.pop("tiny")
    values: dict[str, Any] = yaml.safe_load(config.read_text()) if config else {}
    if tiny:
        values |= {"size": "tiny", "steps": 20, "save_every": 5}
    values |= {name: value for name, value in given.items() if value is not None}
    unknown = values.keys() - {field.name for field in fields(Settings)}
    if unknown:
        parser.error(f"{config}: unknown keys {sorted(unknown)}")
    return replace(Settings(), **values), tiny


class Training:
    """A model and its optimizer, sharded over all ranks."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings: Final = settings
        self.device: Final = device
        size = SIZES[settings.size]
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        with torch.device("meta"):
            self.model: Final = GPT(size)
        shard(self.model, mesh, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.model.to_empty(device=device)
        torch.manual_seed(settings.seed + dist.get_rank())
        for module in self.model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        self.learning_rate: Final = settings.learning_rate or size.learning_rate
        self.batch: Final = settings.batch or size.batch
        self.optimizer: Final = adamw(self.model, self.learning_rate)
        self.text: Final = Text(size.context)

    def step(self, number: int) -> float:
        """Train step ``number``, from 0; return the loss of this rank."""
        settings = self.settings
        torch.manual_seed((settings.seed * 1_000_003 + number) * 4_099 + dist.get_rank())
        chosen = torch.randint(len(self.text), (self.batch,)).tolist()
        batch = torch.stack([self.text[index] for index in chosen]).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * warm_then_cosine(number, settings.steps)
        loss: torch.Tensor = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self, done: int) -> dict[str, Any]:
        """Return the state for a checkpoint; its tensors are the trained ones, not copies."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "done": done}

    def resume(self) -> int:
        """Load the newest complete checkpoint, if there is one; return the number of steps done."""
        state = self.state(0)
        if portus.dcp.load_newest(state, self.settings.checkpoints) is None:
            return 0
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(state["done"])


def main() -> None:
    settings, tiny = settings_of()
    on_gpu = torch.cuda.is_available() and not tiny
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    training = Training(settings, device)
    writer = PortusStorageWriter(keep=settings.keep)
    start = training.resume()
    say(f"{settings.size} on {dist.get_world_size()} ranks, from step {start}")
    for number in range(start, settings.steps):
        loss = training.step(number)
        done = number + 1
        if done % settings.save_every == 0 or done == settings.steps:
            writer.save(training.state(done), f"{settings.checkpoints}/step_{done}")
        say(f"step {done:4d}  loss {loss:.6f}")
    writer.close()
    if dist.get_rank() == 0:
        for directory in sorted(Path(settings.checkpoints).glob("step_*")):
            size = sum(file.stat().st_size for file in directory.iterdir())
            say(f"{directory}: {size:,} bytes")
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print ``text``, once and not by every rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
