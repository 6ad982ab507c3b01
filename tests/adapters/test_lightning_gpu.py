"""Lightning on a CUDA device: mixed precision with a scaler, and the device's generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

import portus
from portus_lightning import PortusIO
from tests.adapters.tiny import NO_FUSS, Net, every_step, loader, same, trainer

pytestmark = [*NO_FUSS, pytest.mark.gpu]


class OnDevice(Net):
    """The batches of ``Net`` are looked at where they are."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch).pow(2).mean()
        return loss


def run(root: Path, *, resume: Any = None) -> OnDevice:
    seed_everything(7 if resume else 1, verbose=False)
    model = OnDevice()
    fit = trainer(
        root,
        plugin=PortusIO(),
        accelerator="cuda",
        devices=1,
        precision="16-mixed",
        max_epochs=2,
        callbacks=[every_step(root, every_n_train_steps=6)],
    )
    fit.fit(model, loader(), ckpt_path=resume)
    return model


def test_mixed_precision_with_dropout_on_the_device_resumes_exactly(tmp_path: Path) -> None:
    whole = run(tmp_path)
    path = tmp_path / "ckpt" / "step=6.ckpt"
    assert portus.is_reference(path)
    loaded = torch.load(path)
    assert loaded["MixedPrecision"]["scale"] > 0
    resumed = run(tmp_path / "2", resume=path)
    assert same(dict(resumed.state_dict()), dict(whole.state_dict()))


def test_the_generator_of_the_device_is_what_it_was() -> None:
    device = torch.device("cuda", 0)
    state = portus.capture_randomness(device)
    first = torch.rand(5, device=device)
    torch.cuda.manual_seed(3)
    portus.restore_randomness(state, device)
    assert torch.equal(torch.rand(5, device=device), first)
