"""What scripts do with checkpoints, under a Trainer whose plugin is ``PortusIO``."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

from portus_lightning import PortusIO
from tests.adapters.tiny import NO_FUSS, Net, every_step, files, loader, same, trainer
from tests.unit.cli.scene import portus as command
from tests.unit.cli.scene import portus_json as document

pytestmark = NO_FUSS


class AtEachStep(Callback):
    """Calls a function after each training step, with the Trainer and the step."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.act(trainer, trainer.global_step)


# --- the moment save returns ---


def test_a_checkpoint_is_there_and_loads_the_moment_save_returns(tmp_path: Path) -> None:
    seen = []

    def look(trainer: Any, step: int) -> None:
        path = tmp_path / "ckpt" / f"{step}.ckpt"
        trainer.save_checkpoint(path)
        assert os.path.getsize(path) > 0
        for mode in ({}, {"weights_only": True, "mmap": True}, {"weights_only": False}):
            loaded = torch.load(path, **mode)  # type: ignore[arg-type]
            assert loaded["global_step"] == step
        assert same(dict(loaded["state_dict"]), dict(trainer.lightning_module.state_dict()))
        trainer.save_checkpoint(tmp_path / "ckpt" / "same.ckpt")  # the same path each time
        assert torch.load(tmp_path / "ckpt" / "same.ckpt")["global_step"] == step
        seen.append(step)

    trainer(tmp_path, callbacks=[AtEachStep(look)], enable_checkpointing=False).fit(Net(), loader())
    assert seen == [1, 2, 3, 4, 5, 6]
    assert files(tmp_path) == [*(f"{step}.ckpt" for step in seen), "same.ckpt"]


@pytest.mark.long
def test_the_state_is_the_one_at_the_save_although_training_went_on(tmp_path: Path) -> None:
    expected = {}

    def save(trainer: Any, step: int) -> None:
        model = trainer.lightning_module
        copies = {name: value.clone() for name, value in model.state_dict().items()}
        moments = trainer.optimizers[0].state_dict()["state"]
        expected[step] = copies, copy.deepcopy(moments)
        trainer.save_checkpoint(tmp_path / "ckpt" / f"{step}.ckpt")

    fit = trainer(tmp_path, callbacks=[AtEachStep(save)], enable_checkpointing=False, max_epochs=3)
    fit.fit(Net(64), loader())
    assert len(expected) == 18
    for step, (weights, moments) in expected.items():
        loaded = torch.load(tmp_path / "ckpt" / f"{step}.ckpt")
        assert same(dict(loaded["state_dict"]), weights), step
        assert same(loaded["optimizer_states"][0]["state"], moments), step


def test_a_checkpoint_equals_what_lightning_would_have_saved(tmp_path: Path) -> None:
    stock, ours = TorchCheckpointIO(), PortusIO()

    def save(trainer: Any, step: int) -> None:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint()
        stock.save_checkpoint(checkpoint, tmp_path / "stock.ckpt")
        ours.save_checkpoint(checkpoint, tmp_path / "ours.ckpt")
        ours_loaded = ours.load_checkpoint(tmp_path / "ours.ckpt")
        assert same(ours_loaded, stock.load_checkpoint(tmp_path / "stock.ckpt"))

    callbacks = [AtEachStep(save), EMAWeightAveraging(), every_step(tmp_path, monitor="loss")]
    trainer(tmp_path, plugin=None, callbacks=callbacks).fit(Net(), loader())
    ours.teardown()


# --- ModelCheckpoint ---


