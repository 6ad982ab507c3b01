"""A training that goes on in a copy of its directory, as people do with backups and experiments."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from portus_lightning import PortusIO
from tests.adapters.tiny import NO_FUSS, Net, every_step, files, loader, trainer

pytestmark = NO_FUSS


def fit(run: Path, epochs: int, resume: Path | None = None) -> None:
    """As in a process of its own: nothing that was learnt about the place before is known."""
    plugin = PortusIO()
    training = trainer(
        run, plugin=plugin, max_epochs=epochs, callbacks=[every_step(run, save_top_k=-1)]
    )
    training.fit(Net(), loader(), loader(shuffle=False), ckpt_path=resume and str(resume))


def steps(run: Path) -> dict[str, int]:
    found = {}
    for name in files(run):
        state = torch.load(run / "ckpt" / name, weights_only=False)
        found[name] = state["global_step"]
    return found


@pytest.mark.long
def test_all_checkpoints_load_after_a_resume_in_a_copy(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "run2"
    fit(run, 1)
    before = steps(run)
    assert len(before) == 6
    subprocess.run(["cp", "-r", run, copy], check=True)
    shutil.rmtree(run)
    fit(copy, 2, copy / "ckpt" / max(before, key=before.__getitem__))
    after = steps(copy)
    assert before.items() < after.items()
    assert sorted(after.values()) == list(range(1, 13))


@pytest.mark.parametrize("resumed", ["away", pytest.param("run", marks=pytest.mark.long)])
def test_a_run_that_is_renamed_while_it_trains_resumes_with_all(
    tmp_path: Path, resumed: str
) -> None:
    run, away = tmp_path / "run", tmp_path / "away"

    class Renames(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            if trainer.global_step == 3:  # checkpoints are saved after all other callbacks
                run.rename(away)

    training = trainer(
        run,
        plugin=PortusIO(),
        callbacks=[every_step(run, save_top_k=-1), Renames()],
    )
    training.fit(Net(), loader(), loader(shuffle=False))
    assert sorted(steps(away).values()) == [1, 2]
    assert sorted(steps(run).values()) == [3, 4, 5, 6]
    fit(tmp_path / resumed, 2, run / "ckpt" / "step=6.ckpt")
    found = [*steps(away).values(), *steps(run).values()]
    assert sorted(found) == list(range(1, 13))
