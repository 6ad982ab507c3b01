"""Rows about what training feels, under a real Lightning Trainer and in a bare loop."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader

import portus
from portus_lightning import PortusIO
from tests.bench.measure import Row
from tests.bench.saving import MIB, pool_at
from tests.bench.states import Trained

SAVES = 10


class NoCheckpointIO(TorchCheckpointIO):
    """Makes an empty file, so that Lightning goes on; saves nothing."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()


class Network(LightningModule):
    """A stack of linear layers with AdamW: 12 bytes saved for each parameter."""

    def __init__(self, layers: int = 24, width: int = 1024, rows: int = 192) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        self._data = [torch.randn(rows, width) for _ in range(SAVES)]

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self._data, batch_size=1)  # type: ignore[arg-type]  # a list serves


def fit(place: Path, io: CheckpointIO) -> tuple[float, Network]:
    """Seconds of a fit that saves at every step, the drain at its end included."""
    torch.manual_seed(0)
    network = Network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            default_root_dir=place,
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[io],
            callbacks=[
                ModelCheckpoint(
                    place / "checkpoints",
                    every_n_train_steps=1,
                    # It removes the checkpoint before while it still writes it, and then fails.
                    save_top_k=-1 if isinstance(io, AsyncCheckpointIO) else 1,
                )
            ],
        )
        start = time.perf_counter()
        trainer.fit(network)
        trainer.strategy.teardown()
        return time.perf_counter() - start, network


def training_rows(memory: Path, rounds: int) -> list[Row]:
    """Extra wall time per save at every step, against the better of Lightning's own ways."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    makers: dict[str, Callable[[], CheckpointIO]] = {
        "none": NoCheckpointIO,
        "portus": PortusIO,
        "Lightning default": TorchCheckpointIO,
        "AsyncCheckpointIO": AsyncCheckpointIO,
    }
    walls: dict[str, list[float]] = {name: [] for name in makers}
    for number in range(rounds + 1):
        for name, make in makers.items():
            seconds, _ = fit(memory / "run", make())
            with contextlib.suppress(FileNotFoundError):
                _remove(memory / "run")
            if number:
                walls[name].append(seconds)
    extra = {
        name: [
            1e3 * (mine - none) / SAVES
            for mine, none in zip(walls[name], walls["none"], strict=True)
        ]
        for name in makers
        if name != "none"
    }
    best = min(
        ("Lightning default", "AsyncCheckpointIO"), key=lambda n: statistics.median(extra[n])
    )
    return [
        Row(
            name=f"extra training wall time per save, over {best}",
            bar=1 / 5,
            that=best,
            unit="ms",
            figures=extra,
        )
    ]


def first_row(memory: Path, rounds: int) -> Row:
    """The first save of a run against its tenth: from the call to the commit, while training."""
    figures: dict[str, list[float]] = {"first": [], "tenth": []}
    for _ in range(rounds):
        trained = Trained(40, 1024)
        with pool_at(memory / "pool") as checkpointer:
            for _ in range(10):
                trained.step()
            checkpointer.wait()
            totals = []
            for step in range(10):
                trained.step()
                handle = checkpointer.save(trained.state(), step)
                handle.wait()
                totals.append(handle.stats.total_s)
        figures["first"].append(totals[0])
        figures["tenth"].append(totals[9])
    return Row(
        name="first save of a run over its tenth", bar=1.5, this="first", that="tenth",
        figures=figures,
    )  # fmt: skip


def dip_row(memory: Path, rounds: int) -> Row:
    """Steps per second of a training of small operations while a save is in flight."""
    torch.set_num_threads(1)
    small = Trained(24, 64)
    big = {"x": torch.randn(256 * MIB)}
    owner = torch.optim.SGD([torch.nn.Parameter(big["x"])], lr=0.1, momentum=0.9)
    rates: dict[str, list[float]] = {"alone": [], "in flight": []}
    with pool_at(memory / "pool") as checkpointer:
        _see(owner)
        state = {"w": owner.param_groups[0]["params"][0], **owner.state_dict()}
        for number in range(rounds + 2):
            alone = _steps_per_s(small, lambda count: count < 300)
            big["x"].add_(1)
            handle = checkpointer.save(state, number)
            flying = _steps_per_s(small, lambda count, handle=handle: not handle.done)  # type: ignore[misc]
            handle.wait()
            if number >= 2:
                rates["alone"].append(alone)
                rates["in flight"].append(flying)
    return Row(
        name="steps/s of small operations while a save is in flight",
        bar=0.7,
        at_most=False,
        this="in flight",
        that="alone",
        unit="steps/s",
        figures=rates,
    )


def _see(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer step once, so that its storages count as stable."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parameter.grad = None


def _steps_per_s(trained: Trained, more: Callable[[int], bool]) -> float:
    start, count = time.perf_counter(), 0
    while more(count) or count < 5:
        trained.step()
        count += 1
    return count / (time.perf_counter() - start)


def _remove(place: Path) -> None:
    import shutil

    shutil.rmtree(place)


def clock_row(rounds: int) -> Row:
    """What a step pays for ``Cadence`` where nothing is to be saved: the hook, and the question."""
    steps = 20_000
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    cadence = portus.Cadence(every=100 * steps * rounds)

    def asked() -> float:
        seen, start = cadence._clock.before_step, time.perf_counter()
        for _ in range(steps):
            seen(optimizer)
            cadence.should_save()
        return 1e6 * (time.perf_counter() - start) / steps

    row = Row(name="Cadence, a step at which nothing is saved", bar=10.0, unit="us")
    return row.run({"portus": asked}, rounds)
