"""``PortusCheckpoint``: Lightning's own ``ModelCheckpoint``, but for when it saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import portus
from portus.engine.fence import fence
from portus_lightning import PortusCheckpoint
from tests.adapters.tiny import NO_FUSS, Net, files, loader, trainer

pytestmark = NO_FUSS


def checkpoint(root: Path, **changes: Any) -> PortusCheckpoint:
    settings: dict[str, Any] = {"dirpath": root / "ckpt", "filename": "{step}", "save_top_k": -1}
    return PortusCheckpoint(**(settings | changes))


def test_it_saves_at_the_steps_that_the_cadence_says_and_goes_on_with_it(tmp_path: Path) -> None:
    # As if a save cost one step, a bound of one half is an interval of two; then it is measured.
    first = checkpoint(tmp_path, max_overhead=0.5, save_last="link")
    trainer(tmp_path, callbacks=[first], max_steps=3).fit(Net(), loader())
    assert isinstance(first, ModelCheckpoint)
    assert files(tmp_path) == ["last.ckpt", "step=2.ckpt"]
    state = torch.load(tmp_path / "ckpt" / "step=2.ckpt")["callbacks"][first.state_key]
    assert state["portus_cadence"]["left"] == 2
    assert first.cadence is None, "it counts no more"
    assert fence._listeners == ()
    assert not fence._hooks

    again = checkpoint(tmp_path, max_overhead=0.5, save_last="link")
    trainer(tmp_path, callbacks=[again], max_steps=5).fit(Net(), loader(), ckpt_path="last")
    assert {"step=2.ckpt", "step=4.ckpt"} < set(files(tmp_path))


def test_accumulated_batches_are_one_step_and_the_best_are_kept(tmp_path: Path) -> None:
    saves = checkpoint(tmp_path, every=2, save_top_k=1, monitor="loss", mode="max")
    trainer(tmp_path, callbacks=[saves], accumulate_grad_batches=2, max_epochs=2, max_steps=6).fit(
        Net(), loader()
    )
    assert len(files(tmp_path)) == 1
    assert saves.best_model_path.endswith(files(tmp_path)[0])
    assert files(tmp_path)[0] in ("step=2.ckpt", "step=4.ckpt", "step=6.ckpt")


def test_what_makes_no_sense_is_refused_before_training(tmp_path: Path) -> None:
    for changes, said in (
        ({"max_overhead": 0}, "max_overhead: expected a share"),
        ({"every": "often"}, "every: expected a time"),
        ({"every_n_epochs": 1}, "every_n_epochs: PortusCheckpoint saves when `every` says"),
    ):
        with pytest.raises(portus.UsageError, match=said):
            checkpoint(tmp_path, **changes)
    with pytest.raises(portus.UsageError, match=r"add plugins=\[PortusIO\(\)\], or set every"):
        trainer(tmp_path, plugin=None, callbacks=[checkpoint(tmp_path)]).fit(Net(), loader())


def test_without_portus_an_interval_of_ones_own_is_kept_all_the_same(tmp_path: Path) -> None:
    saves = checkpoint(tmp_path, every=4)
    trainer(tmp_path, plugin=None, callbacks=[saves]).fit(Net(), loader())
    assert files(tmp_path) == ["step=4.ckpt"]


def test_with_portus_turned_off_it_goes_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_DISABLE", "1")
    saves = checkpoint(tmp_path, max_overhead=0.9)
    trainer(tmp_path, callbacks=[saves], max_epochs=2).fit(Net(), loader())
    assert not (tmp_path / "ckpt").exists(), "the first one is due in ten minutes"


@pytest.mark.long
def test_it_is_of_the_copy_of_lightning_that_the_program_has() -> None:
    program = (
        "import pytorch_lightning as pl, portus_lightning\n"
        "made = portus_lightning.PortusCheckpoint(every=3, save_top_k=-1)\n"
        "assert isinstance(made, pl.callbacks.ModelCheckpoint)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env=environment)
