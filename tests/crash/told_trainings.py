"""Trainings of three frameworks that are told to go, and go on; for the nursery.

Each says "begins N" and "trained N" with steps, "signal N" with the steps trained when one came,
and "ended DIGEST" if it came to its end.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

import portus_accelerate
from portus_lightning import PortusIO
from tests.nursery import Say

EPOCHS = 3
BATCHES = 6
STEPS = EPOCHS * BATCHES
ROWS = 4

HELD_AT = STEPS - 3
"""Who is to be told, and was not, waits after this step: no training ends before its signal."""


def warm_up() -> None:
    """What is imported above is all, but for one that is slow."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from transformers import Trainer as _  # noqa: F401


class Progress:
    """Says what was trained, and when a signal came. ``gate``: a file that is there once the signal
    was sent; empty if none is to come."""

    def __init__(self, say: Say, gate: str) -> None:
        self.say = say
        self.trained = 0
        self.now: Callable[[], int] = lambda: self.trained
        self._gate = gate
        signal.signal(signal.SIGTERM, lambda *_: say(f"signal {self.now()}"))

    def begin(self, step: int) -> None:
        self.trained = step
        self.say(f"begins {step}")

    def step(self, step: int) -> None:
        self.trained = step
        self.say(f"trained {step}")
        while self._gate and step >= HELD_AT and not os.path.exists(self._gate):
            time.sleep(0.001)

    def end(self, tensors: Iterable[torch.Tensor]) -> None:
        data = b"".join(each.detach().numpy().tobytes() for each in tensors)
        self.say(f"ended {hashlib.sha256(data).hexdigest()[:16]}")


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )


def rows(ranks: int) -> TensorDataset:
    return TensorDataset(torch.arange(BATCHES * ROWS * ranks * 4.0).reshape(-1, 4) / 100)


