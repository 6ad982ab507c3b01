"""Callbacks, loggers, and who saves later find whole files wherever Lightning lets them look."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.utilities import _scan_checkpoints

import portus
from tests.adapters.tiny import NO_FUSS, Net, every_step, files, loader, trainer

pytestmark = NO_FUSS


def top_three(root: Path, **changes: Any) -> ModelCheckpoint:
    settings: dict[str, Any] = {"save_top_k": 3, "monitor": "loss", "save_last": True}
    return every_step(root, **(settings | changes))


class Uploader(Logger):
    """Looks at checkpoint files as Lightning's WandbLogger and MLFlowLogger do."""

    name, version = "uploader", "0"

    def __init__(self, where: Path, log_model: object) -> None:
        super().__init__()
        self.where, self._log_model = where, log_model
        self._callbacks: dict[int, ModelCheckpoint] = {}
        self._logged: dict[str, float] = {}
        where.mkdir()

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        if self._log_model == "all":
            self._upload(checkpoint_callback)
        else:
            self._callbacks[id(checkpoint_callback)] = checkpoint_callback

    def finalize(self, status: str) -> None:
        for each in self._callbacks.values():
            self._upload(each)

    def _upload(self, callback: ModelCheckpoint) -> None:
        for time, path, _, _ in _scan_checkpoints(callback, self._logged):
            shutil.copy(path, self.where / os.path.basename(path))
            self._logged[path] = time


def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``Uploader`` pass for a logger of Lightning: of those it is known when they upload."""
    monkeypatch.setattr(Uploader, "__module__", "lightning.pytorch.loggers.wandb")


@pytest.mark.parametrize("of_lightning", [True, False])
@pytest.mark.parametrize("log_model", [pytest.param(True, marks=pytest.mark.long), "all"])
def test_loggers_upload_real_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_model: object, of_lightning: bool
) -> None:
    if of_lightning:
        known(monkeypatch)
    uploader = Uploader(tmp_path / "uploaded", log_model)
    keep = top_three(tmp_path)
    says = pytest.warns(UserWarning, match="looks at each checkpoint as it is saved")
    with says if log_model == "all" or not of_lightning else contextlib.nullcontext():
        trainer(tmp_path, callbacks=[keep], logger=uploader).fit(Net(), loader())
    best = {os.path.basename(path) for path in keep.best_k_models}
    assert best <= set(os.listdir(uploader.where))
    for each in uploader.where.iterdir():
        assert torch.load(each, weights_only=False)["global_step"] >= 1


class Copier(Callback):
    """A user's callback: copies the best and the last, and saves another one, at the end."""

    def __init__(self, where: Path) -> None:
        self.where = where
        where.mkdir()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        keep: Any = trainer.checkpoint_callback
        shutil.copy(keep.best_model_path, self.where / "best.ckpt")
        shutil.copy(keep.last_model_path, self.where / "last.ckpt")
        trainer.save_checkpoint(self.where / "own.ckpt")
        steps = [torch.load(each)["global_step"] for each in self.where.iterdir()]
        assert len(steps) == 3


def test_a_callback_that_copies_at_the_end_finds_all_and_order_is_kept(
    tmp_path: Path,
) -> None:
    copier = Copier(tmp_path / "copies")
    fit = trainer(tmp_path, callbacks=[copier, top_three(tmp_path)])
    before = list(fit.callbacks)  # type: ignore[attr-defined]
    fit.fit(Net(), loader())
    assert sorted(os.listdir(copier.where)) == ["best.ckpt", "last.ckpt", "own.ckpt"]
    assert fit.callbacks == before  # type: ignore[attr-defined]


class Looks(Net):
    """A module that looks at the newest checkpoint as soon as it is saved."""

    def on_validation_end(self) -> None:
        keep: Any = self.trainer.checkpoint_callback
        if keep.best_model_path:
            self.found.append((self.global_step, os.path.getsize(keep.best_model_path) > 0))

    def on_fit_start(self) -> None:
        self.found: list[tuple[int, bool]] = []


def test_a_module_that_looks_after_validation_finds_the_checkpoint_of_it(tmp_path: Path) -> None:
    keep = ModelCheckpoint(
        tmp_path / "ckpt", monitor="val", save_top_k=-1, save_on_train_epoch_end=False
    )
    model = Looks()
    fit = trainer(tmp_path, callbacks=[keep], max_epochs=3)
    fit.fit(model, loader(), loader(shuffle=False))
    assert [step for step, _ in model.found] == [6, 12, 18]
    assert all(there for _, there in model.found)


def test_what_is_saved_after_the_end_is_there_when_it_returns(tmp_path: Path) -> None:
    fit = trainer(tmp_path, callbacks=[top_three(tmp_path)])
    model = Net()
    fit.fit(model, loader())
    path = tmp_path / "somewhere" / "final.ckpt"
    for _ in range(2):
        fit.save_checkpoint(path)
        assert os.listdir(path.parent) == ["final.ckpt"]
    found = Net.load_from_checkpoint(path).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value)


def test_a_save_after_the_end_that_fails_says_so(tmp_path: Path) -> None:
    fit = trainer(tmp_path, callbacks=[top_three(tmp_path)])
    fit.fit(Net(), loader())
    (tmp_path / "file").touch()
    with pytest.raises(portus.MediumError, match="cannot make the directory"):
        fit.save_checkpoint(tmp_path / "file" / "final.ckpt")


class Stop(Callback):
    """Training stops after three steps, in some way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and self.how == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        elif trainer.global_step == 3:
            raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model")
@pytest.mark.filterwarnings("ignore:.*no last checkpoint available")
@pytest.mark.parametrize("how", ["Ctrl-C", "error"])
def test_after_an_end_that_is_not_normal_all_is_there_and_so_is_what_is_saved_later(
    tmp_path: Path, how: str
) -> None:
    late = OnExceptionCheckpoint(tmp_path / "late")
    keep = every_step(tmp_path)
    fit = trainer(tmp_path, callbacks=[late, Stop(how), keep])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((SystemExit, ZeroDivisionError)):
            fit.fit(Net(), loader())
    finally:
        signal.signal(signal.SIGINT, before)
    assert torch.load(late.ckpt_path, weights_only=False)["global_step"] == 3
    for name in files(tmp_path):
        assert torch.load(tmp_path / "ckpt" / name)["global_step"] in (1, 2, 3)
    fit.save_checkpoint(tmp_path / "late" / "more.ckpt")
    assert torch.load(tmp_path / "late" / "more.ckpt")["global_step"] == 3
