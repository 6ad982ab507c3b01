"""What leaves a run of Lightning is a real file: for callbacks, loggers, and who saves later."""

from __future__ import annotations

import contextlib
import os
import shlex
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
from portus_lightning import PortusIO
from tests.adapters.launching import run_program
from tests.adapters.tiny import NO_FUSS, Net, every_step, files, loader, trainer

pytestmark = NO_FUSS


def top_three(root: Path, **changes: Any) -> ModelCheckpoint:
    settings: dict[str, Any] = {"save_top_k": 3, "monitor": "loss", "save_last": True}
    return every_step(root, **(settings | changes))


def references(directory: Path) -> list[str]:
    return [name for name in sorted(os.listdir(directory)) if portus.is_reference(directory / name)]


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
    says = pytest.warns(UserWarning, match="uploads each checkpoint as it is saved")
    with says if log_model == "all" or not of_lightning else contextlib.nullcontext():
        trainer(tmp_path, callbacks=[keep], logger=uploader).fit(Net(), loader())
    best = {os.path.basename(path) for path in keep.best_k_models}
    assert best <= set(os.listdir(uploader.where))
    assert references(uploader.where) == []
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
        assert references(self.where) == []


def test_a_callback_that_copies_at_the_end_gets_real_files_and_order_is_kept(
    tmp_path: Path,
) -> None:
    copier = Copier(tmp_path / "copies")
    fit = trainer(tmp_path, callbacks=[copier, top_three(tmp_path)])
    before = list(fit.callbacks)  # type: ignore[attr-defined]
    fit.fit(Net(), loader())
    assert sorted(os.listdir(copier.where)) == ["best.ckpt", "last.ckpt", "own.ckpt"]
    assert references(copier.where) == []
    assert fit.callbacks == before  # type: ignore[attr-defined]


def test_at_the_end_all_are_real_best_and_last_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    replace = os.replace

    def noted(source: Any, target: Any) -> None:
        if os.path.dirname(source) == str(tmp_path / "ckpt"):  # where real files are written
            order.append(os.path.basename(target))
        replace(source, target)

    keep = top_three(tmp_path)
    fit = trainer(tmp_path, callbacks=[keep])

    class Watch(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            monkeypatch.setattr(os, "replace", noted)

    fit.callbacks.insert(0, Watch())  # type: ignore[attr-defined]
    fit.fit(Net(), loader())
    assert references(tmp_path / "ckpt") == []
    expected = [os.path.basename(path) for path in (keep.best_model_path, keep.last_model_path)]
    assert order[:2] == expected
    assert sorted(order) == files(tmp_path)


def test_a_resumed_run_makes_real_what_it_saved_before(tmp_path: Path) -> None:
    first = trainer(
        tmp_path, callbacks=[every_step(tmp_path)], plugin=PortusIO(materialize="none"), max_steps=2
    )
    first.fit(Net(), loader())
    assert references(tmp_path / "ckpt") == ["step=1.ckpt", "step=2.ckpt"]
    second = trainer(tmp_path, callbacks=[every_step(tmp_path)], max_steps=4)
    second.fit(Net(), loader(), ckpt_path=tmp_path / "ckpt" / "step=2.ckpt")
    assert len(files(tmp_path)) == 4
    assert references(tmp_path / "ckpt") == []


def test_what_there_is_no_time_for_is_listed_once_with_its_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = every_step(tmp_path, save_top_k=-1)
    fit = trainer(tmp_path, callbacks=[keep], plugin=PortusIO(materialize_within=0))
    fit.fit(Net(), loader())
    assert len(references(tmp_path / "ckpt")) == 6
    [said] = [each.getMessage() for each in caplog.records if "references" in each.getMessage()]
    for name in files(tmp_path):
        [line] = [line for line in said.splitlines() if name in line]
        assert line.startswith(f"portus materialize {shlex.quote(f'{tmp_path}/ckpt/{name}')}  # ")
        assert "bytes; it was not done within 0 s" in line
    assert os.path.basename(keep.best_model_path) in said.splitlines()[1]


@pytest.mark.long
@pytest.mark.parametrize("materialize", ["end", "none"])
def test_what_is_saved_after_the_end_is_a_real_file(tmp_path: Path, materialize: Any) -> None:
    fit = trainer(
        tmp_path, callbacks=[top_three(tmp_path)], plugin=PortusIO(materialize=materialize)
    )
    model = Net()
    fit.fit(model, loader())
    path = tmp_path / "somewhere" / "final.ckpt"
    for _ in range(2):
        fit.save_checkpoint(path)
        assert portus.is_reference(path) == (materialize == "none")
    assert os.listdir(path.parent) == ["final.ckpt"]
    found = Net.load_from_checkpoint(path).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value)


def test_a_save_after_the_end_that_fails_says_so(tmp_path: Path) -> None:
    fit = trainer(tmp_path, callbacks=[top_three(tmp_path)])
    fit.fit(Net(), loader())
    (tmp_path / "file").touch()
    with pytest.raises(portus.MediumError, match="cannot write"):
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
def test_after_an_end_that_is_not_normal_saves_are_real_and_the_rest_is_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
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
    assert references(tmp_path / "late") == []
    [said] = [each.getMessage() for each in caplog.records if "references" in each.getMessage()]
    found = references(tmp_path / "ckpt")
    assert found
    for name in found:
        assert f"{tmp_path}/ckpt/{name}" in said
    fit.save_checkpoint(tmp_path / "late" / "more.ckpt")
    assert references(tmp_path / "late") == []


KILLED_AT_THE_END = """
import os, sys
from pathlib import Path
from tests.adapters.test_lightning_leave import run_to_its_end
import portus.client.leaving.in_turn as in_turn

in_turn.give_back = lambda pool: os.kill(os.getpid(), 9)
run_to_its_end(Path(sys.argv[1]))
"""


def run_to_its_end(root: Path) -> None:
    made = trainer(root, callbacks=[every_step(root, save_last=True)])
    made.fit(Net(), loader(), ckpt_path="last")


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_a_run_that_died_after_its_files_became_real_leaves_no_pool_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    run_program(KILLED_AT_THE_END, str(tmp_path), code=-signal.SIGKILL)
    assert references(tmp_path / "ckpt") == []
    assert list(tmp_path.glob(".portus/*.portus"))
    run_to_its_end(tmp_path)
    assert not list(tmp_path.glob(".portus/*.portus")), "nothing leads there any more"
