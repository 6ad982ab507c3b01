"""A Trainer of any number of processes that says which samples it is given at which step."""

from __future__ import annotations

import hashlib
import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from portus_lightning import PortusIO
from portus_lightning.of_lightning import PortusCompanion
from tests.nursery import Say

SAMPLES = 22


class Rows(Dataset[torch.Tensor]):
    """Each row says which it is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


class Part(IterableDataset[torch.Tensor]):
    """The rows of one rank, each of which has as many; it says where it is."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rows = list(range(rank, SAMPLES, ranks))
        self.given = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.given %= len(self.rows)
        for row in self.rows[self.given :]:
            self.given += 1
            yield torch.tensor([float(row), 1.0])

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Net(LightningModule):
    """Dropout draws from the generators, and what it learns depends on the order."""

    def __init__(self, say: Say, workers: int, batch: int, kind: str, seed: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        )
        self._say, self._workers, self._batch = say, workers, batch
        self._kind, self._seed = kind, seed

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        if self._kind == "part":
            part = Part(self.trainer.global_rank, self.trainer.world_size)
            return DataLoader(part, self._batch)
        if self._kind == "stateful":
            # Its sampler draws its seed as it is made: the same on all ranks, or they share no
            # order.
            torch.manual_seed(self._seed)
            made: DataLoader[torch.Tensor] = StatefulDataLoader(
                Rows(), batch_size=self._batch, shuffle=True, num_workers=self._workers
            )
            return made
        return DataLoader(Rows(), self._batch, shuffle=True, num_workers=self._workers)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(), SAMPLES)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        rows = " ".join(str(int(row)) for row in batch[:, 0])
        self._say(f"step {self.global_step} {self.current_epoch} {index} {rows}")
        loss: torch.Tensor = self.layers(batch / SAMPLES).pow(2).mean()
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        if not self.trainer.sanity_checking:
            self._say(f"validated {self.global_step}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


class Ranks(LightningEnvironment):
    """Processes that are there and know each other already."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._ranks = (rank, ranks)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._ranks[1]

    def set_world_size(self, size: int) -> None:
        assert size == self._ranks[1]

    def global_rank(self) -> int:
        return self._ranks[0]

    def set_global_rank(self, rank: int) -> None:
        assert rank == self._ranks[0]

    def local_rank(self) -> int:
        return self._ranks[0]


def warm_up() -> None:
    """What is imported above is all, and the script for Accelerate."""
    importlib.import_module("tests.crash.epoch_script")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in ("portus", "portus_accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def train(
    say: Say,
    root: str,
    resume: str | None,
    meeting: str,
    rank: int,
    ranks: int,
    workers: int,
    batch: int,
    io: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Train on from ``resume``, with a checkpoint after each step; says each batch, and at the end
    a digest of the weights. meeting: a path that was never used, where ranks find each other.
    settings: of the Trainer, and the "kind" of the loader."""
    named: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0} | dict(settings)
    seed = 100 if resume else 1
    torch.manual_seed(rank + seed)
    net = Net(say, workers, batch, named.pop("kind", "plain"), seed)
    keep = ModelCheckpoint(
        Path(root, "ckpt"), filename="{step}", every_n_train_steps=1, save_top_k=-1
    )
    if ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks
        )
        named["strategy"] = DDPStrategy(cluster_environment=Ranks(rank, ranks))
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        default_root_dir=root,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=True,
        callbacks=[keep, PortusCompanion()],
        plugins=[PortusIO(**io)],
        **named,
    )
    trainer.fit(net, ckpt_path=resume)
    weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    say(f"ended {trainer.global_step} {hashlib.sha256(weights).hexdigest()}")