@pytest.mark.long
def test_top_k_and_last_and_best_work(tmp_path: Path) -> None:
    keep = every_step(tmp_path, monitor="loss", save_top_k=2, save_last=True)
    fit = trainer(tmp_path, callbacks=[keep], max_epochs=2, plugin=PortusIO())
    model = Net()
    fit.fit(model, loader())
    assert len(files(tmp_path)) == 3
    assert set(files(tmp_path)) == {os.path.basename(p) for p in [*keep.best_k_models, "last.ckpt"]}
    best = torch.load(keep.best_model_path)
    assert os.path.basename(keep.best_model_path) == f"step={best['global_step']}.ckpt"
    assert torch.load(tmp_path / "ckpt" / "last.ckpt")["global_step"] == 12
    loaded = Net.load_from_checkpoint(keep.best_model_path)
    assert same(dict(loaded.state_dict()), dict(best["state_dict"]))
    fit.validate(model, loader(shuffle=False), ckpt_path="best", verbose=False)
    assert same(dict(model.state_dict()), dict(best["state_dict"]))
    keep = every_step(tmp_path, monitor="loss", save_top_k=2, save_last=True)
    more = trainer(tmp_path, callbacks=[keep], max_epochs=3)
    more.fit(Net(), loader(), ckpt_path="last")
    assert more.global_step == 18


@pytest.mark.long
def test_save_last_as_a_link_leads_to_the_newest(tmp_path: Path) -> None:
    keep = every_step(tmp_path, save_last="link", monitor="loss", save_top_k=2)
    trainer(tmp_path, callbacks=[keep]).fit(Net(), loader())
    last = tmp_path / "ckpt" / "last.ckpt"
    assert last.is_symlink()
    assert 1 <= torch.load(last)["global_step"] <= 6
    keep = every_step(tmp_path, save_last="link", monitor="loss", save_top_k=2)
    again = trainer(tmp_path, callbacks=[keep], max_epochs=2)
    again.fit(Net(), loader(), ckpt_path=last)
    assert again.global_step == 12


@pytest.mark.long
def test_validation_time_saves_follow_the_metric(tmp_path: Path) -> None:
    keep = ModelCheckpoint(
        tmp_path / "ckpt", monitor="val", save_top_k=1, filename="{epoch}-{val:.4f}"
    )
    fit = trainer(tmp_path, callbacks=[keep, EMAWeightAveraging()], max_epochs=3)
    model = Net()
    fit.fit(model, loader(), loader(shuffle=False))
    assert len(files(tmp_path)) == 1
    best = torch.load(keep.best_model_path)
    assert f"{keep.best_model_score:.4f}" in keep.best_model_path
    assert set(best) >= {"current_model_state", "averaging_state"}
    fit.fit_loop.max_epochs = 4
    fit.fit(model, loader(), loader(shuffle=False), ckpt_path=keep.best_model_path)


