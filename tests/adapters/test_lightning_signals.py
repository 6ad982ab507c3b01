"""SLURM ends a job: Lightning's signal handler saves while Portus is saving, and requeues the job
before it returns. So by then the file is there, whatever was interrupted (V5, V8)."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.environments import SLURMEnvironment

from portus.engine.directory.publisher import Publisher
from portus.engine.fence.fence import Fence
from portus.engine.fence.snapshot import CopyPlanner
from portus_lightning import PortusIO
from tests.adapters.tiny import BATCHES, NO_FUSS, Net, every_step, loader, same, trainer
from tests.moments import Lines, at

pytestmark = NO_FUSS

# Where locks are held, or the copy of a save is waited for.
MOMENTS = [CopyPlanner.plan, Publisher.begin, Fence._await_copy]


@pytest.fixture
def requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of SLURM; the file that tells how often it was asked to be requeued."""
    programs, said = tmp_path / "bin", tmp_path / "requeued"
    programs.mkdir()
    (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {said}\n')
    (programs / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    for name, value in (("JOB_ID", "77"), ("JOB_NAME", "train"), ("NTASKS", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    return said


def fit(root: Path, **changes: Any) -> Net:
    """Train one epoch, saving each step; from what SLURM made Lightning save, if there is any."""
    seed_everything(1, verbose=False)
    net = Net()
    plugins = [PortusIO(), SLURMEnvironment(auto_requeue=True)]
    settings = {"plugins": plugins, "callbacks": [every_step(root)]} | changes
    trainer(root, **settings).fit(net, loader(shuffle=False))
    return net


def send() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    "moment",
    [MOMENTS[0], *(pytest.param(each, marks=pytest.mark.long) for each in MOMENTS[1:])],
    ids=lambda moment: moment.__qualname__,
)
def test_what_slurm_has_lightning_save_within_a_save_is_there_when_the_job_is_requeued(
    tmp_path: Path, requeued: Path, moment: Any
) -> None:
    undisturbed = fit(tmp_path / "undisturbed")
    with at("call", moment, send):
        net = fit(tmp_path)
    assert requeued.read_text() == "requeue 77\n"
    assert same(net.state_dict(), undisturbed.state_dict())
    path = tmp_path / "hpc_ckpt_1.ckpt"
    step = torch.load(path)["global_step"]
    assert 0 < step < BATCHES
    assert fit(tmp_path).seen[0][0] == step


class Storm:
    """Sends a signal every now and then, in ours, until ``left`` of them were sent."""

    def __init__(self, seed: int, left: int) -> None:
        self._random = random.Random(seed)
        self.left = left
        self.lines = Lines(self._random.randrange(1000), self._send)

    def _send(self) -> None:
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:  # Lightning hears none yet
            self.lines.number += 1
            return
        self.left -= 1
        if self.left:
            self.lines.number += self._random.randrange(1, 2000)
        send()


def search(root: Path, seed: int, signals: int) -> None:
    epochs = 2 + signals // 10
    undisturbed = fit(root / "undisturbed", max_epochs=epochs)
    storm = Storm(seed, signals)
    with storm.lines:
        net = fit(root, max_epochs=epochs)
    assert storm.left == 0
    assert same(net.state_dict(), undisturbed.state_dict())
    paths = sorted(root.glob("hpc_ckpt_*.ckpt"))
    assert len(paths) == signals
    for path in paths:
        assert torch.load(path)["global_step"] <= epochs * BATCHES


@pytest.mark.long
def test_signals_at_any_line_of_a_run_leave_a_file_each(
    tmp_path: Path, requeued: Path, seed: int
) -> None:
    search(tmp_path, seed, 10)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_200_signals_at_any_line_of_a_run_leave_200_files(
    tmp_path: Path, requeued: Path, seed: int
) -> None:
    search(tmp_path, seed, 200)
