"""A small training for each adapter, for ``test_contract``: at step n the weight is -n.

Each class has ``train``, which saves at each step and removes no checkpoint, and ``load``, which
loads a checkpoint with the framework's own code and returns its step, or raises
``AssertionError`` if it is not the state of that step.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import portus
import portus.dcp
import portus_accelerate
from portus.dcp import PortusStorageWriter
from portus_lightning import PortusIO
from portus_lightning.of_lightning import PortusCompanion
from tests.nursery import Say

SIZE = 5000


@dataclass(frozen=True)
class Order:
    """A training to run, in a process of its own, which ends with it. It resumes from the newest
    checkpoint in the directory of the run, if there is one.

    run: the directory of the run. It may exist, with what an earlier training left, or a copy of
        that.
    pool: the storage host or the device to save to; None: save files, the adapter's default.
    until: the last step.
    kill_at: the step at which ``note_save`` kills the process; 0: none.
    """

    run: str
    pool: str | None
    until: int
    kill_at: int
    say: Say

    def note_save(self, step: int, path: str) -> None:
        """Report a save; to be called at each step, right after the save was requested."""
        self.say(f"{step} {path}")
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def warm_up() -> None:
    """What is imported above is all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def started() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.zeros(SIZE))
    return weight, torch.optim.SGD([weight], lr=1.0)


def step_of(weight: torch.Tensor, said: int) -> int:
    """The step that was said, if all of the weight is of that one."""
    assert torch.equal(weight, torch.full((SIZE,), -float(said))), f"step {said}: {weight}"
    return said


def newest(directory: Path, is_whole: Callable[[Path], bool] = bool) -> Path | None:
    """The checkpoint with the highest number in its name; none whose save was cut off."""
    found = directory.glob("step*[0-9]*") if directory.is_dir() else ()
    whole = [path for path in found if is_whole(path)]
    return max(whole, key=lambda path: int("".join(filter(str.isdigit, path.name))), default=None)


class ByHand:
    """A loop of one's own, with ``portus.TrainingFiles``."""

    @staticmethod
    def train(order: Order) -> None:
        run = Path(order.run)
        weight, optimizer = started()
        pool = portus.Place.parse(order.pool) if order.pool else None
        files = portus.TrainingFiles(portus.Settings(), pool=pool)
        files.begin(os.fspath(run), f"{run}/.portus", f"{run}/ckpt")
        files.recover(f"{run}/ckpt")
        step, found = 0, newest(run / "ckpt")
        if found is not None:
            state = portus.load(found)
            weight.data.copy_(state["weight"])
            step = state["step"]
        while step < order.until:
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            path = str(run / "ckpt" / f"step={step}.ckpt")
            files.save({"weight": weight.data, "step": step}, path, step)
            order.note_save(step, path)
        files.close()

    @staticmethod
    def load(path: str) -> int:
        state = torch.load(path)
        return step_of(state["weight"], state["step"])


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Tells(ModelCheckpoint):
    """Keeps all, and the last once more."""

    def __init__(self, order: Order) -> None:
        super().__init__(
            f"{order.run}/ckpt", "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True
        )
        self._order = order

    def _save_checkpoint(self, trainer: Any, path: str) -> None:
        super()._save_checkpoint(trainer, path)
        if "last" not in path:
            self._order.note_save(trainer.global_step, path)


class Lightning:
    """``PortusIO`` in a Trainer."""

    skipped = dict.fromkeys(
        ("copied on host", "copied on device"),
        "the original replaces last.ckpt, and the version that its copy leads to goes",
    )

    @staticmethod
    def train(order: Order) -> None:
        data: Any = DataLoader(TensorDataset(torch.zeros(3, 1)))
        Trainer(
            accelerator="cpu",
            default_root_dir=order.run,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[PortusIO(order.pool)],
            callbacks=[PortusCompanion(), Tells(order)],
            max_steps=order.until,
            max_epochs=-1,
        ).fit(Net(), data, ckpt_path="last")

    @staticmethod
    def load(path: str) -> int:
        state = torch.load(path, weights_only=False)
        return step_of(state["state_dict"]["weight"], state["global_step"])


class Counter:
    """Where an Accelerate script is."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


class Accelerate:
    """``save_state`` and ``load_state``, in a script that names its directories."""

    @staticmethod
    def train(order: Order) -> None:
        accelerator = accelerate.Accelerator(cpu=True, project_dir=order.run)
        portus_accelerate.enable(accelerator, pool=order.pool)
        model = Weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        found = newest(Path(order.run, "ckpt"), lambda it: Path(it, "random_states_0.pkl").exists())
        if found is not None:
            accelerator.load_state(str(found))
        while counter.step < order.until:
            accelerator.backward(model())
            optimizer.step()
            optimizer.zero_grad()
            counter.step += 1
            path = os.path.join(order.run, "ckpt", f"step_{counter.step}")
            accelerator.save_state(path)
            order.note_save(counter.step, path)
        accelerator.end_training()

    @staticmethod
    def load(path: str) -> int:
        pooled = os.path.join(path, "pytorch_model.bin")
        is_pooled = os.path.exists(pooled)
        state = torch.load(pooled) if is_pooled else load_file(f"{path}/model.safetensors")
        step = torch.load(os.path.join(path, "custom_checkpoint_0.pkl"))["step"]
        return step_of(state["weight"], step)


class Shards:
    """``portus.dcp``, at one rank: directories of torch's, of files, or of pointers to a storage
    host."""

    places = ("files", "host")  # one pool, and many ranks

    @staticmethod
    def train(order: Order) -> None:
        weight, optimizer = started()
        above = Path(order.run, "ckpt")
        state = {"weight": weight.data, "step": torch.tensor(0)}
        writer = PortusStorageWriter(pool=order.pool, model=order.run)
        portus.dcp.load_newest(state, above)
        step = int(state["step"])
        while step < order.until:
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            path = str(above / f"step_{step}")
            writer.save({"weight": weight.data, "step": torch.tensor(step)}, path)
            order.note_save(step, path)
        writer.close()

    @staticmethod
    def load(path: str) -> int:
        state = {"weight": torch.zeros(SIZE), "step": torch.tensor(0)}
        portus.dcp.load(state, path)
        return step_of(state["weight"], int(state["step"]))
