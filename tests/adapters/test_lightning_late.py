"""What a script sees while checkpoints of a ``ModelCheckpoint`` are on their way: as with stock."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from portus.engine.writer.image_file import ImageFile
from portus_lightning import PortusIO
from tests.adapters.tiny import BATCHES, NO_FUSS, Net, every_step, files, loader, trainer

pytestmark = NO_FUSS

LATE_S = 0.15


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit comes so much later."""
    finish = ImageFile.finish

    def slowly(file: ImageFile) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(LATE_S)
        finish(file)

    monkeypatch.setattr(ImageFile, "finish", slowly)


def steps(root: Path) -> dict[str, int]:
    return {name: torch.load(root / "ckpt" / name)["global_step"] for name in files(root)}


@pytest.mark.smoke
def test_training_goes_on_while_a_checkpoint_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit waits for the next batch."""
    begun, seen = threading.Event(), []
    finish = ImageFile.finish

    def after_the_next_batch(file: ImageFile) -> None:
        seen.append(begun.wait(60))
        finish(file)

    class Begins(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == BATCHES // 2:
                assert not (tmp_path / "ckpt" / "step=3.ckpt").exists()
                begun.set()

    monkeypatch.setattr(ImageFile, "finish", after_the_next_batch)
    keep = every_step(tmp_path, every_n_train_steps=BATCHES // 2)
    trainer(tmp_path, callbacks=[keep, Begins()]).fit(Net(), loader())
    assert seen == [True, True]
    assert steps(tmp_path) == {"step=3.ckpt": 3, "step=6.ckpt": 6}


@pytest.mark.smoke
def test_two_callbacks_that_choose_one_name_get_two_files(tmp_path: Path) -> None:
    keeps = [every_step(tmp_path, every_n_train_steps=number, filename="same") for number in (2, 4)]
    stock = tmp_path / "stock"
    trainer(tmp_path, callbacks=keeps).fit(Net(), loader())
    ours = steps(tmp_path)
    keeps = [every_step(stock, every_n_train_steps=number, filename="same") for number in (2, 4)]
    trainer(stock, plugin=None, callbacks=keeps).fit(Net(), loader())
    assert ours == steps(stock)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("top_k", [1, 2, -1])
@pytest.mark.parametrize("last", [None, True, "link"])
@pytest.mark.smoke
def test_what_is_there_at_the_end_is_what_stock_leaves(
    tmp_path: Path, top_k: int, last: Any
) -> None:
    found = {}
    for name, plugin in (("ours", PortusIO()), ("stock", None)):
        root = tmp_path / name
        by = {} if top_k == -1 else {"monitor": "step", "mode": "max"}
        keep = every_step(root, save_top_k=top_k, save_last=last, **by)
        trainer(root, plugin=plugin, callbacks=[keep]).fit(Net(), loader())
        links = [each for each in files(root) if (root / "ckpt" / each).is_symlink()]
        inodes = {os.stat(root / "ckpt" / each).st_ino for each in files(root)}
        found[name] = steps(root), links, len(inodes)
    assert found["ours"] == found["stock"]


@pytest.mark.smoke
def test_the_best_loads_within_training_and_after_it(tmp_path: Path) -> None:
    seen = []

    class Tests(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
            keep: Any = trainer.checkpoint_callback
            seen.append(torch.load(keep.best_model_path)["global_step"])

    keep = ModelCheckpoint(
        tmp_path / "ckpt", filename="{step}", monitor="val", save_on_train_epoch_end=False
    )
    made = trainer(tmp_path, callbacks=[keep, Tests()], max_epochs=2)
    model = Net()
    made.fit(model, loader(), loader(shuffle=False))
    assert seen[0] == BATCHES
    made.validate(model, loader(shuffle=False), ckpt_path="best")
    assert torch.load(keep.best_model_path)["global_step"] in (BATCHES, 2 * BATCHES)


@pytest.mark.smoke
def test_a_checkpoint_that_the_script_saves_is_there_when_that_returns(tmp_path: Path) -> None:
    """As Ray's and MLflow's callbacks do it: into a directory that is moved away."""
    kept = tmp_path / "kept"
    kept.mkdir()

    class Reports(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            place = tmp_path / f"temporary-{trainer.global_step}"
            place.mkdir()
            trainer.save_checkpoint(place / "checkpoint.ckpt")
            assert os.path.getsize(place / "checkpoint.ckpt") > 0
            assert os.listdir(place) == ["checkpoint.ckpt"]
            shutil.move(place, kept / str(trainer.global_step))

    trainer(tmp_path, callbacks=[Reports()], enable_checkpointing=False).fit(Net(), loader())
    for step in range(1, BATCHES + 1):
        assert os.listdir(kept / str(step)) == ["checkpoint.ckpt"]
        assert torch.load(kept / str(step) / "checkpoint.ckpt")["global_step"] == step


@pytest.mark.smoke
def test_python_code_that_opens_or_lists_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    seen = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step:
                assert f"step={trainer.global_step}.ckpt" in os.listdir(tmp_path / "ckpt")
                seen.append(trainer.global_step)

    trainer(tmp_path, callbacks=[every_step(tmp_path), Looks()]).fit(Net(), loader())
    assert seen == list(range(1, BATCHES))