def joined(store: str, rank: int, ranks: int) -> None:
    """One of ``ranks`` processes that train together, as a launcher tells them; if none did."""
    if ranks == 1 or dist.is_initialized():
        return
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: f"{value}" for name, value in numbers.items()})
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="told", MASTER_ADDR="", MASTER_PORT="0")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).pow(2).mean()
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.layers(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Says(Callback):
    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.progress.begin(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.progress.step(trainer.global_step)


def lightning(say: Say, root: str, store: str, rank: int, ranks: int, gate: str) -> None:
    """Validates after each epoch and saves every second step."""
    progress = Progress(say, gate)
    joined(store, rank, ranks)
    seed_everything(1, verbose=False)
    net = Net()
    keep = ModelCheckpoint(
        Path(root, "ckpt"), "{step}", every_n_train_steps=2, save_top_k=1, save_last="link"
    )
    more: dict[str, Any] = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=root,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        plugins=[PortusIO()],
        callbacks=[Says(progress), keep],
        use_distributed_sampler=False,
        **more,
    )
    progress.now = lambda: trainer.global_step  # other callbacks ask before it is said
    data = rows(ranks)
    sampler: Any = DistributedSampler(data, ranks, rank, shuffle=False)
    loader = StatefulDataLoader(data, batch_size=ROWS, sampler=sampler)
    try:
        trainer.fit(net, loader, DataLoader(data, batch_size=ROWS), ckpt_path="last")
        progress.end([*net.state_dict().values(), *moments(trainer.optimizers[0])])
    except SystemExit as error:
        os._exit(int(error.code or 0))  # gloo's threads sometimes abort a process that ends


def uneven(say: Say, root: str, store: str, rank: int, told_in: str) -> None:
    """One of two ranks, of which the second has nothing to validate on, which Lightning allows; the
    first is told to go, after some validations, in this hook."""
    progress = Progress(say, "")
    joined(store, rank, 2)
    seed_everything(1, verbose=False)

    class Alone(Net):
        """Without batch norm: its buffers go to all ranks in each forward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Linear(4, 1)

        def validation_step(self, batch: Any, _: int) -> None:
            self.layers(batch[0])

    class Told(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.tell(trainer, "train")

        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            self.tell(trainer, "validation")

        def tell(self, trainer: Any, hook: str) -> None:
            if rank == 0 and hook == told_in and trainer.global_step >= BATCHES + 2:
                signal.raise_signal(signal.SIGTERM)

    keep = ModelCheckpoint(Path(root, "ckpt"), every_n_train_steps=3)
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=root,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=EPOCHS,
        val_check_interval=2,
        num_sanity_val_steps=0,
        plugins=[PortusIO()],
        callbacks=[Says(progress), Told(), keep],
        use_distributed_sampler=False,
        strategy="ddp",
        devices=2,
    )
    progress.now = lambda: trainer.global_step
    data, none = rows(2), TensorDataset(torch.zeros(0, 4))
    train = DataLoader(data, ROWS, sampler=DistributedSampler(data, 2, rank))
    net = Alone()
    net.allow_zero_length_dataloader_with_multiple_devices = True
    try:
        trainer.fit(net, train, DataLoader(none if rank else data, ROWS))
    except SystemExit as error:
        os._exit(int(error.code or 0))  # gloo's threads sometimes abort a process that ends


def early(_: Say, root: str) -> None:
    """Is told before Lightning hears signals, by a handler of its own, and trains longer than it
    takes to leave."""
    signal.signal(signal.SIGTERM, lambda *_: None)

    class Told(Callback):
        def on_fit_start(self, *_: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.2)

    Trainer(
        accelerator="cpu",
        default_root_dir=root,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=1,
        plugins=[PortusIO(preempt_within=0.2)],
        callbacks=[Told()],
    ).fit(Net(), DataLoader(rows(1), batch_size=ROWS))


def moments(optimizer: Any) -> list[torch.Tensor]:
    return [each for one in optimizer.state.values() for each in one.values()]


def accelerate(say: Say, root: str, store: str, rank: int, ranks: int, gate: str) -> None:
    """Saves every second step."""
    progress = Progress(say, gate)
    joined(store, rank, ranks)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1 + rank)
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    data: Any = DataLoader(rows(ranks), batch_size=ROWS, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    found = sorted(Path(root).glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    step = int(found[-1].name.split("_")[1]) if found else 0
    if found:
        accelerator.load_state(str(found[-1]))
    leaves = portus_accelerate.should_leave(accelerator)  # it hears from here on
    progress.begin(step)
    while step < STEPS and not leaves:
        done = step % BATCHES
        for (batch,) in skip_first_batches(data, done) if done else data:
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            progress.step(step)
            leaves = portus_accelerate.should_leave(accelerator)
            if leaves or step % 2 == 0:
                accelerator.save_state(str(Path(root, f"step_{step}")))
            if leaves:
                break
    accelerator.end_training()
    if step == STEPS and not leaves:
        progress.end([*model.state_dict().values(), *moments(optimizer)])


def transformers(say: Say, root: str, store: str, rank: int, ranks: int, gate: str) -> None:
    """Evaluates every third step and saves every second."""
    from transformers import Trainer as OfTransformers
    from transformers import TrainerCallback, TrainingArguments

    progress = Progress(say, gate)
    joined(store, rank, ranks)

    class Told(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.step(state.global_step)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
            found = self.layers(row)
            return {"loss": found.pow(2).mean(), "logits": found}

    data: Any = [{"row": each} for each in rows(ranks).tensors[0]]
    arguments = TrainingArguments(
        output_dir=f"{root}/out",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        save_steps=2,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=3,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        label_names=[],
        ddp_backend="gloo" if ranks > 1 else None,
    )
    torch.manual_seed(1)
    trainer: Any = OfTransformers(
        Model(), arguments, default_collate, train_dataset=data, eval_dataset=data
    )
    trainer.add_callback(Told())
    trainer.train(resume_from_checkpoint=bool(list(Path(root).glob("out/checkpoint-*"))))
    if trainer.state.global_step == STEPS and not trainer.control.should_save:
        progress.end([*trainer.model.state_dict().values(), *moments(trainer.optimizer)])


__all__ = ["accelerate", "early", "lightning", "transformers", "uneven", "warm_up"]
