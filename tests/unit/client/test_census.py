"""What Lightning really puts into a checkpoint, through the codec and back."""

from __future__ import annotations

import pathlib
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from portus.client.state.state import flatten, unflatten
from tests.unit.client import kinds
from tests.unit.client.same import assert_same, copies, key_paths

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:Detected call of",
    "ignore:Attribute .* nn.Module",
)


class Model(pl.LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), options["act"](), nn.Linear(8, 1)
        )
        self.tied = self.net[0].weight

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedulers = torch.optim.lr_scheduler
        return [optimizer], [
            {"scheduler": schedulers.OneCycleLR(optimizer, 0.1, total_steps=9), "interval": "step"},
            {"scheduler": schedulers.ReduceLROnPlateau(optimizer), "monitor": "loss"},
            schedulers.CosineAnnealingWarmRestarts(optimizer, 2),
            schedulers.LambdaLR(optimizer, kinds.schedule),
        ]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"seen": {1, 2}, "at": torch.tensor(3), (0, 1): None}


HPARAMS = {
    "root": pathlib.Path("/data/x"),
    "dtype": torch.bfloat16,
    "act": nn.ReLU,
    "color": kinds.Color.RED,
    "betas": (0.9, 0.999),
    "config": kinds.Config(3),
    "sizes": torch.Size([1, 2]),
    "cap": float("inf"),
    "nested": {"deep": [{"list": [1, "a", None]}]},
}


def real_checkpoint(root: pathlib.Path) -> dict[str, Any]:
    callbacks = [
        ModelCheckpoint(root, monitor="loss", save_top_k=2, every_n_train_steps=1, save_last=True),
        EarlyStopping("loss", patience=5),
        WeightAveraging(avg_fn=lambda average, new, count: (average + new) / 2),
    ]
    trainer = pl.Trainer(
        default_root_dir=root,
        max_steps=2,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(**HPARAMS), DataLoader(TensorDataset(torch.randn(12, 4)), 4))
    return dict(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))


def census(value: object, found: Counter[type]) -> Counter[type]:
    found[type(value)] += 1
    if isinstance(value, dict):
        for key, item in value.items():
            found[type(key)] += 1
            census(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            census(item, found)
    return found


def test_a_real_lightning_checkpoint_comes_back(tmp_path: pathlib.Path) -> None:
    checkpoint = real_checkpoint(tmp_path)
    found = census(checkpoint, Counter())
    print({kind.__name__: count for kind, count in found.most_common()})
    assert found[torch.Tensor] > 20
    assert len(found) >= 15

    flat = flatten(checkpoint)
    back: Any = unflatten(flat.tree, flat.tensors, copies(flat))
    assert_same(checkpoint, back)
    assert back["hyper_parameters"]["act"] is nn.ReLU
    assert back["state_dict"]["tied"].data_ptr() == back["state_dict"]["net.0.weight"].data_ptr()

    paths = key_paths(flat.tree)
    assert len(set(paths)) == len(paths)
    assert {"state_dict.net.0.weight", "optimizer_states.0.state.0.exp_avg", "epoch"} <= set(paths)
    Model(**HPARAMS).load_state_dict(back["state_dict"])


def test_the_weights_of_a_real_checkpoint_load_alone(tmp_path: pathlib.Path) -> None:
    flat = flatten(real_checkpoint(tmp_path))
    used = {spec.storage for spec in flat.tensors if spec.name.startswith("state_dict.")}
    storages = [s if i in used else None for i, s in enumerate(copies(flat))]
    back: Any = unflatten(
        flat.tree, flat.tensors, storages, lambda path: path.startswith("state_dict.")
    )
    assert [*back] == ["state_dict"]
    Model(**HPARAMS).load_state_dict(back["state_dict"])
