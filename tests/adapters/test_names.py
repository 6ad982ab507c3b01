"""Directories of any name: where stock Lightning and Accelerate save, they do with Portus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

import portus_accelerate
from portus_lightning import PortusIO

NAMES = {
    "72 Chinese characters": "检" * 72,
    "no UTF-8": os.fsdecode(b"caf\xe9\xff"),
    "255 bytes that are no UTF-8": os.fsdecode(b"\xff" * 255),
    "newline": " -a\nb ",
}
each_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


@each_name
@pytest.mark.filterwarnings("ignore:(?s)Checkpoint directory.*not empty:UserWarning")
def test_fit_saves_to_a_directory_of_any_name_and_resumes(tmp_path: Path, name: str) -> None:
    directory = os.path.join(tmp_path, name)
    for epochs in (1, 2):
        _trainer(directory, epochs).fit(
            BoringModel(), ckpt_path="last" if epochs == 2 else None, weights_only=False
        )
    made = [each for each in os.listdir(directory) if each.endswith(".ckpt")]
    assert len(made) == 3
    for each in made:
        assert torch.load(os.path.join(directory, each), weights_only=False)["state_dict"]


def _trainer(directory: str, epochs: int) -> Any:
    return lightning.Trainer(
        default_root_dir=os.path.dirname(directory),
        max_epochs=epochs,
        limit_train_batches=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        plugins=[PortusIO()],
        callbacks=[ModelCheckpoint(dirpath=directory, save_top_k=-1, save_last=True)],
    )


@each_name
def test_save_state_and_load_state_take_a_directory_of_any_name(tmp_path: Path, name: str) -> None:
    directory = os.path.join(tmp_path, name)
    accelerator = accelerate.Accelerator(cpu=True)
    portus_accelerate.enable(accelerator)
    model = accelerator.prepare(torch.nn.Linear(3, 3))
    before = model.weight.detach().clone()
    accelerator.save_state(directory, safe_serialization=False)
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(directory)
    assert torch.equal(model.weight, before)
    assert "pytorch_model.bin" in os.listdir(directory)
    accelerator.end_training()
