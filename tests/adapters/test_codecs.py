"""Objects of registered classes, and streams, in what Lightning and Accelerate save."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import portus
import portus_accelerate
from portus.client.state import codecs
from portus_lightning import PortusIO
from tests.unit.client.kinds import Replay
from tests.unit.client.same import assert_same


def state_of(step: int) -> dict[str, Any]:
    return {
        "buffer": Replay(torch.full((5,), float(step)), [step]),
        "log": io.BytesIO(b"%d" % step),
    }


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.found: Any = None

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2, 2)), num_workers=0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = state_of(self.global_step)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["mine"]


class ReadsAtOnce(Callback):
    """Loads the newest checkpoint while training goes on."""

    found: Any = None

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        path = Path(trainer.default_root_dir) / "ckpt" / "last.ckpt"
        if path.exists():
            self.found = torch.load(path, weights_only=False)["mine"]


def fit(root: Path, epochs: int, resume: str | None = None) -> tuple[Net, ReadsAtOnce]:
    module, reader = Net(), ReadsAtOnce()
    keep = ModelCheckpoint(root / "ckpt", save_last=True, save_on_train_epoch_end=True)
    trainer: Any = Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=root, logger=False,
        callbacks=[keep, reader], plugins=[PortusIO()], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=resume, weights_only=False)  # torch has it so for streams
    return module, reader


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")
def test_lightning_saves_them_and_goes_on_from_a_reference_and_from_a_real_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, reader = fit(tmp_path, 2)
    assert_same(state_of(2), reader.found)  # a reference then
    last = tmp_path / "ckpt" / "last.ckpt"
    assert not portus.is_reference(last)
    assert torch.load(last, weights_only=False)["mine"]["buffer"][codecs.MARK] == "tests.Replay"
    module, _ = fit(tmp_path, 3, str(last))
    assert_same(state_of(4), module.found)


class Held:
    """An object that a script registers for checkpointing."""

    def __init__(self) -> None:
        self.state: Any = state_of(1)

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_accelerate_saves_them_and_goes_on_from_references_and_from_real_files(
    tmp_path: Path,
) -> None:
    for end in (False, True):
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
        portus_accelerate.enable(accelerator, model="net")
        accelerator.prepare(torch.nn.Linear(2, 2))
        held = Held()
        accelerator.register_for_checkpointing(held)
        file = tmp_path / "one" / "custom_checkpoint_0.pkl"
        if not file.exists():
            accelerator.save_state(str(tmp_path / "one"))
            assert portus.is_reference(file)
        assert portus.is_reference(file) is not end
        held.state = None
        accelerator.load_state(str(tmp_path / "one"))
        assert_same(state_of(1), held.state)
        accelerator.end_training()
    assert codecs.is_stand_in(torch.load(file, weights_only=False)["buffer"])