class TwoOptimizers(Net):
    """Manual optimization with two optimizers, which step after each other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        for optimizer, module in zip(self.optimizers(), (self.layers, self.other), strict=True):
            optimizer.zero_grad()
            loss: torch.Tensor = module(batch / 24).pow(2).mean()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), 0.1, momentum=0.9), torch.optim.Adam(
            self.other.parameters()
        )


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize(
    "precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.long)]
)
def test_manual_optimization_with_two_optimizers_saves_and_resumes(
    tmp_path: Path, precision: Any
) -> None:
    expected = {}

    def note(trainer: Any, step: int) -> None:
        state = trainer.lightning_module.state_dict()
        expected[step] = {name: value.clone() for name, value in state.items()}

    keep = every_step(tmp_path, every_n_train_steps=2)
    fit = trainer(tmp_path, callbacks=[AtEachStep(note), keep], precision=precision)
    fit.fit(TwoOptimizers(), loader())
    assert len(files(tmp_path)) == 6
    for name in files(tmp_path):
        loaded = torch.load(tmp_path / "ckpt" / name)
        assert same(dict(loaded["state_dict"]), expected[loaded["global_step"]])
        assert len(loaded["optimizer_states"]) == 2
    keep = every_step(tmp_path, every_n_train_steps=2)
    again = trainer(tmp_path, callbacks=[keep], max_epochs=2, precision=precision)
    again.fit(TwoOptimizers(), loader(), ckpt_path=tmp_path / "ckpt" / files(tmp_path)[-1])
    assert again.global_step > 12


# --- files ---


@pytest.mark.long
def test_files_are_copied_moved_and_deleted_like_any_others(tmp_path: Path) -> None:
    trainer(tmp_path, callbacks=[every_step(tmp_path)], plugin=PortusIO()).fit(Net(), loader())
    home, away = tmp_path / "ckpt", tmp_path / "away"
    away.mkdir()
    shutil.copy(home / "step=1.ckpt", home / "copy.ckpt")
    shutil.move(home / "step=2.ckpt", away / "moved.ckpt")
    (home / "step=3.ckpt").unlink()
    os.symlink("step=4.ckpt", home / "link.ckpt")
    for path, step in [
        (home / "copy.ckpt", 1),
        (away / "moved.ckpt", 2),
        (home / "link.ckpt", 4),
    ]:
        assert torch.load(path)["global_step"] == step
        assert Net.load_from_checkpoint(path).hparams["width"] == 8
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    moved = tmp_path.with_name("elsewhere")
    assert torch.load(moved / "ckpt" / "step=5.ckpt")["global_step"] == 5
    assert torch.load(moved / "away" / "moved.ckpt")["global_step"] == 2
    assert torch.load(moved / "ckpt" / "copy.ckpt")["global_step"] == 1


def test_an_interrupted_run_keeps_what_was_asked_for(tmp_path: Path) -> None:
    def stop(trainer: Any, step: int) -> None:
        if step == 4:
            raise RuntimeError("the user's own mistake")

    keep = every_step(tmp_path, every_n_train_steps=3, save_last=True)
    with pytest.raises(RuntimeError, match="own mistake"):
        trainer(tmp_path, callbacks=[AtEachStep(stop), keep]).fit(Net(), loader())
    assert files(tmp_path) == ["last.ckpt", "step=3.ckpt"]
    assert torch.load(tmp_path / "ckpt" / "last.ckpt")["global_step"] == 3


def test_after_the_end_a_save_leaves_a_file_and_nothing_else(tmp_path: Path) -> None:
    fit = trainer(tmp_path, enable_checkpointing=False)
    model = Net()
    fit.fit(model, loader())
    fit.save_checkpoint(tmp_path / "ckpt" / "final.ckpt")
    assert os.listdir(tmp_path) == ["ckpt"]
    assert os.listdir(tmp_path / "ckpt") == ["final.ckpt"]
    assert torch.load(tmp_path / "ckpt" / "final.ckpt")["global_step"] == 6


@pytest.mark.long
def test_a_process_that_cannot_import_portus_loads_by_path(tmp_path: Path) -> None:
    keep = every_step(tmp_path, save_last=True)
    trainer(tmp_path, callbacks=[keep]).fit(Net(), loader())
    program = (
        "import sys, zipfile\n"
        "sys.modules['portus'] = sys.modules['portus_lightning'] = None\n"
        "import torch\n"
        "for mode in ({}, {'weights_only': False}, {'mmap': True}, {'map_location': 'cpu'}):\n"
        "    loaded = torch.load(sys.argv[1], **mode)\n"
        "assert zipfile.ZipFile(sys.argv[1]).testzip() is None\n"
        "print(loaded['global_step'], len(loaded['optimizer_states'][0]['state']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "ckpt" / "last.ckpt")],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6", "6"]


# --- where things are, and what is said ---


def test_the_journal_is_beside_the_checkpoints_and_these_are_as_stocks(tmp_path: Path) -> None:
    fit = trainer(tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    fit.fit(Net(), loader())
    assert sorted(os.listdir(tmp_path)) == [".portus", "lightning_logs"]
    hidden = tmp_path / ".portus"
    assert (hidden / ".gitignore").read_text() == "*\n"
    assert (hidden / "checkpoints.journal" / "lightning_logs%2Fversion_0.lines").exists()
    path = fit.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    umask = os.umask(0)
    os.umask(umask)
    assert os.stat(path).st_mode & 0o777 == 0o666 & ~umask


def test_many_fits_in_one_root_leave_one_directory_beside_those_of_stock(tmp_path: Path) -> None:
    for _ in range(4):
        trainer(tmp_path, logger=CSVLogger(tmp_path)).fit(Net(), loader())
    hidden = tmp_path / ".portus"
    journals = sorted(path.name for path in (hidden / "checkpoints.journal").iterdir())
    assert journals == [f"lightning_logs%2Fversion_{number}.lines" for number in range(4)]
    shutil.rmtree(hidden)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_dir()}
    logs = [f"lightning_logs/version_{number}" for number in range(4)]
    assert left == {"lightning_logs", *logs, *(f"{each}/checkpoints" for each in logs)}


def test_nothing_is_made_before_the_first_save(tmp_path: Path) -> None:
    trainer(tmp_path, enable_checkpointing=False).fit(Net(), loader())
    assert os.listdir(tmp_path) == []


def test_what_saves_cost_reaches_the_loggers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    keep = every_step(tmp_path)
    trainer(tmp_path, logger=logger, callbacks=[keep], log_every_n_steps=1).fit(Net(), loader())
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = rows[0].split(",")
    place = columns.index("portus/blocked_ms")
    assert {"portus/save_gb_per_s", "portus/total_ms", "portus/copied_gb"} <= set(columns)
    values = [row.split(",")[place] for row in rows[1:]]
    assert sum(value != "" for value in values) == 6
    assert all(float(value) > 0 for value in values if value)


def test_a_trainer_without_the_plugin_is_left_alone(tmp_path: Path) -> None:
    fit = trainer(tmp_path, plugin=None, callbacks=[every_step(tmp_path)])
    fit.fit(Net(), loader())
    assert os.listdir(tmp_path) == ["ckpt"]
    loaded = torch.load(tmp_path / "ckpt" / "step=6.ckpt")
    assert "portus_resume" not in loaded


def test_training_leaves_no_thread_and_no_open_pool(tmp_path: Path) -> None:
    import threading

    trainer(tmp_path, callbacks=[every_step(tmp_path)]).fit(Net(), loader())
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not [t for t in threading.enumerate() if t.name.startswith("portus")]:
            break
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name.startswith("portus")]
    held = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(n)]
    assert not [path for path in held if str(tmp_path) in path]


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


class Odd:
    """A class that ``torch.load`` makes only with ``weights_only=False``."""


class WithOddParameters(LightningModule):
    def __init__(self, odd: object) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch / 24).pow(2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_hyperparameters_of_any_class_are_saved_as_stock_does(tmp_path: Path) -> None:
    trainer(tmp_path, callbacks=[every_step(tmp_path)]).fit(WithOddParameters(Odd()), loader())
    assert len(files(tmp_path)) == 6
    loaded = torch.load(tmp_path / "ckpt" / "step=3.ckpt", weights_only=False)
    assert isinstance(loaded["hyper_parameters"]["odd"], Odd)


# --- after training ---


def test_runs_of_one_project_are_reported_and_listed_by_their_names_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And ``save_top_k=2, save_last=True`` has nothing to warn of."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.WARNING, "portus")
    names = [f"lightning_logs/version_{number}" for number in range(3)]
    for _ in names:
        keeps = ModelCheckpoint(
            save_top_k=2, save_last=True, monitor="step", mode="max", every_n_train_steps=1
        )
        trainer(tmp_path, callbacks=[keeps], logger=CSVLogger(tmp_path)).fit(Net(), loader())
    assert [each.getMessage() for each in caplog.records if "portus" in each.name] == []
    asked = command("report").err
    for name in names:
        assert repr(name) in asked
        last = f"{name}/checkpoints/last.ckpt"
        assert zipfile.is_zipfile(last)
        for said in (name, last, f"{name}/checkpoints"):
            found = document("report", said)
            assert (found["run"], found["title"]) == (name, f"{tmp_path.name}/{name}")
        assert "last.ckpt" in command("ls", f"{name}/checkpoints").out


def test_a_trainer_is_pickled_as_with_stock(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[every_step(tmp_path)])
    made.fit(Net(), loader())
    torch.save(made, tmp_path / "trainer.pt")
    found = torch.load(tmp_path / "trainer.pt", weights_only=False)
    assert found.global_step == made.global_step
    assert isinstance(found.strategy.checkpoint_io, PortusIO)
